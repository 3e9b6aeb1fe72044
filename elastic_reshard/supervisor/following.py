"""Events as they happen, for both clients: where a reader is, and what comes next over a connection that may break. No I/O."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlencode

from pydantic import ValidationError

from elastic_reshard.errors import ProtocolError, SupervisorUnreachable
from elastic_reshard.supervisor.record import EventPage, EventRecord

__all__ = ["SILENCE", "Follower"]

# Seconds without a message after which a connection counts as broken: the supervisor says something every 5 s.
SILENCE: Final = 15.0
_MOST_PAUSE: Final = 1.0


class Follower:
    """One reader. seconds: how long it reads, None: for ever; patience: how long nobody may answer.

    Ask for `address` or `left` right before you wait: what the reader does meanwhile with what it has is nobody's silence."""

    def __init__(self, url: str, after: int, seconds: float | None, patience: float) -> None:
        self._url, self._after, self._instance = url.replace("http", "ws", 1), after, ""
        self._patience, self._pause = patience, 0.05
        self._waiting: float | None = None  # since when it waits to be told something
        self._until = None if seconds is None else time.monotonic() + seconds

    @property
    def address(self) -> str:
        """Where to connect: from what was read last."""
        self._wait()
        return f"{self._url}/v1/events/stream?{urlencode({'after': self._after, 'instance': self._instance})}"

    @property
    def over(self) -> bool:
        """Whether its time is over."""
        return self._until is not None and time.monotonic() >= self._until

    @property
    def left(self) -> float:
        """Seconds to wait for the next message."""
        self._wait()
        return SILENCE if self._until is None else max(0.0, min(SILENCE, self._until - time.monotonic()))

    def read(self, message: str | bytes) -> Iterator[EventRecord]:
        """The events of one message. Where some were forgotten before they were read, one named "events.dropped" says how many.
        ProtocolError for a message of somebody else."""
        try:
            page = EventPage.model_validate_json(message)
        except ValidationError as error:
            raise ProtocolError(f"{self._url} is no supervisor, or one of another version: {error}") from error
        self._waiting, self._pause = None, 0.05
        if page.dropped:
            at, shown = (page.events[0].at, page.events[0].time) if page.events else (0.0, "")
            yield EventRecord(
                number=max(0, page.next - len(page.events)), at=at, time=shown, event="events.dropped",
                fields={"dropped": page.dropped},
            )  # fmt: skip
        for event in page.events:
            # From here on a reader that goes and comes back does not get it again.
            self._instance, self._after = page.instance, event.number
            yield event
        self._instance, self._after = page.instance, page.next

    def broke(self, error: Exception) -> float:
        """A connection broke or was not to be had: seconds to wait before the next. SupervisorUnreachable after `patience`."""
        if time.monotonic() - self._wait() >= self._patience:
            raise SupervisorUnreachable(
                f"the supervisor at {self._url} told no events for {self._patience:g} s: {type(error).__name__}: {error}. Is "
                "it running? Groups go on serving what they have"
            ) from error
        pause = self._pause * (0.5 + random.random() / 2)
        self._pause = min(_MOST_PAUSE, 2 * self._pause)
        return pause if self._until is None else min(pause, max(0.0, self._until - time.monotonic()))

    def _wait(self) -> float:
        """It waits from now on, if it did not before: since when."""
        if self._waiting is None:
            self._waiting = time.monotonic()
        return self._waiting
