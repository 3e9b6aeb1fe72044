"""Memory of a GPU: VMM allocations owned by descriptors, mappings of others', registered host memory, tables on their way.

Nothing here waits for the GPU: unmapping does not, and freeing by cuMemFree would.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from elastic_reshard.arena.driver import Context, call, outcome
from elastic_reshard.arena.strided import Strided, within
from elastic_reshard.errors import ArenaError
from elastic_reshard.log import logger

if TYPE_CHECKING:
    from elastic_reshard.arena.device import Device

__all__ = ["CudaMemory", "Mapping", "Registration", "Tables", "Upload", "Vmm", "registers_readonly"]

log = logger("arena")

_FD: Final = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ACCESS: Final = driver.CUmemAccess_flags
_REFUSED: Final = (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, driver.CUresult.CUDA_ERROR_INVALID_VALUE)
# Uploads are cut from blocks of this size, which are used again when nothing in them is alive.
_BLOCK: Final = 4 << 20
_APART: Final = 256


class Mapping:
    """Mapped memory, which all arrays over it keep. far: it is another GPU's."""

    __slots__ = ("__weakref__", "address", "far", "nbytes", "writable")

    def __init__(self, address: int, nbytes: int, writable: bool, far: bool = False) -> None:
        self.address: Final = address
        self.nbytes: Final = nbytes
        self.writable: Final = writable
        self.far: Final = far


def _give_back(maker: int, context: Context, address: int, nbytes: int, fd: int) -> None:
    """A finalizer: nobody hears what it raises, so what fails is logged."""
    if fd >= 0:
        os.close(fd)
    if os.getpid() != maker:  # a forked child has no GPU
        return
    with context.current():
        for function in (driver.cuMemUnmap, driver.cuMemAddressFree):
            error, _ = outcome(function, address, nbytes)
            if error != driver.CUresult.CUDA_SUCCESS:
                log.warning("gpu_memory_not_given_back", call=function.__name__, error=str(error), nbytes=nbytes)


class Vmm:
    """Makes and maps memory for one GPU."""

    def __init__(self, context: Context, name: str) -> None:
        self._context = context
        self._name = name
        self._readonly: bool | None = None  # whether the driver maps read-only: not known yet
        with context.current():
            self.granularity: Final = int(
                call(
                    driver.cuMemGetAllocationGranularity,
                    self._properties(True),
                    driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
                )
            )

    def _properties(self, shared: bool) -> Any:
        found = driver.CUmemAllocationProp()
        found.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        found.location.id = self._context.index
        if shared:
            found.requestedHandleTypes = _FD
        return found

    def free(self) -> tuple[int, int]:
        """Bytes of the GPU: (free now, in all)."""
        with self._context.current():
            free, total = call(driver.cuMemGetInfo)
        return int(free), int(total)

    def create(self, nbytes: int, label: str, *, shared: bool) -> tuple[Mapping, int]:
        """(mapped memory of at least `nbytes` bytes, its descriptor if it is shared, else -1). The content is not defined."""
        if nbytes <= 0:
            raise ArenaError(f"{nbytes} bytes of GPU memory cannot be made; it needs at least one byte")
        nbytes = -(-nbytes // self.granularity) * self.granularity
        with self._context.current():
            error, handle = outcome(driver.cuMemCreate, nbytes, self._properties(shared), 0)
            if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                free, total = call(driver.cuMemGetInfo)
                raise ArenaError(
                    f"GPU {self._name} has no {nbytes} bytes for {label!r}: {free} of {total} bytes are free; give it room "
                    "(torch.cuda.empty_cache() gives back what torch keeps), or join with stage='host'"
                )
            if error != driver.CUresult.CUDA_SUCCESS:
                raise ArenaError(f"cuMemCreate of {nbytes} bytes for {label!r} on GPU {self._name} failed: {error!r}")
            fd = -1
            try:
                if shared:
                    fd = int(call(driver.cuMemExportToShareableHandle, handle, _FD, 0))
                    os.set_inheritable(fd, False)
                return self._mapped(handle, nbytes, True, fd), fd
            except ArenaError:
                if fd >= 0:
                    os.close(fd)
                raise
            finally:
                call(driver.cuMemRelease, handle)  # the map and the descriptor keep the memory

    def map(self, fd: int, nbytes: int, *, writable: bool) -> Mapping:
        """Another process's memory. The descriptor stays the caller's."""
        if nbytes <= 0 or nbytes % self.granularity:
            raise ArenaError(f"{nbytes} bytes are no GPU memory, which comes in multiples of {self.granularity}")
        with self._context.current():
            handle = call(
                driver.cuMemImportFromShareableHandle, fd, _FD,
                hint=f"descriptor {fd} is no GPU memory, or of a GPU that GPU {self._name}'s process can't see",
            )  # fmt: skip
            try:
                return self._mapped(handle, nbytes, writable, -1)
            finally:
                call(driver.cuMemRelease, handle)

    def _mapped(self, handle: Any, nbytes: int, writable: bool, fd: int) -> Mapping:
        address = int(call(driver.cuMemAddressReserve, nbytes, self.granularity, 0, 0))
        try:
            call(driver.cuMemMap, address, nbytes, 0, handle, 0,
                 hint=f"the memory may be smaller than the {nbytes} bytes that are told of it")  # fmt: skip
        except ArenaError:
            call(driver.cuMemAddressFree, address, nbytes)
            raise
        found = Mapping(address, nbytes, writable, self._is_far(handle))
        try:
            self._allow(address, nbytes, writable)
        except ArenaError:
            _give_back(os.getpid(), self._context, address, nbytes, -1)
            raise
        weakref.finalize(found, _give_back, os.getpid(), self._context, address, nbytes, fd).atexit = False
        return found

    def _is_far(self, handle: Any) -> bool:
        error, told = outcome(driver.cuMemGetAllocationPropertiesFromHandle, handle)
        return bool(error == driver.CUresult.CUDA_SUCCESS and told.location.id != self._context.index)

    def _allow(self, address: int, nbytes: int, writable: bool) -> None:
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._context.index
        if not writable and self._readonly is not False:
            access.flags = _ACCESS.CU_MEM_ACCESS_FLAGS_PROT_READ
            error, _ = outcome(driver.cuMemSetAccess, address, nbytes, [access], 1)
            if error not in _REFUSED:
                self._readonly = True
                if error == driver.CUresult.CUDA_SUCCESS:
                    return
            elif self._readonly is None:
                self._readonly = False
        access.flags = _ACCESS.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call(driver.cuMemSetAccess, address, nbytes, [access], 1,
             hint=f"GPU {self._name} may have no peer access to the GPU that the memory is on")  # fmt: skip

    @property
    def maps_readonly(self) -> bool | None:
        """Whether the driver maps read-only; None before it was tried."""
        return self._readonly


class CudaMemory:
    """One allocation or mapping. fd: stays this object's; -1 for mappings and scratch memory."""

    def __init__(self, device: Device, mapping: Mapping, fd: int) -> None:
        self._mapping: Mapping | None = mapping
        self._fd = fd
        self.device: Final = device
        self.nbytes: Final = mapping.nbytes

    def _open(self) -> Mapping:
        if self._mapping is None:
            raise ArenaError("this GPU memory is closed; map its descriptor again")
        return self._mapping

    @property
    def address(self) -> int:
        """Where it is mapped."""
        return self._open().address

    @property
    def fd(self) -> int:
        """The descriptor that owns it; -1 for mappings, scratch memory, and once it is closed."""
        return self._fd if self._mapping is not None else -1

    def strided(self, offset: int, shape: Sequence[int], strides_bytes: Sequence[int], itemsize: int) -> Strided:
        """An array over it. ArenaError if any element would lie outside, or it is closed."""
        mapping = self._open()
        within(self.nbytes, offset, shape, strides_bytes, itemsize)
        return Strided(mapping.address + offset, tuple(shape), tuple(strides_bytes), itemsize, self.device, mapping)

    def close(self) -> None:
        """Give it up; it is unmapped with the last array over it, and when copies that use it are done."""
        self._mapping = None


def registers_readonly(context: Context) -> bool:
    """Whether the driver registers host memory as read-only; where it can't, asking for it is an error."""
    return bool(context.attribute("READ_ONLY_HOST_REGISTER_SUPPORTED"))


class Registration:
    """Host memory that the GPU reaches, as long as this is there."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, context: Context, memory: npt.NDArray[np.uint8]) -> None:
        self.memory: Final = memory
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        if not memory.flags.writeable and registers_readonly(context):
            flags |= driver.CU_MEMHOSTREGISTER_READ_ONLY
        at = int(memory.ctypes.data)
        with context.current():
            hint = (
                f"{memory.nbytes} bytes may be more than may be page-locked here (ulimit -l), registered twice, or mapped "
                "read-only, which this driver may not register (MappedArena(fd, for_device=True) maps as is needed)"
            )
            call(driver.cuMemHostRegister, at, memory.nbytes, flags, hint=hint)
        weakref.finalize(self, _unregister, os.getpid(), context, memory).atexit = False


def _unregister(maker: int, context: Context, memory: npt.NDArray[np.uint8]) -> None:
    if os.getpid() != maker:
        return
    with context.current():
        error, _ = outcome(driver.cuMemHostUnregister, int(memory.ctypes.data))
    if error != driver.CUresult.CUDA_SUCCESS:
        log.warning("host_memory_not_unregistered", error=str(error), nbytes=memory.nbytes)


class Upload:
    """Bytes on the GPU, as long as this is alive. `ready`: an event after which they are there."""

    __slots__ = ("__weakref__", "address", "block", "ready")

    def __init__(self, address: int, block: _Block, ready: Any) -> None:
        self.address: Final = address
        self.block: Final = block
        self.ready: Final = ready


class _Block:
    """Page-locked host memory and as much of the GPU's."""

    def __init__(self, context: Context, vmm: Vmm, nbytes: int) -> None:
        self.mapping, _ = vmm.create(nbytes, "tables", shared=False)
        self.nbytes: Final = self.mapping.nbytes
        with context.current():
            self.host: Final = int(call(driver.cuMemHostAlloc, self.nbytes, driver.CU_MEMHOSTALLOC_PORTABLE))
        weakref.finalize(self, _free_host, os.getpid(), context, self.host).atexit = False
        self.uploads: weakref.WeakSet[Upload] = weakref.WeakSet()
        self.used = 0


def _free_host(maker: int, context: Context, address: int) -> None:
    if os.getpid() != maker:
        return
    with context.current():
        error, _ = outcome(driver.cuMemFreeHost, address)
    if error != driver.CUresult.CUDA_SUCCESS:
        log.warning("host_memory_not_freed", error=str(error))


class Tables:
    """Uploads tables on a stream of its own, so that none waits behind whatever the GPU hangs in. Any thread."""

    def __init__(self, context: Context, vmm: Vmm, stream: Any) -> None:
        self._context, self._vmm, self._stream = context, vmm, stream
        self._lock = threading.Lock()
        # Made ahead: taking memory may wait for whatever runs on the GPU.
        self._blocks = [_Block(context, vmm, _BLOCK)]

    def upload(self, *arrays: npt.NDArray[Any]) -> tuple[Upload, list[int]]:
        """(what keeps them, the address of each). Does not block."""
        places, end = [], 0
        for array in arrays:
            places.append(end)
            end += -(-max(array.nbytes, 1) // _APART) * _APART
        with self._lock:
            block = self._room(end)
            begin = block.used
            block.used += end
            for place, array in zip(places, arrays, strict=True):
                ctypes.memmove(block.host + begin + place, array.ctypes.data, array.nbytes)
            at = block.mapping.address + begin
            with self._context.current():
                call(driver.cuMemcpyHtoDAsync, at, block.host + begin, end, self._stream.handle)
            found = Upload(at, block, self._stream.record())
            block.uploads.add(found)
        return found, [at + place for place in places]

    def _room(self, nbytes: int) -> _Block:
        for block in self._blocks:
            if not len(block.uploads):
                block.used = 0
            if block.used + nbytes <= block.nbytes:
                return block
        self._blocks.append(_Block(self._context, self._vmm, max(_BLOCK, nbytes)))
        return self._blocks[-1]
