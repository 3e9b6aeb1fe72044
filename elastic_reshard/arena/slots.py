"""Slots: the equal parts of a source member's arena that hold one publication each, and how others read them.

A slot begins with its generation word, a u64 on a page of its own: 0 before the first write, odd while it is being written,
even after. A reader compares the word before and after its copies. Where everything lies is said once, in the arena's table
(JSON), which travels with its descriptor; readers take offsets from there and check them against the arena's size.

An arena on a device has two memories: a small one on the host for the words, and the device's for the tensors.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from elastic_reshard.arena.copies import strided_tensor
from elastic_reshard.arena.elements import tensor_over
from elastic_reshard.arena.host import ALIGNMENT, HostArena, MappedArena
from elastic_reshard.arena.ledgers import WORD_BYTES, fence
from elastic_reshard.arena.strided import Strided, contiguous_strides
from elastic_reshard.arena.tables import memory_of, said_of
from elastic_reshard.errors import ArenaError, LayoutError
from elastic_reshard.layout.dtypes import itemsize

if TYPE_CHECKING:
    from elastic_reshard.arena.device import Device, DeviceMemory

__all__ = [
    "PAGE",
    "SlotArena",
    "SlotReader",
    "Specs",
    "device_nbytes_for",
    "nbytes_for",
    "on_device",
    "placed",
    "rows_of",
    "up",
]

# Shape and dtype of each tensor of a slot, in order.
Specs = Mapping[str, tuple[Sequence[int], torch.dtype]]

_VERSION: Final = 1
PAGE: Final = mmap.PAGESIZE
_DIMS: Final = 32  # numpy's own limit is 64


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    if any(n < 0 for n in shape):
        raise ArenaError(f"{tuple(shape)} is no shape: sizes must not be negative")
    return math.prod(shape) * itemsize(_name(dtype))


def up(nbytes: int, to: int) -> int:
    """The next multiple."""
    return -(-nbytes // to) * to


def placed(specs: Specs, begin: int) -> tuple[dict[str, int], int]:
    """(offset of each tensor in a slot whose tensors begin at `begin`, where the last one ends)."""
    found, at = {}, begin
    for name, (shape, dtype) in specs.items():
        found[name] = at
        at += up(_nbytes(shape, dtype), ALIGNMENT)
    return found, at


def rows_of(specs: Specs, places: Mapping[str, int], start: int) -> dict[str, list[Any]]:
    """The tensors of the slot at `start`, as tables tell them."""
    return {
        name: [start + places[name], list(shape), list(contiguous_strides(shape, dtype.itemsize)), _name(dtype)]
        for name, (shape, dtype) in specs.items()
    }


def on_device(
    device: Device, memory: DeviceMemory, specs: Specs, rows: Mapping[str, list[Any]]
) -> dict[str, torch.Tensor]:
    """The tensors of a slot as its rows of the table say, in a device's memory."""
    return {
        name: device.tensor(memory.strided(at, shape, strides, specs[name][1].itemsize), specs[name][1])
        for name, (at, shape, strides, _) in rows.items()
    }


def _slot_nbytes(specs: Specs, begin: int) -> int:
    return up(placed(specs, begin)[1], PAGE)


def nbytes_for(specs: Specs, slots: int = 2, *, device: bool = False) -> int:
    """Host memory in bytes of a SlotArena of these tensors, known before it is made. device: whether it is on one."""
    return slots * (PAGE if device else _slot_nbytes(specs, PAGE))


def device_nbytes_for(specs: Specs, slots: int = 2) -> int:
    """Device memory in bytes of a SlotArena on a device, which rounds it up to its granularity (2 MiB on GPUs)."""
    return max(1, slots * _slot_nbytes(specs, 0))


class SlotArena:
    """An arena of `slots` equal slots, written by its maker alone, one slot at a time. device: None for host memory.

    touch: write a byte of every page now, so that the first publish isn't slowed by page faults: 0.3 s a GiB, several
    seconds where the machine has to find the pages first; the memory is then really taken. Device memory always is.

    Raises ArenaError if there is no such memory (with figures), LayoutError for a dtype without whole bytes per element.
    """

    def __init__(
        self, specs: Specs, slots: int = 2, *, touch: bool = True, label: str = "slots", device: Device | None = None
    ) -> None:
        if slots < 1:
            raise ArenaError(f"an arena of {slots} slots cannot be made; two are usual")
        self.specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(shape), dtype) for name, (shape, dtype) in specs.items()
        }
        self.slots: Final = slots
        self.device: Final = device
        self._memory = None if device is None else device.create(device_nbytes_for(self.specs, slots), label)
        self._size = _slot_nbytes(self.specs, PAGE) if device is None else PAGE
        self._arena = HostArena(slots * self._size, label)
        memory = self._arena.bytes
        if touch:
            memory[::PAGE] = 0
        self._words = [memory[at : at + WORD_BYTES].view(np.uint64) for at in range(0, slots * self._size, self._size)]
        self._offsets = placed(self.specs, PAGE if device is None else 0)[0]
        self._tensors = [self._cut(memory, slot) for slot in range(slots)]

    def _cut(self, memory: NDArray[np.uint8], slot: int) -> dict[str, torch.Tensor]:
        if self.device is not None and self._memory is not None:
            return on_device(self.device, self._memory, self.specs, self._rows(slot))
        found = {}
        for name, (shape, dtype) in self.specs.items():
            at = slot * self._size + self._offsets[name]
            flat = torch.from_numpy(memory[at : at + _nbytes(shape, dtype)])
            found[name] = flat.view(dtype).view(shape) if flat.numel() else torch.empty(shape, dtype=dtype)
        return found

    def _rows(self, slot: int) -> dict[str, list[Any]]:
        size = self._size if self.device is None else _slot_nbytes(self.specs, 0)
        return rows_of(self.specs, self._offsets, slot * size)

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
        """Host memory in bytes, all slots."""
        return self._arena.nbytes

    @property
    def device_nbytes(self) -> int:
        """Device memory in bytes, all slots; 0 if it is on none."""
        return 0 if self._memory is None else self._memory.nbytes

    def readonly_fd(self) -> int:
        """A new O_RDONLY descriptor of the host memory, for a reader. The caller closes it."""
        return self._arena.readonly_fd()

    def tensor(self, slot: int, name: str) -> torch.Tensor:
        """A slot's tensor, to be written between `begin_write` and `end_write` only."""
        return self._of(slot)[name]

    def tensors(self, slot: int) -> Mapping[str, torch.Tensor]:
        """All tensors of a slot, by name."""
        return self._of(slot)

    def _of(self, slot: int) -> dict[str, torch.Tensor]:
        if not 0 <= slot < len(self._tensors):
            raise ArenaError(f"slot {slot} of an arena of {len(self._tensors)} slots (none once it is closed)")
        return self._tensors[slot]

    def generation(self, slot: int) -> int:
        """The slot's generation: 0 never written, odd while it is being written."""
        self._of(slot)
        return int(self._words[slot][0])

    def begin_write(self, slot: int) -> None:
        """Say that the slot's bytes are not to be used from now on. Call before the first byte is written."""
        word = self.generation(slot)
        # After a write that broke off the word is odd already; it moves on, so that its own end can't be taken for ours.
        self._words[slot][0] = word + 1 if word % 2 == 0 else word + 2
        fence()

    def end_write(self, slot: int) -> int:
        """Say that all bytes are there; returns the generation that readers must find before and after."""
        word = self.generation(slot)
        if word % 2 == 0:
            raise ArenaError(f"slot {slot} is not being written (generation {word}); call begin_write first")
        fence()
        self._words[slot][0] = word + 1
        return word + 1

    def table(self) -> bytes:
        """Where everything lies, for SlotReader: JSON, to be told with the descriptors."""
        slots = [{"word": slot * self._size, "tensors": self._rows(slot)} for slot in range(self.slots)]
        said = {"version": _VERSION, "slots": slots, **said_of(self._memory)}
        return json.dumps(said, separators=(",", ":")).encode()

    def close(self) -> None:
        """Give the arena up; memory and descriptors go with the last tensor over it. May be called again."""
        self._tensors, self._words = [], []
        self._arena.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class SlotReader:
    """Another member's slots, mapped read-only; `table` is what its owner declared. memory: of an arena on a device.

    Takes the maps over. Raises ArenaError for a table that is none, or reaches outside the arena: nothing that the owner
    declares can make a later read fault. The owner's death changes nothing.
    """

    def __init__(
        self, arena: MappedArena, table: bytes, arena_id: str = "", memory: DeviceMemory | None = None
    ) -> None:
        self.arena_id: Final = arena_id
        self.nbytes: Final = arena.nbytes
        self._arena = arena
        self._memory = memory
        self._words: list[NDArray[np.uint64]] = []
        self._arrays: list[dict[str, tuple[NDArray[Any] | Strided, str]]] = []
        self._fits(memory_of(table))
        try:
            said = json.loads(table)
            if said["version"] != _VERSION:
                raise ArenaError(f"the table of arena {arena_id} is of version {said['version']}, not {_VERSION}")
            for slot in said["slots"]:
                self._words.append(self._word(slot["word"]))
                self._arrays.append({str(name): self._declared(name, *row) for name, row in slot["tensors"].items()})
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, LayoutError, RecursionError) as error:
            raise ArenaError(f"the table of arena {arena_id} cannot be read: {error!r}; its owner must be of this version "
                             "(nothing was read from it)") from error  # fmt: skip

    def _fits(self, said: tuple[str, str, int] | None) -> None:
        """ArenaError if the mapped device memory is not what the table says there is."""
        has = self._memory
        if said is None and has is None:
            return
        if said is None or has is None or said[0] != has.device.kind or said[2] > has.nbytes:
            mapped = "none" if has is None else f"{has.nbytes} bytes by {has.device.kind} device {has.device.id}"
            raise ArenaError(
                f"the table of arena {self.arena_id} tells of device memory {said}, mapped was {mapped}; map what the arena's "
                "second descriptor gives, with the kind and size of the table"
            )

    @property
    def device(self) -> Device | None:
        """The device that its tensors are mapped by; None: they are in host memory."""
        return None if self._memory is None else self._memory.device

    def _word(self, at: object) -> NDArray[np.uint64]:
        if type(at) is not int or at % WORD_BYTES:
            raise ValueError(f"generation word at {at!r}")
        return self._arena.view(at, (1,), (WORD_BYTES,), WORD_BYTES)

    def _declared(
        self, name: str, offset: Any, shape: Any, strides: Any, dtype: Any
    ) -> tuple[NDArray[Any] | Strided, str]:
        item = itemsize(dtype)
        numbers = [offset, *shape, *strides]
        if not all(type(n) is int and n >= 0 for n in numbers) or len(shape) > _DIMS:
            raise ValueError(f"{name}: offset {offset!r}, shape {shape!r}, strides {strides!r}")
        # torch has no views of elements off their alignment.
        if any(n % min(item, WORD_BYTES) for n in (offset, *strides)):
            raise ValueError(f"{name}: {offset}, {strides} are not multiples of its element size {item}")
        found: NDArray[Any] | Strided = (
            self._arena.view(offset, shape, strides, item)
            if self._memory is None
            else self._memory.strided(offset, shape, strides, item)
        )
        return found, dtype

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self._arrays)

    def _of(self, slot: int) -> dict[str, tuple[NDArray[Any] | Strided, str]]:
        if not 0 <= slot < len(self._arrays):
            raise ArenaError(f"slot {slot} of arena {self.arena_id}, which has {len(self._arrays)} (none once closed)")
        return self._arrays[slot]

    def _entry(self, slot: int, name: str) -> tuple[NDArray[Any] | Strided, str]:
        try:
            return self._of(slot)[name]
        except KeyError:
            raise ArenaError(f"arena {self.arena_id} declares no {name} in slot {slot}; its owner's layout says it "
                             "has it: publish again with tensors that fit the layout") from None  # fmt: skip

    def names(self, slot: int) -> Sequence[str]:
        """Tensors of a slot."""
        return tuple(self._of(slot))

    def generation(self, slot: int) -> int:
        """The word now: ordered after all reads before it and before all reads after it."""
        self._of(slot)
        fence()
        word = int(self._words[slot][0])
        fence()
        return word

    def array(self, slot: int, name: str) -> NDArray[Any] | Strided:
        """A tensor, no copy: read-only integers of its element size (16 bytes: complex128), or by its address on a device."""
        return self._entry(slot, name)[0]

    def dtype(self, slot: int, name: str) -> str:
        """Its dtype, by torch's name."""
        return self._entry(slot, name)[1]

    def tensor(self, slot: int, name: str) -> torch.Tensor:
        """A tensor, no copy. To be read only: a write to it ends the process. On a device: only of that device's own memory,
        not of what it reaches on another."""
        array, dtype = self._entry(slot, name)
        found: torch.dtype | None = getattr(torch, dtype, None)
        if found is None:
            raise ArenaError(
                f"torch {torch.__version__} has no dtype {dtype}, which {name} of arena {self.arena_id} has"
            )
        if isinstance(array, Strided):
            return strided_tensor(array, found)
        return tensor_over(array, found)

    def touch(self) -> None:
        """Read a byte of every page, so that the first pull isn't slowed by page faults: about 0.1 s a GiB."""
        np.add.reduce(self._arena.bytes[::PAGE])

    def close(self) -> None:
        """Give the maps up; they go with the last array over them. May be called again."""
        self._words, self._arrays = [], []
        self._arena.close()
        if self._memory is not None:
            self._memory.close()
