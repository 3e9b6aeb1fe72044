"""On a real cluster of raylets: the supervisor's actor, members in actors, and what happens when these die."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import elastic_reshard as er
from elastic_reshard import on_ray
from elastic_reshard.errors import Fenced, MembershipError
from elastic_reshard.on_ray import Fleet, Groups, Limits, Phase
from elastic_reshard.on_ray.cluster import host_of
from elastic_reshard.supervisor.server import Options
from tests.on_ray.conftest import QUICK, RayNodes, call, machine_dies, until, wait_for
from tests.on_ray.workers import Engine, Parent, Sleeper, Stillborn, Trainer


def actor(kind: type, group: str, where: str, runtime: Path, job: str, **more: Any) -> Any:
    """A user's own actor on a node; it has begun to run."""
    made: Any = ray.remote(kind).options(num_cpus=1, resources={where: 1}, max_concurrency=4, **more)
    made = made.remote(er.Group(group, 1, 0), job, str(runtime))
    made.run.remote()
    return made


@pytest.mark.long
def test_what_dies_at_every_start_is_given_up(nodes: RayNodes, runtime: Path) -> None:
    """Without a supervisor, even."""
    limits = Limits(failures=3, pause=0.1, longest=0.2)
    with Groups("doomed", [Fleet("doomed", Stillborn, each={"CPU": 1, "one": 1})], limits) as groups:
        with pytest.raises(MembershipError, match=r"doomed was given up.*died 3 times.*no luck for doomed"):
            groups.wait(timeout=60)
        assert groups.status()["doomed"].attempt == 3
        assert groups.workers("doomed") == []


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("journal", [False, True])
def test_the_supervisors_node_is_lost_and_then_a_trainer_that_has_published(
    nodes: RayNodes, runtime: Path, journal: bool
) -> None:
    """Each on a "machine" of its own: an address, and a runtime folder that the others do not see."""
    job = f"nest{journal}"
    nest = nodes.add(job)
    soft = NodeAffinitySchedulingStrategy(nest, soft=True)
    path = runtime / "journal" if journal else None
    found = on_ray.start(
        job, runtime=runtime / "s", deadlines=QUICK, journal=path, listen="node",
        actor={"scheduling_strategy": soft, "num_cpus": 0.1},
    )  # fmt: skip
    assert found.token not in repr(found)
    assert nodes.nodes[job].node_ip_address in found.url
    trainer = actor(Trainer, "trainer", "one", runtime / "t", job)
    engine = actor(Engine, "engine", "two", runtime / "e", job)
    ray.get(trainer.publish.remote(1))
    step, steps, version = ray.get(engine.serves.remote(1), timeout=60)
    assert (step, steps) == (1, [1.0])

    nodes.remove(job)
    ray.get(trainer.publish.remote(2), timeout=60)
    step, steps, newer = ray.get(engine.serves.remote(2, 60.0), timeout=90)
    assert (step, steps) == (2, [2.0])
    assert newer > version, "weight_version only rises"
    again = on_ray.find(job)
    assert again.url.rpartition(":")[0] != found.url.rpartition(":")[0], "it is at another address now"
    assert again.token == found.token
    with on_ray.client(job) as client:
        assert client.health()["term"] > 1

    ray.get(trainer.publish.remote(3))
    ray.kill(trainer)  # with all its children, if there were any
    assert ray.get(engine.serves.remote(3), timeout=60)[:2] == [3, [3.0]]

    if path is not None:  # another supervisor has begun on the journal: this one ends, and says so
        other = er.Supervisor(Options(job=job, journal=path, token=found.token, runtime=runtime / "o"))
        other.close(over=False)
        with pytest.raises(er.ReshardError), on_ray.client(job) as client:  # it may have noticed by itself
            client.set_policies(er.Policies(max_lag=7))  # its next write
        with pytest.raises(Fenced):
            until(lambda: on_ray.find(job) is None or None, "it has noticed")

    on_ray.close(job)
    ray.kill(engine)
    with pytest.raises(er.ReshardError, match=f"no supervisor of job {job}"):
        on_ray.find(job, timeout=0.1)
    logs = b"".join(path.read_bytes() for path in Path(nodes.folder).rglob("*.log") if path.is_file())
    assert b"worker" in logs
    assert found.token.encode() not in logs, "the token is in no log"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_groups_live_through_nodes_that_come_and_go(nodes: RayNodes, runtime: Path) -> None:
    faults, gate = runtime / "faults.json", runtime / "gate"
    faults.write_text("{}")
    on_ray.start("fleet", runtime=runtime, deadlines=QUICK, cell=256)
    nodes.add("left", engine=1)
    nodes.add("right", engine=1)
    given = {"job": "fleet", "runtime": str(runtime), "faults": f"@{faults}"}
    many = {"max_concurrency": 4}
    fleets = [
        Fleet("trainer", Trainer, each={"CPU": 1, "one": 1}, arguments=given, options=many),
        Fleet("engine", Engine, groups=2, grows=True, each={"CPU": 1, "engine": 1}, arguments=given, options=many),
    ]
    with Groups("fleet", fleets, Limits(failures=2, pause=0.1)) as groups:
        for name in ("trainer", "engine-0", "engine-1"):
            wait_for(groups, name, Phase.RUNNING, 1)
        call(groups, "trainer", "publish", 1)
        assert [call(groups, f"engine-{i}", "serves", 1)[:2] for i in (0, 1)] == [[1, [1.0]]] * 2

        # A node goes in the middle of a refit: those on the others get the version, and a group that has room again as well.
        at = call(groups, "engine-1", "node")
        lost = next(name for name in ("left", "right") if nodes.nodes[name].node_id == at)
        stays = "right" if lost == "left" else "left"
        faults.write_text(json.dumps({"mover.round": {"wait": str(gate)}}))
        call(groups, "trainer", "publish", 2)
        until(lambda: Path(f"{gate}.reached").exists() or None, "a mover is in the middle of the transfer")
        faults.write_text("{}")
        nodes.remove(lost)
        machine_dies("fleet", host_of(at), runtime)
        gate.touch()
        assert call(groups, "engine-0", "serves", 2)[:2] == [2, [2.0]]
        wait_for(groups, "engine-1", Phase.WAITING, 2)
        nodes.add("new", engine=1)
        wait_for(groups, "engine-1", Phase.RUNNING, 2)
        assert call(groups, "engine-1", "serves", 2)[:2] == [2, [2.0]]

        # A notice for a node becomes a leave, and the group starts elsewhere.
        nodes.add("wide", engine=2)
        nodes.drain(stays, 30.0)
        wait_for(groups, "engine-0", Phase.RUNNING, 2)
        assert call(groups, "engine-0", "node") == nodes.nodes["wide"].node_id
        assert call(groups, "engine-0", "serves", 2)[:2] == [2, [2.0]]
        assert [run.failures for run in groups.status().values()] == [()] * 3, "nodes' ends are nobody's fault"

        # The API's grow and shrink are obeyed.
        with on_ray.client("fleet") as client:
            assert client.grow(groups=1, within=60).admitted == ("engine-2",)
            wait_for(groups, "engine-2", Phase.RUNNING, 1)
            assert client.shrink(["engine-2"], within=20).done
        wait_for(groups, "engine-2", Phase.DONE, 1)

        # A trainer is killed right after it has published: that arrives, and it is started again.
        call(groups, "trainer", "publish", 3)
        ray.kill(groups.workers("trainer")[0])
        assert [call(groups, f"engine-{i}", "serves", 3)[:2] for i in (0, 1)] == [[3, [3.0]]] * 2
        wait_for(groups, "trainer", Phase.RUNNING, 2)
        assert len(groups.status()["trainer"].failures) == 1
        for fleet in ("trainer", "engine"):
            groups.resize(fleet, 0)
        groups.wait(timeout=60)
    on_ray.close("fleet")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_child_of_an_actor_is_a_member_and_ends_with_its_node(nodes: RayNodes, runtime: Path) -> None:
    on_ray.start("family", runtime=runtime, deadlines=er.Deadlines(evict=60.0, reregister=70.0, orphan_hold=4.0))
    node = nodes.add("home")
    parent: Any = ray.remote(Parent).options(num_cpus=1, resources={"home": 1}).remote("family", str(runtime))
    member, host = ray.get(parent.start.remote(), timeout=60)
    assert host == host_of(node)
    with on_ray.client("family") as client:
        assert client.members()[member].host == host
        nodes.remove("home")
        machine_dies("family", host, runtime)
        until(lambda: member not in client.members() or client.members()[member].state != "live",
              "Ray's word of the node is taken, long before its host would be given up", 30)  # fmt: skip
    on_ray.close("family")


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_member_that_was_put_out_by_force_is_started_again(nodes: RayNodes, runtime: Path) -> None:
    """It still runs, and its `run` raises: it is not taken for one that has done its work."""
    on_ray.start("outcast", runtime=runtime, deadlines=QUICK)
    given = {"job": "outcast", "runtime": str(runtime)}
    fleet = Fleet("engine", Engine, each={"CPU": 1, "one": 1}, arguments=given, options={"max_concurrency": 4})
    with Groups("outcast", [fleet], Limits(pause=0.1)) as groups, on_ray.client("outcast") as client:
        wait_for(groups, "engine", Phase.RUNNING, 1)
        (first,) = client.members()
        client.leave_member(first, force=True)
        assert len(wait_for(groups, "engine", Phase.RUNNING, 2).failures) == 1
        assert [name for name, doc in client.members().items() if doc.state == "live"] != [first]
        groups.resize("engine", 0)
        groups.wait(timeout=60)
    on_ray.close("outcast")


@pytest.mark.long
@pytest.mark.timeout(120)
def test_close_ends_workers_though_ray_refuses_at_first(
    nodes: RayNodes, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = ray.util.remove_placement_group, list[Any]()

    def refuses(room: Any) -> None:
        if len(refused) < 3:
            refused.append(room)
            raise ray.exceptions.RpcError("the control service is away", rpc_code=14)
        real(room)

    with Groups("tidy", [Fleet("sleeper", Sleeper, groups=2, each={"CPU": 1, "one": 1})]) as groups:
        pids = [until(lambda n=n: call_pid(groups, f"sleeper-{n}"), "it runs", 60) for n in (0, 1)]
        monkeypatch.setattr("elastic_reshard.on_ray.fleet.remove_placement_group", refuses)
    assert len(refused) == 3
    rooms = [room for room in ray.util.placement_group_table().values() if "/tidy/" in room["name"]]
    assert [room["state"] for room in rooms] == ["REMOVED"] * 2
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they are ended")


def call_pid(groups: Groups, name: str) -> int | None:
    """Of rank 0, once it is there."""
    return call(groups, name, "pid") if groups.workers(name) else None
