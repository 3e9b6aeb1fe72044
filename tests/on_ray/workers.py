"""What a user would write: a trainer and an engine in actors of Ray, which join by the job's name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import elastic_reshard as er
    from elastic_reshard.member import Member

ROWS, COLUMNS = 30, 8


class Worker:
    """One rank. Its tensors hold index + 1000 * step, so that every element says what and when it is."""

    role = ""
    cut = 0

    def __init__(self, group: er.Group, job: str, runtime: str, faults: str = "", deadline: float = 120.0) -> None:
        os.environ["ELASTIC_RESHARD_RUNTIME"] = runtime
        if faults:  # of what this process starts
            os.environ["ELASTIC_RESHARD_TEST_HOOKS"] = faults
        self.group, self.job, self.deadline = group, job, deadline
        self.member: Member | None = None
        self.joined = threading.Event()

    def join(self) -> str:
        import torch

        import elastic_reshard as er
        from elastic_reshard import on_ray

        torch.set_num_threads(1)
        mesh = er.Mesh.arange((self.group.size,), ("rank",))
        side = er.ModelLayout({"w": er.TensorLayout((ROWS, COLUMNS), "float32", mesh, (er.Shard(self.cut),))})
        self.weights = {"w": torch.zeros(side["w"].local_shape(self.group.rank) or ())}
        whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
        self.base = whole.chunk(self.group.size, self.cut)[self.group.rank]
        self.member = on_ray.join(
            self.job, name=f"{self.group.name}-{self.group.rank}", role=self.role, group=self.group,
            tensors=self.weights, layout=side, deadline=self.deadline,
        )  # fmt: skip
        self.joined.set()
        return self.member.id

    @property
    def m(self) -> Member:
        assert self.joined.wait(120.0), "it has not joined"
        assert self.member is not None
        return self.member

    def run(self) -> None:
        """Until it is asked to leave."""
        self.join()
        for event in self.m.watch():
            if event.kind == "leave":
                self.m.leave()
                return
            if event.kind == "installable" and self.role == "destination":
                self.m.install(timeout=30)

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())


class Trainer(Worker):
    role = "source"

    def publish(self, step: int) -> str:
        """Returns after the local copy."""
        self.m  # noqa: B018 - waits until it has joined
        self.weights["w"].copy_(self.base + 1000 * step)
        self.m.publish(label=f"step-{step}")
        return self.m.id


class Engine(Worker):
    role = "destination"
    cut = 1

    def serves(self, step: int, within: float = 30.0) -> list[Any]:
        """Wait until it serves this step or a newer one; its label's step, and the steps that its elements are of."""
        import elastic_reshard as er

        deadline = time.monotonic() + within
        while True:
            assert time.monotonic() < deadline, f"step {step} did not arrive within {within} s"
            try:
                result = self.m.install(timeout=max(0.1, deadline - time.monotonic()))
            except er.ReshardError:
                time.sleep(0.05)
                continue
            found = int(str(result["label"]).removeprefix("step-"))
            if found >= step:
                steps = ((self.weights["w"] - self.base) / 1000).unique()
                return [found, [float(s) for s in steps], result["weight_version"]]


class Stillborn:
    """Dies at every start."""

    def __init__(self, group: er.Group) -> None:
        raise RuntimeError(f"no luck for {group.name}")

    def run(self) -> None:
        """Never comes to it."""


class Sleeper:
    """Joins nothing, and never ends by itself."""

    def __init__(self, group: er.Group) -> None:
        self.rank = group.rank
        self.over = threading.Event()

    async def run(self) -> None:
        """For as long as it is let."""
        import asyncio

        await asyncio.Event().wait()

    async def pid(self) -> int:
        return os.getpid()


class Gated:
    """Joins nothing, and works until it is told how to end, in a file."""

    def __init__(self, group: er.Group, gate: str) -> None:
        self.gate = gate

    def run(self) -> None:
        """Raises what is in the file, if there is something."""
        while not os.path.exists(self.gate):
            time.sleep(0.02)
        with open(self.gate) as told:
            if fault := told.read():
                os.remove(self.gate)
                raise RuntimeError(fault)


class Napper:
    """Joins nothing, never ends by itself, and may outlive its driver."""

    def __init__(self, group: er.Group) -> None:
        self.group = group

    def run(self) -> None:
        """For as long as it is let."""
        threading.Event().wait()

    def pid(self) -> int:
        return os.getpid()


class Parent:
    """An actor whose child process is the member."""

    def __init__(self, job: str, runtime: str) -> None:
        self.job, self.runtime = job, runtime

    def start(self) -> list[str]:
        """Its member's id, and the host label that it was given."""
        from elastic_reshard import on_ray

        seat = on_ray.seat(self.job, runtime=self.runtime)
        assert seat.token not in repr(seat)
        said = {"url": seat.url, "host": seat.host, "token": seat.token, "runtime": self.runtime}
        environ = {**os.environ, "ELASTIC_RESHARD_RUNTIME": self.runtime}
        command = [sys.executable, "-m", "tests.on_ray.child"]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(said) + "\n")
        self.child.stdin.flush()
        member = self.child.stdout.readline().strip()
        on_ray.vouch(self.job, member)
        return [member, seat.host]
