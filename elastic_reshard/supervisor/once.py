"""Acting calls act once: the route that knows a call by its name (`requests`), and what its handler is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final

from fastapi import Depends, Header, HTTPException, Query, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams

from elastic_reshard.supervisor import requests
from elastic_reshard.supervisor.app import Shell

__all__ = ["KEY", "REPLAYED", "UNFINISHED", "Asked", "OnceRoute"]

KEY: Final = "Idempotency-Key"
# In an answer: that it is the one that was given before.
REPLAYED: Final = "Idempotency-Replayed"
# In an answer that tells how far something is, and is not kept: when to ask again, in seconds.
UNFINISHED: Final = "Retry-After"
_NAME: Final = r"^[!-~]{1,128}$"
_HOW: Final = (
    "A name for this call, of its own: sent again under its name it acts no second time, and is answered alike."
)
# What a call waits for is no part of what it asks for.
_ASIDE: Final = frozenset({"wait", "request_id"})


class OnceRoute(APIRoute):
    """A route whose calls may be named."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The usual handler behind what is remembered."""
        handle = super().get_route_handler()

        async def once(request: Request) -> Response:
            shell: Shell = request.app.state.shell
            if shell.undecided[0]:
                raise HTTPException(503, f"{': '.join(shell.undecided)}; nothing was done")
            name = _name(request)
            if name is None:
                return await handle(request)
            query = "&".join(sorted(f"{k}={v}" for k, v in request.query_params.multi_items() if k not in _ASIDE))
            body = await request.body()
            asked = shell.requests.named(name, requests.digest_of(request.method, request.url.path, query, body))
            if asked.status:
                return Response(asked.answer, asked.status, headers={REPLAYED: "true"}, media_type="application/json")
            request.state.asked = asked
            response = await handle(request)
            if UNFINISHED not in response.headers:
                shell.keep(asked, response.status_code, bytes(response.body))
            return response

        return once


def _name(request: Request) -> str | None:
    """None also for one that the handler will refuse."""
    by_header, by_query = request.headers.get(KEY), QueryParams(request.scope["query_string"]).get("request_id")
    if by_header is not None and by_query is not None and by_header != by_query:
        raise HTTPException(422, f"{KEY} and request_id are unlike: a call has one name")
    name = by_header if by_header is not None else by_query
    return name if name is not None and re.fullmatch(_NAME, name) else None


def _asked(
    request: Request,
    by_header: Annotated[str | None, Header(alias=KEY, pattern=_NAME, description=_HOW)] = None,
    request_id: Annotated[str | None, Query(pattern=_NAME, description=f"The same as the header {KEY}.")] = None,
) -> requests.Request | None:
    found: requests.Request | None = getattr(request.state, "asked", None)
    return found


Asked = Annotated[requests.Request | None, Depends(_asked)]
