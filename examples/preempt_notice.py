"""A notice that a machine will be taken away becomes a leave in good order; everybody else goes on.

    python examples/preempt_notice.py

A trainer and two engines, each on a host of its own (labels, on one machine). In the middle of the run the cloud says that
host spot-2 has twenty seconds left. Whoever hears of it asks the supervisor to drain that host: its members see `leave` in
`watch` and call `leave`; nobody waits for them, and no version is lost.

Where notices come from: a file here; a cloud's metadata service; on Kubernetes a SIGTERM, which the host's watchdog itself
takes for a drain; on Ray nothing is to be done, `on_ray` listens to Ray's own notices.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import elastic_reshard as er

ROWS, COLUMNS = 500, 64


def layout() -> er.ModelLayout:
    """One matrix, whole on the one rank of every group."""
    return er.ModelLayout(
        {"weight": er.TensorLayout((ROWS, COLUMNS), "float32", er.Mesh.arange((1,)), (er.Replicate(),))}
    )


def engine(number: int, url: str, runtime: str, told: Connection) -> None:
    """Installs whatever is newest until it is asked to leave."""
    weights = {"weight": torch.zeros(ROWS, COLUMNS)}
    member = er.join(
        url, name=f"engine-{number}", role="destination", group=er.Group(f"engine-{number}", 1, 0), tensors=weights,
        layout=layout(), runtime=runtime, host=f"spot-{number}",
    )  # fmt: skip
    for event in member.watch():
        if event.kind == "installable":
            result = member.install(timeout=30)
            told.send((f"engine-{number} serves", result["label"], float(weights["weight"].mean())))
        elif event.kind == "leave":
            member.leave()
            told.send((f"engine-{number} leaves", event.reason, 0.0))
            return


def say(*words: object) -> None:
    """A whole line at once: two threads print."""
    print(" ".join(map(str, words)) + "\n", end="", flush=True)


def listen(notice: Path, host: str, url: str, token: str) -> None:
    """What runs on every machine: wait for its notice, and have it drained. Blocks until then."""
    while not notice.exists():
        time.sleep(0.05)
    with er.SupervisorClient(url, token) as client:
        departure = client.drain(host, within=float(notice.read_text()))  # returns when all its members are out
        out = ", ".join(member.partition("@")[0] for member in departure.members)
        say(f"host {host} is empty: {out} left")
        # A version that some may still need can lie in its memory, until a newer one is committed.
        while client.drain(host, within=float(notice.read_text())).holding:
            time.sleep(0.05)
    say(f"host {host} may be turned off")


def main() -> None:
    """Run the story."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as runtime, er.Supervisor.local(runtime=runtime) as supervisor:
        pipes, processes = [], []
        for number in (1, 2):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=engine, args=(number, supervisor.url, runtime, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        notice = Path(runtime) / "notice"
        args = (notice, "spot-2", supervisor.url, supervisor.token)
        listener = threading.Thread(target=listen, args=args)
        listener.start()

        weights = {"weight": torch.zeros(ROWS, COLUMNS)}
        with er.join(
            supervisor.url, name="trainer", role="source", group=er.Group("trainer", 1, 0), tensors=weights, layout=layout(),
            runtime=runtime, host="on-demand",
        ) as trainer:  # fmt: skip
            staying = [pipes[0], pipes[1]]
            for step in (1, 2, 3, 4):
                weights["weight"].fill_(step)
                trainer.publish(label=f"step-{step}")
                for pipe in staying:
                    while (said := pipe.recv())[1] != f"step-{step}":
                        say(*said[:2])
                    assert said[2] == step, "every weight is of that step"
                    say(*said[:2])
                if step == 2:
                    fresh = notice.with_suffix(".new")
                    fresh.write_text("20")
                    fresh.replace(notice)  # the listener never sees half of it
                    say(*pipes[1].recv()[:2])
                    staying = pipes[:1]
        listener.join()
        with er.SupervisorClient(supervisor.url, supervisor.token) as client:
            client.shrink(["engine-1"], within=10)
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
