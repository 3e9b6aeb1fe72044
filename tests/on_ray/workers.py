"""What a user would write: a trainer and an engine in actors of Ray, which join by the job's name."""

from __future__ import annotations

import os
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

    def __init__(self, group: er.Group, job: str, runtime: str, faults: str = "") -> None:
        os.environ["ELASTIC_RESHARD_RUNTIME"] = runtime
        if faults:  # of what this process starts
            os.environ["ELASTIC_RESHARD_TEST_HOOKS"] = faults
        self.group, self.job = group, job
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
            tensors=self.weights, layout=side, deadline=60.0,
        )  # fmt: skip
        self.joined.set()
        return self.member.id

    @property
    def m(self) -> Member:
        assert self.joined.wait(60.0), "it has not joined"
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
