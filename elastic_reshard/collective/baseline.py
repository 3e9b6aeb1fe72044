"""Gather-and-broadcast, as frameworks refit today: the yardstick of the benchmark, and an oracle in tests.

The trainers' shards are gathered to full tensors (on every trainer, or on one root), the root broadcasts them to
every inference member, and each cuts out its own part. Tuned where that does not change what it is:
- a bucket holds full tensors shard by shard, so a gather lands in place and destinations cut straight out of it;
- the all-gather is one gloo broadcast per shard: measured 2.5 times as fast as gloo's own, which goes through
  temporary memory, and right for uneven shards; the gather is an alltoallv to the root, 3 times as fast as gloo's;
- one bucket is gathered while another is broadcast, and buffers are kept between calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from elastic_reshard.collective.baseline_groups import (
    BaselineGroups,
    alltoallv,
    broadcast,
    receive,
    send,
)
from elastic_reshard.collective.baseline_plan import (
    MIB,
    VARIANTS,
    BaselineOptions,
    Bucket,
    Copy,
    Piece,
    copies,
    plan,
    traffic,
)
from elastic_reshard.errors import (
    LayoutError,
    LayoutMismatch,
    PeerLost,
    PlanMismatch,
    TransferError,
    TransferTimeout,
    Violation,
)
from elastic_reshard.layout import ModelLayout, match
from elastic_reshard.transport.polling import whole_ms

__all__ = [
    "VARIANTS",
    "Baseline",
    "BaselineGroups",
    "BaselineOptions",
    "BaselineReport",
    "gather_and_broadcast",
]

# Point-to-point broadcasts go out in messages of this size, so that all receivers are kept busy together.
_MESSAGE = 4 * MIB
# Copies move elements of one size as integers: gloo and torch's copy kernels need not know fp8 or bf16.
_UNIT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True)
class BaselineReport:
    """What one rank saw of one refit. Bytes are those on the wire, forwarding in gloo's trees included."""

    seconds: float
    bytes_sent: int
    bytes_received: int
    buffer_bytes: int
    buckets: int
    cold: bool
    options: BaselineOptions


@dataclass(slots=True)
class _Flight:
    """A bucket on its way: works to wait for, then what to do with the buffer. `held` keeps sent memory alive."""

    bucket: Bucket
    buffer: Tensor
    works: list[dist.Work]
    held: list[Tensor]


class Baseline:
    """A refit planned once, with buffers that stay: the first `run` is cold (it touches them first), later ones warm.

    Every rank of `groups` must construct it and call `run` the same number of times. Constructing compares the plans
    of all ranks and forms the groups that are missing; it blocks up to the groups' timeout for each.

    Raises LayoutMismatch for layouts that do not fit (dtypes must be equal: nothing is cast), LayoutError for ranks
    that the groups do not list, PlanMismatch when ranks hold different layouts or options. A source rank may also
    be a destination.
    """

    def __init__(
        self,
        source_layout: ModelLayout,
        destination_layout: ModelLayout,
        groups: BaselineGroups,
        options: BaselineOptions | None = None,
    ) -> None:
        match(source_layout, destination_layout)
        self.options = options if options is not None else BaselineOptions()
        self.groups = groups
        self.layouts = {"source": source_layout, "destination": destination_layout}
        self._ranks = {side: _ranks(layout) for side, layout in self.layouts.items()}
        for side, listed in (("source", groups.sources), ("destination", groups.destinations)):
            unknown = self._ranks[side] - set(listed)
            if unknown:
                raise LayoutError(f"baseline: {side} layout names ranks {sorted(unknown)}, not in the groups' {listed}")
        self._targets = tuple(sorted(self._ranks["destination"]))
        self._agree()
        everything = plan(source_layout, self.options.pack)
        me = groups.rank
        self._mine = [b for b in everything if me in b.home or me in self._targets]
        self._copies: dict[int, list[Copy]] = {
            b.index: copies(b, destination_layout, me) if me in self._targets else [] for b in self._mine
        }
        self._sent, self._received = traffic(self._mine, self._targets, self.options, me)
        self._buffers: list[Tensor] = []
        self._runs, self._broken = 0, False
        if self.options.wire == "collectives":
            wanted = {ranks for b in everything for ranks in (b.home, self._spread(b)) if len(ranks) > 1}
            for ranks in sorted(wanted):
                if me in ranks:
                    groups.over(ranks)

    def run(self, source: Mapping[str, Tensor] | None, destination: Mapping[str, Tensor] | None) -> BaselineReport:
        """Move every tensor, in place into `destination`. Collective; blocks up to the groups' timeout.

        source, destination: this rank's local CPU tensors by name, of `layout.local_shape(rank)` and the layout's dtype,
        any strides; None for a side that this rank is no part of. Other ranks wait for a rank that raises LayoutMismatch
        here until their timeout. Raises PeerLost or TransferTimeout when the transfer breaks; destinations are not to
        be used then, and this object and its groups neither.
        """
        if self._broken:
            raise TransferError("this Baseline broke in an earlier run; form its groups and itself anew")
        begin = time.monotonic()
        deadline = begin + self.groups.timeout
        have, want = self._checked("source", source), self._checked("destination", destination)
        cold = not self._buffers
        if cold:
            self._buffers = self._allocate()
        self._broken = True  # until this run is through
        flights: list[_Flight | None] = [None] * self.options.depth
        for i, bucket in enumerate(self._mine):
            slot = i % self.options.depth
            self._finish(flights[slot], want, deadline)
            try:
                flights[slot] = self._start(bucket, self._buffers[slot], have, deadline)
            except RuntimeError as error:  # gloo says so already when it is to post
                raise self._broke(error, (*bucket.home, *self._spread(bucket)), deadline) from error
        for i in range(len(self._mine), len(self._mine) + self.options.depth):
            self._finish(flights[i % self.options.depth], want, deadline)
        self._broken = False
        return BaselineReport(
            time.monotonic() - begin,
            self._sent,
            self._received,
            sum(b.numel() for b in self._buffers),
            len(self._mine),
            cold,
            self.options,
        )

    def _agree(self) -> None:
        """Refuse, before anything moves, layouts or options that differ: unequal message sizes end a gloo process."""
        ids = [layout.content_id for layout in self.layouts.values()]
        digest = xxhash.xxh3_128(repr((ids, self.options, self._targets)).encode()).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        everyone = [torch.empty_like(own) for _ in range(self.groups.size)]
        deadline = time.monotonic() + self.groups.timeout
        self._wait([self.groups.world.allgather([everyone], [own])], deadline, range(self.groups.size))
        other = [rank for rank, theirs in enumerate(everyone) if not torch.equal(own, theirs)]
        if other:
            raise PlanMismatch(
                f"rank {self.groups.rank}: ranks {other} hold other layouts or baseline options than this one; "
                "nothing was moved. Give every rank the same."
            )

    def _checked(self, side: str, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """This rank's tensors as integers of their element size. LayoutMismatch with everything that is wrong."""
        rank, found, faults = self.groups.rank, {}, []
        for name, layout in self.layouts[side].items():
            shape = layout.local_shape(rank)
            if shape is None:
                continue
            given = tensors.get(name) if tensors is not None else None
            dtype: torch.dtype = getattr(torch, layout.dtype)
            if given is None:
                faults.append(Violation(name, "missing", f"rank {rank} gave no {side} tensor"))
            elif tuple(given.shape) != shape or given.dtype != dtype or given.device.type != "cpu":
                was = f"{given.dtype}{list(given.shape)} on {given.device}"
                faults.append(
                    Violation(name, "tensor", f"rank {rank}'s {side} is {was}, not {dtype}{list(shape)} on cpu")
                )
            else:
                found[name] = given.detach().view(_UNIT[dtype.itemsize])
        if faults:
            raise LayoutMismatch(faults)
        return found

    def _allocate(self) -> list[Tensor]:
        """One buffer per bucket in flight, as large as the largest that comes by."""
        rank, depth = self.groups.rank, self.options.depth
        need = [0] * depth
        for i, b in enumerate(self._mine):
            full = self.options.gather == "all" or rank == b.root or rank in self._targets
            nbytes = b.nbytes if full else b.shares[b.home.index(rank)].nbytes
            need[i % depth] = max(need[i % depth], nbytes)
        return [torch.empty(n, dtype=torch.uint8) for n in need]

    def _spread(self, bucket: Bucket) -> tuple[int, ...]:
        """The ranks of a bucket's broadcast, the root first."""
        return (bucket.root, *(d for d in self._targets if d != bucket.root))

    def _start(self, bucket: Bucket, buffer: Tensor, have: Mapping[str, Tensor], deadline: float) -> _Flight:
        """Post what this rank does for a bucket."""
        rank = self.groups.rank
        spread = self._spread(bucket)
        flight = _Flight(bucket, buffer, [], [])
        if rank in bucket.home:
            self._gather(flight, have)
            if rank in spread:
                # The broadcast reads, or writes again, what the gather puts there.
                self._wait(flight.works, deadline, bucket.home)
                flight.works = []
        if rank in spread and len(spread) > 1:
            whole = buffer[: bucket.nbytes]
            if self.options.wire == "p2p":
                self._spread_p2p(flight, whole, spread)
            else:
                flight.works.append(broadcast(self.groups.over(spread), whole, 0))
        return flight

    def _finish(self, flight: _Flight | None, want: Mapping[str, Tensor], deadline: float) -> None:
        """Wait for a bucket and take this rank's part out of it."""
        if flight is None:
            return
        bucket = flight.bucket
        self._wait(flight.works, deadline, {*bucket.home, *self._targets} - {self.groups.rank})
        for copy in self._copies[bucket.index]:
            local = want[copy.piece.tensor]
            _copy(local[copy.into], _piece(flight.buffer, copy.piece, 0, local.dtype)[copy.taken])

    def _gather(self, flight: _Flight, have: Mapping[str, Tensor]) -> None:
        """Bring the shares of a home together, on every rank of it or on the root."""
        bucket, buffer = flight.bucket, flight.buffer
        me = bucket.home.index(self.groups.rank)
        share = bucket.shares[me]
        everyone = self.options.gather == "all"
        full = everyone or me == 0 or self.groups.rank in self._targets
        base = 0 if full else share.start
        mine = buffer[share.start - base : share.stop - base]
        direct = None if everyone or me == 0 else _contiguous(share.pieces, share.nbytes, have)
        if direct is not None:
            mine = direct
            flight.held.append(direct)
        else:
            for piece in share.pieces:
                local = have[piece.tensor]
                box = tuple(slice(o, o + n) for o, n in zip(piece.local, piece.box.shape, strict=True))
                _copy(_piece(buffer, piece, base, local.dtype), local[box])
        if len(bucket.home) == 1:
            return
        if self.options.wire == "p2p":
            self._gather_p2p(flight, me, mine)
        elif everyone:
            group = self.groups.over(bucket.home)
            for i, s in enumerate(bucket.shares):
                if s.nbytes:
                    flight.works.append(broadcast(group, buffer[s.start : s.stop], i))
        else:
            flight.works.append(self._alltoallv(bucket, buffer, me, mine))

    def _alltoallv(self, bucket: Bucket, buffer: Tensor, me: int, mine: Tensor) -> dist.Work:
        """A gather that lands in place: everyone sends to the root alone. The root's own share is there already."""
        others = len(bucket.home) - 1
        nothing = buffer[:0]
        if me == 0:
            into, given = buffer[bucket.shares[0].stop : bucket.nbytes], nothing
            sizes, counts = [0, *(s.nbytes for s in bucket.shares[1:])], [0] * (others + 1)
        else:
            into, given = nothing, mine
            sizes, counts = [0] * (others + 1), [mine.numel()] + [0] * others
        group = self.groups.over(bucket.home)
        return alltoallv(group, into, given, sizes, counts)

    def _gather_p2p(self, flight: _Flight, me: int, mine: Tensor) -> None:
        bucket, world = flight.bucket, self.groups.world
        tag = 2 * bucket.index
        if me == 0 or self.options.gather == "all":
            for s in bucket.shares:
                if s.nbytes and s.holder != self.groups.rank:
                    flight.works.append(receive(world, flight.buffer[s.start : s.stop], s.holder, tag))
        to = bucket.home[:1] if self.options.gather == "root" else bucket.home[me + 1 :] + bucket.home[:me]
        flight.works += [send(world, mine, rank, tag) for rank in to if mine.numel() and rank != self.groups.rank]

    def _spread_p2p(self, flight: _Flight, whole: Tensor, spread: tuple[int, ...]) -> None:
        """From the root to each destination. Messages with one tag arrive in the order in which they were sent."""
        world, tag = self.groups.world, 2 * flight.bucket.index + 1
        for message in torch.split(whole, _MESSAGE):
            if self.groups.rank == spread[0]:
                flight.works += [send(world, message, rank, tag) for rank in spread[1:]]
            else:
                flight.works.append(receive(world, message, spread[0], tag))

    def _wait(self, works: Sequence[dist.Work], deadline: float, peers: Iterable[int]) -> None:
        """Wait for all works. The text of gloo's error names no culprit, so the message names all whom this rank needs."""
        for work in works:
            try:
                work.wait(whole_ms(deadline - time.monotonic()))
            except RuntimeError as error:
                raise self._broke(error, peers, deadline) from error

    def _broke(self, error: RuntimeError, peers: Iterable[int], deadline: float) -> PeerLost | TransferTimeout:
        """gloo's error in this project's words; its text does not name the culprit."""
        needed = sorted(set(peers) - {self.groups.rank})
        said = (
            f"rank {self.groups.rank}: gather-and-broadcast broke while it needed ranks {needed} ({error}). "
            "Do not use the destination tensors; see which of them ended, then form the groups anew."
        )
        return (TransferTimeout if time.monotonic() >= deadline else PeerLost)(said, needed)


def gather_and_broadcast(
    source: Mapping[str, Tensor] | None,
    destination: Mapping[str, Tensor] | None,
    source_layout: ModelLayout,
    destination_layout: ModelLayout,
    groups: BaselineGroups,
    *,
    options: BaselineOptions | None = None,
) -> BaselineReport:
    """One refit with a fresh `Baseline`: plan, compare, move. Collective; see `Baseline` and `Baseline.run`."""
    return Baseline(source_layout, destination_layout, groups, options).run(source, destination)


def _ranks(layout: ModelLayout) -> set[int]:
    return {int(r) for tensor in layout.values() for r in tensor.table.members}


def _piece(buffer: Tensor, piece: Piece, base: int, dtype: torch.dtype) -> Tensor:
    """A piece as it lies in a buffer whose first byte is byte `base` of the bucket."""
    at = piece.at - base
    return buffer[at : at + piece.nbytes].view(dtype).view(piece.box.shape)


def _contiguous(pieces: Sequence[Piece], nbytes: int, have: Mapping[str, Tensor]) -> Tensor | None:
    """The bytes of a share that is one contiguous part of a local tensor: sent from where they are. Else None."""
    if len(pieces) != 1 or pieces[0].nbytes != nbytes:
        return None
    piece = pieces[0]
    box = tuple(slice(o, o + n) for o, n in zip(piece.local, piece.box.shape, strict=True))
    part = have[piece.tensor][box]
    return part.view(-1).view(torch.uint8) if part.is_contiguous() else None


def _copy(into: Tensor, taken: Tensor) -> None:
    """Strided copy of equal shapes, 8 bytes at a time where rows allow it."""
    if into.dim() and _wide(into) and _wide(taken):
        into, taken = into.view(torch.int64), taken.view(torch.int64)
    into.copy_(taken)


def _wide(t: Tensor) -> bool:
    size = t.element_size()
    return (
        size < 8
        and t.stride(-1) == 1
        and t.shape[-1] * size % 8 == 0
        and t.storage_offset() * size % 8 == 0
        and all(s * size % 8 == 0 for s in t.stride()[:-1])
    )
