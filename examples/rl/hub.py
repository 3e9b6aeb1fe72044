"""One actor on the head, which is never preempted: the buffer, the log of events, and where processes of an attempt meet."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rl.buffer import Buffer, Chunk, Weights
from rl.settings import Settings

__all__ = ["Hub"]

T = TypeVar("T")
_LATE = 2.0  # seconds after which an idle engine may do what another one was to do


class Hub:
    """Its calls may wait; each says how long at most. Called by many at once (`max_concurrency`)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._changed = threading.Condition()
        self._buffer = Buffer(settings.chunks, settings.max_lag)
        self._told: dict[str, Any] = {}
        self._serving: dict[str, Weights] = {}
        self._leases: dict[int, float] = {}  # since when
        self._failed = ""
        self._newest = 0  # the highest step that was ever reached
        self._reached = 0  # steps that were trained, those that were lost included
        self._last_step = time.monotonic()
        self._over = False
        self._version = 0
        self._file = settings.events.open("a", buffering=1)

    # -- events

    def note(self, event: str, t: float | None = None, **fields: Any) -> None:
        """Append an event. t: monotonic seconds of this machine, which all its processes share."""
        with self._changed:
            self._note(event, t, **fields)

    def _note(self, event: str, t: float | None = None, **fields: Any) -> None:
        if self._file.closed:  # said by one whose end was not waited for
            return
        at = time.monotonic() if t is None else t
        self._file.write(json.dumps({"t": round(at, 4), "event": event, **fields}) + "\n")

    def fail(self, why: str) -> None:
        """The run must end with this error. The first counts."""
        with self._changed:
            self._failed = self._failed or why
            self._note("failed", why=why)
            self._changed.notify_all()

    # -- meeting

    def tell(self, key: str, value: Any) -> None:
        """Say something to others of an attempt."""
        with self._changed:
            self._told[key] = value
            self._changed.notify_all()

    def mint(self, key: str) -> int:
        """Of the baseline: the next version, and whoever waits for `key` is told of it."""
        with self._changed:
            self._version += 1
            self._told[key] = self._version
            self._changed.notify_all()
            return self._version

    def told(self, key: str, wait: float) -> Any:
        """What was said; None if nothing was within `wait` seconds."""
        return self._wait(lambda: self._told.get(key), wait)

    def told_after(self, key: str, after: int, wait: float) -> Any:
        """A number that was said, once it is more than `after`; None if it was not within `wait` seconds."""
        return self._wait(lambda: n if (n := self._told.get(key, 0)) > after else None, wait)

    # -- engines

    def serve(self, owner: str, weights: Weights) -> None:
        """An engine has installed these."""
        with self._changed:
            self._serving[owner] = weights
            self._changed.notify_all()

    def ask(self, owner: str, wait: float) -> int | None:
        """`Buffer.ask` with what that engine serves, waiting for something to do."""

        def look() -> int | None:
            weights = self._serving.get(owner)
            if weights is None:
                return None
            now = time.monotonic()
            ticket = self._buffer.ask(owner, weights, [t for t, at in self._leases.items() if now - at > _LATE])
            if ticket is not None:
                self._leases.setdefault(ticket, now)
            return ticket

        return self._wait(look, wait)

    def put(self, chunk: Chunk) -> bool:
        """`Buffer.put`."""
        with self._changed:
            taken = self._buffer.put(chunk)
            self._leases.pop(chunk.ticket, None)
            self._changed.notify_all()
            return taken

    def forget(self, owner: str) -> None:
        """`Buffer.forget`."""
        with self._changed:
            self._serving.pop(owner, None)
            self._buffer.forget(owner)
            self._leases = {t: at for t, at in self._leases.items() if t in self._buffer.leased}
            self._changed.notify_all()

    # -- trainers

    def begin(self, line: str, step: int) -> None:
        """`Buffer.begin`."""
        with self._changed:
            before = dict(self._buffer.counts)
            self._buffer.begin(line, step)
            lost = {
                what: n - before.get(what, 0) for what, n in self._buffer.counts.items() if n != before.get(what, 0)
            }
            self._note("begin", line=line, step=step, **lost)
            self._changed.notify_all()

    def take(self, line: str, wait: float) -> list[Chunk] | None:
        """`Buffer.take`, waiting for a whole batch."""
        return self._wait(lambda: self._buffer.take(line), wait)

    def unusable(self, line: str, version: int) -> None:
        """`Buffer.unusable`."""
        with self._changed:
            self._buffer.unusable(line, version)
            self._note("unusable", line=line, version=version)
            self._changed.notify_all()

    def trained(self, line: str, step: int, fields: Mapping[str, Any]) -> bool:
        """`Buffer.trained`, with what is to be noted of the step."""
        with self._changed:
            if not self._buffer.trained(line, step):
                return False
            self._newest, self._last_step = max(self._newest, step), time.monotonic()
            self._reached += 1
            self._note("step", line=line, step=step, **fields)
            self._changed.notify_all()
            return True

    def finish(self) -> None:
        """The last step is done."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # -- the driver

    def state(self) -> dict[str, Any]:
        """How far it is."""
        with self._changed:
            buffer = self._buffer
            return {
                "line": buffer.line,
                "step": buffer.step,
                "newest": self._newest,
                "reached": self._reached,
                "failed": self._failed,
                "over": self._over,
                "since_step": time.monotonic() - self._last_step,
                "ready": len(buffer.ready),
                "taken": len(buffer.taken),
                "leased": {ticket: list(holders) for ticket, holders in buffer.leased.items()},
                "counts": dict(buffer.counts),
            }

    def close(self) -> dict[str, Any]:
        """The end: what the buffer counted, and which tickets each step of the line that counts trained on."""
        with self._changed:
            done = {str(step): list(tickets) for step, tickets in sorted(self._buffer.done.items())}
            self._note("end", counts=dict(self._buffer.counts), done=done)
            self._file.close()
            return {"counts": dict(self._buffer.counts), "done": done}

    def _wait(self, look: Callable[[], T | None], wait: float) -> T | None:
        deadline = time.monotonic() + wait
        with self._changed:
            while (found := look()) is None and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return found
