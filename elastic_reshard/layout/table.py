"""The region table: which distinct boxes of a tensor exist, and which ranks hold each. Arrays only, any number of ranks.

Everything the planner knows of a layout is in this table, so that mesh layouts and declared ones are one thing to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from elastic_reshard.layout.box import Box
from elastic_reshard.layout.mesh import Mesh
from elastic_reshard.layout.placements import Declared, Placement, Replicate, Shard, StridedShard

__all__ = ["Int", "RegionTable", "group_rows", "table_of_boxes", "table_of_mesh", "volumes"]

Int = npt.NDArray[np.int64]


def volumes(lo: Int, hi: Int) -> Int:
    """Elements of each box: bounds int64 [boxes, dims], result int64 [boxes]."""
    found: Int = np.prod(hi - lo, axis=1, dtype=np.int64)
    return found


@dataclass(frozen=True, eq=False)
class RegionTable:
    """Region k is the box [lo[k], hi[k]); entries ptr[k]:ptr[k+1] are its replicas, sorted by rank.

    An entry has the rank and `local`, where the box begins in that rank's local tensor. A rank with several boxes
    (strided shards of uneven rows) has several entries. `members` are all ranks of the layout, sorted, also those
    that hold nothing, with the shapes of their local tensors. No region is empty.
    """

    lo: Int  # [regions, dims]
    hi: Int  # [regions, dims]
    ptr: Int  # [regions + 1]
    ranks: Int  # [entries]
    local: Int  # [entries, dims]
    members: Int  # [ranks]
    local_shape: Int  # [ranks, dims]

    @property
    def regions(self) -> int:
        """Number of distinct boxes."""
        return len(self.lo)

    @cached_property
    def numel(self) -> Int:
        """Elements per region, int64 [regions]."""
        return volumes(self.lo, self.hi)

    @cached_property
    def replicas(self) -> Int:
        """Ranks that hold each region, int64 [regions]."""
        return np.diff(self.ptr)

    @cached_property
    def entry_region(self) -> Int:
        """Region of each entry, int64 [entries]."""
        return np.repeat(np.arange(self.regions, dtype=np.int64), self.replicas)

    @cached_property
    def _by_rank(self) -> Int:
        return np.lexsort((self.entry_region, self.ranks))

    def entries_of(self, rank: int) -> Int:
        """Entries of one rank, in the order of their regions."""
        order = self._by_rank
        a, b = np.searchsorted(self.ranks, [rank, rank + 1], sorter=order)
        return order[a:b]

    def boxes_of(self, rank: int) -> list[tuple[Box, tuple[int, ...]]]:
        """(box, offset in the local tensor) for one rank, in local order."""
        found = [
            (
                Box(tuple(self.lo[k].tolist()), tuple(self.hi[k].tolist())),
                tuple(self.local[e].tolist()),
            )
            for e in self.entries_of(rank)
            for k in (self.entry_region[e],)
        ]
        return sorted(found, key=lambda item: item[1])

    def shape_of(self, rank: int) -> tuple[int, ...] | None:
        """Shape of the rank's local tensor, None for a rank outside the layout."""
        i = int(np.searchsorted(self.members, rank))
        if i == len(self.members) or self.members[i] != rank:
            return None
        return tuple(self.local_shape[i].tolist())

    def digest(self, *head: object) -> str:
        """Content id over the table and `head`."""
        h = xxhash.xxh3_128(repr((head, self.lo.shape, len(self.ranks))).encode())
        for part in (self.lo, self.hi, self.ptr, self.ranks, self.local, self.members, self.local_shape):
            h.update(np.ascontiguousarray(part).data)
        return h.hexdigest()


def group_rows(columns: Sequence[Int], tiebreak: Int) -> tuple[Int, Int]:
    """Sort rows by `columns` (first is most significant), then `tiebreak`; (order, index of each group's first row)."""
    order = np.lexsort((tiebreak, *reversed(columns)))
    new = np.zeros(len(order), dtype=bool)
    new[:1] = True
    for column in columns:
        ordered = column[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(new)


def _assemble(lo: Int, hi: Int, ranks: Int, local: Int, members: Int, local_shape: Int) -> RegionTable:
    """A table from one row per (rank, box)."""
    order, first = group_rows([*lo.T, *hi.T], ranks)
    by_member = np.argsort(members, kind="stable")
    table = RegionTable(
        lo=lo[order[first]],
        hi=hi[order[first]],
        ptr=np.append(first, len(order)).astype(np.int64),
        ranks=ranks[order],
        local=local[order],
        members=members[by_member],
        local_shape=local_shape[by_member],
    )
    for part in vars(table).values():
        part.flags.writeable = False
    return table


def _slice_runs(start: Int, length: Int, lo: Int, hi: Int) -> tuple[Int, Int]:
    """Positions lo..hi of each row's concatenated runs. All arrays [rows, runs], bounds [rows]."""
    before = np.cumsum(length, axis=1) - length
    a = np.clip(lo[:, None] - before, 0, length)
    b = np.clip(hi[:, None] - before, 0, length)
    return start + a, b - a


def _chunk(total: Int, parts: int, index: Int) -> tuple[Int, Int]:
    """torch.chunk's rule: chunk `index` of `total` in `parts`."""
    size = -(-total // parts)
    lo = np.minimum(index * size, total)
    return lo, np.minimum(lo + size, total)


def _compact(start: Int, length: Int) -> tuple[Int, Int]:
    """Drop empty runs, join runs that touch; as few columns as the longest row needs."""
    if start.shape[1] > 1:
        order = np.argsort(length == 0, axis=1, kind="stable")
        start, length = np.take_along_axis(start, order, 1), np.take_along_axis(length, order, 1)
        joined = (start[:, 1:] == start[:, :-1] + length[:, :-1]) | (length[:, 1:] == 0)
        column = np.cumsum(np.pad(~joined, ((0, 0), (1, 0))), axis=1)
        rows = np.arange(len(start))[:, None]
        total = np.zeros_like(length)
        np.add.at(total, (rows, column), length)
        first = np.full_like(start, np.iinfo(np.int64).max)
        np.minimum.at(first, (rows, column), np.where(length > 0, start, first))
        start, length = np.where(total > 0, first, 0), total
    width = max(1, int((length > 0).sum(axis=1).max(initial=0)))
    return start[:, :width], length[:, :width]


def _runs_of_dim(extent: int, cuts: Sequence[tuple[Int, int, Placement]], rows: int) -> tuple[Int, Int]:
    """The runs that each rank holds of one dim, axes applied from left to right: (start, length), [rows, runs]."""
    start = np.zeros((rows, 1), dtype=np.int64)
    length = np.full((rows, 1), extent, dtype=np.int64)
    for coordinate, size, placement in cuts:
        total = length.sum(axis=1)
        if isinstance(placement, Declared):
            offsets = np.asarray(placement.offsets, dtype=np.int64)
            start, length = _slice_runs(start, length, offsets[coordinate], offsets[coordinate + 1])
        elif isinstance(placement, Shard):
            start, length = _slice_runs(start, length, *_chunk(total, size, coordinate))
        elif isinstance(placement, StridedShard):
            parts = []
            for j in range(placement.split_factor):
                lo, hi = _chunk(total, placement.split_factor, np.full_like(total, j))
                a, b = _chunk(hi - lo, size, coordinate)
                parts.append(_slice_runs(start, length, lo + a, lo + b))
            start = np.concatenate([s for s, _ in parts], axis=1)
            length = np.concatenate([n for _, n in parts], axis=1)
        start, length = _compact(start, length)
    return start, length


def table_of_mesh(shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> RegionTable:
    """The table of a mesh layout. The caller has checked dims and counts."""
    rows, dims = mesh.size, len(shape)
    coordinates = mesh.coordinates()
    runs = []
    for d, extent in enumerate(shape):
        cuts = [
            (coordinates[:, axis], mesh.shape[axis], p)
            for axis, p in enumerate(placements)
            if not isinstance(p, Replicate) and getattr(p, "dim", None) == d
        ]
        runs.append(_runs_of_dim(int(extent), cuts, rows))
    ranks = np.asarray(mesh.ranks, dtype=np.int64)
    local_shape = np.stack([n.sum(axis=1) for _, n in runs], axis=1) if dims else np.zeros((rows, 0), dtype=np.int64)
    parts: list[tuple[Int, Int, Int, Int]] = []
    for choice in itertools.product(*(range(s.shape[1]) for s, _ in runs)):
        lo = np.zeros((rows, dims), dtype=np.int64)
        extent_, local = np.ones_like(lo), np.zeros_like(lo)
        for d, r in enumerate(choice):
            start, length = runs[d]
            lo[:, d], extent_[:, d] = start[:, r], length[:, r]
            local[:, d] = length[:, :r].sum(axis=1)
        kept = (extent_ > 0).all(axis=1)
        parts.append((lo[kept], (lo + extent_)[kept], ranks[kept], local[kept]))
    lo, hi, held, local = (np.concatenate(column) for column in zip(*parts, strict=True))
    return _assemble(lo, hi, held, local, ranks, local_shape)


def table_of_boxes(
    boxes: Sequence[tuple[int, Box, tuple[int, ...]]], shapes: Sequence[tuple[int, tuple[int, ...]]], dims: int
) -> RegionTable:
    """The table of declared boxes: (rank, box, offset in the local tensor), and (rank, local shape) of every rank."""
    full = [(r, b, at) for r, b, at in boxes if b.numel]

    def column(values: list[tuple[int, ...]]) -> Int:
        return np.array(values, dtype=np.int64).reshape(len(values), dims)

    return _assemble(
        column([b.lo for _, b, _ in full]),
        column([b.hi for _, b, _ in full]),
        np.array([r for r, _, _ in full], dtype=np.int64),
        column([at for _, _, at in full]),
        np.array([r for r, _ in shapes], dtype=np.int64),
        column([s for _, s in shapes]),
    )
