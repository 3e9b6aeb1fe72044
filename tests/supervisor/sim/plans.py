"""A small planner with the real one's rules: a domain lands one copy of the cells it lacks, spread over those who want them."""

from __future__ import annotations

from typing import NamedTuple

from elastic_reshard.protocol.docs import PublicationDoc, TransferDoc
from tests.supervisor.sim.memory import cells_of, unpacked

__all__ = ["Rounds", "Ship", "planned"]

_A_ROUND = 2  # cells


class Ship(NamedTuple):
    """A cell on its way in a round."""

    round: int
    cell: int
    sender: str
    receiver: str
    layout: str

    def other(self, member: str) -> str:
        """The peer."""
        return self.receiver if member == self.sender else self.sender


Rounds = tuple[tuple[Ship, ...], ...] | tuple[()]


def planned(doc: TransferDoc, publication: PublicationDoc) -> tuple[Rounds, list[int]]:
    """(rounds, cells that nobody present has)."""
    sources = _sources(doc, publication)
    held = _held(doc)
    ships: list[Ship] = []
    lost: list[int] = []
    for (layout, host), seekers in sorted(_seekers(doc).items()):
        for cell in sorted({c for own in seekers.values() for c in own}):
            at_home = any(doc.hosts[doc.members.index(s)] == host for s in sources[cell])
            if at_home or any(cell in held.get((layout, s), ()) for s in seekers):
                continue
            wanting = [s for s, own in seekers.items() if cell in own]
            having = sources[cell] + [m for (of, m), cells in held.items() if of == layout and cell in cells]
            if not having:
                lost.append(cell)
                continue
            number = len(ships)
            ships.append(
                Ship(number // _A_ROUND, cell, having[number % len(having)], wanting[cell % len(wanting)], layout)
            )
    rounds = [tuple(s for s in ships if s.round == r) for r in range(-(-len(ships) // _A_ROUND))]
    return tuple(rounds), lost


def _sources(doc: TransferDoc, publication: PublicationDoc) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {c: [] for c in range(64)}
    for rank, position in enumerate(doc.source.members):
        if position not in doc.absent:
            for cell in cells_of(publication.layout, rank):
                found[cell].append(doc.members[position])
    return found


def _held(doc: TransferDoc) -> dict[tuple[str, str], set[int]]:
    present = set(doc.present)
    return {
        (p.layout, p.member): unpacked(cells_of(p.layout, p.rank), doc.basis[p.member])
        for p in doc.landings
        if p.member in present and p.member in doc.basis
    }


def _seekers(doc: TransferDoc) -> dict[tuple[str, str], dict[str, tuple[int, ...]]]:
    found: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for party in doc.destinations:
        for rank, position in enumerate(party.members):
            if position not in doc.absent:
                where = (party.layout, doc.hosts[position])
                found.setdefault(where, {})[doc.members[position]] = cells_of(party.layout, rank)
    return found
