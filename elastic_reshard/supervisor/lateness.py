"""Whom the others do not wait for any longer: stragglers, and those who can not be reached though nothing of them ended. Pure.

What counts is who waits for whom (words that movers keep in shared memory), never an error's text. Where no word names
anybody, groups are served one by one: those that can be reached get the version. A mover that waits for its own member waits
for that to open its window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elastic_reshard.protocol.docs import PublicationDoc
from elastic_reshard.protocol.messages import MoverSaid
from elastic_reshard.supervisor.holdings import lacking
from elastic_reshard.supervisor.parties import landed_ranks
from elastic_reshard.supervisor.queue import waits_beside
from elastic_reshard.supervisor.state import Draft, Transfer

__all__ = [
    "after_stall",
    "awaited_most",
    "closed",
    "leave_out",
    "mark_slow",
    "overtaken",
    "source_closed",
    "stragglers",
]

_SECOND = 2
_HALVINGS = 30
_Reports = Mapping[str, MoverSaid]


def lacking_groups(publication: PublicationDoc, transfer: Transfer) -> set[str]:
    """Groups that a transfer still lands for."""
    return {
        part.group
        for part in transfer.doc.landings
        if part.rank not in landed_ranks(publication, part.where, part.layout)
    }


def awaited_most(transfer: Transfer) -> list[str]:
    """Members that others were seen waiting for at least half as often as for anybody."""
    most = max(transfer.awaited.values(), default=0)
    return sorted(m for m, n in transfer.awaited.items() if 2 * n > most)


def closed(transfer: Transfer, reports: _Reports) -> list[str]:
    """Members whose movers wait for their own windows: neither a stall nor anybody's fault."""
    return [m for m in transfer.doc.present if m in reports and _waits_for_itself(reports[m])]


def _waits_for_itself(said: MoverSaid) -> bool:
    return said.state == "running" and said.waits is not None and said.waits[0] == said.member


def source_closed(transfer: Transfer, reports: _Reports) -> bool:
    """Whether a source's window is what everybody waits for: nobody is late then."""
    sources = (transfer.doc.members[p] for p in transfer.doc.source.members if p not in transfer.doc.absent)
    said = (reports.get(member) for member in sources)
    return any(one is not None and one.transfer == transfer.doc.id and _waits_for_itself(one) for one in said)


def _awaited(transfer: Transfer, reports: _Reports) -> list[str]:
    """Members whom others wait for, and who wait for nobody; if all wait, those seen waited for most."""
    waiting = {m: said.waits[0] for m, said in reports.items() if said.waits is not None}
    found = sorted({peer for peer in waiting.values() if peer not in waiting})
    return found or awaited_most(transfer)


def mark_slow(draft: Draft, transfer: Transfer, members: Iterable[str]) -> set[str]:
    """Nobody waits any more for the groups that these members land for; sources can't be left out, nor all at once, unless
    others wait beside them."""
    sources = {transfer.doc.members[p] for p in transfer.doc.source.members}
    slow = {part.group for part in transfer.doc.landings if part.member in set(members) - sources}
    everybody = {party.group for party in transfer.doc.destinations}
    if slow and (slow < everybody or waits_beside(draft, transfer)):
        _note(draft, transfer, slow)
        return slow
    return set()


def _note(draft: Draft, transfer: Transfer, groups: set[str]) -> None:
    draft.slow |= {(transfer.doc.publication, group) for group in groups}
    for group in groups:
        draft.lateness[group] = draft.lateness.get(group, 0) + 1


def overtaken(draft: Draft, transfer: Transfer, reports: _Reports) -> set[str]:
    """Groups that catch up with a committed version for too long while a newer one waits; marked.

    Each time they are left behind they are given half of the time: a straggler costs the others two `late_after` in all. For
    one that catches up only when its window opens, a newer version does not wait at all."""
    moving = draft.moving()
    if moving is None or moving.doc.id == transfer.doc.publication:
        return set()
    lacking = lacking_groups(draft.publications[transfer.doc.publication].doc, transfer)
    times = max((draft.lateness.get(group, 0) for group in lacking), default=0)
    waited = draft.now - transfer.begun
    halvings = min(_HALVINGS, max(0, times - 1))  # a float has an end, and `times` has none
    if waited < draft.policies.late_after / 2**halvings and not closed(transfer, reports):
        return set()
    _note(draft, transfer, lacking)
    return lacking


def leave_out(draft: Draft, transfer: Transfer, members: Iterable[str]) -> None:
    """Some refuse, or are unlike the others: the second time in a row the others go on without their groups."""
    publication, stalls, fruitless = draft.tried
    if publication != transfer.doc.publication or fruitless < _SECOND:
        return
    slow = mark_slow(draft, transfer, members)
    if slow:
        draft.tried = (publication, stalls, 0)
        draft.log("group.left_behind", groups=sorted(slow), publication=publication)


def stragglers(draft: Draft, transfer: Transfer, reports: _Reports) -> set[str]:
    """Groups for whom the others have waited most in a transfer that is late, or all whose windows are closed; or, if nobody in
    it was seen waiting, but others wait beside it, all that it serves; marked."""
    if source_closed(transfer, reports):
        return set()
    shut = closed(transfer, reports)
    if shut:
        return _mark_closed(draft, transfer, shut)
    if transfer.awaited:
        return mark_slow(draft, transfer, awaited_most(transfer))
    if not waits_beside(draft, transfer):
        return set()
    slow = lacking_groups(draft.publications[transfer.doc.publication].doc, transfer)
    _note(draft, transfer, slow)
    return slow


def _mark_closed(draft: Draft, transfer: Transfer, members: Iterable[str]) -> set[str]:
    """Nobody waits for those who compute; who was left behind before them, for another reason, is served first now."""
    publication = draft.publications[transfer.doc.publication].doc
    shut = {part.group for part in transfer.doc.landings if part.member in set(members)}
    before = {
        name
        for key, name in draft.slow
        if key == publication.id
        and name not in shut
        and name in draft.groups
        and lacking(draft, draft.groups[name], publication)
    }
    all_shut = shut >= {party.group for party in transfer.doc.destinations}
    if all_shut and not before and not waits_beside(draft, transfer):
        return set()
    draft.slow -= {(publication.id, name) for name in before}
    _note(draft, transfer, shut)
    return shut


def after_stall(draft: Draft, transfer: Transfer, reports: _Reports) -> str:
    """No cell was completed for too long, and nobody's end explains it. Who is to blame, in words.

    The first time everything is tried again. The second time those are left out for whom the others wait; if that is nobody
    in particular, groups are served one by one from then on, and who can't be served alone is left out.
    """
    doc = transfer.doc
    publication, stalls, fruitless = draft.tried
    culprits = _awaited(transfer, reports)
    known = draft.slow.copy()
    slow = mark_slow(draft, transfer, culprits) if stalls else set()
    if stalls and not slow:
        if draft.alone == doc.publication:
            slow = lacking_groups(draft.publications[doc.publication].doc, transfer)
            _note(draft, transfer, slow)
        draft.alone = doc.publication
    fresh = draft.slow > known
    draft.tried = (publication, stalls + 1, 0 if fresh else fruitless)
    if fresh:
        draft.log("group.left_behind", groups=sorted(slow), publication=doc.publication)
    unmet = sorted(m for m in doc.present if m not in reports or reports[m].state == "ready")
    if culprits:
        return f"waited for: {', '.join(culprits)}"
    return f"had not met: {', '.join(unmet)}" if unmet else "nobody waited for anybody in particular"
