"""Members that are killed, freeze, leave or never come: every survivor ends in time with an error that says who, and a
new endpoint over the survivors works. All in real processes; the victim itself chooses the moment, by count."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from torch.distributed import PrefixStore

from elastic_reshard.arena import Copies, DomainChannel
from elastic_reshard.bench.values import fill, poison, wrong
from elastic_reshard.collective import reshard
from elastic_reshard.errors import PeerLost, TransferError, TransferTimeout
from elastic_reshard.layout import Mesh, ModelLayout, Shard, TensorLayout
from elastic_reshard.transport import Endpoint, GlooNetwork
from tests.collective import worlds
from tests.processes import Rank, run_ranks

TENSORS, DEADLINE = 6, 12.0


@dataclass(frozen=True)
class Size:
    """rows: of each tensor, 2 KiB each. Bytes of messages and staging."""

    rows: int = 512
    message: int = 64 << 10
    staging: int = 512 << 10


@dataclass(frozen=True)
class Fault:
    """What one member does to the others in a call: act when `method` of `where` is called for the count-th time."""

    victim: int
    act: str
    where: type | None = None
    method: str = ""
    count: int = 1


def layouts(sources: Sequence[int], destinations: Sequence[int], rows: int) -> tuple[ModelLayout, ModelLayout]:
    def side(ranks: Sequence[int], dim: int) -> ModelLayout:
        mesh = Mesh.of(ranks, ("rank",))
        return ModelLayout(
            {f"w{i}": TensorLayout((rows, 1024), "bfloat16", mesh, (Shard(dim),)) for i in range(TENSORS)}
        )

    return side(sources, 0), side(destinations, 1)


class Party:
    """A member among those that are left, with new tensors and a new endpoint at every stage."""

    def __init__(self, me: Rank, alive: Sequence[int], domains: Sequence[int], stage: int, limits: Size) -> None:
        self.rank, self.limits = alive.index(me.rank), limits
        size = len(alive)
        sides = range(size // 2), range(size // 2, size)
        self.source_layout, self.destination_layout = layouts(*sides, limits.rows)
        self.is_source = self.rank < size // 2
        mine = self.source_layout if self.is_source else self.destination_layout
        self.tensors = worlds.tensors(mine, self.rank, "arena" if stage % 2 else "ordinary")
        assert self.tensors is not None
        store = PrefixStore(f"stage {stage}", me.store())
        self.endpoint = Endpoint.form(store, self.rank, size, domains=[domains[m] for m in alive], timeout=30.0)

    def call(self, deadline: float) -> None:
        reshard(
            self.tensors if self.is_source else None,
            None if self.is_source else self.tensors,
            group=self.endpoint,
            source_layout=self.source_layout,
            destination_layout=self.destination_layout,
            message=self.limits.message,
            staging=self.limits.staging,
            deadline=deadline,
        )

    def good_call(self, version: int) -> None:
        assert self.tensors is not None
        if self.is_source:
            fill(self.source_layout, self.tensors, self.rank, version)
        else:
            poison(self.tensors)
        self.call(40.0)
        assert self.is_source or wrong(self.destination_layout, self.tensors, self.rank, version) == []


def arm(fault: Fault, act: Callable[[], Any]) -> None:
    """Let the act happen in this process at its moment."""
    if fault.where is None:
        act()
        return
    original, calls = getattr(fault.where, fault.method), 0

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fault.count:
            act()
        return original(*args, **more)

    setattr(fault.where, fault.method, counted)


def descriptors() -> Counter[str]:
    """Kinds of what this process has open."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{name}").split(":[")[0]] += 1
    return found


def under_way() -> bool:
    return any(t.name == "elastic-reshard" for t in threading.enumerate())


def nothing_left(before: Counter[str], seconds: float) -> None:
    """gloo closes a moment later; its device has a thread and descriptors that stay for good."""
    until = time.monotonic() + seconds
    while left := descriptors() - before:
        gc.collect()
        assert time.monotonic() < until, left


def survive(me: Rank, domains: list[int], faults: list[Fault], deadline: float, limits: Size) -> list[Any]:
    """One fault after another; after each the survivors form a new endpoint, refit once, and meet the next.

    Per fault: (victim's member number, error's kind, its members, seconds, its text)."""
    alive = list(range(me.size))
    found: list[Any] = []
    before = descriptors()
    for stage, fault in enumerate(faults):
        party = Party(me, alive, domains, stage, limits)
        party.good_call(stage)
        if me.rank == fault.victim:
            if fault.act in ("kill", "stop"):
                how = signal.SIGKILL if fault.act == "kill" else signal.SIGSTOP
                arm(fault, lambda how=how: os.kill(os.getpid(), how))  # type: ignore[misc]
            elif fault.act == "close":
                party.endpoint.close()
                return found
            elif fault.act == "absent":
                me.store().wait([f"survived {stage} by {m}" for m in alive if m != me.rank])
                party.endpoint.close()
                return found
        begun = time.monotonic()
        error = worlds.error_of(lambda: party.call(deadline))  # noqa: B023 - called at once
        took = time.monotonic() - begun
        assert me.rank != fault.victim, f"the moment of {fault} never came"
        found.append(
            (alive.index(fault.victim), type(error).__name__, list(getattr(error, "members", ())), took, str(error))
        )
        del error  # its frames hold what they held
        assert party.endpoint.closed, "the call got through"
        assert isinstance(worlds.error_of(lambda: party.call(deadline)), TransferError)  # noqa: B023
        me.store().set(f"survived {stage} by {me.rank}", "")
        alive.remove(fault.victim)
        del party
        if not under_way():
            nothing_left(before, 5.0)
    nothing_left(before, deadline + 5.0)  # a call that was given up ends by its deadline
    assert not under_way()
    party = Party(me, alive, domains, len(faults), limits)
    party.good_call(99)
    party.endpoint.close()
    return found


NET, CHANNEL, COPY = (GlooNetwork, "send"), (DomainChannel, "send"), (Copies, "run")
# 6 members: victims are destinations and sources; each moment is a count of what the victim's process does in the call.
KILLS: dict[str, tuple[list[int], list[Fault], Size]] = {
    "isolated": (
        [0, 1, 2, 3, 4, 5],
        [
            Fault(5, "kill", GlooNetwork, "receive", 20),  # a destination, during the transfer
            Fault(0, "kill", *NET, 9),  # a source, at its first messages
            Fault(4, "kill", *COPY, 3),  # in the middle of unpacking
            Fault(1, "kill"),  # before the call
        ],
        Size(),
    ),
    "one domain": (
        [0] * 6,
        [
            Fault(0, "kill", *CHANNEL, 8),  # a source, while others wait for what it stages
            Fault(5, "kill", *COPY, 4),
            Fault(2, "kill", *CHANNEL, 2),  # while the headers are told
            Fault(4, "kill"),
        ],
        Size(),
    ),
    "two domains": (
        [0, 0, 0, 1, 1, 1],
        [
            Fault(1, "kill", *NET, 12),
            Fault(4, "kill", GlooNetwork, "receive", 14),
            Fault(5, "kill", *CHANNEL, 1),
            Fault(0, "kill", *NET, 4),
        ],
        Size(),
    ),
    # 48 MiB by messages of the default size: gloo forgets one of those that a death cuts off.
    "isolated, many messages under way": (
        [0, 1, 2, 3],
        [Fault(3, "kill", GlooNetwork, "receive", 20), Fault(0, "kill", *NET, 30)],
        Size(4096, 1 << 20, 32 << 20),
    ),
}


@pytest.mark.parametrize(
    "topology", [pytest.param(t, marks=[] if t == "two domains" else [pytest.mark.long]) for t in KILLS]
)
def test_a_killed_member_is_named_by_every_survivor_at_once(topology: str) -> None:
    domains, faults, limits = KILLS[topology]
    lost = [f.victim for f in faults]
    results = run_ranks(survive, len(domains), domains, faults, DEADLINE, limits, group=False, lost=lost, timeout=100)
    told = [r for r in results if r is not None]
    assert len(told) == 2
    for found in told:
        assert len(found) == len(faults)
        for victim, kind, members, took, text in found:
            assert kind == PeerLost.__name__, text
            assert members == [victim], text
            assert took < DEADLINE - 4.0, text
            assert f"member {victim}" in text


@pytest.mark.parametrize(
    "domains",
    [
        pytest.param([0, 1, 2, 3, 4], marks=pytest.mark.long),
        [0, 0, 0, 0, 0],
        pytest.param([0, 0, 1, 1, 1], marks=pytest.mark.long),
    ],
)
def test_a_frozen_or_absent_member_ends_the_call_at_its_deadline(domains: list[int]) -> None:
    moment = (*CHANNEL, 7) if len(set(domains)) == 1 else (GlooNetwork, "receive", 6)
    faults = [Fault(4, "stop", *moment), Fault(0, "absent"), Fault(3, "stop", *COPY, 2)]
    deadline = 1.5
    results = run_ranks(survive, 5, domains, faults, deadline, Size(), group=False, lost=[4, 0, 3], timeout=60)
    told = [results[1], results[2]]
    for stage in range(len(faults)):
        stages = [found[stage] for found in told]
        assert {kind for _, kind, *_ in stages} <= {TransferTimeout.__name__, PeerLost.__name__}
        # Each says whom it waited for; somebody waited for the one itself.
        assert any(kind == TransferTimeout.__name__ and members == [victim] for victim, kind, members, *_ in stages)
        for _, _, members, took, text in stages:
            assert members, text
            assert deadline - 0.2 < took < deadline + 2.0, text


@pytest.mark.parametrize("domains", [[0, 1, 2, 3], [0, 0, 0, 0]])
def test_a_member_that_closes_politely_frees_all_at_once(domains: list[int]) -> None:
    """CASES B10, B87: nobody waits for one who has left."""
    faults = [Fault(3, "close"), Fault(0, "close")]
    results = run_ranks(survive, 4, domains, faults, 30.0, Size(), group=False, timeout=60)
    for found in results[1:3]:
        for _, kind, members, took, text in found:
            assert kind == PeerLost.__name__, text
            assert members
            assert took < 8.0
