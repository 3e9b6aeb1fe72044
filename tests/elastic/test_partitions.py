"""Half of the hosts are cut off, for control or for data only, and healed. Each side is in a network namespace of its own;
members, watchdogs, nurseries and movers are real, and what is cut is a link.

No version is ever mixed; who is cut off goes on serving; nothing hangs beyond its deadline; when all is healed all catch up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from elastic_reshard.interfaces import VARIABLE
from elastic_reshard.protocol.processes import started
from elastic_reshard.protocol.view import Told
from tests.elastic import rank as on
from tests.elastic.netns import CONTROL, DATA, HUB, Networks
from tests.elastic.stage import CELL, Stage
from tests.elastic.world import Gang, Site, World

Maker = Callable[..., World]
QUICK = {"beat": 0.4, "evict": 2.5, "reregister": 2.5, "stall": 3.0, "form": 5.0}
SIDES = {"left": ("a", "b"), "right": ("c", "d")}


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


@pytest.mark.long
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
    """Nobody's end explains it, and no word of a mover: those who can be reached have the version within a bound, the others
    serve what they have until they can be reached again."""
    world = stage.world
    policies, deadlines = world.settings.policies, world.settings.deadlines
    near, *far = stage.engines
    label, hold = stage.middle()
    networks.cut("right", DATA)
    hold.release()
    # Each epoch is formed, stalls, and is left within its own deadline.
    bound = (policies.fruitless + 1) * (deadlines.form + deadlines.stall + deadlines.abort + deadlines.proof_of_death)
    world.until(lambda _: stage.publication(label).state == "committed", "it is committed without some", bound)
    stage.serves(label, near)
    still("s1", *far)
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


# -- settings by which movers can't meet


def refused(stage: Stage, label: str, *says: str) -> None:
    """Before a byte has moved there, for a reason that says all this; it has its end, and nobody is given up for it."""
    world = stage.world
    world.until(lambda v: any(p and p.label == label for p in v.publications.values()), "it is minted")
    world.until(lambda _: any(all(said in why for said in says) for why in stage.broken(label)), "it is refused")
    world.until(lambda _: stage.publication(label).state == "committed", "the others have it")
    assert stage.engines[1].version() == 0
    assert world.evicted() == []


def unlike(world: World, environ: Mapping[str, str]) -> Stage:
    """Trainers on a, engines on b and c; c's movers are of a nursery of its own with another environment."""
    world.sites["c"] = Site(environ=environ, room="other")
    return Stage(world, size=1)


@pytest.mark.long
def test_a_host_without_the_interface_that_it_is_to_use(make_world: Maker) -> None:
    stage = unlike(make_world(cell=CELL, hooks={}), {VARIABLE: "nosuch0"})
    refused(stage, stage.publish(), stage.engines[1][0].id, f"{VARIABLE}=nosuch0", "it has lo (127.0.0.1)")


@pytest.mark.long
def test_a_host_with_another_gloo(make_world: Maker, tmp_path: Path) -> None:
    """Unlike configurations never meet."""
    folder = tmp_path / "inject"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(OTHER_TORCH)
    stage = unlike(make_world(cell=CELL, hooks={}), {"PYTHONPATH": str(folder)})
    refused(stage, stage.publish(), f"{stage.engines[1][0].id} (gloo torch=99.1)", "unlike")


# In nurseries only.
OTHER_TORCH = """
import sys
if "elastic_reshard.mover" in sys.orig_argv:
    import torch
    torch.__version__ = "99.1.0"
"""


@pytest.mark.long
def test_loopback_between_machines(networks: Networks, make_world: Maker) -> None:
    """B50: sides are several machines to a mover (each has a loopback of its own). One that would be reached by loopback is
    refused, with the variable and what it could be set to."""
    world = make_world(start=False, cell=CELL, hooks={}, **QUICK)
    world.address, world.network = HUB, networks.file()
    world.sites["a"] = world.sites["b"] = Site(environ=networks.environ(), network=networks.file("left"))
    world.sites["c"] = Site(environ={VARIABLE: "lo"}, network=networks.file("right"))
    world.start_supervisor()
    stage = Stage(world, size=1)
    refused(stage, stage.publish(), "several machines", "lo (127.0.0.1)", f"{DATA} (198.19.0.11)", VARIABLE)
