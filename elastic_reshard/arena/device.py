"""What a device is to arenas and to whoever moves bytes: memory behind descriptors, copies, digests, streams.

Two kinds implement it: `arena.cuda` (VMM memory of a GPU) and `arena.pretend` (memfds and numpy: the same paths on a machine
without a GPU). Copies and digests are asynchronous, in the order of their stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from elastic_reshard.arena.neighbours import Neighbours
from elastic_reshard.arena.strided import Place, Strided

if TYPE_CHECKING:
    import torch

    from elastic_reshard.arena.boxes import CopyTable

__all__ = ["Device", "DeviceMemory", "Event", "How", "Registered", "Stream", "device_at"]

How = Literal["kernel", "engine"]


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether everything before it has been done. Never blocks. ArenaError once the device has failed."""

    def synchronize(self) -> None:
        """Block until it is done; in a device call that cannot be left."""


class Stream(Protocol):
    """Work in order. handle: the driver's, as a number."""

    @property
    def handle(self) -> int: ...

    def record(self) -> Event:
        """The point reached now."""

    def wait(self, event: Event) -> None:
        """What comes later begins after that point of another stream. Does not block the caller."""

    def synchronize(self) -> None:
        """Block until all of it is done; in a device call that cannot be left."""


class DeviceMemory(Protocol):
    """One allocation, or one mapping of another process's. Unmapped when it is closed and nothing over it is alive.

    fd: the descriptor that owns an allocation, which stays this object's; -1 for mappings and scratch memory.
    """

    @property
    def device(self) -> Device: ...

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def fd(self) -> int: ...

    def strided(self, offset: int, shape: Sequence[int], strides_bytes: Sequence[int], itemsize: int) -> Strided:
        """An array over it. ArenaError if any element would lie outside, or it is closed."""

    def close(self) -> None:
        """Give it up. May be called again."""


class Registered(Protocol):
    """Host memory that the device can reach, for as long as this is not closed and nothing over it is alive."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None:
        """Give it up. May be called again."""


class Device(Place, Protocol):
    """One device of this process. Any thread; what is launched from several threads goes to their own streams."""

    def create(self, nbytes: int, label: str) -> DeviceMemory:
        """Zeroed memory owned by a descriptor. Blocks some ms a GiB. ArenaError, with figures, if there is not enough."""

    def map(self, fd: int, nbytes: int, *, writable: bool) -> DeviceMemory:
        """Another process's memory; takes the descriptor over and closes it, also when it raises. About 1 ms."""

    def scratch(self, nbytes: int) -> DeviceMemory:
        """Memory of this process alone."""

    def host(self, memory: npt.NDArray[np.uint8]) -> Registered:
        """Let the device reach host memory (page-locked: some ms a GiB where its pages are there). It is mapped writable, and
        shared, even if the array is not to be written to; ArenaError where the driver does not take it."""

    def prepare(self, table: CopyTable) -> None:
        """Do ahead what a table's first launch would do beside launching (checks, the upload). ArenaError if it can't be."""

    def copy(self, table: CopyTable, stream: Stream, how: How | None = None) -> None:
        """Launch all copies of a table. how: None for the faster way. Its memory stays mapped, and host memory registered,
        until they are done. ArenaError if host memory in it is not registered."""

    def cast(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: Stream) -> None:
        """Launch torch's conversion of each source to its target, in few launches. Either may be in host memory."""

    def digest(
        self,
        pieces: Sequence[Strided],
        salt: int,
        full: bool,
        out: Strided,
        stream: Stream,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Launch: one u64 for each contiguous piece into `out`, as `digests.digest_on_host` would. numbers: with `salt` they
        say where windows lie, alike at both ends of a message; None: 0, 1, ..."""

    def stream(self) -> Stream:
        """A new one, beside all others."""

    def current(self) -> Stream:
        """The one that the caller's torch code uses now, in this thread."""

    def free(self) -> tuple[int, int]:
        """Bytes: (free now, in all)."""

    def neighbours(self) -> Neighbours:
        """Whose memory it can map, of this machine's devices, and the fabric it is in. Some ms a device; no work is done."""

    def tensor(self, strided: Strided, dtype: torch.dtype) -> torch.Tensor:
        """The same memory as a tensor, which keeps it mapped; no copy."""

    def read(self, strided: Strided, stream: Stream) -> npt.NDArray[Any]:
        """Its elements, copied to the host, as unsigned integers; blocks."""


def device_at(place: Place) -> Device:
    """The device that an array lies on: devices are the only places there are."""
    return cast(Device, place)
