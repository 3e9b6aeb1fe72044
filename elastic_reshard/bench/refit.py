"""`bench refit`: the reshard against gather-and-broadcast and against this machine's memcpy, in one run.

One process per member, the same tensors for every method, every byte checked after each. Repetitions of all methods are
taken in turn, so that a machine whose speed drifts treats them alike; figures are the slowest member's, ratios are between
medians of one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.distributed_c10d import PrefixStore

from elastic_reshard.arena import empty, empty_like
from elastic_reshard.bench.memory import PeakMemory
from elastic_reshard.bench.spawn import Worker
from elastic_reshard.bench.spawn import run as spawn
from elastic_reshard.bench.values import fill, poison, wrong
from elastic_reshard.collective import Report, reshard
from elastic_reshard.collective.agree import exchange
from elastic_reshard.collective.baseline import Baseline, BaselineOptions
from elastic_reshard.collective.baseline_groups import BaselineGroups
from elastic_reshard.errors import DigestMismatch, ReshardError
from elastic_reshard.layout import ModelLayout
from elastic_reshard.layout.dtensor import torch_dtype
from elastic_reshard.transport import Endpoint

__all__ = ["DOMAINS", "MEMCPY", "NETWORK", "ORDINARY", "PACKED", "Row", "Setup", "measure"]

_MIB = 1 << 20
_DEADLINE = 300.0
PACKED = ("all-gather + broadcast, 64 MiB buckets", "one root + broadcast, 64 MiB buckets")
MEMCPY = "memcpy of the same bytes"
NETWORK, DOMAINS, ORDINARY = "reshard, network only", "reshard, one domain, er.empty", "reshard, one domain, ordinary"


@dataclass(frozen=True)
class Setup:
    """What to measure. Ranks of the two layouts are the processes' numbers and do not overlap."""

    source: ModelLayout
    destination: ModelLayout
    sources: int
    destinations: int
    repeats: int = 5
    staging: int = 64 * _MIB
    per_tensor: bool = True


@dataclass
class Row:
    """One method. Seconds of the slowest member; `cold` the first time, `transfer` without planning, agreement and
    verification. Bytes of all members together; `memory` the most that any member needed beyond its tensors."""

    method: str
    cold: float
    seconds: float
    best: float
    transfer: float | None = None
    network: int = 0
    pulled: int = 0
    memory: int = 0
    samples: list[float] = field(default_factory=list)

    def to_data(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass
class _Sample:
    seconds: float
    transfer: float | None = None
    received: int = 0
    pulled: int = 0
    staging: int = 0


_Method = Callable[[], _Sample]


def measure(setup: Setup, on_event: Callable[[int, dict[str, Any]], None] | None = None) -> list[Row]:
    """Run everything; blocks for minutes. DigestMismatch when any method delivers a wrong byte."""
    results = spawn(_member, setup.sources + setup.destinations, setup, timeout=1500, on_event=on_event)
    rows = []
    for method in results[0]:
        told = [r[method] for r in results]
        bad = sorted({name for t in told for name in t["wrong"]})
        if bad:
            raise DigestMismatch([(name, f"after {method}", -1) for name in bad])
        seconds = [max(t["samples"][i].seconds for t in told) for i in range(len(told[0]["samples"]))]
        transfers = [max(t["samples"][i].transfer or 0.0 for t in told) for i in range(len(seconds))]
        warm = slice(1, None) if len(seconds) > 1 else slice(None)
        last = [t["samples"][-1] for t in told]
        rows.append(
            Row(
                method,
                seconds[0],
                statistics.median(seconds[warm]),
                min(seconds[warm]),
                statistics.median(transfers[warm]) if any(transfers) else None,
                sum(s.received for s in last),
                sum(s.pulled for s in last),
                max(t["memory"] + s.staging for t, s in zip(told, last, strict=True)),
                seconds,
            )
        )
    return rows


def _tensors(layout: ModelLayout, rank: int, *, arena: bool) -> dict[str, torch.Tensor]:
    shapes = {
        name: torch.empty(shape, dtype=torch_dtype(t.dtype), device="meta")
        for name, t in layout.items()
        if (shape := t.local_shape(rank)) is not None
    }
    if arena:
        return empty_like(shapes)
    return {name: torch.empty(t.shape, dtype=t.dtype) for name, t in shapes.items()}


class _Bench:
    """One member's tensors, groups and methods."""

    def __init__(self, worker: Worker, setup: Setup) -> None:
        self.worker, self.setup, self.rank = worker, setup, worker.rank
        size = setup.sources + setup.destinations
        self.is_source = self.rank < setup.sources
        self.isolated = self._endpoint("isolated", range(size))
        self.together = self._endpoint("together", [0] * size)
        self.ordinary = self._endpoint("ordinary", [0] * size)
        self.layout = setup.source if self.is_source else setup.destination
        self.in_arena = _tensors(self.layout, self.rank, arena=True)
        self.plain = _tensors(self.layout, self.rank, arena=False)
        self.expected = 1

    def _endpoint(self, name: str, domains: Sequence[int]) -> Endpoint:
        store = PrefixStore(f"bench/{name}", self.worker.store)
        size = self.setup.sources + self.setup.destinations
        return Endpoint.form(store, self.rank, size, domains=list(domains))

    def barrier(self) -> None:
        """Wait for all members."""
        exchange(self.isolated, b"b", [1] * self.isolated.size, time.monotonic() + _DEADLINE)

    def methods(self) -> dict[str, tuple[_Method, Mapping[str, torch.Tensor], int]]:
        """Name -> (one repetition, the tensors it works on, how often)."""
        n = 1 + self.setup.repeats
        groups = BaselineGroups.form(
            PrefixStore("bench/baseline", self.worker.store),
            self.rank,
            self.isolated.size,
            range(self.setup.sources),
            range(self.setup.sources, self.isolated.size),
            _DEADLINE,
            "lo",
        )
        found: dict[str, tuple[_Method, Mapping[str, torch.Tensor], int]] = {MEMCPY: (self._memcpy(), {}, n)}
        for name, gather in zip(PACKED, ("all", "root"), strict=True):
            options = BaselineOptions(gather=gather, pack=64 * _MIB, wire="collectives")  # type: ignore[arg-type]
            found[name] = (self._baseline(groups, options), self.in_arena, n)
            found[f"{name}, point to point"] = (
                self._baseline(groups, BaselineOptions(gather=gather, pack=64 * _MIB, wire="p2p")),  # type: ignore[arg-type]
                self.in_arena,
                n,
            )
        if self.setup.per_tensor:
            for gather, name in (
                ("all", "all-gather + broadcast, per tensor"),
                ("root", "one root + broadcast, per tensor"),
            ):
                options = BaselineOptions(gather=gather, pack=None, wire="collectives")  # type: ignore[arg-type]
                found[name] = (self._baseline(groups, options), self.in_arena, 2)
        found[NETWORK] = (self._reshard(self.isolated, self.in_arena), self.in_arena, n)
        found[DOMAINS] = (self._reshard(self.together, self.in_arena), self.in_arena, n)
        found[ORDINARY] = (self._reshard(self.ordinary, self.plain), self.plain, n)
        return found

    def _memcpy(self) -> _Method:
        """Every destination member copies as many bytes as it receives, flat, between arenas that nobody else touches."""
        nbytes = 0 if self.is_source else sum(t.nbytes for t in self.in_arena.values())
        if not nbytes:
            return lambda: _Sample(0.0)
        source, target = (empty((nbytes,), torch.uint8).fill_(i).numpy() for i in (1, 2))

        def once() -> _Sample:
            begun = time.monotonic()
            np.copyto(target, source)
            return _Sample(time.monotonic() - begun)

        return once

    def _baseline(self, groups: BaselineGroups, options: BaselineOptions) -> _Method:
        kept: list[Baseline] = []

        def once() -> _Sample:
            if not kept:
                kept.append(Baseline(self.setup.source, self.setup.destination, groups, options))
            mine = self.in_arena
            report = kept[0].run(mine if self.is_source else None, None if self.is_source else mine)
            return _Sample(report.seconds, None, report.bytes_received, 0, report.buffer_bytes)

        return once

    def _reshard(self, endpoint: Endpoint, tensors: Mapping[str, torch.Tensor]) -> _Method:
        def once() -> _Sample:
            report = reshard(
                tensors if self.is_source else None,
                None if self.is_source else tensors,
                group=endpoint,
                source_layout=self.setup.source,
                destination_layout=self.setup.destination,
                staging=self.setup.staging,
                deadline=_DEADLINE,
            )
            if not isinstance(report, Report):
                raise ReshardError("a synchronous call returned a handle")
            return _Sample(report.seconds, report.transfer, report.received, report.pulled, report.staging)

        return once

    def close(self) -> None:
        """All groups."""
        for endpoint in (self.isolated, self.together, self.ordinary):
            endpoint.close()


def _member(worker: Worker, setup: Setup) -> dict[str, Any]:
    torch.set_num_threads(1)
    bench = _Bench(worker, setup)
    told: dict[str, Any] = {}
    methods = bench.methods()
    for version, (name, (once, tensors, _)) in enumerate(methods.items()):
        if bench.is_source:
            fill(bench.layout, tensors, bench.rank, version)
        else:
            poison(tensors)
        bench.barrier()
        cold = once()
        bench.barrier()
        with PeakMemory() as peak:
            once()
        bad = [] if bench.is_source else wrong(bench.layout, tensors, bench.rank, version)
        told[name] = {"samples": [cold], "memory": peak.extra, "wrong": bad}
        worker.report({"method": name, "seconds": cold.seconds})
    for repeat in range(setup.repeats):
        for name, (once, _, count) in methods.items():
            if repeat + 1 < count:
                bench.barrier()
                told[name]["samples"].append(once())
    bench.close()
    return told
