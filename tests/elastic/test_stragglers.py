"""A host whose processes or whose link run at a small part of their speed: it is left behind once the others have waited long
enough, not killed; the others commit; later it is caught up."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from tests.elastic.netns import DATA, HUB, Networks
from tests.elastic.stage import CELL, Stage, everything_of
from tests.elastic.world import Site, World

Maker = Callable[..., World]
# 128 MiB for each engine: a tenth of a second of a mover's own work, the rest is waiting for others.
HEAVY = {f"w{i}": ((2048, 2048), "float32", 0) for i in range(8)}
LARGE = 1 << 18  # cells, of which a plan is quickly made
PART = 40  # of the time that processes run: their work takes seconds
RUNS = 0.02  # seconds at a time, if nobody else wants the cores
SILENT = 4.0  # a longer pause is taken for death: `mover_silent`


@contextlib.contextmanager
def slowed(pids: Sequence[int]) -> Iterator[None]:
    """Processes run for a fortieth of the time: they stand still so much longer than they were seen running."""
    over = threading.Event()

    def tell(what: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)

    def turns() -> None:
        while not over.is_set():
            began = time.monotonic()
            over.wait(RUNS)
            tell(signal.SIGSTOP)
            over.wait(min((PART - 1) * (time.monotonic() - began), SILENT / 2))
            tell(signal.SIGCONT)

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


LIMITS = {"mover_silent": SILENT, "stall": 2 * SILENT, "watchdog_silent": SILENT, "abort": SILENT}


@pytest.fixture
def stage(make_world: Maker) -> Stage:
    """Trainers on host a, engines on b and c, that have refitted; a version waits for nobody for much longer than it takes."""
    return impatient(Stage(make_world(cell=LARGE, hooks={}, **LIMITS), shapes=HEAVY, size=1))


def impatient(stage: Stage) -> Stage:
    """It has refitted; from now on a version is late after three times as long as it takes here, or a second."""
    for _ in range(2):
        stage.refit()
    with stage.world.client() as client:
        took = [e.fields["seconds"] for e in stage.world.events("transfer.over") if e.fields["whole"]][-1]
        client.set_policies(replace(client.policies(), late_after=max(1.0, 3 * took)))
    return stage


def left_behind(stage: Stage, pids: Sequence[int]) -> str:
    """These processes are slow: the others have the next version soon; of engine1, and of nobody else, it is said that they
    went on without it. The label."""
    with slowed(pids):
        return without(stage)


def without(stage: Stage) -> str:
    """As left_behind, of whatever is slow."""
    world, (quick, slow) = stage.world, stage.engines
    before = slow.version()
    label = stage.publish()
    stage.serves(label, quick)
    key = stage.publication(label).id
    said = [e.fields["groups"] for e in world.events("group.left_behind") if e.fields.get("publication") == key]
    assert said == [["engine1"]], "the slow one's, and only that"
    assert slow.version() == before
    return label


def test_a_mover_at_a_part_of_its_speed(stage: Stage) -> None:
    world, slow = stage.world, stage.engines[1]
    pid = world.mover(slow[0].id)
    label = left_behind(stage, [pid])
    stage.serves(label, slow)
    assert world.mover(slow[0].id) == pid, "slow is not dead"
    assert world.evicted() == []
    stage.smooth()


@pytest.mark.long
def test_a_host_at_a_part_of_its_speed(stage: Stage) -> None:
    """Its watchdog and member too; its own beats come late too."""
    world, slow = stage.world, stage.engines[1]
    pid = world.mover(slow[0].id)
    label = left_behind(stage, everything_of(world, "c"))
    stage.catches_up(label, slow)
    assert world.mover(slow[0].id) == pid
    assert world.evicted() == []
    stage.refit()


@pytest.mark.long
def test_one_that_stays_slow_is_caught_up_when_nobody_else_waits(stage: Stage) -> None:
    world, slow = stage.world, stage.engines[1]
    with slowed([world.mover(slow[0].id)]):
        label = stage.publish()
        stage.serves(label, stage.engines[0])
        stage.serves(label, slow)
    assert world.evicted() == []
    stage.refit()


@pytest.mark.long
def test_a_source_at_a_part_of_its_speed(stage: Stage) -> None:
    """Everybody needs it: nobody is left behind for it, and nobody gives it up."""
    world = stage.world
    pid = world.mover(stage.trainer[1].id)
    with slowed([pid]):
        label = stage.publish()
        stage.catches_up(label, *stage.engines)
    assert world.mover(stage.trainer[1].id) == pid
    assert world.evicted() == []
    stage.refit()


@pytest.mark.long
def test_a_link_at_a_tenth_of_its_speed(networks: Networks, make_world: Maker) -> None:
    """Both sides in networks of their own; what goes to one of them is let through slowly, by the kernel."""
    world = make_world(start=False, cell=CELL, hooks={})
    world.address, world.network = HUB, networks.file()
    for host, side in (("a", "left"), ("b", "left"), ("c", "right")):
        world.sites[host] = Site(environ=networks.environ(), network=networks.file(side))
    world.start_supervisor()
    stage = impatient(Stage(world, size=1))
    slow = stage.engines[1]
    pid = world.mover(slow[0].id)
    networks.limit("right", DATA, "64mbit")  # 4 s for 32 MiB
    label = without(stage)
    networks.unlimit("right", DATA)
    stage.serves(label, slow)
    assert world.mover(slow[0].id) == pid
    assert world.evicted() == []
    stage.refit()
