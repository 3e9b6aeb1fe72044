"""Forming a domain channel: each member connects to all lower ranks and accepts the higher ones."""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import time
import uuid
from collections.abc import Mapping
from typing import Final

from elastic_reshard.arena.channel import Closing, DomainChannel
from elastic_reshard.errors import ArenaError, PeerLost, PeerRefused, TransferTimeout

__all__ = ["Listener", "connect_mesh"]

_HELLO: Final = struct.Struct("<8sII32s")
_MAGIC: Final = b"er-mesh\x01"
_CREDENTIALS: Final = struct.Struct("3i")
_LONGEST_POLL: Final = 3600.0
_RETRY: Final = 0.01


class Listener(Closing):
    """An abstract Unix socket with a random name, at which higher ranks of the domain connect. Any process.

    Send `address` to them by whatever way they already have. Raises ArenaError if no socket can be made.
    """

    def __init__(self) -> None:
        self.address: Final[bytes] = b"\0elastic_reshard-" + uuid.uuid4().hex.encode()
        self.socket: Final = _unix_socket()
        self.socket.bind(self.address)
        self.socket.listen(socket.SOMAXCONN)
        super().__init__()

    def close(self) -> None:
        """Stop listening; channels that were formed stay. May be called again."""
        self.socket.close()


def connect_mesh(
    rank: int, addresses: Mapping[int, bytes], listener: Listener, secret: bytes, deadline: float
) -> DomainChannel:
    """Join all members of a domain, each with each; every one of them calls this with the same `addresses`.

    `addresses`: Listener.address of every member by rank; `listener`: this member's own, still the caller's
    to close afterwards. `secret`: known to the members only. Blocks until all are there, at most until
    `deadline` (absolute, time.monotonic()). A connection from another user, with another secret or with
    garbage is dropped. Raises TransferTimeout naming the ranks that did not come, PeerLost if a lower rank
    ended or dropped us, PeerRefused if a lower rank's answer does not carry the secret.
    """
    meeting = _Meeting(rank, addresses, listener, secret)
    try:
        while missing := meeting.missing():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TransferTimeout(
                    f"members {missing} did not come to the domain channel of member {rank} in time; look "
                    "whether they run, with the same secret and as the same user",
                    missing,
                )
            meeting.step(remaining)
        channel = DomainChannel(rank, meeting.joined)
        meeting.joined = {}
        return channel
    finally:
        meeting.close()


class _Meeting(Closing):
    """The forming of a mesh: connections by what is known of them."""

    def __init__(self, rank: int, addresses: Mapping[int, bytes], listener: Listener, secret: bytes) -> None:
        self.rank, self.addresses, self.listener, self.secret = rank, addresses, listener, secret
        self.joined: dict[int, socket.socket] = {}
        self._to_connect = {peer: _unix_socket() for peer in sorted(addresses) if peer < rank}
        # Connected, hello not complete: the peer's rank if we called it, None if it called us.
        self._pending: dict[int, tuple[socket.socket, int | None, bytearray]] = {}
        self._poll = select.poll()
        self._poll.register(listener.socket, select.POLLIN)
        super().__init__()

    def missing(self) -> list[int]:
        return sorted(peer for peer in self.addresses if peer != self.rank and peer not in self.joined)

    def close(self) -> None:
        for sock in (*self.joined.values(), *self._to_connect.values()):
            sock.close()
        for sock, _, _ in self._pending.values():
            sock.close()

    def step(self, timeout: float) -> None:
        for peer, sock in list(self._to_connect.items()):
            self._connect(peer, sock)
        # A full backlog cannot be waited for with poll.
        wait = min(timeout, _RETRY if self._to_connect else _LONGEST_POLL)
        for fd, _ in self._poll.poll(wait * 1000):
            if fd in self._pending:
                self._receive(fd)
            else:
                self._accept()

    def _mac(self, sender: int, receiver: int, address: bytes) -> bytes:
        # The listener's random name makes a hello worthless at any other listener.
        return hmac.digest(self.secret, _MAGIC + struct.pack("<II", sender, receiver) + address, "sha256")

    def _hello(self, peer: int, address: bytes) -> bytes:
        return _HELLO.pack(_MAGIC, self.rank, peer, self._mac(self.rank, peer, address))

    def _connect(self, peer: int, sock: socket.socket) -> None:
        try:
            sock.connect(self.addresses[peer])
            sock.send(self._hello(peer, self.addresses[peer]))
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(
                f"member {peer} cannot be reached by member {self.rank} in its domain: {error}; it has "
                "ended, or is on another host or in another network namespace",
                (peer,),
            ) from error
        self._await_hello(self._to_connect.pop(peer), peer)

    def _await_hello(self, sock: socket.socket, peer: int | None) -> None:
        self._pending[sock.fileno()] = (sock, peer, bytearray())
        self._poll.register(sock, select.POLLIN)

    def _accept(self) -> None:
        try:
            sock, _ = self.listener.socket.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            raise ArenaError(f"member {self.rank} cannot accept a peer: {error}; look at ulimit -n") from error
        sock.setblocking(False)
        if _same_user(sock):
            self._await_hello(sock, None)
        else:
            sock.close()

    def _receive(self, fd: int) -> None:
        sock, peer, data = self._pending[fd]
        try:
            chunk = sock.recv(_HELLO.size - len(data))
        except BlockingIOError:
            return
        except ConnectionError:
            chunk = b""
        data += chunk
        if chunk and len(data) < _HELLO.size:
            return
        self._poll.unregister(fd)
        del self._pending[fd]
        caller = self._verified(sock, peer, bytes(data))
        if caller is None:
            sock.close()
        else:
            self.joined[caller] = sock

    def _verified(self, sock: socket.socket, peer: int | None, data: bytes) -> int | None:
        """Who is at the other end, or None to drop it; raises for a peer that we called."""
        if peer is not None and len(data) < _HELLO.size:
            sock.close()
            raise PeerLost(
                f"member {peer} closed the connection of member {self.rank} before its hello: it has "
                "ended, or its secret is another",
                (peer,),
            )
        if len(data) < _HELLO.size:
            return None
        magic, sender, receiver, mac = _HELLO.unpack(data)
        address = self.listener.address if peer is None else self.addresses[peer]
        known = hmac.compare_digest(mac, self._mac(sender, receiver, address))
        known = known and magic == _MAGIC and receiver == self.rank
        if peer is not None:
            if known and sender == peer and _same_user(sock):
                return peer
            sock.close()
            raise PeerRefused(peer, "its hello does not carry this domain's secret; use the same one everywhere")
        if not known or sender not in self.addresses or sender <= self.rank or sender in self.joined:
            return None
        try:
            sock.send(self._hello(sender, address))
        except OSError:
            return None  # it ended meanwhile; it stays missing
        return int(sender)


def _unix_socket() -> socket.socket:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise ArenaError(f"cannot make a Unix socket: {error}; look at ulimit -n") from error
    sock.setblocking(False)
    return sock


def _same_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
