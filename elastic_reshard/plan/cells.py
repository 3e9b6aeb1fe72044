"""Cells: the fixed grid over a destination layout's distinct regions. The unit of travel, ledger, digest and resume.

A function of the layout and the cell size only: not of sources, plans or epochs. Each cell is one box: single indices
in the outer dims, a block of the first dim whose rows are small enough, everything inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from elastic_reshard.errors import PlanError
from elastic_reshard.layout.box import Box
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.layout.model import ModelLayout
from elastic_reshard.layout.table import Int, RegionTable
from elastic_reshard.plan.overlap import ragged

__all__ = ["CellGrid", "TensorCells"]


@dataclass(frozen=True, eq=False)
class TensorCells:
    """Cells of one tensor's regions: those of region k are numbers base[k]:base[k + 1]."""

    table: RegionTable
    outer: Int  # [regions]: the dim that is cut into blocks
    block: Int  # [regions]: indices of it per cell
    base: Int  # [regions + 1]

    @classmethod
    def of(cls, table: RegionTable, item: int, cell: int) -> TensorCells:
        """The grid for elements of `item` bytes and cells of at most `cell` bytes."""
        shape = table.hi - table.lo
        regions, dims = shape.shape
        inner = np.ones((regions, dims + 1), dtype=np.int64)
        inner[:, :-1] = np.cumprod(shape[:, ::-1], axis=1)[:, ::-1]
        if not dims:
            one = np.ones(regions, dtype=np.int64)
            return cls(table, 0 * one, one, np.arange(regions + 1, dtype=np.int64))
        fits = inner[:, 1:] * item <= cell
        outer = np.argmax(fits, axis=1)  # the last always fits: one element is never larger than a cell
        row = np.arange(regions)
        block = np.maximum(1, cell // (inner[row, outer + 1] * item))
        extent = shape[row, outer]
        before = inner[:, 0] // inner[row, outer]
        count = before * -(-extent // block)
        return cls(table, outer, block, np.concatenate([[0], np.cumsum(count)]).astype(np.int64))

    @property
    def count(self) -> int:
        """Cells of the tensor."""
        return int(self.base[-1])

    def boxes(self, regions: Int) -> tuple[Int, Int, Int]:
        """All cells of the regions in order: (index into `regions`, lo, hi)."""
        which, number = ragged(self.base[regions + 1] - self.base[regions])
        region = regions[which]
        lo, hi = self.table.lo[region].copy(), self.table.hi[region].copy()
        dims = lo.shape[1]
        if dims:
            shape = hi - lo
            outer, block = self.outer[region], self.block[region]
            blocks = -(-shape[np.arange(len(region)), outer] // block)
            for d in range(dims - 1, -1, -1):
                cut = outer == d
                at = number % np.where(cut, blocks, 1)
                lo[cut, d] += (at * block)[cut]
                hi[cut, d] = np.minimum(hi[cut, d], lo[cut, d] + block[cut])
                number = np.where(cut, number // np.maximum(1, blocks), number)
                single = outer > d
                at = number % np.where(single, shape[:, d], 1)
                lo[single, d] += at[single]
                hi[single, d] = lo[single, d] + 1
                number = np.where(single, number // shape[:, d], number)
        return which, lo, hi


@dataclass(frozen=True, eq=False)
class CellGrid:
    """Cells of a whole model. Cell numbers run through tensors, regions and cells, from 0 to `count`."""

    index: Mapping[str, int]
    tensors: tuple[TensorCells, ...]
    base: Int  # [tensors + 1]

    @classmethod
    def of(cls, layout: ModelLayout, cell: int) -> CellGrid:
        """The grid of a destination layout with cells of at most `cell` bytes."""
        known: dict[tuple[str, int], TensorCells] = {}
        tensors = []
        for t in layout.values():
            key = (t.content_id, itemsize(t.dtype))
            if key not in known:
                known[key] = TensorCells.of(t.table, itemsize(t.dtype), cell)
            tensors.append(known[key])
        base = np.concatenate([[0], np.cumsum([t.count for t in tensors])]).astype(np.int64)
        return cls({name: i for i, name in enumerate(layout)}, tuple(tensors), base)

    @property
    def count(self) -> int:
        """Number of cells."""
        return int(self.base[-1])

    def cells_of(self, name: str, region: Box) -> Int:
        """Numbers of the cells of one region. PlanError if the layout has no such region."""
        i = self.index[name]
        cells = self.tensors[i]
        lo, hi = np.asarray(region.lo, dtype=np.int64), np.asarray(region.hi, dtype=np.int64)
        found = np.flatnonzero((cells.table.lo == lo).all(axis=1) & (cells.table.hi == hi).all(axis=1))
        if not len(found):
            raise PlanError(f"{name} has no region {region}")
        k = int(found[0])
        numbers: Int = np.arange(cells.base[k], cells.base[k + 1], dtype=np.int64) + self.base[i]
        return numbers

    def cells_of_rank(self, rank: int) -> Int:
        """Numbers of all cells of the regions that one rank of the layout wants: what it may ever hold."""
        parts = []
        for i, cells in enumerate(self.tensors):
            regions = np.unique(cells.table.entry_region[cells.table.entries_of(rank)])
            _, number = ragged(cells.base[regions + 1] - cells.base[regions], cells.base[regions])
            parts.append(number + self.base[i])
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
