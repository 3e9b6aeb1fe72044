"""Landing slots as a mover would leave them, filled cell by cell from an oracle; everything else in them is rubbish."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from elastic_reshard.arena.copies import raw
from elastic_reshard.arena.host import MappedArena
from elastic_reshard.arena.landing import LandingArena, LandingReader, LandingSlot, MappedWritable
from elastic_reshard.layout import Correspondence, ModelLayout
from elastic_reshard.layout.dtensor import torch_dtype
from elastic_reshard.member.landed import Landed
from elastic_reshard.plan import CellGrid
from tests.member.world import Array, local_of

__all__ = ["LandingRank", "cells_of", "there"]

CELL = 64  # bytes: many cells in small tensors


def cells_of(model: ModelLayout, cell: int = CELL) -> list[tuple[str, Array]]:
    """Of each cell of the layout's grid: its tensor, and the global indices of its elements."""
    grid, found = CellGrid.of(model, cell), []
    for name, layout in model.items():
        cells = grid.tensors[grid.index[name]]
        index = np.arange(layout.numel).reshape(layout.shape)
        _, low, high = cells.boxes(np.arange(len(layout.table.lo)))
        for lo, hi in zip(low.tolist(), high.tolist(), strict=True):
            found.append((name, index[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))].ravel()))
    assert len(found) == grid.count
    return found


def there(
    source: ModelLayout, destination: ModelLayout, ways: Iterable[Correspondence] | None, present: Iterable[int]
) -> dict[str, Array]:
    """Of each destination tensor, which elements the present source ranks have."""
    have = {name: np.zeros(t.shape, dtype=bool) for name, t in source.items()}
    for rank in present:
        for name, layout in source.items():
            index = local_of(layout, np.arange(layout.numel).reshape(layout.shape), rank)
            if index is not None:
                have[name].ravel()[index.ravel()] = True
    found = {name: np.zeros(t.shape, dtype=bool) for name, t in destination.items()}
    for c in ways if ways is not None else [Correspondence(n, n) for n in destination]:
        part = have[c.source][c.source_box.slices()] if c.source_box is not None else have[c.source]
        part = part.transpose(c.permute) if c.permute is not None else part
        found[c.destination][c.destination_box.slices() if c.destination_box is not None else ...] = part
    return found


class LandingRank:
    """A landing arena of one destination rank, a writer as its mover maps it, a reader as others do."""

    def __init__(self, model: ModelLayout, rank: int, member: str, cell: int = CELL) -> None:
        self.model, self.rank, self.member = model, rank, member
        self.own = CellGrid.of(model, cell).cells_of_rank(rank).tolist()
        self.cells = cells_of(model, cell)
        shapes = {name: (t.local_shape(rank), torch_dtype(t.dtype)) for name, t in model.items()}
        specs = {name: (shape, dtype) for name, (shape, dtype) in shapes.items() if shape is not None}
        self.arena = LandingArena(specs, len(self.own), cell, touch=False)
        table = self.arena.table()
        self.writers = [LandingSlot(MappedWritable(os.dup(self.arena.fd)), table, slot) for slot in range(2)]
        self.reader = LandingReader(MappedArena(self.arena.readonly_fd()), table, self.arena.arena_id)

    def land(self, publication: str, wholes: Mapping[str, Array], cells: Iterable[int], slot: int = 0) -> None:
        """Write these of its own cells (numbers of the grid), and mark them."""
        writer = self.writers[slot]
        if not writer.begin(publication):
            for name in self.arena.specs:
                writer.tensor(name).reshape(-1).view(torch.uint8).fill_(0xAB)
        for cell in cells:
            name, elements = self.cells[cell]
            layout = self.model[name]
            index = local_of(layout, np.arange(layout.numel).reshape(layout.shape), self.rank)
            assert index is not None
            mine = np.isin(index, elements)
            assert mine.any()
            target = raw(writer.tensor(name))
            target[mine] = wholes[name].ravel()[index[mine]].view(target.dtype)
            writer.mark(np.array([self.own.index(cell)]))

    def look(self, publication: str, slot: int = 0) -> Landed | None:
        return Landed.look(self.reader, slot, self.rank, self.member, publication)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
        self.reader.close()
        self.arena.close()
