"""Changes that somebody asked for, in the middle of a transfer and out of it: leave, drain, shrink, grow, leave by force. Nobody
gets an error by them, and no epoch breaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic_reshard.protocol.docs import MemberState
from tests.elastic import rank as on
from tests.elastic.stage import BIG, CELL, Stage, everything_of, gone
from tests.elastic.world import World, results, until

Maker = Callable[..., World]


@pytest.fixture
def stage(make_world: Maker) -> Stage:
    """Trainers on host a, engines on b and c, that have refitted once."""
    stage = Stage(make_world(cell=CELL, hooks={}))
    assert stage.refit("s1") == 1
    return stage


def test_drain_in_the_middle(stage: Stage) -> None:
    """The others' transfer goes on; the host's members hear it, leave, and nothing of the host is left."""
    world = stage.world
    first, second = stage.engines
    processes = everything_of(world, "b")
    watchdog, movers = processes[0], list(world.movers("b").values())
    hold = stage.middle("s2")
    leaving = first.begin(on.leave_when_asked)
    with world.client() as client:
        departure = client.drain("b", within=20.0, wait=False)
        assert set(departure.members) == {actor.id for actor in first}
        hold.release()
        assert stage.serves("s2", second) == 2
        results(leaving)
        assert client.drain("b", within=20.0).done
    gone(watchdog, "the watchdog of the drained host")
    for pid in movers:
        gone(pid, "a mover of the drained host")
    assert stage.broken("s2") == []
    stage.trainer.publish("s3")
    assert stage.serves("s3", second) == 3
    assert world.events("transfer.breaking") == []
    assert world.evicted() == []
    assert "engine0" not in world.view().groups


def test_leave_in_the_middle(stage: Stage) -> None:
    """An engine leaves by itself while its cells are on their way; then the trainers, whose publish is on its way."""
    world = stage.world
    first, second = stage.engines
    hold = stage.middle("s2")
    leaving = first.begin(on.leave)
    world.until(lambda v: "engine0" not in v.groups or not v.groups["engine0"].whole, "it is leaving")
    hold.release()
    results(leaving)
    assert stage.serves("s2", second) == 2
    hold = stage.middle("s3", *stage.trainer, *second, nth=2)
    leaving = stage.trainer.begin(on.leave)
    world.until(lambda v: "trainer" not in v.groups or not v.groups["trainer"].whole, "they are leaving")
    hold.release()
    results(leaving)
    assert stage.serves("s3", second) == 3, "what was published is not lost by leaving"
    assert world.events("transfer.breaking") == []
    assert world.evicted() == []
    first.replace(shapes=BIG)
    assert stage.serves("s3", first) == 3


def test_drain_of_the_trainers_host_in_the_middle(stage: Stage) -> None:
    """What they had published is served by all before they are gone."""
    world = stage.world
    processes = everything_of(world, "a")
    hold = stage.middle("s2")
    leaving = stage.trainer.begin(on.leave_when_asked)
    with world.client() as client:
        client.drain("a", within=20.0, wait=False)
        hold.release()
        assert stage.serves("s2") == 2
        results(leaving)
        departure = client.drain("a", within=20.0)
        assert departure.done
    assert world.events("transfer.breaking") == []
    for engine in stage.engines:
        engine.holds("s2")
    members = {actor.pid for actor in stage.trainer}
    stage.trainer.replace(shapes=BIG)
    assert stage.refit("s3") == 3
    for pid in set(processes[1:]) - members:
        gone(pid, "a mover of the drained host")


def test_shrink_by_several_groups_in_the_middle(make_world: Maker) -> None:
    stage = Stage(make_world(cell=CELL, hooks={}), engines=[["b"], ["c"], ["d"]])
    world = stage.world
    stage.refit("s1")
    *going, last = stage.engines
    hold = stage.middle("s2")
    leaving = [call for engine in going for call in engine.begin(on.leave_when_asked)]
    with world.client() as client:
        departure = client.shrink(["engine0", "engine1"], within=20.0, wait=False)
        assert set(departure.members) == {actor.id for engine in going for actor in engine}
        hold.release()
        assert set(results(leaving)) <= {1, 2}
        assert client.shrink(["engine0", "engine1"], within=20.0).done
    assert stage.serves("s2", last) == 2
    stage.trainer.publish("s3")
    assert stage.serves("s3", last) == 3
    assert world.events("transfer.breaking") == []
    world.until(lambda v: set(v.groups) == {"trainer", "engine2"}, "what had landed there is needed no more")


def test_grow_by_two_groups_is_one_epoch(stage: Stage) -> None:
    """Who comes first waits for the other; both come in by one change, in the middle of a transfer, and break nothing."""
    world = stage.world
    epoch = world.view().membership_epoch
    hold = stage.middle("s2")
    late = [world.engine(number, hosts=[host]) for number, host in ((2, "d"), (3, "b"))]
    with world.client() as client:
        client.grow(groups=2, within=30.0, name="two", wait=False)
        first = [actor.begin(on.join, late[0].seat(rank), shapes=BIG) for rank, actor in enumerate(late[0])]
        until(lambda: client.growing().ready == ("engine2",) or None, "the first is ready")
        assert world.view().membership_epoch == epoch
        assert not any(call.done() for call in first), "it is not in yet"
        second = [actor.begin(on.join, late[1].seat(rank), shapes=BIG) for rank, actor in enumerate(late[1])]
        growth = client.grow(groups=2, within=30.0, name="two")
        assert (growth.done, growth.missing, set(growth.admitted)) == (True, 0, {"engine2", "engine3"})
    results([*first, *second])
    assert world.view().membership_epoch == epoch + 1, "one change"
    hold.release()
    assert stage.serves("s2") == 2
    for engine in late:
        stage.catches_up("s2", engine)
    stage.engines += late
    assert stage.refit("s3") == 3
    assert world.events("transfer.breaking") == []


def test_leave_by_force_in_the_middle(stage: Stage) -> None:
    """They are out at once, whatever they do; the others' transfer goes on; their own calls say that they are no members."""
    world = stage.world
    first, second = stage.engines
    hold = stage.middle("s2")
    asked = first.begin(on.receive)
    with world.client() as client:
        told = client.leave_group("engine0", force=True)
    assert {doc.state for doc in told.values()} <= {MemberState.ORPHANED, MemberState.LOST}
    hold.release()
    assert stage.serves("s2", second) == 2
    for call in asked:
        error = call.outcome()
        assert error.kind == "NotAMember", error.text
    assert world.events("transfer.breaking") == []
    stage.trainer.publish("s3")
    assert stage.serves("s3", second) == 3
