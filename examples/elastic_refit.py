"""A trainer gang that is killed and starts again, beside an engine that goes on serving: on one machine, by a supervisor.

    python examples/elastic_refit.py

Two trainer ranks publish a small model, the two ranks of a tensor-parallel engine install it. The gang is SIGKILLed right
after it has published step 3: that version arrives all the same. A new gang goes on from the checkpoint of step 2: the
user's labels go back, `weight_version` only rises.
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

import elastic_reshard as er

ROWS, COLUMNS = 999, 256  # nothing has to divide evenly


def layout(cut: er.Shard) -> er.ModelLayout:
    """A matrix cut over two ranks, and a norm that both hold."""
    mesh = er.Mesh.arange((2,), ("rank",))
    return er.ModelLayout(
        {
            "weight": er.TensorLayout((ROWS, COLUMNS), "float32", mesh, (cut,)),
            "norm": er.TensorLayout((COLUMNS,), "float32", mesh, (er.Replicate(),)),
        }
    )


def local(side: er.ModelLayout, rank: int) -> dict[str, torch.Tensor]:
    """What one rank holds."""
    return {name: torch.zeros(t.local_shape(rank) or ()) for name, t in side.items()}


def trainer(rank: int, url: str, runtime: str, told: Connection, first: int, last: int) -> None:
    """One rank of the gang. It "trains" by writing the step's number into every weight."""
    side = layout(er.Shard(0))
    weights = local(side, rank)
    member = er.join(
        url, name=f"trainer-{rank}", role="source", group=er.Group("trainer", size=2, rank=rank), tensors=weights,
        layout=side, runtime=runtime,
    )  # fmt: skip
    for step in range(first, last + 1):
        for tensor in weights.values():
            tensor.fill_(step)
        publication = member.publish(label=f"step-{step}")  # returns after the copy of this rank's own bytes
        if step < last:
            publication.wait("committed")
    told.send(("published", rank, last))
    signal.pause()  # the machine is taken away now


def engine(rank: int, url: str, runtime: str, told: Connection) -> None:
    """One rank of the engine: installs whatever is newest, and tells what it serves then."""
    side = layout(er.Shard(1))
    weights = local(side, rank)
    with er.join(
        url, name=f"engine-{rank}", role="destination", group=er.Group("engine", size=2, rank=rank), tensors=weights,
        layout=side, runtime=runtime,
    ) as member:  # fmt: skip
        for event in member.watch():
            if event.kind == "leave":
                return
            if event.kind == "installable":
                result = member.install(timeout=30)
                values = {float(value) for tensor in weights.values() for value in tensor.unique()}
                told.send(("serves", rank, (result["weight_version"], result["label"], sorted(values))))


def main() -> None:
    """Run the story."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as runtime, er.Supervisor.local(runtime=runtime) as supervisor:

        def start(role: Callable[..., None], *more: int) -> dict[Connection, Any]:
            started: dict[Connection, Any] = {}
            for rank in range(2):
                # One pipe each: in a shared queue, a writer that is killed can leave its lock held.
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=role, args=(rank, supervisor.url, runtime, theirs, *more))
                process.start()
                theirs.close()
                started[ours] = process
            return started

        engines = start(engine)
        for first, last in ((1, 3), (2, 4)):
            gang = start(trainer, first, last)
            pipes = [*gang, *engines]
            missing = {("published", 0), ("published", 1), ("serves", 0), ("serves", 1)}
            while missing:
                (what, rank, value), *_ = [pipe.recv() for pipe in wait(pipes)[:1] if isinstance(pipe, Connection)]
                if what == "serves":
                    version, label, values = value
                    print(f"engine rank {rank} serves version {version} ({label}), all its weights are {values}")
                if what == "published" or value[1] == f"step-{last}":
                    missing.discard((what, rank))
                if missing == {("serves", 0), ("serves", 1)} or not missing:
                    for process in gang.values():
                        process.kill()
                    pipes = list(engines)
            for process in gang.values():
                process.join()
            print(f"the gang that published steps {first} to {last} is gone")
        with er.SupervisorClient(supervisor.url, supervisor.token) as client:
            client.leave_group("engine", within=10)
        for process in engines.values():
            process.join()


if __name__ == "__main__":
    main()
