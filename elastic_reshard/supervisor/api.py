"""The supervisor's HTTP interface, /v1, and the hosts' WebSocket. Errors are problem documents (RFC 9457)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated, Any, Literal

import xxhash
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp

from elastic_reshard.errors import LayoutError, ProtocolError, ReshardError
from elastic_reshard.layout.fragments import canonical, check_fragment
from elastic_reshard.protocol.base import Message
from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.protocol.docs import GroupDoc, MemberDoc, PublicationDoc, PublicationState
from elastic_reshard.protocol.ids import PROTOCOL
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.events import Abandon, Leave, SetPolicies
from elastic_reshard.supervisor.feeds import Feed
from elastic_reshard.supervisor.guard import AUTHORISED, PROBLEM, Guard, problem
from elastic_reshard.supervisor.hosts import serve_host
from elastic_reshard.supervisor.record import EventPage

__all__ = ["make_app"]

# The most seconds that a call waits for news; clients ask again.
_LONGEST_WAIT = 30.0
_JSON = "application/json"
_bearer = HTTPBearer(auto_error=False, description="The job's token.")

After = Annotated[int, Query(ge=0)]
Wait = Annotated[float, Query(ge=0, le=_LONGEST_WAIT, description="Seconds to wait for news, if there are none.")]


class HostHealth(BaseModel):
    """A host's connection. waiting: bytes that wait for it to read; overflows: how often it got a snapshot instead."""

    connected: bool
    waiting: int = 0
    overflows: int = 0


class Health(BaseModel):
    """Without the token: the status alone."""

    status: Literal["ok", "recovering"]
    job: str | None = None
    term: int | None = None
    instance: str | None = None
    protocol: int | None = None
    revision: int | None = None
    hosts: dict[str, HostHealth] | None = None
    deadlines: dict[str, float] | None = None


class PoliciesDoc(Message):
    """All policies, as `Policies`. A change holds until the supervisor's next start."""

    min_groups: int
    late_after: float
    max_lag: int | None
    gather_window: float
    install: float


class LeaveWithin(Message):
    """Seconds that members have to leave by themselves."""

    within: Annotated[float, Field(ge=0, le=86_400)] = 30.0


class AbandonFor(Message):
    """Why a publication is given up."""

    reason: Annotated[str, Field(max_length=1024)] = "abandoned by request"


class Problem(BaseModel):
    """A problem document."""

    type: str
    title: str
    status: int
    detail: str


def make_app(shell: Shell, token: str) -> ASGIApp:
    """The application of one supervisor, behind its guard."""
    app = FastAPI(
        title="elastic_reshard supervisor",
        version="1",
        redoc_url=None,
        responses={code: {"model": Problem, "content": {PROBLEM: {}}} for code in (401, 404, 413, 422)},
    )
    _problems(app, shell)
    routes = APIRouter(dependencies=[Depends(_bearer)])
    _reading(routes, shell)
    _acting(routes, shell)
    _bodies(routes, shell)
    app.include_router(routes)

    @app.websocket("/v1/host")
    async def host(socket: WebSocket) -> None:
        await serve_host(shell, socket)

    return Guard(app, token)


def _answer(status: int, detail: str, headers: Any = None, **more: Any) -> JSONResponse:
    return JSONResponse(problem(status, detail, **more), status, headers, media_type=PROBLEM)


def _problems(app: FastAPI, shell: Shell) -> None:
    @app.exception_handler(StarletteHTTPException)
    async def http(_: Request, error: StarletteHTTPException) -> Response:
        return _answer(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        faults = [{"where": ".".join(map(str, e["loc"])), "what": e["msg"]} for e in error.errors()]
        return _answer(422, "; ".join(f"{f['where']}: {f['what']}" for f in faults)[:4096], errors=faults)

    @app.exception_handler(ReshardError)
    async def ours(_: Request, error: ReshardError) -> Response:
        refused = isinstance(error, LayoutError | ProtocolError)
        return _answer(503 if shell.ended else 422 if refused else 500, str(error))


def _found(docs: dict[str, Any], what: str, name: str) -> Any:
    if name not in docs:
        raise HTTPException(404, f"no {what} {name!r}; there are {', '.join(sorted(docs)[:16]) or 'none'}")
    return docs[name]


def _members(shell: Shell) -> dict[str, MemberDoc]:
    return {k: m.doc for k, m in shell.job.members.items()}


def _groups(shell: Shell) -> dict[str, GroupDoc]:
    return {k: g.doc for k, g in shell.job.groups.items()}


def _publications(shell: Shell) -> dict[str, PublicationDoc]:
    return {k: p.doc for k, p in shell.job.publications.items()}


def _host(feed: Feed | None) -> HostHealth:
    if feed is None:
        return HostHealth(connected=False)
    return HostHealth(connected=True, waiting=feed.waiting_bytes, overflows=feed.overflows)


def _reading(routes: APIRouter, shell: Shell) -> None:
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
            deadlines=job.deadlines.to_data(),
        )  # fmt: skip

    @routes.get("/v1/view", response_model=Told)
    async def view(after: After = 0, wait: Wait = 0.0) -> Response:
        """The whole view; with `after`, as soon as its revision is another one."""
        await shell.changed(lambda: shell.job.revision != after, wait)
        return Response(shell.view_text(), media_type=_JSON)

    @routes.get("/v1/members")
    async def members() -> dict[str, MemberDoc]:
        """Members by id."""
        return _members(shell)

    @routes.get("/v1/groups")
    async def groups() -> dict[str, GroupDoc]:
        """Groups by name."""
        return _groups(shell)

    @routes.get("/v1/publications")
    async def publications() -> dict[str, PublicationDoc]:
        """Publications by id."""
        return _publications(shell)

    @routes.get("/v1/publications/{publication}")
    async def publication(publication: str) -> PublicationDoc:
        """One publication."""
        found: PublicationDoc = _found(_publications(shell), "publication", publication)
        return found

    @routes.get("/v1/events")
    async def events(
        after: After = 0, limit: Annotated[int, Query(ge=1, le=1000)] = 100, wait: Wait = 0.0
    ) -> EventPage:
        """What happened, oldest first."""
        await shell.changed(lambda: shell.record.last > after, wait)
        return shell.record.page(after, limit)

    @routes.get("/v1/policies")
    async def policies() -> PoliciesDoc:
        """What the supervisor decides by."""
        return PoliciesDoc(**asdict(shell.job.policies))


def _acting(routes: APIRouter, shell: Shell) -> None:
    @routes.put("/v1/policies")
    async def set_policies(wanted: PoliciesDoc) -> PoliciesDoc:
        """Other policies, from now on."""
        await shell.settle(SetPolicies(Policies(**wanted.model_dump())))
        return PoliciesDoc(**asdict(shell.job.policies))

    @routes.post("/v1/members/{member}/leave", status_code=202)
    async def leave_member(member: str, how: LeaveWithin | None = None) -> MemberDoc:
        """Ask a member to leave; it is left out when its time is over."""
        before: MemberDoc = _found(_members(shell), "member", member)
        await shell.settle(Leave(members=(member,), within=(how or LeaveWithin()).within))
        return _members(shell).get(member, before)

    @routes.post("/v1/groups/{group}/leave", status_code=202)
    async def leave_group(group: str, how: LeaveWithin | None = None) -> dict[str, MemberDoc]:
        """Ask all members of a group to leave."""
        _found(_groups(shell), "group", group)
        await shell.settle(Leave(group=group, within=(how or LeaveWithin()).within))
        return {k: m for k, m in _members(shell).items() if m.group == group}

    @routes.post("/v1/publications/{publication}/abandon")
    async def abandon(publication: str, why: AbandonFor | None = None) -> PublicationDoc:
        """Give up a publication that moves. 409 for one that was committed."""
        before: PublicationDoc = _found(_publications(shell), "publication", publication)
        await shell.settle(Abandon(publication, (why or AbandonFor()).reason))
        now = _publications(shell).get(publication)
        if now is not None and now.state is not PublicationState.ABANDONED:
            raise HTTPException(409, f"publication {publication} is {now.state}: only one that moves can be abandoned")
        return now or before.model_copy(update={"state": PublicationState.ABANDONED})


def _bodies(routes: APIRouter, shell: Shell) -> None:
    @routes.put("/v1/fragments/{fragment}", status_code=204, response_class=Response)
    async def put_fragment(fragment: str, request: Request) -> Response:
        """Keep a fragment's body; its id is the xxh3_128 of the body's canonical JSON. Idempotent."""
        raw = await request.body()
        await asyncio.to_thread(_keep, shell, fragment, raw)
        shell.body_came(fragment)
        return Response(status_code=204)

    @routes.get("/v1/fragments/{fragment}")
    async def get_fragment(fragment: str) -> Response:
        """A fragment's body."""
        return _body(shell.journal.fragment(fragment), "fragment", fragment)

    @routes.get("/v1/layouts/{layout}")
    async def get_layout(layout: str) -> Response:
        """A layout's body: tensors by name, and correspondences or null."""
        return _body(shell.journal.layout(layout), "layout", layout)


def _keep(shell: Shell, fragment: str, raw: bytes) -> None:
    """Parse, check and write: beside the loop, as a body may be large."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise HTTPException(400, f"fragment {fragment}: the body is not JSON: {error}") from error
    except RecursionError as error:
        raise HTTPException(400, f"fragment {fragment}: the body is nested too deeply") from error
    check_fragment(body)
    plain = canonical(body)
    made = xxhash.xxh3_128(plain).hexdigest()
    if made != fragment:
        raise HTTPException(422, f"the body's id is {made}, not {fragment}: it was damaged, or made by another version")
    shell.journal.put_fragment(fragment, plain)


def _body(found: bytes | None, what: str, key: str) -> Response:
    if found is None:
        raise HTTPException(404, f"no {what} {key!r}")
    return Response(found, media_type=_JSON)
