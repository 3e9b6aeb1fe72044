"""The gloo backend: formed anew each time, over a process group built directly on a local store.

What was measured shapes it. A mesh is formed for gloo when this end has sent its connects, so a frozen peer goes unseen:
every pair says hello before the communicator is ready. gloo tries each connect five times its timeout. Closing the pairs frees
every peer at once and small operations of this member's; a large one that was in flight stays blocked to its own deadline,
and only the end of the process helps.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Mapping, Sequence

import torch

from elastic_reshard import interfaces
from elastic_reshard.communicator.base import Backend, Capabilities, Communicator, Name, check_configs
from elastic_reshard.communicator.gate import GatedNetwork
from elastic_reshard.communicator.greeting import HELLO, hello, stranger
from elastic_reshard.communicator.store import ControlStore
from elastic_reshard.errors import PeerLost, ReshardError, TransferError, TransferTimeout
from elastic_reshard.interfaces import Address, Told
from elastic_reshard.log import logger
from elastic_reshard.transport.network import Evidence, GlooNetwork

__all__ = ["GlooBackend", "GlooCommunicator"]

_log = logger("communicator")

_CONNECT_TRIES = 5
# A message number that no transfer reaches; the receive that closes the pairs waits for it in vain.
_NEVER = (1 << 30) - 1


class GlooBackend:
    """gloo over one interface.

    interface: name or address, None: $ELASTIC_RESHARD_INTERFACE, else $GLOO_SOCKET_IFNAME, else what `interfaces.choose` finds
    reachable. ProtocolError if it is not there. machine: whose loopback it is, told to the others.
    """

    name = "gloo"
    capabilities = Capabilities(abort_frees_peers=True)

    def __init__(self, interface: str | None = None) -> None:
        wanted = interface or os.environ.get(interfaces.VARIABLE) or os.environ.get("GLOO_SOCKET_IFNAME")
        self.machine = interfaces.machine()
        self.candidates = tuple(interfaces.addresses())
        self.address: Address = interfaces.choose(wanted, self.candidates, interfaces.resolved())

    @property
    def config(self) -> str:
        """gloo's wire is torch's: versions with another major or minor number are not mixed."""
        return f"gloo torch={'.'.join(torch.__version__.split('.')[:2])}"

    def form(self, store: ControlStore, rank: int, size: int, deadline: float, evidence: Evidence) -> Communicator:
        """As base.Backend. Refuses loopback among several machines and unlike configs before it connects."""
        store.hold_until(deadline)
        told = Told(self.machine, self.address, self.candidates, self.config)
        store.set(_told(rank), told.to_bytes())
        store.vet(map(_told, range(size)), lambda values: _vet(values, size))
        timeout = max(0.05, (deadline - time.monotonic()) / _CONNECT_TRIES)
        try:
            network = GlooNetwork(store, rank, size, timeout, self.address.interface, evidence)
        except ReshardError as error:
            # Its frames hold gloo's device, whose thread and sockets would stay until the garbage collector comes by.
            traceback.clear_frames(error.__traceback__)
            raise _named(error, store, rank, size, evidence) from error
        communicator = GlooCommunicator(store.name, rank, size, network, evidence)
        store.when_cancelled(communicator.abort)
        try:
            communicator.greet(self.config, deadline)
        except BaseException as error:
            communicator.mark("it did not form")
            communicator.abort()
            if store.error is not None:
                raise store.error from error
            raise
        store.when_cancelled(None)
        _log.info("communicator.formed", name=str(store.name), rank=rank, size=size, interface=str(self.address))
        return communicator

    def join(
        self, store: ControlStore, rank: int, size: int, fresh: Sequence[int], deadline: float, evidence: Evidence
    ) -> Communicator:
        """gloo cannot grow: TransferError."""
        raise TransferError(f"gloo cannot grow a communicator; form {store.name} anew")


class GlooCommunicator:
    """base.Communicator on a GlooNetwork."""

    def __init__(self, name: Name, rank: int, size: int, inner: GlooNetwork, evidence: Evidence) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.children: tuple[Communicator, ...] = ()
        self._inner, self._evidence = inner, evidence
        self._leaving = threading.Lock()
        self._left = False
        self.network = GatedNetwork(inner, name, self.abort)

    @property
    def busy(self) -> int:
        """As base.Communicator."""
        return self.network.busy

    @property
    def ended(self) -> tuple[int, ...]:
        """As base.Communicator."""
        return self._evidence()

    def mark(self, reason: str) -> None:
        """As base.Communicator."""
        self.network.mark(reason)

    def abort(self) -> None:
        """Close every pair: peers get errors at once. A large operation of this member's may stay blocked (`busy`)."""
        self.network.mark("aborted")
        with self._leaving:
            if self._left:
                return
            self._left = True
            self._inner.evidence = tuple  # nobody is to be found guilty here, which would take its time
            try:
                self._close_pairs()
            finally:
                self._inner.close()

    def close(self) -> None:
        """The same: gloo has no farewell."""
        self.network.mark("closed")
        self.abort()

    def shrink(self, name: Name, excluded: Sequence[int], deadline: float) -> Communicator:
        """gloo cannot: TransferError."""
        raise TransferError(f"gloo cannot shrink communicator {self.name}; form {name} anew")

    def grow(self, store: ControlStore, size: int, deadline: float) -> Communicator:
        """gloo cannot: TransferError."""
        raise TransferError(f"gloo cannot grow communicator {self.name}; form {store.name} anew")

    def greet(self, config: str, deadline: float) -> None:
        """Say the name to every peer and hear it: then every connection is made, and of one communicator. Blocks until
        `deadline` at most. PeerLost, TransferTimeout or PeerRefused, which name ranks."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        mine = _hello(self.name, self.rank, self.size, config)
        heard = {peer: torch.zeros(HELLO, dtype=torch.uint8) for peer in peers}
        try:
            receives = {peer: self.network.receive(peer, into) for peer, into in heard.items()}
            sends = [self.network.send(peer, mine) for peer in peers]
            for pending in (*receives.values(), *sends):
                pending.wait(deadline)
        except (PeerLost, TransferTimeout) as error:
            # Who gave up first is mostly not who is to blame: suspects are those who have said nothing yet.
            silent = tuple(peer for peer in peers if not heard[peer].any())
            if self.ended or not silent:
                raise
            raise type(error)(
                f"communicator {self.name} was connected, but rank(s) {', '.join(map(str, silent))} of {self.size} did not "
                "greet; see whether they run, and form it anew under a new name",
                silent,
            ) from error
        for peer in peers:
            if not torch.equal(heard[peer], _hello(self.name, peer, self.size, config)):
                raise stranger(self.name, peer, self.size, config)

    def _close_pairs(self) -> None:
        # A wait that times out closes all pairs; on a pair that is already broken it fails at once and closes nothing.
        for peer in range(self.size):
            if peer == self.rank:
                continue
            try:
                pending = self._inner.receive(peer, torch.empty(1, dtype=torch.uint8), _NEVER)
                pending.wait(time.monotonic() + 0.001)
            except TransferTimeout:
                return
            except PeerLost:
                continue


def _told(rank: int) -> str:
    return f"told/{rank}"


def _hello(name: Name, rank: int, size: int, config: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(hello(name, rank, size, config)), dtype=torch.uint8)


def _vet(values: Mapping[str, bytes], size: int) -> None:
    told = {rank: Told.of(values[_told(rank)]) for rank in range(size)}
    check_configs({f"of rank {rank}": one.config for rank, one in told.items()})
    interfaces.refuse_loopback(told)


def _named(error: ReshardError, store: ControlStore, rank: int, size: int, evidence: Evidence) -> ReshardError:
    """The error with the ranks that it is about: who ended, else who never came, else all others."""
    if store.error is not None:
        return store.error
    missing = tuple(r for r in range(size) if store.missing([_told(r)]))
    if not missing or (isinstance(error, PeerLost) and evidence()):
        return error
    ended = evidence()
    said = f"communicator {store.name}: rank(s) {', '.join(map(str, missing))} of {size} never came to form it with rank {rank}"
    if ended:
        return PeerLost(f"{said}; rank(s) {', '.join(map(str, ended))} ended: form it anew without them", ended)
    return TransferTimeout(f"{said} in time; see whether they run, and form it anew under a new name", missing)


_: type[Backend] = GlooBackend  # the Protocol is kept
