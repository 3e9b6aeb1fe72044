"""A backend for tests and the soak that can do everything, and does it as badly as it is told to, by seed.

Its bytes really move (`sockets`), between threads of a process or processes of one machine. Each native call may hang until the
process ends, be slow, raise, or return without effect: the ways in which NCCL and gloo were seen to fail.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import torch

from elastic_reshard.communicator.base import Backend, Capabilities, Communicator, Name
from elastic_reshard.communicator.gate import GatedNetwork
from elastic_reshard.communicator.sockets import Meeting, SocketNetwork
from elastic_reshard.communicator.store import ControlStore
from elastic_reshard.errors import TransferError
from elastic_reshard.transport.network import Evidence

__all__ = ["FakeBackend", "FakeCommunicator", "Fault", "Faults"]

_ADDRESS = 64
_ALL = Capabilities(can_shrink=True, can_grow=True, abort_frees_peers=True)


class Fault(StrEnum):
    """What a call does instead of its work."""

    NONE = "none"
    HANG = "hang"  # does not return while the process lives, or until `Faults.released` is set
    SLOW = "slow"  # works, later
    RAISE = "raise"
    NOTHING = "nothing"  # returns as if it had worked


class Faults:
    """Draws a fault for each call ("form", "shrink", "grow", "abort", "close"), the same ones for the same seed.

    rates: by call, the probability of each fault; a rate of 1 is always. slow: seconds. counts: what was drawn.
    """

    def __init__(
        self, rates: Mapping[str, Mapping[Fault, float]] | None = None, seed: int = 0, slow: float = 0.1
    ) -> None:
        self.counts: Counter[tuple[str, Fault]] = Counter()
        self.released = threading.Event()
        self._rates = {call: dict(faults) for call, faults in (rates or {}).items()}
        self._random, self._slow = random.Random(seed), slow
        self._lock = threading.Lock()

    def suffer(self, call: str) -> bool:
        """Do as drawn, and say whether the call is to work then. Blocks if it hangs or is slow; TransferError if it raises."""
        with self._lock:
            fault = self._draw(call)
            self.counts[call, fault] += 1
        if fault is Fault.HANG:
            self.released.wait()
        elif fault is Fault.SLOW:
            time.sleep(self._slow)
        elif fault is Fault.RAISE:
            raise TransferError(f"fake {call}: internal error; form a new communicator")
        return fault is not Fault.NOTHING

    def _draw(self, call: str) -> Fault:
        point = self._random.random()
        for fault, rate in self._rates.get(call, {}).items():
            if point < rate:
                return fault
            point -= rate
        return Fault.NONE


class FakeBackend:
    """base.Backend. faults: by which it fails; capabilities and config: what it claims."""

    name = "fake"

    def __init__(
        self,
        faults: Faults | None = None,
        capabilities: Capabilities = _ALL,
        config: str = "fake",
    ) -> None:
        self.faults = faults or Faults()
        self.capabilities = capabilities
        self.config = config

    def form(self, store: ControlStore, rank: int, size: int, deadline: float, evidence: Evidence) -> Communicator:
        """As base.Backend."""
        effect = self.faults.suffer("form")
        return self.met(store.name, store, rank, size, deadline, evidence, effect)

    def join(
        self, store: ControlStore, rank: int, size: int, fresh: Sequence[int], deadline: float, evidence: Evidence
    ) -> Communicator:
        """As base.Backend."""
        effect = self.faults.suffer("grow")
        return self.met(store.name, store, rank, size, deadline, evidence, effect)

    def met(
        self,
        name: Name,
        store: ControlStore,
        rank: int,
        size: int,
        deadline: float,
        evidence: Evidence,
        effect: bool,
    ) -> FakeCommunicator:
        """Meet over the store; without `effect`, a communicator whose peers are not there."""
        if not effect:
            return FakeCommunicator(self, name, rank, size, SocketNetwork(rank, size, {}), evidence)
        store.hold_until(deadline)

        def tell(address: str) -> dict[int, str]:
            store.set(f"fake/{rank}", address)
            keys = [f"fake/{r}" for r in range(size)]
            store.wait(keys)
            return {r: value.decode() for r, value in enumerate(store.multi_get(keys)) if r != rank}

        with Meeting(rank, self._token(name, size)) as meeting:
            store.when_cancelled(meeting.ended.set)
            try:
                sockets = meeting.connect(tell(meeting.address), deadline)
            except TransferError as error:
                raise store.error or error from error
            store.when_cancelled(None)
        return FakeCommunicator(self, name, rank, size, SocketNetwork(rank, size, sockets), evidence)

    def child(
        self, parent: FakeCommunicator, name: Name, staying: Sequence[int], deadline: float, evidence: Evidence
    ) -> FakeCommunicator:
        """Meet over the parent: no store, as NCCL's shrink."""
        rank, size = staying.index(parent.rank), len(staying)
        with Meeting(rank, self._token(name, size)) as meeting:
            addresses = parent.exchange(meeting.address, [r for r in staying if r != parent.rank], deadline)
            sockets = meeting.connect({staying.index(r): a for r, a in addresses.items()}, deadline)
        return FakeCommunicator(self, name, rank, size, SocketNetwork(rank, size, sockets), evidence)

    def _token(self, name: Name, size: int) -> bytes:
        return hashlib.blake2b(f"{name}|{size}|{self.config}".encode(), digest_size=16).digest()


class FakeCommunicator:
    """base.Communicator on sockets."""

    def __init__(
        self, backend: FakeBackend, name: Name, rank: int, size: int, inner: SocketNetwork, evidence: Evidence
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.children: tuple[Communicator, ...] = ()
        self._backend, self._inner, self._evidence = backend, inner, evidence
        self.network = GatedNetwork(inner, name, self.abort)

    @property
    def busy(self) -> int:
        """As base.Communicator."""
        return self.network.busy

    @property
    def marked(self) -> bool:
        """Whether it was."""
        return self.network.marked is not None

    @property
    def ended(self) -> tuple[int, ...]:
        """As base.Communicator."""
        return self._evidence()

    def mark(self, reason: str) -> None:
        """As base.Communicator."""
        self.network.mark(reason)

    def abort(self) -> None:
        """As base.Communicator; by the backend's faults."""
        self.network.mark("aborted")
        if self._backend.faults.suffer("abort"):
            self.free()

    def close(self) -> None:
        """As base.Communicator; by the backend's faults."""
        self.network.mark("closed")
        if self._backend.faults.suffer("close"):
            self.free()

    def free(self) -> None:
        """Really let go, whatever the faults: for tests that clean up after a fake hang."""
        self._inner.close()

    def shrink(self, name: Name, excluded: Sequence[int], deadline: float) -> Communicator:
        """As base.Communicator; by the backend's faults. evidence stays that of this one's ranks, told by the child's."""
        self._able(self._backend.capabilities.can_shrink, "shrink")
        staying = [rank for rank in range(self.size) if rank not in excluded]
        evidence = _renumbered(self._evidence, staying)
        if not self._backend.faults.suffer("shrink"):
            rank, size = staying.index(self.rank), len(staying)
            return self._adopt(
                FakeCommunicator(self._backend, name, rank, size, SocketNetwork(rank, size, {}), evidence)
            )
        return self._adopt(self._backend.child(self, name, staying, deadline, evidence))

    def grow(self, store: ControlStore, size: int, deadline: float) -> Communicator:
        """As base.Communicator; by the backend's faults."""
        self._able(self._backend.capabilities.can_grow, "grow")
        effect = self._backend.faults.suffer("grow")
        return self._adopt(self._backend.met(store.name, store, self.rank, size, deadline, self._evidence, effect))

    def exchange(self, address: str, peers: Sequence[int], deadline: float) -> dict[int, str]:
        """This member's address for each peer's, over this communicator."""
        heard = {peer: torch.zeros(_ADDRESS, dtype=torch.uint8) for peer in peers}
        mine = torch.frombuffer(bytearray(address.encode().ljust(_ADDRESS, b"\0")), dtype=torch.uint8)
        with self.network.inside():
            pending = [self._inner.receive(peer, into) for peer, into in heard.items()]
            pending += [self._inner.send(peer, mine) for peer in peers]
            for one in pending:
                one.wait(deadline)
        return {peer: bytes(into.tolist()).rstrip(b"\0").decode() for peer, into in heard.items()}

    def _able(self, can: bool, what: str) -> None:
        if not can:
            raise TransferError(f"this backend cannot {what} communicator {self.name}; form a new one")
        if self.children:
            raise TransferError(f"communicator {self.name} was changed once already; form a new one")

    def _adopt(self, child: FakeCommunicator) -> FakeCommunicator:
        self.children = (*self.children, child)
        return child


def _renumbered(evidence: Evidence, staying: Sequence[int]) -> Callable[[], tuple[int, ...]]:
    return lambda: tuple(staying.index(rank) for rank in evidence() if rank in staying)


_: type[Backend] = FakeBackend
