"""Before every call: the job's token, and a limit on bodies. Plain ASGI, so that nothing of a refused call is read."""

from __future__ import annotations

import hmac
import json
from http import HTTPStatus
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["AUTHORISED", "BODY_LIMIT", "FRAGMENT_LIMIT", "PROBLEM", "Guard", "problem"]

PROBLEM: Final = "application/problem+json"
FRAGMENT_LIMIT: Final = 64 << 20
BODY_LIMIT: Final = 1 << 20
# In the scope of a call: whether it brought the token.
AUTHORISED: Final = "elastic_reshard.authorised"
# What the API looks like is no secret; whether somebody answers, neither.
_OPEN: Final = frozenset({"/v1/health", "/docs", "/docs/oauth2-redirect", "/openapi.json"})


def problem(status: int, detail: str, **more: Any) -> dict[str, Any]:
    """A problem document (RFC 9457)."""
    return {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail, **more}


class Guard:
    """401 without the token (compared in constant time), 413 for a body over the limit."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._wanted = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        scope[AUTHORISED] = hmac.compare_digest(headers.get(b"authorization", b""), self._wanted)
        if not scope[AUTHORISED] and scope["path"] not in _OPEN:
            detail = "this supervisor wants its job's token: Authorization: Bearer <token>; see $ELASTIC_RESHARD_TOKEN"
            await _refuse(scope, send, 401, detail, ((b"www-authenticate", b"Bearer"),))
            return
        if scope["type"] == "http":
            limit = FRAGMENT_LIMIT if scope["path"].startswith("/v1/fragments/") else BODY_LIMIT
            declared = headers.get(b"content-length", b"0")
            if not declared.isdigit() or int(declared) > limit:
                await _refuse(scope, send, 413, _too_large(limit))
                return
            receive = _counted(receive, limit)
        await self._app(scope, receive, send)


def _too_large(limit: int) -> str:
    return f"the body is larger than {limit} bytes; nothing was taken in"


def _counted(receive: Receive, limit: int) -> Receive:
    """For bodies that declare no length."""
    left = limit

    async def counting() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(413, _too_large(limit))
        return message

    return counting


async def _refuse(
    scope: Scope, send: Send, status: int, detail: str, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    body = json.dumps(problem(status, detail)).encode()
    kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
    told = [(b"content-type", PROBLEM.encode()), *headers]
    if scope["type"] == "http":  # for a WebSocket the server adds these itself
        told += [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": f"{kind}.start", "status": status, "headers": told})
    await send({"type": f"{kind}.body", "body": body})
