"""The landing arena: made, stated and withdrawn as the view asks, and a lack of memory that is told where it is seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from elastic_reshard.arena.host import MappedArena
from elastic_reshard.arena.landing import LandingReader
from elastic_reshard.errors import ArenaError, SupervisorUnreachable
from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.member import lander as module
from elastic_reshard.member.lander import Lander, Telling
from elastic_reshard.member.memory import MemoryReport
from elastic_reshard.plan import CellGrid
from tests.member.desks import Job
from tests.member.test_core import COMMITTED, doc_of

CELL = 64
ONE = Mesh.arange((1,))
FIRST = ModelLayout(
    {"w": TensorLayout((8, 9), "bfloat16", ONE, (Shard(0),)), "s": TensorLayout((), "float32", ONE, (Replicate(),))}
)
SECOND = ModelLayout({"v": TensorLayout((70,), "float32", ONE, (Replicate(),))})
HUGE = ModelLayout({"v": TensorLayout((1 << 40,), "float32", ONE, (Replicate(),))})


def until(what: Callable[[], Any], within: float = 10.0) -> Any:
    deadline = time.monotonic() + within
    while not (found := what()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.002)
    return found


class Landing(Job):
    """A member with a lander."""

    def __init__(self) -> None:
        super().__init__()
        self.remote.layouts |= {"L1": FIRST, "L2": SECOND, "huge": HUGE}
        self.lander = Lander(self.desk, cast(Any, self.remote), CELL)
        self.desk.on_view = self.lander.attend

    def stated(self) -> Any:
        return self.link.statements[-1].landing if self.link.statements else None

    def quiet(self) -> bool:
        return not any(t.name.startswith("elastic_reshard landing") for t in threading.enumerate())


@pytest.fixture
def job() -> Iterator[Landing]:
    made = Landing()
    yield made
    made.lander.close()
    assert made.quiet()
    made.link.close()


def test_none_is_made_where_all_is_near(job: Landing) -> None:
    job.trainer("h")
    assert job.quiet()
    assert job.remote.asked == []
    assert job.lander.memory is None


def test_one_is_made_offered_and_stated_by_a_thread_of_its_own(job: Landing) -> None:
    job.trainer("far")
    said = until(job.stated)
    until(job.quiet)
    assert job.link.landings == [said.arena]
    assert said.cell == CELL
    assert said.cells == len(CellGrid.of(FIRST, CELL).cells_of_rank(0)) == 4
    held = job.link.arena(said.arena, 0.0)
    reader = LandingReader(MappedArena(held.fd), held.table, said.arena)
    assert (reader.cells, reader.cell, reader.slots, reader.nbytes) == (4, CELL, 2, said.nbytes)
    assert reader.tensor(1, "w").shape == (8, 9)
    assert reader.tensor(1, "w").dtype == torch.bfloat16
    assert reader.tensor(0, "s").shape == ()
    reader.close()
    assert job.lander.memory is not None
    assert job.lander.memory["needed"] == said.nbytes
    job.trainer("h")  # it stays: a slot may be in use
    job.trainer("far")
    assert job.quiet()
    assert job.link.landings == [said.arena]


def test_a_changed_layout_makes_another_and_the_old_one_goes_when_nothing_needs_it(job: Landing) -> None:
    job.trainer("far")
    first = until(job.stated)
    job.tell(publications={"p1": doc_of(COMMITTED, ["far"], {first.arena: "h"})})
    job.tell(group={"destination_layout": "L2"})
    second = until(lambda: (now := job.stated()) is not None and now.arena != first.arena and now)
    until(job.quiet)
    assert job.link.withdrawn == []
    assert second.cells == 5
    job.tell(publications={"p1": None})
    until(lambda: job.link.withdrawn == [first.arena])
    until(job.quiet)
    assert list(job.link.arenas) == [second.arena]


def test_memory_that_does_not_fit_is_told_once_and_while_nothing_else_can_be_done(job: Landing, caplog: Any) -> None:
    install, watch = Telling(job.lander), Telling(job.lander)
    install.check(idle=True)
    job.lander._cell = 1 << 24  # its cells are to be counted soon
    job.tell(group={"destination_layout": "huge"})
    job.trainer("far")
    until(lambda: job.lander.failure is not None)
    for telling in (install, watch):
        with job.desk.changed, pytest.raises(ArenaError, match=rf"landing arena of {job.core.member} .* needs"):
            telling.check()
        with job.desk.changed:
            telling.check()
        with job.desk.changed, pytest.raises(ArenaError):
            telling.check(idle=True)
    report = job.lander.memory
    assert report is not None
    assert report["free"][report["limit"]] < report["needed"]
    assert job.stated() is None
    until(lambda: "landing.failed" in caplog.text)  # written after the failure is there to be seen
    with job.desk.changed:
        job.lander._again += 1000.0
    job.tell(group={"destination_layout": "L1"})  # it is tried at once
    assert until(job.stated).cells == 2
    with job.desk.changed:
        install.check(idle=True)


def test_it_is_tried_again_until_memory_is_there(job: Landing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN", 0.01)
    reports: list[MemoryReport] = []
    scarce = threading.Event()

    def report(needed: int, what: str, **on_device: object) -> MemoryReport:
        free = 0 if not scarce.is_set() else 1 << 40
        reports.append({"what": what, "needed": needed, "free": {"cgroup": free}, "limit": "cgroup"})
        return reports[-1]

    monkeypatch.setattr(module, "memory_for", report)
    job.lander._pause = 0.01
    job.trainer("far")
    until(lambda: len(reports) > 3)
    assert job.lander.episode == 1
    assert job.stated() is None
    scarce.set()
    until(job.stated)
    assert job.lander.failure is None


def test_a_supervisor_that_cannot_be_asked_is_asked_again_and_nobody_is_bothered(
    job: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN", 0.01)
    job.remote.layouts["L1"] = SupervisorUnreachable("nobody answers")
    job.trainer("far")
    until(lambda: len(job.remote.asked) > 2)
    with job.desk.changed:
        Telling(job.lander).check(idle=True)
    job.remote.layouts["L1"] = FIRST
    until(job.stated)


def test_an_error_of_its_own_is_not_silent(job: Landing, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    del job.remote.layouts["L1"]  # KeyError
    job.trainer("far")
    until(lambda: job.lander.failure is not None)
    until(lambda: bool(raised))
    with job.desk.changed, pytest.raises(Exception, match="ended by an error of its own"):
        Telling(job.lander).check()


def test_closing_ends_a_try_that_waits(job: Landing) -> None:
    job.lander._cell = 1 << 24  # its cells are to be counted soon
    job.tell(group={"destination_layout": "huge"})
    job.trainer("far")
    until(lambda: job.lander.failure is not None)
    assert not job.quiet()
    begun = time.monotonic()
    job.lander.close()
    assert job.quiet()
    assert time.monotonic() - begun < 0.9  # the next try was a second away
    job.trainer("far")
    assert job.quiet()
