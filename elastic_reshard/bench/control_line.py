"""A WebSocket's client end that costs next to nothing: of what it receives it keeps what is asked for, and skips the rest.

Only for measuring: 125 hosts that are told half a megabyte each would otherwise measure their own reading.
"""

from __future__ import annotations

import asyncio
import base64
import os
import struct
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from elastic_reshard.errors import ProtocolError

__all__ = ["Line", "dial"]

_TEXT, _CLOSE, _PING, _PONG = 0x81, 0x88, 0x89, 0x8A
_MASKED: Final = 0x80
_NO_MASK: Final = bytes(4)  # a mask of zeros leaves the payload as it is


class Line(asyncio.Protocol):
    """One connection. hear: the first `keep` bytes of each message (all of them if that is 0), and how long it was; lost: why
    the connection has ended. Both are called by the event loop."""

    def __init__(
        self, request: bytes, keep: int, hear: Callable[[bytes, int], None], lost: Callable[[str], None]
    ) -> None:
        self.open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        self._request, self._keep, self._hear, self._lost = request, keep, hear, lost
        self._transport: asyncio.Transport | None = None
        self._raw = bytearray()  # of a header, or of the answer to the request
        self._payload: list[bytes] = []
        self._kept = self._left = self._size = 0
        self._opcode = 0

    # -- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the WebSocket."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Cut into frames."""
        if not self.open.done():
            data = self._answered(data)
        at = 0
        while at < len(data):
            if self._left:
                at += self._take(data, at)
            else:
                at += self._header(data, at)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        why = f"the connection ended ({exc or 'closed by the supervisor'})"
        self.closed.set()
        if not self.open.done():
            self.open.set_exception(ProtocolError(why))
        self._lost(why)

    # -- ours

    def send(self, text: bytes) -> None:
        """One text message. Returns at once."""
        assert self._transport is not None
        self._transport.write(_frame(_TEXT, text))

    def abort(self) -> None:
        """End it without a word."""
        self._lost = _nobody
        if self._transport is not None:
            self._transport.abort()

    def _answered(self, data: bytes) -> bytes:
        """What came after the answer to the request, once that is whole."""
        self._raw += data
        head, end, rest = bytes(self._raw).partition(b"\r\n\r\n")
        if not end:
            return b""
        self._raw.clear()
        if b" 101 " not in head.split(b"\r\n")[0]:
            self.open.set_exception(ProtocolError(f"no WebSocket: {head[:200].decode(errors='replace')}"))
            return b""
        self.open.set_result(None)
        return rest

    def _header(self, data: bytes, at: int) -> int:
        """Take in one more byte of a header, or a whole header; how many bytes were used."""
        self._raw.append(data[at])
        size = len(self._raw)
        short = self._raw[1] & 0x7F if size > 1 else 0
        if size < 2 or size < 2 + {126: 2, 127: 8}.get(short, 0):
            return 1
        if short == 126:
            short = struct.unpack(">H", self._raw[2:])[0]
        elif short == 127:
            short = struct.unpack(">Q", self._raw[2:])[0]
        self._opcode = self._raw[0]
        self._raw.clear()
        self._left = self._size = short
        if not short:
            self._whole()
        return 1

    def _take(self, data: bytes, at: int) -> int:
        used = min(self._left, len(data) - at)
        wanted = used if not self._keep else max(0, min(used, self._keep - self._kept))
        if wanted:
            self._payload.append(data[at : at + wanted])
            self._kept += wanted
        self._left -= used
        if not self._left:
            self._whole()
        return used

    def _whole(self) -> None:
        payload, self._payload, self._kept = b"".join(self._payload), [], 0
        if self._opcode == _PING and self._transport is not None:
            self._transport.write(_frame(_PONG, payload))
        elif self._opcode not in (_CLOSE, _PONG):
            self._hear(payload, self._size)


def _frame(opcode: int, payload: bytes) -> bytes:
    size = len(payload)
    if size < 126:
        head = struct.pack(">BB", opcode, _MASKED | size)
    elif size < 1 << 16:
        head = struct.pack(">BBH", opcode, _MASKED | 126, size)
    else:
        head = struct.pack(">BBQ", opcode, _MASKED | 127, size)
    return head + _NO_MASK + payload


def _nobody(_: str) -> None:
    """Nobody wants to know."""


async def dial(
    url: str, token: str, keep: int, hear: Callable[[bytes, int], None], lost: Callable[[str], None]
) -> Line:
    """A connection to a supervisor's hosts' WebSocket. Raises ProtocolError if it is refused; OSError if nobody listens."""
    parts = urlsplit(url)
    key = base64.b64encode(os.urandom(16)).decode()
    request = (
        f"GET /v1/host HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\nAuthorization: Bearer {token}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    _, line = await loop.create_connection(
        lambda: Line(request.encode(), keep, hear, lost), parts.hostname or "", parts.port or 80
    )
    await line.open
    return line
