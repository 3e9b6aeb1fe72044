"""Layouts as the supervisor sees them: joined from fragments, compared, and asked which ranks hold all of one.

Pure, numpy only. A layout's id is the model layout's content id; with correspondences (of a destination) a digest of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import xxhash

from elastic_reshard.errors import LayoutError, LayoutMismatch, Violation
from elastic_reshard.layout import Correspondence, ModelLayout, match
from elastic_reshard.layout.fragments import (
    canonical,
    correspondences_from_data,
    correspondences_to_data,
    joined,
    model_from_data,
    model_to_data,
)
from elastic_reshard.layout.table import RegionTable

__all__ = ["Side", "covers", "examine", "fault_between"]

_NOTHING: Mapping[str, Any] = {"whole": False, "tensors": {}}


@dataclass(frozen=True, eq=False)
class Side:
    """One side's layout, and for a destination the correspondences that its members gave (None: same names)."""

    model: ModelLayout
    correspondences: tuple[Correspondence, ...] | None = None

    @cached_property
    def id(self) -> str:
        """The layout id of the view: 32 hex digits."""
        if self.correspondences is None:
            return self.model.content_id
        said = canonical({"correspondences": correspondences_to_data(self.correspondences)})
        return xxhash.xxh3_128(self.model.content_id.encode() + said).hexdigest()

    @cached_property
    def body(self) -> bytes:
        """What GET /v1/layouts/ID answers."""
        told = None if self.correspondences is None else correspondences_to_data(self.correspondences)
        return canonical({"tensors": model_to_data(self.model), "correspondences": told})

    @classmethod
    def of_body(cls, body: bytes) -> Side:
        """From what GET /v1/layouts/ID answers. LayoutError for anything else."""
        try:
            data = json.loads(body)
            told = data["correspondences"]
            found = None if told is None else correspondences_from_data(told)
            return cls(model_from_data(data["tensors"]), found)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, LayoutError):
                raise
            raise LayoutError(f"not the body of a layout: {error!r}") from error


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
