"""What a person sees of a job: hosts, members, groups, the transfer in hand as it fills, and why something waits. Pure.

Made of the state machine's state for the page and for `elastic-reshard watch`; nothing is decided by it. Entries hold plain
data (`vars` of one is JSON-ready). Times are seconds since the supervisor started, as of its events.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from elastic_reshard.protocol.docs import MemberState, TransferDoc
from elastic_reshard.protocol.messages import MoverSaid
from elastic_reshard.supervisor.state import Group, Job, Publication
from elastic_reshard.supervisor.waiting import Wait, waits

__all__ = ["GroupSeen", "HostSeen", "MemberSeen", "Picture", "PublicationSeen", "TransferSeen", "cells_of", "picture"]

_OVER: Final = (MemberState.LOST, MemberState.REFUSED)
_MOST_BITMAP: Final = 1 << 24  # bytes; a bitmap of 128 million cells


@dataclass(frozen=True)
class HostSeen:
    """A host. heard: when it was heard last; None: not in this term."""

    connected: bool
    heard: float | None
    members: int


@dataclass(frozen=True)
class MemberSeen:
    """A member with its mover. mover: "" for none, else its state; waits: for whom that waits, or whose window, in words."""

    group: str
    rank: int
    host: str
    state: str
    reason: str
    mover: str = ""
    condemned: str = ""
    waits: str = ""


@dataclass(frozen=True)
class GroupSeen:
    """A group. there: ranks that are taken by somebody who takes part. lag: versions behind the committed one."""

    roles: list[str]
    size: int
    there: int
    hosts: list[str]
    whole: bool
    state: str
    serving: int
    lag: int
    reason: str


@dataclass(frozen=True)
class PublicationSeen:
    """A version on its way. begun: when; None: by an earlier supervisor."""

    version: int
    label: str
    group: str
    state: str
    reason: str
    begun: float | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class TransferSeen:
    """The transfer in hand. cells: by destination group, those that have landed and all that are to, as far as its movers
    have said (0: not yet)."""

    id: str
    publication: str
    version: int
    epoch: int
    state: str
    reason: str
    source: str
    begun: float
    movers: int
    out: int
    cells: dict[str, list[int]]
    sent: int
    resent: int


@dataclass(frozen=True)
class Picture:
    """Everything that there is to see now."""

    job: dict[str, Any]
    hosts: dict[str, HostSeen]
    members: dict[str, MemberSeen]
    groups: dict[str, GroupSeen]
    publications: dict[str, PublicationSeen]
    transfer: TransferSeen | None
    waits: tuple[Wait, ...]


def picture(job: Job, connected: Collection[str], now: float, began: float) -> Picture:
    """What there is to see. connected: hosts with a connection. now, began: this supervisor's clock, now and at its start."""
    members = {name: m for name, m in job.members.items() if m.doc.state not in _OVER}
    transfer = next(iter(job.transfers.values()), None)
    committed = job.publications.get(job.committed)
    newest = max(job.publications.values(), key=lambda p: p.doc.weight_version, default=None)
    return Picture(
        job={
            "name": job.name, "term": job.term, "epoch": job.membership_epoch, "recovering": job.recover_from > 0,
            "committed": committed.doc.weight_version if committed is not None else 0,
            "label": (committed.doc.label or "") if committed is not None else "",
            "newest": newest.doc.weight_version if newest is not None else 0,
            "evict": job.deadlines.evict, "late_after": job.policies.late_after,
        },
        hosts=_hosts(job, connected, began),
        members={
            name: _member(m.doc.group, m.doc.rank, m.doc.host, m.doc.state, m.doc.reason, _mover(job, name, transfer))
            for name, m in members.items()
        },
        groups={name: _group(job, g, committed) for name, g in job.groups.items()},
        publications={name: _publication(p, began) for name, p in job.publications.items()},
        transfer=_transfer(job, transfer.doc, transfer.begun - began) if transfer is not None else None,
        waits=tuple(waits(job, connected, now, began)),
    )  # fmt: skip


def _hosts(job: Job, connected: Collection[str], began: float) -> dict[str, HostSeen]:
    count: dict[str, int] = {}
    for member in job.members.values():
        if member.doc.state not in _OVER:
            count[member.doc.host] = count.get(member.doc.host, 0) + 1
    found = {}
    for name in sorted({*job.hosts, *connected, *count}):
        host = job.hosts.get(name)
        heard = round(host.heard - began, 1) if host is not None else None
        # While it is connected the moment it was heard changes with each beat, and says nothing.
        up = name in connected
        found[name] = HostSeen(up, None if up else heard, count.get(name, 0))
    return found


def _mover(job: Job, member: str, transfer: Any) -> MoverSaid | None:
    """What is worth to be seen of a member's mover: of the transfer in hand, or that it was condemned."""
    said = job.movers.get(member)
    if said is None or (transfer is not None and said.transfer != transfer.doc.id and not said.condemned):
        return None
    return said


def _member(group: str, rank: int, host: str, state: str, reason: str, said: MoverSaid | None) -> MemberSeen:
    if said is None:
        return MemberSeen(group, rank, host, str(state), reason)
    waiting = said.waits[0] if said.waits is not None else ""
    if waiting and (said.window or waiting == said.member):
        waiting = "its own window" if waiting == said.member else f"the window of {waiting}"
    return MemberSeen(group, rank, host, str(state), reason, said.state, said.condemned[:300], waiting)


def _group(job: Job, group: Group, committed: Publication | None) -> GroupSeen:
    doc = group.doc
    seated = [job.members[m] for m in doc.members if m in job.members]
    there = [m for m in seated if m.taking_part]
    last = committed.doc.weight_version if committed is not None else 0
    lands = "destination" in doc.roles
    return GroupSeen(
        roles=sorted(doc.roles), size=doc.size, there=len(there), hosts=sorted({m.doc.host for m in seated}),
        whole=doc.whole, state=str(doc.state) if lands else ("live" if doc.whole else "waiting"),
        serving=doc.serving, lag=max(0, last - doc.serving) if lands else 0, reason=doc.refused or doc.reason,
    )  # fmt: skip


def _publication(publication: Publication, began: float) -> PublicationSeen:
    doc = publication.doc
    ours = publication.begun > began
    return PublicationSeen(
        doc.weight_version, doc.label or "", doc.group, str(doc.state), doc.reason,
        round(publication.begun - began, 3) if ours else None, doc.metrics,
    )  # fmt: skip


def _transfer(job: Job, doc: TransferDoc, begun: float) -> TransferSeen:
    publication = job.publications.get(doc.publication)
    said = {m: s for m in doc.present if (s := job.movers.get(m)) is not None and s.transfer == doc.id}
    return TransferSeen(
        id=doc.id, publication=doc.publication, epoch=doc.epoch, state=str(doc.state), reason=doc.reason,
        version=publication.doc.weight_version if publication is not None else 0, source=doc.source.group,
        begun=round(begun, 3), movers=len(doc.present), out=sum(s.state in ("out", "ended") for s in said.values()),
        cells=cells_of(doc, said), sent=sum(s.sent for s in said.values()), resent=sum(s.resent for s in said.values()),
    )  # fmt: skip


def cells_of(doc: TransferDoc, said: dict[str, MoverSaid]) -> dict[str, list[int]]:
    """[landed, landed and to land] by group, of the ranks that land; what had landed before counts as landed. The second is 0
    until all of a group's movers have planned. said: what movers say of this transfer, by member."""
    found = {party.group: [0, 0] for party in sorted(doc.destinations, key=lambda p: p.group)}
    unplanned = set()
    for part in doc.landings:
        before = _set_bits(doc.basis.get(part.member, ""))
        mine = said.get(part.member)
        of = found.setdefault(part.group, [0, 0])
        of[0] += before + (mine.cells if mine is not None else 0)
        of[1] += before + (mine.to_land if mine is not None else 0)
        if mine is None or mine.state == "starting":
            unplanned.add(part.group)
    return {group: [landed, 0 if group in unplanned else wanted] for group, (landed, wanted) in found.items()}


@lru_cache(maxsize=1024)
def _set_bits(text: str) -> int:
    """How many cells of a packed bitmap are there; its length is the plan's affair. Of one that can't be read, none: the movers
    refuse it, in words."""
    if not text:
        return 0
    try:
        return int.from_bytes(zlib.decompressobj().decompress(base64.b64decode(text), _MOST_BITMAP)).bit_count()
    except (zlib.error, ValueError):  # binascii.Error is one
        return 0
