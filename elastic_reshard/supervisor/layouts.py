"""Layouts that groups' fragments make, and whether they fit: worked out beside the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_reshard.layout.side import Side
from elastic_reshard.supervisor.events import Examine, Examined, Match, Matched
from elastic_reshard.supervisor.examine import covers, examine, fault_between
from elastic_reshard.supervisor.journal import Journal
from elastic_reshard.supervisor.needed import KEEP, idle

__all__ = ["Layouts"]


class Layouts:
    """Layouts by id, parsed once, and one thread to work on them. Sets as answers: ids whose bodies are not known."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._sides: dict[str, Side] = {}
        self._covers: dict[tuple[str, frozenset[int]], bool] = {}
        self._since: dict[str, float] = {}  # since when it is needed by nobody
        self._working = 0
        self._thread = ThreadPoolExecutor(1, "elastic-reshard-layouts")

    async def in_thread(self, work: Callable[[Any], Any], asked: Examine | Match) -> Any:
        """Run one of the two methods below beside the loop."""
        self._working += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, asked)
        finally:
            self._working -= 1

    def examine(self, asked: Examine) -> Examined | set[str]:
        """Join a group's fragments and keep the layouts they make."""
        wanted = {key for pair in asked.fragments for key in pair if key is not None}
        bodies = {key: body for key in wanted if (body := self._journal.fragment(key)) is not None}
        if missing := wanted - set(bodies):
            return missing
        source, destination, fault = examine(asked.fragments, bodies)
        for side in (source, destination):
            if side is not None and side.id not in self._sides:
                self._journal.put_layout(side.id, side.body)
                self._sides[side.id] = side
        return Examined(
            asked.group, asked.fragments, source.id if source else None, destination.id if destination else None, fault,
            renamed=destination is not None and destination.correspondences is not None,
        )  # fmt: skip

    def match(self, asked: Match) -> Matched | set[str]:
        """Compare two layouts."""
        source, destination = self._side(asked.source_layout), self._side(asked.destination_layout)
        if source is None or destination is None:
            found = ((asked.source_layout, source), (asked.destination_layout, destination))
            return {key for key, side in found if side is None}
        return Matched(asked.source_layout, asked.destination_layout, fault_between(source, destination))

    def covers(self, layout: str, ranks: frozenset[int]) -> bool:
        """Whether these source ranks hold every element; False for a layout whose body is lost."""
        key = (layout, ranks)
        if key not in self._covers:
            side = self._side(layout)
            if side is None:
                return False
            if len(self._covers) >= 4096:
                self._covers.clear()
            self._covers[key] = covers(side.model, ranks)
        return self._covers[key]

    def touch(self, key: str) -> None:
        """A fragment or layout is being handed in or made: somebody will need it in a moment."""
        self._since[key] = time.monotonic()

    def prune(self, wanted: Collection[str], now: float) -> int:
        """Forget bodies that have not been needed for `KEEP`; how many. wanted: who is needed now. On the loop's thread; does
        nothing while the other one is at work. Raises Fenced, ProtocolError as the journal."""
        if self._working:
            return 0
        self._since, gone = idle(self._since, self._journal.bodies() | self._sides.keys(), wanted, now, KEEP)
        if gone:
            self._journal.drop_bodies(gone)
            self._sides = {key: side for key, side in self._sides.items() if key not in gone}
            self._covers = {key: held for key, held in self._covers.items() if key[0] not in gone}
        return len(gone)

    def close(self) -> None:
        """Wait for the thread's last work (a second for the largest models)."""
        self._thread.shutdown(cancel_futures=True)

    def _side(self, key: str) -> Side | None:
        if key not in self._sides:
            body = self._journal.layout(key)
            if body is None:
                return None
            self._sides[key] = Side.of_body(body)
        return self._sides[key]
