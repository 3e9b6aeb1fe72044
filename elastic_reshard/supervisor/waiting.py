"""Why something waits, in words for a person: from the supervisor's state, with the moment at which the waiting ends. Pure.

Each sentence names who, for whom or what, and what happens then. Nothing is decided here; the rules are told where they are
kept (`publishing`, `transfers`, `installing`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from elastic_reshard.protocol.docs import GroupState, MemberState, PublicationState, TransferDoc, TransferState
from elastic_reshard.protocol.ids import name_of
from elastic_reshard.protocol.messages import MoverSaid
from elastic_reshard.supervisor.networks import patience
from elastic_reshard.supervisor.recovery import heard
from elastic_reshard.supervisor.state import Group, Job, Member, Publication, Transfer
from elastic_reshard.supervisor.unproved import unproved
from elastic_reshard.supervisor.words import plain

__all__ = ["Wait", "waits"]

_NAMED: Final = 4  # members that a sentence names


@dataclass(frozen=True)
class Wait:
    """tone: "calm" is the usual course, "late" costs time, "bad" wants somebody to look. until: when it ends by itself."""

    about: str
    why: str
    tone: Literal["calm", "late", "bad"] = "calm"
    until: float | None = None


def waits(job: Job, connected: Collection[str], now: float, began: float) -> Iterator[Wait]:
    """All that waits, the most general first; members by the names that people gave them."""
    for wait in _all(job, connected, now, began):
        yield replace(wait, about=plain(wait.about), why=plain(wait.why))


def _all(job: Job, connected: Collection[str], now: float, began: float) -> Iterator[Wait]:
    yield from _supervisor(job, now, began)
    yield from _hosts(job, connected, began)
    yield from _growing(job, began)
    for group in job.groups.values():
        yield from _seats(job, group)
    for member in job.members.values():
        yield from _member(member, began)
        if unproved(job, member.doc.id):
            why = f"its mover was killed in transfer {job.movers[member.doc.id].transfer} and hangs in the kernel"
            remedy = f"nothing is moved from or to it before that has ended. See to host {member.doc.host}"
            yield Wait(member.doc.id, f"{why}: {remedy}", "bad")
    yield from _publish(job, now, began)
    yield from _moving(job, now, began)
    yield from _suspended(job, began)
    for transfer in job.transfers.values():
        yield from _transfer(job, transfer, began)
    for group in job.groups.values():
        yield from _install(job, group, now, began)


def _names(members: Collection[str]) -> str:
    """Members by the names that people gave them."""
    named = [name_of(m) or m for m in members]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more


def _verb(who: Collection[object], one: str, several: str) -> str:
    return one if len(who) == 1 else several


def _version(publication: Publication | None) -> str:
    if publication is None:
        return "a version"
    label = f" ({publication.doc.label})" if publication.doc.label else ""
    return f"version {publication.doc.weight_version}{label}"


# -- who is there


def _supervisor(job: Job, now: float, began: float) -> Iterator[Wait]:
    if job.recover_from:
        came = heard(job.members)
        why = f"the journal was lost: waits until {job.recover_from} members have said what they have; {came} have"
        yield Wait("supervisor", why, "bad")
    elif now < job.judge_from and (job.term > 1 or job.members):
        yield Wait(
            "supervisor", "has just started or came late: nobody is judged for now", "calm", job.judge_from - began
        )


def _hosts(job: Job, connected: Collection[str], began: float) -> Iterator[Wait]:
    for name, host in job.hosts.items():
        if name not in connected:
            why = "its connection is gone; if it stays silent its members are given up"
            yield Wait(f"host {name}", why, "bad", host.heard + job.deadlines.evict - began)
    for name in job.drained:
        left = [m.doc.id for m in job.members.values() if m.doc.host == name and m.present]
        if left:
            yield Wait(f"host {name}", f"is being emptied: {_names(left)} still there")


def _growing(job: Job, began: float) -> Iterator[Wait]:
    growing = job.growing
    if growing is None or growing.done:
        return
    asked = f"{growing.groups} groups" if growing.groups else f"{growing.members} members"
    why = f"who joins is held until {asked} are there ({len(growing.ready)} groups are ready); then those come in"
    yield Wait(f"grow {growing.name}", why, "calm", growing.until - began)


def _seats(job: Job, group: Group) -> Iterator[Wait]:
    doc = group.doc
    if doc.refused:
        yield Wait(doc.name, f"its layouts cannot be served: {doc.refused}", "bad")
    if doc.whole:
        return
    empty = [rank for rank, m in enumerate(doc.members) if not _there(job, m)]
    if empty:
        ranks = ", ".join(map(str, empty[:_NAMED])) + (" and more" if len(empty) > _NAMED else "")
        are = _verb(empty, "is", "are")
        why = f"{len(empty)} of its {doc.size} ranks {are} missing (rank {ranks}); it takes part again when whole"
        yield Wait(doc.name, why, "bad")
    elif doc.source_layout is None and doc.destination_layout is None and not doc.refused:
        yield Wait(doc.name, "all ranks are there; their layouts are being joined and compared")


def _there(job: Job, name: str) -> bool:
    member = job.members.get(name)
    return member is not None and member.present


def _member(member: Member, began: float) -> Iterator[Wait]:
    doc = member.doc
    who = name_of(doc.id)
    if doc.state is MemberState.LEAVING:
        yield Wait(who, "leaves once its group's install is over")
    elif member.leave_by is not None and member.present:
        yield Wait(who, "was asked to leave; then it is left out", "calm", member.leave_by - began)
    elif doc.state is MemberState.FORFEIT:
        yield Wait(who, f"is given up without proof of its death ({doc.reason}); its memory is reused by nobody", "bad")


# -- publications


def _publish(job: Job, now: float, began: float) -> Iterator[Wait]:
    """Offered, but not begun."""
    moving = any(p.doc.state is PublicationState.MOVING for p in job.publications.values())
    for group in job.groups.values():
        seated = [job.members[m] for m in group.doc.members if m in job.members]
        seq = max((fill.seq for member in seated for fill in member.offers), default=0)
        if seq <= group.doc.floor or not group.doc.whole:
            continue
        lacking = [m.doc.id for m in seated if seq not in {fill.seq for fill in m.offers}]
        if lacking:
            why = f"its newest publish waits for {_names(lacking)}; without them then, if the others cover the model"
            noticed = group.first_ready[0] == seq
            until = group.first_ready[1] + job.policies.gather_window - began if noticed else None
            yield Wait(group.doc.name, why, "late", until)
        elif moving:
            yield Wait(group.doc.name, "its newest publish waits for the version that moves")
    most, last = job.policies.max_lag, job.publications.get(job.committed)
    if most is None or last is None or moving:
        return
    far = [g for g in job.groups.values() if _lags(g, last, most) and not _late(job, g, now)]
    if far:
        who = ", ".join(g.doc.name for g in far[:_NAMED])
        yield Wait("next version", f"waits for {who}, more than {most} versions behind (max_lag), to install", "late")


def _lags(group: Group, last: Publication, most: int) -> bool:
    doc = group.doc
    return doc.whole and "destination" in doc.roles and last.doc.weight_version - doc.serving > most


def _late(job: Job, group: Group, now: float) -> bool:
    return group.behind_since is not None and now - group.behind_since >= job.policies.late_after


def _moving(job: Job, now: float, began: float) -> Iterator[Wait]:
    """Begun, but not committed."""
    for publication in job.publications.values():
        if publication.doc.state is not PublicationState.MOVING:
            continue
        lands = [g for g in job.groups.values() if g.doc.whole and "destination" in g.doc.roles]
        lacking = sorted(g.doc.name for g in lands if g.doc.state is GroupState.LANDING)
        complete = sum(g.doc.state is GroupState.COMPLETE for g in lands)
        until = publication.begun + job.policies.late_after
        if lacking and now < until:
            who = ", ".join(lacking[:_NAMED])
            why = f"commits when {who} {_verb(lacking, 'has', 'have')} all of it, or without who is late"
            yield Wait(_version(publication), why, "calm", until - began)
        elif complete < job.policies.min_groups:
            why = f"needs {job.policies.min_groups} complete groups to commit (min_groups), {complete} are"
            yield Wait(_version(publication), why, "late")


def _suspended(job: Job, began: float) -> Iterator[Wait]:
    held = job.suspended
    if held is not None:
        why = f"nobody reachable holds some of it ({held.reason[:300]}); given up then, unless they come back"
        yield Wait(_version(job.publications.get(held.publication)), why, "bad", held.until - began)


# -- transfers


def _transfer(job: Job, transfer: Transfer, began: float) -> Iterator[Wait]:
    doc = transfer.doc
    said = {m: s for m in doc.present if (s := job.movers.get(m)) is not None and s.transfer == doc.id}
    about = f"transfer of epoch {doc.epoch}"
    if doc.state is TransferState.FORMING:
        late = [m for m in doc.present if m not in said or said[m].state == "starting"]
        why = f"the movers of {_names(late)} start and plan" if late else "its movers meet"
        yield Wait(about, why, "calm", transfer.since + job.deadlines.form - began)
    elif doc.state is TransferState.BREAKING:
        left = [m for m in doc.present if m in said and said[m].state not in ("out", "ended")]
        why = f"is broken off ({doc.reason[:300]})" + (f"; not out yet: {_names(left)}" if left else "")
        yield Wait(about, why, "bad")
    elif doc.state is TransferState.STOPPING:
        yield Wait(about, f"ends after the round in hand: {doc.reason[:300]}", "late")
    else:
        yield from _running(job, transfer, doc, said, began)


def _running(
    job: Job, transfer: Transfer, doc: TransferDoc, said: dict[str, MoverSaid], began: float
) -> Iterator[Wait]:
    pairs: dict[str, list[str]] = {}
    shut: dict[str, list[str]] = {}
    for member, mover in said.items():
        if mover.waits is not None:
            of = shut if mover.window or mover.waits[0] == member else pairs
            of.setdefault(mover.waits[0], []).append(member)
    if shut:  # then nothing stalls
        yield from _windows(job, transfer, doc, shut, began)
        return
    limit = patience(doc, job.deadlines.stall, job.policies)
    # Who is waited for and itself waits is not the one to look at.
    ends = [p for p in pairs if p not in said or said[p].waits is None] or list(pairs)
    for peer in ends[:_NAMED]:
        who = f"{_names(pairs[peer])} {_verb(pairs[peer], 'waits', 'wait')}"
        why = f"{who} for cells of {_names([peer])}; broken off if none comes"
        yield Wait(f"transfer of epoch {doc.epoch}", why, "calm", transfer.moved + limit - began)


def _windows(
    job: Job, transfer: Transfer, doc: TransferDoc, shut: dict[str, list[str]], began: float
) -> Iterator[Wait]:
    """Members that compute, so that no round begins in which they take part."""
    publication = job.publications.get(doc.publication)
    moving = publication is not None and publication.doc.state is PublicationState.MOVING
    for peer in list(shut)[:_NAMED]:
        others = [member for member in shut[peer] if member != peer]
        why = f"the window of {_names([peer])} is closed: it computes"
        if others:
            why += f", and {_names(others)} {_verb(others, 'waits', 'wait')} for it"
        lands = moving and any(part.member == peer for part in doc.landings)
        until = transfer.begun + job.policies.late_after - began if lands else None
        yield Wait(f"transfer of epoch {doc.epoch}", why + ("; left behind then" if lands else ""), "calm", until)


# -- installs


def _install(job: Job, group: Group, now: float, began: float) -> Iterator[Wait]:
    doc = group.doc
    last = job.publications.get(job.committed)
    if "destination" not in doc.roles or not doc.whole:
        return
    members = [job.members[m] for m in doc.members if m in job.members]
    if doc.ticket is not None:
        pulled = sum(m.said is not None and m.said.install.outcome == "pulled" for m in members)
        why = f"installs version {doc.ticket.weight_version}: {pulled} of {doc.size} ranks have pulled it"
        yield Wait(doc.name, why, "calm", group.ticket_until - began)
    elif doc.state is GroupState.PARTIAL:
        why = doc.verdict.reason if doc.verdict is not None else doc.reason
        yield Wait(doc.name, f"its install broke off, it must not serve: {why[:300]}. Install again", "bad")
    elif last is not None and doc.serving_publication != last.doc.id:
        yield from _behind(job, group, last, members, now, began)


def _behind(
    job: Job, group: Group, last: Publication, members: list[Member], now: float, began: float
) -> Iterator[Wait]:
    doc = group.doc
    _, until = job.given_up.get((last.doc.id, doc.name), (None, 0.0))
    if now < until:
        why = f"can't have {_version(last)} from those who are reachable; tried again when that changes, or"
        yield Wait(doc.name, why, "bad", until - began)
        return
    asking = [m for m in members if m.said is not None and m.said.install.asking]
    if (
        doc.state in (GroupState.COMPLETE, GroupState.LEFT_BEHIND)
        and len(asking) < len(members)
        and not _landing(job, doc.name)
    ):
        idle = [m.doc.id for m in members if m not in asking]
        tone: Literal["calm", "late"] = "late" if doc.state is GroupState.LEFT_BEHIND else "calm"
        yield Wait(
            doc.name,
            f"may install {_version(last)}: {_names(idle)} {_verb(idle, 'has', 'have')} not called install",
            tone,
        )
    elif doc.state is GroupState.LEFT_BEHIND:
        yield Wait(doc.name, f"is late with {_version(last)}: it gets it when nobody else waits", "late")


def _landing(job: Job, group: str) -> bool:
    return any(group == party.group for t in job.transfers.values() for party in t.doc.destinations)
