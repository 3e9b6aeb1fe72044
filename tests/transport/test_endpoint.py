"""Endpoints are formed by all or, in bounded time, by nobody; and they close without a trace."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore

from elastic_reshard.arena import Listener
from elastic_reshard.errors import LayoutError, PeerLost, TransferError, TransferTimeout
from elastic_reshard.plan import Topology
from elastic_reshard.transport import Endpoint, GlooNetwork, Identity
from elastic_reshard.transport.endpoint import _refuse_strangers
from tests.collective import worlds
from tests.processes import Rank, run_ranks


def form(me: Rank, name: str, size: int | None = None, **more: Any) -> Endpoint:
    return Endpoint.form(PrefixStore(name, me.store()), me.rank, size or me.size, **more)


def without_one(me: Rank) -> tuple[Any, float, bool]:
    """Member 3 never comes (CASES B12); then the others form under a new prefix (B47)."""
    if me.rank == 3:
        me.store().wait(["formed0", "formed1", "formed2"])
        return None, 0.0, True
    begun = time.monotonic()
    error = worlds.error_of(lambda: form(me, "first", timeout=0.7))
    took = time.monotonic() - begun
    with form(me, "second", 3, timeout=20.0) as endpoint:
        me.store().set(f"formed{me.rank}", "")
        assert endpoint.size == 3
    return (type(error).__name__, getattr(error, "members", None)), took, "[3] of 4" in str(error)


def test_a_member_that_never_comes_is_named() -> None:
    *told, _ = run_ranks(without_one, 4, group=False)
    for what, took, said in told:
        assert what == (TransferTimeout.__name__, (3,))
        assert took < 8.0
        assert said


def announced_and_died(me: Rank, early: bool) -> tuple[Any, float]:
    """Member 2 says who it is and is killed: before the others look (early), or while the network forms."""
    store = PrefixStore("first", me.store())
    if me.rank == 2 and early:
        with Listener() as listener:
            store.set("member/2", json.dumps(asdict(Identity.mine(2, listener, None))))
        me.store().set("announced", "")
        os.kill(os.getpid(), signal.SIGKILL)
    if me.rank == 2:
        GlooNetwork.__init__ = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    if early:
        me.store().wait(["announced"])
        pid = json.loads(store.get("member/2"))["pid"]
        while os.path.exists(f"/proc/{pid}"):  # until it is reaped: run_ranks ends the test if it never is
            time.sleep(0.005)
    begun = time.monotonic()
    error = worlds.error_of(lambda: form(me, "first", timeout=3.0))
    took = time.monotonic() - begun
    with form(me, "second", 2, timeout=20.0) as endpoint:
        assert endpoint.size == 2
    return (type(error).__name__, getattr(error, "members", None)), took


@pytest.mark.parametrize("early", [True, False])
def test_a_member_that_dies_on_the_way_is_named(early: bool) -> None:
    first, second, _ = run_ranks(announced_and_died, 3, early, group=False, lost=[2])
    for what, took in (first, second):
        assert what == (PeerLost.__name__, (2,))
        assert took < (2.0 if early else 10.0)


def domains_of(me: Rank) -> list[Any]:
    found: list[Any] = [type(worlds.error_of(lambda: form(me, "wrong", domains=["a"]))).__name__]
    for name, labels in {"told": ["x", "y", "x"], "by host": None}.items():
        with form(me, name, domains=labels) as endpoint:
            found.append((endpoint.topology, endpoint.domain_peers))
    return found


def test_domains_are_as_told_or_by_host() -> None:
    results = run_ranks(domains_of, 3, group=False)
    near = [(2,), (), (0,)]
    for rank, (refused, told, by_host) in enumerate(results):
        assert refused == LayoutError.__name__
        assert told == (Topology((0, 1, 0)), near[rank])
        assert by_host == (Topology((0, 0, 0)), tuple(m for m in range(3) if m != rank))


def test_a_domain_over_two_hosts_is_refused() -> None:
    with Listener() as listener:
        mine = Identity.mine(0, listener, "a")
    _refuse_strangers([mine, replace(mine, member=1)])
    with pytest.raises(LayoutError, match=r"'a'.* span several hosts"):
        _refuse_strangers([mine, replace(mine, member=1, host="elsewhere")])


def what_is_open() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def many(me: Rank) -> tuple[int, int, list[str]]:
    """Endpoints that were formed and closed leave nothing; a closed one says so."""
    form(me, "warm-up").close()
    before = what_is_open()
    said = []
    for number in range(5):
        endpoint = form(me, f"number {number}", domains=[0, 0, 1])
        assert len(endpoint.staging(1 << 16).bytes) == 1 << 16
        endpoint.close()
        endpoint.close()
        said.append(str(worlds.error_of(lambda: endpoint.network)))  # noqa: B023 - called at once
    endpoint = form(me, "last")
    endpoint.close()
    error = worlds.error_of(
        lambda: worlds.call(worlds.CASES["declared"](), endpoint, {"w": torch.zeros(1)}, None, deadline=5.0)
    )
    assert isinstance(error, TransferError)
    deadline = time.monotonic() + 5
    while what_is_open() > before and time.monotonic() < deadline:
        continue
    return before, what_is_open(), said


def test_closed_endpoints_leave_nothing_open() -> None:
    for before, after, said in run_ranks(many, 3, group=False):
        assert after <= before
        assert all("closed or alone" in text for text in said)


def wrapped(me: Rank, first: int) -> list[str]:
    """The call's own counters at the end of the range of gloo's tags (CASES B64)."""
    case = worlds.catalog_case("tiny", "fsdp2", "tp2")
    source, destination = (worlds.tensors(side, me.rank, "ordinary") for side in (case.source, case.destination))
    wrong = []
    with form(me, "wrap", domains=list(range(4)), first_sequence=first) as endpoint:
        for version in range(4):
            worlds.fill(case, source, me.rank, version)
            worlds.poison(destination)
            worlds.call(case, endpoint, source, destination, verify="full", staging=64 << 10, message=4 << 10)
            wrong += worlds.wrong(case, destination, me.rank, version)
    return wrong


@pytest.mark.parametrize("first", [(1 << 30) - 2, (1 << 30) - 30])
def test_sequence_numbers_wrap_safely(first: int) -> None:
    assert run_ranks(wrapped, 4, first, group=False) == [[]] * 4
