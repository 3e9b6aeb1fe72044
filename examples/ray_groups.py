"""Gangs on Ray that are started again: a trainer of two ranks and two engines, one of which is killed meanwhile.

    python examples/ray_groups.py

This is all that a worker must be: a class that is made with its `er.Group`, whose `run()` joins by the job's name, works, and
calls `leave` when it is asked to. Ray places each group as a whole; who dies is started again with its group, joins as
somebody new, and installs what is newest. `elastic-reshard shrink`, `grow` and `drain` resize and move the groups.

On a real cluster: `on_ray.start(..., listen="node", journal="/shared/job.journal")`, and no `runtime`.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch

import elastic_reshard as er
from elastic_reshard import on_ray

JOB, ROWS, COLUMNS, STEPS = "ray-groups", 512, 64, 5


def layout(ranks: int, dim: int) -> er.ModelLayout:
    """One matrix, cut along `dim` over the ranks of a group."""
    mesh = er.Mesh.arange((ranks,), ("rank",))
    return er.ModelLayout({"weight": er.TensorLayout((ROWS, COLUMNS), "float32", mesh, (er.Shard(dim),))})


class Worker:
    """What trainer and engine share."""

    role, dim = "", 0

    def __init__(self, group: er.Group, runtime: str) -> None:
        self.group, self.runtime = group, runtime
        self.steps: list[float] = []
        side = layout(group.size, self.dim)
        self.weights = {"weight": torch.zeros(side["weight"].local_shape(group.rank) or ())}

    def join(self) -> er.Member:
        """Blocks until the whole group is there."""
        return on_ray.join(
            JOB, name=f"{self.group.name}-{self.group.rank}", role=self.role, group=self.group, tensors=self.weights,
            layout=layout(self.group.size, self.dim), runtime=self.runtime,
        )  # fmt: skip

    def seen(self) -> list[float]:
        """The steps that it has published or installed."""
        return self.steps


class Trainer(Worker):
    """Cut by rows; publishes a version for each step, then has done its work."""

    role, dim = "source", 0

    def run(self) -> None:
        """All steps."""
        member = self.join()
        for step in range(1, STEPS + 1):
            self.weights["weight"].fill_(step)
            # The label says which calls of the ranks belong together.
            member.publish(label=f"step-{step}").wait(timeout=60)
            self.steps.append(float(step))
        member.leave()


class Engine(Worker):
    """Cut by columns; installs whatever is newest until it is asked to leave."""

    role, dim = "destination", 1

    def run(self) -> None:
        """Until it is asked to leave."""
        member = self.join()
        for event in member.watch():
            if event.kind == "leave":
                break
            if event.kind == "installable":
                member.install(timeout=30)
                (step,) = self.weights["weight"].unique().tolist()  # one value: never two versions mixed
                self.steps.append(step)
        member.leave()


def until_served(groups: on_ray.Groups, engine: str, step: float, ray: Any, attempt: int = 1) -> list[float]:
    """Wait until an engine, at its attempt'th start, has installed a step; all that it has."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        for actor in groups.workers(engine) if groups.status()[engine].attempt == attempt else ():
            try:
                steps: list[float] = ray.get(actor.seen.remote(), timeout=10)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):  # just killed, or not begun yet
                continue
            if step in steps:
                return steps
        time.sleep(0.1)
    raise SystemExit(f"{engine} did not serve step {step:g} in time; groups: {groups.status()}")


def main() -> None:
    """Run the story."""
    import ray

    with tempfile.TemporaryDirectory() as runtime:
        ray.init(
            num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=f"{runtime}/ray"
        )
        on_ray.start(JOB, runtime=runtime)
        # One thread of an actor is in `run`; another answers.
        common: dict[str, Any] = {"arguments": {"runtime": runtime}, "options": {"max_concurrency": 2}}
        fleets = [
            on_ray.Fleet("trainer", Trainer, size=2, **common),
            on_ray.Fleet("engine", Engine, groups=2, **common),
        ]
        with on_ray.Groups(JOB, fleets) as groups:
            print(f"engine-0 has installed {until_served(groups, 'engine-0', STEPS, ray)}", flush=True)
            for actor in groups.workers("engine-0"):
                ray.kill(actor)
            groups.wait("trainer", timeout=60)  # it has done its work; its last version is kept for who comes
            again = until_served(groups, "engine-0", STEPS, ray, attempt=2)
            print(f"killed; the new engine-0 has installed {again}", flush=True)
            groups.resize("engine", 0)  # asks them to leave
            groups.wait(timeout=60)
            print({name: str(run.phase) for name, run in groups.status().items()}, flush=True)
        on_ray.close(JOB)
        ray.shutdown()


if __name__ == "__main__":
    main()
