"""The record of what happened: the last events, numbered, for people and dashboards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from pydantic import BaseModel

from elastic_reshard.log import logger

__all__ = ["EventPage", "EventRecord", "Record"]

_MOST: Final = 10_000
_log = logger("supervisor")


class EventRecord(BaseModel):
    """number: rises by one. at: seconds since this supervisor started. time: for display only, nothing is decided by it."""

    number: int
    at: float
    time: str
    event: str
    fields: dict[str, Any]


class EventPage(BaseModel):
    """Events after a number. next: pass it as `after` for the next page. dropped: events that were forgotten in between."""

    events: list[EventRecord]
    next: int
    dropped: int


class Record:
    """The last 10,000 events; each is also one log event."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._kept: deque[EventRecord] = deque(maxlen=_MOST)
        self.last = 0

    def add(self, event: str, fields: Mapping[str, Any]) -> None:
        """One more."""
        self.last += 1
        # Fields are plain data already, or have a readable str().
        plain = {k: v if isinstance(v, str | int | float | list | dict | None) else str(v) for k, v in fields.items()}
        at = round(time.monotonic() - self._began, 6)
        shown = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._kept.append(EventRecord(number=self.last, at=at, time=shown, event=event, fields=plain))
        _log.info(event, **{f"{k}_" if k == "event" else k: v for k, v in plain.items()})

    def page(self, after: int, limit: int) -> EventPage:
        """At most `limit` events with numbers above `after`."""
        first = self.last - len(self._kept) + 1
        start = max(after + 1, first)
        found = list(islice(self._kept, start - first, start - first + limit))
        return EventPage(
            events=found, next=found[-1].number if found else max(after, 0), dropped=max(0, first - after - 1)
        )
