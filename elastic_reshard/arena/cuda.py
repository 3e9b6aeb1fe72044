"""A GPU as a device: VMM memory behind descriptors, copies by one kernel launch or by copy engines, digests, streams.

Its context is torch's (the primary one). Imported only where a GPU is used, never before a fork.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from cuda.bindings import driver

from elastic_reshard.arena.boxes import CopyTable
from elastic_reshard.arena.cuda_memory import CudaMemory, Mapping, Registration, Tables, Upload, Vmm, registers_readonly
from elastic_reshard.arena.cuda_streams import CudaEvent, CudaStream
from elastic_reshard.arena.digests import pieces_of
from elastic_reshard.arena.driver import Context, call, uuid_of
from elastic_reshard.arena.engine import EngineOps, engine_ops, engine_part
from elastic_reshard.arena.kernels import THREADS, compiled
from elastic_reshard.arena.neighbours import Neighbours, joined, near_by_nvml
from elastic_reshard.arena.ranges import Ranges
from elastic_reshard.arena.strided import Strided, contiguous_strides
from elastic_reshard.errors import ArenaError

if TYPE_CHECKING:
    from elastic_reshard.arena.device import How, Stream

__all__ = ["CudaDevice", "CudaMemory", "CudaStream", "open_index", "open_uuid"]

# Of a piece that is digested whole, what one block takes at least.
_DIGEST_BYTES: Final = 32 << 10
# By engine, if there is host memory and an operation is worth its launch: engines leave the SMs to the member's own work.
_ENGINE_BYTES: Final = 256 << 10
# Pulls over NVLink between H200s: 391 GB/s by engines, 373 by any kernel; an engine's operation costs 5 us beside its bytes.
_FAR_ENGINE_BYTES: Final = 32 << 20
_TYPES: Final = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}

_lock = threading.Lock()
_devices: dict[int, CudaDevice] = {}


class _Exposed:
    """Memory as torch takes it."""

    def __init__(self, strided: Strided) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": strided.shape,
            "strides": strided.strides,
            "typestr": _TYPES[strided.itemsize],
            "data": (strided.address, False),
        }
        self.owner = strided.owner


class _Prepared:
    """What a device keeps of a table. there: the upload was seen to be done. far, rest: what engines pull from other GPUs, and
    the kernel's table of all else; None if the kernel does everything."""

    __slots__ = ("addresses", "far", "ops", "rest", "there", "upload")

    def __init__(self, upload: Upload, addresses: list[int], ops: EngineOps | None) -> None:
        self.upload, self.addresses, self.ops = upload, addresses, ops
        self.there = False
        self.far: EngineOps | None = None
        self.rest: CopyTable | None = None


class _Registered:
    def __init__(self, held: Registration) -> None:
        self._held: Registration | None = held
        self.address: Final = int(held.memory.ctypes.data)
        self.nbytes: Final = held.memory.nbytes

    def close(self) -> None:
        self._held = None


class CudaDevice:
    """One GPU of this process. `open_index` and `open_uuid` make it, one of each."""

    kind: Final[Literal["cuda"]] = "cuda"

    def __init__(self, index: int) -> None:
        self.id: Final = uuid_of(index)
        self.index: Final = index
        self._context = Context(index)
        major, minor = (self._context.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        self._reads_registered = bool(self._context.attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"))
        self._vmm = Vmm(self._context, self.id)
        self._hosts: Ranges[Registration] = Ranges()
        self._registered: weakref.WeakValueDictionary[tuple[int, int], Registration] = weakref.WeakValueDictionary()
        self._flying: list[tuple[CudaEvent, object]] = []
        self._full = 32  # then they are looked through
        self._lock = threading.Lock()
        with self._context.current():
            self._module = call(driver.cuModuleLoadData, compiled(f"sm_{major}{minor}"))
            names = (b"copy_table", b"digest_begin", b"digest_add")
            self._copy, self._begin, self._add = (
                call(driver.cuModuleGetFunction, self._module, name) for name in names
            )
        self._own = self.stream()
        self._tables = Tables(self._context, self._vmm, self.stream())

    def __repr__(self) -> str:
        return f"CudaDevice({self.index}, {self.id})"

    @property
    def maps_readonly(self) -> bool | None:
        """Whether `map(writable=False)` keeps this process from writing; None before it was tried."""
        return self._vmm.maps_readonly

    @property
    def registers_readonly(self) -> bool:
        """Whether `host` can keep the GPU from writing; without that it reaches writable maps only."""
        return registers_readonly(self._context)

    def create(self, nbytes: int, label: str) -> CudaMemory:
        """Zeroed memory owned by a descriptor, its size rounded up. Blocks some ms a GiB. ArenaError, with figures, if there
        is not enough."""
        mapping, fd = self._vmm.create(nbytes, label, shared=True)
        memory = CudaMemory(self, mapping, fd)
        with self._context.current():
            call(driver.cuMemsetD8Async, memory.address, 0, memory.nbytes, self._own.handle)
        self._own.synchronize()
        return memory

    def map(self, fd: int, nbytes: int, *, writable: bool) -> CudaMemory:
        """Another process's memory, of this GPU or of one that it has access to; takes the descriptor over and closes it, also
        when it raises. About 1 ms."""
        try:
            return CudaMemory(self, self._vmm.map(fd, nbytes, writable=writable), -1)
        finally:
            os.close(fd)

    def scratch(self, nbytes: int) -> CudaMemory:
        """Memory of this process alone; its content is not defined."""
        return CudaMemory(self, self._vmm.create(nbytes, "scratch", shared=False)[0], -1)

    def host(self, memory: npt.NDArray[np.uint8]) -> _Registered:
        """Let the GPU reach host memory: page-locks it. ArenaError if the system does not let us."""
        if not self._reads_registered:
            raise ArenaError(
                f"GPU {self.id} can't use the addresses of registered host memory; join with stage='device'"
            )
        at = int(memory.ctypes.data)
        with self._lock:
            held = self._registered.get((at, memory.nbytes))
            if held is None:
                held = self._registered[at, memory.nbytes] = Registration(self._context, memory)
                self._hosts.add(at, at + memory.nbytes, held)
        return _Registered(held)

    def prepare(self, table: CopyTable) -> None:
        """Upload a table, and find out what engines would have to do."""
        self._prepared(table)

    def _prepared(self, table: CopyTable) -> _Prepared:
        found: _Prepared | None = table.uploaded.get(self.id)
        if found is None:
            if any(isinstance(owner, Mapping) and not owner.writable for owner in table.targets):
                raise ArenaError("a copy would write to memory that is mapped read-only; map it writable")
            upload, addresses = self._tables.upload(table.entries, table.tiles)
            found = _Prepared(upload, addresses, engine_ops(table) if table.hosts else None)
            far = [(o.address, o.address + o.nbytes) for o in table.owners if isinstance(o, Mapping) and o.far]
            if far and not table.hosts:
                ops, rest = engine_part(table, far, _FAR_ENGINE_BYTES)
                if ops:
                    found.far, found.rest = ops, rest
                if found.rest is not None:
                    self._prepared(found.rest)
            table.uploaded[self.id] = found
        return found

    def copy(self, table: CopyTable, stream: Stream, how: How | None = None) -> None:
        """Launch all copies of a table. how: None for engines where host memory takes part in large runs, and for large boxes
        of other GPUs' memory, else the kernel.

        On a stream that is captured into a graph: by the kernel, of a table that was prepared before; whoever captures keeps
        the table, and registered host memory, for as long as the graph."""
        held = self._hosts.keepers(table.hosts)
        if not len(table):
            return
        with self._context.current():  # once, for all the calls of a launch
            if self._captures(stream):
                self._capture(table, stream)
                return
            self._start(table, self._prepared(table), stream, how)
            self._fly(stream, table, held)

    def _start(self, table: CopyTable, prepared: _Prepared, stream: Stream, how: How | None) -> None:
        if how is None and prepared.far is not None:
            if prepared.rest is not None:
                self._by_kernel(prepared.rest, self._prepared(prepared.rest), stream)
            self._by_engine(prepared.far, stream)
            return
        if how is None:
            ops = prepared.ops
            how = "engine" if ops is not None and table.nbytes >= _ENGINE_BYTES * len(ops) else "kernel"
        if how == "engine":
            if prepared.ops is None:
                prepared.ops = engine_ops(table)
            self._by_engine(prepared.ops, stream)
        else:
            self._by_kernel(table, prepared, stream)

    def _by_kernel(self, table: CopyTable, prepared: _Prepared, stream: Stream) -> None:
        if not prepared.there:
            prepared.there = prepared.upload.ready.reached()
            if not prepared.there:
                stream.wait(prepared.upload.ready)
        self._by_table(table, prepared, stream)

    def _by_table(self, table: CopyTable, prepared: _Prepared, stream: Stream) -> None:
        args = tuple(prepared.addresses), (ctypes.c_uint64, ctypes.c_uint64)
        self._launch(self._copy, (len(table.tiles), 1), args, stream)

    def _captures(self, stream: Stream) -> bool:
        if not stream.handle:  # the default stream is never captured, and asking may break another's capture
            return False
        with self._context.current():
            status = call(driver.cuStreamIsCapturing, stream.handle)
        return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def _capture(self, table: CopyTable, stream: Stream) -> None:
        """Nothing in a capture may wait for what lies outside of it, nor be asked whether it is done: the upload is waited for
        by the host, and no event is left behind."""
        prepared: _Prepared | None = table.uploaded.get(self.id)
        if prepared is None:
            raise ArenaError("a table is uploaded before it is captured into a graph; call `prepare` with it first")
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with self._context.current():
            before = call(driver.cuThreadExchangeStreamCaptureMode, relaxed)
            try:
                call(driver.cuEventSynchronize, prepared.upload.ready.handle)
            finally:
                call(driver.cuThreadExchangeStreamCaptureMode, before)
        self._by_table(table, prepared, stream)

    def _launch(
        self, kernel: Any, grid: tuple[int, int], args: tuple[tuple[Any, ...], tuple[Any, ...]], stream: Stream
    ) -> None:
        with self._context.current():
            call(driver.cuLaunchKernel, kernel, *grid, 1, THREADS, 1, 1, 0, stream.handle, args, 0)

    def _by_engine(self, ops: EngineOps, stream: Stream) -> None:
        with self._context.current():
            if ops.runs and stream.handle:
                order = driver.CUmemcpyAttributes()
                order.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
                targets, sources, sizes = (list(column) for column in zip(*ops.runs, strict=True))
                targets, sources = ([driver.CUdeviceptr(at) for at in column] for column in (targets, sources))
                args = targets, sources, sizes, len(sizes), [order], [0], 1, stream.handle
                call(driver.cuMemcpyBatchAsync, *args)
            elif ops.runs:  # torch's default stream takes no batches
                for target, source, nbytes in ops.runs:
                    call(driver.cuMemcpyAsync, target, source, nbytes, stream.handle)
            for op in ops.pitched:
                box = driver.CUDA_MEMCPY2D()
                box.srcMemoryType = box.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
                box.dstDevice, box.srcDevice = op.target, op.source
                box.dstPitch, box.srcPitch = op.target_pitch, op.source_pitch
                box.WidthInBytes, box.Height = op.nbytes, op.rows
                call(driver.cuMemcpy2DAsync, box, stream.handle)

    def _fly(self, stream: Stream, *things: object) -> None:
        """Keep things until what was launched so far is done."""
        event = self.event_of(stream)
        with self._lock:
            self._flying.append((event, things))
            full = len(self._flying) >= self._full
        if full:
            self.settle()
            self._full = 2 * len(self._flying) + 32

    def settle(self) -> None:
        """Let go of what launches that are done have used. Called by streams and events, too."""
        with self._lock:
            flying, self._flying = self._flying, []
        waiting = [entry for entry in flying if not entry[0].reached()]
        with self._lock:
            self._flying += waiting

    def event_of(self, stream: Stream) -> CudaEvent:
        """The point that a stream has reached now."""
        return CudaEvent(self, self._context, stream.handle)

    def cast(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: Stream) -> None:
        """Launch torch's conversions: one or few launches for all that lie together in their memory, one each for the rest."""
        alike: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        on = torch.cuda.default_stream(self.index)
        if stream.handle:
            on = torch.cuda.ExternalStream(stream.handle, device=self.index)  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.cuda.stream(on):
            for target, source in zip(targets, sources, strict=True):
                if target.is_cuda and source.is_cuda and target.is_contiguous() and source.is_contiguous():
                    alike.setdefault((target.dtype, source.dtype), []).append((target, source))
                else:
                    target.copy_(source, non_blocking=True)
            for pairs in alike.values():
                torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs], non_blocking=True)
        self._fly(stream, list(targets), list(sources))

    def digest(
        self,
        pieces: Sequence[Strided],
        salt: int,
        full: bool,
        out: Strided,
        stream: Stream,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Launch: one u64 for each contiguous piece into `out`, as `digests.digest_on_host` would."""
        if out.shape != (len(pieces),) or out.itemsize != 8 or not out.contiguous:
            raise ArenaError(f"digests of {len(pieces)} pieces don't fit {out.shape} elements of {out.itemsize} bytes")
        if not pieces:
            return
        table = pieces_of(pieces, salt, full, numbers)
        share = max(1, min(64, int(table["nbytes"].max()) // _DIGEST_BYTES))
        with self._context.current():  # once, for all the calls
            upload, (at,) = self._tables.upload(table)
            stream.wait(upload.ready)
            begin = (at, len(table), out.address), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
            self._launch(self._begin, (-(-len(table) // THREADS), 1), begin, stream)
            add = (at, out.address), (ctypes.c_uint64, ctypes.c_uint64)
            self._launch(self._add, (len(table), share), add, stream)
            self._fly(stream, upload, [p.owner for p in pieces], out.owner)

    def stream(self) -> CudaStream:
        """A new one, beside all others and torch's default one."""
        with self._context.current():
            made = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return CudaStream(self, self._context, int(made), owned=True)

    def current(self) -> CudaStream:
        """The one that the caller's torch code uses now, in this thread."""
        return CudaStream(self, self._context, torch.cuda.current_stream(self.index).cuda_stream, owned=False)

    def free(self) -> tuple[int, int]:
        """Bytes of the GPU: (free now, in all). What torch keeps cached is not free."""
        return self._vmm.free()

    def neighbours(self) -> Neighbours:
        """By NVML for all GPUs of the machine; of those that this process sees, by the driver itself, whose word counts."""
        told, cluster, clique = near_by_nvml(self.id)
        visible = {}
        for index in range(torch.cuda.device_count()):
            if index != self.index:
                other = call(driver.cuDeviceGet, index)
                can = call(driver.cuDeviceCanAccessPeer, self._context.device, other)
                visible[uuid_of(index)] = bool(can)
        return joined([told, visible], cluster, clique)

    def tensor(self, strided: Strided, dtype: torch.dtype) -> torch.Tensor:
        """The same memory as a tensor, which keeps it mapped; no copy. ArenaError for memory of another GPU."""
        if dtype.itemsize != strided.itemsize:
            raise ArenaError(f"elements of {strided.itemsize} bytes are no {dtype}")
        if not strided.size:
            return torch.empty(strided.shape, dtype=dtype, device=f"cuda:{self.index}")
        found: torch.Tensor = torch.as_tensor(_Exposed(strided)).view(dtype)
        if found.device.index != self.index:
            raise ArenaError(
                f"memory on cuda:{found.device.index} is no tensor of cuda:{self.index}; copy it by its address"
            )
        return found

    def read(self, strided: Strided, stream: Stream) -> npt.NDArray[Any]:
        """Its elements, copied to the host, as unsigned integers; blocks."""
        if not strided.contiguous:
            packed = self.scratch(strided.nbytes).strided(
                0, strided.shape, contiguous_strides(strided.shape, strided.itemsize), strided.itemsize
            )
            self.copy(CopyTable.of([(packed, strided)]), stream)
            return self.read(packed, stream)
        found = np.empty(strided.shape, dtype=_TYPES[strided.itemsize].replace("i", "u"))
        if found.nbytes:
            with self._context.current():
                call(driver.cuMemcpyDtoHAsync, int(found.ctypes.data), strided.address, found.nbytes, stream.handle)
        stream.synchronize()
        return found


def open_index(index: int) -> CudaDevice:
    """The GPU of that number in this process (as in "cuda:0"). About 0.5 s at the first call. ArenaError if there is none."""
    if not torch.cuda.is_available() or not 0 <= index < torch.cuda.device_count():
        raise ArenaError(f"this process sees no CUDA device {index}; look at CUDA_VISIBLE_DEVICES and the driver")
    with _lock:
        if index not in _devices:
            call(driver.cuInit, 0)
            _devices[index] = CudaDevice(index)
        return _devices[index]


def open_uuid(identity: str) -> CudaDevice:
    """The GPU of that UUID, with or without "GPU-" before it. ArenaError if this process doesn't see it."""
    wanted = identity.lower().removeprefix("gpu-")
    seen = []
    if torch.cuda.is_available():
        call(driver.cuInit, 0)
        seen = [uuid_of(index) for index in range(torch.cuda.device_count())]
    if wanted not in seen:
        raise ArenaError(f"this process does not see GPU {identity}, only {seen}; look at CUDA_VISIBLE_DEVICES")
    return open_index(seen.index(wanted))
