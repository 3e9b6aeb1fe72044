"""Movers are killed or frozen, at each phase of a transfer, of those who send and those who receive: one loss is one rebuild,
nothing that landed is moved again, and what arrives is right bit for bit.

CASES B08, B12, B16, B18, B45, B47, B87, B89 as they show with movers.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.elastic.actors import Actor
from tests.elastic.stage import CELL, MIDDLE, Stage, freeze, gone, kill, wake
from tests.elastic.world import World

Maker = Callable[..., World]
PHASES = ("planned", "formed", "out")


@pytest.fixture
def stage(make_world: Maker) -> Stage:
    """Trainers on host a, engines on b and c, that have refitted once."""
    stage = Stage(make_world(cell=CELL, hooks={}))
    assert stage.refit("s1") == 1
    return stage


def rebuilt_once(stage: Stage, label: str, epoch: int, *named: Actor) -> None:
    """All serve it after one rebuild, which was one change, and cost no member."""
    version = stage.serves(label)
    assert version == int(label[1:])
    stage.one_rebuild(label, *named)
    assert stage.world.view().membership_epoch == epoch + 1, "one loss is one change"
    assert stage.world.evicted() == [], "no member is lost with its mover"


def killed_in_the_middle(stage: Stage, label: str, *victims: Actor) -> None:
    """The movers of these are killed when half has landed."""
    epoch = stage.world.view().membership_epoch
    hold = stage.middle(label)
    kill(*(stage.world.mover(victim.id) for victim in victims))
    hold.release()
    rebuilt_once(stage, label, epoch, *victims)
    assert stage.network(label) <= 1.2 * stage.network("s1"), "what had landed is not moved again"


def killed_at(stage: Stage, label: str, phase: str, victim: Actor) -> None:
    """A mover is killed as it comes to a phase."""
    epoch = stage.world.view().membership_epoch
    hold = stage.world.hold(f"mover.{phase}")
    stage.trainer.publish(label)
    kill(*hold.has(victim.id).values())
    hold.release()
    rebuilt_once(stage, label, epoch, victim)


def test_killed_in_the_middle(stage: Stage) -> None:
    """B45: rank 0 of everything, who sends; B87: a receiver; two at once: the others wait for no backend to notice."""
    killed_in_the_middle(stage, "s2", stage.trainer[0])
    killed_in_the_middle(stage, "s3", stage.engines[0][1])
    killed_in_the_middle(stage, "s4", stage.trainer[1], stage.engines[1][0])
    assert stage.refit("s5") == 5
    assert (stage.broken("s5"), stage.attempts("s5")) == ([], 1), "and that was all"


def test_killed_before_they_meet_and_after(stage: Stage) -> None:
    """B12: a peer that has given its values and dies; B89: one that dies after all have met, before the first byte; and one
    that has done all, before it could say so."""
    killed_at(stage, "s2", "planned", stage.trainer[0])
    killed_at(stage, "s3", "formed", stage.engines[1][1])
    killed_at(stage, "s4", "out", stage.engines[0][0])


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
def test_killed_at_each_phase_whoever_it_is(stage: Stage, phase: str) -> None:
    everybody = [*stage.trainer, *stage.engines[0], *stage.engines[1]]
    for number, victim in enumerate(everybody):
        killed_at(stage, f"s{number + 2}", phase, victim)


@pytest.mark.long
def test_killed_in_the_middle_whoever_it_is(stage: Stage) -> None:
    everybody = [*stage.trainer, *stage.engines[0], *stage.engines[1]]
    for number, victim in enumerate(everybody):
        killed_in_the_middle(stage, f"s{number + 2}", victim)


def test_killed_at_rest_and_before_it_says_hello(stage: Stage) -> None:
    """At rest nothing breaks. A mover that is killed before it is known to anybody is replaced in one rebuild."""
    world = stage.world
    epoch = world.view().membership_epoch
    for member, pid in world.movers().items():
        kill(pid)
        gone(pid, f"the mover of {member}")
    hold = world.hold("mover.started")
    stage.trainer.publish("s2")
    assert world.view().membership_epoch == epoch, "movers at rest are nobody's loss"
    victim = stage.engines[0][0]
    kill(*hold.has(victim.id).values())
    hold.release()
    rebuilt_once(stage, "s2", epoch, victim)


def test_one_more_during_the_rebuild(stage: Stage) -> None:
    """B47: what the rebuild is called comes from the supervisor, whatever had failed before."""
    world = stage.world
    hold = stage.middle("s2")
    kill(world.mover(stage.trainer[0].id))
    again = world.hold("mover.planned")
    hold.release()
    second = stage.engines[1][1]
    kill(*again.has(second.id).values())
    again.release()
    assert stage.serves("s2") == 2
    first, other = stage.broken("s2")
    assert stage.trainer[0].id in first
    assert second.id in other
    assert stage.attempts("s2") == 3
    assert world.evicted() == []


# -- frozen


def frozen_in_the_middle(stage: Stage, label: str, victim: Actor) -> None:
    """B08: a mover that stands still in the middle is condemned by its watchdog; nobody waits for the backend's own limits."""
    world = stage.world
    deadlines = world.settings.deadlines
    epoch = world.view().membership_epoch
    hold = stage.middle(label)
    pid = world.mover(victim.id)
    freeze(pid)
    frozen = time.monotonic()
    hold.release()
    gone(pid, f"the frozen mover of {victim.id}", deadlines.mover_silent + deadlines.proof_of_death + 3.0)
    assert time.monotonic() - frozen >= deadlines.mover_silent - 2 * deadlines.mover_beat, "not before its time"
    rebuilt_once(stage, label, epoch, victim)
    assert "no sign of life" in stage.broken(label)[0]


def test_frozen_in_the_middle(stage: Stage) -> None:
    frozen_in_the_middle(stage, "s2", stage.engines[0][0])
    assert stage.refit("s3") == 3


@pytest.mark.long
def test_frozen_in_the_middle_whoever_it_is(stage: Stage) -> None:
    for number, victim in enumerate([*stage.trainer, *stage.engines[0], *stage.engines[1]]):
        frozen_in_the_middle(stage, f"s{number + 2}", victim)


def test_a_pause_shorter_than_the_limit_is_no_death(make_world: Maker) -> None:
    stage = Stage(make_world(cell=CELL, hooks={}, mover_silent=8.0, stall=20.0))
    hold = stage.middle("s1")
    pids = [stage.world.mover(actor.id) for actor in (stage.trainer[0], stage.engines[0][0])]
    for pid in pids:
        freeze(pid)
    hold.release()
    stage.world.until(lambda v: not any(d and d.state == "committed" for d in v.publications.values()), "none is committed")
    for pid in pids:
        wake(pid)
    assert stage.serves("s1") == 1
    assert (stage.broken("s1"), stage.attempts("s1")) == ([], 1)
    assert set(pids) <= set(stage.world.movers().values()), "they are the same processes"


def test_one_that_hangs_in_its_work_is_condemned_when_the_epoch_breaks(stage: Stage) -> None:
    """B08, B16: it beats, but its work does not return from what it does: not out of all operations, it is no survivor."""
    world = stage.world
    hold = stage.middle("s2")
    stuck = world.mover(stage.engines[1][0].id)
    kill(world.mover(stage.engines[0][0].id))
    gone(stuck, "a mover that is not out in time", world.settings.deadlines.abort + 5.0)
    hold.release()
    assert stage.serves("s2") == 2
    stage.one_rebuild("s2", stage.engines[0][0])
    assert world.evicted() == []


def test_one_that_wakes_in_a_broken_epoch_writes_nothing_that_counts(stage: Stage) -> None:
    """Its work wakes up in the middle of a broken transfer, before it is condemned, and while the next is being formed."""
    world = stage.world
    hold = stage.middle("s2")
    kill(world.mover(stage.trainer[0].id))
    world.until(lambda v: any(t and t.state == "breaking" for t in v.transfers.values()), "the epoch breaks")
    hold.release()
    assert stage.serves("s2") == 2
    assert stage.attempts("s2") == 2
    for label in ("s3", "s4"):
        assert stage.refit(label) == int(label[1:])


def _signals() -> list[signal.Signals]:
    return [signal.SIGKILL, signal.SIGSTOP]


@pytest.mark.long
def test_twenty_in_a_row(stage: Stage) -> None:
    """B18: nothing that a mover keeps from one epoch is taken for another's."""
    everybody = [*stage.trainer, *stage.engines[0], *stage.engines[1]]
    for number in range(20):
        killed_in_the_middle(stage, f"s{number + 2}", everybody[number % len(everybody)])
