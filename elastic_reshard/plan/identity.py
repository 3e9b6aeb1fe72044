"""A plan's name, known without planning: what the supervisor tells and every mover works out for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from elastic_reshard.plan.plan import PLANNER_VERSION, PlanOptions

__all__ = ["transfer_digest"]

# (layout's content id, positions of its ranks in the members)
_Party = tuple[str, Sequence[int]]


def transfer_digest(
    options: PlanOptions,
    source: _Party,
    destinations: Sequence[_Party],
    hosts: Sequence[str],
    absent: Sequence[int],
    basis: Mapping[str, str],
) -> str:
    """Content id of everything that a landing plan is a function of: planner version, options, layouts (a destination's id
    covers its correspondences), who is where, who is absent, and what had landed (by member, as it travels)."""
    told: list[Any] = [
        PLANNER_VERSION, options.message, options.staging, options.min_stripe, options.cell, options.landing,
        source[0], tuple(source[1]), [(layout, tuple(members)) for layout, members in destinations],
        tuple(hosts), tuple(sorted(absent)), sorted((m, b) for m, b in basis.items() if b),
    ]  # fmt: skip
    return xxhash.xxh3_128(repr(told).encode()).hexdigest()
