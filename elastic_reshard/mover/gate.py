"""The gate before each round: closed while a planned end is agreed on, then open up to the last round that all run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from elastic_reshard.errors import ProtocolError, TransferError

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
                if self._aborted:
                    raise TransferError(self._aborted)
                if self._end is not None and number >= self._end:
                    return False
                open_ = self._end is not None or not self._closed
                if open_ and enter():
                    self._began = max(self._began, number + 1)
                    return True
                self._changed.wait(_LOOK if open_ else None)

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
