"""The table of buffers that a program moves between: a member's own tensors, and what its domain peers declare.

Offsets, shapes and strides of peers' memory are taken from what they declare, never worked out on this side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch

from elastic_reshard.arena import HostArena, MappedArena, locate
from elastic_reshard.arena.devices import device_of
from elastic_reshard.arena.slots import SlotReader
from elastic_reshard.errors import ArenaError
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.layout.model import ModelLayout
from elastic_reshard.transport.pieces import Memory, tensor_of

__all__ = ["Key", "PeerViews", "SlotViews", "Staged", "Views"]

# ("s", source party, name) or ("d", target, name)
Key = tuple[str, int, str]
# (kind, tensor, region, ordinal, first, last) of a leg whose bytes lie in staging
Staged = tuple[int, int, int, int, int, int]
_MAX_FDS = 200  # SCM_RIGHTS takes 253


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


@dataclass(frozen=True)
class Views:
    """This member's local tensors, plain tensors of any strides, of the CPU or of a device. source: by (party, source tensor's
    name); destination: by (target, name). They are written and read in place."""

    source: Mapping[tuple[int, str], torch.Tensor]
    destination: Mapping[tuple[int, str], torch.Tensor]
    _in_arena: dict[Key, bool] = field(default_factory=dict, compare=False)

    def tensor(self, key: Key) -> torch.Tensor:
        """ArenaError, naming the tensor, if this member was not given it."""
        side, number, name = key
        table = self.source if side == "s" else self.destination
        try:
            return table[number, name]
        except KeyError:
            raise ArenaError(f"the plan moves {name} ({'source' if side == 's' else 'destination'}), but no such tensor "
                             "was given; pass all local tensors of the layout") from None  # fmt: skip

    def in_arena(self, key: Key) -> bool:
        """Whether peers can map the tensor. Tensors of devices always lie in slots."""
        if key not in self._in_arena:
            tensor = self.tensor(key)
            self._in_arena[key] = locate(tensor) is not None or device_of(tensor) is not None
        return self._in_arena[key]

    def declaration(self, staging: HostArena | None, staged: Mapping[Staged, int]) -> tuple[bytes, list[int]]:
        """What peers need to read this member's memory: (payload, descriptors of its arenas, opened read-only; the
        caller closes them)."""
        arenas: dict[str, int] = {}
        fds: list[int] = []
        buffers: list[list[Any]] = []

        def number(arena_id: str, fd: int) -> int:
            if arena_id not in arenas and len(arenas) < _MAX_FDS:
                arenas[arena_id] = len(fds)
                fds.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
            return arenas.get(arena_id, -1)

        for side, table in (("s", self.source), ("d", self.destination)):
            for (n, name), tensor in table.items():
                at = locate(tensor)
                arena = number(at.arena_id, at.fd) if at is not None else -1
                if at is not None and arena < 0:
                    self._in_arena[side, n, name] = False  # more arenas than descriptors that can be passed
                strides = [step * tensor.element_size() for step in tensor.stride()]
                dtype = str(tensor.dtype).removeprefix("torch.")
                offset = at.offset_bytes if at is not None else 0
                buffers.append([side, n, name, arena, offset, list(tensor.shape), strides, dtype])
        extra = number(staging.arena_id, staging.fd) if staging is not None else -1
        table_ = [[*key, offset] for key, offset in staged.items()]
        return json.dumps({"buffers": buffers, "staging": extra, "staged": table_}).encode(), fds


class PeerViews:
    """A domain peer's memory, as it declared it, mapped read-only."""

    def __init__(self, member: int, payload: bytes, fds: list[int]) -> None:
        said = json.loads(payload)
        self.member = member
        self._arenas: list[MappedArena] = []
        left = list(fds)
        try:
            while left:
                self._arenas.append(MappedArena(left.pop(0)))
        finally:
            for fd in left:  # after one that cannot be mapped
                os.close(fd)
        self._buffers = {(b[0], b[1], b[2]): b[3:] for b in said["buffers"]}
        self._staging: int = said["staging"]
        self._staged = {tuple(row[:6]): row[6] for row in said["staged"]}
        self._arrays: dict[Key, Memory | None] = {}

    def array(self, key: Key) -> Memory | None:
        """The peer's tensor as integers of its item size; None if it is not in an arena, so that it is staged."""
        if key not in self._arrays:
            if key not in self._buffers:
                raise ArenaError(f"member {self.member} declared no {key[2]}, but the plan pulls it from there")
            arena, offset, shape, strides, dtype = self._buffers[key]
            self._arrays[key] = (
                self._arenas[arena].view(offset, shape, strides, itemsize(dtype)) if arena >= 0 else None
            )
        return self._arrays[key]

    def dtype(self, key: Key) -> torch.dtype:
        """Element type of the peer's tensor."""
        return _dtype(self._buffers[key][4])

    def tensor(self, key: Key) -> torch.Tensor:
        """The peer's tensor, to be read only."""
        array = self.array(key)
        if array is None:
            raise ArenaError(f"{key[2]} of member {self.member} is not in an arena")
        return tensor_of(array, self.dtype(key))

    def staged(self, key: Staged, count: int, item: int) -> npt.NDArray[Any]:
        """`count` elements of `item` bytes that the peer stages for this leg."""
        if key not in self._staged:
            raise ArenaError(f"member {self.member} stages no leg {key}, but the plan pulls it from there")
        return self._arenas[self._staging].view(self._staged[key], (count,), (item,), item)

    def close(self) -> None:
        """Unmap, once no array of it is used any more."""
        for arena in self._arenas:
            arena.close()


class SlotViews(PeerViews):
    """A slot of one rank of a layout, as a peer's memory. The reader stays the caller's."""

    def __init__(self, who: str, rank: int, reader: SlotReader, slot: int, layout: ModelLayout) -> None:
        self.who, self.rank, self._reader, self._slot, self._layout = who, rank, reader, slot, layout

    def array(self, key: Key) -> Memory:
        """The slot's tensor, on host or device, never staged. ArenaError if it is not what the layout says of this rank."""
        reader, slot, name = self._reader, self._slot, key[2]
        found, layout = reader.array(slot, name), self._layout[name]
        if found.shape != layout.local_shape(self.rank) or reader.dtype(slot, name) != layout.dtype:
            raise ArenaError(
                f"slot {slot} of arena {reader.arena_id} holds {name} as {reader.dtype(slot, name)}{list(found.shape)}, "
                f"but {self.who} (rank {self.rank}) said {layout.dtype}{list(layout.local_shape(self.rank) or ())}; nothing "
                "was moved. Publish again"
            )
        return found

    def dtype(self, key: Key) -> torch.dtype:
        return _dtype(self._reader.dtype(self._slot, key[2]))

    def tensor(self, key: Key) -> torch.Tensor:
        self.array(key)
        return self._reader.tensor(self._slot, key[2])

    def close(self) -> None:
        """Nothing is this one's own."""
