"""What each rank holds, by plain lists of indices: the slow and obvious way, for comparison."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from elastic_reshard.layout import Declared, Mesh, Placement, Shard, StridedShard, TensorLayout

__all__ = ["chunk", "elements_of", "held", "rows_of"]


def chunk(indices: list[int], parts: int, part: int) -> list[int]:
    """torch.chunk's rule: each part has ceil(n / parts) until nothing is left."""
    size = -(-len(indices) // parts)
    return indices[part * size : (part + 1) * size]


def held(extent: int, dim: int, mesh: Mesh, placements: Sequence[Placement], coordinate: Sequence[int]) -> list[int]:
    """Indices of one dim in local order, axes applied from left to right."""
    indices = list(range(extent))
    for at, size, p in zip(coordinate, mesh.shape, placements, strict=True):
        if getattr(p, "dim", None) != dim:
            continue
        if isinstance(p, Shard):
            indices = chunk(indices, size, at)
        elif isinstance(p, StridedShard):
            pieces = [chunk(indices, p.split_factor, i) for i in range(p.split_factor)]
            indices = [index for piece in pieces for index in chunk(piece, size, at)]
        elif isinstance(p, Declared):
            indices = indices[p.offsets[at] : p.offsets[at + 1]]
    return indices


def elements_of(layout: TensorLayout) -> dict[int, dict[tuple[int, ...], tuple[int, ...]]]:
    """By the oracle: for each rank, local index -> global index."""
    found = {}
    for coordinate in itertools.product(*(range(n) for n in layout.mesh.shape)):
        rank = int(layout.mesh.grid[coordinate])
        per_dim = [held(n, d, layout.mesh, layout.placements, coordinate) for d, n in enumerate(layout.shape)]
        local = itertools.product(*(range(len(indices)) for indices in per_dim))
        found[rank] = dict(zip(local, itertools.product(*per_dim), strict=True))
    return found


def rows_of(layout: TensorLayout) -> dict[int, dict[tuple[int, ...], tuple[int, ...]]]:
    """By the layout's boxes: for each rank, local index -> global index. Fails for boxes that overlap
    locally."""
    found = {}
    for rank in layout.mesh.ranks:
        mapping: dict[tuple[int, ...], tuple[int, ...]] = {}
        for box, at in layout.boxes(rank):
            for step in itertools.product(*(range(n) for n in box.shape)):
                local = tuple(a + s for a, s in zip(at, step, strict=True))
                assert local not in mapping
                mapping[local] = tuple(a + s for a, s in zip(box.lo, step, strict=True))
        shape = layout.local_shape(rank)
        assert shape is not None
        assert len(mapping) == math.prod(shape)
        assert all(i < n for local in mapping for i, n in zip(local, shape, strict=True))
        found[rank] = mapping
    return found
