"""Members: who is there, who leaves, who is given up, which groups break. Pure; part of `core.step`.

What is missing here on purpose: a way back from LOST, and any way to CURRENT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic_reshard.protocol.base import fitting
from elastic_reshard.protocol.docs import EraDoc, MemberDoc, MemberState
from elastic_reshard.protocol.messages import Statement
from elastic_reshard.supervisor.domains import domain_for
from elastic_reshard.supervisor.events import Greeted, Leave, MemberEnded
from elastic_reshard.supervisor.state import Draft, Group, Host, Member

__all__ = ["become", "clear", "cut", "end", "greet", "leave", "out", "settle", "sign_of_life", "speak", "tick"]

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
    doc = member.doc.model_copy(update={"state": state, "reason": fitting(reason)})
    draft.put_member(replace(member, doc=doc, since=draft.now))


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
    for member in draft.members_at(hello.host):
        unsure = member.present or (not member.gone and member.doc.state in _OUT)
        if unsure and member.vouched_by is None:
            draft.put_member(replace(member, vouched_by=draft.now + draft.deadlines.evict))
    if known is not None and known.watchdog and known.watchdog != hello.watchdog:
        draft.log("watchdog.replaced", host=hello.host, was=known.watchdog, now=hello.watchdog)
    draft.hosts[hello.host] = Host(hello.host, draft.now, draft.now, hello.watchdog, connected=True)
    draft.snapshots.append(hello.host)
    for statement in hello.statements:
        speak(draft, hello.host, statement)
    for member_ in hello.ended:
        end(draft, MemberEnded(hello.host, member_, arenas_kept=True, how="had ended before its watchdog connected"))
    # A watchdog names the dead as long as it keeps what they left: it does not, if it came after one that had gone.
    named = {statement.member for statement in hello.statements} | set(hello.ended)
    for member in draft.members_at(hello.host):
        if member.gone and member.kept and member.doc.id not in named:
            end(
                draft,
                MemberEnded(hello.host, member.doc.id, arenas_kept=False, how="its host keeps its memory no more"),
            )


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
            state=MemberState.JOINING, domain=domain_for(draft, host, said),
            fabric=fitting(said.reach.fabric) if said.reach is not None else "",
        )  # fmt: skip
        member = Member(doc)
        draft.put_member(member)
        apart = {"domain": doc.domain} if doc.domain else {}
        draft.log("member.joining", member=doc.id, group=doc.group, rank=doc.rank, host=host, **apart)
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
    """A person asks members to leave: they are told, and left out when their time is over, or at once by force."""
    groups = {event.group, *event.groups} - {""}
    for member in list(draft.members.values()):
        if not (member.doc.id in event.members or member.doc.group in groups or member.doc.host == event.host):
            continue
        if member.present and event.force:
            out(draft, member, "left out by force")
        elif member.present:
            draft.durable = True
            doc = member.doc.model_copy(update={"leave_within": event.within})
            draft.put_member(replace(member, doc=doc, leave_by=draft.now + event.within, by_drain=False))
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
            del draft.hosts[host.name]
            draft.silent.append(host.name)
            draft.log("host.silent", host=host.name, members=[m.doc.id for m in silent])
    for member in list(draft.members.values()):
        if member.vouched_by is not None and draft.now >= member.vouched_by:
            draft.put_member(replace(member, vouched_by=None))
            member = draft.members[member.doc.id]
            if member.present:
                become(draft, member, MemberState.FORFEIT, "its host's watchdog does not know it")
            elif member.doc.state in _OUT:  # one that is FORFEIT may still come back: nobody has seen its end
                draft.put_member(replace(member, gone=True))
        if member.leave_by is not None and draft.now >= member.leave_by and member.present:
            draft.put_member(replace(member, leave_by=None))
            out(draft, draft.members[member.doc.id], "asked to leave, and did not in time")


# -- what should be, compared with what is


def settle(draft: Draft) -> None:
    """Members that leave, and groups that broke."""
    for member in list(draft.members.values()):
        if member.doc.state is MemberState.LEAVING and draft.groups[member.doc.group].doc.ticket is None:
            out(draft, member, "left")
    for group in list(draft.groups.values()):
        if group.doc.whole and any(_left_out(m) for _, m in draft.group_members(group)):
            _break(draft, group)


def _left_out(member: Member) -> bool:
    return member.gone or member.doc.state not in (MemberState.LIVE, MemberState.LEAVING)


def _break(draft: Draft, group: Group) -> None:
    """A group that lost a member serves nothing until it is whole and has installed again."""
    draft.durable = True
    missing = [m.doc.id for _, m in draft.group_members(group) if _left_out(m)]
    draft.groups[group.doc.name] = replace(group, restored=False)
    draft.change_group(group.doc.name, whole=False, reason=fitting(f"without {', '.join(missing)}"))
    draft.log("group.broken", group=group.doc.name, missing=missing, serving=group.doc.serving)


def _has_seat(draft: Draft, member: Member) -> bool:
    group = draft.groups.get(member.doc.group)
    return group is not None and group.doc.seats(member.doc.id, member.doc.rank)


def _vanished(draft: Draft, held: Sequence[Member]) -> bool:
    """Whether the hosts of all members that might still live were given up so long ago that nobody expects them."""
    if not all(m.doc.state in (*_OUT, MemberState.FORFEIT) for m in held) or draft.now < draft.judge_from:
        return False
    recent = any(
        m.doc.state is MemberState.FORFEIT and draft.now - m.since < draft.deadlines.forget - draft.deadlines.evict
        for m in held
    )
    return not recent and not any(draft.in_use(m.doc.id) for m in held)


def clear(draft: Draft) -> None:
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
        if name not in owed and (all(m.doc.state in _OUT for m in held) or _vanished(draft, held)):
            draft.durable = True
            draft.drop_group(name)
            draft.log("group.gone", group=name)
    for member in list(draft.members.values()):
        # Who was left out but still runs must not come back as if it were new.
        gone = member.gone or member.said is None or member.said.leaving
        over = member.doc.state is MemberState.FORFEIT or (gone and member.doc.state in _OUT)
        if over and not _has_seat(draft, member) and not draft.in_use(member.doc.id):
            draft.drop_member(member.doc.id)
            draft.movers.pop(member.doc.id, None)
