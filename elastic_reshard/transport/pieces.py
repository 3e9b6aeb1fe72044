"""Pieces of memory, in host memory or on a device, handled alike: views of them, never copies."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from elastic_reshard.arena import tensor_over
from elastic_reshard.arena.device import device_at
from elastic_reshard.arena.strided import Strided
from elastic_reshard.errors import ArenaError

__all__ = ["Memory", "as_bytes", "contiguous", "on_device", "run_of", "tensor_of", "typed"]

Memory: TypeAlias = npt.NDArray[Any] | Strided
_RAW = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


def on_device(piece: Memory) -> bool:
    """Whether a device's own memory holds it."""
    return isinstance(piece, Strided) and piece.device is not None


def contiguous(piece: Memory) -> bool:
    """Whether its elements lie together, in C order."""
    return piece.contiguous if isinstance(piece, Strided) else piece.flags.c_contiguous


def run_of(piece: Memory, first: int, last: int) -> Memory:
    """Elements `first` to `last` of a contiguous piece, in one dim."""
    return piece.reshape((piece.size,))[(slice(first, last),)]


def typed(memory: Memory, at: int, nbytes: int, item: int) -> Memory:
    """Bytes of a flat memory as elements of `item` bytes."""
    part = memory[(slice(at, at + nbytes),)]
    if isinstance(part, Strided):
        return part.view(item)
    found: npt.NDArray[Any] = part.view(_RAW[item])
    return found


def as_bytes(piece: Memory) -> torch.Tensor | Strided:
    """The bytes of a contiguous piece, in one dim: what a network moves."""
    return piece.as_bytes() if isinstance(piece, Strided) else torch.from_numpy(piece.view(np.uint8))


def tensor_of(piece: Memory, dtype: torch.dtype) -> torch.Tensor:
    """The same memory as a tensor. ArenaError for a piece of host memory that is known by its address only."""
    if not isinstance(piece, Strided):
        return tensor_over(piece, dtype)
    if piece.device is None:
        raise ArenaError(
            f"host memory at {piece.address:#x} can't be taken as a tensor of {dtype}: pass it as an array"
        )
    return device_at(piece.device).tensor(piece, dtype)
