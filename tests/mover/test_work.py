"""The worker as its control thread sees it: what it refuses before the first byte, and when it says that it is out."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from elastic_reshard.arena.channel import close_all
from elastic_reshard.arena.pretend import PretendDevice, PretendStream, open_pretend
from elastic_reshard.communicator.gloo import GlooBackend
from elastic_reshard.errors import ArenaError, PeerLost, ProtocolError
from elastic_reshard.mover.ready import Shelf
from elastic_reshard.mover.task import Given, Task
from elastic_reshard.mover.work import Worker
from elastic_reshard.protocol import bits
from elastic_reshard.protocol.window import Window
from tests.mover import world as w
from tests.mover.world import Page, World, small


class Deaf:
    """A backend whose formation hears of no cancellation; it ends when it is let."""

    config = "deaf"

    def __init__(self) -> None:
        self.entered, self.free = threading.Event(), threading.Event()

    def form(self, *_: Any) -> Any:
        self.entered.set()
        self.free.wait(30)
        raise PeerLost("nobody came", (1,))


def test_out_is_said_when_every_operation_has_returned_and_not_before() -> None:
    world, news, backend = small(), queue.Queue[Any](), Deaf()
    worker = Worker(world.members[2], Page(), news.put, backend)  # type: ignore[arg-type]
    worker.begin(world.parcel(world.members[2], *world.documents()).open())
    assert backend.entered.wait(20)
    worker.abort()
    with pytest.raises(queue.Empty):
        news.get(timeout=0.3)
    backend.free.set()
    said = news.get(timeout=20)
    assert (said.state, said.outcome, said.error) == ("out", "stopped", "")
    worker.finish()
    world.close()


def test_the_window_is_left_before_out_is_said() -> None:
    """After "out" the next transfer may enter it; this one must not take that one's word away."""
    world, window, heard = small(), Window(), queue.Queue[tuple[str, bool]]()
    task = world.parcel(world.members[2], *world.documents()).open()

    class Lost(Deaf):
        def form(self, *_: Any) -> Any:
            window.open()
            turn = worker._job.turn if worker._job is not None else None
            assert turn is not None
            assert turn.enter()
            raise PeerLost("nobody came", (1,))

    worker = Worker(world.members[2], Page(), lambda said: heard.put((said.state, window.inside)), Lost())  # type: ignore[arg-type]
    worker.begin(replace(task, window=os.dup(window.fd)))
    assert heard.get(timeout=20) == ("out", False)
    worker.finish()
    window.give_up()
    world.close()


def test_a_mover_whose_device_has_failed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its context is of no use any more, and only a fresh process gets another."""
    world, backend, ended = small(), Deaf(), queue.Queue[tuple[int, int]]()
    device, lost = PretendDevice(0), ArenaError("an illegal address was met")

    def broken() -> bool:
        raise lost

    device._current = PretendStream(98)
    device._current.submit(broken)
    monkeypatch.setattr("elastic_reshard.mover.work.os.kill", lambda *said: ended.put(said))
    news = queue.Queue[Any]()
    worker = Worker(world.members[2], Page(), news.put, backend)  # type: ignore[arg-type]
    worker.begin(world.parcel(world.members[2], *world.documents()).open())
    assert backend.entered.wait(20)
    worker._shelf.device = device
    backend.free.set()
    assert ended.get(timeout=20) == (os.getpid(), signal.SIGKILL)
    assert "illegal address" in news.get(timeout=20).reason
    while news.get(timeout=20).state != "out":
        pass
    worker.finish()
    world.close()


def test_a_bound_part_keeps_its_staging_where_the_device_reaches_it() -> None:
    """Also when a larger part takes its place, for as long as somebody has it; the shelf itself lets go of it first."""
    world, device = small(), open_pretend(0)
    shelf = Shelf(world.members[2])
    shelf.device = device
    ready = shelf.ready(world.parcel(world.members[2], *world.documents()).open())
    arena = shelf._staging._arena
    assert arena is not None
    first, nbytes = int(arena.bytes.ctypes.data), arena.nbytes
    shelf._staging.of(nbytes + 1)
    assert not shelf._bound
    assert device._hosts.keepers([(first, first + nbytes)])
    del arena, ready
    with pytest.raises(ArenaError, match="not registered"):
        device._hosts.keepers([(first, first + nbytes)])
    world.close()


def test_a_device_that_comes_with_a_later_task_reaches_what_was_mapped_before() -> None:
    """Until then host arenas are mapped read-only, which drivers do not register."""
    world, device = small(), open_pretend(0)
    member = world.members[0]  # a source
    shelf = Shelf(member)
    documents = world.documents()
    shelf.ready(world.parcel(member, *documents).open())
    before = set(shelf._maps)
    assert before
    assert shelf.device is None
    task = world.parcel(member, *documents).open()
    on_device = replace(task, device="pretend:0", transfer=task.transfer.model_copy(update={"network": "pretend"}))
    shelf.ready(on_device)
    assert shelf.device is device
    assert set(shelf._registered) == set(shelf._maps) == before
    world.close()


def test_the_device_of_a_member_without_a_statement_is_told_by_its_arena() -> None:
    world = small()
    task = world.parcel(world.members[2], *world.documents()).open()
    table = '{"memory":{"kind":"pretend","device":"pretend:%d","nbytes":65536}}'
    given = [Given(f"{n}" * 32, world.members[n], table % n, False, -1, 0) for n in (1, 2)]
    shelf = Shelf(world.members[2])
    shelf._open(replace(task, device="", arenas=tuple(given)))
    assert shelf.device is open_pretend(2)
    close_all([fd for g in task.arenas for fd in g.fds])
    world.close()


def test_a_formation_that_waits_for_others_ends_when_it_is_told_to() -> None:
    world, news = small(), queue.Queue[Any]()
    worker = Worker(world.members[2], Page(), news.put, GlooBackend("lo"))
    task = world.parcel(world.members[2], *world.documents()).open()
    worker.begin(task)
    with pytest.raises(ProtocolError, match="in hand"):
        worker.begin(task)
    said = news.get(timeout=20)
    while said.state == "starting":
        said = news.get(timeout=20)
    assert (said.state, said.config) == ("ready", GlooBackend("lo").config)
    assert said.values
    begun = time.monotonic()
    worker.abort()
    while said.state != "out":
        said = news.get(timeout=20)
    assert time.monotonic() - begun < 5
    assert (said.outcome, said.error) == ("stopped", "")
    worker.finish()
    # The next transfer is taken up by the same worker.
    worker.begin(world.parcel(world.members[2], *world.documents(2)).open())
    worker.feed({world.members[0]: {"told/0": "no hex"}})
    while (said := news.get(timeout=20)).state != "out":
        pass
    assert (said.outcome, said.error) == ("failed", "ProtocolError")
    worker.finish()
    world.close()


class Never:
    """A backend for tasks that are refused before anything is formed."""

    config = "none"

    def form(self, *_: Any) -> Any:
        raise AssertionError("a refused task must not be formed")


def alone(world: World, member: str, change: Any = None, said: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One member's worker in this process, up to "out"."""
    docs = world.documents(**dict(said or {}))
    parcel = world.parcel(member, *docs)
    task: Task = parcel.open()
    if change is not None:
        task = change(task)
    news: queue.Queue[Any] = queue.Queue()
    worker = Worker(member, Page(), news.put, Never())  # type: ignore[arg-type]
    worker.begin(task)
    while (found := news.get(timeout=20)).state != "out":
        assert found.state == "starting"
    worker.finish()
    return w.brief(found)


def _changed(**fields: Any) -> Any:
    def change(task: Task) -> Task:
        return Task(task.transfer.model_copy(update=fields), task.publication, task.layouts, task.arenas)

    return change


def _forged(task: Task) -> Task:
    """The bodies of two layouts, exchanged."""
    (a, x), (b, y) = task.layouts.items()
    return Task(task.transfer, task.publication, {a: y, b: x}, task.arenas)


def _less(task: Task) -> Task:
    for given in task.arenas:
        os.close(given.fd)
    return Task(task.transfer, task.publication, task.layouts, ())


def _readonly(task: Task) -> Task:
    return Task(task.transfer, task.publication, task.layouts, tuple(g._replace(writable=False) for g in task.arenas))


REFUSED: dict[str, tuple[int, Any, str, str]] = {
    "another plan": (0, _changed(plan="0" * 32), "PlanMismatch", "is told as plan 0"),
    "another basis than planned with": (0, _changed(basis={}), "PlanMismatch", "same version"),
    "a layout with another body": (0, _forged, "LayoutError", "told as layout"),
    "a publication that is not its own": (0, _changed(publication="p9.9"), "ProtocolError", "contradicts itself"),
    "a source arena that did not come": (0, _less, "ArenaError", "did not come with the task"),
    "a landing arena that did not come": (2, _less, "ArenaError", "did not come with the task"),
    "a landing arena that is not writable": (2, _readonly, "ArenaError", "did not come writable"),
    "cells that are not there": (2, None, "ArenaError", "lacks 3 of them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_before_the_first_byte(case: str) -> None:
    at, change, error, reason = REFUSED[case]
    world = small()
    cells = len(world.held(world.members[2]))
    told = np.zeros(cells, dtype=bool)
    told[:3] = True
    basis = {world.members[2]: bits.pack(np.packbits(told).tobytes())}
    said = alone(world, world.members[at], change, {"basis": basis})
    assert (said["outcome"], said["error"]) == ("refused", error)
    assert reason in said["reason"]
    assert not any(world.held(m).any() for m in world.landings)
    world.close()


def test_a_slot_of_another_generation_is_refused() -> None:
    world = small()
    docs = world.documents()
    world.fill(world.sources[world.members[0]], 0, 7)
    world.documents = lambda **_: docs  # type: ignore[method-assign, misc, assignment]
    said = alone(world, world.members[0])
    assert (said["outcome"], said["error"]) == ("refused", "ArenaError")
    assert "generation 4, published was 2" in said["reason"]
    world.close()


def test_bytes_that_nobody_holds_are_named_before_anything_moves() -> None:
    world = small(absent=("t0@0000000000000000",))
    said = alone(world, world.members[2])
    assert (said["outcome"], said["error"]) == ("refused", "ShardLost")
    assert "rows" in said["reason"]
    assert not any(world.held(m).any() for m in world.landings)
    world.close()
