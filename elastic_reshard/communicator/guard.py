"""Calls that may never return, each in a thread of its own. Nothing here ends such a call: only the end of its process does."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from elastic_reshard.log import logger

__all__ = ["Guarded"]

_log = logger("communicator")
_T = TypeVar("_T")


class Guarded(Generic[_T]):
    """One call in a daemon thread, begun at once.

    late(value): called in that thread when the call ends after `give_up`, with its value, or None if it raised; the call
    counts as returned only after it.
    """

    def __init__(self, what: str, call: Callable[[], _T], late: Callable[[_T | None], None] | None = None) -> None:
        self.what = what
        self.error: BaseException | None = None
        self._call, self._late = call, late
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._given_up = False
        self._value: list[_T] = []
        threading.Thread(target=self._run, name=what, daemon=True).start()

    @property
    def returned(self) -> bool:
        """Whether the call is over, by value or error. Never blocks."""
        return self._done.is_set()

    @property
    def value(self) -> _T:
        """The call's; raises its error. Only once it has returned."""
        if self.error is not None:
            raise self.error
        return self._value[0]

    def wait(self, deadline: float) -> bool:
        """Whether it is over. Blocks until `deadline` (time.monotonic) at most."""
        return self._done.wait(max(0.0, deadline - time.monotonic()))

    def give_up(self) -> bool:
        """Wait no more: what still comes goes to `late`. False if the call was over before."""
        with self._lock:
            self._given_up = not self._done.is_set()
            return self._given_up

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it, and late ones are logged
            _let_go(error)
            self.error = error
        with self._lock:
            given_up = self._given_up
            if not given_up:
                self._done.set()
        if given_up:
            # It may belong to an epoch that is long over: nobody is to act on it.
            _log.info("communicator.late", what=self.what, error=repr(self.error) if self.error else "none")
            if self._late is not None:
                self._late(self._value.pop() if self._value else None)
            self._done.set()


def _let_go(error: BaseException | None) -> None:
    """Clear the frames that an error and its causes came through. This call and its error hold each other, so what is in them
    (a backend's operations, with their sockets and thread) would stay until the garbage collector comes by."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
