"""Movers are killed or frozen, at each phase of a transfer, of those who send and those who receive: one loss is one rebuild,
nothing that landed is moved again, and what arrives is right bit for bit.

CASES B08, B12, B16, B18, B45, B47, B87, B89 as they show with movers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.elastic.actors import Actor, until
from tests.elastic.stage import SETTINGS, SIZE, Stage, freeze, gone, kill, wake
from tests.elastic.world import World

Maker = Callable[..., World]


@pytest.fixture
def stage(make_world: Maker) -> Stage:
    """Trainers on host a, engines on b and c, that have refitted once."""
    stage = Stage(make_world(**SETTINGS))
    stage.refit()
    return stage


class Before:
    """How things stood before a fault; afterwards it is checked what that has cost."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.epoch = stage, stage.world.view().membership_epoch

    def one_rebuild(self, label: str, *named: Actor) -> None:
        """All serve it after one rebuild, which was one change, and cost no member."""
        self.stage.serves(label)
        self.stage.rebuilt(label, *named)
        assert self.stage.world.view().membership_epoch == self.epoch + 1, "one loss is one change"
        assert self.stage.world.evicted() == [], "no member is lost with its mover"


def killed_in_the_middle(stage: Stage, *victims: Actor) -> None:
    """The movers of these are killed when a part has landed."""
    before = Before(stage)
    label, hold = stage.middle()
    kill(*(stage.world.mover(victim.id) for victim in victims))
    hold.release()
    before.one_rebuild(label, *victims)
    assert stage.network(label) <= 2 * SIZE, "what had landed is not moved again"


def killed_at(stage: Stage, phase: str, victim: Actor) -> None:
    """A mover is killed as it comes to a phase, for the first time from now on."""
    before = Before(stage)
    hold = stage.world.hold(f"mover.{phase}")
    label = stage.publish()
    pids = hold.has(victim.id)
    if phase != "started":  # one that dies before it is heard of in this transfer is replaced, and costs no epoch
        until(lambda: victim.id in stage.heard(label), f"the mover of {victim.id} is heard of")
    kill(*pids.values())
    hold.release()
    before.one_rebuild(label, victim)


def killed_at_rest(stage: Stage) -> None:
    """Movers that have nothing to do are nobody's loss."""
    epoch = stage.world.view().membership_epoch
    movers = stage.world.movers()
    kill(*movers.values())
    for member, pid in movers.items():
        gone(pid, f"the mover of {member}")
    stage.smooth()
    assert stage.world.view().membership_epoch == epoch


def killed_before_hello(stage: Stage, victim: Actor) -> None:
    """One that is killed before anybody knows it."""
    movers = stage.world.movers()
    kill(*movers.values())
    for member, pid in movers.items():
        gone(pid, f"the mover of {member}")
    killed_at(stage, "started", victim)


def one_more_during_the_rebuild(stage: Stage, first: Actor, second: Actor) -> None:
    """B47: what the next epoch is called comes from the supervisor, whatever had failed before."""
    world = stage.world
    label, hold = stage.middle()
    kill(world.mover(first.id))
    again = world.hold("mover.planned")
    hold.release()
    kill(*again.has(second.id).values())
    again.release()
    stage.serves(label)
    one, other = stage.broken(label)
    assert first.id in one
    assert second.id in other
    assert stage.attempts(label) == 3
    assert world.evicted() == []


def test_killed_in_each_phase(stage: Stage) -> None:
    """B45: rank 0 of everything, who sends. B87: a receiver, and two at once: nobody waits for the backend to notice. B12: a
    peer that dies when it has given its values. B89: one that dies when all have met, before the first byte."""
    (zero, one), first, second = stage.trainer, *stage.engines
    killed_in_the_middle(stage, zero)
    killed_in_the_middle(stage, first[1])
    killed_in_the_middle(stage, one, second[0])
    killed_at(stage, "planned", zero)
    killed_at(stage, "formed", second[1])
    killed_at(stage, "out", first[0])
    killed_at_rest(stage)
    killed_before_hello(stage, second[0])
    one_more_during_the_rebuild(stage, zero, second[1])
    stage.smooth()


@pytest.mark.long
@pytest.mark.parametrize("phase", ["planned", "formed", "out"])
def test_killed_in_each_phase_whoever_it_is(stage: Stage, phase: str) -> None:
    for victim in stage.everybody():
        killed_at(stage, phase, victim)
    stage.smooth()


@pytest.mark.long
def test_twenty_in_a_row(stage: Stage) -> None:
    """B18: nothing that a mover keeps from one epoch is taken for another's. Whoever it is, each several times."""
    everybody = stage.everybody()
    for number in range(20):
        killed_in_the_middle(stage, everybody[number % len(everybody)])
    stage.smooth()


@pytest.mark.long
def test_one_more_during_the_rebuild_whoever_it_is(stage: Stage) -> None:
    everybody = stage.everybody()
    for number, victim in enumerate(everybody):
        one_more_during_the_rebuild(stage, victim, everybody[number - 2])


# -- frozen


def frozen_in_the_middle(stage: Stage, victim: Actor) -> None:
    """B08: who stands still in the middle is condemned by its watchdog; nobody waits for the backend's own limits."""
    deadlines = stage.world.settings.deadlines
    before = Before(stage)
    label, hold = stage.middle()
    pid = stage.world.mover(victim.id)
    freeze(pid)
    frozen = time.monotonic()
    hold.release()
    gone(pid, f"the frozen mover of {victim.id}", deadlines.mover_silent + deadlines.proof_of_death + 3.0)
    assert time.monotonic() - frozen >= deadlines.mover_silent - 2 * deadlines.mover_beat, "not before its time"
    before.one_rebuild(label, victim)
    assert "no sign of life" in stage.broken(label)[0]


def stuck_in_its_work(stage: Stage, stuck: Actor, killed: Actor) -> None:
    """B08, B16: it beats, but its work does not return from what it does: it is not out of all operations, so no survivor."""
    world = stage.world
    before = Before(stage)
    label, hold = stage.middle()
    pid = world.mover(stuck.id)
    kill(world.mover(killed.id))
    gone(pid, "a mover that is not out in time", world.settings.deadlines.abort + 5.0)
    hold.release()
    before.one_rebuild(label, killed)


def wakes_in_a_broken_epoch(stage: Stage, killed: Actor) -> None:
    """Work that stood still wakes up when its transfer is broken already, and is not yet condemned for it: what it does then
    counts for nothing."""
    before = Before(stage)
    label, hold = stage.middle()
    kill(stage.world.mover(killed.id))
    stage.world.until(lambda v: any(t and t.state == "breaking" for t in v.transfers.values()), "the epoch breaks")
    hold.release()
    before.one_rebuild(label, killed)


def test_frozen_and_stuck(stage: Stage) -> None:
    zero, first, second = stage.trainer[0], *stage.engines
    frozen_in_the_middle(stage, first[0])
    stuck_in_its_work(stage, second[0], first[0])
    wakes_in_a_broken_epoch(stage, zero)
    stage.smooth()


@pytest.mark.long
def test_frozen_and_stuck_whoever_it_is(stage: Stage) -> None:
    everybody = stage.everybody()
    for number, victim in enumerate(everybody):
        frozen_in_the_middle(stage, victim)
        stuck_in_its_work(stage, victim, everybody[number - 1])
        wakes_in_a_broken_epoch(stage, victim)


@pytest.mark.long
def test_a_pause_shorter_than_the_limit_is_no_death(make_world: Maker) -> None:
    stage = Stage(make_world(**SETTINGS, mover_silent=8.0))
    stage.refit()
    label, hold = stage.middle()
    pids = [stage.world.mover(actor.id) for actor in (stage.trainer[0], stage.engines[0][0])]
    for pid in pids:
        freeze(pid)
    hold.release()
    time.sleep(2.0)  # longer than the usual limit
    for pid in pids:
        wake(pid)
    stage.serves(label)
    stage.whole(label)
    assert set(pids) <= set(stage.world.movers().values()), "they are the same processes"
