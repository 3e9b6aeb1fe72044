"""Layouts as the supervisor sees them: joined from fragments, compared, and asked which ranks hold all of one.

Pure, numpy only. A layout's id is the model layout's content id; with correspondences (of a destination) a digest of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from elastic_reshard.errors import LayoutError, LayoutMismatch, Violation
from elastic_reshard.layout import ModelLayout, match
from elastic_reshard.layout.fragments import (
    correspondences_from_data,
    joined,
)
from elastic_reshard.layout.side import Side
from elastic_reshard.layout.table import RegionTable

__all__ = ["covers", "examine", "fault_between"]

_NOTHING: Mapping[str, Any] = {"whole": False, "tensors": {}}


def examine(
    fragments: Sequence[tuple[str | None, str | None]], bodies: Mapping[str, bytes]
) -> tuple[Side | None, Side | None, str]:
    """(source, destination, fault) of a group from its ranks' fragments (source id, destination id) and their bodies.

    A side that no rank has is None. fault: "" or text with every violation of both sides; then both are None.
    """
    parsed = {key: json.loads(bodies[key]) for pair in fragments for key in pair if key is not None}
    sides: list[Side | None] = []
    faults: list[str] = []
    for index, name in enumerate(("source", "destination")):
        said = [None if (key := pair[index]) is None else parsed[key] for pair in fragments]
        try:
            sides.append(_side(name, said))
        except LayoutMismatch as error:
            faults += [str(v) for v in error.violations]
        except LayoutError as error:
            faults.append(str(error))
    if faults:
        return None, None, _text("in what its ranks say of their tensors", faults)
    return sides[0], sides[1], ""


def _side(name: str, said: Sequence[Mapping[str, Any] | None]) -> Side | None:
    if all(s is None for s in said):
        return None
    model = joined(name, [s if s is not None else _NOTHING for s in said])
    violations = [*_outsiders(name, model, said), *_ill_declared(name, model)]
    told = {
        json.dumps(s["correspondences"]): r for r, s in enumerate(said) if s and s.get("correspondences") is not None
    }
    if len(told) > 1:
        violations.append(
            Violation("*", "correspondence", f"ranks {sorted(told.values())} gave unlike correspondences")
        )
    if violations:
        raise LayoutMismatch(violations)
    return Side(model, correspondences_from_data(json.loads(next(iter(told)))) if told else None)


def _outsiders(name: str, model: ModelLayout, said: Sequence[Mapping[str, Any] | None]) -> Iterable[Violation]:
    """Ranks of a mesh that are outside of the group, or have not this role."""
    there = {rank for rank, s in enumerate(said) if s is not None}
    seen: dict[tuple[int, ...], list[int]] = {}
    for tensor, layout in model.items():
        ranks = layout.mesh.ranks
        if ranks not in seen:
            seen[ranks] = sorted(set(ranks) - there)
        if seen[ranks]:
            yield Violation(
                tensor, "layout", f"its {name} mesh has ranks {seen[ranks][:8]}, who are no {name} of the group"
            )


def _ill_declared(name: str, model: ModelLayout) -> Iterable[Violation]:
    """Holes and overlaps, which only declared layouts can have: known before there is another side to compare with."""
    for tensor, layout in model.items():
        if layout.declared is None:
            continue
        overlaps = layout.overlapping()
        for a, b in overlaps:
            yield Violation(tensor, "overlap", f"{name} ranks declare {a} and {b}, which overlap without being equal")
        if name == "source" and not overlaps and layout.missing():
            yield Violation(tensor, "hole", f"{layout.missing()} of {layout.numel} elements are held by no source rank")


def fault_between(source: Side, destination: Side) -> str:
    """ "" if the source layout serves the destination layout, else text with every violation."""
    try:
        match(source.model, destination.model, destination.correspondences)
    except LayoutMismatch as error:
        return _text("between source and destination", [str(v) for v in error.violations])
    return ""


def _text(where: str, faults: Sequence[str]) -> str:
    return f"{len(faults)} violation(s) {where}:\n" + "\n".join(f"  - {f}" for f in faults)


def covers(model: ModelLayout, ranks: frozenset[int]) -> bool:
    """Whether these source ranks hold every element of every tensor. Regions of an examined source are disjoint and tile
    it, so that each region needs one replica among the ranks."""
    return all(_held(layout.table, ranks) for layout in model.values())


@lru_cache(maxsize=4096)
def _held(table: RegionTable, ranks: frozenset[int]) -> bool:
    """By table, which tensors of one mesh and shape share. No region is without an entry."""
    if not table.regions:
        return True
    mine = np.isin(table.ranks, np.fromiter(ranks, np.int64, len(ranks)))
    return bool(np.logical_or.reduceat(mine, table.ptr[:-1]).all())
