"""A backend whose groups move pretend device memory over sockets: the ways of NCCL, on a machine without a GPU.

It is as silent as NCCL: a peer's death is told by nobody, unless `tells`; a group whose peer is gone never ends until it is
aborted. Native calls fail and hang as the fake backend's do, by its `Faults`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from elastic_reshard.arena import tensor_over
from elastic_reshard.arena.boxes import array_at
from elastic_reshard.arena.device import Device, Stream
from elastic_reshard.arena.pretend import PretendStream
from elastic_reshard.arena.strided import Strided
from elastic_reshard.communicator.base import Backend, Capabilities, Communicator, Name
from elastic_reshard.communicator.fake import FakeBackend, FakeCommunicator, Faults
from elastic_reshard.communicator.grouped import GroupedCommunicator
from elastic_reshard.communicator.store import ControlStore
from elastic_reshard.errors import ProtocolError, TransferError
from elastic_reshard.transport.network import Evidence, Network

__all__ = ["Launch", "PretendBackend"]

_ALL: Final = Capabilities(can_shrink=True, can_grow=True)
_REMEMBERED: Final = 4096


class Launch(NamedTuple):
    """A group. at: when it was launched (time.monotonic); peers: ranks that its kernel waits for."""

    at: float
    peers: frozenset[int]


class PretendBackend:
    """base.Backend over one pretend device. faults: of its native calls. tells: errors of peers are told, unlike NCCL's.
    launched: the last groups, oldest first.

    Communicators formed by it may be of processes of one machine only."""

    name = "pretend"

    def __init__(
        self,
        device: Device,
        faults: Faults | None = None,
        capabilities: Capabilities = _ALL,
        config: str = "pretend",
        *,
        tells: bool = False,
    ) -> None:
        if device.kind != "pretend":
            raise ProtocolError(f"{device.id} is no pretend device; use the backend of its kind")
        self.device, self.capabilities, self.config, self.tells = device, capabilities, config, tells
        self.launched: deque[Launch] = deque(maxlen=_REMEMBERED)
        self._inner = FakeBackend(faults, capabilities, config)

    def form(self, store: ControlStore, rank: int, size: int, deadline: float, evidence: Evidence) -> Communicator:
        """As base.Backend."""
        store.hold_until(deadline)
        inner = self._inner.met(store.name, store, rank, size, deadline, evidence, self._inner.faults.suffer("form"))
        return self._communicator(inner, evidence).greeted(deadline, store)

    def join(
        self, store: ControlStore, rank: int, size: int, fresh: Sequence[int], deadline: float, evidence: Evidence
    ) -> Communicator:
        """As base.Backend."""
        store.hold_until(deadline)
        inner = self._inner.met(store.name, store, rank, size, deadline, evidence, self._inner.faults.suffer("grow"))
        return self._communicator(inner, evidence).greeted(deadline, store)

    def _communicator(self, inner: FakeCommunicator, evidence: Evidence) -> GroupedCommunicator:
        native = _Native(inner, self.config, self.tells, self.launched)
        return GroupedCommunicator(native, inner.name, inner.rank, inner.size, self.device, evidence, self.capabilities)


class _Native:
    """grouped.Native on a fake communicator's messages."""

    def __init__(self, inner: FakeCommunicator, config: str, tells: bool, launched: deque[Launch]) -> None:
        self.config, self.aborted, self.launched = config, False, launched
        self.error: TransferError | None = None
        self._inner, self._tells = inner, tells

    def launch(
        self, sends: Sequence[tuple[int, Strided]], receives: Sequence[tuple[int, Strided]], stream: Stream
    ) -> None:
        if not isinstance(stream, PretendStream):
            raise TransferError(f"{stream!r} is no pretend stream; launch on the network's own")
        self.launched.append(Launch(time.monotonic(), frozenset(peer for peer, _ in (*sends, *receives))))
        stream.submit(_Group(self, self._inner.network, sends, receives).step)

    def settled(self) -> bool:
        if self.error is not None and self._tells:
            raise self.error
        return True

    def shrink(self, name: Name, excluded: Sequence[int], deadline: float) -> _Native:
        return self._made(self._inner.shrink(name, excluded, deadline))

    def grow(self, store: ControlStore, rank: int, size: int, deadline: float) -> _Native:
        return self._made(self._inner.grow(store, size, deadline))

    def close(self, deadline: float) -> None:
        # As NCCL's: it waits for all. Who closed before the others had read what he sent would take it with him.
        peers = [peer for peer in range(self._inner.size) if peer != self._inner.rank]
        network = self._inner.network
        pending = [network.receive(peer, torch.empty(1, dtype=torch.uint8)) for peer in peers]
        pending += [network.send(peer, torch.zeros(1, dtype=torch.uint8)) for peer in peers]
        for one in pending:
            one.wait(deadline)
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()
        self.aborted = True

    def _made(self, child: Communicator) -> _Native:
        if not isinstance(child, FakeCommunicator):
            raise TransferError(f"communicator {child.name} is no fake one")
        return _Native(child, self.config, self._tells, self.launched)


class _Group:
    """One group on its way: begun when the stream comes to it, in a thread, for streams are advanced by whoever asks."""

    def __init__(
        self,
        native: _Native,
        network: Network,
        sends: Sequence[tuple[int, Strided]],
        receives: Sequence[tuple[int, Strided]],
    ) -> None:
        self._native, self._network, self._sends, self._receives = native, network, sends, receives
        self._thread: threading.Thread | None = None
        self._done = False

    def step(self) -> bool:
        """Whether it is over: done, or aborted with nobody inside."""
        if self._thread is None and not self._native.aborted:
            self._thread = threading.Thread(target=self._move, name="pretend group", daemon=True)
            self._thread.start()
        inside = self._thread is not None and self._thread.is_alive()
        return self._done or (self._native.aborted and not inside)

    def _move(self) -> None:
        try:
            pending = [self._network.receive(peer, _tensor(piece)) for peer, piece in self._receives]
            pending += [self._network.send(peer, _tensor(piece)) for peer, piece in self._sends]
            for one in pending:
                one.wait(math.inf)
        except TransferError as error:
            self._native.error = error
            return
        self._done = True


def _tensor(piece: Strided) -> torch.Tensor:
    return tensor_over(array_at(piece), torch.uint8)


_: type[Backend] = PretendBackend  # the Protocol is kept
