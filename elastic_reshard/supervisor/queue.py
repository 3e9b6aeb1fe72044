"""Who is served next between hosts. Pure.

A publication that moves goes before the one that is committed; groups that are late are served when nobody else waits.
"""

from __future__ import annotations

from elastic_reshard.protocol.docs import PublicationState
from elastic_reshard.supervisor.holdings import behind, has_all, lacking, reachable
from elastic_reshard.supervisor.parties import can_land
from elastic_reshard.supervisor.state import Draft, Group, Publication, Transfer

__all__ = ["everybody", "next_groups", "waits_beside"]


def everybody(draft: Draft) -> frozenset[str]:
    """Who can be reached."""
    return frozenset(m for m in draft.members if reachable(draft, m))


def next_groups(draft: Draft, reachable: frozenset[str]) -> tuple[Publication | None, list[Group]]:
    """The publication to move now, and the groups that it is moved to; (None, []) if there is nothing to do."""
    moving = draft.moving()
    committed = draft.publications.get(draft.committed)
    for publication in (moving, committed if moving is None else None):
        if publication is None or publication.doc.state is PublicationState.RELEASED or _unheard(draft, publication):
            continue
        waiting = [g for g in draft.groups.values() if _waits(draft, g, publication, reachable)]
        prompt = [g for g in waiting if not behind(draft, g, publication.doc)]
        if draft.alone == publication.doc.id:
            prompt = prompt[:1]
        # Who is late is served when nobody else waits; also before the commit, if that needs them.
        late = waiting if publication is committed or not _may_commit(draft, publication) else []
        groups = _alike(prompt or late)
        if groups:
            return publication, groups
    return None, []


def waits_beside(draft: Draft, transfer: Transfer) -> bool:
    """Whether a group that is not late could have the publication of the transfer in hand now, and is not served by that: it
    came when that had begun, or is served apart."""
    publication = draft.publications.get(transfer.doc.publication)
    if publication is None:
        return False
    served, here = {part.member for part in transfer.doc.landings}, everybody(draft)
    return any(
        _waits(draft, group, publication, here)
        and not behind(draft, group, publication.doc)
        and not served.issuperset(_in_want(draft, group, publication))
        for group in draft.groups.values()
    )


def _in_want(draft: Draft, group: Group, publication: Publication) -> list[str]:
    missing = lacking(draft, group, publication.doc)
    return [member.doc.id for _, member in draft.group_members(group) if member.doc.where in missing]


def _may_commit(draft: Draft, publication: Publication) -> bool:
    """Whether enough groups have everything for the publication to be committed without those that are late."""
    complete = [g for g in draft.groups.values() if g.doc.whole and has_all(draft, g, publication.doc)]
    return len(complete) >= draft.policies.min_groups


def _unheard(draft: Draft, publication: Publication) -> bool:
    """After a restart: whether somebody who may hold something has not been heard yet."""
    if draft.now >= draft.judge_from:
        return False
    holders = {s.member for s in publication.doc.sources} | {part.member for part in publication.doc.landings}
    names = [draft.members[m].doc.host for m in holders if m in draft.members]
    return any(host not in draft.hosts for host in names)


def _waits(draft: Draft, group: Group, publication: Publication, reachable: frozenset[str]) -> bool:
    doc = group.doc
    if "destination" not in doc.roles or not doc.whole or doc.destination_layout is None:
        return False
    if doc.serving_publication == publication.doc.id or not lacking(draft, group, publication.doc):
        return False
    seen, until = draft.given_up.get((publication.doc.id, doc.name), (None, 0.0))
    if seen == reachable and draft.now < until:
        return False
    if draft.fit(publication.doc.layout, doc.destination_layout) != "":
        return False
    return can_land(draft, group, publication.doc)


def _alike(groups: list[Group]) -> list[Group]:
    """A layout with correspondences of its own goes alone."""
    renamed = [g for g in groups if g.doc.renamed]
    plain = [g for g in groups if not g.doc.renamed]
    if plain or not renamed:
        return plain
    return [g for g in renamed if g.doc.destination_layout == renamed[0].doc.destination_layout]
