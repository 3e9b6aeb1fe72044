"""Hosts that are to be emptied and stay empty until that is lifted: whoever joins one is asked to leave too. Pure; part of
`core.step`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from elastic_reshard.supervisor.events import DrainHost, UndrainHost
from elastic_reshard.supervisor.state import Draft, Member

__all__ = ["drain", "settle", "undrain"]

# Hosts that are remembered as drained; more are forgotten, the oldest first: they are long gone.
_MOST: Final = 4096


def drain(draft: Draft, event: DrainHost) -> None:
    """A host is to be emptied. Asked again with as many seconds it changes nothing: everybody keeps the deadline."""
    if draft.drained.get(event.host) == event.within:
        return
    draft.drained.pop(event.host, None)
    draft.drained[event.host] = event.within
    draft.log("host.drained", host=event.host, within=event.within)
    while len(draft.drained) > _MOST:
        del draft.drained[next(iter(draft.drained))]
    for member in list(draft.members.values()):
        if member.doc.host == event.host and member.present and member.doc.leave_within != event.within:
            _ask(draft, member, event.within)


def undrain(draft: Draft, event: UndrainHost) -> None:
    """Lifted: who was asked only because of it and is still in may stay."""
    if draft.drained.pop(event.host, None) is None:
        return
    draft.log("host.undrained", host=event.host)
    for member in list(draft.members.values()):
        if member.doc.host == event.host and member.present and member.by_drain:
            draft.durable = True
            reason = "" if member.doc.reason == _why(event.host) else member.doc.reason
            doc = member.doc.model_copy(update={"leave_within": None, "reason": reason})
            draft.put_member(replace(member, doc=doc, leave_by=None, by_drain=False))


def settle(draft: Draft) -> None:
    """Who is on a drained host and was not asked yet is, and is told why as long as there is nothing else to say of it."""
    if not draft.drained:
        return
    for member in list(draft.members.values()):
        within = draft.drained.get(member.doc.host)
        if within is None or not member.present or member.said is None:
            continue
        if member.leave_by is None:
            _ask(draft, member, within)
        elif member.by_drain and not member.doc.reason:
            doc = member.doc.model_copy(update={"reason": _why(member.doc.host)})
            draft.put_member(replace(member, doc=doc))


def _ask(draft: Draft, member: Member, within: float) -> None:
    draft.durable = True
    doc = member.doc.model_copy(
        update={"leave_within": within, "reason": member.doc.reason or _why(member.doc.host)},
    )
    draft.put_member(replace(member, doc=doc, leave_by=draft.now + within, by_drain=True))
    draft.log("member.leave_asked", member=doc.id, within=within)


def _why(host: str) -> str:
    return f"host {host} is drained: leave, and join on another one"
