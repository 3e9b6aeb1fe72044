"""One host's WebSocket: its watchdog's messages in, the view out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import ValidationError
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.messages import Beat, Drain, Ended, Hello, LedgerSaid, MoverSaid, Stated, read_up
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.events import Beaten, Event, Greeted, Leave, Ledgered, MemberEnded, Moved, Spoken
from elastic_reshard.supervisor.feeds import Feed

__all__ = ["ABORT", "HostProtocol", "serve_host"]

ABORT: Final = "elastic_reshard.abort"
# WebSocket's "going away" and "policy violation"; the Farewell before them says why.
_GOING: Final = 1001
_REFUSED: Final = 1008


# Messages, and bytes, of one connection that wait to be taken before it is read no further.
_MANY: Final = 32
_MUCH: Final = 1 << 20


class HostProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, whose connection can be cut without waiting for a peer that does not read.

    The last three methods are what the newest uvicorn does itself; 0.52 and older buffer without bound for such a peer."""

    _waiting = 0  # bytes that came since nothing waited

    def handle_connect(self, event: Any) -> None:
        """As uvicorn's; tells the application how to cut."""
        super().handle_connect(event)
        if hasattr(self, "scope"):
            scope = cast(dict[str, Any], self.scope)
            scope["extensions"][ABORT] = self.transport.abort

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, which pauses reading after every message: two system calls for each of thousands a second. Here only
        when many, or much, waits to be taken."""
        if self.queue.empty():
            self._waiting = 0
        self._waiting += len(data)
        paused, self.read_paused = self.read_paused, True
        super().data_received(data)
        self.read_paused = paused
        many = self.queue.qsize() > _MANY or self._waiting > _MUCH
        if not paused and many and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """The peer reads too slowly: `send` waits."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """The peer has read."""
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is left to wait for."""
        super().connection_lost(exc)
        self.writable.set()


async def serve_host(shell: Shell, socket: WebSocket) -> None:
    """Serve one connection until it ends. The first message is Hello, within `deadlines.connect`."""
    await socket.accept()
    abort: Callable[[], None] = socket.scope["extensions"][ABORT]
    try:
        feed = await _greeted(shell, socket)
        await _served(shell, socket, feed)
    except WebSocketDisconnect:
        return
    except TimeoutError:
        abort()
        return
    except (ProtocolError, ValidationError) as error:
        why = str(error)
        shell.record.add("host.refused", {"reason": why[:512]})
        await _last(socket, shell.farewell_text(why), abort, shell.job.deadlines.evict)


async def _greeted(shell: Shell, socket: WebSocket) -> Feed:
    async with asyncio.timeout(shell.job.deadlines.connect):
        hello = read_up(await _read(socket))
    if not isinstance(hello, Hello):
        raise ProtocolError(f"the first message of a connection is hello, not {hello.kind}")
    feed = Feed(
        hello.host, hello.machine, send=partial(_send, socket), snapshot=shell.told_text, heard=shell.heard_text,
        patience=shell.job.deadlines.evict,
    )  # fmt: skip
    shell.greet(hello, feed)
    return feed


async def _served(shell: Shell, socket: WebSocket, feed: Feed) -> None:
    """Read and write until either ends. Raises what ended it, but for a Farewell that was sent."""
    reading = asyncio.create_task(_listen(shell, socket, feed))
    writing = asyncio.create_task(feed.run())
    why = "the supervisor ends"
    try:
        done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        why = _why([task.exception() for task in done], feed)
    finally:
        reading.cancel()
        writing.cancel()
        await asyncio.wait({reading, writing})
        shell.gone(feed, why)
    for task in done:
        task.result()
    await socket.close(_GOING)


def _why(errors: list[BaseException | None], feed: Feed) -> str:
    for error in errors:
        if isinstance(error, TimeoutError):
            return f"it did not read for {feed.patience} s"
        if error is not None:
            return f"{type(error).__name__}: {error}"[:512]
    return "farewell"


async def _listen(shell: Shell, socket: WebSocket, feed: Feed) -> None:
    loop = asyncio.get_running_loop()
    while True:
        message = read_up(await _read(socket))
        feed.last_heard = loop.time()
        if isinstance(message, Hello) and message.host != feed.host:
            raise ProtocolError(f"this connection is of host {feed.host}, not {message.host}")
        if shell.feeds.get(feed.host) is not feed:
            return  # another connection of this host took its place: what still comes here is old
        shell.submit(_event(feed.host, message))


def _event(host: str, message: Hello | Stated | Ended | Beat | MoverSaid | LedgerSaid | Drain) -> Event:
    match message:
        case MoverSaid():
            return Moved(host, message)
        case LedgerSaid():
            return Ledgered(host, message)
        case Stated(statement=statement):
            return Spoken(host, statement)
        case Ended():
            return MemberEnded(host, message.member, message.arenas_kept, message.how)
        case Beat():
            return Beaten(host)
        case Drain(within=within):
            return Leave(host=host, within=within)
        case Hello():
            return Greeted(message)


async def _send(socket: WebSocket, text: str | bytes) -> None:
    await (socket.send_bytes(text) if isinstance(text, bytes) else socket.send_text(text))


async def _read(socket: WebSocket) -> str | bytes:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005), message.get("reason"))
    found: str | bytes = message.get("text") or message.get("bytes") or ""
    return found


async def _last(socket: WebSocket, text: str, abort: Callable[[], None], patience: float) -> None:
    """A last text and a close, for a peer that may not read."""
    loop = asyncio.get_running_loop()
    # uvicorn would wait for the peer to read all that is buffered.
    loop.call_later(patience, abort)
    try:
        async with asyncio.timeout(patience):
            await socket.send_text(text)
            await socket.close(_REFUSED)
    except (TimeoutError, WebSocketDisconnect):
        abort()
