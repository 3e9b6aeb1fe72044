"""`bench plan`: how long planning takes, from tens to thousands of members, beside a pairwise planner in the same run.

One geometry: one bf16 tensor of a real embedding's shape, FSDP over one half of the members -> TP8 x DP over the other,
domains of 8. Timed is what one member does: its slice, cold (layouts, tables, plan and slice from nothing) and warm (the
next slice of a plan that is there).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from elastic_reshard.bench.pairwise import pairwise
from elastic_reshard.errors import PlanError
from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.plan import Plan, Topology

__all__ = ["MEMBERS", "Row", "run", "table"]

MEMBERS = (64, 256, 1024, 4096, 10000)
_SHAPE = (151936, 2560)
_TP = 8
# A pairwise plan that would take longer, judging by the one before, is not made.
_PAIRWISE_LIMIT = 5.0


@dataclass(frozen=True, slots=True)
class Row:
    """One number of members. Milliseconds, medians over the repeats; growth is per doubling of the members since the row
    before, 2.0 is linear and 4.0 quadratic. `pairwise` is the whole plan of the pairwise planner, `note` why it is None."""

    members: int
    refit: str
    source_cold: float
    source_warm: float
    destination_cold: float
    destination_warm: float
    legs: int
    pairwise: float | None
    note: str
    growth_cold: float | None = None
    growth_pairwise: float | None = None

    def to_data(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def run(members: Sequence[int] = MEMBERS, repeats: int = 3) -> list[Row]:
    """Time each size `repeats` times; blocks for about ten seconds. PlanError for a size that is no multiple of 16."""
    return list(rows(members, repeats))


def rows(members: Sequence[int] = MEMBERS, repeats: int = 3) -> Iterator[Row]:
    """As `run`, one row after another."""
    before: Row | None = None
    for n in members:
        if n < 2 * _TP or n % (2 * _TP):
            raise PlanError(f"bench plan needs multiples of {2 * _TP} members, got {n}")
        row = _row(n, max(1, repeats), before)
        yield row
        before = row


def _layouts(n: int, label: str) -> tuple[TensorLayout, TensorLayout]:
    """FSDP over members 0 .. n/2 and TP8 x DP over the others. Tables are kept by content; a new `label` makes new ones."""
    half = n // 2
    source = Mesh.arange((half,), (f"fsdp{label}",))
    destination = Mesh.arange((half // _TP, _TP), (f"dp{label}", f"tp{label}"), half)
    return (
        TensorLayout(_SHAPE, "bfloat16", source, (Shard(0),)),
        TensorLayout(_SHAPE, "bfloat16", destination, (Replicate(), Shard(0))),
    )


def _row(n: int, repeats: int, before: Row | None) -> Row:
    cold: dict[str, list[float]] = {"source": [], "destination": []}
    warm: dict[str, list[float]] = {"source": [], "destination": []}
    legs = 0
    for r in range(repeats):
        for side, first in (("source", 0), ("destination", n // 2)):
            begun = time.perf_counter()
            a, b = _layouts(n, f"{side}{r}")
            plan = Plan.between(ModelLayout({"w": a}), ModelLayout({"w": b}), Topology.blocks(n, _TP))
            plan.slice(first + n // 4)
            cold[side].append((time.perf_counter() - begun) * 1e3)
            seconds, part = _timed(partial(plan.slice, first + n // 8))
            warm[side].append(seconds * 1e3)
            legs = max(legs, len(part.legs))
    took, note = _pairwise(n, before)
    row = Row(
        n,
        f"FSDP{n // 2} -> TP{_TP} DP{n // 2 // _TP}",
        statistics.median(cold["source"]),
        statistics.median(warm["source"]),
        statistics.median(cold["destination"]),
        statistics.median(warm["destination"]),
        legs,
        took,
        note,
    )
    return row if before is None else _with_growth(row, before)


def _with_growth(row: Row, before: Row) -> Row:
    """With factors per doubling of the members; none where the members did not grow."""
    doublings = math.log2(row.members / before.members)

    def growth(now: float | None, then: float | None) -> float | None:
        return (now / then) ** (1 / doublings) if now and then and doublings > 0 else None

    now, then = (max(r.source_cold, r.destination_cold) for r in (row, before))
    return replace(row, growth_cold=growth(now, then), growth_pairwise=growth(row.pairwise, before.pairwise))


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


def _pairwise(n: int, before: Row | None) -> tuple[float | None, str]:
    """(milliseconds, "") of the pairwise planner, or (None, why not)."""
    if before is not None:
        if before.pairwise is None:
            return None, "skipped"
        expected = before.pairwise / 1e3 * (n / before.members) ** 2
        if expected > _PAIRWISE_LIMIT:
            return None, f"skipped: about {expected:.0f} s by its growth"
    seconds, _ = _timed(lambda: pairwise(*_layouts(n, "pairwise")))
    return seconds * 1e3, ""


def table(found: Iterable[Row]) -> list[tuple[str, ...]]:
    """Header and rows as text, for any kind of table."""
    head = (
        "members", "refit", "source cold ms", "warm ms", "destination cold ms", "warm ms", "per doubling",
        "pairwise ms", "per doubling",
    )  # fmt: skip

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    def times(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}x"

    return [
        head,
        *(
            (
                str(r.members),
                r.refit,
                ms(r.source_cold),
                ms(r.source_warm),
                ms(r.destination_cold),
                ms(r.destination_warm),
                times(r.growth_cold),
                ms(r.pairwise) if r.pairwise is not None else r.note,
                times(r.growth_pairwise),
            )
            for r in found
        ),
    ]
