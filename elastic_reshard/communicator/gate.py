"""A network with a gate: it counts the calls that are inside, and lets none in once its communicator is marked.

"abort() returned" says nothing of an operation that is blocked (measured with gloo and NCCL); only a count of zero does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from elastic_reshard.communicator.base import Name
from elastic_reshard.errors import TransferError
from elastic_reshard.transport.network import Network, Pending

__all__ = ["GatedNetwork", "Turnstile"]


class Turnstile:
    """Counts the calls inside, and lets none in once it is marked. waiting_since: as transport.Network's."""

    def __init__(self, name: Name) -> None:
        self.waiting_since: float | None = None
        self._name = name
        self._lock = threading.Lock()
        self._busy = 0
        self._reason: str | None = None

    @property
    def busy(self) -> int:
        """Calls inside. Any thread."""
        with self._lock:
            return self._busy

    @property
    def marked(self) -> str | None:
        """Why it lets nobody in, None while it does."""
        with self._lock:
            return self._reason

    def mark(self, reason: str) -> None:
        """Let nobody in from now on. The first reason stays. Any thread; never blocks."""
        with self._lock:
            self._reason = reason if self._reason is None else self._reason

    @contextmanager
    def inside(self) -> Iterator[None]:
        """One call. What fails in it after the mark is told as the abort that it is, not as a peer's loss."""
        with self._lock:
            if self._reason is not None:
                raise self._aborted()
            self._busy += 1
        try:
            yield
        except TransferError as error:
            if self._reason is not None:
                raise self._aborted() from error
            raise
        finally:
            with self._lock:
                self._busy -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait for others, inside."""
        with self.inside():
            self.waiting_since = time.monotonic()
            try:
                yield
            finally:
                self.waiting_since = None

    def _aborted(self) -> TransferError:
        return TransferError(f"communicator {self._name} was aborted: {self._reason}; form a new one under a new name")


class GatedNetwork(Turnstile):
    """transport.Network around a backend's own. leave: what `close` does: the communicator's way out."""

    def __init__(self, inner: Network, name: Name, leave: Callable[[], None]) -> None:
        super().__init__(name)
        self._inner, self._leave = inner, leave

    def reserve(self, peer: int, sends: int, receives: int) -> tuple[int, int]:
        """As transport.Network."""
        return self._inner.reserve(peer, sends, receives)

    def send(self, peer: int, buffer: torch.Tensor, number: int | None = None) -> Pending:
        """As transport.Network; TransferError once marked."""
        with self.inside():
            return _GatedPending(self._inner.send(peer, buffer, number), self)

    def receive(self, peer: int, buffer: torch.Tensor, number: int | None = None) -> Pending:
        """As transport.Network; TransferError once marked."""
        with self.inside():
            return _GatedPending(self._inner.receive(peer, buffer, number), self)

    def close(self) -> None:
        """Leave: peers do not wait for this member any more. Idempotent."""
        self.mark("closed by its own member")
        self._leave()


class _GatedPending:
    __slots__ = ("_inner", "_network")

    def __init__(self, inner: Pending, network: GatedNetwork) -> None:
        self._inner, self._network = inner, network

    def wait(self, deadline: float) -> None:
        with self._network.waiting():
            self._inner.wait(deadline)
