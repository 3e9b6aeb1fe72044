"""On a real cluster: drivers that are killed and started again, and what becomes of their workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_reshard import on_ray
from elastic_reshard.errors import ProtocolError
from elastic_reshard.on_ray import Fleet, Groups, cluster
from tests.on_ray import driver
from tests.on_ray.conftest import QUICK, ROOT, RayNodes, lives, until
from tests.on_ray.workers import Sleeper


class Driver:
    """A program that keeps groups, adopting those of the one before."""

    def __init__(self, nodes: RayNodes, job: str, runtime: Path) -> None:
        command = [sys.executable, "-m", "tests.on_ray.driver", nodes.cluster.address, job, str(runtime)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> Any:
        assert self.process.stdout is not None
        self.tell(line)
        said = json.loads(self.process.stdout.readline())
        return said.get("said", said)

    def runs(self, **attempts: int) -> None:
        """Wait until groups (with "_" for "-") run, in this attempt."""
        wanted = {name.replace("_", "-"): ["running", attempt] for name, attempt in attempts.items()}
        seen: dict[str, Any] = {}

        def there() -> bool:
            seen.update(self.ask("status"))
            return {name: seen[name][:2] for name in wanted} == wanted

        try:
            until(there, f"{wanted}", 90)
        except AssertionError as late:
            raise AssertionError(f"{late}; {seen}") from None

    def dies(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        with contextlib.suppress(BrokenPipeError):  # of what was not read by one that was killed
            self.process.communicate(timeout=30)
        return self.process.wait(30)


@pytest.fixture
def drivers(nodes: RayNodes, runtime: Path) -> Iterator[Any]:
    """Starts drivers; none is left at the end."""
    made: list[Driver] = []

    def start(job: str) -> Driver:
        made.append(Driver(nodes, job, runtime))
        return made[-1]

    yield start
    for one in made:
        one.dies()


def crews(job: str) -> dict[str, list[Any]]:
    """The workers of a job that outlive drivers, by group and attempt."""
    found: dict[str, list[Any]] = {}
    for room in sorted(cluster.rooms(f"{cluster.NAMESPACE}/{job}/kept/")):
        ranks = [cluster.actor_of(f"{room}/{rank}") for rank in range(2)]
        found["/".join(room.split("/")[-2:])] = [handle for handle in ranks if handle is not None]
    return found


def each(handles: list[Any], method: str, *args: Any) -> list[Any]:
    return list(ray.get([getattr(handle, method).remote(*args) for handle in handles], timeout=90))


def pids(job: str) -> dict[str, list[int]]:
    return {name: each(handles, "pid") for name, handles in crews(job).items()}


def arrives(job: str, step: int, trainer: str, *engines: str) -> None:
    """A version is published, and served by these."""
    each(crews(job)[trainer], "publish", step)
    for engine in engines:
        (found,) = each(crews(job)[engine], "serves", step)
        assert found[:2] == [step, [float(step)]]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_driver_is_killed_and_the_next_one_goes_on_with_its_workers(
    nodes: RayNodes, runtime: Path, drivers: Any
) -> None:
    job = "month"
    on_ray.start(job, runtime=runtime, deadlines=QUICK, cell=256)
    first = drivers(job)
    first.runs(trainer=1, engine_0=1, engine_1=1)
    arrives(job, 1, "trainer/1", "engine-0/1", "engine-1/1")
    before = pids(job)
    first.dies()

    arrives(job, 2, "trainer/1", "engine-0/1", "engine-1/1")
    os.kill(before["engine-1/1"][0], signal.SIGKILL)  # while there is no driver
    second = drivers(job)
    second.runs(trainer=1, engine_0=1, engine_1=2)
    arrives(job, 3, "trainer/1", "engine-0/1", "engine-1/2")
    after = pids(job)
    assert set(after) == {"trainer/1", "engine-0/1", "engine-1/2"}, "nothing runs twice"
    assert [after[name] for name in ("trainer/1", "engine-0/1")] == [
        before[name] for name in ("trainer/1", "engine-0/1")
    ]

    os.kill(after["trainer/1"][1], signal.SIGKILL)  # of a gang that was adopted
    second.runs(trainer=2, engine_0=1, engine_1=2)
    until(lambda: not lives(after["trainer/1"][0]), "rank 0 was ended with rank 1")
    arrives(job, 4, "trainer/2", "engine-0/1", "engine-1/2")

    now = pids(job)
    third = drivers(job)  # while the second one runs
    third.runs(trainer=2, engine_0=1, engine_1=2)
    until(lambda: second.ask("status").get("raised") == "Fenced", "the second one does no more")
    second.ask("close")
    second.end()
    assert pids(job) == now, "and has ended nobody"

    third.tell("fall")
    assert third.end() == 1
    fourth = drivers(job)
    fourth.runs(trainer=2, engine_0=1, engine_1=2)
    assert pids(job) == now, "an error of the program ends no workers"
    fourth.ask("resize engine 1")  # who was adopted leaves, and its word is heard
    until(lambda: fourth.ask("status")["engine-1"][0] == "done", "it has left", 60)
    fourth.dies()
    fifth = drivers(job)
    fifth.runs(trainer=2, engine_0=1)
    assert fifth.ask("status")["engine-1"][0] == "done", "what is done stays done"
    arrives(job, 5, "trainer/2", "engine-0/1")
    fifth.ask("close")
    fifth.end()
    until(lambda: not any(lives(pid) for of in now.values() for pid in of), "they are ended")
    assert crews(job) == {}
    assert not cluster.kept(f"{cluster.NAMESPACE}/{job}/")
    assert not cluster.told(f"{job}/groups")
    on_ray.close(job)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_driver_that_does_not_adopt_runs_nothing_twice(nodes: RayNodes, runtime: Path, drivers: Any) -> None:
    first = drivers("naps")
    until(lambda: first.ask("status")["napper"][0] == "starting", "it runs", 60)
    (left,) = pids("naps").values()
    first.dies()
    with Groups("naps", [Fleet("other", Sleeper, each={"CPU": 1, "two": 1})]) as groups:
        until(lambda: groups.workers("other") or None, "it runs")
        assert lives(left[0]), "it is no concern of other fleets"
    with Groups("naps", driver.fleets("naps", "")) as groups:
        until(lambda: not lives(left[0]), "it was ended")
        until(lambda: groups.workers("napper") or None, "another one runs")
        (now,) = each(groups.workers("napper"), "pid")
        assert now != left[0]
        assert crews("naps") == {}
    until(lambda: not lives(now), "it ends with its groups")


def test_what_cannot_be_adopted() -> None:
    with pytest.raises(ProtocolError, match="fleet s: run must not be async"):
        Groups("none", [Fleet("s", Sleeper)], adopt=True)
    with pytest.raises(ProtocolError, match="fleet s: run must not be async"):
        Groups("none", [Fleet("s", ray.remote(Sleeper))], adopt=True)
