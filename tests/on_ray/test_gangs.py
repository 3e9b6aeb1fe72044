"""On a real cluster: groups of two ranks, which stand and fall together."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_reshard import on_ray
from elastic_reshard.on_ray import Fleet, Groups, Limits, Phase, cluster
from elastic_reshard.on_ray.cluster import host_of
from tests.on_ray.conftest import QUICK, RayNodes, lives, machine_dies, until, wait_for
from tests.on_ray.workers import Engine, Gated, Trainer

pytestmark = pytest.mark.long
MANY = {"max_concurrency": 4}


def each(groups: Groups, name: str, method: str, *args: Any) -> list[Any]:
    """Ask all ranks of a group at once."""
    return list(ray.get([getattr(worker, method).remote(*args) for worker in groups.workers(name)], timeout=90))


@pytest.mark.timeout(300)
def test_one_of_two_ranks_is_killed_and_both_start_again(nodes: RayNodes, runtime: Path) -> None:
    on_ray.start("gang", runtime=runtime, deadlines=QUICK, cell=256)
    given = {"job": "gang", "runtime": str(runtime)}
    fleets = [
        Fleet("trainer", Trainer, size=2, each={"CPU": 0.5, "one": 1}, arguments=given, options=MANY),
        Fleet("engine", Engine, size=2, each={"CPU": 0.5, "two": 1}, arguments=given, options=MANY),
    ]
    with Groups("gang", fleets, Limits(pause=0.1)) as groups:
        for name in ("trainer", "engine"):
            wait_for(groups, name, Phase.RUNNING, 1)
        each(groups, "trainer", "publish", 1)
        assert [found[:2] for found in each(groups, "engine", "serves", 1)] == [[1, [1.0]]] * 2

        pids = each(groups, "trainer", "pid")
        each(groups, "trainer", "publish", 2)
        os.kill(pids[1], signal.SIGKILL)
        versions = each(groups, "engine", "serves", 2)
        assert [found[:2] for found in versions] == [[2, [2.0]]] * 2, "published is published"
        wait_for(groups, "trainer", Phase.RUNNING, 2)
        until(lambda: not lives(pids[0]), "rank 0 was ended with rank 1")
        again = each(groups, "trainer", "pid")
        assert not set(again) & set(pids)
        each(groups, "trainer", "publish", 3)
        newer = each(groups, "engine", "serves", 3)
        assert [found[:2] for found in newer] == [[3, [3.0]]] * 2
        assert newer[0][2] > versions[0][2]

        # The same of those who receive: the version is there for them who come in their place.
        pids = each(groups, "engine", "pid")
        os.kill(pids[1], signal.SIGKILL)
        wait_for(groups, "engine", Phase.RUNNING, 2)
        assert [found[:2] for found in each(groups, "engine", "serves", 3)] == [[3, [3.0]]] * 2
        until(lambda: not lives(pids[0]), "rank 0 was ended with rank 1")
        runs = groups.status()
        assert {name: (run.attempt, len(run.failures)) for name, run in runs.items()} == {
            "trainer": (2, 1),
            "engine": (2, 1),
        }
    on_ray.close("gang")


@pytest.mark.timeout(120)
def test_the_end_of_a_run_is_heard_although_its_actor_could_not_be_reached(
    nodes: RayNodes, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is pretended but the answer of Ray, once of each run, that its actor is unavailable."""
    gate, real, asked = tmp_path / "gate", ray.get, set()

    def get(ref: Any, **named: Any) -> Any:
        if threading.current_thread().name == "elastic-reshard-groups-gated" and ref not in asked:
            asked.add(ref)
            raise ray.exceptions.ActorUnavailableError("the connection broke", None)
        return real(ref, **named)

    monkeypatch.setattr(ray, "get", get)
    fleet = Fleet("gated", Gated, each={"CPU": 1, "one": 1}, arguments={"gate": str(gate)})
    with Groups("gated", [fleet], Limits(pause=0.1)) as groups:
        wait_for(groups, "gated", Phase.STARTING, 1)
        gate.write_text("no such thing")
        run = wait_for(groups, "gated", Phase.STARTING, 2)
        assert len(run.failures) == len(asked) == 1
        assert "no such thing" in run.reason
        gate.touch()
        wait_for(groups, "gated", Phase.DONE, 2)
        assert len(asked) == 2
    assert cluster.kept(f"{cluster.NAMESPACE}/gated/") == [], "the words are gone with the workers"


@pytest.mark.timeout(200)
def test_a_group_that_nothing_else_has_room_for_comes_back_when_its_node_may_be_used_again(
    nodes: RayNodes, runtime: Path
) -> None:
    on_ray.start("back", runtime=runtime, deadlines=QUICK, cell=256)
    given = {"job": "back", "runtime": str(runtime)}
    fleets = [Fleet("engine", Engine, each={"CPU": 0.5, "two": 1}, arguments=given, options=MANY)]
    with Groups("back", fleets, Limits(failures=1, pause=0.1)) as groups, on_ray.client("back") as client:
        wait_for(groups, "engine", Phase.RUNNING, 1)
        (at,) = each(groups, "engine", "node")
        client.drain(host_of(at), within=20.0, wait=False)
        wait_for(groups, "engine", Phase.WAITING, 2)
        until(lambda: groups._crews["engine"]._shunned == {at}, "room was asked for elsewhere")
        client.undrain(host_of(at))
        wait_for(groups, "engine", Phase.RUNNING, 2)
        assert each(groups, "engine", "node") == [at]
    on_ray.close("back")


@pytest.mark.timeout(300)
def test_one_of_two_nodes_of_a_gang_is_lost(nodes: RayNodes, runtime: Path) -> None:
    on_ray.start("wide", runtime=runtime, deadlines=QUICK, cell=256)
    given = {"job": "wide", "runtime": str(runtime)}
    places = {nodes.add(name, wide=1): name for name in ("north", "south")}
    fleets = [
        Fleet("trainer", Trainer, each={"CPU": 1, "one": 1}, arguments=given, options=MANY),
        Fleet(
            "engine",
            Engine,
            size=2,
            each={"CPU": 1, "wide": 1},
            strategy="STRICT_SPREAD",
            arguments=given,
            options=MANY,
        ),
    ]
    with Groups("wide", fleets, Limits(failures=1, pause=0.1)) as groups:
        for name in ("trainer", "engine"):
            wait_for(groups, name, Phase.RUNNING, 1)
        each(groups, "trainer", "publish", 1)
        assert [found[:2] for found in each(groups, "engine", "serves", 1)] == [[1, [1.0]]] * 2
        at, pids = each(groups, "engine", "node"), each(groups, "engine", "pid")
        assert set(at) == set(places)

        each(groups, "trainer", "publish", 2)
        nodes.remove(places[at[1]])
        machine_dies("wide", host_of(at[1]), runtime)
        wait_for(groups, "engine", Phase.WAITING, 2)
        until(lambda: not lives(pids[0]), "the rank on the other node was ended too")
        new = nodes.add("west", wide=1)
        run = wait_for(groups, "engine", Phase.RUNNING, 2)
        assert run.failures == (), "of two ranks' ends one was the node's and one was ours: nobody's fault"
        assert set(each(groups, "engine", "node")) == {at[0], new}
        assert [found[:2] for found in each(groups, "engine", "serves", 2)] == [[2, [2.0]]] * 2
        each(groups, "trainer", "publish", 3)
        assert [found[:2] for found in each(groups, "engine", "serves", 3)] == [[3, [3.0]]] * 2
    on_ray.close("wide")


@pytest.mark.timeout(240)
def test_a_gang_that_a_grow_holds_is_not_given_up(nodes: RayNodes, runtime: Path) -> None:
    """For longer than it may take to start, until `join` waits no more. Then the other may have its room; at last both have."""
    on_ray.start("held", runtime=runtime, deadlines=QUICK, cell=256)
    nodes.add("tight")
    given = {"job": "held", "runtime": str(runtime), "deadline": 30.0}
    room = {"CPU": 0.5, "tight": 4.5}
    fleet = Fleet("engine", Engine, size=2, groups=0, grows=True, each=room, arguments=given, options=MANY)
    limits = Limits(failures=1, pause=0.1, start_within=20.0)
    with Groups("held", [fleet], limits) as groups, on_ray.client("held") as client:
        client.grow(groups=2, within=180, wait=False)
        until(lambda: len(groups.status()) == 2, "the fleet grows")

        def waits() -> str | None:
            assert all(run.phase is not Phase.GIVEN_UP for run in groups.status().values()), groups.status()
            return next((run.name for run in groups.status().values() if "others of a grow" in run.reason), None)

        first = until(waits, "one has room, and waits for the other", 60)
        (second,) = set(groups.status()) - {first}
        assert groups.status()[second].phase is Phase.WAITING
        until(lambda: groups.status()[first].attempt == 2, "join has waited its time", 60)
        run = groups.status()[first]
        assert run.failures == ()
        assert "RefitTimeout" in run.reason
        nodes.add("wider", tight=9)
        for name in (first, second):
            assert wait_for(groups, name, Phase.RUNNING, 1).failures == ()
        growth = client.growing()
        assert growth is not None
        assert set(growth.admitted) == {first, second}
        groups.resize("engine", 0)
        groups.wait(timeout=60)
    on_ray.close("held")
