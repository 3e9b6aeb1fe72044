"""Members, watchdogs, the nursery and whole hosts go in the middle of a transfer: what can still be had is committed and right
bit for bit, what can't is given up by name, and everybody else goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.elastic import rank as on
from tests.elastic.stage import BIG, CELL, Stage, everything_of, freeze, gone, kill, nursery, vanish, wake
from tests.elastic.world import World, until

Maker = Callable[..., World]
QUICK = {"beat": 0.3, "evict": 1.5, "reregister": 1.5}  # a host that is silent is given up soon
# The source's are whole on each rank: any of its hosts has everything.
WHOLE = {name: (shape, dtype, None) for name, (shape, dtype, _) in BIG.items()}


@pytest.fixture
def stage(make_world: Maker) -> Stage:
    """Trainers on host a, engines on b and c, that have refitted once."""
    stage = Stage(make_world(cell=CELL, hooks={}))
    assert stage.refit("s1") == 1
    return stage


# -- members


def test_a_member_that_dies_alone_breaks_no_transfer(stage: Stage) -> None:
    """Its arenas are kept, and its mover goes on: an engine's rank, then rank 0 of the trainers."""
    first, second = stage.engines
    hold = stage.middle("s2")
    first[0].kill()
    hold.release()
    assert stage.serves("s2", second) == 2
    assert (stage.broken("s2"), stage.attempts("s2")) == ([], 1)
    first.replace(0, shapes=BIG)
    assert stage.serves("s2", first) == 2

    hold = stage.middle("s3")
    stage.trainer[0].kill()
    hold.release()
    assert stage.serves("s3") == 3, "what was published is not lost with who published it"
    assert (stage.broken("s3"), stage.attempts("s3")) == ([], 1)
    stage.trainer.replace(0, shapes=BIG)
    assert stage.refit("s4") == 4


def test_member_and_mover_die_together(stage: Stage) -> None:
    first, second = stage.engines
    world = stage.world
    for label, victim in (("s2", first[1]), ("s3", stage.trainer[0])):
        hold = stage.middle(label)
        kill(victim.pid, world.mover(victim.id))
        hold.release()
        assert stage.serves(label, second) == int(label[1:])
        stage.one_rebuild(label, victim)
        gang = first if victim in list(first) else stage.trainer
        gang.replace(list(gang).index(victim), shapes=BIG)
        assert stage.serves(label, first) == int(label[1:])
    assert stage.refit("s4") == 4


def test_all_engines_but_one(make_world: Maker) -> None:
    """Members and movers of two of three engines, at once."""
    stage = Stage(make_world(cell=CELL, hooks={}), engines=[["b"], ["c"], ["d"]])
    world = stage.world
    *lost, last = stage.engines
    stage.refit("s1")
    hold = stage.middle("s2")
    movers = [world.mover(actor.id) for engine in lost for actor in engine]
    kill(*movers, *(actor.pid for engine in lost for actor in engine))
    hold.release()
    assert stage.serves("s2", last) == 2
    stage.one_rebuild("s2", *lost[0], *lost[1])
    for engine in lost:
        engine.replace(shapes=BIG)
    assert stage.serves("s2", *lost) == 2
    assert stage.refit("s3") == 3


def test_down_to_one_member_and_back_to_three(make_world: Maker) -> None:
    stage = Stage(make_world(cell=CELL, hooks={}), engines=[["b"]], shapes=WHOLE)
    trainer, engine = stage.trainer, stage.engines[0]
    stage.refit("s1")
    hold = stage.middle("s2", nth=2)
    engine.kill()
    trainer[0].kill()
    hold.release()
    stage.world.until(lambda v: [m for m, d in v.members.items() if d and d.state == "live"] == [trainer[1].id], "one is left")
    trainer.replace(0, shapes=WHOLE)
    engine.replace(0, 1, shapes=WHOLE)
    assert stage.serves("s2") == 2, "what was published is there, although nobody was left to take it"
    assert stage.refit("s3") == 3
    assert stage.world.evicted() == []


# -- watchdogs and the nursery


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
@pytest.mark.parametrize("host", ["b", pytest.param("a", marks=pytest.mark.long)])
def test_a_watchdog_in_the_middle(stage: Stage, host: str, how: signal.Signals) -> None:
    """Movers go on; nothing is moved again, and the next transfer is led by the new one."""
    world = stage.world
    epoch, movers = world.view().membership_epoch, world.movers()
    hold = stage.middle("s2")
    old = world.watchdog(host).pid
    os.kill(old, how)
    until(lambda: (now := world.watchdog(host)) is not None and now.pid != old, "another watchdog is there", 10.0)
    hold.release()
    assert stage.serves("s2") == 2
    assert (stage.broken("s2"), stage.attempts("s2")) == ([], 1)
    assert stage.network("s2") == stage.network("s1")
    assert stage.refit("s3") == 3
    assert world.movers() == movers, "the same movers all the time"
    assert world.view().membership_epoch == epoch
    assert world.evicted() == []


def test_the_nursery_in_the_middle(stage: Stage) -> None:
    """Movers live on without it; who needs a new one starts another nursery."""
    world = stage.world
    hold = stage.middle("s2")
    old = nursery(world)
    kill(old)
    hold.release()
    assert stage.serves("s2") == 2
    assert stage.broken("s2") == []
    hold = stage.middle("s3")
    kill(world.mover(stage.engines[0][0].id))
    hold.release()
    assert stage.serves("s3") == 3
    stage.one_rebuild("s3", stage.engines[0][0])
    assert nursery(world) != old


# -- hosts


def test_an_engines_host_vanishes_and_comes_back(make_world: Maker) -> None:
    """Evicted after its silence; the others commit without it, in one rebuild; what comes back starts anew."""
    stage = Stage(make_world(cell=CELL, hooks={}, **QUICK))
    world = stage.world
    first, second = stage.engines
    stage.refit("s1")
    epoch = world.view().membership_epoch
    hold = stage.middle("s2")
    lost = [actor.id for actor in first]
    vanish(world, "b")
    hold.release()
    assert stage.serves("s2", second) == 2
    stage.one_rebuild("s2", *first)
    assert {line.split(":")[0] for line in world.evicted()} <= set(lost)
    assert world.view().membership_epoch <= epoch + 2, "the movers, and the members"
    first.replace(shapes=BIG)
    assert stage.serves("s2", first) == 2
    assert stage.refit("s3") == 3


def test_one_of_the_sources_hosts_vanishes(make_world: Maker) -> None:
    """The other one has everything too."""
    stage = Stage(make_world(cell=CELL, hooks={}, **QUICK), trainer=["a", "b"], engines=[["c"]], shapes=WHOLE)
    world = stage.world
    stage.refit("s1")
    hold = stage.middle("s2", nth=1)
    vanish(world, "a")
    hold.release()
    assert stage.serves("s2") == 2
    assert stage.attempts("s2") == 2
    stage.trainer.replace(0, shapes=WHOLE)
    assert stage.refit("s3") == 3


def test_what_nobody_holds_any_more_is_given_up_by_name(make_world: Maker) -> None:
    """The only host that had a shard has vanished: suspended, then ShardLost; everyone goes on serving."""
    stage = Stage(make_world(cell=CELL, hooks={}, **QUICK), trainer=["a", "b"], engines=[["c"], ["d"]])
    world = stage.world
    stage.refit("s1")
    hold = stage.middle("s2", nth=1)
    lost = stage.trainer[0].id
    vanish(world, "a")
    hold.release()
    told = stage.trainer[1].begin(on.committed, "s2").outcome()
    assert told.kind == "PublicationAbandoned"
    assert lost in told.text or "ShardLost" in told.text
    for engine in stage.engines:
        engine.holds("s1")
        assert engine.version() == 1
    stage.trainer.replace(0, shapes=BIG)
    assert stage.refit("s3") == 3


def test_a_host_that_was_frozen_and_wakes(make_world: Maker) -> None:
    """B16: all its processes stand still until the others have gone on without it; then all wake at once, movers in the
    middle of a transfer that is over. Nothing that they write counts; its members start anew, and get what is served."""
    stage = Stage(make_world(cell=CELL, hooks={}, **QUICK))
    world = stage.world
    first, second = stage.engines
    stage.refit("s1")
    hold = stage.middle("s2")
    zombies = everything_of(world, "b")
    for pid in zombies:
        freeze(pid)
    hold.release()
    assert stage.serves("s2", second) == 2
    stage.trainer.publish("s3")
    assert stage.serves("s3", second) == 3
    for pid in zombies:
        wake(pid)
    assert stage.serves("s3", first) == 3
    second.holds("s3")
    assert stage.refit("s4") == 4
