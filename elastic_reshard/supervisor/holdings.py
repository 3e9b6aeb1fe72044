"""Where a publication's bytes lie, as far as can be known without planning: who can be read, which domains have all. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elastic_reshard.protocol.docs import LandedDoc, MemberState, PublicationDoc, PublicationState, SourceDoc
from elastic_reshard.supervisor.state import Draft, Group, Publication
from elastic_reshard.supervisor.unproved import unproved

__all__ = [
    "behind",
    "domain_has",
    "has_all",
    "in_sight",
    "kept",
    "lacking",
    "nobody_has",
    "note_near",
    "prune",
    "reachable",
    "readable",
]

_GONE = (MemberState.LOST, MemberState.FORFEIT, MemberState.REFUSED)
_SERVED = (PublicationState.MOVING, PublicationState.COMMITTED)
_NAMED = 8  # of many that are gone


def kept(draft: Draft, member: str) -> bool:
    """Its arenas are there, as far as anybody knows."""
    return member in draft.members and draft.members[member].kept


def readable(draft: Draft, member: str) -> bool:
    """Its arenas are there, and nobody has given it up."""
    return kept(draft, member) and draft.members[member].doc.state not in _GONE


def in_sight(draft: Draft, member: str) -> bool:
    """Readable, and its host's watchdog is heard."""
    return readable(draft, member) and draft.members[member].doc.host in draft.hosts


def reachable(draft: Draft, member: str) -> bool:
    """In sight, and a mover can be had for it."""
    return in_sight(draft, member) and not unproved(draft, member)


def _sources_at(draft: Draft, publication: PublicationDoc, domain: str) -> Sequence[SourceDoc]:
    """The source slots in a domain; sorted by domain once a step, as there are many of both."""
    known = draft.memo.get(id(publication.sources))
    if known is None:
        found: dict[str, list[SourceDoc]] = {}
        for source in publication.sources:
            found.setdefault(source.where, []).append(source)
        known = draft.memo[id(publication.sources)] = (publication.sources, found)
    sources: Sequence[SourceDoc] = known[1].get(domain, ())
    return sources


def _covered(draft: Draft, publication: PublicationDoc, domain: str) -> bool:
    """The source slots in the domain are enough for everything."""
    here = frozenset(s.rank for s in _sources_at(draft, publication, domain) if kept(draft, s.member))
    if len(here) == len(publication.sources):
        return True
    return bool(here) and draft.covers(publication.layout, here)


def domain_has(draft: Draft, publication: PublicationDoc, domain: str, layout: str, ranks: Iterable[int]) -> bool:
    """Whether everything that these ranks of a destination layout need lies in the domain."""
    wanted = set(ranks)
    return _covered(draft, publication, domain) or any(
        entry.where == domain and entry.layout == layout and wanted <= set(entry.ranks) for entry in publication.landed
    )


def _by_domain(draft: Draft, group: Group) -> Mapping[str, list[int]]:
    """Ranks by domain; looked up once a step for one set of members, whose domains never change."""
    known = draft.memo.get(id(group.doc.members))
    if known is None:
        found: dict[str, list[int]] = {}
        for rank, member in draft.group_members(group):
            found.setdefault(member.doc.where, []).append(rank)
        known = draft.memo[id(group.doc.members)] = (group.doc.members, found)
    domains: Mapping[str, list[int]] = known[1]
    return domains


def lacking(draft: Draft, group: Group, publication: PublicationDoc) -> list[str]:
    """Domains of the group that have not got everything its ranks there need."""
    layout = group.doc.destination_layout or ""
    domains = _by_domain(draft, group)
    return [domain for domain, ranks in domains.items() if not domain_has(draft, publication, domain, layout, ranks)]


def has_all(draft: Draft, group: Group, publication: PublicationDoc) -> bool | None:
    """Whether every byte that a destination group needs lies in the domains of its ranks; None while its layout is being
    compared."""
    if group.doc.destination_layout is None:
        return False
    if lacking(draft, group, publication):
        return False
    fault = draft.fit(publication.layout, group.doc.destination_layout)
    return None if fault is None else not fault


def behind(draft: Draft, group: Group, publication: PublicationDoc) -> bool:
    """Whether nobody waits for the group: it is late with this publication, or with the committed one and has not caught up; or
    it lacks something where a mover is unproved."""
    missing = lacking(draft, group, publication)
    if missing and ((publication.id, group.doc.name) in draft.slow or _hangs(draft, group, missing)):
        return True
    committed = draft.publications.get(draft.committed)
    return group.doc.name in draft.lateness and committed is not None and bool(lacking(draft, group, committed.doc))


def _hangs(draft: Draft, group: Group, domains: list[str]) -> bool:
    return any(m.doc.where in domains and unproved(draft, m.doc.id) for _, m in draft.group_members(group))


def nobody_has(draft: Draft, publication: PublicationDoc) -> str:
    """Why nothing can be installed from a publication any more, nor landed; "" while something may be."""
    gone = [s.member for s in publication.sources if not kept(draft, s.member)]
    if not gone or any(kept(draft, part.member) for part in publication.landings):
        return ""
    left = frozenset(s.rank for s in publication.sources if kept(draft, s.member))
    if left and draft.covers(publication.layout, left):
        return ""
    more = f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else ""
    return f"the memory of {', '.join(gone[:_NAMED])}{more} is gone"


def note_near(draft: Draft) -> None:
    """Say of domains in which replicas of the sources are enough that they have all: members can't tell by themselves."""
    for publication in list(draft.publications.values()):
        doc = publication.doc
        if doc.state not in _SERVED or len({s.where for s in doc.sources}) == 1:
            continue
        found = list(doc.landed)
        for group in draft.groups.values():
            layout = group.doc.destination_layout
            for domain, ranks in _by_domain(draft, group).items() if layout is not None else ():
                near = [s for s in _sources_at(draft, doc, domain) if readable(draft, s.member)]
                by = tuple(s.member for s in near)
                if not by:
                    continue
                here = [e for e in found if (e.where, e.layout) == (domain, layout)]
                if any(set(ranks) <= set(e.ranks) for e in here) or len(by) == len(doc.sources):
                    continue
                if _covered(draft, doc, domain):
                    ranks_ = tuple(sorted({*ranks, *(r for e in here for r in e.ranks)}))
                    found = [e for e in found if e not in here]
                    at = near[0]
                    found.append(LandedDoc(host=at.host, domain=at.domain, layout=layout or "", ranks=ranks_, by=by))
        if len(found) != len(doc.landed) or found != list(doc.landed):
            _replace(draft, publication, doc.landings, tuple(found))


def prune(draft: Draft) -> None:
    """Forget landings whose arenas are gone, and domains that had all by somebody who can't be read any more."""
    for publication in list(draft.publications.values()):
        doc = publication.doc
        if doc.state not in _SERVED or not (doc.landings or doc.landed):
            continue
        landings = tuple(part for part in doc.landings if kept(draft, part.member))
        landed = tuple(entry for entry in doc.landed if all(readable(draft, m) for m in entry.by))
        if (landings, landed) != (doc.landings, doc.landed):
            _replace(draft, publication, landings, landed)
    known = {(p, m) for p, m in draft.ledgers if p in draft.publications and kept(draft, m)}
    for key in set(draft.ledgers) - known:
        del draft.ledgers[key]
    draft.slow = {key for key in draft.slow if key[0] in draft.publications}
    committed = draft.publications.get(draft.committed)
    for name in list(draft.lateness):
        group = draft.groups.get(name)
        caught_up = group is not None and committed is not None and has_all(draft, group, committed.doc)
        if group is None or caught_up:
            del draft.lateness[name]
    draft.given_up = {key: seen for key, seen in draft.given_up.items() if key[0] in draft.publications}


def _replace(
    draft: Draft, publication: Publication, landings: tuple[object, ...], landed: tuple[LandedDoc, ...]
) -> None:
    draft.durable = True
    doc = publication.doc.model_copy(update={"landings": landings, "landed": landed})
    draft.put_publication(replace(publication, doc=doc))
