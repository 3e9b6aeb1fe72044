"""The source side of a member on a device: what a publish waits for, and what is left of it afterwards."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import pytest
import torch

from elastic_reshard.arena.pretend import empty, open_pretend
from elastic_reshard.errors import LayoutError, ProtocolError
from elastic_reshard.member.core import MemberCore
from elastic_reshard.member.desk import Desk
from elastic_reshard.member.filler import Filler
from elastic_reshard.member.publisher import Publisher
from elastic_reshard.member.stage import Stage, Turns
from elastic_reshard.protocol.messages import GroupSpec, Statement
from elastic_reshard.protocol.window import Turn, Window
from tests.member.desks import ME, Link, Remote

NUMBER = 41  # of a pretend device that no other test uses


@pytest.fixture
def desk() -> Iterator[Desk]:
    core = MemberCore(ME, GroupSpec(name="g", size=1, rank=0), frozenset({"source"}), "h", os.getpid())
    made = Desk(core)
    made.link = cast(Any, Link())
    made.turns = Turns(ME, Window())
    yield made
    made.turns.close()


def publisher(desk: Desk, tensors: Any = None) -> Publisher:
    tensors = tensors or {"a": empty((300, 7), torch.float32, NUMBER)}
    return Publisher(desk, Filler(tensors, None, None, 0), cast(Any, Remote()), 0.0, Stage("m", "auto"))


def test_a_call_that_fails_is_its_step_all_the_same(desk: Desk) -> None:
    """Else the rank's next step would be taken for the one at which it failed; and an equal past says that it did not fail."""

    def told(desk: Desk, source: Publisher) -> tuple[int, int]:
        desk.core.heard = 1 << 40  # what is withdrawn is heard of at once
        seq = source.publish(None, None, timeout=20.0)._seq
        return next((s.fill.seq, s.fill.before) for s in desk.core.slots if s.fill is not None and s.fill.seq == seq)

    tensors = {"a": empty((300, 7), torch.float32, NUMBER)}
    source = publisher(desk, lambda: tensors)
    first = told(desk, source)
    with pytest.raises(ProtocolError, match="extras"):
        source.publish(None, {"a": object()}, timeout=20.0)
    tensors.clear()
    with pytest.raises(LayoutError):
        source.publish(None, None, timeout=20.0)
    tensors["a"] = empty((300, 7), torch.float32, NUMBER)
    after = told(desk, source)
    other = Desk(MemberCore(ME, GroupSpec(name="g", size=1, rank=0), frozenset({"source"}), "h", os.getpid()))
    other.link = cast(Any, Link())
    source = publisher(other)
    assert told(other, source) == first == (1, 0)
    others = [told(other, source) for _ in range(3)]
    assert after[0] == others[-1][0] == 4
    assert after[1] != others[-1][1]


def test_a_publish_with_a_free_slot_waits_for_no_mover(desk: Desk) -> None:
    window = desk.turns.window
    assert window is not None
    turn = Turn(os.dup(window.fd))
    window.open()
    assert turn.enter()
    assert not window.close(time.monotonic()), "the mover is inside, and waits for a peer"
    begun = time.monotonic()
    publisher(desk).publish("x", None, timeout=20.0)
    assert time.monotonic() - begun < 10
    turn.close()


class Hearing(Link):
    """A supervisor that soon hears what is stated."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self._desk = desk

    def state(self, statement: Statement) -> None:
        super().state(statement)
        threading.Thread(target=self._hear, args=(statement.number,)).start()

    def _hear(self, number: int) -> None:
        with self._desk.changed:
            self._desk.core.heard = max(self._desk.core.heard, number)
            self._desk.changed.notify_all()


def interrupted(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def test_an_interrupt_after_a_slot_was_claimed_loses_no_slot(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.link = cast(Any, Hearing(desk))
    source = publisher(desk)
    source.publish(None, None, timeout=20.0)
    for _ in range(2):  # one for each slot
        source.publish(None, None, timeout=20.0)
        with monkeypatch.context() as patch:
            patch.setattr(desk.turns.window, "close", interrupted)
            with pytest.raises(KeyboardInterrupt):
                source.publish(None, None, timeout=20.0)
    assert source.publish(None, None, timeout=3.0).state == "offered"


def test_an_interrupt_while_a_slot_is_waited_for_takes_nothing_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = publisher(desk)
    offered = [source.publish(None, None, timeout=20.0) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(desk.changed, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            source.publish(None, None, timeout=20.0)
    assert [one.state for one in offered] == ["offered", "offered"]
    link = cast(Any, desk.link)
    assert [len(said.fills) for said in link.statements[-2:]] == [1, 2], "and it is said again"


def test_who_has_left_keeps_no_memory_of_a_device(desk: Desk) -> None:
    before = open_pretend(NUMBER).free()
    source = publisher(desk)
    kept = source.publish("x", None, timeout=20.0)
    assert open_pretend(NUMBER).free() < before
    source.close()
    source._filler = cast(Any, None)  # the user's own tensors
    assert open_pretend(NUMBER).free() == before
    assert kept.nbytes == 300 * 7 * 4
