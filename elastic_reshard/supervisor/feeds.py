"""What one host is told: a bounded queue before its connection. A host that reads slowly costs a snapshot, not memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from elastic_reshard.protocol.view import deflated

__all__ = ["Deflated", "Feed"]

# Beyond either, what waits is dropped and the host gets the whole view when it reads again.
_MOST_TEXTS: Final = 256
_MOST_BYTES: Final = 4 << 20
_LEAST_RATE: Final = 1 << 20  # bytes per second at which a host reads that only reads slowly


class Deflated:
    """A text that changes, as it travels: deflated once for each that it has been."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text, self._was = text, ""
        self._made: str | bytes = ""

    def __call__(self) -> str | bytes:
        text = self._text()
        if text is not self._was:
            self._was, self._made = text, deflated(text)
        return self._made


class Feed:
    """One connection of one host. All methods but `run` return at once; all are called by the event loop's thread.

    send: puts one text on the connection and waits while the connection is full. snapshot: the whole view as text, now.
    heard: a Heard message as text. patience: seconds that one send may take beside what its length takes at 1 MiB a
    second, after which the host counts as not reading.
    """

    def __init__(
        self,
        host: str,
        machine: str,
        *,
        send: Callable[[str | bytes], Awaitable[None]],
        snapshot: Callable[[], str | bytes],
        heard: Callable[[Mapping[str, int]], str],
        patience: float,
    ) -> None:
        self.host, self.machine = host, machine
        self.last_heard = asyncio.get_running_loop().time()
        self.overflows = 0
        self.patience = patience
        self._send, self._snapshot, self._heard = send, snapshot, heard
        self._queue: deque[str | bytes] = deque()
        self._bytes = 0
        self._numbers: dict[str, int] = {}
        self._begun = self._stale = self._ending = False
        self._wake = asyncio.Event()

    def refresh(self) -> None:
        """The whole view comes next, instead of what waits. Nothing is told before the first of these."""
        self._begun = self._stale = True
        self._drop()
        self._wake.set()

    def tell(self, text: str | bytes) -> None:
        """A change of the view, or anything else that comes in order."""
        if not self._begun or self._stale or self._ending:
            return
        self._queue.append(text)
        self._bytes += len(text)
        if len(self._queue) > _MOST_TEXTS or self._bytes > _MOST_BYTES:
            self.overflows += 1
            self.refresh()
        self._wake.set()

    def hear(self, numbers: Mapping[str, int]) -> None:
        """Statements that were taken in: told after the view that shows it."""
        self._numbers.update(numbers)
        self.tell(self._heard(numbers))

    def end(self, text: str) -> None:
        """The last text; `run` returns after it."""
        self._stale = False
        self._drop()
        self._queue.append(text)
        self._ending = True
        self._wake.set()

    async def run(self) -> None:
        """Send until `end` or until the connection breaks. TimeoutError if the host does not read."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (text := self._next()) is not None:
                async with asyncio.timeout(self.patience + len(text) / _LEAST_RATE):
                    await self._send(text)
            if self._ending:
                return

    @property
    def waiting_bytes(self) -> int:
        """Characters that wait in the queue."""
        return self._bytes

    def _drop(self) -> None:
        self._queue.clear()
        self._bytes = 0

    def _next(self) -> str | bytes | None:
        if self._stale:
            self._stale = False
            if self._numbers:
                self.tell(self._heard(self._numbers))
            return self._snapshot()
        if not self._queue:
            return None
        text = self._queue.popleft()
        self._bytes -= len(text)
        return text
