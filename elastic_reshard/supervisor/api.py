"""The supervisor's HTTP interface, /v1, and its WebSockets. Errors are problem documents (RFC 9457)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import xxhash
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp

from elastic_reshard.errors import LayoutError, ProtocolError, ReshardError
from elastic_reshard.layout.fragments import canonical, check_fragment
from elastic_reshard.log import logger
from elastic_reshard.supervisor.api_acting import acting
from elastic_reshard.supervisor.api_growing import growing, reading_grows
from elastic_reshard.supervisor.api_schema import DOCS, describe
from elastic_reshard.supervisor.api_watching import watching
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.guard import PROBLEM, Guard, problem
from elastic_reshard.supervisor.hosts import serve_host
from elastic_reshard.supervisor.once import OnceRoute
from elastic_reshard.supervisor.page import add_page
from elastic_reshard.supervisor.requests import Reused
from elastic_reshard.supervisor.stream import serve_events

__all__ = ["make_app"]

_JSON = "application/json"
_bearer = HTTPBearer(auto_error=False, description="The job's token.")
_log = logger("supervisor")


def make_app(shell: Shell, token: str) -> ASGIApp:
    """The application of one supervisor, behind its guard."""
    app = FastAPI(title="elastic_reshard supervisor", version="1", redoc_url=None, docs_url=None,
                  generate_unique_id_function=lambda route: route.name)  # fmt: skip
    app.state.shell = shell
    _problems(app, shell)
    routes = APIRouter(dependencies=[Depends(_bearer)])
    watching(routes, shell)
    reading_grows(routes, shell)
    _bodies(routes, shell)
    once = APIRouter(dependencies=[Depends(_bearer)], route_class=OnceRoute)
    acting(once, shell)
    growing(once, shell)
    app.include_router(routes)
    app.include_router(once)

    @app.websocket("/v1/host")
    async def host(socket: WebSocket) -> None:
        await serve_host(shell, socket)

    readers: set[WebSocket] = set()

    @app.websocket("/v1/events/stream")
    async def stream(socket: WebSocket) -> None:
        await serve_events(shell, socket, readers)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(DOCS)

    add_page(app, shell)
    describe(app)
    return Guard(app, token)


def _answer(status: int, detail: str, headers: Any = None, **more: Any) -> JSONResponse:
    return JSONResponse(problem(status, detail, **more), status, headers, media_type=PROBLEM)


def _problems(app: FastAPI, shell: Shell) -> None:
    @app.exception_handler(StarletteHTTPException)
    async def http(request: Request, error: StarletteHTTPException) -> Response:
        unknown = {404: "there is nothing at", 405: f"{request.method} is not for"}.get(error.status_code)
        bare = error.detail in ("Not Found", "Method Not Allowed") and unknown is not None
        detail = f"{unknown} {request.url.path[:200]}" if bare else str(error.detail)
        return _answer(error.status_code, detail, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        faults = [
            {"where": ".".join(map(str, e["loc"]))[:200], "what": str(e["msg"])[:500]} for e in error.errors()[:64]
        ]
        return _answer(422, "; ".join(f"{f['where']}: {f['what']}" for f in faults)[:4096], errors=faults)

    @app.exception_handler(Reused)
    async def reused(_: Request, error: Reused) -> Response:
        return _answer(409, str(error))

    @app.exception_handler(ReshardError)
    async def ours(_: Request, error: ReshardError) -> Response:
        refused = isinstance(error, LayoutError | ProtocolError)
        return _answer(503 if shell.ended else 422 if refused else 500, str(error))

    @app.exception_handler(500)
    async def broken(request: Request, error: Exception) -> Response:
        # Only answered here; the server raises and logs it.
        _log.error("api.failed", method=request.method, path=request.url.path[:200], error=type(error).__name__)
        return _answer(500, f"{request.method} {request.url.path[:200]} failed: {type(error).__name__}")


def _bodies(routes: APIRouter, shell: Shell) -> None:
    @routes.put("/v1/fragments/{fragment}", status_code=204, response_class=Response)
    async def put_fragment(fragment: str, request: Request) -> Response:
        """Keep a fragment's body; its id is the xxh3_128 of the body's canonical JSON. Idempotent."""
        raw = await request.body()
        shell.body_comes(fragment)
        await asyncio.to_thread(_keep, shell, fragment, raw)
        shell.body_came(fragment)
        return Response(status_code=204)

    @routes.get("/v1/fragments/{fragment}", response_model=dict[str, Any])
    async def get_fragment(fragment: str) -> Response:
        """A fragment's body."""
        return _body(shell.journal.fragment(fragment), "fragment", fragment)

    @routes.get("/v1/layouts/{layout}", response_model=dict[str, Any])
    async def get_layout(layout: str) -> Response:
        """A layout's body: tensors by name, and correspondences or null."""
        return _body(shell.journal.layout(layout), "layout", layout)


def _keep(shell: Shell, fragment: str, raw: bytes) -> None:
    """Parse, check and write: beside the loop, as a body may be large."""
    shown = fragment[:80]
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise HTTPException(400, f"fragment {shown}: the body is not JSON: {error}") from error
    except RecursionError as error:
        raise HTTPException(400, f"fragment {shown}: the body is nested too deeply") from error
    check_fragment(body)
    plain = canonical(body)
    made = xxhash.xxh3_128(plain).hexdigest()
    if made != fragment:
        raise HTTPException(422, f"the body's id is {made}, not {shown}: it was damaged, or made by another version")
    shell.journal.put_fragment(fragment, plain)


def _body(found: bytes | None, what: str, key: str) -> Response:
    if found is None:
        raise HTTPException(404, f"no {what} {key[:200]!r}; see GET /v1/groups for the ids that groups name")
    return Response(found, media_type=_JSON)
