"""A start without a journal: what was is put together from what members and watchdogs know. Pure; part of `core.step`.

Hosts that were cut off know less, and may greet first. So what is known of a publication counts by how far it had come, and
what was overtaken is over, whoever has not heard of that: nothing is moved, committed or installed behind a newer version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from elastic_reshard.protocol.docs import GroupDoc, GroupState, PublicationDoc, PublicationState
from elastic_reshard.protocol.messages import Hello, Holding
from elastic_reshard.supervisor.publishing import become
from elastic_reshard.supervisor.state import Draft, Group, Member, Publication

__all__ = ["heard", "learn", "recovering"]

_ORDER: Final = (
    PublicationState.MOVING,
    PublicationState.COMMITTED,
    PublicationState.RELEASED,
    PublicationState.ABANDONED,
)
_ONCE_COMMITTED: Final = (PublicationState.COMMITTED, PublicationState.RELEASED)


def heard(members: Mapping[str, Member]) -> int:
    """How many of the living have said what they have. A person counts those; the dead, whom their hosts name too, would stand
    for a host that nobody has heard yet."""
    return sum(m.said is not None and not m.gone for m in members.values())


def recovering(draft: Draft) -> bool:
    """Whether too few members have said what they have. Publications come from the watchdogs' views."""
    if not draft.recover_from:
        return False
    came = heard(draft.members)
    if came < draft.recover_from:
        return True
    _end_overtaken(draft)
    draft.log("supervisor.recovered", members=came, publications=list(draft.publications))
    draft.recover_from = 0
    return False


def learn(draft: Draft, hello: Hello) -> None:
    """While recovering: take over what a watchdog's view knew of publications, and how far groups had counted."""
    if not draft.recover_from:
        return
    draft.durable = True
    draft.membership_epoch = max(draft.membership_epoch, hello.membership_epoch)
    for known in hello.groups:
        group = draft.groups.get(known.name)
        if group is None or (group.doc.count_from, group.doc.floor) < (known.count_from, known.floor):
            draft.put_group(_unseated(known))
    for doc in hello.publications:
        _learn_of(draft, doc)
    for said in hello.statements:
        if said.holding is not None:
            draft.weight_version = max(draft.weight_version, said.holding.weight_version)
    draft.committed = _newest(draft)


def _learn_of(draft: Draft, doc: PublicationDoc) -> None:
    draft.weight_version = max(draft.weight_version, doc.weight_version)
    known = draft.publications.get(doc.id)
    if known is None or _ORDER.index(known.doc.state) < _ORDER.index(doc.state):
        draft.put_publication(Publication(doc, draft.now))


def _newest(draft: Draft) -> str:
    """The newest that is committed, as far as is known."""
    found = [p.doc for p in draft.publications.values() if p.doc.state is PublicationState.COMMITTED]
    return max(found, key=lambda doc: doc.weight_version).id if found else ""


def _unseated(doc: GroupDoc) -> Group:
    """A group of which only its counting is known for certain: its members come in as joiners."""
    changes = {"members": ("",) * doc.size, "whole": False, "state": GroupState.STALE, "serving": 0,
               "serving_publication": "", "reason": "", "refused": "", "ticket": None}  # fmt: skip
    return Group(doc.model_copy(update=changes))


def _end_overtaken(draft: Draft) -> None:
    """One moves at a time: what a newer one followed had ended. What was committed before another was is released: its slots
    may hold other bytes by now."""
    for held in _held(draft):
        known = draft.publications.get(held.publication)
        if known is not None and known.doc.state is PublicationState.MOVING:
            doc = known.doc.model_copy(update={"state": PublicationState.COMMITTED})
            draft.put_publication(replace(known, doc=doc))  # a verdict was told, so its commit was, too
    versions = [p.doc.weight_version for p in draft.publications.values() if p.doc.state in _ONCE_COMMITTED]
    newest = max((*versions, *(held.weight_version for held in _held(draft))), default=0)
    for publication in list(draft.publications.values()):
        doc = publication.doc
        if doc.state is PublicationState.MOVING and doc.weight_version < draft.weight_version:
            reason = f"version {draft.weight_version} had followed it, so it had ended"
            become(draft, publication, PublicationState.ABANDONED, reason)
        elif doc.state is PublicationState.COMMITTED and doc.weight_version < newest:
            become(draft, publication, PublicationState.RELEASED, f"version {newest} was committed")
    draft.committed = _newest(draft)


def _held(draft: Draft) -> Iterator[Holding]:
    """What members hold by a verdict."""
    for member in draft.members.values():
        if member.said is not None and member.said.holding is not None:
            yield member.said.holding
