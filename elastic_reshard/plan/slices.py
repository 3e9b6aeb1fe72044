"""One member's slice of a plan: its legs in the order in which they move, cut into rounds and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from elastic_reshard.layout.correspondence import Correspondence
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.layout.table import Int
from elastic_reshard.plan.legs import Kind, Legs
from elastic_reshard.plan.overlap import ragged
from elastic_reshard.plan.rounds import Rounds

__all__ = ["Slice", "TensorRef", "assemble"]

# A leg of this many bytes travels alone: packing it with others would cost its receiver a copy, and a message of its
# own costs gloo less than that copy (measured; below it messages are shared).
ALONE = 96 << 10


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A destination tensor of a plan: which target layout, name, dtype of what travels, dims, and by which (source,
    correspondence) its parts come."""

    target: int
    name: str
    dtype: str
    dims: int
    ways: tuple[tuple[int, Correspondence], ...]


@dataclass(frozen=True, eq=False)
class Slice:
    """What one member does. `legs` are sorted by round; within a round the two ends of a pair have the same order.

    message: number of the message of each NET leg, -1 for others; legs of one message follow each other and all of
    them have the same peer, direction and round. Within a message larger elements come first, so every leg is aligned
    to its elements without padding.
    """

    member: int
    plan: str
    tensors: tuple[TensorRef, ...]
    legs: Legs
    message: Int
    rounds: int

    @cached_property
    def nbytes(self) -> Int:
        """Bytes of each leg."""
        size = np.array([itemsize(t.dtype) for t in self.tensors], dtype=np.int64)
        return self.legs.numel * size[self.legs.tensor] if len(size) else self.legs.numel

    def bytes_by(self, kind: Kind, *, out: bool) -> int:
        """Bytes that this member sends (serves) or receives (pulls) by legs of a kind."""
        return int(self.nbytes[(self.legs.kind == kind) & (self.legs.out == out)].sum())

    def peers(self, kind: Kind) -> list[int]:
        """Members at the other ends of legs of a kind, sorted."""
        return [int(m) for m in np.unique(self.legs.peer[self.legs.kind == kind])]


def assemble(
    member: int, parts: Sequence[Legs], tensors: tuple[TensorRef, ...], rounds: Rounds, message: int, plan: str
) -> Slice:
    """Cut legs into rounds and messages and put them in order. Both ends of a pair do the same to the same legs."""
    size = np.array([itemsize(t.dtype) for t in tensors], dtype=np.int64)
    legs = Legs.concat(parts, max((t.dims for t in tensors), default=0))
    legs = _in_rounds(legs, rounds, size, message)
    net = legs.kind == Kind.NET
    legs = Legs.concat([legs.take(~net), _cut_to(legs.take(net), size, message)], legs.lo.shape[1])
    place = np.empty(len(tensors), dtype=np.int64)
    place[rounds.order] = np.arange(len(tensors))
    shift = int(legs.peer.max(initial=0)) + member + 1
    # Each member begins with its next neighbour, so that not everybody sends to the same one first.
    neighbour = np.where(legs.out, legs.peer - member, member - legs.peer) % shift
    keys = (
        legs.first,
        legs.ordinal,
        legs.region,
        place[legs.tensor],
        -size[legs.tensor],
        neighbour,
        legs.out,
        legs.kind,
    )
    legs = legs.take(np.lexsort((*keys, legs.round, legs.install)) if len(legs) else np.zeros(0, dtype=np.int64))
    return Slice(member, plan, tensors, legs, _messages(legs, size, message), rounds.count)


def _in_rounds(legs: Legs, rounds: Rounds, size: Int, message: int) -> Legs:
    """Give legs of large tensors their rounds: short legs are dealt out, long ones cut, so that every member has about
    the same bytes in each. Cells go whole, by their place in the receiver's run of cells."""
    first, parts = rounds.first[legs.tensor], rounds.parts[legs.tensor]
    cell = legs.cell >= 0
    legs = legs.replace(round=first + np.where(cell, (legs.spread * parts) >> 32, 0))
    several = (parts > 1) & ~cell & (legs.kind != Kind.SELF)
    if not several.any():
        return legs
    chosen, parts = legs.take(several), parts[several]
    item, piece = size[chosen.tensor], min(rounds.piece, message)
    cuts = np.clip(-(-chosen.numel * item // piece), 1, parts)
    grain = np.where(chosen.grain * item > piece, 1, chosen.grain)
    row, index = ragged(cuts)
    cut, parts, cuts = chosen.take(row), parts[row], cuts[row]
    a, b = Rounds.bounds(cut.numel, grain[row], cuts, index)
    later = (((cut.spread * parts) >> 32) + index * parts // cuts) % parts
    cut = cut.replace(first=cut.first + a, last=cut.first + b, round=cut.round + later)
    return Legs.concat([legs.take(~several), cut.take(cut.numel > 0)], legs.lo.shape[1])


def _cut_to(legs: Legs, size: Int, message: int) -> Legs:
    """No leg longer than a message."""
    item = size[legs.tensor] if len(legs) else legs.tensor
    step = message // item // legs.grain * legs.grain if len(legs) else item
    step = np.where(step > 0, step, np.maximum(1, message // np.maximum(1, item)))
    row, index = ragged(-(-legs.numel // np.maximum(1, step)))
    cut = legs.take(row)
    first = cut.first + index * step[row]
    return cut.replace(first=first, last=np.minimum(first + step[row], cut.last))


def _messages(legs: Legs, size: Int, message: int) -> Int:
    """Number the messages: long legs alone, runs of short ones together until a message is full."""
    number = np.full(len(legs), -1, dtype=np.int64)
    net = np.flatnonzero(legs.kind == Kind.NET)
    if not len(net):
        return number
    nbytes = (legs.numel * size[legs.tensor])[net]
    alone = nbytes >= ALONE
    new = np.ones(len(net), dtype=bool)
    same = [c[net][1:] == c[net][:-1] for c in (legs.peer, legs.out, legs.round)]
    new[1:] = ~(same[0] & same[1] & same[2]) | alone[1:] | alone[:-1]
    filled = 0
    for i in np.flatnonzero(~alone):  # short legs only: few bytes, so few of them
        filled = int(nbytes[i]) if new[i] else filled + int(nbytes[i])
        if filled > message:
            new[i], filled = True, int(nbytes[i])
    number[net] = np.cumsum(new) - 1
    return number
