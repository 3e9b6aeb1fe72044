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
