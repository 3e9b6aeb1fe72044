"""Source ranks with real arenas, destination ranks with live tensors, and what they must hold by brute force."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_reshard.arena.copies import raw
from elastic_reshard.arena.host import MappedArena
from elastic_reshard.arena.slots import SlotArena, SlotReader
from elastic_reshard.layout import Correspondence, ModelLayout, TensorLayout
from elastic_reshard.layout.dtensor import torch_dtype
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.member.filler import Filler
from elastic_reshard.member.puller import Origin
from tests.layout.oracle import held

Array = npt.NDArray[Any]

__all__ = ["Array", "SourceRank", "expected", "local_of", "ranks_of", "strided", "truth", "whole_of"]


def truth(name: str, layout: TensorLayout, version: int) -> Array:
    """Bits of a global tensor: a function of name, version and global index, unlike for all of a tensor where they can be."""
    seed = np.uint64(zlib.crc32(name.encode()) * 65537 + version * 40503)
    index = np.arange(layout.numel, dtype=np.uint64).reshape(layout.shape) + seed
    item = itemsize(layout.dtype)
    if item == 16:
        return index.astype(np.float64) + 1j * float(version)
    with np.errstate(over="ignore"):  # numpy warns for scalars only
        return (index * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - 8 * item)).astype(f"u{item}")


def ranks_of(model: ModelLayout) -> list[int]:
    return sorted({rank for layout in model.values() for rank in layout.mesh.ranks})


def local_of(layout: TensorLayout, whole: Array, rank: int) -> Array | None:
    """A rank's part by lists of indices, None outside of the mesh."""
    for at in itertools.product(*(range(n) for n in layout.mesh.shape)):
        if int(layout.mesh.grid[at]) == rank:
            rows = [held(n, d, layout.mesh, layout.placements, at) for d, n in enumerate(layout.shape)]
            return whole[np.ix_(*(np.array(r, dtype=np.int64) for r in rows))] if rows else whole
    return None


def strided(shape: tuple[int, ...], dtype: str, how: int) -> torch.Tensor:
    """A zeroed tensor of that shape: contiguous, transposed in memory, or every other element of a larger one."""
    if how % 3 == 1 and len(shape) > 1:
        return torch.zeros(shape[::-1], dtype=torch_dtype(dtype)).permute(*reversed(range(len(shape))))
    if how % 3 == 2 and shape:
        return torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=torch_dtype(dtype))[..., ::2]
    return torch.zeros(shape, dtype=torch_dtype(dtype))


class SourceRank:
    """One source rank: live tensors, a filler and an arena of two slots; its readers map it as another process would."""

    def __init__(self, model: ModelLayout, rank: int, wire: Any = None) -> None:
        self.model, self.rank = model, rank
        self.live: dict[str, torch.Tensor] = {}
        for number, (name, layout) in enumerate(model.items()):
            shape = layout.local_shape(rank)
            if shape is not None:
                self.live[name] = strided(shape, layout.dtype, number + rank)
        self.filler = Filler(self.live, model, wire, rank)
        self.arena = SlotArena(self.filler.describe().specs, touch=False)
        self.reader = SlotReader(MappedArena(self.arena.readonly_fd()), self.arena.table(), self.arena.arena_id)

    def set(self, version: int) -> None:
        for name, tensor in self.live.items():
            layout = self.model[name]
            part = local_of(layout, truth(name, layout, version), self.rank)
            assert part is not None
            raw(tensor)[...] = part.view(raw(tensor).dtype)

    def publish(self, version: int, slot: int = 0) -> Origin:
        self.set(version)
        self.filler.describe()
        return Origin(self.reader, slot, self.filler.fill(self.arena, slot).generation)


def whole_of(
    source: ModelLayout, destination: ModelLayout, ways: Iterable[Correspondence] | None, version: int
) -> dict[str, Array]:
    """Each destination tensor as a whole, put together from source tensors."""
    found = {name: np.zeros(t.shape, dtype=truth(name, t, 0).dtype) for name, t in destination.items()}
    for c in ways if ways is not None else [Correspondence(n, n) for n in destination]:
        part = truth(c.source, source[c.source], version)
        part = part[c.source_box.slices()] if c.source_box is not None else part
        part = part.transpose(c.permute) if c.permute is not None else part
        found[c.destination][c.destination_box.slices() if c.destination_box is not None else ...] = part
    return found


def expected(destination: ModelLayout, wholes: Mapping[str, Array], rank: int) -> dict[str, Array]:
    """What a destination rank must hold."""
    found = {name: local_of(layout, wholes[name], rank) for name, layout in destination.items()}
    return {name: part for name, part in found.items() if part is not None}
