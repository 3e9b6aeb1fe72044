"""The supervisor's decisions: one pure function over plain data. No I/O, no clock, no threads.

    job, effects = step(job, events, now, covers)

The caller journals and tells what `effects` says, in that order (`supervisor.app`). After etcd's raft: the core takes
messages and time and returns what to store and to send; tests are texts of what was said and what it answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from elastic_reshard.protocol.deadlines import Deadlines, Policies
from elastic_reshard.protocol.docs import GroupDoc, MemberState
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor import (
    admission,
    drains,
    forgiving,
    holdings,
    installing,
    membership,
    needed,
    publishing,
    recovery,
    rest,
    transfers,
    unproved,
)
from elastic_reshard.supervisor.events import (
    Abandon,
    Beaten,
    CancelGrow,
    ChangePolicies,
    Cut,
    DrainHost,
    Effects,
    Event,
    Examined,
    Greeted,
    Grow,
    Leave,
    Ledgered,
    Matched,
    MemberEnded,
    Moved,
    SetPolicies,
    Spoken,
    Tick,
    UndrainHost,
)
from elastic_reshard.supervisor.state import Covers, Draft, Group, Job, Member, Publication, Transfer

__all__ = ["Job", "begin", "restore", "snapshot", "step"]


def begin(
    name: str,
    term: int,
    instance: str,
    now: float,
    *,
    deadlines: Deadlines | None = None,
    policies: Policies | None = None,
    recover_from: int = 0,
    cell: int = 1 << 20,
    verify: Literal["sampled", "full"] = "sampled",
) -> Job:
    """A job of which nothing is known. recover_from: decide nothing until so many members have said what they have.
    cell: bytes of the cells that go between hosts; verify: how much of them is compared by digests."""
    return Job(
        name, term, instance, deadlines or Deadlines(), policies or Policies(), revision=1, stepped=now,
        judge_from=now, recover_from=recover_from, cell=cell, verify=verify,
        started_with=policies or Policies(),
    )  # fmt: skip


def restore(job: Job, told: Told, weight_version: int, now: float) -> Job:
    """What the journal knows, before anybody was heard in this term. Nobody is judged for `reregister` seconds."""
    until = now + job.deadlines.reregister
    members = {
        name: Member(
            doc,
            None,
            until,
            gone=doc.state in (MemberState.ORPHANED, MemberState.LOST),
            leave_by=until + doc.leave_within if doc.leave_within is not None else None,
            since=now,
        )
        for name, doc in told.members.items()
        if doc is not None
    }
    groups = {name: _restored(doc) for name, doc in told.groups.items() if doc is not None}
    publications = {name: Publication(doc, now) for name, doc in told.publications.items() if doc is not None}
    transfers_ = {k: Transfer(doc, now, now, now) for k, doc in told.transfers.items() if doc is not None}
    return replace(
        job, membership_epoch=told.membership_epoch, weight_version=weight_version, committed=told.committed,
        members=members, groups=groups, publications=publications,
        transfers=transfers_, judge_from=until, stepped=now,
        waiting=tuple(n for n, m in members.items() if _unseated(m, groups)),
    )  # fmt: skip


def _unseated(member: Member, groups: Mapping[str, Group]) -> bool:
    group = groups.get(member.doc.group)
    seated = group is not None and group.doc.seats(member.doc.id, member.doc.rank)
    return member.doc.state is MemberState.JOINING and not seated


def _restored(doc: GroupDoc) -> Group:
    """Tickets and what a group serves are not on disk: the members say both. A verdict that is on disk was given."""
    return Group(doc.model_copy(update={"ticket": None}), restored=True)


def snapshot(job: Job) -> Told:
    """The whole view."""
    return Told(
        term=job.term, instance=job.instance, base=0, revision=job.revision, membership_epoch=job.membership_epoch,
        committed=job.committed, members={k: m.doc for k, m in job.members.items()},
        groups={k: g.doc for k, g in job.groups.items()},
        publications={k: p.doc for k, p in job.publications.items()},
        transfers={k: t.doc for k, t in job.transfers.items()},
    )  # fmt: skip


def step(job: Job, events: Sequence[Event], now: float, covers: Covers) -> tuple[Job, Effects]:
    """The next state and what is to be done. `now`: seconds of a monotonic clock. covers(layout, ranks): whether these
    source ranks hold every element of a layout. Call it four times a beat at least (`pace`), with Tick if nothing happened."""
    draft = Draft(job, now, covers)
    if now - job.stepped > 2 * job.deadlines.beat:
        forgiving.late(draft)
    for event in events:
        _take_in(draft, event)
    if not recovery.recovering(draft):
        membership.tick(draft)
        if not rest.at_rest(draft, events):
            draft.settled = now if _settle(draft) and rest.rests(draft) else None
    needed.prune(draft)
    return draft.done()


def _settle(draft: Draft) -> bool:
    """Until nothing changes: an admission can complete a publication, a verdict can release one, and so on. Whether it came to
    that."""
    for _ in range(8):
        before = (draft.changes(), len(draft.examine), len(draft.match))
        unproved.count(draft)
        drains.settle(draft)
        membership.settle(draft)
        admission.settle(draft)
        membership.clear(draft)
        holdings.prune(draft)
        _reconcile(draft)
        publishing.settle(draft)
        holdings.note_near(draft)
        transfers.settle(draft)
        installing.settle(draft)
        publishing.settle(draft)
        if (draft.changes(), len(draft.examine), len(draft.match)) == before:
            return True
    return False


def _take_in(draft: Draft, event: Event) -> None:
    match event:
        case Greeted():
            _greet(draft, event)
        case Spoken() | Beaten() | MemberEnded() | Moved() | Ledgered() | Cut():
            _hear(draft, event)
        case (
            Leave() | DrainHost() | UndrainHost() | Grow() | CancelGrow() | Abandon() | SetPolicies() | ChangePolicies()
        ):
            _obey(draft, event)
        case Examined():
            admission.examined(draft, event)
        case Matched(source, destination, fault):
            draft.fits[source, destination] = fault
            draft.matching.discard((source, destination))
        case Tick():
            pass


def _greet(draft: Draft, event: Greeted) -> None:
    """A watchdog has said all that it knows."""
    host = event.hello.host
    recovery.learn(draft, event.hello)
    membership.greet(draft, event)
    for ledger in event.hello.ledgers:
        transfers.ledgered(draft, Ledgered(host, ledger))
    unproved.named(draft, event.hello)
    for mover in event.hello.movers:
        transfers.moved(draft, Moved(host, mover))


def _hear(draft: Draft, event: Spoken | Beaten | MemberEnded | Moved | Ledgered | Cut) -> None:
    """What hosts say."""
    match event:
        case Spoken(host, statement):
            membership.speak(draft, host, statement)
        case Beaten(host):
            membership.sign_of_life(draft, host)
        case MemberEnded():
            membership.end(draft, event)
        case Moved():
            membership.sign_of_life(draft, event.host)
            transfers.moved(draft, event)
        case Ledgered():
            transfers.ledgered(draft, event)
        case Cut(host):
            membership.cut(draft, host)


def _obey(
    draft: Draft,
    event: Leave | DrainHost | UndrainHost | Grow | CancelGrow | Abandon | SetPolicies | ChangePolicies,
) -> None:
    """What people want."""
    match event:
        case Leave():
            membership.leave(draft, event)
        case DrainHost():
            drains.drain(draft, event)
        case UndrainHost():
            drains.undrain(draft, event)
        case Grow():
            admission.grow(draft, event)
        case CancelGrow():
            admission.cancel(draft, event)
        case Abandon():
            publishing.abandon(draft, event)
        case SetPolicies(policies):
            _decide_by(draft, policies or draft.job.started_with)
        case ChangePolicies(changes):
            _decide_by(draft, replace(draft.policies, **changes))


def _decide_by(draft: Draft, policies: Policies) -> None:
    draft.policies = policies
    draft.log("policies.changed", policies=str(policies))


def _reconcile(draft: Draft) -> None:
    """After a restart: what a restored group serves is what all its members, the same as before, say by one verdict."""
    for group in list(draft.groups.values()):
        doc = group.doc
        if not group.restored or not doc.whole or "destination" not in doc.roles or doc.ticket:
            continue
        members = [m for _, m in draft.group_members(group)]
        if not all(m.taking_part for m in members):
            continue
        held = {(m.said.holding.ticket, m.said.holding.publication, m.said.holding.weight_version)
                if m.said is not None and m.said.holding is not None else None for m in members}  # fmt: skip
        one = held.pop() if len(held) == 1 else None
        serving = one[2] if one is not None else 0
        draft.change_group(doc.name, serving=serving, serving_publication=one[1] if one is not None else "")
