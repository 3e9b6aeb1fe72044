"""Layouts of a whole model, and whether one can be moved into another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import xxhash

from elastic_reshard.errors import LayoutMismatch, Violation
from elastic_reshard.layout.box import Box
from elastic_reshard.layout.correspondence import Correspondence
from elastic_reshard.layout.dtypes import is_castable, itemsize
from elastic_reshard.layout.tensor import TensorLayout

__all__ = ["ModelLayout", "WireDtype", "match"]

# One dtype for every floating-point tensor that differs, or a dtype per destination tensor.
WireDtype = str | Mapping[str, str] | None


@dataclass(frozen=True, eq=False)
class ModelLayout(Mapping[str, TensorLayout]):
    """Names to tensor layouts, in the order of the model. Immutable; compared by content id."""

    tensors: Mapping[str, TensorLayout]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", dict(self.tensors))

    def __getitem__(self, name: str) -> TensorLayout:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def content_id(self) -> str:
        """Hex digest over names and tensor layouts, in order."""
        h = xxhash.xxh3_128(b"model")
        for name, layout in self.tensors.items():
            h.update(f"{name}\0{layout.content_id}\0".encode())
        return h.hexdigest()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all global tensors together."""
        return sum(t.nbytes for t in self.tensors.values())

    def local_nbytes(self, rank: int) -> int:
        """Bytes that one rank holds."""
        total = 0
        for t in self.tensors.values():
            entries = t.table.entries_of(rank)
            total += int(t.table.numel[t.table.entry_region[entries]].sum()) * itemsize(t.dtype)
        return total


def match(
    source: ModelLayout,
    destination: ModelLayout,
    correspondences: Sequence[Correspondence] | None = None,
    wire_dtype: WireDtype = None,
) -> tuple[Correspondence, ...]:
    """The correspondences of a refit, with every box and permutation filled in, ordered as the destination.

    Given correspondences must set every destination tensor; source tensors may be left out.
    Raises LayoutMismatch with *every* violation: names, shapes, dtypes, holes, overlaps that disagree.
    """
    faults: list[Violation] = []
    if correspondences is None:
        faults += [
            Violation(n, "missing", "the destination wants it, no source has it")
            for n in destination
            if n not in source
        ]
        faults += [
            Violation(n, "extra", "a source has it, the destination does not") for n in source if n not in destination
        ]
        correspondences = [Correspondence(n, n) for n in destination if n in source]
    else:
        told = {c.destination for c in correspondences}
        faults += [
            Violation(n, "missing", "no correspondence sets it")
            for n, t in destination.items()
            if n not in told and t.numel
        ]
    filled = [c for given in correspondences for c in _filled(given, source, destination, faults)]
    for side, model in (("source", source), ("destination", destination)):
        used = {c.source if side == "source" else c.destination for c in filled}
        faults += _own_faults(side, {n: model[n] for n in used})
    faults += _dtype_faults(filled, source, destination, wire_dtype)
    faults += _tiling_faults(filled, destination)
    if faults:
        raise LayoutMismatch(faults)
    order = {name: i for i, name in enumerate(destination)}
    return tuple(sorted(filled, key=lambda c: (order[c.destination], c.destination_box or Box((), ()))))


def _filled(
    c: Correspondence, source: ModelLayout, destination: ModelLayout, faults: list[Violation]
) -> tuple[Correspondence, ...]:
    """The correspondence with nothing left out, or nothing and one violation."""

    def refuse(kind: str, detail: str) -> tuple[Correspondence, ...]:
        faults.append(Violation(c.destination, kind, detail))
        return ()

    if c.source not in source or c.destination not in destination:
        side = "source" if c.source not in source else "destination"
        return refuse("missing", f"correspondence {c.source} -> {c.destination}: no such {side} tensor")
    have, want = source[c.source], destination[c.destination]
    a = c.source_box or Box.whole(have.shape)
    b = c.destination_box or Box.whole(want.shape)
    permute = c.permute if c.permute is not None else tuple(range(len(want.shape)))
    if len(have.shape) != len(want.shape) or sorted(permute) != list(range(len(have.shape))):
        return refuse("shape", f"source {have.shape}, destination {want.shape}, permute {permute}")
    if not (Box.whole(have.shape).contains(a) and Box.whole(want.shape).contains(b)):
        return refuse("shape", f"boxes {a} -> {b} reach outside {have.shape} -> {want.shape}")
    if tuple(a.shape[p] for p in permute) != b.shape:
        return refuse("shape", f"source {a.shape} permuted by {permute} is not destination {b.shape}")
    return (Correspondence(c.source, c.destination, a, b, permute),)


def _own_faults(side: str, used: Mapping[str, TensorLayout]) -> Iterable[Violation]:
    """What is wrong with one side alone. Only declared layouts can have holes or overlaps."""
    for name, layout in used.items():
        if layout.declared is None:
            continue
        overlaps = layout.overlapping()
        for a, b in overlaps:
            yield Violation(name, "overlap", f"{side} members declare {a} and {b}, which overlap without being equal")
        if not overlaps and side == "source" and layout.missing():
            yield Violation(name, "hole", f"{layout.missing()} of {layout.numel} elements are held by no source member")


def _dtype_faults(
    filled: Sequence[Correspondence], source: ModelLayout, destination: ModelLayout, wire: WireDtype
) -> Iterable[Violation]:
    for c in filled:
        have, want = source[c.source].dtype, destination[c.destination].dtype
        asked = wire.get(c.destination) if isinstance(wire, Mapping) else wire
        if have == want and (asked in (None, want) or isinstance(wire, str)):
            continue
        if asked is None:
            yield Violation(c.destination, "dtype", f"source {have}, destination {want}; ask with wire_dtype to cast")
        elif not is_castable(have, asked):
            yield Violation(c.destination, "dtype", f"{have} is never cast to {asked}: only floating point is")
        elif asked != want:
            yield Violation(c.destination, "dtype", f"wire_dtype {asked}, but the destination is {want}")


def _tiling_faults(filled: Sequence[Correspondence], destination: ModelLayout) -> Iterable[Violation]:
    """Destination boxes of one tensor must be disjoint and together cover it."""
    boxes: dict[str, list[Box]] = {}
    for c in filled:
        if c.destination_box is not None:
            boxes.setdefault(c.destination, []).append(c.destination_box)
    for name, parts in boxes.items():
        parts = sorted(p for p in parts if p.numel)
        twice = [(a, b) for i, a in enumerate(parts) for b in parts[i + 1 :] if a.intersect(b)]
        for a, b in twice:
            yield Violation(name, "overlap", f"correspondences write {a} and {b}, which overlap")
        left = destination[name].numel - sum(p.numel for p in parts)
        if left and not twice:
            yield Violation(name, "hole", f"correspondences leave {left} of {destination[name].numel} elements unset")
