"""Members and groups: who is there, who has a seat, which groups are whole. Pure; part of `core.step`.

A group is admitted whole: all its ranks are there, their fragments make one layout, and that layout fits every layout on
the other side. What is missing here on purpose: a way back from LOST, and any way to CURRENT.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_reshard.protocol.docs import EraDoc, GroupDoc, GroupState, MemberDoc, MemberState
from elastic_reshard.protocol.messages import Statement
from elastic_reshard.supervisor.counting import next_era
from elastic_reshard.supervisor.events import Examine, Examined, Greeted, Leave, MemberEnded
from elastic_reshard.supervisor.state import Draft, Fragments, Group, Host, Member

__all__ = ["become", "cut", "end", "examined", "greet", "leave", "out", "settle", "sign_of_life", "speak", "tick"]

_OUT = (MemberState.LOST, MemberState.REFUSED)


def become(draft: Draft, member: Member, state: MemberState, reason: str = "") -> None:
    """The one way in which a member's state changes. Leaving the membership ends the epoch."""
    if member.doc.state is state:
        return
    draft.log(f"member.{state}", member=member.doc.id, group=member.doc.group, was=str(member.doc.state), reason=reason)
    took_part = member.doc.state in (MemberState.LIVE, MemberState.LEAVING)
    if took_part and state not in (MemberState.LIVE, MemberState.LEAVING):
        draft.epoch_ended = draft.durable = True
    draft.durable |= state in (MemberState.ORPHANED, MemberState.LOST, MemberState.FORFEIT)
    draft.put_member(replace(member, doc=member.doc.model_copy(update={"state": state, "reason": reason})))


def out(draft: Draft, member: Member, reason: str) -> None:
    """A member takes part no more: its arenas go on serving while something in them is needed."""
    useful = member.kept and (draft.in_use(member.doc.id) or _may_be_minted(draft, member))
    become(draft, member, MemberState.ORPHANED if useful else MemberState.LOST, reason)
    if member.doc.id in draft.waiting:
        draft.waiting.remove(member.doc.id)


def _may_be_minted(draft: Draft, member: Member) -> bool:
    """Whether a publish that lies in the member's slots may still begin: what the others lack of it they may yet offer."""
    group = draft.groups.get(member.doc.group)
    eras = [e for e in group.doc.eras if member.doc.id in e.members] if group is not None else []
    if group is None or member.said is None:
        return bool(eras) and draft.now < draft.judge_from
    return any(
        fill.seq > max(era.start, group.doc.floor) and _may_be_whole(draft, era, fill.seq)
        for era in eras
        for fill in member.offers
    )


def _may_be_whole(draft: Draft, era: EraDoc, seq: int) -> bool:
    there = [draft.members.get(name) for name in era.members]
    ranks = [r for r, m in enumerate(there) if m is not None and (m.present or any(f.seq == seq for f in m.offers))]
    return len(ranks) == len(there) or draft.covers(era.layout, frozenset(ranks))


def sign_of_life(draft: Draft, host: str) -> None:
    """Something was heard from a host."""
    known = draft.hosts.get(host)
    if known is not None:
        draft.hosts[host] = replace(known, heard=draft.now)


def greet(draft: Draft, event: Greeted) -> None:
    """A watchdog has connected. Whom it does not name it must name within `evict`: it may be a fresh one, and what came
    last of an earlier connection may have been old."""
    hello = event.hello
    known = draft.hosts.get(hello.host)
    for member in list(draft.members.values()):
        unsure = member.present or (not member.gone and member.doc.state in _OUT)
        if member.doc.host == hello.host and unsure and member.vouched_by is None:
            draft.put_member(replace(member, vouched_by=draft.now + draft.deadlines.evict))
    if known is not None and known.watchdog and known.watchdog != hello.watchdog:
        draft.log("watchdog.replaced", host=hello.host, was=known.watchdog, now=hello.watchdog)
    draft.hosts[hello.host] = Host(hello.host, draft.now, hello.watchdog, connected=True)
    draft.snapshots.append(hello.host)
    for statement in hello.statements:
        speak(draft, hello.host, statement)
    for member_ in hello.ended:
        end(draft, MemberEnded(hello.host, member_, arenas_kept=True, how="had ended before its watchdog connected"))


def cut(draft: Draft, host: str) -> None:
    """A connection is gone. That alone means nothing."""
    if host in draft.hosts:
        draft.hosts[host] = replace(draft.hosts[host], connected=False)


def speak(draft: Draft, host: str, said: Statement) -> None:
    """A member's statement: the newest counts, whatever was lost or doubled on the way."""
    sign_of_life(draft, host)
    draft.heard.setdefault(host, {})[said.member] = said.number
    member = draft.members.get(said.member)
    if member is None:
        if said.leaving and not draft.in_use(said.member):
            return
        doc = MemberDoc(
            id=said.member, group=said.group.name, rank=said.group.rank, roles=said.roles, host=host,
            state=MemberState.JOINING,
        )  # fmt: skip
        member = Member(doc)
        draft.put_member(member)
        draft.log("member.joining", member=doc.id, group=doc.group, rank=doc.rank, host=host)
        draft.waiting.append(doc.id)
    if member.said is not None and said.number < member.said.number:
        return
    draft.put_member(replace(member, said=said, vouched_by=None))
    member = draft.members[said.member]
    if member.doc.state is MemberState.FORFEIT:
        # It was cut off, not dead. It starts again as a joiner: its group must install anew.
        become(draft, member, MemberState.JOINING, "its host came back")
        if not _has_seat(draft, member):
            draft.waiting.append(member.doc.id)
    elif said.leaving and member.doc.state is MemberState.LIVE:
        become(draft, member, MemberState.LEAVING, "it leaves")
    elif said.leaving and member.doc.state in (MemberState.JOINING, MemberState.REFUSED):
        out(draft, member, "left")


def end(draft: Draft, event: MemberEnded) -> None:
    """A member's process has ended: a fact, by its host's watchdog."""
    sign_of_life(draft, event.host)
    member = draft.members.get(event.member)
    if member is None or (member.gone and member.kept == event.arenas_kept):
        return
    draft.put_member(replace(member, gone=True, kept=event.arenas_kept and member.kept, vouched_by=None))
    member = draft.members[event.member]
    if member.doc.state not in _OUT:
        out(draft, member, event.how or "its process has ended")


def leave(draft: Draft, event: Leave) -> None:
    """A person asks members to leave: they are told, and left out when their time is over."""
    for member in list(draft.members.values()):
        if (member.doc.id in event.members or member.doc.group == event.group) and member.present:
            doc = member.doc.model_copy(update={"leave_within": event.within})
            draft.put_member(replace(member, doc=doc, leave_by=draft.now + event.within))
            draft.log("member.leave_asked", member=doc.id, within=event.within)


def tick(draft: Draft) -> None:
    """Judge by time: hosts that are silent, members that nobody vouches for, members that were asked to leave."""
    if draft.now < draft.judge_from:
        return
    evict = draft.deadlines.evict
    for host in list(draft.hosts.values()):
        if draft.now - host.heard >= evict:
            silent = [m for m in draft.members.values() if m.doc.host == host.name and m.present]
            for member in silent:
                become(draft, member, MemberState.FORFEIT, f"host {host.name} was silent for {evict} s")
            if not silent or not host.connected:
                del draft.hosts[host.name]
                draft.log("host.silent", host=host.name, members=[m.doc.id for m in silent])
    for member in list(draft.members.values()):
        if member.vouched_by is not None and draft.now >= member.vouched_by:
            draft.put_member(replace(member, vouched_by=None))
            member = draft.members[member.doc.id]
            if member.present:
                become(draft, member, MemberState.FORFEIT, "its host's watchdog does not know it")
            else:
                draft.put_member(replace(member, gone=True))
        if member.leave_by is not None and draft.now >= member.leave_by and member.present:
            draft.put_member(replace(member, leave_by=None))
            out(draft, draft.members[member.doc.id], "asked to leave, and did not in time")


def examined(draft: Draft, event: Examined) -> None:
    """The joined layouts of a group's fragments are known."""
    group = draft.groups.get(event.group)
    if group is not None:
        draft.groups[event.group] = replace(group, examined=event, asked=None)


# -- what should be, compared with what is


def settle(draft: Draft) -> None:
    """Seats, admissions, groups that broke, members and groups that nobody needs any more."""
    for member in list(draft.members.values()):
        if member.doc.state is MemberState.LEAVING and draft.groups[member.doc.group].doc.ticket is None:
            out(draft, member, "left")
    for group in list(draft.groups.values()):
        if group.doc.whole and any(_left_out(m) for _, m in draft.group_members(group)):
            _break(draft, group)
    for waiting in list(draft.waiting):
        _seat(draft, draft.members[waiting])
    for name in list(draft.groups):
        _admit(draft, draft.groups[name])
    _clear(draft)


def _left_out(member: Member) -> bool:
    return member.gone or member.doc.state not in (MemberState.LIVE, MemberState.LEAVING)


def _has_seat(draft: Draft, member: Member) -> bool:
    group = draft.groups.get(member.doc.group)
    return group is not None and group.doc.members[member.doc.rank] == member.doc.id


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


def _break(draft: Draft, group: Group) -> None:
    """A group that lost a member serves nothing until it is whole and has installed again."""
    draft.durable = True
    missing = [m.doc.id for _, m in draft.group_members(group) if _left_out(m)]
    draft.groups[group.doc.name] = replace(group, restored=False)
    draft.change_group(group.doc.name, whole=False, reason=f"without {', '.join(missing)}"[:4000])
    draft.log("group.broken", group=group.doc.name, missing=missing, serving=group.doc.serving)


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
    fault = answer.fault or _elsewhere(draft, group, members)
    if not fault:
        found = _faults(draft, group, answer)
        if found is None:
            return
        fault = found
    if fault:
        _turn_down(draft, group, members, fault)
    elif _count_alike(draft, group, members):
        _welcome(draft, draft.groups[group.doc.name], members, answer)


def _elsewhere(draft: Draft, group: Group, members: list[Member]) -> str:
    """Until there are movers, all members must be able to map each other's arenas."""
    hosts = {m.doc.host for m in members} | {m.doc.host for m in draft.members.values() if m.taking_part}
    if len(hosts) == 1:
        return ""
    return (
        f"group {group.doc.name} would be on hosts {sorted(hosts)}: weights do not move between hosts yet, so all members of "
        "a job must be on one host (one host label)"
    )


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
        draft.change_group(group.doc.name, count_from=next_era(group.doc.count_from))
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
        "reason": "",
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


def _clear(draft: Draft) -> None:
    """Drop what nobody needs: orphans whose arenas are in no use, members without a seat, groups without members."""
    for member in list(draft.members.values()):
        if (
            member.doc.state is MemberState.ORPHANED
            and not draft.in_use(member.doc.id)
            and not _may_be_minted(draft, member)
        ):
            become(draft, member, MemberState.LOST, member.doc.reason)
    # Somebody waits for a seat, or what the dead have published may still begin.
    owed = {draft.members[waiting].doc.group for waiting in draft.waiting}
    owed |= {
        m.doc.group for m in draft.members.values() if m.doc.state is MemberState.ORPHANED and _may_be_minted(draft, m)
    }
    for name, group in list(draft.groups.items()):
        held = [m for _, m in draft.group_members(group)]
        if name not in owed and all(m.doc.state in _OUT for m in held):
            draft.durable = True
            draft.drop_group(name)
            draft.log("group.gone", group=name)
    for member in list(draft.members.values()):
        # Who was left out but still runs must not come back as if it were new.
        gone = member.gone or member.said is None or member.said.leaving
        over = member.doc.state is MemberState.FORFEIT or (gone and member.doc.state in _OUT)
        if over and not _has_seat(draft, member) and not draft.in_use(member.doc.id):
            draft.drop_member(member.doc.id)
