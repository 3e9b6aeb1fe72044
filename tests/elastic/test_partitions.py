"""Half of the hosts are cut off, for control or for data only, and healed. Each side is in a network namespace of its own;
members, watchdogs, nurseries and movers are real, and what is cut is a link.

No version is ever mixed; who is cut off goes on serving; nothing hangs beyond its deadline; when all is healed all catch up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from elastic_reshard.protocol.processes import started
from elastic_reshard.protocol.view import Told
from tests.elastic import rank as on
from tests.elastic.netns import CONTROL, DATA, HUB, Networks, missing
from tests.elastic.stage import CELL, Stage
from tests.elastic.world import Gang, Site, World

Maker = Callable[..., World]
QUICK = {"beat": 0.4, "evict": 2.5, "reregister": 2.5, "stall": 3.0, "form": 5.0, "fruitless": 2}
SIDES = {"left": ("a", "b"), "right": ("c", "d")}


@pytest.fixture
def networks() -> Iterator[Networks]:
    """Two sides and a hub."""
    lacking = missing()
    if lacking:
        pytest.skip(lacking)
    with Networks(list(SIDES)) as networks:
        yield networks


@pytest.fixture
def stage(networks: Networks, make_world: Maker) -> Stage:
    """Trainers on a, an engine on each of b, c, d; all have refitted once."""
    world = make_world(start=False, cell=CELL, hooks={}, **QUICK)
    world.address, world.network = HUB, networks.file()
    for side, hosts in SIDES.items():
        for host in hosts:
            world.sites[host] = Site(environ=networks.environ(), network=networks.file(side))
    world.start_supervisor()
    stage = Stage(world, engines=(("b",), ("c",), ("d",)), size=1)
    stage.refit()
    return stage


def given_up(stage: Stage, *engines: Gang) -> None:
    """The members of these engines, and nobody else, are given up although they run."""
    stage.world.until(lambda _: stage.world.evicted(), "somebody is given up")
    named = {line.split(":")[0] for line in stage.world.evicted()}
    assert named == {actor.id for engine in engines for actor in engine}


def still(label: str, *engines: Gang) -> None:
    """These engines serve what they had."""
    for engine in engines:
        engine.holds(label)
        assert engine.version() == on.content(label)


def test_control_only(stage: Stage, networks: Networks) -> None:
    """Given up after their silence, although their bytes still come through; back, they are joiners."""
    near, *far = stage.engines
    label, hold = stage.middle()
    networks.cut("right", CONTROL)
    hold.release()
    stage.serves(label, near)
    given_up(stage, *far)
    newer = stage.publish()
    stage.serves(newer, near)
    still("s1", *far)
    networks.heal("right", CONTROL)
    stage.serves(newer, *far)
    stage.smooth()
    assert stage.world.evicted() == []


@pytest.mark.long
def test_control_only_and_movers_that_wake_later(stage: Stage, networks: Networks) -> None:
    """Movers on both sides stand in the middle of the transfer until the others have gone on without those given up: what
    the late ones do then changes nothing."""
    near, *far = stage.engines
    label, hold = stage.middle()
    old = stage.world.movers("c") | stage.world.movers("d")
    networks.cut("right", CONTROL)
    stage.world.arm({})  # for movers that are made from now on
    stage.serves(label, near)
    given_up(stage, *far)
    assert all(started(pid) for pid in old.values()), "nobody over there was told to end them"
    hold.release()
    newer = stage.publish()
    stage.serves(newer, near)
    still("s1", *far)
    networks.heal("right", CONTROL)
    stage.serves(newer, *far)
    near.holds(newer)
    stage.smooth()


@pytest.mark.long
@pytest.mark.parametrize("side", ["left", "right"])
def test_control_for_a_moment(stage: Stage, networks: Networks, side: str) -> None:
    """Shorter than the eviction limit: nothing has happened."""
    label, hold = stage.middle()
    epoch = stage.world.view().membership_epoch
    networks.cut(side, CONTROL)
    hold.release()
    time.sleep(1.0)  # the length of the cut, not a wait for something
    networks.heal(side, CONTROL)
    stage.serves(label)
    stage.whole(label)
    assert stage.world.view().membership_epoch == epoch
    stage.smooth()


@pytest.mark.long
def test_control_of_the_trainers_side(stage: Stage, networks: Networks) -> None:
    """The trainers and an engine are given up in the middle of a publication. It is finished when they are back, or over;
    nobody serves anything in between."""
    near, *_ = stage.engines
    label, hold = stage.middle()
    networks.cut("left", CONTROL)
    hold.release()
    stage.world.until(lambda v: states(v, "trainer") == {"forfeit"}, "they are given up")
    still("s1", near)
    networks.heal("left", CONTROL)
    stage.world.until(lambda v: v.groups["trainer"].whole, "the trainers are back")
    newer = stage.publish()
    stage.catches_up(newer, *stage.engines)
    assert stage.publication(label).state in ("committed", "released", "abandoned")
    stage.refit()
    assert stage.world.evicted() == []


def states(view: Told, group: str) -> set[str]:
    """Of a group's members."""
    return {str(doc.state) for doc in view.members.values() if doc is not None and doc.group == group}


def test_data_only_healed_in_time(stage: Stage, networks: Networks) -> None:
    """The transfer stalls and is broken: when bytes come through again, the next one does the rest."""
    label, hold = stage.middle()
    networks.cut("right", DATA)
    hold.release()
    stage.world.transfer("breaking")
    still("s1", *stage.engines)
    networks.heal("right", DATA)
    stage.serves(label)
    assert "no cell was completed" in stage.broken(label)[0]
    assert stage.world.evicted() == [], "they were heard all the time"
    stage.smooth()


@pytest.mark.long
def test_data_only_for_long(stage: Stage, networks: Networks) -> None:
    """Nobody waits for ever: the publication is given up within its bound, and all serve what they have; the trainers are told."""
    world = stage.world
    policies, deadlines = world.settings.policies, world.settings.deadlines
    label, hold = stage.middle()
    networks.cut("right", DATA)
    hold.release()
    # Each epoch is formed, stalls, and is left within its own deadline.
    bound = (policies.fruitless + 1) * (deadlines.form + deadlines.stall + deadlines.abort + deadlines.proof_of_death)
    told = stage.trainer[0].begin(on.committed, label, bound).outcome(bound + 5.0)
    assert told.kind == "PublicationAbandoned", told
    still("s1", *stage.engines)
    networks.heal("right", DATA)
    stage.catches_up(stage.publish(), *stage.engines)
    assert world.evicted() == []


@pytest.mark.long
def test_both_and_healed(stage: Stage, networks: Networks) -> None:
    near, *far = stage.engines
    for _ in range(2):
        label, hold = stage.middle()
        networks.cut("right", CONTROL)
        networks.cut("right", DATA)
        hold.release()
        stage.serves(label, near)
        given_up(stage, *far)
        networks.heal("right", DATA)
        networks.heal("right", CONTROL)
        stage.serves(label, *far)
    stage.smooth()
