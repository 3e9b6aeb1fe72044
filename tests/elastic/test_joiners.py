"""Engines on other hosts that join while a publication moves, or when nobody is left who published it, and die while they
are caught up: the transfer in hand is not disturbed, and who is there in the end has exact weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.elastic.actors import Actor
from tests.elastic.stage import BIG, CELL, Stage, kill
from tests.elastic.world import Gang, World, until

Maker = Callable[..., World]


@pytest.fixture
def stage(make_world: Maker) -> Stage:
    """Trainers on host a and an engine on b that have refitted once."""
    stage = Stage(make_world(cell=CELL, hooks={}), engines=(("b",),))
    stage.refit()
    return stage


def join(stage: Stage, number: int, host: str) -> Gang:
    """One more engine, which has joined."""
    return stage.world.engine(number, hosts=[host]).join(shapes=BIG)


def transfers(stage: Stage, label: str) -> list[list[str]]:
    """Groups to which it was moved, by transfer."""
    key = stage.publication(label).id
    return [e.fields["groups"] for e in stage.world.events("transfer.forming") if e.fields["publication"] == key]


def senders(stage: Stage, label: str) -> set[str]:
    """Members of the last transfer of it."""
    key = stage.publication(label).id
    return set(
        [e.fields["members"] for e in stage.world.events("transfer.forming") if e.fields["publication"] == key][-1]
    )


def test_two_that_come_while_a_publication_moves(stage: Stage) -> None:
    """Queued behind it, then served; the transfer in hand is neither broken nor begun anew."""
    world = stage.world
    label, hold = stage.middle(nth=2)
    late = [world.engine(1, 2, hosts=["c"]), world.engine(2, 1, hosts=["d"])]
    world.join(*late, shapes=BIG)
    world.until(lambda v: all(v.groups[gang.name].whole for gang in late), "they are admitted")
    assert world.transfer().epoch < world.view().membership_epoch, "it goes on in the epoch that it began in"
    hold.release()
    stage.serves(label)
    stage.serves(label, *late)
    first, *others = transfers(stage, label)
    assert first == ["engine0"]
    for gang in late:
        assert sum(gang.name in groups for groups in others) == 1, f"{gang.name} was served once"
    assert stage.network(label) == 3 * stage.network("s1"), "what each of the three needs, once"
    assert stage.broken(label) == []
    stage.serves(stage.publish(), *stage.engines, *late)


def test_one_that_dies_while_it_is_caught_up(stage: Stage) -> None:
    """Alone, and with its movers; the others serve and go on, and its next life is caught up."""
    world = stage.world
    hold = world.hold("mover.round", nth=2)
    late = join(stage, 1, "c")
    hold.has(*(actor.id for actor in late))
    movers = [world.mover(actor.id) for actor in late]
    late.kill()
    kill(*movers)
    hold.release()
    stage.engines[0].holds("s1")
    label = stage.refit()
    stage.replace(late)
    stage.serves(label, late)
    stage.serves(stage.publish(), *stage.engines, late)
    assert world.evicted() == []


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_whose_ranks_one_dies_while_it_is_caught_up(stage: Stage, rank: int) -> None:
    """Its memory is kept as long as it may be of use: nothing is broken by it, and the rank's next life is caught up."""
    world = stage.world
    hold = world.hold("mover.round", nth=2)
    late = join(stage, 1, "c")
    hold.has(*(actor.id for actor in late))
    late[rank].kill()
    hold.release()
    stage.replace(late, rank)
    stage.serves("s1", late)
    stage.serves(stage.publish(), *stage.engines, late)


@pytest.mark.long
def test_when_nobody_is_left_who_published_it(stage: Stage) -> None:
    """Served by its peers."""
    world = stage.world
    stage.trainer.kill()
    world.until(
        lambda v: "trainer" not in {d.group for d in v.members.values() if d and d.state == "live"}, "they are gone"
    )
    late = join(stage, 1, "c")
    stage.serves("s1", late)
    peers = {actor.id for engine in (*stage.engines, late) for actor in engine}
    assert senders(stage, "s1") <= peers
    until(lambda: world.watchdog("a") is None, "their host is over, and what they left", 10.0)
    third = join(stage, 2, "d")
    stage.serves("s1", third)
    stage.replace(stage.trainer)
    stage.serves(stage.publish(), *stage.engines, late, third)


@pytest.mark.long
def test_when_the_first_holder_dies_while_it_is_caught_up(stage: Stage) -> None:
    """The trainers are gone; of two peers that hold it, the mover of one is killed in the middle."""
    world = stage.world
    second = join(stage, 1, "c")
    stage.serves("s1", second)
    stage.trainer.kill()
    hold = world.hold("mover.round", nth=2)
    late = join(stage, 2, "d")
    hold.has(*(actor.id for actor in late))
    victim: Actor = stage.engines[0][0]
    if victim.id in world.movers():
        kill(world.mover(victim.id))
    hold.release()
    stage.serves("s1", late)
    for engine in (stage.engines[0], second):
        engine.holds("s1")


@pytest.mark.long
def test_a_newer_version_while_one_is_caught_up(stage: Stage) -> None:
    """What the joiner gets is a whole version, the newest in the end; the others do not wait for its turn to be over."""
    world = stage.world
    hold = world.hold("mover.round", nth=2)
    late = join(stage, 1, "c")
    hold.has(*(actor.id for actor in late))
    label = stage.publish()
    hold.release()
    stage.serves(label)
    stage.catches_up(label, late)
    assert stage.broken(label) == []
