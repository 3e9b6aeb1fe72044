"""Where an inference framework calls `join`, `watch`, `install` and `leave`, and a trainer `join` and `publish`.

    python examples/integrate_engine.py http
    python examples/integrate_engine.py ray

`Engine` stands for the framework's own: it holds weights and answers requests. `Updatable` is all that is added. It is driven
from outside, over HTTP (`serve`: an engine that is a server) or by Ray (`Updatable` itself as an actor): when a version is
there, pause, update, resume. Requests that come meanwhile wait; none is answered with two versions mixed.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import httpx
import torch

import elastic_reshard as er
from elastic_reshard.errors import NotAMember

WIDTH = 256
JOB = "integrate"


class Engine:
    """The framework's own: weights, a loop that can be paused, and answers that are of one version only."""

    def __init__(self) -> None:
        self.weights = {name: torch.zeros(WIDTH, WIDTH) for name in ("up", "down")}
        self.turn = threading.Lock()  # held while a step of the model runs, and while it is paused

    def generate(self, prompt: float) -> list[float]:
        """Every distinct value that the weights give for a prompt: one, unless versions were mixed."""
        with self.turn:
            return sorted({float(v) for w in self.weights.values() for v in (prompt * w).unique()})

    def pause(self) -> None:
        """Returns when no step runs any more; the next waits for `resume`."""
        self.turn.acquire()

    def resume(self) -> None:
        """Go on."""
        self.turn.release()


# -- what a framework's author adds: about thirty lines


def layout() -> er.ModelLayout:
    """How this rank's share lies in the whole model; of DTensors it is known."""
    whole = er.TensorLayout((WIDTH, WIDTH), "float32", er.Mesh.arange((1,)), (er.Replicate(),))
    return er.ModelLayout({"up": whole, "down": whole})


class Updatable(Engine):
    """An engine that takes part in a job. join: `er.join` with the address, or `on_ray.join`."""

    def __init__(self, join: Callable[..., er.Member]) -> None:
        super().__init__()
        seat = er.Group("engine", size=1, rank=0)  # a tensor-parallel engine: each rank with its own
        self.member = join(name="engine-0", role="destination", group=seat, tensors=self.weights, layout=layout())
        self.ready, self.leaving, self.lost = 0, False, ""
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        try:
            for event in self.member.watch():  # level, not edge: begins with what is true
                if event.kind == "installable":
                    self.ready = event.weight_version
                elif event.kind == "leave":
                    self.leaving = True
        except NotAMember as error:  # put out unasked: it may serve on, but gets nothing new until it is started again
            self.lost = str(error)

    def state(self) -> dict[str, Any]:
        """For whoever drives: what it serves, what it could, whether it was asked to leave, why it was put out."""
        return {"serves": self.member.weight_version, "ready": self.ready, "leaving": self.leaving, "lost": self.lost}

    def update(self) -> dict[str, Any]:
        """While paused: take the newest version. All ranks of a group call it; one verdict for all. GroupBroken: do not
        resume, update again."""
        return dict(self.member.install(timeout=30))

    def leave(self) -> None:
        """It goes in good order."""
        self.member.leave()


# -- driven over HTTP


def serve(url: str, runtime: str, told: Connection) -> None:
    """A process that is an HTTP engine: POST /pause, /update, /resume, /generate, /state, /leave."""
    engine = Updatable(lambda **given: er.join(url, runtime=runtime, **given))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            method = getattr(engine, self.path.strip("/"))
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            answer = json.dumps(method(**body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.send(server.server_port)
    server.serve_forever()


def over_http(runtime: str) -> None:
    """Trainer and driver here, the engine behind its port."""
    context = multiprocessing.get_context("spawn")
    with er.Supervisor.local(runtime=runtime) as supervisor:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(supervisor.url, runtime, theirs), daemon=True)
        process.start()
        with httpx.Client(base_url=f"http://127.0.0.1:{ours.recv()}", timeout=60, trust_env=False) as http:

            def call(method: str, **body: Any) -> Any:
                return http.post(f"/{method}", json=body).raise_for_status().json()

            drive(call, lambda **given: er.join(supervisor.url, runtime=runtime, **given))
        process.terminate()
        process.join()


# -- driven by Ray


def by_ray(runtime: str) -> None:
    """Trainer and driver here, the engine in an actor; the supervisor is an actor too."""
    import ray

    from elastic_reshard import on_ray

    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=f"{runtime}/ray",
        _node_ip_address="127.0.0.2",
    )  # fmt: skip
    on_ray.start(JOB, runtime=runtime)

    def join(**given: Any) -> er.Member:
        return on_ray.join(JOB, runtime=runtime, **given)

    actor: Any = ray.remote(Updatable).options(max_concurrency=4).remote(join)
    drive(lambda method, **body: ray.get(getattr(actor, method).remote(**body), timeout=60), join)
    ray.kill(actor)
    on_ray.close(JOB)
    ray.shutdown()


# -- what drives, either way


def drive(call: Callable[..., Any], join: Callable[..., er.Member]) -> None:
    """Three steps of training, each served as soon as it is there."""
    weights = {name: torch.zeros(WIDTH, WIDTH) for name in ("up", "down")}
    seat = er.Group("trainer", size=1, rank=0)
    with join(name="trainer-0", role="source", group=seat, tensors=weights, layout=layout()) as trainer:
        for step in (1, 2, 3):
            for tensor in weights.values():
                tensor.fill_(step)
            version = trainer.publish(label=f"step-{step}").wait("committed")
            while call("state")["ready"] < version:
                time.sleep(0.01)
            call("pause")
            result = call("update")
            call("resume")
            print(
                f"serves version {result['weight_version']} ({result['label']}): {call('generate', prompt=10.0)}",
                flush=True,
            )
        call("leave")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        {"http": over_http, "ray": by_ray}[sys.argv[1]](folder)
