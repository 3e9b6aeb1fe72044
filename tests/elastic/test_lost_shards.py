"""What the only host that has a shard is gone, and comes back in time, or does not; and what a supervisor that is killed or
frozen in the middle of a transfer does to it: nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.elastic import rank as on
from tests.elastic.stage import CELL, Stage, everything_of, freeze, vanish, wake
from tests.elastic.world import World

Maker = Callable[..., World]
QUICK = {"beat": 0.4, "evict": 2.0, "reregister": 2.0}  # a host that is silent is given up soon


def scattered(make_world: Maker, hold: float) -> Stage:
    """Trainers of a sharded model on a and b, engines on c and d, that have refitted once."""
    world = make_world(cell=CELL, hooks={}, orphan_hold=hold, **QUICK)
    stage = Stage(world, trainer=("a", "b"), engines=(("c",), ("d",)))
    stage.refit()
    return stage


# -- shards


@pytest.mark.long
def test_a_shard_that_comes_back_in_time(make_world: Maker) -> None:
    """All processes of its host stand still until the others have said that nobody has it; then they go on: so does the
    transfer, from what had landed."""
    stage = scattered(make_world, hold=20.0)
    world = stage.world
    label, hold = stage.middle(nth=2)
    still = everything_of(world, "a")
    for pid in still:
        freeze(pid)
    hold.release()
    world.until(lambda _: world.events("transfer.suspended"), "nobody has its shard")
    for engine in stage.engines:
        engine.holds("s1")
    for pid in still:
        wake(pid)
    stage.serves(label)
    assert stage.trainer[0].id in stage.broken(label)[0], "who was not reached is named"
    assert world.events("transfer.given_up") == []
    stage.refit()


@pytest.mark.long
def test_a_shard_that_does_not_come_back(make_world: Maker) -> None:
    """Suspended for `orphan_hold`, then ShardLost, which names tensors, to whoever waits; everyone goes on serving."""
    stage = scattered(make_world, hold=3.0)
    world = stage.world
    label, hold = stage.middle(nth=2)
    still = everything_of(world, "a")
    for pid in still:
        freeze(pid)
    hold.release()
    told = stage.trainer[1].begin(on.committed, label).outcome()
    assert told.kind == "PublicationAbandoned"
    assert "ShardLost" in told.text
    assert "w0" in told.text, "what is lost is named"
    reason = stage.publication(label).reason
    assert "ShardLost" in reason
    given_up, suspended = world.events("transfer.given_up")[0], world.events("transfer.suspended")[0]
    assert given_up.at - suspended.at >= 3.0 - 0.1, "not before its time"
    for engine in stage.engines:
        engine.holds("s1")
        assert engine.version() == 1
    for pid in still:  # too late for that version
        wake(pid)
    world.until(lambda v: v.groups["trainer"].whole, "the gang is whole again")
    newer = stage.publish()
    stage.catches_up(newer, *stage.engines)


@pytest.mark.long
def test_a_shard_that_its_host_took_with_it(make_world: Maker) -> None:
    """SIGKILL to all of the host; another one of its name brings nothing back of what was published, and the next publish is
    everybody's."""
    stage = scattered(make_world, hold=4.0)
    world = stage.world
    label, hold = stage.middle(nth=2)
    vanish(world, "a")
    hold.release()
    told = stage.trainer[1].begin(on.committed, label).outcome()
    assert told.kind == "PublicationAbandoned"
    for engine in stage.engines:
        engine.holds("s1")
        assert engine.version() == 1
    stage.replace(stage.trainer, 0)
    stage.catches_up(stage.publish(), *stage.engines)


# -- the supervisor


@pytest.fixture
def stage(make_world: Maker) -> Stage:
    """Trainers on host a, engines on b and c, that have refitted once."""
    stage = Stage(make_world(cell=CELL, hooks={}))
    stage.refit()
    return stage


BACK = 2.0  # seconds from being back to going on


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
def test_killed_and_restarted_in_mid_transfer(stage: Stage, times: int) -> None:
    """Movers are not touched: the very transfer goes on, and is committed soon after the supervisor is back."""
    world = stage.world
    label, hold = stage.middle()
    movers, transfer = world.movers(), world.transfer().id
    for _ in range(times):
        world.kill_supervisor()
        hold.release()
        for engine in stage.engines:
            engine.holds("s1")
        world.start_supervisor()
    back = time.monotonic()
    stage.trainer.committed(label)
    took = time.monotonic() - back
    stage.serves(label)
    assert world.movers() == movers, "the same processes"
    # Events are of the supervisor's life: the transfer that is over is the one that was begun before.
    assert [e.fields["transfer"] for e in world.events("transfer.over")][:1] == [transfer]
    assert world.events("transfer.breaking") == []
    assert took <= BACK
    stage.smooth()


@pytest.mark.long
def test_killed_and_back_before_anything_more_has_landed(stage: Stage) -> None:
    """The movers stand in the middle all the time: nobody condemns them, nothing is begun anew."""
    world = stage.world
    label, hold = stage.middle()
    movers = world.movers()
    for _ in range(2):
        world.kill_supervisor()
        world.start_supervisor()
    hold.release()
    stage.serves(label)
    assert world.movers() == movers
    assert world.events("transfer.breaking") == []
    stage.smooth()


@pytest.mark.long
def test_frozen_in_mid_transfer(make_world: Maker) -> None:
    """For longer than it lets others be silent, and a transfer stand still: nobody is given up for it, nothing breaks."""
    stage = Stage(make_world(cell=CELL, hooks={}, stall=3.0, **QUICK))
    stage.refit()
    world = stage.world
    supervisor = world.supervisor
    assert supervisor is not None
    epoch = world.view().membership_epoch
    label, hold = stage.middle()
    movers = world.movers()
    supervisor.stop()
    hold.release()
    time.sleep(4.0)  # the length of the freeze, not a wait for something
    supervisor.cont()
    stage.serves(label)
    stage.whole(label)
    assert world.movers() == movers
    assert world.view().membership_epoch == epoch
    assert world.evicted() == []
    stage.smooth()
