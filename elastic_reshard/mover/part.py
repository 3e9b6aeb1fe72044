"""One member's part of a transfer, and what became of it: plain data between planning, binding and carrying."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from elastic_reshard.arena.slots import SlotReader
from elastic_reshard.errors import PlanError
from elastic_reshard.layout.model import ModelLayout
from elastic_reshard.plan import CellGrid, Kind, Plan, Slice
from elastic_reshard.plan.m2n import Fast, FastPart, fast_part, without
from elastic_reshard.protocol import bits
from elastic_reshard.protocol.docs import TransferDoc

__all__ = ["NETWORKS", "Carried", "Origin", "Page", "Part", "part_of"]

# Networks by which some tensors go by M2N; the rest goes over the other one's groups.
NETWORKS: Final = {"nccl_m2n": "nccl", "pretend_m2n": "pretend"}
_Cells = npt.NDArray[np.int64]


class Page(Protocol):
    """Where others see how far a run is (`StatusPage`)."""

    def waiting(self, peer: int | None, cell: int = 0, *, window: bool = False) -> None: ...
    def progress(self, *, cells: int, began: int, sent: int, received: int, resent: int = 0) -> None: ...


@dataclass(frozen=True, eq=False)
class Origin:
    """A source slot of this host, as published."""

    reader: SlotReader
    slot: int
    generation: int

    @property
    def intact(self) -> bool:
        """Whether it is still what was published."""
        return self.generation % 2 == 0 and self.reader.generation(self.slot) == self.generation


@dataclass(frozen=True, eq=False)
class Part:
    """One member's part of a plan. slice: of the transfer only, not of the install. position: in the transfer's members.

    target, own: which destination layout it lands, as whose rank, and the numbers of its own cells. basis: of those, what
    the plan takes as landed.
    """

    id: str
    slice: Slice
    members: tuple[str, ...]
    present: tuple[int, ...]
    source: tuple[ModelLayout, int | None]
    destination: tuple[ModelLayout, int] | None
    target: int
    cells: tuple[int, int]  # in all, bytes of each at most
    own: _Cells
    basis: npt.NDArray[np.bool_]
    source_rank: Mapping[int, int] = field(default_factory=dict)  # by position
    fast: FastPart | None = None  # what M2N moves before the rounds; then it is not in `slice`

    @property
    def position(self) -> int:
        """This member's."""
        return self.slice.member

    @property
    def rank(self) -> int:
        """In the communicator."""
        return self.present.index(self.slice.member)

    @cached_property
    def _arriving(self) -> tuple[_Cells, _Cells, _Cells]:
        """(round, index among the own cells, bytes over the network) of each leg that lands."""
        legs = self.slice.legs
        rows = np.flatnonzero(~legs.out & (legs.cell >= 0))
        at = np.searchsorted(self.own, legs.cell[rows])
        if len(rows) and not (self.own[np.minimum(at, len(self.own) - 1)] == legs.cell[rows]).all():
            raise PlanError(f"plan {self.id} lands cells in {self.members[self.position]} that it does not want")
        return legs.round[rows], at, np.where(legs.kind[rows] == Kind.NET, self.slice.nbytes[rows], 0)

    @cached_property
    def senders(self) -> list[dict[int, int]]:
        """In each round: network bytes by the position of who sends them."""
        legs = self.slice.legs
        rows = np.flatnonzero(~legs.out & (legs.cell >= 0) & (legs.kind == Kind.NET))
        found: list[dict[int, int]] = [{} for _ in range(self.slice.rounds)]
        for number, peer, nbytes in zip(legs.round[rows], legs.peer[rows], self.slice.nbytes[rows], strict=True):
            found[number][int(peer)] = found[number].get(int(peer), 0) + int(nbytes)
        return found

    @cached_property
    def landing(self) -> list[_Cells]:
        """Own cells that land in each round, by index."""
        round_, at, _ = self._arriving
        return [np.unique(at[round_ == number]) for number in range(self.slice.rounds)]

    def again(self, held: npt.NDArray[np.bool_]) -> tuple[_Cells, list[int]]:
        """Of what lands, what was here already: (own cells by index, network bytes in each round)."""
        round_, at, nbytes = self._arriving
        known = held[at] if len(at) else np.zeros(0, dtype=np.bool_)
        lost = np.bincount(round_[known], nbytes[known], self.slice.rounds).astype(np.int64)
        return np.unique(at[known]), lost.tolist()

    @cached_property
    def reads(self) -> frozenset[int]:
        """Positions of the members of this host whose source slots are read."""
        legs = self.slice.legs
        near = legs.peer[~legs.out & ((legs.kind == Kind.LOCAL) | (legs.kind == Kind.SELF))]
        sends = (legs.out & (legs.way >= 0)).any() or any(self.rank in call.source.ranks for call in self.calls)
        return frozenset(np.unique(near).tolist()) | (frozenset({self.position}) if sends else frozenset())

    @cached_property
    def lands(self) -> bool:
        """Whether it needs its landing slot: cells land, or are sent from there."""
        legs = self.slice.legs
        fast = any(self.rank in call.destination.ranks for call in self.calls)
        return fast or bool((~legs.out).any() or (legs.out & (legs.way < 0)).any())

    @property
    def calls(self) -> tuple[Fast, ...]:
        """Of M2N; none where it is not used."""
        return self.fast.calls if self.fast is not None else ()

    @property
    def to_land(self) -> int:
        """Cells that are to land in this member."""
        fast = [call.cells_of(self.rank) for call in self.calls if self.rank in call.destination.ranks]
        return sum(map(len, self.landing)) + sum(last - first for first, last in fast)


def part_of(doc: TransferDoc, plan: Plan, member: str) -> Part:
    """What one member does. PlanError for one that takes no part."""
    if member not in doc.present:
        raise PlanError(f"{member} is not among those who take part in transfer {doc.id}: {', '.join(doc.present)}")
    position = doc.members.index(member)
    whole = plan.slice(position)
    moves = ~whole.legs.install
    piece = Slice(position, whole.plan, whole.tensors, whole.legs.take(moves), whole.message[moves], whole.rounds)
    fast = fast_part(plan) if doc.network in NETWORKS else None
    if fast is not None:
        piece = without(piece, fast.tensors)
    model, destination, target = plan.sources[0].layout, None, 0
    grid: CellGrid | None = None
    for party in plan.destinations:
        ranks = party.members or ()
        if position in ranks:
            target = [t.content_id for t in plan.targets].index(party.layout.content_id)
            destination, grid = (party.layout, ranks.index(position)), plan.cells[target]
    own = grid.cells_of_rank(destination[1]) if grid is not None and destination is not None else np.zeros(0, np.int64)
    raw = np.frombuffer(bits.unpack(doc.basis.get(member, ""), len(own)), dtype=np.uint8)
    ranks_of = {at: rank for rank, at in enumerate(doc.source.members)}
    return Part(
        doc.plan,
        piece,
        doc.members,
        tuple(at for at in range(len(doc.members)) if at not in doc.absent),
        (model, ranks_of.get(position)),
        destination,
        target,
        (len(own), doc.cell),
        own,
        np.unpackbits(raw, count=len(own)).astype(np.bool_),
        ranks_of,
        fast,
    )


@dataclass
class Carried:
    """What a run moved: bytes in rounds that were completed, of cells now marked; resent: of those received, what was here
    before. complete: all rounds were run. to_land: cells that are to land; links: bytes received, by the host they are from."""

    sent: int = 0
    received: int = 0
    resent: int = 0
    cells: int = 0
    seconds: float = 0.0
    complete: bool = False
    rounds: int = 0
    to_land: int = 0
    links: dict[str, int] = field(default_factory=dict)
