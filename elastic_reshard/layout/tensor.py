"""Where one global tensor lies: shape, dtype, mesh, placements; or the boxes that members declare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from elastic_reshard.errors import LayoutError, UnsupportedPlacement
from elastic_reshard.layout.box import Box
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.layout.mesh import Mesh
from elastic_reshard.layout.placements import Declared, Partial, Placement, Shard, StridedShard
from elastic_reshard.layout.table import RegionTable, table_of_boxes, table_of_mesh

__all__ = ["DeclaredBox", "TensorLayout"]

# Meshes of one job are few; 512 tables of 10,000 ranks are under 300 MB.
_table_of_mesh = lru_cache(maxsize=512)(table_of_mesh)


@dataclass(frozen=True, slots=True)
class DeclaredBox:
    """One rank's statement: it holds `box`, beginning at `local` in its local tensor."""

    rank: int
    box: Box
    local: tuple[int, ...]


@dataclass(frozen=True)
class TensorLayout:
    """Layout of one tensor over the ranks of a group.

    shape, dtype: of the global tensor; dtype by torch's name ("bfloat16").
    mesh, placements: one placement per mesh axis, applied from left to right.
    declared: stands instead of placements where members state their boxes (`TensorLayout.declare`).

    Raises LayoutError (UnsupportedPlacement for Partial and unknown kinds) with every fault in one message.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: Mesh
    placements: tuple[Placement, ...] = ()
    declared: tuple[DeclaredBox, ...] | None = None

    def __post_init__(self) -> None:
        itemsize(self.dtype)
        if any(n < 0 for n in self.shape):
            raise LayoutError(f"shape {self.shape} has a negative dim")
        unknown = [p for p in self.placements if not isinstance(p, Placement)]
        if unknown or any(isinstance(p, Partial) for p in self.placements):
            raise UnsupportedPlacement(
                f"placements {[str(p) for p in self.placements]} of shape {self.shape}: Partial must be reduced "
                f"before a refit; known kinds are Replicate, Shard, StridedShard, Declared"
            )
        faults = list(self._faults()) if self.declared is None else []
        if faults:
            raise LayoutError(f"layout of shape {self.shape} on mesh {self.mesh}: " + "; ".join(faults))

    def _faults(self) -> Iterable[str]:
        if len(self.placements) != len(self.mesh.shape):
            yield f"{len(self.placements)} placements for {len(self.mesh.shape)} mesh axes"
            return
        cuts: dict[int, list[Placement]] = {}
        for size, p in zip(self.mesh.shape, self.placements, strict=True):
            if isinstance(p, Shard | StridedShard | Declared):
                if not 0 <= p.dim < len(self.shape):
                    yield f"{p} cuts a dim that a {len(self.shape)}-d tensor lacks"
                    continue
                cuts.setdefault(p.dim, []).append(p)
            if isinstance(p, Declared) and (
                len(p.offsets) != size + 1 or p.offsets[0] != 0 or p.offsets[-1] != self.shape[p.dim]
            ):
                yield f"{p} must have {size + 1} offsets from 0 to {self.shape[p.dim]}"
        for dim, placements in cuts.items():
            if len(placements) > 1 and any(isinstance(p, Declared) for p in placements):
                yield f"dim {dim} is cut by a declared axis and by another"

    @classmethod
    def declare(cls, shape: Sequence[int], dtype: str, boxes: Mapping[int, Box | Sequence[Box]]) -> TensorLayout:
        """From what members state. A rank with several boxes holds them one after another along the only dim in which
        they differ; a rank that holds nothing states an empty sequence or an empty box."""
        whole = Box.whole(shape)
        stated: list[DeclaredBox] = []
        for rank, given in sorted(boxes.items()):
            held = [given] if isinstance(given, Box) else list(given)
            for box in held:
                if len(box.lo) != len(whole.lo) or not whole.contains(box):
                    raise LayoutError(f"rank {rank} declares {box}, outside of shape {tuple(shape)}")
            stated += _concatenated(rank, held, len(whole.lo))
        return cls(whole.hi, dtype, Mesh.of(sorted(boxes), ("member",)), (), tuple(stated))

    @cached_property
    def table(self) -> RegionTable:
        """The region table, computed once."""
        if self.declared is None:
            return _table_of_mesh(self.shape, self.mesh, self.placements)
        rows = [(d.rank, d.box, d.local) for d in self.declared]
        extents = {rank: (0,) * len(self.shape) for rank in self.mesh.ranks}
        for d in self.declared:
            reach = tuple(a + n for a, n in zip(d.local, d.box.shape, strict=True))
            extents[d.rank] = tuple(map(max, extents[d.rank], reach))
        return table_of_boxes(rows, sorted(extents.items()), len(self.shape))

    @cached_property
    def content_id(self) -> str:
        """Hex digest of shape, dtype, regions and holders: equal for equal tables, however they were spelled."""
        return self.table.digest(self.shape, self.dtype)

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return self.numel * itemsize(self.dtype)

    def boxes(self, rank: int) -> list[tuple[Box, tuple[int, ...]]]:
        """(box, where it begins in the local tensor) for each box of the rank, in local order."""
        return self.table.boxes_of(rank)

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """Shape of the rank's local tensor; None for a rank outside the mesh."""
        return self.table.shape_of(rank)

    def overlapping(self) -> list[tuple[Box, Box]]:
        """Pairs of regions that overlap without being equal (only declared layouts can have any); at most 8."""
        if self.declared is None:
            return []
        t = self.table
        found: list[tuple[Box, Box]] = []
        active: list[int] = []
        for k in range(t.regions):  # regions are sorted by lo, so only those that still reach here can overlap
            if t.lo.shape[1]:
                active = [j for j in active if t.hi[j, 0] > t.lo[k, 0]]
            box = Box(tuple(t.lo[k].tolist()), tuple(t.hi[k].tolist()))
            for j in active:
                if np.all((t.lo[j] < t.hi[k]) & (t.lo[k] < t.hi[j])):
                    found.append((Box(tuple(t.lo[j].tolist()), tuple(t.hi[j].tolist())), box))
                    if len(found) == 8:
                        return found
            active.append(k)
        return found

    def missing(self) -> int:
        """Elements that no rank holds, given that regions do not overlap."""
        return self.numel - int(self.table.numel.sum())

    def __str__(self) -> str:
        where = "declared" if self.declared is not None else " ".join(str(p) for p in self.placements)
        return f"{self.dtype}{list(self.shape)} on {self.mesh} [{where}]"


def _concatenated(rank: int, boxes: Sequence[Box], dims: int) -> list[DeclaredBox]:
    """Offsets of boxes that lie one after another in a local tensor."""
    if not boxes:
        return [DeclaredBox(rank, Box((0,) * dims, (0,) * dims), (0,) * dims)] if dims else []
    if len(boxes) == 1:
        return [DeclaredBox(rank, boxes[0], (0,) * dims)]
    differs = [d for d in range(dims) if len({(b.lo[d], b.hi[d]) for b in boxes}) > 1]
    if len(differs) != 1:
        raise LayoutError(
            f"rank {rank} declares {len(boxes)} boxes that differ in dims {differs}; they must differ in exactly one"
        )
    stated, at = [], 0
    for box in boxes:
        offset = [0] * dims
        offset[differs[0]] = at
        stated.append(DeclaredBox(rank, box, tuple(offset)))
        at += box.shape[differs[0]]
    return stated
