"""`nccl.m2n.reshard` as a fast way for the tensors of a refit that fit its limits (`plan.m2n` says which), before the rounds
of the rest, on the same communicator.

Only in a process that may be killed: once a call has been entered with a peer that is gone or frozen, neither abort, shrink
nor revoke returns (measured), so any failure from then on condemns the process (`FastRun.broken`). One thread makes all
calls. M2N is finalized when all of its work is done, before its communicator goes, and never after a failure.

A destination's cells are marked after a check: of every box that a source and a destination share, both look at a window (or,
when all is to be verified, at all of it), and the sender's digest must be the receiver's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol

import numpy as np

from elastic_reshard.arena.boxes import CopyTable
from elastic_reshard.arena.device import Device, DeviceMemory, Stream
from elastic_reshard.arena.strided import Strided
from elastic_reshard.errors import ArenaError, DigestMismatch, TransferError
from elastic_reshard.layout.box import Box
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.plan.m2n import Fast, FastPart, Piece, Side
from elastic_reshard.transport.network import GroupedNetwork

__all__ = ["Exchanged", "FastRun", "FastWatch", "Memory", "NcclM2n", "Reshard", "windows"]

_WINDOW: Final = 4 << 10
_BATCH: Final = 256 << 20  # bytes of calls between two checks
_SCRATCH: Final = 64 << 20
_ALIGN: Final = 16
_WORD: Final = 8
_STRIDE: Final = 0x9E3779B1


class Reshard(Protocol):
    """Whoever makes the calls. Collective: every rank enters the same calls in the same order. One thread."""

    def enter(self, call: Fast, source: Strided | None, target: Strided | None) -> None:
        """Launch one call; its memory stays as it is until the stream has done it. May block for as long as a peer is not
        there, and cannot be left. TransferError."""

    def finalize(self) -> None:
        """Give up all that it keeps of the communicator; all of its work is done. TransferError."""


class FastWatch(Protocol):
    """Whoever is responsible for a run. full, salt: as in `watched.Watch`; alike on all ranks."""

    full: bool
    salt: int

    def begin(self) -> None:
        """Asked before each batch of calls; may block (a member's window)."""

    def end(self) -> None:
        """A batch is over: nothing is launched or in flight."""

    def intact(self) -> bool:
        """Whether all memory that this rank sends from is still what it was at the beginning."""

    def landed(self, call: Fast, cells: tuple[int, int]) -> None:
        """This rank's region of a tensor is here and right: its cells are numbers [first, last) of the grid."""


@dataclass(frozen=True)
class Memory:
    """This rank's slots. source: by (party, source tensor's name); target: by (target, name). ArenaError from either."""

    source: Callable[[int, str], Strided]
    target: Callable[[int, str], Strided]


class NcclM2n:
    """The real one. communicator: ncclComm_t, formed, of exactly the ranks that the calls name.

    max_ctas: of its kernels; None: the library's own choice. Imports nccl.m2n; TransferError if it is not there.
    """

    def __init__(self, communicator: int, stream: Stream, max_ctas: int | None = None) -> None:
        try:
            m2n, core = import_module("nccl.m2n"), import_module("nccl.core")
        except ImportError as error:
            raise TransferError(
                f"nccl.m2n is not installed ({error}); nothing was moved. Install nccl-extensions on every host, or choose "
                'network="nccl"'
            ) from error
        self._m2n: Any = m2n
        self._errors = (m2n.NcclReshardError, core.NcclInvalid, ValueError, TypeError, RuntimeError)
        self._communicator, self._stream = communicator, stream
        self._handle = self._do("init", lambda: m2n.init(m2n.Config(max_cta=max_ctas)))

    def enter(self, call: Fast, source: Strided | None, target: Strided | None) -> None:
        m2n = self._m2n
        sides: dict[str, Any] = {}
        for name, side in (("src", call.source), ("dst", call.destination)):
            sides[f"{name}_mesh"] = m2n.Mesh(side.mesh, side.first)
            sides[f"{name}_placements"] = [m2n.Replicate() if dim is None else m2n.Shard(dim) for dim in side.cuts]
            sides[f"{name}_local_shape"] = side.local_shape(call.shape)
            sides[f"{name}_dtype"] = call.dtype
        pointers = [memory.address if memory is not None else None for memory in (source, target)]
        self._do(
            f"reshard {call.name}",
            lambda: m2n.reshard(*pointers, self._communicator, self._stream.handle, handle=self._handle, **sides),
        )

    def finalize(self) -> None:
        self._do("finalize", self._handle.destroy)

    def _do(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._errors as error:
            raise TransferError(
                f"nccl.m2n failed in {what}: {error}. Communicator and M2N are finished; this process must end, and the next "
                "epoch moves what has not landed"
            ) from error


class FastRun:
    """All calls of a part, by one rank. For one thread, once.

    part.calls must be the same on all ranks (`part.digest`), which is for the caller to see to before it is made. batch:
    bytes of calls between two checks; alike on all ranks.
    """

    def __init__(
        self,
        part: FastPart,
        rank: int,
        reshard: Callable[[], Reshard],
        network: GroupedNetwork,
        memory: Memory,
        watch: FastWatch,
        batch: int = _BATCH,
    ) -> None:
        self.rank, self.part, self._watch, self._batch = rank, part, watch, batch
        self._make, self._network, self._memory = reshard, network, memory
        self._entered = self._finished = False
        self.received = self.sent = 0

    @property
    def broken(self) -> bool:
        """Whether a call was entered that has not come to a good end: then this process can't leave its communicator. It must
        not say that it is out of all operations, and is to be condemned."""
        return self._entered and not self._finished

    def run(self, deadline: float) -> None:
        """Make all calls and check them. Collective over all ranks; blocks until `deadline` (time.monotonic) at most, but for
        calls that never return. received, sent: bytes of what was landed here, and of what the plan names this rank for.

        Raises TransferError (PeerLost, TransferTimeout) and DigestMismatch; see `broken`. ArenaError before anything is
        entered where a slot is not what the plan says.
        """
        if not self.part.calls:
            return
        thread = threading.get_ident()
        bound = [self._bind(call) for call in self.part.calls]
        reshard = self._make()
        checks = _Checks(self._network.device, self._network.stream)
        try:
            for batch in self._batches(bound):
                self._watch.begin()
                self._entered = True
                for one in batch:
                    if threading.get_ident() != thread:
                        raise TransferError("M2N is not thread-safe, and two threads use one run of it")
                    reshard.enter(one.call, one.source, one.target)
                self._checked(batch, checks, deadline)
                self._watch.end()
            reshard.finalize()
            self._finished = True
        finally:
            checks.close()

    def _bind(self, call: Fast) -> _Bound:
        source = target = None
        if self.rank in call.source.ranks:
            source = _of_side(self._memory.source(call.party, call.source_name), call, call.source)
        if self.rank in call.destination.ranks:
            target = _of_side(self._memory.target(call.target, call.name), call, call.destination)
        return _Bound(call, source, target)

    def _batches(self, bound: Sequence[_Bound]) -> Iterator[list[_Bound]]:
        """Cut by what the calls move in all, which every rank knows."""
        batch: list[_Bound] = []
        size = 0
        for one in bound:
            if batch and size + one.nbytes > self._batch:
                yield batch
                batch, size = [], 0
            batch.append(one)
            size += one.nbytes
        yield batch

    def _checked(self, batch: Sequence[_Bound], checks: _Checks, deadline: float) -> None:
        """Wait for a batch, and mark what agrees."""
        self._network.point().wait(deadline)
        intact = self._watch.intact()
        out = _Seals(batch, self.rank, self._watch, sends=True)
        into = _Seals(batch, self.rank, self._watch, sends=False)
        told, mine = checks.digests(out.parts, right=intact), checks.digests(into.parts)
        heard = checks.words(len(into.parts))
        if out.parts or into.parts:
            self._network.exchange(out.cut(told), into.cut(heard), deadline).wait(deadline)
        if not intact:
            raise TransferError(
                f"memory that rank {self.rank} sends from was rewritten while M2N read it; nobody has taken it. Publish again"
            )
        wrong = into.compare(checks.read(mine), checks.read(heard))
        if wrong:
            raise DigestMismatch(wrong)
        for one in batch:
            if one.target is not None:
                self.received += one.target.nbytes
                self._watch.landed(one.call, one.call.cells_of(self.rank))
        self.sent += out.nbytes


@dataclass(frozen=True)
class _Bound:
    call: Fast
    source: Strided | None
    target: Strided | None

    @property
    def nbytes(self) -> int:
        """Of all destinations together."""
        return sum(box.numel for box in self._boxes()) * itemsize(self.call.dtype)

    def _boxes(self) -> Iterator[Box]:
        return (self.call.destination.box(rank, self.call.shape) for rank in self.call.destination.ranks)


def _of_side(memory: Strided, call: Fast, side: Side) -> Strided:
    want = side.local_shape(call.shape)
    if memory.shape != want or memory.itemsize != itemsize(call.dtype) or not memory.contiguous:
        raise ArenaError(
            f"{call.name} lies in its slot as {memory.shape} with strides {memory.strides}, M2N needs {want} of "
            f"{call.dtype} without gaps; nothing was moved"
        )
    return memory


def windows(box: Box, item: int, *, full: bool, salt: int, most: int = _SCRATCH) -> Iterator[Box]:
    """What is looked at of a box: about 4 KiB of it in one box, at a place that follows from the salt; or all, in boxes of at
    most `most` bytes."""
    limit = most if full else _WINDOW
    lo, hi = list(box.lo), list(box.hi)
    for d in range(len(lo)):
        inner = item
        for a, b in zip(lo[d + 1 :], hi[d + 1 :], strict=True):
            inner *= b - a
        if inner * (hi[d] - lo[d]) <= limit:
            break
        step = max(1, limit // inner)
        if full and step < hi[d] - lo[d]:
            for at in range(lo[d], hi[d], step):
                part = Box((*lo[:d], at, *lo[d + 1 :]), (*hi[:d], min(at + step, hi[d]), *hi[d + 1 :]))
                yield from windows(part, item, full=True, salt=salt, most=most)
            return
        if full:
            continue
        at = lo[d] + (salt * _STRIDE + d) % (hi[d] - lo[d] - step + 1)
        lo[d], hi[d] = at, at + step
    yield Box(tuple(lo), tuple(hi))


class _Seals:
    """What this rank sends of a batch, or receives, as the windows that are looked at: by peer, in one order at both ends."""

    def __init__(self, batch: Sequence[_Bound], rank: int, watch: FastWatch, *, sends: bool) -> None:
        rows: dict[int, list[tuple[_Bound, Piece]]] = {}
        self.nbytes = 0
        for one in batch:
            for piece in one.call.pieces():
                if rank == (piece.sender if sends else piece.receiver):
                    rows.setdefault(piece.receiver if sends else piece.sender, []).append((one, piece))
                    self.nbytes += piece.box.numel * itemsize(one.call.dtype)
        self.peers: list[tuple[int, int]] = []  # and how many windows
        self.names: list[tuple[str, str, int]] = []  # (tensor, box, peer) of each window
        self.parts: list[Strided] = []
        for peer, pieces in sorted(rows.items()):
            before = len(self.parts)
            for number, (bound, piece) in enumerate(pieces):
                memory, side = (bound.source, bound.call.source) if sends else (bound.target, bound.call.destination)
                assert memory is not None
                for box in windows(piece.box, memory.itemsize, full=watch.full, salt=watch.salt + number):
                    self.parts.append(_within(memory, side, rank, bound.call, box))
                    self.names.append((bound.call.name, str(piece.box), peer))
            self.peers.append((peer, len(self.parts) - before))

    def cut(self, words: Strided | None) -> list[tuple[int, Strided]]:
        """(peer, its part of the words as bytes)."""
        found, at = [], 0
        for peer, count in self.peers:
            assert words is not None
            found.append((peer, words[(slice(at, at + count),)].as_bytes()))
            at += count
        return found

    def compare(self, mine: Sequence[int], heard: Sequence[int]) -> list[tuple[str, str, int]]:
        """(tensor, box, sender) of everything whose digests differ, each once."""
        wrong = [name for name, a, b in zip(self.names, mine, heard, strict=True) if a != b]
        return list(dict.fromkeys(wrong))


class _Checks:
    """Digests of boxes, on the device: gathered into scratch memory, in the stream's order."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._scratch: DeviceMemory | None = None
        self._made: list[DeviceMemory] = []

    def words(self, count: int) -> Strided | None:
        """So many u64 of device memory."""
        if not count:
            return None
        memory = self._device.scratch(count * _WORD)
        self._made.append(memory)
        return memory.strided(0, (count,), (_WORD,), _WORD)

    def digests(self, parts: Sequence[Strided], *, right: bool = True) -> Strided | None:
        """Launch: one u64 a part, as many at a time as the scratch memory holds. right: False for such as agree with none."""
        out = self.words(len(parts))
        if out is None:
            return None
        if self._scratch is None:
            self._scratch = self._device.scratch(_SCRATCH + _ALIGN)
            self._made.append(self._scratch)
        pairs: list[tuple[Strided, Strided]] = []
        places: list[Strided] = []
        at = first = 0
        for k, part in enumerate(parts):
            if at + part.nbytes > _SCRATCH:
                self._launch(pairs, places, out[(slice(first, k),)])
                at, first, pairs, places = 0, k, [], []
            flat = self._scratch.strided(at, (part.size,), (part.itemsize,), part.itemsize)
            pairs.append((flat.reshape(part.shape), part))
            # A byte more makes another digest, whatever that byte is.
            places.append(self._scratch.strided(at, (part.nbytes + (not right),), (1,), 1))
            at += -(-part.nbytes // _ALIGN) * _ALIGN
        self._launch(pairs, places, out[(slice(first, len(parts)),)])
        return out

    def _launch(self, pairs: Sequence[tuple[Strided, Strided]], places: Sequence[Strided], out: Strided) -> None:
        self._device.copy(CopyTable.of(pairs), self._stream)
        self._device.digest(places, 0, True, out, self._stream)  # all of it: these are windows already

    def read(self, words: Strided | None) -> list[int]:
        """Copied to the host; blocks until the stream has done it."""
        if words is None:
            return []
        found: list[int] = np.asarray(self._device.read(words, self._stream)).view(np.uint64).tolist()
        return found

    def close(self) -> None:
        """Give the scratch memory up."""
        for memory in self._made:
            memory.close()
        self._made.clear()


class Exchanged:
    """`Reshard` by a network's own groups: for machines and tests without M2N. Fills whole regions, as M2N does; calls never
    block, and nothing of a communicator is kept. deadline: of launching (time.monotonic)."""

    def __init__(self, network: GroupedNetwork, rank: int, deadline: float) -> None:
        self._network, self._rank, self._deadline = network, rank, deadline
        self._held: list[DeviceMemory] = []

    def enter(self, call: Fast, source: Strided | None, target: Strided | None) -> None:
        device, stream = self._network.device, self._network.stream
        sends: list[tuple[int, Strided]] = []
        receives: list[tuple[int, Strided]] = []
        before: list[tuple[Strided, Strided]] = []
        after: list[tuple[Strided, Strided]] = []
        for piece in call.pieces():
            if self._rank not in (piece.sender, piece.receiver):
                continue
            memory = device.scratch(piece.box.numel * itemsize(call.dtype))
            self._held.append(memory)
            flat = memory.strided(0, (piece.box.numel,), (itemsize(call.dtype),), itemsize(call.dtype))
            if self._rank == piece.sender and source is not None:
                before.append(
                    (flat.reshape(piece.box.shape), _within(source, call.source, self._rank, call, piece.box))
                )
                sends.append((piece.receiver, flat.as_bytes()))
            elif target is not None:
                after.append(
                    (_within(target, call.destination, self._rank, call, piece.box), flat.reshape(piece.box.shape))
                )
                receives.append((piece.sender, flat.as_bytes()))
        if before:
            device.copy(CopyTable.of(before), stream)
        if sends or receives:
            self._network.exchange(sends, receives, self._deadline)
        if after:
            device.copy(CopyTable.of(after), stream)

    def finalize(self) -> None:
        for memory in self._held:
            memory.close()
        self._held.clear()


def _within(memory: Strided, side: Side, rank: int, call: Fast, box: Box) -> Strided:
    begin = side.box(rank, call.shape).lo
    return memory[tuple(slice(a - o, b - o) for a, b, o in zip(box.lo, box.hi, begin, strict=True))]
