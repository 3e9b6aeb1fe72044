"""The picture of a job as it changes, for the page and for `elastic-reshard watch`: WebSocket /v1/live. It only tells.

Level, not edge: each look is compared with what this watcher was told before, and only what differs is sent. So a watcher
that reads slowly gets fewer and larger steps, and costs the memory of one picture.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, Final

from fastapi import WebSocket

from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.guard import subprotocol
from elastic_reshard.supervisor.picture import Picture, picture
from elastic_reshard.supervisor.stream import told_until_gone
from elastic_reshard.supervisor.words import told

__all__ = ["MOST_WATCHERS", "Lens", "Teller", "serve_live"]

_PERIOD: Final = 0.1  # seconds between two looks at least, for all watchers together
_SHARE: Final = 20  # looks take a twentieth of the time at most: of many members there are fewer
_PULSE: Final = 1.0  # seconds after which something is said though nothing changed: the watcher knows that we are there
_PATIENCE: Final = 10.0  # seconds that a watcher may take to read one message
_HISTORY: Final = 1000  # events that a new watcher is told
# Each costs a picture's memory, and the time to compare two.
MOST_WATCHERS: Final = 64
_LATER: Final = 1013  # WebSocket's "try again later"
_KINDS: Final = ("hosts", "members", "groups", "publications")


class Lens:
    """Looks at a supervisor for all watchers: one picture for each `period` seconds, however many they are."""

    def __init__(self, shell: Shell) -> None:
        self.shell, self.period = shell, _PERIOD
        self.watchers: set[WebSocket] = set()
        self._last: tuple[float, Picture] | None = None

    def look(self) -> Picture:
        """The picture as it was at most `period` seconds ago; the same object until there is a new one."""
        now = time.monotonic()
        if self._last is None or now - self._last[0] >= self.period:
            shell = self.shell
            self._last = (now, picture(shell.job, shell.feeds.keys(), now, shell.record.began))
            self.period = max(_PERIOD, _SHARE * (time.monotonic() - now))
        return self._last[1]


class Teller:
    """What one watcher knows. Pure."""

    def __init__(self) -> None:
        self._told: dict[str, Any] = {}
        self._seen: Picture | None = None

    def news(self, seen: Picture) -> dict[str, Any]:
        """What differs from what was told before: of hosts, members, groups and publications those that changed, None for
        those that are gone; job, transfer and waits whole. All of it the first time, with "whole"."""
        if seen is self._seen:
            return {}
        self._seen = seen
        whole: dict[str, Any] = {kind: {k: vars(v) for k, v in getattr(seen, kind).items()} for kind in _KINDS}
        whole["job"] = seen.job
        whole["transfer"] = vars(seen.transfer) if seen.transfer is not None else None
        whole["waits"] = [vars(wait) for wait in seen.waits]
        before, self._told = self._told, whole
        if not before:
            return {"whole": True, **whole}
        found: dict[str, Any] = {key: whole[key] for key in ("job", "transfer", "waits") if whole[key] != before[key]}
        for kind in _KINDS:
            if changed := _changed(before[kind], whole[kind]):
                found[kind] = changed
        return found


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {key: value for key, value in now.items() if before.get(key) != value}
    return found | {key: None for key in before if key not in now}


async def serve_live(lens: Lens, socket: WebSocket) -> None:
    """Tell one watcher until it goes, does not read for 10 s, or the supervisor ends. Its own words are not read."""
    await socket.accept(subprotocol=subprotocol(socket.scope))
    if len(lens.watchers) >= MOST_WATCHERS:
        await socket.close(_LATER, f"{MOST_WATCHERS} watchers are served already; ask GET /v1/view")
        return
    lens.watchers.add(socket)
    try:
        await told_until_gone(socket, _tell(lens, socket))
    finally:
        lens.watchers.discard(socket)


async def _tell(lens: Lens, socket: WebSocket) -> None:
    shell, teller = lens.shell, Teller()
    after = max(0, shell.record.last - _HISTORY)
    said = 0.0
    while not shell.ended:
        found = teller.news(lens.look())
        page = shell.record.page(after, _HISTORY)
        after = page.next
        if page.events:
            found["events"] = [e.model_dump() | {"words": told(e.event, e.fields)} for e in page.events]
        now = time.monotonic()
        if found or now - said >= _PULSE:
            said = now
            text = json.dumps({"at": round(now - shell.record.began, 3)} | found, separators=(",", ":"))
            async with asyncio.timeout(_PATIENCE):
                await socket.send_text(text)
        # Movers' progress is no change of the view: what wakes nobody is seen at the next look.
        if shell.record.last == after:
            await asyncio.sleep(lens.period)
