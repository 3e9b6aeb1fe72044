"""Before every call: the job's token, and a limit on bodies. Plain ASGI, so that nothing of a refused call is read."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from http import HTTPStatus
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["AUTHORISED", "BODY_LIMIT", "FRAGMENT_LIMIT", "PROBLEM", "SUBPROTOCOL", "Guard", "problem", "subprotocol"]

PROBLEM: Final = "application/problem+json"
FRAGMENT_LIMIT: Final = 64 << 20
BODY_LIMIT: Final = 1 << 20
# In the scope of a call: whether it brought the token.
AUTHORISED: Final = "elastic_reshard.authorised"
# What browsers, which cannot set headers on a WebSocket, say as its subprotocols: this, and the token behind `_BEARER`.
SUBPROTOCOL: Final = "elastic-reshard"
_BEARER: Final = "bearer."  # then the token in base64url, without padding
# Whether somebody answers is no secret. The pages ask for the token.
_OPEN: Final = frozenset({"/", "/v1/health", "/v1/ready", "/docs"})


_REMEDIES: Final = {
    400: "Send the body as JSON text in UTF-8; /openapi.json has an example of each.",
    401: "Send the header Authorization: Bearer TOKEN; the token is in $ELASTIC_RESHARD_TOKEN or in the job's runtime folder.",
    404: "Ask for the names that there are: GET /v1/members, /v1/groups, /v1/hosts, /v1/publications. Ids of the "
    "past come never again.",
    405: "See /openapi.json for the methods of this path.",
    409: "Nothing was done. Look at what there is now, which detail names, and decide anew.",
    413: "Nothing was taken in. Send less.",
    422: "Nothing was done. Mend what detail names and send it again.",
    500: "This is a fault of the supervisor: see its log. What was told is on disk, and a restart goes on with it.",
    503: "Try again in a second; groups go on serving what they have.",
}


def problem(status: int, detail: str, **more: Any) -> dict[str, Any]:
    """A problem document (RFC 9457)."""
    known = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return {**known, "remedy": _REMEDIES.get(status, "See /openapi.json for what can be asked."), **more}


def subprotocol(scope: Scope) -> str | None:
    """With what a WebSocket is to be accepted: browsers give up on one that names none of theirs."""
    return SUBPROTOCOL if SUBPROTOCOL in scope.get("subprotocols", ()) else None


def _brought(scope: Scope, headers: dict[bytes, bytes]) -> bytes:
    """The token of a call, as in an Authorization header; b"" for none."""
    if scope["type"] == "websocket" and b"authorization" not in headers:
        for offered in scope.get("subprotocols", ()):
            if offered.startswith(_BEARER):
                text = offered[len(_BEARER) :]
                try:
                    return b"Bearer " + base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
                except (binascii.Error, ValueError):
                    return b""
    return headers.get(b"authorization", b"")


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
        scope[AUTHORISED] = hmac.compare_digest(_brought(scope, headers), self._wanted)
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
