"""A device that is none: memory in memfds, kernels in numpy. What is built on devices runs on it without a GPU.

Its streams put work off as long as they may: a stream of one's own does nothing until somebody asks an event of it, waits for
it, or lets another stream wait; so a missing wait shows as old bytes, each time. Only `current`, the stream of torch's CPU
tensors, works at once. Tensors on it are CPU tensors that `devices.device_of` knows by their address.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from elastic_reshard.arena.boxes import CopyTable, array_at, run_on_host
from elastic_reshard.arena.digests import digest_on_host
from elastic_reshard.arena.neighbours import Neighbours, joined
from elastic_reshard.arena.ranges import Ranges
from elastic_reshard.arena.strided import Strided, within
from elastic_reshard.errors import ArenaError

if TYPE_CHECKING:
    import torch

    from elastic_reshard.arena.device import Event, How, Stream

__all__ = ["PretendDevice", "PretendEvent", "PretendMemory", "PretendStream", "empty", "open_pretend", "pretend_at"]

GRANULARITY: Final = 64 << 10
# How much memory such a device has; tests lower it.
TOTAL_VARIABLE: Final = "ELASTIC_RESHARD_PRETEND_BYTES"
_TOTAL: Final = 64 << 30
# Which devices can't map each other's memory, as "0-1 0-2"; and the fabric, as "cluster/clique".
APART_VARIABLE: Final = "ELASTIC_RESHARD_PRETEND_APART"
FABRIC_VARIABLE: Final = "ELASTIC_RESHARD_PRETEND_FABRIC"
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_POLL: Final = 50e-6

_handles = itertools.count(1)
_lock = threading.RLock()  # one for all streams, as streams run each other's work
_devices: dict[int, PretendDevice] = {}


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603 - another thread may have held it
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Map(mmap.mmap):
    """The map itself, which all arrays over it keep."""

    device: PretendDevice
    base: int
    writable: bool
    fd: int


class _Registration:
    """Host memory that the device may reach as long as this is there."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory


_maps: Ranges[_Map] = Ranges()


class PretendEvent:
    """A point in a stream."""

    def __init__(self, stream: PretendStream, place: int) -> None:
        self._stream, self._place = stream, place

    def done(self) -> bool:
        """Whether everything before it has been done; does what can be done of it now."""
        return self._stream.advance(self._place)

    def synchronize(self) -> None:
        """Block until it is done."""
        while not self.done():
            time.sleep(_POLL)


class PretendStream:
    """Work in order, put off. eager: done at once instead."""

    def __init__(self, handle: int, eager: bool = False) -> None:
        self.handle: Final = handle
        self._eager = eager
        self._work: deque[Callable[[], bool]] = deque()
        self._queued = self._done = 0
        self._failed: BaseException | None = None

    def submit(self, work: Callable[[], bool]) -> None:
        """Add work. It is called, again and again, until it says that it is done; what comes later waits."""
        with _lock:
            self._work.append(work)
            self._queued += 1
        if self._eager:
            self.synchronize()

    def advance(self, place: int) -> bool:
        """Do what can be done now of the work up to that place; whether all of it is done. Raises what work raised."""
        with _lock:
            while self._done < place:
                if self._failed is not None:
                    raise ArenaError(f"work on a pretend stream failed before: {self._failed!r}") from self._failed
                try:
                    if not self._work[0]():
                        return False
                except BaseException as error:
                    self._failed = error
                    raise
                self._work.popleft()
                self._done += 1
            return True

    def record(self) -> PretendEvent:
        """The point reached now."""
        with _lock:
            return PretendEvent(self, self._queued)

    def wait(self, event: Event) -> None:
        """What comes later begins after that point of another stream."""
        self.submit(event.done)

    def synchronize(self) -> None:
        """Block until all of it is done."""
        self.record().synchronize()


class PretendMemory:
    """One memfd, mapped."""

    def __init__(self, device: PretendDevice, mapped: _Map, fd: int) -> None:
        self._map: _Map | None = mapped
        self._fd = fd
        self.device: Final = device
        self.nbytes: Final = len(mapped)

    def _open(self) -> _Map:
        if self._map is None:
            raise ArenaError("this device memory is closed; map its descriptor again")
        return self._map

    @property
    def address(self) -> int:
        """Where it is mapped."""
        return self._open().base

    @property
    def fd(self) -> int:
        """The descriptor that owns it, which stays this object's; -1 for mappings, scratch memory, and once it is closed."""
        return self._fd if self._map is not None else -1

    def strided(self, offset: int, shape: Sequence[int], strides_bytes: Sequence[int], itemsize: int) -> Strided:
        """An array over it. ArenaError if any element would lie outside, or it is closed."""
        mapped = self._open()
        within(self.nbytes, offset, shape, strides_bytes, itemsize)
        return Strided(mapped.base + offset, tuple(shape), tuple(strides_bytes), itemsize, self.device, mapped)

    def close(self) -> None:
        """Give it up; it goes with the last array over it. May be called again."""
        self._map = None


class _Registered:
    def __init__(self, memory: npt.NDArray[np.uint8], held: _Registration) -> None:
        self._held: _Registration | None = held
        self.address: Final = int(memory.ctypes.data)
        self.nbytes: Final = memory.nbytes

    def close(self) -> None:
        self._held = None


class PretendDevice:
    """Number `number` of this process. `open_pretend` makes it."""

    kind: Final = "pretend"

    def __init__(self, number: int) -> None:
        self.id: Final = f"pretend:{number}"
        self._total = int(os.environ.get(TOTAL_VARIABLE, _TOTAL))
        self._used = 0
        self._hosts: Ranges[_Registration] = Ranges()
        self._registered: weakref.WeakValueDictionary[tuple[int, int], _Registration] = weakref.WeakValueDictionary()
        self._current = PretendStream(0, eager=True)

    def __repr__(self) -> str:
        return f"PretendDevice({self.id})"

    def create(self, nbytes: int, label: str) -> PretendMemory:
        """Zeroed memory owned by a memfd. ArenaError, with figures, if there is not enough."""
        mapped = self._new(nbytes, label)
        return PretendMemory(self, mapped, mapped.fd)

    def scratch(self, nbytes: int) -> PretendMemory:
        """Memory of this process alone."""
        return PretendMemory(self, self._new(nbytes, "scratch"), -1)

    def _new(self, nbytes: int, label: str) -> _Map:
        if nbytes <= 0:
            raise ArenaError(f"{nbytes} bytes of device memory cannot be made; it needs at least one byte")
        nbytes = -(-nbytes // GRANULARITY) * GRANULARITY
        free, total = self.free()
        if nbytes > free:
            raise ArenaError(f"{self.id} has no {nbytes} bytes for {label!r}: {free} of {total} bytes are free")
        fd = -1
        try:
            fd = os.memfd_create(f"elastic_reshard:{self.id}:{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapped = self._map(fd, nbytes, writable=True)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ArenaError(f"{self.id} cannot make {nbytes} bytes for {label!r}: {error}") from error
        mapped.fd = fd
        self._used += nbytes
        weakref.finalize(mapped, self._given_back, fd, nbytes).atexit = False
        return mapped

    def _given_back(self, fd: int, nbytes: int) -> None:
        os.close(fd)
        self._used -= nbytes

    def _map(self, fd: int, nbytes: int, *, writable: bool) -> _Map:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapped = _Map(fd, nbytes, flags=mmap.MAP_SHARED, prot=prot)
        mapped.device, mapped.writable, mapped.fd = self, writable, -1
        mapped.base = int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
        _maps.add(mapped.base, mapped.base + nbytes, mapped)
        return mapped

    def map(self, fd: int, nbytes: int, *, writable: bool) -> PretendMemory:
        """Another process's memory; takes the descriptor over and closes it, also when it raises."""
        try:
            size = os.fstat(fd).st_size
            if not 0 < nbytes <= size or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ArenaError(f"descriptor {fd} is no pretend memory of {nbytes} bytes (it has {size})")
            self._refuse_apart(fd)
            return PretendMemory(self, self._map(fd, nbytes, writable=writable), -1)
        except OSError as error:
            raise ArenaError(f"descriptor {fd} cannot be mapped by {self.id}: {error}") from error
        finally:
            os.close(fd)

    def _refuse_apart(self, fd: int) -> None:
        """ArenaError for memory of a device that this one does not reach."""
        _, _, name = os.readlink(f"/proc/self/fd/{fd}").partition("elastic_reshard:")
        maker = ":".join(name.split(":")[:2])
        if maker in self.neighbours().apart:
            raise ArenaError(f"{self.id} has no peer access to {maker}, on which the memory of descriptor {fd} is")

    def host(self, memory: npt.NDArray[np.uint8]) -> _Registered:
        """Let the device reach host memory. As strict as the strictest drivers: ArenaError for a map that is read-only."""
        at = int(memory.ctypes.data)
        if not _mapped_writable(at):
            raise ArenaError(f"{self.id} can't reach host memory that is mapped read-only; map it with for_device=True")
        with _lock:
            held = self._registered.get((at, memory.nbytes))
            if held is None:
                held = self._registered[at, memory.nbytes] = _Registration(memory)
                self._hosts.add(at, at + memory.nbytes, held)
        return _Registered(memory, held)

    def prepare(self, table: CopyTable) -> None:
        """Check a table before its first launch."""
        if any(isinstance(owner, _Map) and not owner.writable for owner in table.targets):
            raise ArenaError("a copy would write to memory that is mapped read-only; map it writable")

    def copy(self, table: CopyTable, stream: Stream, how: How | None = None) -> None:
        """Launch all copies of a table. Both ways are numpy's."""
        del how
        self.prepare(table)
        held = self._hosts.keepers(table.hosts)

        def work() -> bool:
            run_on_host(table)
            held.clear()  # what the device reaches stays registered until here
            return True

        self._of(stream).submit(work)

    def cast(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: Stream) -> None:
        """Launch torch's conversions from each source to its target."""

        import torch

        def work() -> bool:
            with torch.no_grad():
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)
            return True

        self._of(stream).submit(work)

    def digest(
        self,
        pieces: Sequence[Strided],
        salt: int,
        full: bool,
        out: Strided,
        stream: Stream,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Launch: one u64 for each contiguous piece into `out`."""
        if out.shape != (len(pieces),) or out.itemsize != 8:
            raise ArenaError(f"digests of {len(pieces)} pieces don't fit {out.shape} elements of {out.itemsize} bytes")

        def work() -> bool:
            array_at(out)[:] = digest_on_host(pieces, salt, full, numbers)
            return True

        self._of(stream).submit(work)

    def _of(self, stream: Stream) -> PretendStream:
        if not isinstance(stream, PretendStream):
            raise ArenaError(f"{stream!r} is no stream of {self.id}")
        return stream

    def stream(self) -> PretendStream:
        """A new one, beside all others."""
        return PretendStream(next(_handles))

    def current(self) -> PretendStream:
        """The one of torch's CPU tensors, which works at once."""
        return self._current

    def free(self) -> tuple[int, int]:
        """Bytes: (free now, in all). What other processes took of it is not counted."""
        return max(0, self._total - self._used), self._total

    def neighbours(self) -> Neighbours:
        """As the environment says: of the devices that it names, those that are apart from this one, and the others."""
        pairs = [set(pair.split("-")) for pair in os.environ.get(APART_VARIABLE, "").split()]
        mine = self.id.removeprefix("pretend:")
        others = set().union(*pairs) - {mine}
        told = {f"pretend:{other}": {mine, other} not in pairs for other in others}
        cluster, _, clique = os.environ.get(FABRIC_VARIABLE, "").partition("/")
        return joined([told], cluster, int(clique or 0))

    def tensor(self, strided: Strided, dtype: torch.dtype) -> torch.Tensor:
        """The same memory as a CPU tensor, which keeps it mapped; no copy. Not to be written to if it is mapped read-only."""
        from elastic_reshard.arena.elements import tensor_over

        return tensor_over(array_at(strided), dtype)

    def read(self, strided: Strided, stream: Stream) -> npt.NDArray[Any]:
        """Its elements, copied to the host; blocks until the stream is done."""
        stream.synchronize()
        return array_at(strided).copy()


def _mapped_writable(address: int) -> bool:
    """Whatever numpy says of the array: the map itself."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights, _ = line.split(maxsplit=2)
            low, high = (int(end, 16) for end in span.split("-"))
            if low <= address < high:
                return "w" in rights
    return True


def open_pretend(identity: str | int) -> PretendDevice:
    """Pretend device number N, or the one called "pretend:N"; one object of each in a process."""
    text = str(identity).removeprefix("pretend:")
    if not text.isdecimal():
        raise ArenaError(f"{identity!r} is no pretend device; they are called pretend:0, pretend:1, ...")
    with _lock:
        return _devices.setdefault(int(text), PretendDevice(int(text)))


def empty(shape: Sequence[int], dtype: torch.dtype, device: int = 0) -> torch.Tensor:
    """A contiguous tensor on a pretend device; its bytes are zero."""
    import torch

    count = math.prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    there = open_pretend(device)
    memory = there.scratch(count * dtype.itemsize)
    flat = memory.strided(0, (count,), (dtype.itemsize,), dtype.itemsize)
    return there.tensor(flat.reshape(shape), dtype)


def pretend_at(address: int) -> PretendDevice | None:
    """On which pretend device of this process an address lies."""
    hit = _maps.find(address)
    return None if hit is None else hit[1].device
