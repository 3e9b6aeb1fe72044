"""Slots: the equal parts of a source member's arena that hold one publication each, and how others read them.

A slot begins with its generation word, a u64 on a page of its own: 0 before the first write, odd while it is being written,
even after. A reader compares the word before and after its copies. Where everything lies is said once, in the arena's table
(JSON), which travels with its descriptor; readers take offsets from there and check them against the arena's size.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from elastic_reshard.arena.copies import tensor_over
from elastic_reshard.arena.host import ALIGNMENT, HostArena, MappedArena
from elastic_reshard.arena.ledgers import WORD_BYTES, fence
from elastic_reshard.errors import ArenaError, LayoutError
from elastic_reshard.layout.dtypes import itemsize

__all__ = ["PAGE", "SlotArena", "SlotReader", "Specs", "nbytes_for", "placed", "rows_of", "up"]

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
        name: [start + places[name], list(shape), _contiguous(shape, dtype.itemsize), _name(dtype)]
        for name, (shape, dtype) in specs.items()
    }


def _slot_nbytes(specs: Specs) -> int:
    return up(placed(specs, PAGE)[1], PAGE)


def nbytes_for(specs: Specs, slots: int = 2) -> int:
    """Bytes of a SlotArena of these tensors, known before it is made."""
    return slots * _slot_nbytes(specs)


def _contiguous(shape: Sequence[int], item: int) -> list[int]:
    strides, step = [0] * len(shape), item
    for d in range(len(shape) - 1, -1, -1):
        strides[d] = step
        step *= max(1, shape[d])
    return strides


class SlotArena:
    """A host arena of `slots` equal slots, written by its maker alone, one slot at a time.

    touch: write a byte of every page now, so that the first publish isn't slowed by page faults: 0.3 s a GiB, several
    seconds where the machine has to find the pages first; the memory is then really taken.

    Raises ArenaError if the system gives no such memory, LayoutError for a dtype without whole bytes per element.
    """

    def __init__(self, specs: Specs, slots: int = 2, *, touch: bool = True, label: str = "slots") -> None:
        if slots < 1:
            raise ArenaError(f"an arena of {slots} slots cannot be made; two are usual")
        self.specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(shape), dtype) for name, (shape, dtype) in specs.items()
        }
        self.slots: Final = slots
        self._size = _slot_nbytes(self.specs)
        self._arena = HostArena(slots * self._size, label)
        memory = self._arena.bytes
        if touch:
            memory[::PAGE] = 0
        self._words = [memory[at : at + WORD_BYTES].view(np.uint64) for at in range(0, slots * self._size, self._size)]
        self._offsets = placed(self.specs, PAGE)[0]
        self._tensors = [self._cut(memory, slot) for slot in range(slots)]

    def _cut(self, memory: NDArray[np.uint8], slot: int) -> dict[str, torch.Tensor]:
        found = {}
        for name, (shape, dtype) in self.specs.items():
            at = slot * self._size + self._offsets[name]
            flat = torch.from_numpy(memory[at : at + _nbytes(shape, dtype)])
            found[name] = flat.view(dtype).view(shape) if flat.numel() else torch.empty(shape, dtype=dtype)
        return found

    @property
    def arena_id(self) -> str:
        """32 hex digits, unlike any other arena's."""
        return self._arena.arena_id

    @property
    def fd(self) -> int:
        """The read-write descriptor; stays the arena's: send it, do not close it."""
        return self._arena.fd

    @property
    def nbytes(self) -> int:
        """Size in bytes, all slots."""
        return self._arena.nbytes

    def readonly_fd(self) -> int:
        """A new O_RDONLY descriptor, for a reader. The caller closes it."""
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
        """Where everything lies, for SlotReader: JSON, to be told with the descriptor."""
        slots = []
        for slot in range(self.slots):
            start = slot * self._size
            slots.append({"word": start, "tensors": rows_of(self.specs, self._offsets, start)})
        return json.dumps({"version": _VERSION, "slots": slots}, separators=(",", ":")).encode()

    def close(self) -> None:
        """Give the arena up; memory and descriptor go with the last tensor over it. May be called again."""
        self._tensors, self._words = [], []
        self._arena.close()


class SlotReader:
    """Another member's slots, mapped read-only; `table` is what its owner declared.

    Takes the map over. Raises ArenaError for a table that is none, or reaches outside the arena: nothing that the owner
    declares can make a later read fault. The owner's death changes nothing.
    """

    def __init__(self, arena: MappedArena, table: bytes, arena_id: str = "") -> None:
        self.arena_id: Final = arena_id
        self.nbytes: Final = arena.nbytes
        self._arena = arena
        self._words: list[NDArray[np.uint64]] = []
        self._arrays: list[dict[str, tuple[NDArray[Any], str]]] = []
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

    def _word(self, at: object) -> NDArray[np.uint64]:
        if type(at) is not int or at % WORD_BYTES:
            raise ValueError(f"generation word at {at!r}")
        return self._arena.view(at, (1,), (WORD_BYTES,), WORD_BYTES)

    def _declared(self, name: str, offset: Any, shape: Any, strides: Any, dtype: Any) -> tuple[NDArray[Any], str]:
        item = itemsize(dtype)
        numbers = [offset, *shape, *strides]
        if not all(type(n) is int and n >= 0 for n in numbers) or len(shape) > _DIMS:
            raise ValueError(f"{name}: offset {offset!r}, shape {shape!r}, strides {strides!r}")
        # torch has no views of elements off their alignment.
        if any(n % min(item, WORD_BYTES) for n in (offset, *strides)):
            raise ValueError(f"{name}: {offset}, {strides} are not multiples of its element size {item}")
        return self._arena.view(offset, shape, strides, item), dtype

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self._arrays)

    def _of(self, slot: int) -> dict[str, tuple[NDArray[Any], str]]:
        if not 0 <= slot < len(self._arrays):
            raise ArenaError(f"slot {slot} of arena {self.arena_id}, which has {len(self._arrays)} (none once closed)")
        return self._arrays[slot]

    def _entry(self, slot: int, name: str) -> tuple[NDArray[Any], str]:
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

    def array(self, slot: int, name: str) -> NDArray[Any]:
        """A tensor as read-only integers of its element size (16 bytes: complex128), no copy."""
        return self._entry(slot, name)[0]

    def dtype(self, slot: int, name: str) -> str:
        """Its dtype, by torch's name."""
        return self._entry(slot, name)[1]

    def tensor(self, slot: int, name: str) -> torch.Tensor:
        """A tensor, no copy. To be read only: a write to it ends the process."""
        array, dtype = self._entry(slot, name)
        found: torch.dtype | None = getattr(torch, dtype, None)
        if found is None:
            raise ArenaError(
                f"torch {torch.__version__} has no dtype {dtype}, which {name} of arena {self.arena_id} has"
            )
        return tensor_over(array, found)

    def touch(self) -> None:
        """Read a byte of every page, so that the first pull isn't slowed by page faults: about 0.1 s a GiB."""
        np.add.reduce(self._arena.bytes[::PAGE])

    def close(self) -> None:
        """Give the map up; it goes with the last array over it. May be called again."""
        self._words, self._arrays = [], []
        self._arena.close()
