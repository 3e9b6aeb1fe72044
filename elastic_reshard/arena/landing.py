"""Landing arenas: where the cells that a destination member needs from other domains arrive, and how they are read.

A slot has a header (generation word, the publication's id), a ledger of one byte a cell of the member's own regions, and
the member's local destination tensors. The member makes the arena; only its mover writes to it: it resets a slot for
another publication (the word is odd meanwhile), copies cells in and sets their bytes in the ledger afterwards. A later
mover finds the id and goes on where the last one ended. Readers compare id and generation before and after.

An arena on a device has its tensors there, and everything else on the host.
"""

from __future__ import annotations

import json
import mmap
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray

from elastic_reshard.arena.host import ALIGNMENT, HostArena, MappedArena
from elastic_reshard.arena.ledgers import KIND, NAME_BYTES, VERSION, fence, layout_of, read_name
from elastic_reshard.arena.slots import PAGE, SlotReader, Specs, device_nbytes_for, placed, rows_of, up
from elastic_reshard.arena.tables import said_of
from elastic_reshard.errors import ArenaError

if TYPE_CHECKING:
    from elastic_reshard.arena.device import Device, DeviceMemory
    from elastic_reshard.arena.strided import Strided

__all__ = [
    "LandingArena",
    "LandingReader",
    "LandingSlot",
    "MappedWritable",
    "landing_device_nbytes",
    "landing_nbytes",
]

_SLOTS: Final = 2
_NAME_AT: Final = 64


def _ends(specs: Specs, cells: int) -> tuple[dict[str, int], int]:
    """(offset of each tensor in its slot, bytes of a slot)."""
    if cells < 0:
        raise ArenaError(f"{cells} cells cannot be counted in a ledger")
    places, end = placed(specs, up(PAGE + cells, ALIGNMENT))
    return places, up(end, PAGE)


def landing_nbytes(specs: Specs, cells: int, *, device: bool = False) -> int:
    """Host memory in bytes of a LandingArena, known before it is made. device: whether it is on one."""
    return _SLOTS * _ends({} if device else specs, cells)[1]


def landing_device_nbytes(specs: Specs) -> int:
    """Device memory in bytes of a LandingArena on a device, which rounds it up to its granularity (2 MiB on GPUs)."""
    return device_nbytes_for(specs, _SLOTS)


class LandingArena:
    """A destination member's landing arena of two slots, made by the member. specs: its local destination tensors.

    cells: of its own regions (`CellGrid.cells_of_rank`), of at most `cell` bytes. touch: write a byte of every page now: 0.3 s
    a GiB, and the memory is really taken; device memory always is. device: None for host memory. Raises ArenaError if there
    is no such memory (with figures), LayoutError for a dtype without whole bytes per element.
    """

    def __init__(
        self,
        specs: Specs,
        cells: int,
        cell: int,
        *,
        touch: bool = True,
        label: str = "landing",
        device: Device | None = None,
    ) -> None:
        if cell <= 0:
            raise ArenaError(f"cells of {cell} bytes cannot be; give the job's cell size")
        self.specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(shape), dtype) for name, (shape, dtype) in specs.items()
        }
        self.cells: Final = cells
        self.cell: Final = cell
        self.device: Final = device
        self._size = _ends({} if device is not None else self.specs, cells)[1]
        self._places = _ends(self.specs, cells)[0] if device is None else placed(self.specs, 0)[0]
        self._memory = None if device is None else device.create(landing_device_nbytes(self.specs), label)
        self._arena = HostArena(_SLOTS * self._size, label)
        if touch:
            self._arena.bytes[::PAGE] = 0

    @property
    def arena_id(self) -> str:
        """32 hex digits, unlike any other arena's."""
        return self._arena.arena_id

    @property
    def fd(self) -> int:
        """The host memory's read-write descriptor; stays the arena's: send it, do not close it."""
        return self._arena.fd

    @property
    def fds(self) -> tuple[int, ...]:
        """All descriptors: `fd`, and that of the device memory, if it is on a device. They stay the arena's."""
        return (self.fd,) if self._memory is None else (self.fd, self._memory.fd)

    @property
    def nbytes(self) -> int:
        """Host memory in bytes, both slots."""
        return self._arena.nbytes

    @property
    def device_nbytes(self) -> int:
        """Device memory in bytes, both slots; 0 if it is on none."""
        return 0 if self._memory is None else self._memory.nbytes

    def readonly_fd(self) -> int:
        """A new O_RDONLY descriptor of the host memory. The caller closes it."""
        return self._arena.readonly_fd()

    def table(self) -> bytes:
        """Where everything lies: JSON, to be told with the descriptors."""
        slots = []
        each = self._size if self.device is None else landing_device_nbytes(self.specs) // _SLOTS
        for slot in range(_SLOTS):
            start = slot * self._size
            tensors = rows_of(self.specs, self._places, slot * each)
            slots.append({"word": start, "publication": start + _NAME_AT, "ledger": start + PAGE, "tensors": tensors})
        said = {"version": VERSION, "kind": KIND, "cells": self.cells, "cell": self.cell, "slots": slots}
        return json.dumps(said | said_of(self._memory), separators=(",", ":")).encode()

    def close(self) -> None:
        """Give the arena up; memory and descriptors go with the last map of it. May be called again."""
        self._arena.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class LandingReader(SlotReader):
    """Another member's landing slots, mapped read-only: `SlotReader`, and what has landed.

    Takes the maps over. Raises ArenaError for a table that is none of a landing arena, or reaches outside the arena.
    """

    def __init__(
        self, arena: MappedArena, table: bytes, arena_id: str = "", memory: DeviceMemory | None = None
    ) -> None:
        self.cells, self.cell, places = layout_of(table, arena.nbytes)
        super().__init__(arena, table, arena_id, memory)
        self._names = [arena.view(name, (NAME_BYTES,), (1,), 1) for _, name, _ in places]
        self._ledgers = [arena.view(ledger, (self.cells,), (1,), 1) for _, _, ledger in places]

    def publication(self, slot: int) -> str:
        """Of which publication the slot's cells are; "" for none, or while it is reset. Compare it, and `generation`, before
        and after reading."""
        before = self.generation(slot)
        name = read_name(self._names[slot])
        return name if before and before % 2 == 0 and self.generation(slot) == before else ""

    def held(self, slot: int) -> NDArray[np.bool_]:
        """Which cells of the member's own regions are there: a copy."""
        self._of(slot)
        fence()
        found: NDArray[np.bool_] = self._ledgers[slot] != 0
        fence()
        return found

    def close(self) -> None:
        self._names, self._ledgers = [], []
        super().close()


class MappedWritable(MappedArena):
    """A landing arena mapped read-write, by its owner's mover alone. As MappedArena; `view` gives writable arrays."""

    _prot: ClassVar[int] = mmap.PROT_READ | mmap.PROT_WRITE


class LandingSlot:
    """One slot of a landing arena, to be written by the one mover of its owner.

    memory: of an arena on a device, mapped writable. Raises ArenaError for a table that is none, reaches outside the arena, or
    has no such slot.
    """

    def __init__(
        self, arena: MappedWritable, table: bytes, slot: int, arena_id: str = "", memory: DeviceMemory | None = None
    ) -> None:
        self._reader = LandingReader(arena, table, arena_id, memory)
        if not 0 <= slot < self._reader.slots:
            raise ArenaError(f"slot {slot} of landing arena {arena_id}, which has {self._reader.slots}")
        _, _, places = layout_of(table, arena.nbytes)
        word, name, ledger = places[slot]
        self.slot: Final = slot
        self.arena_id: Final = arena_id
        self.cells: Final = self._reader.cells
        self.cell: Final = self._reader.cell
        self._word: NDArray[Any] = arena.view(word, (1,), (8,), 8)
        self._name: NDArray[Any] = arena.view(name, (NAME_BYTES,), (1,), 1)
        self._ledger: NDArray[Any] = arena.view(ledger, (self.cells,), (1,), 1)

    @property
    def publication(self) -> str:
        """Of which publication its cells are, "" for none."""
        return self._reader.publication(self.slot)

    @property
    def generation(self) -> int:
        """Rises by two with every reset."""
        return self._reader.generation(self.slot)

    @property
    def held(self) -> NDArray[np.bool_]:
        """Which cells are there: a copy, in the order of the member's own cells."""
        return self._reader.held(self.slot)

    def begin(self, publication: str) -> bool:
        """Make the slot one of that publication. True if it is already, then bytes and ledger stay; else it is reset."""
        raw = publication.encode()
        if not 0 < len(raw) < NAME_BYTES or b"\0" in raw:
            raise ArenaError(
                f"a publication's id of {len(raw)} bytes does not fit a slot's header: {publication[:40]!r}"
            )
        if self.publication == publication:
            return True
        word = int(self._word[0])
        # After a reset that broke off the word is odd already; it moves on, so that no reader takes two for one.
        odd = word + 1 if word % 2 == 0 else word + 2
        self._word[0] = odd
        fence()
        self._ledger[:] = 0
        self._name[:] = 0
        self._name[: len(raw)] = np.frombuffer(raw, dtype=np.uint8)
        fence()
        self._word[0] = odd + 1
        return False

    def tensor(self, name: str) -> torch.Tensor:
        """The slot's tensor, in place, to be written to. ArenaError if the table has none of that name."""
        return self._reader.tensor(self.slot, name)

    def array(self, name: str) -> NDArray[Any] | Strided:
        """The slot's tensor, in place, as its elements' integers, or by its address on a device."""
        return self._reader.array(self.slot, name)

    @property
    def device(self) -> Device | None:
        """The device that its tensors are mapped by; None: they are in host memory."""
        return self._reader.device

    def mark(self, cells: NDArray[np.int64]) -> None:
        """Say that these of the member's own cells are there; call it after their bytes were written (on a device: after the
        stream was waited for) and checked."""
        fence()
        self._ledger[cells] = 1

    def clear(self, cells: NDArray[np.int64]) -> None:
        """Say that these cells are not there; call it before their bytes are written again."""
        self._ledger[cells] = 0
        fence()

    def close(self) -> None:
        """Let go of the maps. May be called again."""
        empty = np.zeros(0, dtype=np.uint8)
        self._word = self._name = self._ledger = empty
        self._reader.close()
