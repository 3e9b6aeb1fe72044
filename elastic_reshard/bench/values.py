"""Data whose value follows from its place: any byte that ends up elsewhere shows.

An element's bits are a mix of its global index, its tensor's name and the version, so that neither a shifted block nor a
swapped tensor nor an older version goes unseen.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_reshard.layout import Box, ModelLayout

__all__ = ["fill", "poison", "wrong"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 18  # elements made at a time: what stays in cache


def _values(box: Box, shape: tuple[int, ...], seed: int, item: int) -> npt.NDArray[np.unsignedinteger]:
    """Bits of a box's elements, as unsigned integers of the item size (1, 2, 4 or 8): the upper bits of (index + seed)
    times an odd number. That is a sum of one term per dim, so an element costs one addition."""
    wide: type[np.unsignedinteger] = np.uint32 if item <= 2 else np.uint64
    bits = 32 if item <= 2 else 64
    odd, mask = (0x9E3779B1, 0xFFFFFFFF) if item <= 2 else (0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF)
    mixed = np.full((1,) * len(shape), (seed * odd) & mask, dtype=wide)
    stride = 1
    for d in range(len(shape) - 1, -1, -1):
        term = np.arange(box.lo[d], box.hi[d], dtype=np.uint64).astype(wide) * wide((stride * odd) & mask)
        mixed = mixed + term.reshape(tuple(-1 if k == d else 1 for k in range(len(shape))))
        stride *= shape[d]
    mixed >>= wide(bits - 8 * item)
    return mixed.astype(f"u{item}")


def _bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A CPU tensor's elements as integers, no copy; also of one on a pretended device."""
    found: npt.NDArray[Any] = tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy()
    return found


def _pieces(
    layout: ModelLayout, tensors: Mapping[str, torch.Tensor], rank: int, version: int
) -> Iterator[tuple[str, npt.NDArray[np.generic], npt.NDArray[np.generic]]]:
    """(name, the tensor's memory, the right bits) for each part of what a rank holds."""
    for name, tensor in tensors.items():
        t = layout[name]
        bits, item = _bits(tensor), tensor.element_size()
        seed = (zlib.crc32(name.encode()) << 20) + version
        for box, at in t.boxes(rank):
            for part, offset in _chunks(box):
                index = tuple(slice(a + o, a + o + n) for a, o, n in zip(at, offset, part.shape, strict=True))
                at_: Any = (..., *index)
                yield name, bits[at_], _values(part, t.shape, seed, min(item, 8)).view(f"i{min(item, 8)}")


def _chunks(box: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """The box in slabs along dim 0, with each one's offset in it."""
    if not box.lo:
        yield box, ()
        return
    inner = max(1, box.numel // max(1, box.shape[0]))
    step = max(1, _CHUNK // inner)
    for a in range(box.lo[0], box.hi[0], step):
        slab = Box((a, *box.lo[1:]), (min(a + step, box.hi[0]), *box.hi[1:]))
        yield slab, (a - box.lo[0], *(0,) * (len(box.lo) - 1))


def fill(layout: ModelLayout, tensors: Mapping[str, torch.Tensor], rank: int, version: int) -> None:
    """Write a version into what a rank holds. Item sizes 1 to 8."""
    for _, memory, values in _pieces(layout, tensors, rank, version):
        memory[...] = values.view(memory.dtype) if memory.dtype.itemsize == values.dtype.itemsize else values


def wrong(layout: ModelLayout, tensors: Mapping[str, torch.Tensor], rank: int, version: int) -> list[str]:
    """Names of tensors that are not bit for bit that version."""
    found = {
        name
        for name, memory, values in _pieces(layout, tensors, rank, version)
        if not np.array_equal(memory, values.view(memory.dtype))
    }
    return sorted(found)


def poison(tensors: Mapping[str, torch.Tensor]) -> None:
    """Make every byte of contiguous tensors one that no version has for long."""
    for tensor in tensors.values():
        _bits(tensor).reshape(-1).view(np.uint8)[...] = 0xA5
