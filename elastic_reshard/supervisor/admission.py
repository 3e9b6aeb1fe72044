"""Admission: seats, whole groups, layouts that fit, and several at once (`Grow`). Pure; part of `core.step`.

A group is admitted whole: all its ranks are there, their fragments make one layout, and that layout fits every layout on
the other side.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_reshard.protocol.docs import EraDoc, GroupDoc, GroupState, MemberState
from elastic_reshard.supervisor.counting import next_era
from elastic_reshard.supervisor.events import CancelGrow, Examine, Examined, Grow
from elastic_reshard.supervisor.membership import become
from elastic_reshard.supervisor.state import Draft, Fragments, Group, Growing, Member

__all__ = ["cancel", "examined", "grow", "settle"]

# Grows that are over and remembered, so that one that is repeated by its name begins nothing anew.
_REMEMBERED = 64


def settle(draft: Draft) -> None:
    """Seats for joiners, and groups that can be admitted now."""
    for waiting in list(draft.waiting):
        _seat(draft, draft.members[waiting])
    _let_in(draft)
    for name in list(draft.groups):
        _admit(draft, draft.groups[name])
    _grown(draft)


def grow(draft: Draft, event: Grow) -> None:
    """A person wants one change instead of many. One at a time; the same request again changes nothing."""
    known = draft.growing
    over = {growing.name for growing in draft.grown}
    if event.name in over or (known is not None and (known.name == event.name or not known.done)):
        draft.log(
            "grow.refused", name=event.name, why=f"{known.name if known is not None else event.name} was asked for"
        )
        return
    if known is not None:
        draft.grown = (*draft.grown, known)[-_REMEMBERED:]
    draft.growing = Growing(event.name, event.groups, event.members, draft.now + event.within, event.within)
    draft.log("grow.waiting", name=event.name, groups=event.groups, members=event.members, within=event.within)


def cancel(draft: Draft, event: CancelGrow) -> None:
    """A grow under way is taken back: nobody is held any more."""
    growing = draft.growing
    if growing is None or growing.name != event.name or growing.done:
        return
    draft.growing = replace(growing, done=True, cancelled=True)
    draft.log("grow.cancelled", name=growing.name, ready=list(growing.ready))


def _held(draft: Draft, group: Group, members: list[Member]) -> bool:
    """A new group that is ready, and waits for the others of a Grow."""
    growing = draft.growing
    # A group that was whole before only gets its missing ranks back: that waits for nobody.
    if (
        growing is None
        or growing.done
        or group.doc.fragments
        or all(m.doc.state is not MemberState.JOINING for m in members)
    ):
        return False
    if draft.now >= growing.until or group.doc.name in growing.admitted:
        return False
    if group.doc.name not in growing.ready:
        draft.growing = replace(growing, ready=(*growing.ready, group.doc.name))
    return True


def _let_in(draft: Draft) -> None:
    """Enough are ready: all of them come in now, as one change."""
    growing = draft.growing
    if growing is None or growing.done or growing.admitted:
        return
    ready = [g for g in growing.ready if g in draft.groups and _joining(draft, draft.groups[g])]
    members = sum(_joining(draft, draft.groups[g]) for g in ready)
    enough = (growing.groups and len(ready) >= growing.groups) or (growing.members and members >= growing.members)
    draft.growing = growing = replace(growing, ready=tuple(ready))
    if enough or draft.now >= growing.until:
        draft.growing = replace(growing, admitted=growing.ready, came=members)
        draft.log("grow.admitting", name=growing.name, groups=ready, members=members)


def _joining(draft: Draft, group: Group) -> int:
    return sum(m.doc.state is MemberState.JOINING for _, m in draft.group_members(group))


def _grown(draft: Draft) -> None:
    growing = draft.growing
    if growing is None or growing.done:
        return
    inside = all(draft.groups[g].doc.whole for g in growing.admitted if g in draft.groups)
    if (growing.admitted and inside) or draft.now >= growing.until:
        draft.growing = replace(growing, done=True)
        draft.log("grow.done", name=growing.name, groups=list(growing.admitted))


def examined(draft: Draft, event: Examined) -> None:
    """The joined layouts of a group's fragments are known."""
    group = draft.groups.get(event.group)
    if group is not None:
        draft.groups[event.group] = replace(group, examined=event, asked=None)


def _seat(draft: Draft, member: Member) -> None:
    """Give a joiner its rank's seat, unless somebody may still be alive in it."""
    said = member.said
    if said is None:
        return
    spec = said.group
    group = draft.groups.get(spec.name)
    if group is None:
        doc = GroupDoc(
            name=spec.name, size=spec.size, roles=said.roles, members=("",) * spec.size, whole=False,
            state=GroupState.STALE,
        )  # fmt: skip
        group = Group(doc)
    fault = ""
    if spec.rank >= spec.size or spec.size != group.doc.size:
        fault = f"it says rank {spec.rank} of {spec.size}, but group {spec.name} has {group.doc.size} ranks"
    elif said.roles != group.doc.roles:
        fault = f"it says roles {sorted(said.roles)}, but group {spec.name} has {sorted(group.doc.roles)}"
    if fault:
        _refuse(draft, member, fault)
        return
    seated = draft.members.get(group.doc.members[spec.rank])
    if seated is not None and seated.doc.id != member.doc.id and seated.present:
        reason = f"rank {spec.rank} of {spec.name} is held by {seated.doc.id} on host {seated.doc.host}, which is alive"
        if member.doc.reason != reason:
            draft.put_member(replace(member, doc=member.doc.model_copy(update={"reason": reason})))
        return
    draft.waiting.remove(member.doc.id)
    members = list(group.doc.members)
    members[spec.rank] = member.doc.id
    draft.put_group(replace(group, doc=group.doc.model_copy(update={"members": tuple(members)})))
    draft.put_member(replace(member, doc=member.doc.model_copy(update={"reason": ""})))


def _refuse(draft: Draft, member: Member, reason: str) -> None:
    become(draft, member, MemberState.REFUSED, reason)
    if member.doc.id in draft.waiting:
        draft.waiting.remove(member.doc.id)


def _wanted(members: list[Member]) -> Fragments:
    return tuple((m.said.source, m.said.destination) if m.said else (None, None) for m in members)


def _changed_everywhere(group: Group, members: list[Member]) -> bool:
    """Whether a new layout is known from all ranks: each has another fragment than before, has said that what it has holds
    from that publish on, or has made that publish."""
    begins = max((m.said.source_from for m in members if m.said), default=0)
    return all(
        m.said.source != group.doc.fragments[m.doc.rank][0]
        or m.said.source_from >= begins
        or any(f.seq >= begins for f in m.said.fills)
        for m in members
        if m.said
    )


def _admit(draft: Draft, group: Group) -> None:
    """Admit a group, or a new layout of one, once all its ranks are there, examined and fit what others have."""
    members = [m for _, m in draft.group_members(group)]
    if len(members) < group.doc.size or not all(m.present and m.said is not None for m in members):
        return
    fragments = _wanted(members)
    if group.doc.whole and fragments == group.doc.fragments:
        if group.doc.refused:
            draft.change_group(group.doc.name, refused="")
        return
    if group.doc.whole and not _changed_everywhere(group, members):
        return
    answer = group.examined
    if answer is None or answer.fragments != fragments:
        if group.asked != fragments:
            draft.groups[group.doc.name] = replace(group, asked=fragments)
            draft.examine.append(Examine(group.doc.name, fragments))
        return
    fault = answer.fault
    if not fault:
        found = _faults(draft, group, answer)
        if found is None:
            return
        fault = found
    if fault:
        _turn_down(draft, group, members, fault)
    elif _count_alike(draft, group, members) and not _held(draft, group, members):
        _welcome(draft, draft.groups[group.doc.name], members, answer)


def _faults(draft: Draft, group: Group, answer: Examined) -> str | None:
    """Why the group's layouts do not fit the others'; "" if they do, None while that is being found out."""
    pairs = []
    if answer.source_layout and answer.destination_layout:
        pairs.append((group.doc.name, answer.source_layout, answer.destination_layout))
    for other in draft.groups.values():
        if other.doc.name == group.doc.name or not any(m.present for _, m in draft.group_members(other)):
            continue
        if answer.source_layout and other.doc.destination_layout:
            pairs.append((other.doc.name, answer.source_layout, other.doc.destination_layout))
        if answer.destination_layout and other.doc.source_layout:
            pairs.append((other.doc.name, other.doc.source_layout, answer.destination_layout))
    found = [(name, draft.fit(source, destination)) for name, source, destination in pairs]
    if any(fault is None for _, fault in found):
        return None
    return "\n".join(f"towards group {name}: {fault}" for name, fault in found if fault)


def _turn_down(draft: Draft, group: Group, members: list[Member], fault: str) -> None:
    fault = fault[:4000]
    draft.log("group.refused", group=group.doc.name, reason=fault)
    if group.doc.whole:
        draft.change_group(group.doc.name, refused=fault)
        return
    seats = list(group.doc.members)
    for member in members:
        if member.doc.state is MemberState.JOINING:
            _refuse(draft, member, fault)
            seats[member.doc.rank] = ""
    draft.change_group(group.doc.name, members=tuple(seats))


def _count_alike(draft: Draft, group: Group, members: list[Member]) -> bool:
    """A new set of incarnations counts its publishes anew, and is whole when every one has said that it does: else a survivor
    that has not heard yet would count on, and its publishes be paired with others' for ever.

    Those who were only cut off and are all back go on counting: each hears of it at another moment."""
    ids = tuple(m.doc.id for m in members)
    back = bool(group.doc.eras) and group.doc.eras[-1].members == ids
    if "source" not in group.doc.roles or back or not any(m.doc.state is MemberState.JOINING for m in members):
        return True
    if group.adopting != ids:
        draft.groups[group.doc.name] = replace(group, adopting=ids)
        draft.durable = True
        # Above what they counted before, should the group have been forgotten meanwhile: nothing is minted twice.
        before = max((m.said.count_from for m in members if m.said is not None), default=0)
        draft.change_group(group.doc.name, count_from=next_era(max(group.doc.count_from, before)))
    count_from = draft.groups[group.doc.name].doc.count_from
    return all(m.said is not None and m.said.count_from == count_from for m in members)


def _welcome(draft: Draft, group: Group, members: list[Member], answer: Examined) -> None:
    """Admit: a new epoch if anybody is new. Nothing is CURRENT by joining."""
    ids = tuple(m.doc.id for m in members)
    newcomers = [m for m in members if m.doc.state is MemberState.JOINING]
    floor = group.doc.floor
    eras = group.doc.eras
    back = bool(eras) and eras[-1].members == ids
    start = group.doc.count_from
    if answer.source_layout is not None:
        mixed = eras[-1].mixed if back else 0 < len(newcomers) < len(members)
        era = EraDoc(members=ids, start=start, layout=answer.source_layout, fragments=answer.fragments, mixed=mixed)
        past = [e for e in eras if (e.members, e.fragments) != (ids, answer.fragments) and _complete(draft, e, floor)]
        eras = (*past[-1:], era)
        if newcomers and not past and not back:
            floor = start
    for member in newcomers:
        become(draft, member, MemberState.LIVE)
    draft.epoch_ended |= bool(newcomers)
    draft.durable = True
    changes = {
        "members": ids, "whole": True, "fragments": answer.fragments, "source_layout": answer.source_layout,
        "destination_layout": answer.destination_layout, "eras": eras, "floor": floor, "count_from": start, "refused": "",
        "reason": "", "renamed": answer.renamed,
    }  # fmt: skip
    if newcomers:
        changes |= {"serving": 0, "serving_publication": ""}
    if len(newcomers) == len(members):
        changes["state"] = GroupState.STALE
    group = draft.groups[group.doc.name]
    draft.put_group(replace(group, doc=group.doc.model_copy(update=changes)))
    draft.log("group.admitted", group=group.doc.name, members=list(ids), newcomers=[m.doc.id for m in newcomers])


def _complete(draft: Draft, era: EraDoc, floor: int) -> bool:
    """Whether every rank of an era offers one same publish that was not minted yet."""
    offers = [
        {f.seq for f in m.offers if f.fragment == own} if (m := draft.members.get(name)) else set()
        for name, (own, _) in zip(era.members, era.fragments, strict=True)
    ]
    return any(seq > max(floor, era.start) for seq in set.intersection(*offers)) if offers else False
