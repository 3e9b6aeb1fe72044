"""Composing a transfer: who sends, who lands, who holds what landed before. Pure; no planning, only the plan's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_reshard.plan import PlanOptions, transfer_digest
from elastic_reshard.protocol.docs import (
    LandingDoc,
    PartyDoc,
    Placed,
    PublicationDoc,
    PublicationState,
    TransferDoc,
    TransferState,
)
from elastic_reshard.protocol.ids import transfer_id
from elastic_reshard.supervisor.holdings import lacking, reachable
from elastic_reshard.supervisor.networks import choose, paused
from elastic_reshard.supervisor.state import Draft, Group, Publication

__all__ = ["can_land", "compose", "landed_ranks", "landing_slot"]

_SLOTS = 2
_HELD = (PublicationState.MOVING, PublicationState.COMMITTED)
_NOWHERE = "-"
# A round carries an eighth of it (`plan.rounds`). Over NCCL a round costs about a millisecond, whatever it carries.
_STAGING, _STAGING_OVER_NCCL = 64 << 20, 512 << 20


def landing_slot(draft: Draft, publication: PublicationDoc, arena: str) -> int | None:
    """The slot in which this arena lands the publication: the one it has, else one that no other publication needs; None if
    both are held."""
    used = set()
    for other in draft.publications.values():
        mine, held = other.doc.id == publication.id, other.doc.state in _HELD
        if not mine and not held:
            continue
        slot = _slots(draft, other.doc).get(arena)
        if slot is not None and mine:
            return slot
        used.add(slot)
    return next((slot for slot in range(_SLOTS) if slot not in used), None)


def _slots(draft: Draft, publication: PublicationDoc) -> Mapping[str, int]:
    """The slot of each arena that lands the publication; looked up once a step, as there are many."""
    known = draft.memo.get(id(publication.landings))
    if known is None:
        found = {part.arena: part.slot for part in reversed(publication.landings)}
        known = draft.memo[id(publication.landings)] = (publication.landings, found)
    slots: Mapping[str, int] = known[1]
    return slots


def can_land(draft: Draft, group: Group, publication: PublicationDoc) -> bool:
    """Whether every rank in a domain that lacks something has a landing arena of the job's cells, with a free slot."""
    missing = lacking(draft, group, publication)
    for _, member in draft.group_members(group):
        if member.doc.where not in missing:
            continue
        landing = member.said.landing if member.said is not None else None
        if landing is None or landing.cell != draft.job.cell or not reachable(draft, member.doc.id):
            return False
        if landing_slot(draft, publication, landing.arena) is None:
            return False
    return bool(missing)


@dataclass
class _Roster:
    """Members of a transfer by position."""

    members: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)
    present: set[int] = field(default_factory=set)
    places: dict[str, int] = field(default_factory=dict)

    def add(self, member: str, at: Placed | None, present: bool) -> int:
        position = self.places.setdefault(member, len(self.members))
        if position == len(self.members):
            self.members.append(member)
            self.domains.append(at.where if at is not None else _NOWHERE)
            self.machines.append(at.host if at is not None else _NOWHERE)
        if present:
            self.present.add(position)
        return position

    def nobody(self, what: str, rank: int) -> int:
        """A place for a rank that nobody has."""
        return self.add(f"-.{what}.{rank}.{len(self.members)}", None, present=False)


def _source(draft: Draft, roster: _Roster, publication: PublicationDoc, near: set[str] | None) -> PartyDoc:
    """The source group. near: only those in these domains take part; None: all."""
    ranks = {s.rank: s for s in publication.sources}
    size = max(publication.ranks, max(ranks) + 1)
    positions = []
    for rank in range(size):
        source = ranks.get(rank)
        if source is None:
            positions.append(roster.nobody(publication.group, rank))
        else:
            present = reachable(draft, source.member) and (near is None or source.where in near)
            positions.append(roster.add(source.member, source, present))
    return PartyDoc(group=publication.group, layout=publication.layout, members=tuple(positions))


def _wanted(draft: Draft, publication: PublicationDoc, groups: Iterable[Group]) -> list[LandingDoc]:
    """Where the groups' members land that lack something."""
    found = []
    for group in groups:
        missing = lacking(draft, group, publication)
        for rank, member in draft.group_members(group):
            landing = member.said.landing if member.said is not None else None
            slot = landing_slot(draft, publication, landing.arena) if landing is not None else None
            if member.doc.where in missing and landing is not None and slot is not None:
                found.append(LandingDoc(
                    member=member.doc.id, group=group.doc.name, rank=rank, size=group.doc.size, host=member.doc.host,
                    domain=member.doc.domain, layout=group.doc.destination_layout or "", arena=landing.arena, slot=slot,
                ))  # fmt: skip
    return found


def _holding(draft: Draft, publication: PublicationDoc, wanted: Sequence[LandingDoc]) -> list[LandingDoc]:
    """Other landings of the same layouts that hold something and can be read: those of domains that have everything, and those
    beside a wanted one. Elsewhere what is missing would be moved to them too, and nobody asked for that."""
    layouts = {part.layout for part in wanted}
    beside = {(part.where, part.layout) for part in wanted}
    known = {part.member for part in wanted}
    found = []
    for part in publication.landings:
        said = draft.ledgers.get((publication.id, part.member))
        holds = said is not None and (said.arena, said.slot) == (part.arena, part.slot) and said.bits
        useful = part.layout in layouts and part.member not in known
        if not (holds and useful and reachable(draft, part.member)):
            continue
        if (part.where, part.layout) in beside or part.rank in landed_ranks(publication, part.where, part.layout):
            found.append(part)
    return found


def landed_ranks(publication: PublicationDoc, domain: str, layout: str) -> set[int]:
    """Ranks of a layout that have everything in a domain."""
    return {r for e in publication.landed if (e.where, e.layout) == (domain, layout) for r in e.ranks}


def _spared(publication: PublicationDoc, wanted: Sequence[LandingDoc]) -> bool:
    """Whether peers of the joiners have landed everything they need, so that the sources need not send it again."""
    if publication.state is not PublicationState.COMMITTED:
        return False
    beside_sources = {s.where for s in publication.sources}
    domains = {e.where for e in publication.landed} - beside_sources
    return all(
        any(part.rank in landed_ranks(publication, domain, part.layout) for domain in domains - {part.where})
        for part in wanted
    )


def _parties(draft: Draft, roster: _Roster, landings: Sequence[LandingDoc]) -> list[PartyDoc]:
    """One party per group and layout; another for members that had a rank before somebody else."""
    seats: list[tuple[str, str, int, dict[int, int]]] = []
    known: dict[tuple[str, str], list[dict[int, int]]] = {}
    for part in landings:
        places = known.setdefault((part.group, part.layout), [])
        taken = next((place for place in places if part.rank not in place), None)
        if taken is None:
            taken = {}
            places.append(taken)
            seats.append((part.group, part.layout, max(part.size, part.rank + 1), taken))
        taken[part.rank] = roster.add(part.member, part, reachable(draft, part.member))
    return [
        PartyDoc(
            group=group, layout=layout,
            members=tuple(taken[r] if r in taken else roster.nobody(group, r) for r in range(size)),
        )
        for group, layout, size, taken in seats
    ]  # fmt: skip


def _options(cell: int, network: str) -> PlanOptions:
    message = max(1 << 20, cell)
    staging = _STAGING_OVER_NCCL if network.startswith("nccl") else _STAGING
    return PlanOptions(message=message, staging=max(staging, 4 * message), cell=cell, landing=True)


def compose(draft: Draft, publication: Publication, groups: Sequence[Group]) -> TransferDoc:
    """The document of a transfer to these groups, all of which `can_land`."""
    doc = publication.doc
    roster = _Roster()
    landings = _wanted(draft, doc, groups)
    near = {part.where for part in landings} if _spared(doc, landings) else None
    source = _source(draft, roster, doc, near)
    landings += _holding(draft, doc, landings)
    parties = _parties(draft, roster, landings)
    absent = tuple(p for p in range(len(roster.members)) if p not in roster.present)
    basis = {
        part.member: said.bits
        for part in landings
        if (said := draft.ledgers.get((doc.id, part.member))) is not None
        and (said.arena, said.slot) == (part.arena, part.slot)
        and said.bits
    }
    present = [m for p, m in enumerate(roster.members) if p in roster.present]
    network, _ = choose(draft, doc.id, present)
    options = _options(draft.job.cell, network)
    plan = transfer_digest(
        options, (doc.layout, source.members), [(p.layout, p.members) for p in parties], roster.domains, absent, basis
    )
    return TransferDoc(
        id=transfer_id(doc.id, draft.job.term, draft.serial + 1), publication=doc.id, epoch=draft.epoch,
        state=TransferState.FORMING, members=tuple(roster.members), hosts=tuple(roster.domains), absent=absent, source=source,
        destinations=tuple(parties), landings=tuple(landings), basis=basis, cell=options.cell, message=options.message,
        staging=options.staging, verify=draft.job.verify, plan=plan, network=network,
        paused=paused(draft, roster.members, present, network),
        machines=tuple(roster.machines) if roster.machines != roster.domains else (),
    )  # fmt: skip
