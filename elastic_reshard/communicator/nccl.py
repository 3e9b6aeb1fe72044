"""The NCCL backend, by nccl4py: nonblocking communicators whose state is asked for, and an abort by the raw binding.

What was measured shapes it. NCCL tells of no peer's death, so nothing here waits for it to. All ends need one config, also
shrunk and grown ones: it is part of what is told before anything forms. nccl4py's own `abort` deregisters windows first and can
block before the abort flag is set, so it is passed by. Ranks that share a GPU need few blocks each.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from elastic_reshard import interfaces
from elastic_reshard.arena.device import Device, Event, Stream
from elastic_reshard.arena.strided import Strided
from elastic_reshard.communicator.base import Backend, Capabilities, Communicator, Name, check_configs
from elastic_reshard.communicator.grouped import GroupedCommunicator
from elastic_reshard.communicator.store import ControlStore
from elastic_reshard.errors import PeerLost, ProtocolError, TransferError, TransferTimeout
from elastic_reshard.interfaces import Address, Told
from elastic_reshard.log import logger
from elastic_reshard.transport.network import Evidence
from elastic_reshard.transport.polling import poll

__all__ = ["NcclBackend", "nccl_config"]

_log = logger("communicator")

_SHARING: Final = "NCCL_MULTI_RANK_GPU_ENABLE"
_INTERFACE: Final = "NCCL_SOCKET_IFNAME"
# NVLink multicast serves collectives only, and takes memory and time when a communicator forms.
_MULTICAST: Final = "NCCL_NVLS_ENABLE"
# Blocks of a kernel where ranks share a GPU: with more, kernels that wait for each other do not run side by side.
_SHARED_CTAS: Final = 4
_SUCCESS, _SYSTEM, _REMOTE, _IN_PROGRESS = 0, 2, 6, 7
_BYTES: Final = 1  # ncclUint8
# Versions (as NCCL counts them) since which it can.
_SHRINKS: Final = 22700
_GROWS: Final = 22900
_ID, _GROWN_ID = "nccl/id", "nccl/grown"
# How long an abort lets a short call of the other thread return before it goes on over it.
_GRACE_S: Final = 0.2


class _Library(NamedTuple):
    """nccl4py: its stable face, its bindings, and the version of NCCL that was loaded."""

    core: Any
    raw: Any
    version: int


@cache
def _library() -> _Library:
    """Loaded at the first call; some tenths of a second where it was not imported before. Touches no GPU."""
    try:
        core, raw = importlib.import_module("nccl.core"), importlib.import_module("nccl.bindings.nccl")
        return _Library(core, raw, int(raw.get_version()))
    except (ImportError, RuntimeError, OSError) as error:
        raise ProtocolError(
            f"NCCL cannot be used here ({error}); install elastic-reshard[gpu] and an NCCL library, or choose network='gloo'"
        ) from error


def nccl_config() -> str:
    """What members must have alike to use NCCL together. Touches no GPU. ProtocolError where there is no NCCL."""
    library = _library()
    return f"nccl={library.version} nccl4py={importlib.import_module('nccl').__version__}"


class NcclBackend:
    """NCCL for one GPU of this process.

    interface: for its meeting and for networks without RDMA: a name or address, None: as the gloo backend chooses. The first
    `form` or `join` sets NCCL_SOCKET_IFNAME, NCCL_MULTI_RANK_GPU_ENABLE and NCCL_NVLS_ENABLE=0 for this process, unless they
    are set: NCCL reads them once. ProtocolError if NCCL is not there.
    """

    name = "nccl"

    def __init__(self, device: Device, interface: str | None = None) -> None:
        self.index = _index_of(device)
        self.device = device
        self.library = _library()
        self.machine = interfaces.machine()
        self.candidates = tuple(interfaces.addresses())
        wanted = interface or os.environ.get(interfaces.VARIABLE)
        self.address: Address = interfaces.choose(wanted, self.candidates, interfaces.resolved())
        version = self.library.version
        self.capabilities = Capabilities(can_shrink=version >= _SHRINKS, can_grow=version >= _GROWS)

    @property
    def config(self) -> str:
        """Versions. How many blocks a kernel has is agreed on when it forms."""
        return nccl_config()

    def form(self, store: ControlStore, rank: int, size: int, deadline: float, evidence: Evidence) -> Communicator:
        """As base.Backend. Refuses unlike versions, and ranks on one GPU where that was switched off, before it connects."""
        store.hold_until(deadline)
        self._set_up()
        with self.current():
            if rank == 0:
                store.set(_ID, bytes(self.library.core.get_unique_id()))
        agreed = self.met(store, rank, size)
        unique = self.library.core.UniqueId.from_bytes(store.get(_ID))
        made = self.library.core.Communicator()
        with self.calling(f"communicator {store.name}"), self.current():
            made.initialize(size, rank, unique, agreed.config)
        native = _Nccl(self, made, agreed)
        native.formed(None, deadline, store, evidence)
        return self._communicator(native, store.name, rank, size, evidence).greeted(deadline, store)

    def join(
        self, store: ControlStore, rank: int, size: int, fresh: Sequence[int], deadline: float, evidence: Evidence
    ) -> Communicator:
        """As base.Backend."""
        store.hold_until(deadline)
        self._set_up()
        agreed = self.met(store, rank, size)
        unique = self.library.core.UniqueId.from_bytes(store.get(_GROWN_ID))
        with self.calling(f"joining communicator {store.name}"), self.current():
            made = self.library.core.Communicator().grow(size, unique, rank=rank, config=agreed.config)
        native = _Nccl(self, made, agreed)
        native.formed(None, deadline, store, evidence)
        return self._communicator(native, store.name, rank, size, evidence).greeted(deadline, store)

    def met(self, store: ControlStore, rank: int, size: int) -> _Agreed:
        """Tell the others what this end is, and hear of all: what they agree on. Blocks until the store's deadline."""
        told = Told(self.machine, self.address, self.candidates, self.config)
        store.set(_told(rank), told.to_bytes())
        store.set(_gpu(rank), f"{self.device.id} {os.environ.get(_SHARING)}")
        keys = [key(r) for r in range(size) for key in (_told, _gpu)]
        store.vet(keys, lambda values: _vet(values, size))
        if size > 1:
            store.wait(keys)
        return _Agreed.of(self.library, self.config, [value.decode() for value in store.multi_get(keys[1::2])])

    @contextmanager
    def current(self) -> Iterator[None]:
        """This thread's calls are about this GPU. Contexts are a thread's own, and each guarded call has a thread."""
        torch.cuda.set_device(self.index)
        yield

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """A native call; its errors are ours."""
        try:
            yield
        except self.library.raw.NCCLError as error:
            raise _failure(what, int(getattr(error, "status", 0)), str(error)) from error

    def _set_up(self) -> None:
        os.environ.setdefault(_INTERFACE, f"={self.address.interface}")
        os.environ.setdefault(_SHARING, "1")
        os.environ.setdefault(_MULTICAST, "0")

    def _communicator(self, native: _Nccl, name: Name, rank: int, size: int, evidence: Evidence) -> GroupedCommunicator:
        return GroupedCommunicator(native, name, rank, size, self.device, evidence, self.capabilities)


class _Agreed(NamedTuple):
    """One config for all: NCCL's own, and as text."""

    config: Any
    text: str

    @classmethod
    def of(cls, library: _Library, text: str, gpus: Sequence[str]) -> _Agreed:
        if len(set(gpus)) < len(gpus):
            config = library.core.NCCLConfig(blocking=False, max_ctas=_SHARED_CTAS)
            return cls(config, f"{text} max_ctas={_SHARED_CTAS}")
        return cls(library.core.NCCLConfig(blocking=False), text)


class _Nccl:
    """grouped.Native on an NCCL communicator. Its pointer is used until it is let go of, then by nobody."""

    def __init__(self, backend: NcclBackend, made: Any, agreed: _Agreed) -> None:
        self._backend, self._made, self._agreed = backend, made, agreed
        self._lock = threading.Lock()
        self._inside = 0
        self._gone = False
        # What groups reach, until all are done: memory that is given back while a kernel waits makes the driver wait for it.
        self._held: list[object] = []
        self._last: Stream | None = None
        self._reached: Event | None = None  # the end of the last group, once that is on its stream

    @property
    def config(self) -> str:
        return self._agreed.text

    def formed(
        self, parent: _Nccl | None, deadline: float, store: ControlStore | None, evidence: Evidence = tuple
    ) -> None:
        """Wait until it is made; else it is aborted. A child's pointer is there when its parent's call has been taken up."""

        def look() -> None:
            if store is not None and store.error is not None:
                raise store.error

        try:
            if poll(
                lambda: (parent is None or parent.settled()) and bool(self._made.ptr) and self.settled(), deadline, look
            ):
                return
            ended = evidence()
            raise TransferTimeout(
                "NCCL did not connect all members by the deadline"
                + (f"; member(s) {', '.join(map(str, ended))} ended" if ended else "")
                + "; see whether they run, and form it anew under a new name",
                ended,
            )
        except BaseException:
            self.abort()
            raise

    def launch(
        self, sends: Sequence[tuple[int, Strided]], receives: Sequence[tuple[int, Strided]], stream: Stream
    ) -> None:
        raw, handle = self._backend.library.raw, stream.handle
        with self._call("a group") as pointer:
            self._let_go_of_what_is_done()
            self._held += [piece for _, piece in (*sends, *receives)]
            self._last, self._reached = stream, None
            raw.group_start()
            try:
                for peer, piece in receives:
                    raw.recv(piece.address, piece.nbytes, _BYTES, peer, pointer, handle)
                for peer, piece in sends:
                    raw.send(piece.address, piece.nbytes, _BYTES, peer, pointer, handle)
            finally:
                raw.group_end()

    def settled(self) -> bool:
        raw = self._backend.library.raw
        with self._call("its state", activate=False) as pointer:
            state = int(raw.comm_get_async_error(pointer))
            if state == _SUCCESS and self._last is not None:
                self._reached, self._last = self._last.record(), None
            if state in (_SUCCESS, _IN_PROGRESS):
                return state == _SUCCESS
            raise _failure("communicator", state, f"{raw.get_error_string(state)}; {raw.get_last_error(pointer)}")

    def _let_go_of_what_is_done(self) -> None:
        if self._reached is not None and self._reached.done():
            self._held.clear()

    def shrink(self, name: Name, excluded: Sequence[int], deadline: float) -> _Nccl:
        with self._call(f"shrinking to {name}"):
            made = self._made.shrink(list(excluded), config=self._agreed.config)
        child = _Nccl(self._backend, made, self._agreed)
        child.formed(self, deadline, None)
        return child

    def grow(self, store: ControlStore, rank: int, size: int, deadline: float) -> _Nccl:
        unique = None
        if rank == 0:
            with self._call(f"growing to {store.name}"):
                unique = self._made.get_unique_id()
            if not poll(self.settled, deadline):
                raise TransferTimeout(f"NCCL made no id for {store.name} in time; form it anew")
            store.set(_GROWN_ID, bytes(unique))
        agreed = self._backend.met(store, rank, size)
        with self._call(f"growing to {store.name}"):
            made = self._made.grow(size, unique, config=agreed.config)
        child = _Nccl(self._backend, made, agreed)
        child.formed(self, deadline, store)
        return child

    def close(self, deadline: float) -> None:
        raw = self._backend.library.raw
        with self._call("its end") as pointer:
            raw.comm_finalize(pointer)
        if not poll(self.settled, deadline):
            raise TransferTimeout("NCCL did not end a communicator in time; its members may be gone")
        self._let_go(raw.comm_destroy)

    def abort(self) -> None:
        self._let_go(self._backend.library.raw.comm_abort)

    def _let_go(self, by: Callable[[int], None]) -> None:
        """The last call. Another thread's short ones have a moment to return; one that is blocked is what an abort is for."""
        with self._lock:
            if self._gone:
                return
            self._gone = True
        begun = time.monotonic()
        poll(lambda: not self._inside, begun + _GRACE_S)
        pointer = int(self._made.ptr)
        if not pointer:
            return  # it was never made
        with self._backend.calling("its end"), self._backend.current():
            by(pointer)
        self._held.clear()  # its kernels have ended
        self._last = self._reached = None
        _log.info("nccl.left", by=getattr(by, "__name__", "?"), seconds=round(time.monotonic() - begun, 3))

    @contextmanager
    def _call(self, what: str, *, activate: bool = True) -> Iterator[int]:
        """A native call with the pointer; none once it was let go of."""
        with self._lock:
            if self._gone:
                raise TransferError("an NCCL communicator was used after its end; form a new one under a new name")
            self._inside += 1
        try:
            with self._backend.calling(what):
                if activate:
                    with self._backend.current():
                        yield int(self._made.ptr)
                else:
                    yield int(self._made.ptr)
        finally:
            with self._lock:
                self._inside -= 1


def _failure(what: str, status: int, text: str) -> TransferError:
    """NCCL's error, as ours. Whose fault it is NCCL does not know."""
    said = f"NCCL reports an error in {what}: {text.strip()[:300]}"
    if status in (_SYSTEM, _REMOTE):
        return PeerLost(f"{said}. A peer may be gone: form a new communicator")
    return TransferError(f"{said}. Form a new communicator under a new name")


def _told(rank: int) -> str:
    return f"told/{rank}"


def _gpu(rank: int) -> str:
    return f"gpu/{rank}"


def _vet(values: Mapping[str, bytes], size: int) -> None:
    told = {rank: Told.of(values[_told(rank)]) for rank in range(size)}
    check_configs({f"of rank {rank}": one.config for rank, one in told.items()})
    interfaces.refuse_loopback(told)
    gpus = {rank: values[_gpu(rank)].decode().rpartition(" ") for rank in range(size)}
    for gpu in {gpu for gpu, _, _ in gpus.values()}:
        ranks = [rank for rank, (other, _, _) in gpus.items() if other == gpu]
        refusing = [rank for rank in ranks if gpus[rank][2] != "1"]
        if len(ranks) > 1 and refusing:
            raise ProtocolError(
                f"ranks {ranks} share GPU {gpu}, but {_SHARING} is not 1 at rank(s) {refusing}; unset it, or give each member "
                "a GPU of its own"
            )


def _index_of(device: Device) -> int:
    """A GPU's number in this process."""
    if device.kind == "cuda":
        from elastic_reshard.arena.cuda import CudaDevice

        if isinstance(device, CudaDevice):
            return device.index
    raise ProtocolError(f"{device.id} is no GPU; NCCL moves the memory of GPUs only")


_: type[Backend] = NcclBackend  # the Protocol is kept
