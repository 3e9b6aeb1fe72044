"""One HTTP connection, bounded in time: a peer that neither sends its call nor reads its answer is cut off.

Slow is not dead: what counts is whether anything moves. uvicorn itself waits for ever for the rest of a call that has begun,
and keeps the whole of an answer for a peer that does not read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["CallProtocol"]

# Seconds from a connection, or the first byte of a call, until its head is there; and for a body, which may take longer by a
# second for each so many bytes that came.
_SEND_WITHIN: Final = 15.0
_SLOWEST: Final = 64 << 10
# Seconds in which a peer must take something of an answer that waits for it.
_READ_WITHIN: Final = 5.0


class CallProtocol(H11Protocol):
    """uvicorn's HTTP protocol with two alarms: for a call that does not come, and for an answer that is not taken."""

    _alarm: asyncio.TimerHandle | None = None
    _begun: float = 0.0
    _came: int = 0
    _stuck: asyncio.TimerHandle | None = None
    _left: int = 0

    def connection_made(self, transport: Any) -> None:
        """As uvicorn's; from now on a call is awaited."""
        super().connection_made(transport)
        self._await_call()

    def data_received(self, data: bytes) -> None:
        """As uvicorn's; counts what comes of one call."""
        self._came += len(data)
        super().data_received(data)
        if self.transport.get_protocol() is not self:
            return  # a WebSocket has the connection now: what it sends is no call
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            if self._alarm is None:
                self._await_call()
        else:
            self._forget_call()

    def on_response_complete(self) -> None:
        """As uvicorn's, which closes a connection that stays idle then, but not before the peer has read everything."""
        self._forget_call()
        self._watch_reader()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """What waits for the peer has become much."""
        super().pause_writing()
        self._watch_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        self._forget_call()
        if self._stuck is not None:
            self._stuck.cancel()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Another protocol has this connection from now on."""
        self._forget_call()
        super().handle_websocket_upgrade(event)

    # -- the alarms

    def _await_call(self) -> None:
        self._begun, self._came = self.loop.time(), 0
        self._alarm = self.loop.call_later(_SEND_WITHIN, self._ring)

    def _ring(self) -> None:
        left = self._begun + _SEND_WITHIN + self._came / _SLOWEST - self.loop.time()
        if left > 0:
            self._alarm = self.loop.call_later(left, self._ring)
        else:
            self._cut()

    def _forget_call(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _cut(self) -> None:
        # Without this the kernel would keep what it has for a peer that does not read, for minutes.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _watch_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        if left and self._stuck is None:
            self._left = left
            self._stuck = self.loop.call_later(_READ_WITHIN, self._look)

    def _look(self) -> None:
        self._stuck = None
        left = self.transport.get_write_buffer_size()
        if left and left >= self._left:
            self._cut()
        else:
            self._watch_reader()
