"""On a real cluster whose control service is away for a while: workers go on, and are kept again when it is back."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_reshard import on_ray
from elastic_reshard.errors import MembershipError
from elastic_reshard.on_ray import Fleet, Groups, Limits, Phase, cluster, plan
from tests.on_ray.conftest import QUICK, RayNodes, call, until, wait_for
from tests.on_ray.workers import Engine, Sleeper, Trainer

pytestmark = pytest.mark.long
DURABLE = True


@pytest.fixture
def seen(nodes: RayNodes) -> Iterator[RayNodes]:
    """The cluster, whose control service answers at the end, whatever the test did."""
    yield nodes
    nodes.thaw()


def fleets(job: str, runtime: Path) -> list[Fleet]:
    given = {"job": job, "runtime": str(runtime)}
    many = {"max_concurrency": 4}
    return [
        Fleet("trainer", Trainer, each={"CPU": 1, "one": 1}, arguments=given, options=many),
        Fleet("engine", Engine, each={"CPU": 1, "two": 1}, arguments=given, options=many),
    ]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_workers_go_on_while_rays_control_service_is_away(seen: RayNodes, runtime: Path, how: str) -> None:
    job = f"away-{how}"
    on_ray.start(job, runtime=runtime, deadlines=QUICK)
    away, back = (seen.freeze, seen.thaw) if how == "frozen" else (seen.kill_control, seen.start_control)
    with Groups(job, fleets(job, runtime), Limits(pause=0.1)) as groups:
        for name in ("trainer", "engine"):
            wait_for(groups, name, Phase.RUNNING, 1)
        handles = {name: groups.workers(name)[0] for name in ("trainer", "engine")}
        pids = {name: ray.get(handle.pid.remote()) for name, handle in handles.items()}
        looked = groups._state.sight.looked
        away()
        for step in (1, 2):
            ray.get(handles["trainer"].publish.remote(step), timeout=30)
            assert ray.get(handles["engine"].serves.remote(step), timeout=60)[:2] == [step, [float(step)]]
        until(lambda: time_without_a_look(groups) > 6.0, "it was away for 6 s", 20)
        os.kill(pids["engine"], 9)  # what happens meanwhile is seen later
        back()
        until(lambda: groups._state.sight.looked > looked and time_without_a_look(groups) < 1.0, "it is seen again", 30)
        wait_for(groups, "engine", Phase.RUNNING, 2)
        assert call(groups, "engine", "serves", 2)[:2] == [2, [2.0]]
        assert groups.status()["trainer"].attempt == 1
        assert call(groups, "trainer", "pid") == pids["trainer"], "the same process as ever"
        for fleet in ("trainer", "engine"):
            groups.resize(fleet, 0)
        groups.wait(timeout=60)
    on_ray.close(job)


def time_without_a_look(groups: Groups) -> float:
    return time.monotonic() - groups._state.sight.looked


@pytest.mark.timeout(120)
def test_it_is_given_up_after_a_limit_and_no_worker_dies_before(seen: RayNodes, runtime: Path) -> None:
    with Groups("blind", [Fleet("sleeper", Sleeper, each={"CPU": 1, "one": 1})], Limits(blind=10.0)) as groups:
        wait_for(groups, "sleeper", Phase.STARTING, 1)
        pid = until(lambda: pid_of(groups), "it runs")
        seen.freeze()
        until(lambda: time_without_a_look(groups) > 3.0, "it is away")
        assert groups.status()["sleeper"].phase is Phase.STARTING, "not yet"
        with pytest.raises(
            MembershipError, match=r"groups of job blind are kept no longer: Ray was out of sight for 1\d s"
        ):
            groups.wait(timeout=30)
        for ask in (groups.status, lambda: groups.workers("sleeper"), lambda: groups.resize("sleeper", 2)):
            with pytest.raises(MembershipError, match="kept no longer"):
                ask()
        assert Path(f"/proc/{pid}").exists(), "it may go on"
        seen.thaw()
    until(lambda: not Path(f"/proc/{pid}").exists(), "it was ended with its groups")


def pid_of(groups: Groups) -> int | None:
    found: list[int] = [ray.get(handle.pid.remote(), timeout=30) for handle in groups.workers("sleeper")]
    return found[0] if found else None


@pytest.mark.timeout(120)
def test_what_ray_refuses_once_is_asked_again(seen: RayNodes, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of each kind fail, after they were taken or before."""
    monkeypatch.setattr(plan, "_RARELY", 0.2)
    for module, name in (
        (cluster, "nodes"), (cluster, "draining"), (cluster, "node_of"), (cluster, "room_state"), (cluster, "room_of"),
        (cluster, "lives_of"), ("elastic_reshard.on_ray.fleet", "placement_group"),
        ("elastic_reshard.on_ray.fleet", "remove_placement_group"),
    ):  # fmt: skip
        at = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{at}.{name}", failing(getattr(__import__(at, fromlist=[name]), name)))
    with Groups("fits", [Fleet("sleeper", Sleeper, size=2, each={"CPU": 1, "one": 1})], Limits(pause=0.1)) as groups:
        pid = until(lambda: pid_of(groups), "it runs", 60)
        os.kill(pid, 9)
        wait_for(groups, "sleeper", Phase.STARTING, 2)
        assert until(lambda: pid_of(groups), "it runs again", 60) != pid
        assert len(groups.status()["sleeper"].failures) == 1
    rooms = ray.util.placement_group_table()
    mine = [room for room in rooms.values() if "/fits/" in room["name"] and room["state"] != "REMOVED"]
    assert len(rooms) >= 2
    assert not mine, "no room was asked for twice, or kept"


def failing(real: Callable[..., Any]) -> Callable[..., Any]:
    """Of eleven calls the first fails after it was taken, the second before."""
    turns = itertools.count()

    def fails(*args: Any, **named: Any) -> Any:
        turn = next(turns) % 11
        if turn == 1:
            raise ray.exceptions.RpcError("the control service is away", rpc_code=14)
        found = real(*args, **named)
        if turn == 0:
            raise ray.exceptions.RaySystemError("it has gone away meanwhile")
        return found

    return fails
