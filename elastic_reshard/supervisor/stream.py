"""Events as they happen, by WebSocket: /v1/events/stream, from any point on. It only tells.

Each message is an `EventPage`. A reader is a number in the record that all have in common, so that one who reads slowly, or
never, costs no memory but its connection's buffer, and is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from fastapi import WebSocket, WebSocketDisconnect

from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.guard import subprotocol
from elastic_reshard.supervisor.hosts import ABORT

__all__ = ["MOST_STREAMS", "PULSE", "serve_events", "told_until_gone"]

PULSE: Final = 5.0  # seconds after which an empty page is sent: the reader knows that we are there
MOST_STREAMS: Final = 256
_PAGE: Final = 100
_PATIENCE: Final = 5.0  # seconds that a reader may take for one message
# WebSocket's "going away", "policy violation" and "try again later".
_GOING, _REFUSED, _LATER = 1001, 1008, 1013


async def serve_events(shell: Shell, socket: WebSocket, readers: set[WebSocket]) -> None:
    """Tell one reader until it goes, does not read for 5 s, or the supervisor ends. readers: those that are served."""
    await socket.accept(subprotocol=subprotocol(socket.scope))
    try:
        after = int(socket.query_params.get("after", "0"))
    except ValueError:
        after = -1
    if not 0 <= after < 1 << 62:
        await socket.close(_REFUSED, "after is the number of an event that was seen, 0 for none")
        return
    if len(readers) >= MOST_STREAMS:
        await socket.close(_LATER, f"{MOST_STREAMS} readers are served already; ask GET /v1/events")
        return
    readers.add(socket)
    try:
        start = shell.record.after(after, socket.query_params.get("instance", ""))
        if await told_until_gone(socket, _tell(shell, socket, start)):
            shell.record.add("stream.cut", {"reason": f"a reader of events did not read for {_PATIENCE:g} s"})
    finally:
        readers.discard(socket)


async def told_until_gone(socket: WebSocket, tell: Coroutine[Any, Any, None]) -> bool:
    """Run `tell` until it returns or the peer goes; the peer's own words are not read. True: `tell` raised TimeoutError, as the
    peer did not read, and its connection was cut."""
    watching = asyncio.create_task(_gone(socket))
    telling = asyncio.create_task(tell)
    try:
        await asyncio.wait({watching, telling}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        telling.cancel()
        await asyncio.wait({watching, telling})
    if telling.cancelled():
        return False
    error = telling.exception()
    if isinstance(error, TimeoutError):
        socket.scope["extensions"][ABORT]()
        return True
    if error is not None and not isinstance(error, WebSocketDisconnect):
        raise error
    if error is None:
        await socket.close(_GOING)
    return False


async def _gone(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


async def _tell(shell: Shell, socket: WebSocket, after: int) -> None:
    while not shell.ended:
        page = shell.record.page(after, _PAGE)
        after = page.next
        async with asyncio.timeout(_PATIENCE):
            await socket.send_text(page.model_dump_json())
        await shell.changed(lambda after=after: shell.record.last > after, PULSE)  # type: ignore[misc]
