"""What gather-and-broadcast moves, bucket by bucket. Pure: layouts in, plain data out; no torch.

A *home* is a set of source ranks that hold the same tensors (all trainers, or one pipeline stage), reduced to those
that are the first holder of some region: replicas send nothing. A *bucket* is what one gather and one broadcast move:
some full tensors, arranged shard by shard, so that a home rank's share is one run of bytes and a gather lands in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_reshard.errors import LayoutError
from elastic_reshard.layout import Box, ModelLayout, TensorLayout
from elastic_reshard.layout.dtypes import itemsize

__all__ = [
    "MIB",
    "VARIANTS",
    "BaselineOptions",
    "Bucket",
    "Copy",
    "Piece",
    "Share",
    "copies",
    "plan",
    "traffic",
]

MIB = 1 << 20
# Pieces begin at multiples of the largest element, so that each can be viewed as its own dtype.
ALIGN = 16


@dataclass(frozen=True, slots=True)
class BaselineOptions:
    """gather: "all": every trainer gets the full tensors; "root": only the first trainer does.
    pack: bytes of full tensors per bucket; None: one tensor after another.
    wire: "collectives": gloo's collectives; "p2p": sends and receives.
    depth: buckets in flight per rank, so that one is gathered while another is broadcast; each has a buffer.

    Raises LayoutError for values outside of these.
    """

    gather: Literal["all", "root"] = "all"
    pack: int | None = 64 * MIB
    wire: Literal["collectives", "p2p"] = "collectives"
    depth: int = 2

    def __post_init__(self) -> None:
        if self.gather not in ("all", "root") or self.wire not in ("collectives", "p2p"):
            raise LayoutError(
                f"baseline: gather={self.gather!r} must be 'all' or 'root', wire={self.wire!r} 'collectives' or 'p2p'"
            )
        if self.depth < 1 or (self.pack is not None and self.pack < 1):
            raise LayoutError(f"baseline: depth={self.depth} and pack={self.pack} must be at least 1")

    def __str__(self) -> str:
        size = "per tensor"
        if self.pack is not None:
            whole = self.pack % MIB == 0
            size = f"{self.pack // MIB} MiB buckets" if whole else f"buckets of {self.pack} bytes"
        return f"{'all-gather' if self.gather == 'all' else 'one root'} + broadcast, {size}, {self.wire}"


# Every variant that a benchmark compares.
VARIANTS: tuple[BaselineOptions, ...] = tuple(
    BaselineOptions(gather, pack, wire)
    for gather in ("all", "root")
    for pack in (None, 64 * MIB)
    for wire in ("collectives", "p2p")
)


@dataclass(frozen=True, slots=True)
class Piece:
    """`box` of the global tensor, at byte `at` of the bucket; begins at index `local` of the holder's local tensor."""

    tensor: str
    box: Box
    local: tuple[int, ...]
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one home rank brings to a bucket: bytes start..stop (a multiple of 16), perhaps none."""

    holder: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes, with the padding between pieces."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Bucket:
    """One gather and one broadcast. `home`: its source ranks, the root first; `shares` in the same order."""

    index: int
    home: tuple[int, ...]
    shares: tuple[Share, ...]

    @property
    def root(self) -> int:
        """The rank that broadcasts."""
        return self.home[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole bucket."""
        return self.shares[-1].stop


@dataclass(frozen=True, slots=True)
class Copy:
    """Out of a bucket into a local tensor: `piece`, cut to `taken` (slices of the piece), goes to `into`."""

    piece: Piece
    taken: tuple[slice, ...]
    into: tuple[slice, ...]


# One region's next part: (tensor, global box, index in the holder's local tensor, bytes), by holder.
_Chunk = Mapping[int, Sequence[tuple[str, Box, tuple[int, ...], int]]]


def plan(source: ModelLayout, pack: int | None) -> list[Bucket]:
    """The buckets of a refit, in the order in which every rank goes through them; those of several homes take turns."""
    homes: dict[tuple[int, ...], list[str]] = {}
    for name, layout in source.items():
        homes.setdefault(tuple(layout.table.members.tolist()), []).append(name)
    lines: list[list[Bucket]] = []
    for names in homes.values():
        holders = {int(r) for n in names for r in _first_holders(source[n])}
        if holders:
            home = tuple(sorted(holders))
            parts = itertools.chain.from_iterable(_chunks(n, source[n], pack) for n in names)
            lines.append([_bucket(home, chunk) for chunk in _binned(parts, pack)])
    turns = itertools.chain.from_iterable(itertools.zip_longest(*lines))
    ordered = (bucket for bucket in turns if bucket is not None)
    return [Bucket(i, bucket.home, bucket.shares) for i, bucket in enumerate(ordered)]


def copies(bucket: Bucket, destination: ModelLayout, rank: int) -> list[Copy]:
    """What `rank` takes out of a bucket. Empty for a rank outside of the destination."""
    found = []
    boxes: dict[str, list[tuple[Box, tuple[int, ...]]]] = {}
    for piece in (p for share in bucket.shares for p in share.pieces):
        if piece.tensor not in boxes:
            boxes[piece.tensor] = destination[piece.tensor].boxes(rank)
        for box, local in boxes[piece.tensor]:
            common = box.intersect(piece.box)
            if common is not None:
                origin = tuple(a - b for a, b in zip(box.lo, local, strict=True))
                found.append(Copy(piece, common.slices(piece.box.lo), common.slices(origin)))
    return found


def traffic(
    buckets: Iterable[Bucket], destinations: Sequence[int], options: BaselineOptions, rank: int
) -> tuple[int, int]:
    """(bytes sent, bytes received) by one rank, forwarding inside gloo's broadcast trees included."""
    sent = received = 0
    for b in buckets:
        spread = (b.root, *(d for d in destinations if d != b.root))
        if rank in b.home:
            me, n = b.home.index(rank), len(b.home)
            own = b.shares[me].nbytes
            if options.gather == "all" or me == 0:
                received += b.nbytes - own
            if options.gather == "root":
                sent += own if me else 0
            elif options.wire == "p2p":
                sent += own * (n - 1)
            else:
                sent += sum(s.nbytes * _children((me - i) % n, n) for i, s in enumerate(b.shares))
        if rank in spread:
            me, n = spread.index(rank), len(spread)
            received += b.nbytes if me else 0
            if options.wire == "p2p":
                sent += 0 if me else b.nbytes * (n - 1)
            else:
                sent += b.nbytes * _children(me, n)
    return sent, received


def _children(rank: int, size: int) -> int:
    """To how many ranks gloo's binomial broadcast tree sends on from `rank`, counted from the root."""
    return sum(1 for i in range(size.bit_length()) if rank < 1 << i and rank + (1 << i) < size)


def _first_holders(layout: TensorLayout) -> list[int]:
    """The first holder of each region."""
    table = layout.table
    return [int(r) for r in table.ranks[table.ptr[:-1]]]


def _chunks(name: str, layout: TensorLayout, pack: int | None) -> Iterator[_Chunk]:
    """A tensor, whole if it fits into `pack` bytes, else cut into parts that do: the j-th part of every region."""
    table, size = layout.table, itemsize(layout.dtype)
    held: list[tuple[int, Box, tuple[int, ...], list[Box]]] = []
    for k, holder in enumerate(_first_holders(layout)):
        box = Box(tuple(table.lo[k].tolist()), tuple(table.hi[k].tolist()))
        local = tuple(table.local[table.ptr[k]].tolist())
        cut = pack is not None and layout.nbytes > pack
        limit = max(1, box.numel * pack // layout.nbytes) if cut and pack is not None else box.numel
        held.append((holder, box, local, _cut(box, limit)))
    for j in range(max((len(parts) for *_, parts in held), default=0)):
        chunk: dict[int, list[tuple[str, Box, tuple[int, ...], int]]] = {}
        for holder, box, local, parts in held:
            if j < len(parts):
                part = parts[j]
                at = tuple(o + p - b for o, p, b in zip(local, part.lo, box.lo, strict=True))
                chunk.setdefault(holder, []).append((name, part, at, part.numel * size))
        yield chunk


def _cut(box: Box, limit: int) -> list[Box]:
    """Parts of at most `limit` elements each, in C order, cut along the outermost dims so that they stay contiguous."""
    if box.numel <= limit:
        return [box]
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    step = max(1, limit // (box.numel // box.shape[dim]))
    parts = []
    for a in range(box.lo[dim], box.hi[dim], step):
        lo, hi = list(box.lo), list(box.hi)
        lo[dim], hi[dim] = a, min(a + step, box.hi[dim])
        parts += _cut(Box(tuple(lo), tuple(hi)), limit)
    return parts


def _binned(chunks: Iterable[_Chunk], pack: int | None) -> Iterator[list[_Chunk]]:
    """Chunks in their order, as many to a bucket as fit; one to a bucket without `pack`."""
    held: list[_Chunk] = []
    filled = 0
    for chunk in chunks:
        nbytes = sum(_aligned(part[3]) for parts in chunk.values() for part in parts)
        if held and (pack is None or filled + nbytes > pack):
            yield held
            held, filled = [], 0
        held.append(chunk)
        filled += nbytes
    if held:
        yield held


def _bucket(home: tuple[int, ...], chunks: Sequence[_Chunk]) -> Bucket:
    at = 0
    shares = []
    for holder in home:
        start, pieces = at, []
        for chunk in chunks:
            for name, box, local, nbytes in chunk.get(holder, ()):
                pieces.append(Piece(name, box, local, at, nbytes))
                at += _aligned(nbytes)
        shares.append(Share(holder, start, at, tuple(pieces)))
    return Bucket(-1, home, tuple(shares))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
