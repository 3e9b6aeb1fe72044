"""Installing what came from other hosts: the plan over this host's landing slots and source slots together.

Cells that landed are pulled from whoever of the host holds them, all others from source slots; a cell that nobody here has
ends the install before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from elastic_reshard.arena.landing import LandingReader
from elastic_reshard.errors import ArenaError
from elastic_reshard.layout import Correspondence, ModelLayout
from elastic_reshard.plan import CellGrid, Destination, Ledger, Plan, PlanOptions, Slice, Source, Topology
from elastic_reshard.plan.ledger import Bits

__all__ = ["Landed", "landing_slice"]

_MESSAGE: Final = 1 << 50  # nothing is sent, so nothing needs rounds


@dataclass(frozen=True, eq=False)
class Landed:
    """A landing slot as it was found: what rank `rank` of the destination layout has of a publication.

    held: one bool for each cell of that rank's own regions. Whoever pulls from it asks `lapsed` before and after.
    """

    reader: LandingReader
    slot: int
    rank: int
    member: str
    publication: str
    generation: int
    held: Bits

    @classmethod
    def look(cls, reader: LandingReader, slot: int, rank: int, member: str, publication: str) -> Self | None:
        """What the slot has now; None if it is being reset, or holds another publication."""
        generation = reader.generation(slot)
        found = cls(reader, slot, rank, member, publication, generation, reader.held(slot))
        return None if found.lapsed() else found

    def lapsed(self) -> bool:
        """Whether the slot was reset, is being reset, or lacks a cell that it had when it was looked at."""
        if self.reader.generation(self.slot) != self.generation:
            return True
        lacks = bool((self.held & ~self.reader.held(self.slot)).any())
        # While the word is odd the reader names no publication.
        return lacks or self.reader.publication(self.slot) != self.publication


def landing_slice(
    source: ModelLayout,
    destination: ModelLayout,
    correspondences: tuple[Correspondence, ...] | None,
    rank: int,
    origins: frozenset[int],
    landed: Sequence[Landed],
) -> tuple[Slice, dict[int, Landed]]:
    """What destination rank `rank` pulls, and which landing slot each of its slice's peers is; source rank r is member r.

    Raises LayoutMismatch, ShardLost (a cell that neither `origins`, source ranks that are here, nor `landed` have),
    ArenaError (slots that count other cells than the layout has).
    """
    size = _cell_of(landed)
    grid = CellGrid.of(destination, size)
    mine = np.zeros(grid.count, dtype=np.bool_)
    mine[grid.cells_of_rank(rank)] = True
    sources, width = _width(source), max(_width(destination), rank + 1)
    peers, parties = _seated(landed, sources, width)
    held: dict[tuple[int, int], Bits] = {}
    for member, slot in peers.items():
        own = grid.cells_of_rank(slot.rank)
        if len(own) != len(slot.held):
            raise ArenaError(
                f"the landing arena of {slot.member} counts {len(slot.held)} cells, rank {slot.rank} of the layout has "
                f"{len(own)}; nothing was read. Its layout has changed: install again"
            )
        # Of cells that this rank does not need nothing is asked: another rank's may lack some.
        bits = np.zeros(grid.count, dtype=np.bool_)
        bits[own] = slot.held | ~mine[own]
        held[0, member] = bits
    total = sources + width * parties
    reader = sources + rank
    absent = frozenset(range(total)) - origins - peers.keys() - {reader}
    plan = Plan(
        (Source(source, tuple(range(sources)), correspondences),),
        tuple(
            Destination(destination, tuple(range(sources + width * party, sources + width * (party + 1))))
            for party in range(parties)
        ),
        Topology.single(total),
        PlanOptions(message=_MESSAGE, staging=_MESSAGE << 10, cell=size, landing=True),
        absent=absent,
        ledger=Ledger((grid.count,), held),
    )
    return _install_only(plan.slice(reader)), peers


def _cell_of(landed: Sequence[Landed]) -> int:
    """The one cell size of all slots."""
    found = {slot.reader.cell for slot in landed}
    if len(found) != 1:
        told = ", ".join(f"{slot.member} {slot.reader.cell}" for slot in landed)
        raise ArenaError(f"landing arenas of unlike cell sizes cannot be read together ({told} bytes); nothing was read. "
                         "Members that joined before the supervisor's cell size changed must join again")  # fmt: skip
    return found.pop()


def _width(model: ModelLayout) -> int:
    return max((rank for layout in model.values() for rank in layout.mesh.ranks), default=-1) + 1


def _seated(landed: Sequence[Landed], sources: int, width: int) -> tuple[dict[int, Landed], int]:
    """Members of the plan: one for each slot; groups, and former incarnations of a rank, side by side."""
    peers: dict[int, Landed] = {}
    seats: dict[int, int] = {}
    for slot in landed:
        party = seats.get(slot.rank, 0)
        seats[slot.rank] = party + 1
        peers[sources + width * party + slot.rank] = slot
    return peers, max(seats.values(), default=1)


def _install_only(piece: Slice) -> Slice:
    """The legs that move when the member installs, in one round."""
    legs = piece.legs.take(np.flatnonzero(piece.legs.install))
    count = len(legs)
    legs = legs.replace(install=np.zeros(count, dtype=np.bool_), round=np.zeros(count, dtype=np.int64))
    return Slice(piece.member, piece.plan, piece.tensors, legs, np.full(count, -1, dtype=np.int64), 1)
