"""Shrinking and growing a job over HTTP, while it goes on refitting.

    python examples/membership_api.py

One trainer and two engines; engine-1 is taken out, then two engines come in by one change. The same by hand, with the url
and the token that `elastic-reshard supervisor` was given ($ELASTIC_RESHARD_TOKEN), or has written into the runtime folder:

    curl -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" \\
         -X POST "$URL/v1/groups/shrink?wait=20" -d '{"groups": ["engine-1"], "within": 10}'

    curl -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" \\
         -X POST "$URL/v1/grow?wait=30" -d '{"name": "two-more", "groups": 2, "within": 30}'

    curl -H "Authorization: Bearer $TOKEN" "$URL/v1/groups"

200: done. 202: not yet, the body says who is missing: send the same again. A shrink or a grow that is repeated, after a lost
answer too, begins nothing anew. `grow` starts no process: it holds who joins until so many groups are there, and admits them
together; on Ray, `on_ray.Groups` starts them.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

import httpx
import torch

import elastic_reshard as er

ROWS, COLUMNS = 500, 64


def layout() -> er.ModelLayout:
    """One matrix, whole on the one rank of every group."""
    return er.ModelLayout(
        {"weight": er.TensorLayout((ROWS, COLUMNS), "float32", er.Mesh.arange((1,)), (er.Replicate(),))}
    )


def engine(name: str, url: str, runtime: str) -> None:
    """Installs whatever is newest until it is asked to leave."""
    weights = {"weight": torch.zeros(ROWS, COLUMNS)}
    with er.join(
        url, name=name, role="destination", group=er.Group(name, 1, 0), tensors=weights, layout=layout(), runtime=runtime,
    ) as member:  # fmt: skip
        for event in member.watch():
            if event.kind == "installable":
                member.install(timeout=30)
            elif event.kind == "leave":
                return


def main() -> None:
    """Run the story."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as runtime, er.Supervisor.local(runtime=runtime) as supervisor:
        processes: list[BaseProcess] = []

        def start(*names: str) -> None:
            for name in names:
                process = context.Process(target=engine, args=(name, supervisor.url, runtime))
                process.start()
                processes.append(process)

        api = httpx.Client(
            base_url=supervisor.url,
            headers={"Authorization": f"Bearer {supervisor.token}"},
            timeout=60,
            trust_env=False,
        )

        def ask(method: str, path: str, **body: Any) -> Any:
            answer = api.request(method, path, json=body or None)
            print(f"{method} {path.partition('?')[0]} {answer.status_code}", flush=True)
            return answer.raise_for_status().json()

        def serving(version: int, *names: str) -> None:
            """Wait until these engines, and no others, serve a version."""
            while True:
                groups = {n: g for n, g in api.get("/v1/groups").json().items() if "destination" in g["roles"]}
                if {n for n, g in groups.items() if g["serving"] == version} == set(names) == set(groups):
                    print(f"version {version} is served by {', '.join(sorted(groups))}", flush=True)
                    return
                revision = api.get("/v1/view").json()["revision"]
                api.get("/v1/view", params={"after": revision, "wait": 0.2})

        start("engine-0", "engine-1")
        weights = {"weight": torch.zeros(ROWS, COLUMNS)}
        with api, er.join(
            supervisor.url, name="trainer", role="source", group=er.Group("trainer", 1, 0), tensors=weights, layout=layout(),
            runtime=runtime,
        ) as trainer:  # fmt: skip
            trainer.publish(label="step-1").wait("committed")
            serving(1, "engine-0", "engine-1")

            shrunk = ask("POST", "/v1/groups/shrink?wait=20", groups=["engine-1"], within=10)
            print(
                f"done: {shrunk['done']}, out: {[member.partition('@')[0] for member in shrunk['members']]}", flush=True
            )
            trainer.publish(label="step-2").wait("committed")
            serving(2, "engine-0")

            # Who is to come in is started by whoever manages processes; the grow makes one change of it.
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(ask, "POST", "/v1/grow?wait=30", name="two-more", groups=2, within=30)
                start("engine-2", "engine-3")
                grown = asked.result()
            print(f"done: {grown['done']}, in: {sorted(grown['admitted'])}", flush=True)
            trainer.publish(label="step-3").wait("committed")
            serving(3, "engine-0", "engine-2", "engine-3")

            names = [name for name in ask("GET", "/v1/groups") if name != "trainer"]
            ask("POST", "/v1/groups/shrink?wait=20", groups=names, within=10)
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
