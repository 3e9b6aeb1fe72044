"""Ledgers of landing arenas as others read them: which publication a slot holds, and which cells have arrived. No torch.

A ledger is one byte a cell, 0 or 1, set after the cell's bytes. Who reads takes offsets from the arena's table and checks
them against its size, so that nothing a table declares makes a later read fault.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import threading
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from elastic_reshard.errors import ArenaError

__all__ = ["KIND", "NAME_BYTES", "WORD_BYTES", "LedgerReader", "fence", "layout_of", "read_name"]

KIND: Final = "landing"
VERSION: Final = 1
WORD_BYTES: Final = 8  # a slot's generation: u64
NAME_BYTES: Final = 128  # the publication's id, UTF-8, padded with NUL
_UNREADABLE: Final = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, IndexError)


def fence() -> None:
    """Everything before it is seen before anything after it.

    x86 keeps stores in order among stores and loads among loads, and memcpy fences its own streaming stores; elsewhere what
    is above can't sink below the first release, what is below can't rise above the second acquire, and those two keep order.
    """
    lock = threading.Lock()  # a fresh one: another thread, or a fork at a bad moment, can't hold it
    with lock:
        pass
    with lock:
        pass


def read_name(field: NDArray[np.uint8]) -> str:
    """The publication's id in a slot's header; "" for none, or for bytes that are no text."""
    raw = field.tobytes().partition(b"\0")[0]
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""


def layout_of(table: bytes, nbytes: int) -> tuple[int, int, list[tuple[int, int, int]]]:
    """(cells, bytes of a cell at most, (word, publication, ledger) offsets per slot) of a landing arena of `nbytes` bytes.

    ArenaError if the table is none of a landing arena, or reaches outside."""
    try:
        said = json.loads(table)
        if said["version"] != VERSION or said["kind"] != KIND:
            raise ValueError(f"version {said['version']!r}, kind {said['kind']!r}")
        cells, cell = said["cells"], said["cell"]
        if type(cells) is not int or type(cell) is not int or cells < 0 or cell <= 0:
            raise ValueError(f"{cells!r} cells of {cell!r} bytes")
        slots = []
        for slot in said["slots"]:
            where = slot["word"], slot["publication"], slot["ledger"]
            for at, length in zip(where, (WORD_BYTES, NAME_BYTES, cells), strict=True):
                if type(at) is not int or not 0 <= at <= nbytes - length:
                    raise ValueError(f"{length} bytes at {at!r} of an arena of {nbytes}")
            if where[0] % WORD_BYTES:
                raise ValueError(f"generation word at {where[0]}")
            slots.append(where)
    except _UNREADABLE as error:
        raise ArenaError(f"not the table of a landing arena: {error!r}; its owner must be of this version "
                         "(nothing was read from it)") from error  # fmt: skip
    return cells, cell, slots


class LedgerReader:
    """A landing arena's ledgers, mapped read-only, for whoever only counts what is there. Any process, no torch.

    Takes the descriptor over and closes it, also when it raises. ArenaError for a descriptor that is no sealed memfd, or a
    table that does not fit it. The owner's and the writer's death change nothing.
    """

    def __init__(self, fd: int, table: bytes) -> None:
        try:
            nbytes = os.fstat(fd).st_size
            # Without the seal a peer could end this process by SIGBUS.
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or not nbytes:
                raise ArenaError(
                    f"descriptor {fd} is no sealed arena of {nbytes} bytes; offer the arena's own descriptor"
                )
            self.cells, self.cell, self._slots = layout_of(table, nbytes)
            mapped = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise ArenaError(f"descriptor {fd} cannot be mapped as a landing arena: {error}") from error
        finally:
            os.close(fd)
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(mapped, dtype=np.uint8)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self._slots)

    def state(self, slot: int) -> tuple[str, bytes]:
        """(publication, bitmap of its cells in `numpy.packbits` order), read together; ("", nothing set) for a slot that was
        never begun or is being reset now. ArenaError for a slot that is not there, or a closed reader."""
        memory, (word, name, ledger) = self._of(slot)
        before = self._word(memory, word)
        publication = read_name(memory[name : name + NAME_BYTES])
        bits = memory[ledger : ledger + self.cells] != 0
        if before % 2 or not before or self._word(memory, word) != before:
            publication, bits = "", np.zeros(self.cells, dtype=bool)
        return publication, np.packbits(bits).tobytes()

    def publication(self, slot: int) -> str:
        """Of which publication the slot's cells are, "" for none. Two calls may see two: `state` reads both at once."""
        return self.state(slot)[0]

    def bits(self, slot: int) -> bytes:
        """Bitmap of the cells that are there, in `numpy.packbits` order."""
        return self.state(slot)[1]

    def count(self, slot: int) -> int:
        """How many cells are there."""
        return int(np.unpackbits(np.frombuffer(self.bits(slot), dtype=np.uint8)).sum())

    def _of(self, slot: int) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
        if self._bytes is None or not 0 <= slot < len(self._slots):
            raise ArenaError(f"slot {slot} of a landing arena of {len(self._slots)} slots (none once closed)")
        return self._bytes, self._slots[slot]

    @staticmethod
    def _word(memory: NDArray[Any], at: int) -> int:
        fence()
        word = int(memory[at : at + WORD_BYTES].view(np.uint64)[0])
        fence()
        return word

    def close(self) -> None:
        """Give the map up. May be called again."""
        self._bytes = None
