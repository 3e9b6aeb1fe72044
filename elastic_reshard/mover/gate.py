"""The gate before each round: closed while a planned end is agreed on, then open up to the last round that all run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from elastic_reshard.errors import ProtocolError, TransferError
from elastic_reshard.protocol.starts import Way

__all__ = ["Gate"]

_LOOK: Final = 0.005  # seconds between looks at what nobody signals


class Gate:
    """One transfer's. The run asks it, the control thread sets it; any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._end: int | None = None  # the first round that nobody runs
        self._aborted = ""
        self._began = 0

    @property
    def began(self) -> int:
        """Rounds up to the last that was begun."""
        with self._changed:
            return self._began

    @property
    def held(self) -> bool:
        """Whether no further round is begun without being told."""
        with self._changed:
            return self._closed and self._end is None

    @property
    def aborted(self) -> str:
        """Why everything was to end at once; "" if nothing was."""
        with self._changed:
            return self._aborted

    def may_begin(self, number: int, enter: Callable[[], bool] = lambda: True) -> bool:
        """Whether that round is to be run; blocks while that is not decided. TransferError once aborted.

        enter: asked at last, again and again, until it lets the round begin; it must not block."""
        with self._changed:
            while True:
                way = self._way(number)
                if way is Way.ENDED:
                    return False
                if way is Way.OPEN and enter():
                    self._began = max(self._began, number + 1)
                    return True
                self._changed.wait(_LOOK if way is Way.OPEN else None)

    def may_copy(self, number: int, enter: Callable[[], bool]) -> bool:
        """The same of a round that nobody else takes part in: it does not count as begun, and a gate that is held lets it
        pass."""
        with self._changed:
            while self._way(number) is not Way.ENDED:
                if enter():
                    return True
                self._changed.wait(_LOOK)
            return False

    def way(self, number: int) -> Way:
        """What is decided about a round now. Never blocks. TransferError once aborted."""
        with self._changed:
            return self._way(number)

    def begin(self, number: int) -> bool:
        """Count a round as begun, if it may be now; whether it is. Never blocks. TransferError once aborted."""
        with self._changed:
            if self._way(number) is not Way.OPEN:
                return False
            self._began = max(self._began, number + 1)
            return True

    def _way(self, number: int) -> Way:
        if self._aborted:
            raise TransferError(self._aborted)
        if self._end is not None:
            return Way.ENDED if number >= self._end else Way.OPEN
        return Way.HELD if self._closed else Way.OPEN

    def hold(self) -> int:
        """Close it; returns `began`, which stands still from now on until told otherwise."""
        with self._changed:
            self._closed = True
            return self._began

    def until(self, number: int) -> None:
        """Open it up to the end of round `number`. ProtocolError if a later one has begun already: others wait for it."""
        with self._changed:
            if number + 1 < self._began:
                raise ProtocolError(f"told to end after round {number}, but round {self._began - 1} has begun; ask for the "
                                    "rounds begun first")  # fmt: skip
            self._end = number + 1
            self._changed.notify_all()

    def abort(self, reason: str) -> None:
        """End every wait, and begin nothing more. The first reason stays."""
        with self._changed:
            self._aborted = self._aborted or reason
            self._changed.notify_all()
