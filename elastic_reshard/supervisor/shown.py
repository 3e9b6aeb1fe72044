"""What the HTTP interface shows of a job, as documents by name."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from typing import Any, TypeVar

from fastapi import HTTPException

from elastic_reshard.protocol.docs import GroupDoc, MemberDoc, MemberState, PublicationDoc, TransferDoc
from elastic_reshard.protocol.messages import MoverSaid
from elastic_reshard.supervisor.answers import GroupProgress, Growth, HostDoc, ProgressDoc
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.domains import cliques
from elastic_reshard.supervisor.picture import cells_of
from elastic_reshard.supervisor.state import Growing, Publication

__all__ = [
    "found",
    "groups_of",
    "growth_of",
    "growths_of",
    "hosts_of",
    "known",
    "members_of",
    "progress_of",
    "publications_of",
    "transfers_of",
]

D = TypeVar("D")


def members_of(shell: Shell) -> dict[str, MemberDoc]:
    """Members by id."""
    return {k: m.doc for k, m in shell.job.members.items()}


def groups_of(shell: Shell) -> dict[str, GroupDoc]:
    """Groups by name."""
    return {k: g.doc for k, g in shell.job.groups.items()}


def publications_of(shell: Shell) -> dict[str, PublicationDoc]:
    """Publications by id."""
    return {k: p.doc for k, p in shell.job.publications.items()}


def transfers_of(shell: Shell) -> dict[str, TransferDoc]:
    """Transfers by id."""
    return {k: t.doc for k, t in shell.job.transfers.items()}


def hosts_of(shell: Shell) -> dict[str, HostDoc]:
    """Hosts by label: those that are or were connected, those that members are of, and those that are drained."""
    job = shell.job
    hosts = {
        host: HostDoc(connected=host in shell.feeds, drained=job.drained.get(host))
        for host in sorted({*job.hosts, *shell.feeds, *job.drained, *(m.doc.host for m in job.members.values())})
    }
    fabric = cliques(m.doc for m in job.members.values() if m.kept)
    for name, member in job.members.items():
        host = hosts[member.doc.host]
        host.members[name] = member.doc.state
        if member.kept and member.doc.where not in host.domains:
            host.domains.append(member.doc.where)
        if member.kept and member.doc.fabric:
            host.fabric[member.doc.fabric] = list(fabric[member.doc.fabric])
        if name in job.movers:
            host.movers[name] = job.movers[name]
    return hosts


def progress_of(shell: Shell) -> dict[str, ProgressDoc]:
    """How far each publication is that is remembered, by id."""
    return {k: _progress(shell, p) for k, p in shell.job.publications.items()}


def _progress(shell: Shell, publication: Publication) -> ProgressDoc:
    job, doc = shell.job, publication.doc
    groups = {
        name: GroupProgress(state=g.doc.state, serving=g.doc.serving)
        for name, g in job.groups.items()
        if "destination" in g.doc.roles
    }
    transfer = next((t.doc for t in job.transfers.values() if t.doc.publication == doc.id), None)
    if transfer is not None:
        _fill(groups, transfer, {m: s for m, s in job.movers.items() if s.transfer == transfer.id})
    return ProgressDoc(
        publication=doc.id, weight_version=doc.weight_version, label=doc.label, state=doc.state,
        seconds=round(time.monotonic() - publication.begun, 3), transfer=transfer.id if transfer is not None else "",
        epoch=transfer.epoch if transfer is not None else 0, cells=sum(g.cells for g in groups.values()),
        of=sum(g.of for g in groups.values()), nbytes=sum(g.nbytes for g in groups.values()), groups=groups,
    )  # fmt: skip


def _fill(groups: Mapping[str, GroupProgress], transfer: TransferDoc, said: dict[str, MoverSaid]) -> None:
    for name, (landed, wanted) in cells_of(transfer, said).items():
        if name in groups:
            groups[name].cells, groups[name].of = landed, wanted
    for part in transfer.landings:
        if part.group in groups and part.member in said:
            groups[part.group].nbytes += said[part.member].received


def growth_of(shell: Shell) -> Growth | None:
    """The grow under way, or the last one that is done."""
    growing = shell.job.growing
    return _growth(shell, growing) if growing is not None else None


def growths_of(shell: Shell) -> dict[str, Growth]:
    """Grows that are remembered, by name: the one under way or done last comes last."""
    now = shell.job.growing
    return {g.name: _growth(shell, g) for g in (*shell.job.grown, *((now,) if now is not None else ()))}


def _growth(shell: Shell, growing: Growing) -> Growth:
    there = growing.admitted if growing.done else growing.ready
    wanted = growing.groups or growing.members
    count = len(there) if growing.groups else _newcomers(shell, growing)
    return Growth(
        name=growing.name, groups=growing.groups, members=growing.members, done=growing.done, ready=growing.ready,
        admitted=growing.admitted, missing=max(0, wanted - count), cancelled=growing.cancelled,
        left=0.0 if growing.done else round(max(0.0, growing.until - time.monotonic()), 3),
    )  # fmt: skip


def _newcomers(shell: Shell, growing: Growing) -> int:
    """Members that are ready; once it is done, those of the groups that came in."""
    if growing.done:
        return growing.came
    joining = (m.doc.group for m in shell.job.members.values() if m.doc.state is MemberState.JOINING)
    return sum(group in growing.ready for group in joining)


def found(docs: Mapping[str, D], what: str, name: str) -> D:
    """The document of this name. HTTPException: 404."""
    known(docs, what, name)
    return docs[name]


def known(docs: Mapping[str, Any], what: str, *names: str, before: Container[str] = ()) -> None:
    """HTTPException 404 that says every name that is unknown, now and before."""
    unknown = [repr(name)[:200] for name in names if name not in docs and name not in before]
    if unknown:
        there = ", ".join(sorted(docs)[:16]) or "none"
        more = f" and {len(unknown) - 16} more" if len(unknown) > 16 else ""
        raise HTTPException(404, f"no {what} {', '.join(unknown[:16])}{more}; there are {there}")
