"""Host arenas: memory owned by a memfd, so that peers can map it and it outlives the process that made it.

An arena is one sealed memfd with one shared map. Tensors are cut from it by bump allocation and are never
given back one by one; map and descriptor go when the arena object and every tensor and array over it are
gone. The map is never closed by hand: `mmap.close()` would succeed under a live tensor and leave it
pointing nowhere.

After os.fork() a child shares the memory with its parent: it may use what it inherited, not allocate from it.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import threading
import uuid
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from elastic_reshard.errors import ArenaError
from elastic_reshard.layout.dtypes import itemsize

__all__ = ["ALIGNMENT", "HostArena", "Located", "MappedArena", "empty", "empty_like", "locate"]

ALIGNMENT: Final = 64
POOL_BYTES: Final = 64 << 20
# Above this a tensor of empty() gets an arena of its own, so that a pool is never left mostly unused.
_POOLED_BYTES: Final = 16 << 20
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Peers' memory is bytes, not numbers: unsigned integers of the element's size; 16 bytes: complex128.
_RAW: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
}


class Located(NamedTuple):
    """Where a tensor's memory lies. `fd` stays the arena's: valid while the tensor lives, never to be closed.

    `offset_bytes` is the place of the first element; `nbytes` reaches from there past the last one, gaps
    included.
    """

    arena_id: str
    fd: int
    offset_bytes: int
    nbytes: int


class _Map(mmap.mmap):
    """The one map of an arena; carries what must live exactly as long as the memory."""

    fd: int
    base: int
    end: int
    arena_id: str
    maker: int  # pid; a forked child must not allocate what its parent allocates too
    used: int

    def reserve(self, nbytes: int) -> int | None:
        """Offset of `nbytes` new bytes, or None if they do not fit. Any thread."""
        if os.getpid() != self.maker:
            raise ArenaError(
                f"process {os.getpid()} cannot allocate from an arena that process {self.maker} made before "
                "forking; make an arena of its own in the child"
            )
        with _lock:
            offset = _aligned(self.used)
            if offset + nbytes > len(self):
                return None
            self.used = offset + nbytes
            return offset

    def cut(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # A storage per tensor, so that saving or deep-copying one takes only its own bytes; .data makes it
        # no view of another tensor, with a version counter of its own for autograd.
        flat = torch.frombuffer(self, dtype=dtype, count=math.prod(shape), offset=offset)
        return flat.view(tuple(shape)).data


class _Index(NamedTuple):
    """All maps by address. Replaced as a whole, so that readers need no lock; may name maps that are gone."""

    bases: tuple[int, ...]
    maps: tuple[weakref.ref[_Map], ...]


_lock = threading.Lock()
_pool_lock = threading.Lock()
_index = _Index((), ())
# Weak: the pool lives as long as its tensors, so nothing is left behind when the last one goes.
_pool: weakref.ref[_Map] | None = None


def _after_fork_in_child() -> None:
    global _lock, _pool_lock, _pool  # noqa: PLW0603 - locks may have been held by threads that do not exist here
    _lock = threading.Lock()
    _pool_lock = threading.Lock()
    _pool = None


os.register_at_fork(after_in_child=_after_fork_in_child)


class HostArena:
    """`nbytes` bytes of zeroed shared memory behind a sealed memfd; tensors are cut from it with `empty`.

    Raises ArenaError if the system gives no such memory. Pages are taken at first touch. Safe in any
    thread.
    """

    def __init__(self, nbytes: int, label: str = "arena") -> None:
        self._map: _Map | None = _new_map(nbytes, label)

    def _open(self) -> _Map:
        if self._map is None:
            raise ArenaError("this arena is closed; make another (tensors cut from it stay usable)")
        return self._map

    @property
    def arena_id(self) -> str:
        """32 hex digits, unlike any other arena's."""
        return self._open().arena_id

    @property
    def fd(self) -> int:
        """The read-write descriptor. It stays the arena's: do not close it; send it, or use `readonly_fd`."""
        return self._open().fd

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self._open())

    @property
    def free_bytes(self) -> int:
        """The largest tensor, in bytes, that still fits."""
        arena = self._open()
        return max(0, len(arena) - _aligned(arena.used))

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The whole arena as a writable array of shape (nbytes,); keeps the memory alive, as tensors do."""
        return np.frombuffer(self._open(), dtype=np.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous CPU tensor of the arena's next bytes, at an offset that is a multiple of 64.

        Tensors without elements are ordinary ones and take no room. Raises ArenaError if it does not fit or
        the shape is no shape, LayoutError for a dtype without whole bytes per element.
        """
        nbytes = _nbytes(shape, dtype)
        arena = self._open()
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        offset = arena.reserve(nbytes)
        if offset is None:
            raise ArenaError(
                f"a {dtype} tensor of shape {tuple(shape)} needs {nbytes} bytes, but only "
                f"{self.free_bytes} of the arena's {self.nbytes} bytes are free; make the arena larger"
            )
        return arena.cut(offset, shape, dtype)

    def readonly_fd(self) -> int:
        """A new O_RDONLY descriptor of the same memory, for a peer. The caller closes it."""
        try:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"cannot open a read-only descriptor of an arena: {error}") from error

    def close(self) -> None:
        """Give up the arena; memory and descriptor go with the last tensor over it. May be called again."""
        self._map = None


class MappedArena:
    """Another process's arena, mapped read-only. Stays readable and right when that process dies.

    Takes the descriptor over and closes it, also when it raises. Raises ArenaError for a descriptor that is
    no memfd sealed against shrinking (a peer could end this process by SIGBUS), is empty, or cannot be
    mapped. for_device: it will be given to `Device.host`; drivers register writable maps only, so it is opened
    anew and mapped so, and only this object's arrays are read-only.
    """

    _prot: ClassVar[int] = mmap.PROT_READ

    def __init__(self, fd: int, *, for_device: bool = False) -> None:
        try:
            if for_device and not self._prot & mmap.PROT_WRITE:
                mapped = _map_reachable(fd)
            else:
                mapped = _map_shared(fd, self._prot)
        finally:
            os.close(fd)
        # The array holds the map; arrays cut from it by view() hold it too.
        array = np.frombuffer(mapped, dtype=np.uint8)
        array.flags.writeable = bool(self._prot & mmap.PROT_WRITE)
        self._bytes: NDArray[np.uint8] | None = array
        self.nbytes: Final = len(mapped)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The whole arena as a read-only array of shape (nbytes,)."""
        if self._bytes is None:
            raise ArenaError("this mapped arena is closed; map its descriptor again")
        return self._bytes

    def view(self, offset: int, shape: Sequence[int], strides_bytes: Sequence[int], itemsize: int) -> NDArray[Any]:
        """A read-only array over the arena, no copy, its first element `offset` bytes from the start.

        Elements are unsigned integers of `itemsize` 1, 2, 4 or 8 bytes, complex128 for 16. Raises
        ArenaError if any element would lie outside the arena, or the arena is closed.
        """
        if itemsize not in _RAW:
            raise ArenaError(f"elements of {itemsize} bytes cannot be viewed; sizes are {sorted(_RAW)}")
        shape, strides = tuple(shape), tuple(strides_bytes)
        if len(shape) != len(strides) or any(n < 0 for n in shape):
            raise ArenaError(f"shape {shape} and strides {strides} do not describe an array")
        low, high = offset, offset
        if all(shape):
            steps = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
            low += sum(step for step in steps if step < 0)
            high += sum(step for step in steps if step > 0) + itemsize
        if low < 0 or high > self.nbytes:
            raise ArenaError(
                f"bytes {low} to {high} of a mapped arena of {self.nbytes} bytes were asked for "
                f"(shape {shape}, strides {strides}); what the arena's owner declared is wrong"
            )
        return np.ndarray(shape, _RAW[itemsize], buffer=self.bytes, offset=offset, strides=strides)

    def close(self) -> None:
        """Give up the map; it goes with the last array over it. May be called again."""
        self._bytes = None


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous CPU tensor in memory that peers of the same host can map. Safe in any thread.

    Tensors up to 16 MiB share arenas of 64 MiB, given back when all tensors of an arena are gone; larger ones
    have an arena and its descriptors each, so use `empty_like` for a whole model. The content is not defined.
    Raises ArenaError, or LayoutError for a dtype without whole bytes per element.
    """
    global _pool  # noqa: PLW0603
    nbytes = _nbytes(shape, dtype)
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if nbytes > _POOLED_BYTES:
        return HostArena(nbytes, "tensor").empty(shape, dtype)
    with _pool_lock:
        arena = _pool() if _pool is not None else None
        offset = arena.reserve(nbytes) if arena is not None else None
        if arena is None or offset is None:
            arena = _new_map(POOL_BYTES, "pool")
            _pool = weakref.ref(arena)
            offset = arena.used
            arena.used = nbytes
        return arena.cut(offset, shape, dtype)


def empty_like(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors of the same names, shapes and dtypes, all in one arena of just their size.

    Takes plain (local) tensors on any device, meta too. Tensors that share memory get separate memory. Raises
    ArenaError for DTensors or if the system gives no such memory.
    """
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):
            raise ArenaError(f"{name} is a {type(tensor).__name__}; pass its local tensor: .to_local()")
    needed = sum(_aligned(_nbytes(t.shape, t.dtype)) for t in tensors.values())
    if needed == 0:
        return {name: torch.empty(t.shape, dtype=t.dtype, device="cpu") for name, t in tensors.items()}
    arena = HostArena(needed, "tensors")
    return {name: arena.empty(t.shape, t.dtype) for name, t in tensors.items()}


def locate(tensor: torch.Tensor) -> Located | None:
    """In which arena of this process a plain tensor's elements lie; None if in none or without elements.

    Views, slices and transposed tensors are found too. Takes about a microsecond; any thread; takes no lock.
    """
    if not tensor.is_cpu:
        return None
    bases, maps = _index
    address = tensor.data_ptr()
    at = bisect_right(bases, address) - 1
    if at < 0:
        return None
    arena = maps[at]()
    if arena is None or address >= arena.end:
        return None
    return Located(arena.arena_id, arena.fd, address - arena.base, _extent(tensor))


def _extent(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    last = 0
    for n, step in zip(tensor.shape, tensor.stride(), strict=True):
        last += (n - 1) * step
    return (last + 1) * tensor.element_size()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    if any(n < 0 for n in shape):
        raise ArenaError(f"{tuple(shape)} is no shape: sizes must not be negative")
    return math.prod(shape) * itemsize(str(dtype).removeprefix("torch."))


def _new_map(nbytes: int, label: str) -> _Map:
    if nbytes <= 0:
        raise ArenaError(f"an arena of {nbytes} bytes cannot be made; it needs at least one byte")
    fd = -1
    try:
        fd = os.memfd_create(f"elastic_reshard:{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        arena = _Map(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise ArenaError(
            f"cannot make an arena of {nbytes} bytes ({label!r}): {error}; "
            "look at the limits on memory, address space (ulimit -v) and open files (ulimit -n)"
        ) from error
    arena.fd = fd
    arena.base = torch.frombuffer(arena, dtype=torch.uint8, count=1).data_ptr()
    arena.end = arena.base + nbytes
    arena.arena_id = uuid.uuid4().hex
    arena.maker = os.getpid()
    arena.used = 0
    # Not at exit: tensors may be in use until the very end, and the system closes what is open then.
    weakref.finalize(arena, os.close, fd).atexit = False
    _register(arena)
    return arena


def _register(arena: _Map) -> None:
    global _index  # noqa: PLW0603
    with _lock:
        live = [(m.base, ref) for ref in _index.maps if (m := ref()) is not None]
        live.append((arena.base, weakref.ref(arena)))
        live.sort(key=lambda entry: entry[0])
        _index = _Index(tuple(base for base, _ in live), tuple(ref for _, ref in live))


def _map_shared(fd: int, prot: int) -> mmap.mmap:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        nbytes = os.fstat(fd).st_size
        if seals & fcntl.F_SEAL_SHRINK and nbytes:
            return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=prot)
    except OSError as error:
        raise ArenaError(f"descriptor {fd} from a peer cannot be mapped as an arena: {error}") from error
    raise ArenaError(
        f"descriptor {fd} from a peer is no arena: {nbytes} bytes, seals {seals:#x} (F_SEAL_SHRINK is "
        "needed); peers must send descriptors of HostArena"
    )


def _map_reachable(fd: int) -> mmap.mmap:
    """Read and write, from a descriptor that may be read-only. Shared: a private map would be page-locked as a copy."""
    try:
        anew = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return _map_shared(anew, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(anew)
    except OSError as error:
        why: object = error
    except ArenaError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        why = error.__cause__
    raise ArenaError(
        f"a host arena of a peer cannot be opened for writing ({why}), and a device reaches no other memory; run all members "
        "of a host as one user, or let those whose weights a device reads join with stage='device'"
    )
