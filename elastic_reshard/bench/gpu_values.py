"""The values of `bench.values`, made and compared by torch where the tensors lie: the same bits, at a GPU's speed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from elastic_reshard.layout import Box, ModelLayout

__all__ = ["fill", "poison", "wrong"]

_CHUNK = {"cuda": 1 << 26, "cpu": 1 << 18}  # elements made at a time
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = {32: 0x9E3779B1, 64: 0x9E3779B97F4A7C15}


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _values(box: Box, shape: tuple[int, ...], seed: int, item: int, device: torch.device) -> torch.Tensor:
    """Bits of a box's elements; integers of torch wrap as numpy's unsigned ones do."""
    bits = 32 if item <= 2 else 64
    wide, odd = (torch.int32 if bits == 32 else torch.int64), _ODD[bits]
    mixed = torch.full((1,) * len(shape), _signed(seed * odd, bits), dtype=wide, device=device)
    stride = 1
    for d in range(len(shape) - 1, -1, -1):
        term = torch.arange(box.lo[d], box.hi[d], dtype=torch.int64, device=device).to(wide)
        mixed = mixed + (term * _signed(stride * odd, bits)).reshape([-1 if k == d else 1 for k in range(len(shape))])
        stride *= shape[d]
    return (mixed >> (bits - 8 * item)).to(_INTS[item])


def _pieces(
    layout: ModelLayout, tensors: Mapping[str, torch.Tensor], rank: int, version: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, the tensor's memory, the right bits) for each part of what a rank holds. Item sizes 1 to 8."""
    for name, tensor in tensors.items():
        t, item = layout[name], tensor.element_size()
        bits = tensor.detach().view(_INTS[item])
        seed = (zlib.crc32(name.encode()) << 20) + version
        for box, at in t.boxes(rank):
            for part, offset in _slabs(box, _CHUNK[tensor.device.type]):
                index: Any = tuple(slice(a + o, a + o + n) for a, o, n in zip(at, offset, part.shape, strict=True))
                yield name, bits[index], _values(part, t.shape, seed, item, tensor.device)


def _slabs(box: Box, chunk: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """The box in slabs along dim 0, with each one's offset in it."""
    if not box.lo:
        yield box, ()
        return
    step = max(1, chunk // max(1, box.numel // max(1, box.shape[0])))
    for a in range(box.lo[0], box.hi[0], step):
        yield Box((a, *box.lo[1:]), (min(a + step, box.hi[0]), *box.hi[1:])), (a - box.lo[0], *(0,) * (len(box.lo) - 1))


def fill(layout: ModelLayout, tensors: Mapping[str, torch.Tensor], rank: int, version: int) -> None:
    """Write a version into what a rank holds. On a GPU it is done when this returns, so that no publish waits for it."""
    for _, memory, values in _pieces(layout, tensors, rank, version):
        memory.copy_(values)
    for device in {t.device for t in tensors.values() if t.is_cuda}:
        torch.cuda.synchronize(device)


def wrong(layout: ModelLayout, tensors: Mapping[str, torch.Tensor], rank: int, version: int) -> list[str]:
    """Names of tensors that are not bit for bit that version; blocks until the device has said so."""
    unlike: dict[str, torch.Tensor] = {}
    for name, memory, values in _pieces(layout, tensors, rank, version):
        found = (memory != values).any()
        unlike[name] = unlike[name] | found if name in unlike else found
    return sorted(name for name, found in unlike.items() if bool(found))


def poison(tensors: Mapping[str, torch.Tensor]) -> None:
    """Make every byte of contiguous tensors one that no version has for long."""
    for tensor in tensors.values():
        tensor.detach().reshape(-1).view(torch.uint8).fill_(0xA5)
