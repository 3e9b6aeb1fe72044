"""A small network over Unix sockets, within one machine: the fake backend's. Between threads of one process or real processes.

It moves bytes while somebody waits, so it needs no thread; closing it from another thread ends every wait at once.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

import torch

from elastic_reshard.errors import PeerLost, PeerRefused, TransferError, TransferTimeout
from elastic_reshard.transport.network import Pending

__all__ = ["Meeting", "SocketNetwork"]

_HEADER = struct.Struct("<QQ")
_RANK = struct.Struct("<I")
# How often the waits look at the clock and at whether they are to end; a peer's bytes end them at once.
_TURN_S = 0.05


def _bytes(buffer: torch.Tensor) -> memoryview:
    data: Any = buffer.numpy()
    return memoryview(data)


class Meeting:
    """A listening socket, and the connecting to all peers. `token`: alike on all ends of one communicator, of one length."""

    def __init__(self, rank: int, token: bytes) -> None:
        self.address = f"elastic-reshard-fake-{secrets.token_hex(16)}"
        self.ended = threading.Event()
        self._rank, self._token = rank, token
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(256)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def connect(self, addresses: Mapping[int, str], deadline: float) -> dict[int, socket.socket]:
        """A connection to every peer: called to those of lower rank, accepted from the others. Both ends have said their token
        when this returns. Blocks until `deadline`, or until `ended` is set. PeerLost, PeerRefused, TransferTimeout."""
        found: dict[int, socket.socket] = {}
        try:
            for peer in sorted(p for p in addresses if p < self._rank):
                found[peer] = self._call(peer, addresses[peer], deadline)
            missing = {peer for peer in addresses if peer > self._rank}
            while missing:
                peer, one = self._accept(tuple(sorted(missing)), deadline)
                if peer not in missing:
                    one.close()
                    raise PeerRefused(peer, "it called twice, or is not of this communicator")
                missing.remove(peer)
                found[peer] = one
            for peer in (p for p in found if p < self._rank):
                self._check(peer, self._read(found[peer], len(self._token), (peer,), deadline))
            for one in found.values():
                one.setblocking(False)
        except BaseException:
            for one in found.values():
                one.close()
            raise
        return found

    def _call(self, peer: int, address: str, deadline: float) -> socket.socket:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            one.settimeout(max(0.001, deadline - time.monotonic()))
            one.connect(f"\0{address}")
            one.sendall(_RANK.pack(self._rank) + self._token)
        except OSError as error:
            one.close()
            raise PeerLost(f"rank {peer} does not listen any more ({error}); form anew without it", (peer,)) from error
        return one

    def _accept(self, missing: tuple[int, ...], deadline: float) -> tuple[int, socket.socket]:
        self._ready(self._listener, missing, deadline)
        one, _ = self._listener.accept()
        try:
            (peer,) = _RANK.unpack(self._read(one, _RANK.size, missing, deadline))
            self._check(peer, self._read(one, len(self._token), (peer,), deadline))
            one.sendall(self._token)
        except BaseException:
            one.close()
            raise
        return peer, one

    def _check(self, peer: int, token: bytes) -> None:
        if token != self._token:
            raise PeerRefused(peer, "it forms another communicator: its epoch, transfer, size or config differ")

    def _read(self, one: socket.socket, size: int, members: tuple[int, ...], deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            self._ready(one, members, deadline)
            try:
                more = one.recv(size - len(data))
            except ConnectionError:
                more = b""
            if not more:
                raise PeerLost(f"rank {members[0]} closed while the communicator formed; form anew", members)
            data += more
        return data

    def _ready(self, one: socket.socket, members: tuple[int, ...], deadline: float) -> None:
        poll = select.poll()
        poll.register(one, select.POLLIN)
        while not self.ended.is_set():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TransferTimeout(f"rank(s) {members} did not connect in time; form anew without them", members)
            if poll.poll(min(remaining, _TURN_S) * 1000):
                return
        raise TransferError("the forming was cancelled")


class _Peer:
    """One connection: what is to go out, and the frame that is coming in."""

    def __init__(self, one: socket.socket) -> None:
        self.socket = one
        self.lost = ""
        self.out: deque[tuple[memoryview, _Transfer | None]] = deque()
        self.posted: dict[int, _Transfer] = {}
        self.early: dict[int, memoryview] = {}  # whole messages that nobody has asked for yet
        self._head = bytearray()
        self._number = 0
        self._data: memoryview | None = None
        self._into: memoryview | None = None
        self._frame: _Transfer | None = None

    def write(self) -> None:
        """As much as goes without blocking."""
        while self.out:
            data, transfer = self.out[0]
            try:
                sent = self.socket.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                self.lost = str(error)
                return
            if sent < len(data):
                self.out[0] = data[sent:], transfer
                continue
            self.out.popleft()
            if transfer is not None:
                transfer.done = True

    def read(self) -> None:
        """As much as is there."""
        while not self.lost:
            try:
                if self._into is None:
                    more = self.socket.recv(_HEADER.size - len(self._head))
                    self._head += more
                    got = len(more)
                else:
                    got = self.socket.recv_into(self._into)
                    self._into = self._into[got:]
            except BlockingIOError:
                return
            except OSError as error:
                self.lost = str(error)
                return
            if got == 0:
                self.lost = "it closed its connection"
                return
            self._advance()

    def _advance(self) -> None:
        if self._into is None and len(self._head) == _HEADER.size:
            self._number, size = _HEADER.unpack(self._head)
            self._head.clear()
            self._frame = self.posted.pop(self._number, None)
            if self._frame is not None and len(self._frame.data) != size:
                self.lost = f"it sent {size} bytes where {len(self._frame.data)} were expected"
                return
            self._data = self._into = memoryview(bytearray(size)) if self._frame is None else self._frame.data
        if self._into is not None and self._data is not None and not len(self._into):
            self._into = None
            if self._frame is None:
                self.early[self._number] = self._data
            else:
                self._frame.done = True

    def take(self, transfer: _Transfer) -> None:
        """If its message came before it was asked for: that is it."""
        if transfer.number not in self.early or transfer.number not in self.posted:
            return
        data = self.early.pop(transfer.number)
        del self.posted[transfer.number]
        if len(data) != len(transfer.data):
            self.lost = f"it sent {len(data)} bytes where {len(transfer.data)} were expected"
            return
        transfer.data[:] = data
        transfer.done = True


class _Transfer:
    """transport.Pending."""

    def __init__(self, network: SocketNetwork, peer: int, data: memoryview, number: int | None) -> None:
        self.network, self.peer, self.data = network, peer, data
        self.number = -1 if number is None else number  # of a receive
        self.done = False

    def wait(self, deadline: float) -> None:
        self.network.complete(self, deadline)


class SocketNetwork:
    """transport.Network over connected sockets, by peer. No peers: nothing ever arrives."""

    def __init__(self, rank: int, size: int, sockets: Mapping[int, socket.socket]) -> None:
        self.waiting_since: float | None = None
        self._rank = rank
        self._peers = {peer: _Peer(one) for peer, one in sockets.items()}
        self._sent = dict.fromkeys(range(size), 0)
        self._received = dict.fromkeys(range(size), 0)
        self._closed = False
        self._using = threading.Lock()

    def reserve(self, peer: int, sends: int, receives: int) -> tuple[int, int]:
        first = self._sent[peer], self._received[peer]
        self._sent[peer] += sends
        self._received[peer] += receives
        return first

    def send(self, peer: int, buffer: torch.Tensor, number: int | None = None) -> Pending:
        number = self.reserve(peer, 1, 0)[0] if number is None else number
        transfer = _Transfer(self, peer, _bytes(buffer), None)
        with self._using:
            self._refuse(peer)
            if peer in self._peers:
                out = self._peers[peer].out
                out.append((memoryview(_HEADER.pack(number, len(transfer.data))), None))
                out.append((transfer.data, transfer))
                self._peers[peer].write()
        return transfer

    def receive(self, peer: int, buffer: torch.Tensor, number: int | None = None) -> Pending:
        number = self.reserve(peer, 0, 1)[1] if number is None else number
        transfer = _Transfer(self, peer, _bytes(buffer), number)
        with self._using:
            if self._closed or peer not in self._peers or number not in self._peers[peer].early:
                self._refuse(peer)  # what came before its sender left is there
            if peer in self._peers:
                self._peers[peer].posted[number] = transfer
        return transfer

    def complete(self, transfer: _Transfer, deadline: float) -> None:
        """Move bytes of all peers until this one is done."""
        self.waiting_since = time.monotonic()
        try:
            with self._using:
                while not self._done(transfer):
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise TransferTimeout(
                            f"the deadline passed while waiting for rank {transfer.peer}; see whether it is frozen",
                            (transfer.peer,),
                        )
                    self._turn(min(remaining, _TURN_S))
        finally:
            self.waiting_since = None

    def close(self) -> None:
        """Idempotent; any thread. Blocks for a moment, until whoever is inside has seen it."""
        if self._closed:
            return
        self._closed = True
        for peer in self._peers.values():
            try:
                peer.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it is not connected any more
        with self._using:
            for peer in self._peers.values():
                peer.socket.close()

    def _done(self, transfer: _Transfer) -> bool:
        peer = self._peers.get(transfer.peer)
        if peer is not None and not transfer.done:
            peer.take(transfer)
        if not transfer.done:
            self._refuse(transfer.peer)
        return transfer.done

    def _refuse(self, peer: int) -> None:
        if self._closed:
            raise PeerLost(f"the network of rank {self._rank} is closed; form a new one", (peer,))
        if peer in self._peers and self._peers[peer].lost:
            raise PeerLost(f"rank {peer} is lost: {self._peers[peer].lost}; form anew without it", (peer,))

    def _turn(self, patience: float) -> None:
        poll = select.poll()
        of = {}
        for peer in self._peers.values():
            if not peer.lost:
                of[peer.socket.fileno()] = peer
                poll.register(peer.socket, select.POLLIN | (select.POLLOUT if peer.out else 0))
        for fd, events in poll.poll(patience * 1000):
            if events & select.POLLOUT:
                of[fd].write()
            if events & ~select.POLLOUT:
                of[fd].read()
