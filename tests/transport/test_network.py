"""gloo behind the network's small interface, between real processes."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import PrefixStore, Store

from elastic_reshard.errors import PeerLost, TransferTimeout
from elastic_reshard.transport import GlooNetwork
from elastic_reshard.transport.polling import whole_ms
from tests.collective.worlds import error_of
from tests.processes import Rank, run_ranks


def network(me: Rank, name: str = "net", timeout: float = 30.0, first: int = 0) -> GlooNetwork:
    return GlooNetwork(PrefixStore(name, me.store()), me.rank, me.size, timeout, "lo", tuple, first)


def numbered(number: int, size: int) -> torch.Tensor:
    return (torch.arange(size) * 7 + number * 31).to(torch.uint8)


def exchange(me: Rank, first: int) -> list[int]:
    """Messages of many sizes in both directions, posted at once; those out of order by reserved numbers."""
    net, peer = network(me, first=first), 1 - me.rank
    sizes = [1, 5, 4096, 100_000, 1 << 20, 3]
    place = net.reserve(peer, 3, 3)
    held = []
    for number in (2, 0, 1) if me.rank else (1, 2, 0):  # sends and receives in unlike orders
        into = torch.zeros(sizes[number], dtype=torch.uint8)
        held.append((number, into, net.receive(peer, into, place[1] + number)))
        net_send = net.send(peer, numbered(number, sizes[number]), place[0] + number)
        held.append((-1, into, net_send))
    for number in (3, 4, 5):
        into = torch.zeros(sizes[number], dtype=torch.uint8)
        held.append((number, into, net.receive(peer, into)))
        held.append((-1, into, net.send(peer, numbered(number, sizes[number]))))
    for *_, pending in held:
        pending.wait(time.monotonic() + 20)
    net.close()
    return [
        number for number, into, _ in held if number >= 0 and not torch.equal(into, numbered(number, sizes[number]))
    ]


@pytest.mark.parametrize("first", [0, (1 << 30) - 2, (1 << 31) - 2, (1 << 32) - 2])
def test_messages_meet_by_number_also_where_the_counter_wraps(first: int) -> None:
    assert run_ranks(exchange, 2, first, group=False) == [[], []]


def closed_by_one(me: Rank) -> tuple[str, float]:
    """Member 0 closes; the others wait for it, and for each other."""
    net, store = network(me), me.store()
    if me.rank == 0:
        held = [net.receive(m, torch.zeros(8, dtype=torch.uint8)) for m in (1, 2)]  # what keeps gloo's group alive
        store.wait(["posted1", "posted2"])
        begun = time.monotonic()
        net.close()
        net.close()
        kind = type(error_of(lambda: net.send(1, torch.zeros(1, dtype=torch.uint8)))).__name__
        took = time.monotonic() - begun
        store.wait(["freed1", "freed2"])
        assert len(held) == 2
        return kind, took
    pending = net.receive(0, torch.zeros(8, dtype=torch.uint8))
    store.set(f"posted{me.rank}", "")
    begun = time.monotonic()
    error = error_of(lambda: pending.wait(time.monotonic() + 30))
    store.set(f"freed{me.rank}", "")
    net.close()
    assert isinstance(error, PeerLost)
    assert error.members == (0,)
    return type(error).__name__, time.monotonic() - begun


def test_closing_frees_peers_at_once() -> None:
    for kind, took in run_ranks(closed_by_one, 3, group=False):
        assert kind == PeerLost.__name__
        assert took < 5.0


def silent(me: Rank) -> tuple[Any, float]:
    net = network(me)
    if me.rank == 1:
        me.store().wait(["done"])
        net.close()
        return None, 0.0
    begun = time.monotonic()
    error = error_of(lambda: net.receive(1, torch.zeros(8, dtype=torch.uint8)).wait(time.monotonic() + 0.5))
    me.store().set("done", "")
    net.close()
    return (type(error).__name__, getattr(error, "members", None)), time.monotonic() - begun


def test_a_silent_peer_is_named_at_the_deadline() -> None:
    (told, took), _ = run_ranks(silent, 2, group=False)
    assert told == (TransferTimeout.__name__, (1,))
    assert 0.4 < took < 5.0


def alone(me: Rank) -> tuple[str, float]:
    begun = time.monotonic()
    error = error_of(lambda: GlooNetwork(PrefixStore("n", me.store()), 0, 3, 0.7, "lo", tuple))
    assert isinstance(error, TransferTimeout)
    return str(error.members), time.monotonic() - begun


def test_forming_without_the_others_ends_at_its_timeout() -> None:
    ((members, took),) = run_ranks(alone, 1, group=False)
    assert members == "(1, 2)"
    assert took < 10.0


class Silent(Store):
    """A store in which nobody else is: it waits as long as it is told to, to the moment."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.waited: list[float] = []

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not all(key in self.values for key in keys):
            self.waited.append(timeout.total_seconds())
            time.sleep(timeout.total_seconds())
            raise RuntimeError("nobody came")


def test_forming_ends_after_its_timeout_not_a_part_of_a_millisecond_before() -> None:
    """Before it, it would be taken for a peer that is lost."""
    store = Silent()
    error = error_of(lambda: GlooNetwork(store, 0, 2, 0.0507, "lo", tuple))
    assert store.waited == [0.051]
    assert isinstance(error, TransferTimeout)


@given(st.floats(-10.0, 1e5))
def test_a_wait_in_whole_milliseconds_ends_after_its_deadline(seconds: float) -> None:
    """gloo waits 499 of 499.9 ms, and what ends before its deadline would be taken for a connection that broke."""
    limit = whole_ms(seconds)
    assert limit.microseconds % 1000 == 0
    assert limit.total_seconds() >= max(0.001, seconds)
    assert limit.total_seconds() <= max(0.001, seconds + 0.00101)
