"""Members, watchdogs, the nursery and whole hosts go in the middle of a transfer: what can still be had is committed and right
bit for bit, what can't is given up by name, and everybody else goes on.

CASES B10, B16, B45 as they show with hosts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.elastic import rank as on
from tests.elastic.actors import Actor
from tests.elastic.stage import BIG, SETTINGS, SIZE, Stage, everything_of, freeze, kill, nursery, vanish, wake
from tests.elastic.world import Gang, World, until

Maker = Callable[..., World]
QUICK = {"beat": 0.3, "evict": 1.5, "reregister": 1.5}  # a host that is silent is given up soon
# Whole on each source rank: any of its hosts has everything.
WHOLE = {name: (shape, dtype, None) for name, (shape, dtype, _) in BIG.items()}
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]


@pytest.fixture
def stage(make_world: Maker) -> Stage:
    """Trainers on host a, engines on b and c, that have refitted once."""
    stage = Stage(make_world(**SETTINGS))
    stage.refit()
    return stage


# -- members


def member_dies(stage: Stage, gang: Gang, rank: int) -> None:
    """A member that dies alone breaks no transfer: its arenas are kept, and its mover goes on."""
    others = [engine for engine in stage.engines if engine is not gang]
    label, hold = stage.middle()
    gang[rank].kill()
    hold.release()
    stage.serves(label, *others)
    stage.whole(label)
    stage.replace(gang, rank)
    if gang in stage.engines:
        stage.serves(label, gang)


def member_and_mover_die(stage: Stage, gang: Gang, rank: int) -> None:
    """Both at once: one rebuild; what the member had published is not lost with it."""
    others = [engine for engine in stage.engines if engine is not gang]
    victim: Actor = gang[rank]
    label, hold = stage.middle()
    kill(victim.pid, stage.world.mover(victim.id))
    hold.release()
    stage.serves(label, *others)
    stage.rebuilt(label, victim)
    stage.replace(gang, rank)
    if gang in stage.engines:
        stage.serves(label, gang)


def test_members_with_and_without_their_movers(stage: Stage) -> None:
    """B45: rank 0 of the trainers, and an engine's ranks."""
    member_dies(stage, stage.engines[0], 0)
    member_dies(stage, stage.trainer, 0)
    member_and_mover_die(stage, stage.engines[0], 1)
    member_and_mover_die(stage, stage.trainer, 0)
    stage.smooth()
    assert stage.world.evicted() == []


@pytest.mark.long
@pytest.mark.parametrize("dies", [member_dies, member_and_mover_die])
def test_whoever_it_is(stage: Stage, dies: Callable[[Stage, Gang, int], None]) -> None:
    for gang in (stage.trainer, *stage.engines):
        for rank in range(gang.size):
            dies(stage, gang, rank)
    stage.smooth()


@pytest.mark.long
def test_all_engines_but_one(make_world: Maker) -> None:
    """Members and movers of two of three engines, at once, in one rebuild; they come back and are caught up by the third."""
    stage = Stage(make_world(**SETTINGS), engines=[["b"], ["c"], ["d"]])
    *lost, last = stage.engines
    stage.refit()
    label, hold = stage.middle()
    movers = [stage.world.mover(actor.id) for engine in lost for actor in engine]
    kill(*movers, *(actor.pid for engine in lost for actor in engine))
    hold.release()
    stage.serves(label, last)
    stage.rebuilt(label, *lost[0], *lost[1])
    for engine in lost:
        stage.replace(engine)
    stage.serves(label, *lost)
    stage.smooth()


@pytest.mark.long
def test_down_to_one_member_and_back_to_three(make_world: Maker) -> None:
    """One trainer's rank is left of three members; what was published is served by those who come back."""
    stage = Stage(make_world(**SETTINGS), engines=[["b"]], shapes=WHOLE, size=1)
    trainer, engine = stage.trainer, stage.engines[0]
    stage.refit()
    label, hold = stage.middle(nth=2)
    engine.kill()
    trainer[0].kill()
    hold.release()
    stage.world.until(
        lambda v: [m for m, d in v.members.items() if d and d.state == "live"] == [trainer[1].id], "one is left"
    )
    stage.replace(trainer, 0)
    stage.replace(engine)
    stage.serves(label)
    stage.smooth()
    assert stage.world.evicted() == []


# -- watchdogs and the nursery


def watchdog_goes(stage: Stage, host: str, how: signal.Signals) -> None:
    """Movers go on without it; nothing is moved again, and the next transfer is led by its replacement."""
    world = stage.world
    epoch, movers = world.view().membership_epoch, world.movers()
    label, hold = stage.middle()
    old = world.watchdog(host).pid
    os.kill(old, how)
    until(lambda: (now := world.watchdog(host)) is not None and now.pid != old, "another watchdog is there", 10.0)
    hold.release()
    stage.serves(label)
    stage.whole(label)
    assert stage.network(label) == 2 * SIZE, "each host's share, once"
    stage.smooth()
    assert world.movers() == movers, "the same movers all the time"
    assert world.view().membership_epoch == epoch
    assert world.evicted() == []


def nursery_goes(stage: Stage) -> None:
    """Movers live on without it; who needs a new one starts another nursery."""
    world, victim = stage.world, stage.engines[0][0]
    label, hold = stage.middle()
    old = nursery(world)
    kill(old)
    hold.release()
    stage.serves(label)
    stage.whole(label)
    label, hold = stage.middle()
    kill(world.mover(victim.id))
    hold.release()
    stage.serves(label)
    stage.rebuilt(label, victim)
    assert nursery(world) != old


@pytest.mark.long
def test_a_watchdog_and_the_nursery(stage: Stage) -> None:
    watchdog_goes(stage, "b", signal.SIGKILL)
    watchdog_goes(stage, "a", signal.SIGSTOP)
    nursery_goes(stage)


@pytest.mark.long
@pytest.mark.parametrize("how", SIGNALS)
def test_each_watchdog(stage: Stage, how: signal.Signals) -> None:
    for host in "abc":
        watchdog_goes(stage, host, how)


# -- hosts


@pytest.mark.long
def test_an_engines_host_vanishes_and_comes_back(make_world: Maker) -> None:
    """Evicted after its silence; the others commit without it, in one rebuild; what comes back starts anew."""
    stage = Stage(make_world(**SETTINGS, **QUICK))
    world = stage.world
    first, second = stage.engines
    stage.refit()
    epoch = world.view().membership_epoch
    label, hold = stage.middle()
    lost = {actor.id for actor in first}
    vanish(world, "b")
    hold.release()
    stage.serves(label, second)
    stage.rebuilt(label)
    assert {line.split(":")[0] for line in world.evicted()} == lost
    assert world.view().membership_epoch <= epoch + 2, "its movers, and its members once they are given up"
    stage.replace(first)
    stage.serves(label, first)
    stage.smooth()


@pytest.mark.long
def test_what_nobody_holds_any_more_is_given_up_by_name(make_world: Maker) -> None:
    """The only host that had a shard has vanished: suspended, then ShardLost; everyone goes on serving, and what comes next
    is served."""
    stage = Stage(make_world(**SETTINGS | QUICK | {"orphan_hold": 2.0}), trainer=["a", "b"], engines=[["c"], ["d"]])
    stage.refit()
    lost = stage.trainer[0].id
    label, hold = stage.middle(nth=1)
    vanish(stage.world, "a")
    hold.release()
    told = stage.trainer[1].begin(on.committed, label).outcome()
    assert told.kind == "PublicationAbandoned"
    assert lost in told.text or "ShardLost" in told.text
    for engine in stage.engines:
        engine.holds("s1")
        assert engine.version() == 1
    stage.replace(stage.trainer, 0)
    stage.smooth()


@pytest.mark.long
def test_one_of_the_sources_hosts_vanishes(make_world: Maker) -> None:
    """The other one has everything too: in one rebuild it sends the rest."""
    stage = Stage(make_world(**SETTINGS, **QUICK), trainer=["a", "b"], engines=[["c"], ["d"]], shapes=WHOLE)
    stage.refit()
    victim = stage.trainer[0]
    label, hold = stage.middle(nth=2)
    vanish(stage.world, "a")
    hold.release()
    stage.serves(label)
    stage.rebuilt(label)
    assert [line.split(":")[0] for line in stage.world.evicted()] == [victim.id]
    stage.replace(stage.trainer, 0)
    stage.smooth()


@pytest.mark.long
def test_a_host_that_was_frozen_and_wakes(make_world: Maker) -> None:
    """B16: all its processes stand still until the others have gone on without it; then all wake at once, movers in the
    middle of a transfer that is over. Nothing that they write counts; its members start anew, and get what is served."""
    stage = Stage(make_world(**SETTINGS, **QUICK))
    first, second = stage.engines
    stage.refit()
    label, hold = stage.middle()
    zombies = everything_of(stage.world, "b")
    for pid in zombies:
        freeze(pid)
    hold.release()
    stage.serves(label, second)
    stage.rebuilt(label)
    label = stage.publish()
    stage.serves(label, second)
    for pid in zombies:
        wake(pid)
    stage.catches_up(label, first)
    second.holds(label)
    stage.smooth()
