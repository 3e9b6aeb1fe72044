"""What a mover does about orders, by tables: no processes, no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_reshard.errors import ProtocolError
from elastic_reshard.mover.core import Abort, Begin, Core, Feed, Finish, Given, Hold, Progress, Task, Until
from elastic_reshard.protocol.docs import PartyDoc, PublicationDoc, PublicationState, TransferDoc, TransferState

M, N = "m@" + "1" * 16, "n@" + "2" * 16
MOVER = "a" * 32


def doc(number: int = 1, state: TransferState = TransferState.FORMING, **more: Any) -> TransferDoc:
    party = PartyDoc(group="g", layout="aa", members=(0,))
    return TransferDoc(
        id=f"p1.1:1.{number}", publication="p1.1", epoch=number, state=state, members=(M, N), hosts=("a", "b"),
        source=party, destinations=(party,), landings=(), cell=1, message=1, staging=1, plan="x", **more,
    )  # fmt: skip


def task(number: int = 1) -> Task:
    publication = PublicationDoc(id="p1.1", weight_version=1, label=None, extras={}, group="g", seq=1, layout="aa",
                                 state=PublicationState.MOVING, sources=())  # fmt: skip
    return Task(doc(number), publication, {"aa": "{}"}, ())


VALUES = {M: {"k": "00"}, N: {"k": "01"}}


def begun(number: int = 1) -> Core:
    core = Core(M, MOVER)
    assert core.tasked(task(number)) == [Begin(task(number))]
    return core


def at(core: Core, state: Any, **more: Any) -> list[Any]:
    assert core.progress is not None
    return core.progressed(replace(core.progress, state=state, **more))


def running(number: int = 1) -> Core:
    core = begun(number)
    at(core, "ready", values={"k": "00"})
    assert core.ordered(doc(number, TransferState.RUNNING, values=VALUES)) == [Feed(VALUES)]
    at(core, "running")
    return core


def test_values_are_fed_when_all_are_there_and_only_when_they_change() -> None:
    core = begun()
    assert core.ordered(doc(values={M: {"k": "00"}})) == [], "one is missing"
    assert core.ordered(doc(values=VALUES)) == [Feed(VALUES)]
    assert core.ordered(doc(values=VALUES)) == []
    assert core.ordered(doc(state=TransferState.RUNNING, values=VALUES)) == []
    more = {**VALUES, N: {"k": "01", "l": "02"}}
    assert core.ordered(doc(state=TransferState.RUNNING, values=more)) == [Feed(more)]
    absent = begun()
    assert absent.ordered(doc(values={M: {"k": "00"}}, absent=(1,))) == [Feed({M: {"k": "00"}})]


def test_stopping_holds_once_and_then_ends_where_it_is_told() -> None:
    core = running()
    stopping = doc(state=TransferState.STOPPING, values=VALUES)
    assert core.ordered(stopping) == [Hold()]
    assert core.ordered(stopping) == []
    at(core, "running", held=True, began=4)
    assert core.said is not None
    assert (core.said.held, core.said.began) == (True, 4)
    assert core.ordered(stopping.model_copy(update={"until": 5})) == [Until(5)]
    assert core.ordered(stopping.model_copy(update={"until": 5})) == []
    late = running()
    assert late.ordered(stopping.model_copy(update={"until": 5})) == [Hold(), Until(5)], "both at once"


@pytest.mark.parametrize("before", [begun, running])
def test_breaking_aborts_once(before: Any) -> None:
    core = before()
    breaking = doc(state=TransferState.BREAKING)
    assert core.ordered(breaking) == [Abort()]
    assert core.ordered(breaking) == []
    assert core.ordered(None) == [], "it is on its way out"
    assert at(core, "out", outcome="stopped") == [Finish()]
    assert core.transfer == ""


def test_gone_from_the_view_it_aborts_and_finishes_when_it_is_out() -> None:
    core = running()
    assert core.ordered(None) == [Abort()]
    assert at(core, "running", began=9) == []
    assert at(core, "out", outcome="failed") == [Finish()]


def test_out_it_stays_open_until_the_transfer_is_over() -> None:
    core = running()
    assert at(core, "out", outcome="done") == []
    for state in (TransferState.RUNNING, TransferState.STOPPING, TransferState.BREAKING):
        assert core.ordered(doc(state=state, values=VALUES)) == [], "nothing is under way"
    assert core.transfer
    assert core.ordered(None) == [Finish()]
    assert core.ordered(None) == []


def test_out_is_final() -> None:
    core = running()
    at(core, "out", outcome="done")
    assert at(core, "running", began=99) == []
    assert core.said is not None
    assert (core.said.state, core.said.outcome, core.said.began) == ("out", "done", 0)


def test_a_task_that_comes_early_waits_for_the_end_of_the_one_in_hand() -> None:
    core = running()
    assert core.tasked(task(2)) == [Abort()]
    assert core.ordered(doc(2, values=VALUES)) == []
    assert at(core, "out", outcome="stopped") == [Finish(), Begin(replace(task(2), transfer=doc(2, values=VALUES))),
                                                  Feed(VALUES)]  # fmt: skip
    assert core.transfer == doc(2).id
    done = running()
    at(done, "out", outcome="done")
    assert done.tasked(task(2)) == [Finish(), Begin(task(2))]


def test_a_task_that_is_already_broken_is_begun_and_aborted() -> None:
    core = Core(M, MOVER)
    broken = replace(task(), transfer=doc(state=TransferState.BREAKING))
    assert core.tasked(broken) == [Begin(broken), Abort()]


def test_orders_and_words_of_others_do_no_harm() -> None:
    core = running()
    with pytest.raises(ProtocolError, match=r"1\.7"):
        core.ordered(doc(7))
    assert core.progressed(Progress("another", "out", "done")) == []
    assert core.said is not None
    assert core.said.state == "running"
    idle = Core(M, MOVER)
    assert idle.ordered(None) == []
    assert idle.said is None
    with pytest.raises(ProtocolError, match="none"):
        idle.ordered(doc())


def test_what_is_reported_at_once_and_what_the_page_tells() -> None:
    core = begun()
    assert core.unsaid
    core.unsaid = False
    for change in ({"state": "ready"}, {"config": "c"}, {"values": {"k": "v"}}, {"held": True}, {"began": 3}):
        core.progressed(replace(core.progress, **change))  # type: ignore[type-var]
        assert core.unsaid, change
        core.unsaid = False
    core.progressed(replace(core.progress, held=False))  # type: ignore[type-var]
    core.unsaid = False
    for quiet in ({"cells": 3}, {"began": 4}, {"sent": 1}, {"received": 1}, {"seconds": 2.0}):
        core.progressed(replace(core.progress, **quiet))  # type: ignore[type-var]
        assert not core.unsaid, quiet
    at(core, "out", reason="x" * 10_000, blames=(N,))
    assert core.said is not None
    assert (core.said.member, core.said.mover, core.said.blames, len(core.said.reason)) == (M, MOVER, (N,), 4000)


def test_a_task_travels() -> None:
    given = (Given("a" * 32, M, '{"x": 1}', True, 7), Given("b" * 32, N, "{}", False, 8))
    made = replace(task(), arenas=given)
    assert Task.read(made.payload(), (7, 8)) == made
    for payload, fds in [(made.payload(), (7,)), (b"{", ()), (b"[]", ()), (b'{"arenas": []}', ()), (b"{}", (7, 8)),
                         (made.payload().replace(b'"weight_version":1', b'"weight_version":-1'), (7, 8))]:  # fmt: skip
        with pytest.raises(ProtocolError):
            Task.read(payload, fds)


def test_a_task_travels_with_second_descriptors_and_a_window() -> None:
    given = (Given("a" * 32, M, "{}", True, 7, 8), Given("b" * 32, N, "{}", False, 9))
    made = replace(task(), arenas=given, device="pretend:1", window=10)
    assert made.fds == (7, 8, 9, 10)
    assert Task.read(made.payload(), made.fds) == made
    for fds in ((7, 8, 9), (7, 8, 9, 10, 11), (7, 8, 10), ()):
        with pytest.raises(ProtocolError):
            Task.read(made.payload(), fds)
