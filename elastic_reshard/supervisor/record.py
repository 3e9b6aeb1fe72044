"""The record of what happened: the last events, numbered, for people and dashboards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
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
    """Events after a number. next: pass it as `after` for the next page. dropped: events that were forgotten in between.
    instance: the start of a supervisor by which these numbers count."""

    events: list[EventRecord]
    next: int
    dropped: int
    instance: str = ""


class Record:
    """The last 10,000 events; each is also one log event. began: when, by time.monotonic; `at` counts from there.

    instance: of the supervisor whose events these are. news: called after each."""

    def __init__(self, instance: str = "", news: Callable[[], None] = lambda: None) -> None:
        self.instance, self._news = instance, news
        self.began = time.monotonic()
        self._kept: deque[EventRecord] = deque(maxlen=_MOST)
        self.last = 0

    def add(self, event: str, fields: Mapping[str, Any]) -> None:
        """One more."""
        self.last += 1
        # Fields are plain data already, or have a readable str().
        plain = {k: v if isinstance(v, str | int | float | list | dict | None) else str(v) for k, v in fields.items()}
        at = round(time.monotonic() - self.began, 6)
        shown = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._kept.append(EventRecord(number=self.last, at=at, time=shown, event=event, fields=plain))
        _log.info(event, **{f"{k}_" if k == "event" else k: v for k, v in plain.items()})
        self._news()

    def after(self, after: int, instance: str) -> int:
        """The number after which events are news for a reader that has seen those up to `after` of this instance ("": it does
        not say); all are, if that was another one."""
        return after if instance in ("", self.instance) else 0

    def page(self, after: int, limit: int) -> EventPage:
        """At most `limit` events with numbers above `after`, which may be one that is still to come."""
        first = self.last - len(self._kept) + 1
        start = min(max(after + 1, first), self.last + 1)
        found = list(islice(self._kept, start - first, start - first + limit))
        return EventPage(
            events=found,
            next=found[-1].number if found else max(after, 0),
            dropped=max(0, first - after - 1),
            instance=self.instance,
        )
