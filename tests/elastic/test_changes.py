"""Changes that somebody asked for, in the middle of a transfer: leave, drain, shrink, grow, leave by force. Nobody gets an
error by them, no epoch breaks, and nothing is left of who has gone.

CASES B10, B16 as they show here: who leaves first hinders nobody who stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from elastic_reshard.protocol.docs import MemberState
from tests.elastic import rank as on
from tests.elastic.actors import Actor
from tests.elastic.stage import SETTINGS, Stage, everything_of, gone
from tests.elastic.world import Gang, World, results, until

Maker = Callable[..., World]


def staged(make_world: Maker, engines: Sequence[Sequence[str]] = (("b",), ("c",))) -> Stage:
    """Trainers on host a and engines that have refitted once."""
    stage = Stage(make_world(**SETTINGS), engines=engines)
    stage.refit()
    return stage


def nothing_broke(stage: Stage, *forced: Actor) -> None:
    """No epoch broke since the beginning, and nobody was given up but those who were left out by force."""
    assert stage.world.events("transfer.breaking") == []
    assert sorted(stage.world.evicted()) == sorted(f"{actor.id}: left out by force" for actor in forced)


def drain_an_engines_host(stage: Stage, host: str, going: Gang, *staying: Gang) -> None:
    """Its members hear it and leave; the others' transfer goes on, and no process of the host is left."""
    world = stage.world
    watchdog, *_ = everything_of(world, host)
    movers = world.movers(host)
    assert set(movers) == {actor.id for actor in going}
    label, hold = stage.middle()
    leaving = going.begin(on.leave_when_asked)
    with world.client() as client:
        departure = client.drain(host, within=20.0, wait=False)
        assert set(departure.members) == {actor.id for actor in going}
        hold.release()
        stage.serves(label, *staying)
        results(leaving)
        assert client.drain(host, within=20.0).done
    gone(watchdog, f"the watchdog of {host}")
    for member, pid in movers.items():
        gone(pid, f"the mover of {member}")
    stage.engines.remove(going)
    stage.smooth()
    world.until(lambda v: going.name not in v.groups, "what had landed there is needed no more")


def leaves_by_itself(stage: Stage, going: Gang, *staying: Gang) -> None:
    """A group leaves while cells are on their way to it, or from it; it comes back as new members."""
    label, hold = stage.middle()
    leaving = going.begin(on.leave)
    stage.world.until(lambda v: (doc := v.groups.get(going.name)) is None or not doc.whole, "it is leaving")
    hold.release()
    results(leaving)
    stage.serves(label, *staying)
    stage.whole(label)
    stage.replace(going)
    if going in stage.engines:
        stage.serves(label, going)
    stage.smooth()


def leaves_by_force(stage: Stage, going: Gang, *staying: Gang) -> None:
    """It is out at once, whatever it does, and its calls say so; the others' transfer goes on."""
    label, hold = stage.middle()
    asked = going.begin(on.receive)
    with stage.world.client() as client:
        told = client.leave_group(going.name, force=True)
    assert {doc.state for doc in told.values()} <= {MemberState.ORPHANED, MemberState.LOST}
    hold.release()
    stage.serves(label, *staying)
    stage.whole(label)
    for call in asked:
        error = call.outcome()
        assert error.kind == "NotAMember", error.text
    stage.engines.remove(going)
    stage.smooth()


@pytest.mark.long
def test_leave_drain_and_force(make_world: Maker) -> None:
    stage = staged(make_world, (("b",), ("c",), ("d",)))
    first, second, third = stage.engines
    leaves_by_itself(stage, first, second, third)
    leaves_by_itself(stage, stage.trainer, first, second, third)
    leaves_by_force(stage, second, first, third)
    drain_an_engines_host(stage, "b", first, third)
    nothing_broke(stage, *second)


@pytest.mark.long
def test_drain_of_the_trainers_host(make_world: Maker) -> None:
    """What they had published is served by all, and they are gone."""
    stage = staged(make_world)
    world = stage.world
    watchdog, *_ = everything_of(world, "a")
    movers = world.movers("a")
    label, hold = stage.middle()
    leaving = stage.trainer.begin(on.leave_when_asked)
    with world.client() as client:
        client.drain("a", within=20.0, wait=False)
        hold.release()
        stage.serves(label)
        results(leaving)
        assert client.drain("a", within=20.0).done
    stage.whole(label)
    gone(watchdog, "the watchdog of a")
    for member, pid in movers.items():
        gone(pid, f"the mover of {member}")
    stage.replace(stage.trainer)
    stage.smooth()
    nothing_broke(stage)


@pytest.mark.long
def test_grow_by_two_groups_and_shrink_by_them(make_world: Maker) -> None:
    """Who comes first waits for the other: both come in by one change. Then both are asked to leave, by one request. Each in
    the middle of a transfer, which goes on."""
    stage = staged(make_world)
    world, first = stage.world, list(stage.engines)
    epoch = world.view().membership_epoch
    label, hold = stage.middle()
    late = [world.engine(number, size=1, hosts=[host]) for number, host in ((2, "d"), (3, "b"))]
    with world.client() as client:
        client.grow(groups=2, within=30.0, name="two", wait=False)
        one = late[0][0].begin(on.join, late[0].seat(0), shapes=stage.shapes)
        until(lambda: (now := client.growing()) is not None and now.ready == (late[0].name,), "the first is ready")
        assert world.view().membership_epoch == epoch
        assert not one.done(), "it is not in yet"
        two = late[1][0].begin(on.join, late[1].seat(0), shapes=stage.shapes)
        growth = client.grow(groups=2, within=30.0, name="two")
        assert (growth.done, growth.missing, set(growth.admitted)) == (True, 0, {engine.name for engine in late})
        results([one, two])
        assert world.view().membership_epoch == epoch + 1, "one change"
        hold.release()
        stage.serves(label)
        stage.catches_up(label, *late)
        stage.engines += late
        stage.smooth()

        label, hold = stage.middle(*stage.trainer, *first[0], *first[1], nth=2)
        leaving = [call for engine in late for call in engine.begin(on.leave_when_asked)]
        names = [engine.name for engine in late]
        client.shrink(names, within=20.0, wait=False)
        hold.release()
        results(leaving)
        assert client.shrink(names, within=20.0).done
    stage.engines = first
    stage.serves(label)
    stage.smooth()
    world.until(lambda v: not set(names) & set(v.groups), "nothing of them is needed any more")
    nothing_broke(stage)
