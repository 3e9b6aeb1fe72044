"""The calls that only tell. Part of the HTTP interface."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query, Request, Response

from elastic_reshard.protocol.docs import GroupDoc, MemberDoc, PublicationDoc, TransferDoc
from elastic_reshard.protocol.ids import PROTOCOL
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor.answers import Health, HostDoc, HostHealth, PoliciesDoc, ProgressDoc, Ready
from elastic_reshard.supervisor.api_acting import LONGEST_WAIT
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.feeds import Feed
from elastic_reshard.supervisor.guard import AUTHORISED
from elastic_reshard.supervisor.record import EventPage
from elastic_reshard.supervisor.shown import (
    found,
    groups_of,
    hosts_of,
    members_of,
    progress_of,
    publications_of,
    transfers_of,
)

__all__ = ["watching"]

_JSON = "application/json"
After = Annotated[int, Query(ge=0, lt=1 << 62)]
Wait = Annotated[
    float,
    Query(ge=0, le=LONGEST_WAIT, allow_inf_nan=False, description="Seconds to wait for news, if there are none."),
]
Instance = Annotated[
    str, Query(max_length=64, description="By whose numbers `after` counts; of another start all events are told.")
]


def watching(routes: APIRouter, shell: Shell) -> None:
    """Add them."""
    _itself(routes, shell)
    _documents(routes, shell)
    _publications(routes, shell)

    @routes.get("/v1/view", response_model=Told)
    async def view(after: After = 0, wait: Wait = 0.0) -> Response:
        """The whole view; with `after`, as soon as its revision is another one."""
        await shell.changed(lambda: shell.job.revision != after, wait)
        return Response(shell.view_text(), media_type=_JSON)

    @routes.get("/v1/events")
    async def events(
        after: After = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        wait: Wait = 0.0,
        instance: Instance = "",
    ) -> EventPage:
        """What happened, oldest first. The WebSocket /v1/events/stream?after=&instance= tells the same as it happens: each
        of its messages is such a page."""
        start = shell.record.after(after, instance)
        await shell.changed(lambda: shell.record.last > start, wait)
        return shell.record.page(start, limit)


def _host(feed: Feed | None) -> HostHealth:
    if feed is None:
        return HostHealth(connected=False)
    return HostHealth(connected=True, waiting=feed.waiting_bytes, overflows=feed.overflows)


def _itself(routes: APIRouter, shell: Shell) -> None:
    @routes.get("/v1/health", response_model=Health, response_model_exclude_none=True)
    async def health(request: Request) -> Health:
        """Whether the supervisor answers; with the token also what it is."""
        job = shell.job
        status: Literal["ok", "recovering"] = "recovering" if job.recover_from else "ok"
        if not request.scope[AUTHORISED]:
            return Health(status=status)
        return Health(
            status=status, job=job.name, term=job.term, instance=job.instance, protocol=PROTOCOL, revision=job.revision,
            hosts={name: _host(shell.feeds.get(name)) for name in {*job.hosts, *shell.feeds}},
            deadlines=job.deadlines.to_data(), cell=job.cell, verify=job.verify,
        )  # fmt: skip

    @routes.get("/v1/ready")
    async def ready(request: Request) -> Ready:
        """Whether the supervisor decides; 503 says why it does not. Without the token too, and then without figures."""
        if shell.ended:
            raise HTTPException(503, "this supervisor is ending")
        why, count = shell.undecided
        if why:
            raise HTTPException(503, f"{why}: {count}" if request.scope[AUTHORISED] else why)
        return Ready(ready=True)

    @routes.get("/v1/policies")
    async def policies() -> PoliciesDoc:
        """What the supervisor decides by."""
        return PoliciesDoc(**asdict(shell.job.policies))


def _documents(routes: APIRouter, shell: Shell) -> None:
    @routes.get("/v1/members")
    async def members() -> dict[str, MemberDoc]:
        """Members by id."""
        return members_of(shell)

    @routes.get("/v1/members/{member}")
    async def member(member: str) -> MemberDoc:
        """One member."""
        return found(members_of(shell), "member", member)

    @routes.get("/v1/groups")
    async def groups() -> dict[str, GroupDoc]:
        """Groups by name."""
        return groups_of(shell)

    @routes.get("/v1/groups/{group}")
    async def group(group: str) -> GroupDoc:
        """One group."""
        return found(groups_of(shell), "group", group)

    @routes.get("/v1/hosts")
    async def hosts() -> dict[str, HostDoc]:
        """Hosts by label, with their members and what was last heard of their movers, and those that are drained."""
        return hosts_of(shell)


def _publications(routes: APIRouter, shell: Shell) -> None:
    @routes.get("/v1/publications")
    async def publications() -> dict[str, PublicationDoc]:
        """Publications by id."""
        return publications_of(shell)

    @routes.get("/v1/publications/{publication}")
    async def publication(publication: str) -> PublicationDoc:
        """One publication."""
        return found(publications_of(shell), "publication", publication)

    @routes.get("/v1/publications/{publication}/progress")
    async def progress(publication: str) -> ProgressDoc:
        """How far one publication is: cells and bytes that landed, by group."""
        return found(progress_of(shell), "publication", publication)

    @routes.get("/v1/progress")
    async def all_progress() -> dict[str, ProgressDoc]:
        """How far each publication is, by id."""
        return progress_of(shell)

    @routes.get("/v1/transfers")
    async def transfers() -> dict[str, TransferDoc]:
        """The transfers in hand by id: one at most."""
        return transfers_of(shell)

    @routes.get("/v1/transfers/{transfer}")
    async def transfer(transfer: str) -> TransferDoc:
        """One transfer."""
        return found(transfers_of(shell), "transfer", transfer)
