"""The gate of the rounds: closed, opened up to a round, broken off."""

from __future__ import annotations

import threading

import pytest

from elastic_reshard.errors import ProtocolError, TransferError
from elastic_reshard.mover.gate import Gate
from elastic_reshard.protocol.starts import Way


def test_it_is_open_and_counts_what_was_begun() -> None:
    gate = Gate()
    assert [gate.may_begin(n) for n in (0, 1, 4)] == [True, True, True]
    assert gate.began == 5
    assert not gate.held


def test_once_held_nothing_begins_until_it_is_told_which_round_is_the_last() -> None:
    gate, said = Gate(), []
    assert gate.may_begin(0)
    assert gate.hold() == 1
    assert gate.held
    thread = threading.Thread(target=lambda: said.extend(gate.may_begin(n) for n in (1, 2, 3)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert gate.began == 1
    gate.until(2)
    thread.join(10)
    assert said == [True, True, False]
    assert (gate.began, gate.held) == (3, False)
    assert gate.hold() == 3  # told twice: what was told stands
    assert gate.may_begin(2)


def test_a_round_that_has_begun_cannot_be_taken_back() -> None:
    gate = Gate()
    gate.may_begin(3)
    gate.hold()
    with pytest.raises(ProtocolError, match="after round 2, but round 3 has begun"):
        gate.until(2)
    gate.until(3)
    assert not gate.may_begin(4)


def test_an_abort_ends_the_wait_with_its_reason() -> None:
    gate, said = Gate(), []
    gate.hold()

    def wait() -> None:
        try:
            gate.may_begin(0)
        except TransferError as error:
            said.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    gate.abort("first")
    gate.abort("second")
    thread.join(10)
    assert said == ["first"]
    with pytest.raises(TransferError, match="first"):
        gate.may_begin(1)
    assert gate.began == 0


def test_what_lets_a_round_in_is_asked_again_and_again() -> None:
    """As a member's window: closed for a while, then open."""
    gate, asked = Gate(), []

    def enter() -> bool:
        asked.append(gate.began)
        return len(asked) > 3

    assert gate.may_begin(0, enter)
    assert asked == [0, 0, 0, 0]
    assert gate.began == 1, "a round that was not let in has not begun"


@pytest.mark.parametrize("how", ["abort", "until"])
def test_a_round_that_is_not_let_in_is_left_at_once(how: str) -> None:
    gate, said = Gate(), []

    def asks() -> None:
        try:
            said.append(gate.may_begin(1, lambda: False))
        except TransferError:
            said.append("aborted")

    assert gate.may_begin(0)
    thread = threading.Thread(target=asks)
    thread.start()
    if how == "abort":
        gate.abort("it breaks")
    else:
        assert gate.hold() == 1, "it waits outside of round 1"
        gate.until(0)
    thread.join(5)
    assert said == ["aborted" if how == "abort" else False]


def test_a_round_of_copies_only_asks_the_window_and_counts_for_nobody() -> None:
    gate, looks = Gate(), iter([False, False, True])
    assert gate.may_copy(7, lambda: next(looks))
    assert gate.began == 0
    gate.hold()
    assert gate.may_copy(8, lambda: True), "nobody else has to do with it"
    gate.until(2)
    assert not gate.may_copy(3, lambda: pytest.fail("it is not run"))
    assert (gate.way(2), gate.way(3)) == (Way.OPEN, Way.ENDED)
    assert gate.begin(2)
    assert not gate.begin(3)
    assert gate.began == 3
    gate.abort("broken off")
    with pytest.raises(TransferError, match="broken off"):
        gate.may_copy(0, lambda: True)
