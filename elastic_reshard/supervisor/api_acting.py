"""The calls that change something: policies, publications, and who leaves. Part of the HTTP interface.

Each may be named, and then acts once (`once`). Drain and shrink can be waited for (`?wait=`): 200 when it is done, 202 with
what is missing when that time is over. Nothing is undone then, and the same call again begins nothing anew: it tells how far
it is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, replace
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, HTTPException, Query, Response

from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.protocol.docs import MemberDoc, PublicationDoc, PublicationState
from elastic_reshard.supervisor.answers import (
    AbandonFor,
    Departure,
    DrainWithin,
    Growth,
    HostDoc,
    LeaveWithin,
    PoliciesChange,
    PoliciesDoc,
    ShrinkBy,
)
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.events import (
    Abandon,
    ChangePolicies,
    DrainHost,
    Leave,
    SetPolicies,
    UndrainHost,
)
from elastic_reshard.supervisor.once import UNFINISHED, Asked
from elastic_reshard.supervisor.parting import Parting, gone
from elastic_reshard.supervisor.shown import found, groups_of, hosts_of, known, members_of, publications_of

__all__ = ["LONGEST_WAIT", "Until", "acting", "so_far"]

# The most seconds that a call waits; clients ask again.
LONGEST_WAIT: Final = 30.0
# Groups that are remembered, so that a repeated call is known to be one.
_REMEMBERED: Final = 8192

Until = Annotated[
    float, Query(ge=0, le=LONGEST_WAIT, allow_inf_nan=False, description="Seconds to wait until it is done.")
]
W = TypeVar("W", Departure, Growth)


def acting(routes: APIRouter, shell: Shell) -> None:
    """Add the calls that change something."""
    _leaving(routes, shell)
    _draining(routes, shell)
    _policies(routes, shell)

    @routes.post("/v1/publications/{publication}/abandon")
    async def abandon(publication: str, asked: Asked, why: AbandonFor | None = None) -> PublicationDoc:
        """Give up a publication that moves. 409 for one that was committed."""
        before = found(publications_of(shell), "publication", publication)
        await shell.settle(Abandon(publication, (why or AbandonFor()).reason), asked)
        now = publications_of(shell).get(publication)
        if now is not None and now.state is not PublicationState.ABANDONED:
            raise HTTPException(409, f"publication {publication} is {now.state}: only one that moves can be abandoned")
        return now or before.model_copy(update={"state": PublicationState.ABANDONED})


def _policies(routes: APIRouter, shell: Shell) -> None:
    def now() -> PoliciesDoc:
        return PoliciesDoc(**asdict(shell.job.policies))

    @routes.put("/v1/policies")
    async def set_policies(wanted: PoliciesDoc, asked: Asked) -> PoliciesDoc:
        """Other policies, from now on; all of them. Restarts keep them."""
        await shell.settle(SetPolicies(Policies(**wanted.model_dump())), asked)
        return now()

    @routes.patch("/v1/policies")
    async def change_policies(wanted: PoliciesChange, asked: Asked) -> PoliciesDoc:
        """Some other policies; those that are not named stay."""
        changes = wanted.model_dump(exclude_unset=True)
        replace(shell.job.policies, **changes)  # ProtocolError: 422
        await shell.settle(ChangePolicies(changes), asked)
        return now()

    @routes.delete("/v1/policies")
    async def reset_policies(asked: Asked) -> PoliciesDoc:
        """Back to those that the supervisor was started with."""
        await shell.settle(SetPolicies(None), asked)
        return now()


def _leaving(routes: APIRouter, shell: Shell) -> None:
    later: dict[int | str, dict[str, Any]] = {202: {"model": Departure, "description": "Not done yet; see missing."}}
    shrunk: OrderedDict[str, None] = OrderedDict()

    @routes.post("/v1/members/{member}/leave", status_code=202)
    async def leave_member(member: str, asked: Asked, how: LeaveWithin | None = None) -> MemberDoc:
        """Ask a member to leave; it is left out when its time is over, or at once by force."""
        before = found(members_of(shell), "member", member)
        how = how or LeaveWithin()
        await shell.settle(Leave(members=(member,), within=how.within, force=how.force), asked)
        return members_of(shell).get(member) or gone(before)

    @routes.post("/v1/groups/{group}/leave", status_code=202)
    async def leave_group(group: str, asked: Asked, how: LeaveWithin | None = None) -> dict[str, MemberDoc]:
        """Ask all members of a group to leave."""
        known(groups_of(shell), "group", group)
        how = how or LeaveWithin()
        about = {k: m for k, m in members_of(shell).items() if m.group == group}
        await shell.settle(Leave(group=group, within=how.within, force=how.force), asked)
        now = members_of(shell)
        return {k: now.get(k) or gone(m) for k, m in about.items()}

    @routes.post("/v1/groups/shrink", responses=later)
    async def shrink(by: ShrinkBy, response: Response, asked: Asked, wait: Until = 0.0) -> Departure:
        """Ask all members of these groups to leave, by one change. 404 if any of them is unknown: then nothing was done.
        Groups that were shrunk by and are gone are done."""
        groups = tuple(dict.fromkeys(by.groups))
        acted = asked is not None and asked.taken is not None
        known(groups_of(shell), "group", *groups, before=groups if acted else shrunk)
        for group in groups:
            shrunk[group] = None
            shrunk.move_to_end(group)
        while len(shrunk) > _REMEMBERED:
            shrunk.popitem(last=False)
        parting = Parting(shell, lambda doc: doc.group in groups, Leave(groups=groups, within=by.within))
        return so_far(response, await parting.wait(wait, asked))


def _draining(routes: APIRouter, shell: Shell) -> None:
    later: dict[int | str, dict[str, Any]] = {202: {"model": Departure, "description": "Not done yet; see missing."}}

    @routes.post("/v1/hosts/{host}/drain", responses=later)
    async def drain(
        host: str, response: Response, asked: Asked, how: DrainWithin | None = None, wait: Until = 0.0
    ) -> Departure:
        """Ask all members of a host to leave, and whoever joins it later too, until that is lifted. Restarts keep it."""
        known(hosts_of(shell), "host", host)
        within = (how or DrainWithin()).within
        parting = Parting(shell, lambda doc: doc.host == host, DrainHost(host, within))
        return so_far(response, await parting.wait(wait, asked))

    @routes.delete("/v1/hosts/{host}/drain")
    async def undrain(host: str, asked: Asked) -> HostDoc:
        """Lift a drain: members that are still in and were asked only because of it may stay. Nothing if there is none."""
        known(hosts_of(shell), "host", host)
        await shell.settle(UndrainHost(host), asked)
        return hosts_of(shell).get(host) or HostDoc(connected=False)


def so_far(response: Response, answer: W) -> W:
    """200 if it is done, else 202 and when to ask again."""
    response.status_code = 200 if answer.done else 202
    if not answer.done:
        response.headers[UNFINISHED] = "1"
    return answer
