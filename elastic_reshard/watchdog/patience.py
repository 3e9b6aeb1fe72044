"""When silence means something. Pure: time is passed in, of one monotonic clock."""

from __future__ import annotations

__all__ = ["Patience"]


class Patience:
    """Judges another's silence of `limit` seconds. A judge whose own tick came late grants two beats before it judges.

    Each turn: due(now, timeout) before waiting; read all that has arrived; heard(now) if there was something; silent(now).
    """

    def __init__(self, limit: float, beat: float, now: float) -> None:
        self._limit, self._beat = limit, beat
        self._last = now
        self._due = now

    def due(self, now: float, timeout: float) -> None:
        """The judge waits now, and means to be back in `timeout` seconds."""
        self._due = now + timeout

    def heard(self, now: float) -> None:
        """There was a sign of life."""
        self._last = now

    def silent(self, now: float) -> bool:
        """Whether the silence has lasted too long, as far as this judge can tell."""
        if now > self._due + self._beat:
            self._last = max(self._last, now - self._limit + 2 * self._beat)
        self._due = now
        return now - self._last >= self._limit
