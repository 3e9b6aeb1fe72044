"""Many simulated hosts in one event loop, each with a WebSocket of its own to a real supervisor.

The first host keeps a whole replica of the view; the others only look how far each message brings them, so that what is
measured is the supervisor and not 1,250 replicas in one process.
"""

from __future__ import annotations

import asyncio
import re
import resource
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from elastic_reshard.bench.control_cast import Cast, Player
from elastic_reshard.bench.control_line import Line, dial
from elastic_reshard.errors import ProtocolError, TransferTimeout
from elastic_reshard.protocol.messages import Beat, LedgerSaid, MoverSaid
from elastic_reshard.protocol.view import Farewell, Told, View, read_down

__all__ = ["Crowd"]

_LIMIT: Final = 300.0  # seconds; only catches hangs
_REVISION: Final = re.compile(rb'"revision":(\d+)')
_HEAD: Final = 400  # bytes of a message in which its revision is
_AT_ONCE: Final = 16  # connections being made
_TURN: Final = 64  # messages sent without a look at what has come


class Crowd:
    """All hosts of a cast. Use it as an async context manager; everything blocks only its own task.

    Raises TransferTimeout when something does not come within five minutes, ProtocolError when the supervisor hangs up."""

    def __init__(self, cast: Cast, url: str, token: str, beat: float = 1.0) -> None:
        self.cast, self.view = cast, View()
        self.received = 0  # bytes, of all hosts
        self._url, self._token, self._beat = url, token, beat
        self._lines: dict[int, Line] = {}
        self._revisions = [0] * cast.hosts
        self._last = 0.0  # when the last host came up to `_wanted`
        self._wanted, self._behind = 0, 0
        self._news = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self._failed: ProtocolError | None = None

    async def __aenter__(self) -> Crowd:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft >= 0 else soft, hard))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait([self._beating])
        for line in self._lines.values():
            line.abort()
        for line in self._lines.values():
            await line.closed.wait()

    async def connect(self) -> None:
        """Everybody says Hello."""
        gate = asyncio.Semaphore(_AT_ONCE)
        self._beating = asyncio.create_task(self._beats())

        async def one(host: int) -> None:
            async with gate:
                hear = partial(self._hear, host)
                line = await dial(self._url, self._token, _HEAD if host else 0, hear, partial(self._lost, host))
                line.send(self.cast.hello(host).model_dump_json().encode())
                self._lines[host] = line

        await asyncio.gather(*map(one, range(self.cast.hosts)))

    def _lost(self, host: int, why: str) -> None:
        self._fail(f"{self.cast.label(host)}: {why}")

    def _fail(self, why: str) -> None:
        self._failed = self._failed or ProtocolError(why)
        self._news.set()

    # -- saying

    async def state(self, players: Iterable[Player]) -> None:
        """Statements of these members, by their hosts."""
        await self._say(
            (p.host, b'{"kind":"stated","statement":%b}' % p.said.model_dump_json().encode()) for p in players
        )

    async def say(self, words: Iterable[tuple[Player, MoverSaid | LedgerSaid]]) -> None:
        """Words of movers, by their hosts."""
        await self._say((player.host, said.model_dump_json().encode()) for player, said in words)

    async def _say(self, words: Iterable[tuple[int, bytes]]) -> None:
        for number, (host, raw) in enumerate(words):
            self._lines[host].send(raw)
            if not number % _TURN:
                await asyncio.sleep(0)

    async def _beats(self) -> None:
        """Each host once a beat, spread evenly; from its Hello on."""
        began, number = time.monotonic(), 0
        while True:
            number += 1
            line = self._lines.get(number % self.cast.hosts)
            if line is not None and not line.closed.is_set():
                line.send(Beat(revision=self.view.revision).model_dump_json().encode())
            await asyncio.sleep(max(0.0, began + number * self._beat / self.cast.hosts - time.monotonic()))

    # -- hearing

    def _hear(self, host: int, raw: bytes, size: int) -> None:
        self.received += size
        if not host:
            self._observe(raw)
        head = zlib.decompressobj().decompress(raw, _HEAD) if raw[:1] == b"\x78" else raw
        found = _REVISION.search(head, 0, _HEAD)
        if found is not None:
            self._came(host, int(found[1]))

    def _came(self, host: int, revision: int) -> None:
        before, self._revisions[host] = self._revisions[host], revision
        if before < self._wanted <= revision:
            self._behind -= 1
            self._last = time.monotonic()
            if not self._behind:
                self._news.set()

    def _observe(self, raw: bytes) -> None:
        said = read_down(raw)
        if isinstance(said, Farewell):
            self._fail(f"the supervisor said farewell: {said.reason}")
        elif isinstance(said, Told):
            if not self.view.apply(said):
                self._fail(f"a gap: told from {said.base}, known {self.view.revision}")
            self._news.set()

    async def until(self, ready: Callable[[View], bool], what: str) -> float:
        """Wait until the first host's view is so, then until all have heard of that view; when the last one had
        (time.monotonic)."""
        try:
            async with asyncio.timeout(_LIMIT):
                await self._wait(lambda: ready(self.view))
                self._wanted, self._last = self.view.revision, time.monotonic()
                self._behind = sum(revision < self._wanted for revision in self._revisions)
                await self._wait(lambda: not self._behind)
        except TimeoutError:
            raise TransferTimeout(f"waited {_LIMIT:g} s for: {what} ({self._behind} hosts had not heard)") from None
        return self._last

    async def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._news.wait()
            self._news.clear()
            if self._failed is not None:
                raise self._failed
