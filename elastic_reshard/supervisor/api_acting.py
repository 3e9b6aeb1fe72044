"""The calls that change something: policies, publications, and who is in the job. Part of the HTTP interface.

Drain, shrink and grow can be waited for (`?wait=`): 200 when it is done, 202 with what is missing when that time is over.
Nothing is undone then, and the same call again begins nothing anew: it tells how far it is.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, HTTPException, Query, Response

from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.protocol.docs import (
    GroupDoc,
    MemberDoc,
    MemberState,
    PublicationDoc,
    PublicationState,
    TransferDoc,
)
from elastic_reshard.supervisor.answers import (
    AbandonFor,
    Departure,
    DrainWithin,
    Growth,
    GrowTo,
    HostDoc,
    LeaveWithin,
    PoliciesDoc,
    ShrinkBy,
)
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.events import Abandon, Grow, Leave, SetPolicies
from elastic_reshard.supervisor.state import Growing, Member

__all__ = [
    "LONGEST_WAIT",
    "acting",
    "found",
    "groups_of",
    "growth_of",
    "hosts_of",
    "members_of",
    "publications_of",
    "transfers_of",
]

# The most seconds that a call waits; clients ask again.
LONGEST_WAIT: Final = 30.0
# Hosts and requests that are remembered, so that a repeated call is known to be one.
_REMEMBERED: Final = 8192
_IN: Final = (MemberState.JOINING, MemberState.LIVE, MemberState.LEAVING)

Until = Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait until it is done.")]
D = TypeVar("D")
W = TypeVar("W", Departure, Growth)
Chosen = Callable[[MemberDoc], bool]


# -- what there is


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
    """Hosts by label: those that are or were connected, and those that members are of."""
    job = shell.job
    hosts = {host: HostDoc(connected=host in shell.feeds) for host in sorted({*job.hosts, *shell.feeds})}
    for name, member in job.members.items():
        host = hosts.setdefault(member.doc.host, HostDoc(connected=False))
        host.members[name] = member.doc.state
        if name in job.movers:
            host.movers[name] = job.movers[name]
    return hosts


def growth_of(shell: Shell) -> Growth | None:
    """The grow under way, or the last one that is done."""
    growing = shell.job.growing
    return _growth(shell, growing) if growing is not None else None


def found(docs: Mapping[str, D], what: str, name: str) -> D:
    """The document of this name. HTTPException: 404."""
    known(docs, what, name)
    return docs[name]


def known(docs: Mapping[str, Any], what: str, *names: str, before: Container[str] = ()) -> None:
    """HTTPException 404 that says every name that is unknown, now and before."""
    unknown = [repr(name) for name in names if name not in docs and name not in before]
    if unknown:
        there = ", ".join(sorted(docs)[:16]) or "none"
        raise HTTPException(404, f"no {what} {', '.join(unknown)}; there are {there}")


# -- routes


def acting(routes: APIRouter, shell: Shell) -> None:
    """Add the calls that change something."""
    _leaving(routes, shell)
    _growing(routes, shell)

    @routes.put("/v1/policies")
    async def set_policies(wanted: PoliciesDoc) -> PoliciesDoc:
        """Other policies, from now on."""
        await shell.settle(SetPolicies(Policies(**wanted.model_dump())))
        return PoliciesDoc(**asdict(shell.job.policies))

    @routes.post("/v1/publications/{publication}/abandon")
    async def abandon(publication: str, why: AbandonFor | None = None) -> PublicationDoc:
        """Give up a publication that moves. 409 for one that was committed."""
        before = found(publications_of(shell), "publication", publication)
        await shell.settle(Abandon(publication, (why or AbandonFor()).reason))
        now = publications_of(shell).get(publication)
        if now is not None and now.state is not PublicationState.ABANDONED:
            raise HTTPException(409, f"publication {publication} is {now.state}: only one that moves can be abandoned")
        return now or before.model_copy(update={"state": PublicationState.ABANDONED})


def _leaving(routes: APIRouter, shell: Shell) -> None:
    later: dict[int | str, dict[str, Any]] = {202: {"model": Departure, "description": "Not done yet; see missing."}}
    drained: OrderedDict[str, None] = OrderedDict()
    shrunk: OrderedDict[str, None] = OrderedDict()

    @routes.post("/v1/members/{member}/leave", status_code=202)
    async def leave_member(member: str, how: LeaveWithin | None = None) -> MemberDoc:
        """Ask a member to leave; it is left out when its time is over, or at once by force."""
        before = found(members_of(shell), "member", member)
        how = how or LeaveWithin()
        await shell.settle(Leave(members=(member,), within=how.within, force=how.force))
        return members_of(shell).get(member) or _gone(before)

    @routes.post("/v1/groups/{group}/leave", status_code=202)
    async def leave_group(group: str, how: LeaveWithin | None = None) -> dict[str, MemberDoc]:
        """Ask all members of a group to leave."""
        known(groups_of(shell), "group", group)
        how = how or LeaveWithin()
        about = {k: m for k, m in members_of(shell).items() if m.group == group}
        await shell.settle(Leave(group=group, within=how.within, force=how.force))
        now = members_of(shell)
        return {k: now.get(k) or _gone(m) for k, m in about.items()}

    @routes.post("/v1/hosts/{host}/drain", responses=later)
    async def drain(host: str, response: Response, how: DrainWithin | None = None, wait: Until = 0.0) -> Departure:
        """Ask all members of a host to leave. A host that was drained and is gone is done."""
        known(hosts_of(shell), "host", host, before=drained)
        _remember(drained, host, None)
        within = (how or DrainWithin()).within
        parting = _Parting(shell, lambda doc: doc.host == host, Leave(host=host, within=within))
        return _status(response, await parting.wait(wait))

    @routes.post("/v1/groups/shrink", responses=later)
    async def shrink(by: ShrinkBy, response: Response, wait: Until = 0.0) -> Departure:
        """Ask all members of these groups to leave, by one change. 404 if any of them is unknown: then nothing was done.
        Groups that were shrunk by and are gone are done."""
        groups = tuple(dict.fromkeys(by.groups))
        known(groups_of(shell), "group", *groups, before=shrunk)
        for group in groups:
            _remember(shrunk, group, None)
        parting = _Parting(shell, lambda doc: doc.group in groups, Leave(groups=groups, within=by.within))
        return _status(response, await parting.wait(wait))


def _growing(routes: APIRouter, shell: Shell) -> None:
    later: dict[int | str, dict[str, Any]] = {202: {"model": Growth, "description": "Not done yet; see missing."}}
    over: OrderedDict[str, Growth] = OrderedDict()

    def taken(name: str, wanted: GrowTo) -> Growth | None:
        """The request of this name as it is now. HTTPException: 409 while another one is under way."""
        growth = growth_of(shell)
        if growth is not None and growth.done and growth.name not in over:
            _remember(over, growth.name, growth)
        if name in over:
            growth = over[name]
        elif growth is None or growth.done:
            return None
        elif growth.name != name:
            raise HTTPException(409, _busy(growth))
        if (growth.groups, growth.members) != (wanted.groups, wanted.members):
            raise HTTPException(409, f"grow {name} asked for {_amount(growth)}; ask for more by another name")
        return growth

    @routes.post("/v1/grow", responses=later)
    async def grow(to: GrowTo, response: Response, wait: Until = 0.0) -> Growth:
        """Hold who joins until so many are there, then admit them by one change. 409 while another grow is under way."""
        name = to.name or f"grow-{uuid.uuid4().hex[:12]}"
        growth = taken(name, to)
        if growth is None:
            await shell.settle(Grow(name, to.groups, to.members, to.within))
            growth = taken(name, to)
        if growth is not None and not growth.done:
            await shell.changed(lambda: _past(shell, name), wait)
            growth = taken(name, to)
        if growth is None:
            raise HTTPException(409, f"grow {name} was not taken in; ask again")
        return _status(response, growth)

    @routes.get("/v1/grow")
    async def growing() -> Growth | None:
        """The grow under way, or the last one that is done."""
        return growth_of(shell)


# -- how far it is


class _Parting:
    """Members that are to leave, asked once each, and those that join meanwhile too."""

    def __init__(self, shell: Shell, chosen: Chosen, everybody: Leave) -> None:
        self._shell, self._chosen, self._everybody = shell, chosen, everybody
        self._asked: set[str] = set()
        self._about: dict[str, MemberDoc] = {}

    async def wait(self, seconds: float) -> Departure:
        """Ask, and return when all are out, or after so many seconds."""
        until = time.monotonic() + seconds
        while True:
            departure = self._departure()
            unasked = self._unasked()
            if unasked:
                await self._shell.settle(self._event(unasked))
                self._asked.update(unasked)
                departure = self._departure()
            left = until - time.monotonic()
            if departure.done or left <= 0 or self._shell.ended:
                return departure
            await self._shell.changed(lambda: bool(self._unasked()) or self._departure().done, left)

    def _present(self) -> list[Member]:
        return [m for m in self._shell.job.members.values() if m.doc.state in _IN and self._chosen(m.doc)]

    def _unasked(self) -> list[str]:
        """Who was given just as long before keeps that deadline: a repeated call does not put it off."""
        within = self._everybody.within
        return [
            m.doc.id
            for m in self._present()
            if (m.leave_by is None or m.doc.leave_within != within) and m.doc.id not in self._asked
        ]

    def _event(self, unasked: list[str]) -> Leave:
        if len(unasked) == len(self._present()):
            return self._everybody
        return Leave(members=tuple(unasked), within=self._everybody.within)

    def _departure(self) -> Departure:
        now = {k: doc for k, doc in members_of(self._shell).items() if self._chosen(doc)}
        concerned = {k: doc for k, doc in now.items() if doc.state in (*_IN, MemberState.ORPHANED)}
        self._about |= concerned
        self._about = {k: now.get(k) or _gone(doc) for k, doc in self._about.items()}
        missing = tuple(k for k, doc in self._about.items() if doc.state in _IN)
        holding = tuple(k for k, doc in self._about.items() if doc.state is MemberState.ORPHANED)
        return Departure(done=not missing, members=self._about, missing=missing, holding=holding)


def _gone(doc: MemberDoc) -> MemberDoc:
    """A member that has left the view."""
    return doc.model_copy(update={"state": MemberState.LOST})


def _growth(shell: Shell, growing: Growing) -> Growth:
    there = growing.admitted if growing.done else growing.ready
    wanted = growing.groups or growing.members
    count = len(there) if growing.groups else _newcomers(shell, growing)
    return Growth(
        name=growing.name, groups=growing.groups, members=growing.members, done=growing.done, ready=growing.ready,
        admitted=growing.admitted, missing=max(0, wanted - count),
        left=0.0 if growing.done else round(max(0.0, growing.until - time.monotonic()), 3),
    )  # fmt: skip


def _newcomers(shell: Shell, growing: Growing) -> int:
    """Members that are ready; once it is done, those of the groups that came in."""
    if growing.done:
        return growing.came
    joining = (m.doc.group for m in shell.job.members.values() if m.doc.state is MemberState.JOINING)
    return sum(group in growing.ready for group in joining)


def _past(shell: Shell, name: str) -> bool:
    growing = shell.job.growing
    return growing is None or growing.name != name or growing.done


def _amount(growth: Growth) -> str:
    return f"{growth.groups} groups" if growth.groups else f"{growth.members} members"


def _busy(growth: Growth) -> str:
    return (
        f"grow {growth.name} still waits for {growth.missing} of {_amount(growth)}, {growth.left:g} s more; nothing was done. "
        "Wait until it is over, or repeat it by its name to see how far it is"
    )


def _status(response: Response, answer: W) -> W:
    response.status_code = 200 if answer.done else 202
    return answer


def _remember(kept: OrderedDict[str, Any], key: str, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > _REMEMBERED:
        kept.popitem(last=False)
