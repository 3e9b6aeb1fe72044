"""Blocks of words that exist twice, on a device and in host memory that it can reach: what the host tells a stream, and hears
of it, without waiting in a call of the device."""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

from elastic_reshard.arena.boxes import CopyTable
from elastic_reshard.arena.device import Device, Stream
from elastic_reshard.arena.strided import Strided

__all__ = ["WORD", "WordBlock"]

WORD: Final = 8


class WordBlock:
    """`count` words of 64 bits on both sides. host: this side's. Some 0.1 ms to make; in pages of its own, for memory is
    registered by pages."""

    def __init__(self, device: Device, count: int) -> None:
        nbytes = -(-max(1, count) * WORD // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
        self.host: npt.NDArray[np.uint64] = pages.view(np.uint64)
        self._registered = device.host(pages)
        self._memory = device.scratch(nbytes)
        self._device = device

    def on_device(self, first: int, count: int) -> Strided:
        """Words on the device."""
        return self._memory.strided(first * WORD, (count,), (WORD,), WORD)

    def up(self, first: int, count: int) -> CopyTable:
        """A copy of words from the host to the device, to be launched by `Device.copy`."""
        return CopyTable.of([(self.on_device(first, count), self._on_host(first, count))])

    def down(self, first: int, count: int) -> CopyTable:
        """A copy of words from the device to the host, which may read them once a later point of the stream is done."""
        return CopyTable.of([(self._on_host(first, count), self.on_device(first, count))])

    def copy(self, table: CopyTable, stream: Stream) -> None:
        """Launch one."""
        self._device.copy(table, stream)

    def close(self) -> None:
        """Give both sides up; only when no launched work reaches them. May be called again."""
        self._registered.close()
        self._memory.close()

    def _on_host(self, first: int, count: int) -> Strided:
        return Strided(
            self._registered.address + first * WORD, (count,), (WORD,), WORD, None, (self._registered, self.host)
        )
