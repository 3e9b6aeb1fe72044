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
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp

from elastic_reshard.errors import LayoutError, ProtocolError, ReshardError
from elastic_reshard.layout.fragments import canonical, check_fragment
from elastic_reshard.protocol.docs import GroupDoc, MemberDoc, PublicationDoc, TransferDoc
from elastic_reshard.protocol.ids import PROTOCOL
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor.answers import Health, HostDoc, HostHealth, PoliciesDoc, Problem
from elastic_reshard.supervisor.api_acting import (
    LONGEST_WAIT,
    acting,
    found,
    groups_of,
    hosts_of,
    members_of,
    publications_of,
    transfers_of,
)
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.feeds import Feed
from elastic_reshard.supervisor.guard import AUTHORISED, PROBLEM, Guard, problem
from elastic_reshard.supervisor.hosts import serve_host
from elastic_reshard.supervisor.record import EventPage

__all__ = ["make_app"]

_JSON = "application/json"
_bearer = HTTPBearer(auto_error=False, description="The job's token.")

After = Annotated[int, Query(ge=0)]
Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for news, if there are none.")]


def make_app(shell: Shell, token: str) -> ASGIApp:
    """The application of one supervisor, behind its guard."""
    app = FastAPI(
        title="elastic_reshard supervisor",
        version="1",
        redoc_url=None,
        responses={code: {"model": Problem, "content": {PROBLEM: {}}} for code in (401, 404, 409, 413, 422)},
    )
    _problems(app, shell)
    routes = APIRouter(dependencies=[Depends(_bearer)])
    _reading(routes, shell)
    _documents(routes, shell)
    acting(routes, shell)
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
            deadlines=job.deadlines.to_data(), cell=job.cell, verify=job.verify,
        )  # fmt: skip

    @routes.get("/v1/view", response_model=Told)
    async def view(after: After = 0, wait: Wait = 0.0) -> Response:
        """The whole view; with `after`, as soon as its revision is another one."""
        await shell.changed(lambda: shell.job.revision != after, wait)
        return Response(shell.view_text(), media_type=_JSON)

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


def _documents(routes: APIRouter, shell: Shell) -> None:
    @routes.get("/v1/members")
    async def members() -> dict[str, MemberDoc]:
        """Members by id."""
        return members_of(shell)

    @routes.get("/v1/groups")
    async def groups() -> dict[str, GroupDoc]:
        """Groups by name."""
        return groups_of(shell)

    @routes.get("/v1/publications")
    async def publications() -> dict[str, PublicationDoc]:
        """Publications by id."""
        return publications_of(shell)

    @routes.get("/v1/publications/{publication}")
    async def publication(publication: str) -> PublicationDoc:
        """One publication."""
        return found(publications_of(shell), "publication", publication)

    @routes.get("/v1/transfers")
    async def transfers() -> dict[str, TransferDoc]:
        """The transfers in hand by id: one at most."""
        return transfers_of(shell)

    @routes.get("/v1/transfers/{transfer}")
    async def transfer(transfer: str) -> TransferDoc:
        """One transfer."""
        return found(transfers_of(shell), "transfer", transfer)

    @routes.get("/v1/hosts")
    async def hosts() -> dict[str, HostDoc]:
        """Hosts by label, with their members and what was last heard of their movers."""
        return hosts_of(shell)


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
