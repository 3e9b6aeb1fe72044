"""The local store: fed from outside, ended from another thread."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from elastic_reshard.communicator import ControlStore, Name
from elastic_reshard.errors import ProtocolError, TransferError, TransferTimeout
from tests.communicator.world import error_of, soon, until

NAME = Name(3, "t")


def waiting(store: ControlStore, *keys: str) -> tuple[threading.Thread, list[BaseException | None]]:
    found: list[BaseException | None] = []
    thread = threading.Thread(
        target=lambda: found.append(error_of(lambda: store.wait(list(keys), timedelta(seconds=30))))
    )
    thread.start()
    return thread, found


def test_values_go_up_and_come_down() -> None:
    told: list[tuple[str, bytes]] = []
    store = ControlStore(NAME, lambda key, value: told.append((key, value)))
    store.set("a", "x")
    store.set("b", b"\0\xff")
    thread, found = waiting(store, "a", "c", "d")
    store.feed({"c": b"1"})
    assert store.missing(["a", "c", "d"]) == ("d",)
    store.feed({"c": b"1", "d": b"2"})  # documents come again and again
    thread.join(5)
    assert found == [None]
    assert store.multi_get(["a", "b", "d"]) == [b"x", b"\0\xff", b"2"]
    assert told == [("a", b"x"), ("b", b"\0\xff")]
    assert store.own == dict(told)
    assert store.check(["a", "d"])
    assert not store.check(["a", "e"])


def test_a_value_that_was_told_twice_and_differs_is_refused_by_name() -> None:
    store = ControlStore(NAME)
    store.feed({"a": b"1", "b": b"1"})
    with pytest.raises(ProtocolError, match=r"3/t.*\['b'\]"):
        store.feed({"a": b"1", "b": b"2"})
    assert store.get("b") == b"1"


@pytest.mark.parametrize("call", ["wait", "get", "multi_get", "set", "check", "add", "later"])
def test_a_cancelled_store_ends_every_call_at_once(call: str) -> None:
    store, error = ControlStore(NAME), TransferError("given up")
    if call in ("wait", "get", "multi_get"):
        found: list[BaseException | None] = []
        blocked = threading.Event()
        store = ControlStore(NAME, on_blocked=blocked.set)
        calls = {
            "wait": lambda: store.wait(["k"]),
            "get": lambda: store.get("k"),
            "multi_get": lambda: store.multi_get(["k"]),
        }
        thread = threading.Thread(target=lambda: found.append(error_of(calls[call])))
        thread.start()
        assert blocked.wait(5)
        begun = time.monotonic()
        store.cancel(error)
        thread.join(5)
        assert found == [error]
        assert time.monotonic() - begun < 1.0
        return
    store.cancel(error)
    store.cancel(TransferError("a later reason"))
    later = {
        "set": lambda: store.set("k", b"v"),
        "check": lambda: store.check(["k"]),
        "add": lambda: store.add("k", 1),
        "later": lambda: store.wait(["k"]),
    }
    assert error_of(later[call]) is error


def test_a_wait_past_its_timeout_raises_and_names_what_never_came() -> None:
    store = ControlStore(NAME)
    store.set("a", b"")
    begun = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"3/t.*\['b'\]"):
        store.wait(["a", "b"], timedelta(milliseconds=50))
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(TransferTimeout):
        store.get("b")
    store.hold_until(soon(0.3))
    with pytest.raises(TransferTimeout):
        store.wait(["b"], timedelta(milliseconds=1))
    assert 0.35 < time.monotonic() - begun < 5


@pytest.mark.parametrize("there", [False, True])
def test_it_says_once_when_it_waits_for_others(there: bool) -> None:
    """Also if their values are there already: its own must reach them all the same."""
    blocked: list[dict[str, bytes]] = []
    store = ControlStore(NAME, on_blocked=lambda: blocked.append(store.own))
    if there:
        store.feed({"b": b"2"})
    store.set("a", b"1")
    store.wait(["a"])
    assert blocked == []
    thread, _ = waiting(store, "b")
    until(lambda: bool(blocked), "blocked")
    store.feed({"b": b"2"})
    thread.join(5)
    second, _ = waiting(store, "c")
    store.feed({"c": b"3"})
    second.join(5)
    assert blocked == [{"a": b"1"}]


def test_values_are_judged_before_the_first_wait_for_others_ends() -> None:
    store, refusal = ControlStore(NAME), ProtocolError("unlike")

    def look(values: object) -> None:
        assert values == {"own": b"", "theirs": b"1", "also": b"2"}
        raise refusal

    store.vet(["also"], look)
    store.set("own", b"")
    store.wait(["own"])
    thread, found = waiting(store, "theirs")
    store.feed({"theirs": b"1"})
    store.feed({"also": b"2"})
    thread.join(5)
    assert found == [refusal]
    assert store.error is refusal


def test_counting_and_the_rest_of_a_store() -> None:
    store = ControlStore(NAME)
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]
    assert store.get("n") == b"5"
    store.multi_set(["x", "y"], [b"1", "2"])
    store.append("y", b"3")
    assert store.multi_get(["x", "y"]) == [b"1", b"23"]
    assert store.compare_set("x", b"0", b"9") == b"1"
    assert store.compare_set("x", b"1", b"9") == b"9"
    assert store.num_keys() == 3
    assert store.delete_key("x")
    assert not store.delete_key("x")
    assert store.has_extended_api()


@pytest.mark.parametrize("before", [True, False])
def test_who_asked_to_be_stopped_is_stopped_once(before: bool) -> None:
    store, stopped = ControlStore(NAME), []
    if before:
        store.cancel(TransferError("x"))
    store.when_cancelled(lambda: stopped.append(1))
    store.cancel(TransferError("y"))
    until(lambda: bool(stopped), "stopped")
    store.cancel(TransferError("z"))
    assert stopped == [1]
