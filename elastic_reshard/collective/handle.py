"""A call in a thread of its own, and what it gives back."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

from elastic_reshard.errors import PeerLost, TransferError, TransferTimeout
from elastic_reshard.transport import Endpoint

__all__ = ["Handle", "Report", "Work"]

_LOOK_S = 0.1  # how often a waiting thread looks whether the call can still end


@dataclass(frozen=True)
class Report:
    """What a call did on this member. Bytes and seconds.

    sent, received: over the network. pulled: out of domain peers' memory. copied: from own to own tensors. staged: through
    staging, at either end. planned, bound: whether the plan and the program had to be made (else they were kept).
    transfer: the bare transfer; seconds: the whole call. verified: bytes whose digests were compared.
    """

    plan: str
    rounds: int
    planned: bool
    bound: bool
    sent: int
    received: int
    pulled: int
    copied: int
    staged: int
    staging: int
    transfer: float
    seconds: float
    verified: int


class Work(Protocol):
    """What a handle runs."""

    endpoint: Endpoint

    def run(self) -> Report:
        """All of it."""


class Handle:
    """A call under way in a thread of its own, from `start` on. Tensors must not be touched until `wait` has returned."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._result: Report | None = None
        self._error: BaseException | None = None
        self._lock, self._done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-reshard", daemon=True)

    def start(self) -> None:
        """Begin. An interrupt may come out of it although the thread runs: whoever made it then abandons it."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._end(self._work.run(), None)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._end(None, error)

    def _end(self, result: Report | None, error: BaseException | None) -> None:
        """The first to end the call decides."""
        with self._lock:
            if not self._done.is_set():
                self._result, self._error = result, error
                self._done.set()

    def done(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Report:
        """The report, or the call's error. TransferTimeout after `timeout` seconds, while the call goes on until its own
        deadline: wait again."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._done.wait(_LOOK_S if end is None else min(_LOOK_S, max(0.0, end - time.monotonic()))):
            if end is not None and time.monotonic() >= end:
                raise TransferTimeout(
                    f"the call is still under way after {timeout} s; it ends by its own deadline, wait again"
                )
            self._give_up_if_stuck()
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise TransferError("the call ended without a result")
        return self._result

    def abandon(self, error: BaseException) -> None:
        """End it for whoever waits, and close the endpoint; its thread ends by the deadline at the latest."""
        self._end(None, error)
        self._work.endpoint.fail(error)

    def _give_up_if_stuck(self) -> None:
        """gloo forgets a message of which a part was under way when the connection broke: the wait for it ends only at
        the deadline (measured, also for small ones). So its thread is left to itself."""
        ended = self._work.endpoint.stuck()
        if ended:
            names = ", ".join(map(str, ended))
            self.abandon(
                PeerLost(
                    f"member {names} ended during a transfer, of which a message is stuck. Destination tensors may be half "
                    "written; form a new group without it and refit again",
                    ended,
                )
            )
