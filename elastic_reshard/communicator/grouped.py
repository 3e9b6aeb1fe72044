"""Communicators whose network launches groups on a device's stream: what NCCL and the pretend backend have in common.

Nothing waits in a call that cannot be left: whether work is done, the library has an error, or somebody marked the
communicator is asked in turn. A library's silence is no evidence (NCCL tells of no peer's death): waits end by the event, an
abort or their deadline.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from elastic_reshard.arena.device import Device, Event, Stream
from elastic_reshard.arena.strided import Strided
from elastic_reshard.communicator.base import Capabilities, Communicator, Name
from elastic_reshard.communicator.gate import Turnstile
from elastic_reshard.communicator.greeting import HELLO, hello, stranger
from elastic_reshard.communicator.store import ControlStore
from elastic_reshard.errors import PeerLost, ReshardError, TransferError, TransferTimeout
from elastic_reshard.log import logger
from elastic_reshard.transport.blocks import WORD, WordBlock
from elastic_reshard.transport.network import Evidence, Pending
from elastic_reshard.transport.polling import poll

__all__ = ["GroupedCommunicator", "Native", "StreamNetwork"]

_log = logger("communicator")

_HELLO: Final = HELLO // WORD  # words
# What a polite end may take before it becomes an abort.
_FAREWELL_S: Final = 5.0


class Native(Protocol):
    """One end of a communicator, as its library has it. One thread at a time calls it, but for `abort`, which any thread may
    call while another call is inside; after it nothing else is done."""

    @property
    def config(self) -> str:
        """What all ends were formed with."""

    def launch(
        self, sends: Sequence[tuple[int, Strided]], receives: Sequence[tuple[int, Strided]], stream: Stream
    ) -> None:
        """Queue one group. It may not be on the stream before `settled`."""

    def settled(self) -> bool:
        """Whether the library has taken up every call. Never blocks. TransferError with its words if it reports an error."""

    def shrink(self, name: Name, excluded: Sequence[int], deadline: float) -> Native:
        """A child without some. TransferError; one attempt."""

    def grow(self, store: ControlStore, rank: int, size: int, deadline: float) -> Native:
        """A child with fresh ones, met over the child's store. TransferError; one attempt."""

    def close(self, deadline: float) -> None:
        """End politely, with all others. TransferError if that is not done by the deadline: then abort."""

    def abort(self) -> None:
        """End at once. May hang."""


class StreamNetwork(Turnstile):
    """transport.GroupedNetwork over a library's end. leave: what `close` does: the communicator's way out. spoiled: something
    failed, so that no polite end is to be tried."""

    def __init__(
        self, native: Native, name: Name, device: Device, stream: Stream, evidence: Evidence, leave: Callable[[], None]
    ) -> None:
        super().__init__(name)
        self.device: Final = device
        self.stream: Final = stream
        self.spoiled = False
        self._members: tuple[int, ...] = ()  # of the last group
        self._native, self._evidence, self._leave = native, evidence, leave

    def exchange(
        self, sends: Sequence[tuple[int, Strided]], receives: Sequence[tuple[int, Strided]], deadline: float
    ) -> Pending:
        """As transport.GroupedNetwork; TransferError once marked."""
        members = self._members = tuple(sorted({peer for peer, _ in (*receives, *sends)}))
        with self.waiting():
            self._guarded(lambda: self._native.launch(sends, receives, self.stream), members)
            self._until(self._native.settled, deadline, members, "a group with")
            return _Point(self, self.stream.record(), members)

    def point(self) -> Pending:
        """As transport.GroupedNetwork; TransferError once marked."""
        with self.inside():
            return _Point(self, self.stream.record(), self._members)

    def wait(self, event: Event, deadline: float, members: tuple[int, ...]) -> None:
        """Until an event is done; `members` are waited for."""

        def done() -> bool:
            if event.done():
                return True
            self._native.settled()
            return False

        with self.waiting():
            self._until(done, deadline, members, "an exchange with")

    def close(self) -> None:
        """As transport.GroupedNetwork."""
        self.mark("closed by its own member")
        self._leave()

    def _look(self) -> None:
        if self.marked is not None:
            raise TransferError("marked")  # `inside` tells it as the abort that it is

    def _until(self, done: Callable[[], bool], deadline: float, members: tuple[int, ...], what: str) -> None:
        if self._guarded(lambda: poll(done, deadline, self._look), members):
            self._look()  # an abort ends groups too: what is done after the mark may never have arrived
            return
        self.spoiled = True
        ended = self._evidence()
        names = ", ".join(map(str, ended or members)) or "nobody"
        if ended:
            raise PeerLost(f"member {names} ended during {what} it; form a new group without it and refit again", ended)
        raise TransferTimeout(
            f"the deadline passed during {what} member(s) {names}; which of them is late can't be seen from here: see whether "
            "they run, or give a longer deadline",
            members,
        )

    def _guarded(self, call: Callable[[], object], members: tuple[int, ...]) -> object:
        try:
            return call()
        except TransferError as error:
            self.spoiled = True
            ended = self._evidence() if self.marked is None else ()
            if ended and not isinstance(error, PeerLost):
                raise PeerLost(
                    f"member {', '.join(map(str, ended))} ended ({error}); form a new group", ended
                ) from error
            if isinstance(error, PeerLost) and not error.members:
                raise PeerLost(str(error), members) from error
            raise


class _Point:
    """transport.Pending."""

    __slots__ = ("_event", "_members", "_network")

    def __init__(self, network: StreamNetwork, event: Event, members: tuple[int, ...]) -> None:
        self._network, self._event, self._members = network, event, members

    def wait(self, deadline: float) -> None:
        self._network.wait(self._event, deadline, self._members)


class GroupedCommunicator:
    """base.Communicator on a library's end. Everything is launched on a stream of its own."""

    def __init__(
        self,
        native: Native,
        name: Name,
        rank: int,
        size: int,
        device: Device,
        evidence: Evidence,
        capabilities: Capabilities,
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.children: tuple[Communicator, ...] = ()
        self._native, self._evidence, self._capabilities = native, evidence, capabilities
        self._leaving, self._left, self._closing = threading.Lock(), False, False
        self.network = StreamNetwork(native, name, device, device.stream(), evidence, self.abort)

    @property
    def config(self) -> str:
        """What all ends were formed with."""
        return self._native.config

    @property
    def busy(self) -> int:
        """As base.Communicator."""
        return self.network.busy

    @property
    def ended(self) -> tuple[int, ...]:
        """As base.Communicator."""
        return self._evidence()

    def mark(self, reason: str) -> None:
        """As base.Communicator. Waits of this member end within a millisecond."""
        self.network.mark(reason)

    def abort(self) -> None:
        """End it, and wait until nothing that was launched can write any more. Hangs if the library does."""
        self.network.mark("aborted")
        with self._leaving:
            if self._left:
                return
            begun = time.monotonic()
            self._native.abort()
            # What was launched behind a group that was aborted is carried out now: slots must not be touched after this.
            poll(self.network.stream.record().done, math.inf)
            self._left = True
        _log.info("communicator.left", name=str(self.name), seconds=round(time.monotonic() - begun, 3))

    def close(self) -> None:
        """End politely, or by abort if anything failed here, or a child was made of it. May wait for the others."""
        self.network.mark("closed")
        if self._left or self._closing:
            return
        self._closing = True
        if self.network.spoiled or self.children:
            self.abort()
            return
        try:
            self._native.close(time.monotonic() + _FAREWELL_S)
        except TransferError as error:
            _log.warning("communicator.not_closed", name=str(self.name), why=str(error))
            self.abort()
            return
        self._left = True

    def shrink(self, name: Name, excluded: Sequence[int], deadline: float) -> Communicator:
        """As base.Communicator."""
        self._able(self._capabilities.can_shrink, "shrink")
        staying = [rank for rank in range(self.size) if rank not in excluded]
        with self.network.inside():
            native = self._native.shrink(name, excluded, deadline)
        return self._child(
            native, name, staying.index(self.rank), len(staying), _renumbered(self._evidence, staying), deadline
        )

    def grow(self, store: ControlStore, size: int, deadline: float) -> Communicator:
        """As base.Communicator."""
        self._able(self._capabilities.can_grow, "grow")
        store.hold_until(deadline)
        with self.network.inside():
            native = self._native.grow(store, self.rank, size, deadline)
        return self._child(native, store.name, self.rank, size, self._evidence, deadline)

    def greet(self, deadline: float) -> None:
        """Say the name to every peer and hear it, in one group: then every pair has been used, and all are of one communicator.
        Blocks until `deadline` at most. PeerLost, TransferTimeout or PeerRefused, which name ranks."""
        network, size = self.network, self.size
        block = WordBlock(network.device, _HELLO * (size + 1))
        mine = block.on_device(_HELLO * size, _HELLO).as_bytes()
        peers = [(self.rank + step) % size for step in range(1, size)]
        block.host[_HELLO * size : _HELLO * (size + 1)] = _hello(self.name, self.rank, size, self.config)
        block.copy(block.up(_HELLO * size, _HELLO), network.stream)
        heard = [(peer, block.on_device(_HELLO * peer, _HELLO).as_bytes()) for peer in peers]
        network.exchange([(peer, mine) for peer in peers], heard, deadline).wait(deadline)
        block.copy(block.down(0, _HELLO * size), network.stream)
        network.point().wait(deadline)
        for peer in peers:
            if not np.array_equal(
                block.host[_HELLO * peer : _HELLO * (peer + 1)], _hello(self.name, peer, size, self.config)
            ):
                raise stranger(self.name, peer, size, self.config)
        block.close()

    def greeted(self, deadline: float, store: ControlStore | None = None) -> GroupedCommunicator:
        """This one, greeted; it is aborted if that fails or the store is cancelled meanwhile."""
        if store is not None:
            store.when_cancelled(self.abort)
        try:
            self.greet(deadline)
        except ReshardError as error:
            self.mark("it did not form")
            self.abort()
            if store is not None and store.error is not None:
                raise store.error from error
            raise
        if store is not None:
            store.when_cancelled(None)
        _log.info("communicator.formed", name=str(self.name), rank=self.rank, size=self.size, config=self.config)
        return self

    def _able(self, can: bool, what: str) -> None:
        if not can:
            raise TransferError(f"this backend cannot {what} communicator {self.name}; form a new one")
        if self.children:
            raise TransferError(f"communicator {self.name} was changed once already; form a new one")

    def _child(
        self, native: Native, name: Name, rank: int, size: int, evidence: Evidence, deadline: float
    ) -> GroupedCommunicator:
        child = GroupedCommunicator(native, name, rank, size, self.network.device, evidence, self._capabilities)
        self.children = (*self.children, child)
        return child.greeted(deadline)


def _hello(name: Name, rank: int, size: int, config: str) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.frombuffer(hello(name, rank, size, config), dtype=np.uint64)


def _renumbered(evidence: Evidence, staying: Sequence[int]) -> Evidence:
    return lambda: tuple(staying.index(rank) for rank in evidence() if rank in staying)
