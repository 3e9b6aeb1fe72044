"""The domain channel: Unix stream sockets between members of one domain, for small messages and descriptors.

Framing: a header (tag, payload bytes, number of descriptors), then the payload; descriptors travel by
SCM_RIGHTS with the frame's first byte. The end of a peer's process is an EOF. Nothing is unpickled, nothing
is named on disk.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

from elastic_reshard.errors import ArenaError, PeerLost, TransferError, TransferTimeout

__all__ = ["MAX_FDS", "Closing", "DomainChannel", "Inbox", "Message", "close_all", "header", "rights"]

MAX_FDS: Final = 253  # SCM_MAX_FD of the kernel
MAX_PAYLOAD: Final = 1 << 30
_HEADER: Final = struct.Struct("<IIB")
_ANCILLARY: Final = socket.CMSG_SPACE(MAX_FDS * array("i").itemsize)
_CHUNK: Final = 1 << 16
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_LONGEST_POLL: Final = 3600.0


class Closing:
    """Something with sockets: closed by hand, by `with`, and in forked children."""

    def __init__(self) -> None:
        _inherited.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


_inherited: weakref.WeakSet[Closing] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A child (a data loader's worker, say) that kept our sockets would hide our death from the peers.
    for closing in list(_inherited):
        closing.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Message(NamedTuple):
    """One message. Whoever takes it owns its descriptors (close-on-exec) and closes them."""

    peer: int
    tag: int
    payload: bytes
    fds: tuple[int, ...]


def header(tag: int, length: int, count: int) -> bytes:
    """What goes before a payload of `length` bytes with `count` descriptors."""
    return _HEADER.pack(tag, length, count)


def rights(fds: Sequence[int]) -> list[tuple[int, int, array[int]]]:
    """The ancillary data that carries descriptors, for sendmsg."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]


class Inbox:
    """Bytes and descriptors of one peer that are not whole messages yet.

    limit: the longest payload in bytes; a peer that announces more gets no memory for it but ArenaError."""

    __slots__ = ("body", "fds", "filled", "header", "limit", "rest")

    def __init__(self, limit: int = MAX_PAYLOAD) -> None:
        self.limit = limit
        self.fds: deque[int] = deque()
        self.rest = b""  # less than a header
        self.header = (0, 0)  # tag and descriptors of the payload that is being filled
        self.body: memoryview | None = None
        self.filled = 0

    def read(self, peer: int, sock: socket.socket, buffer: memoryview) -> list[Message] | None:
        """One read from the socket: the messages that it makes whole, or None at its end.

        Raises BlockingIOError if nothing has arrived, ConnectionError, ArenaError for what is no message."""
        if self.body is not None:
            count = sock.recv_into(self.body[self.filled :])
        else:
            count, ancillary, _, _ = sock.recvmsg_into([buffer], _ANCILLARY, _CLOEXEC)
            if ancillary:
                _collect_fds(self.fds, ancillary)
        if count == 0:
            return None
        return self.fill(peer, count) if self.body is not None else self.feed(peer, buffer[:count])

    def close(self) -> None:
        """Close the descriptors that belong to no whole message."""
        while self.fds:
            os.close(self.fds.popleft())

    def feed(self, peer: int, data: memoryview) -> list[Message]:
        """The messages that `data`, read while no payload is being filled, makes whole."""
        messages: list[Message] = []
        if self.rest:
            data = memoryview(self.rest + data)
        at = 0
        while len(data) - at >= _HEADER.size:
            tag, length, count = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            if length > self.limit or count > MAX_FDS:
                _close_messages(messages)
                raise ArenaError(
                    f"peer {peer} announced a message of {length} bytes and {count} descriptors; the limits are "
                    f"{self.limit} bytes and {MAX_FDS} descriptors, so it speaks something else or is another version"
                )
            if len(data) - at < length:
                # The rest is read straight into the payload, however long it is.
                self.header, self.body = (tag, count), memoryview(bytearray(length))
                self.filled = len(data) - at
                self.body[: self.filled] = data[at:]
                at = len(data)
                break
            if count > len(self.fds):
                _close_messages(messages)
            messages.append(self._message(peer, tag, count, bytes(data[at : at + length])))
            at += length
        self.rest = bytes(data[at:])
        return messages

    def fill(self, peer: int, count: int) -> list[Message]:
        """`count` more bytes are in `body`."""
        self.filled += count
        if self.body is None or self.filled < len(self.body):
            return []
        payload, self.body = bytes(self.body), None
        return [self._message(peer, *self.header, payload)]

    def _message(self, peer: int, tag: int, count: int, payload: bytes) -> Message:
        # They come no later than the frame's first byte, so what is missing now was cut off (MSG_CTRUNC).
        if count > len(self.fds):
            raise _fds_lost(peer)
        return Message(peer, tag, payload, tuple(self.fds.popleft() for _ in range(count)))


class DomainChannel(Closing):
    """Tagged messages between this member and its peers, in order per (peer, tag). Made by `connect_mesh`.

    One thread uses a channel at a time; two at once corrupt it. Deadlines are absolute, of
    time.monotonic(). Whoever owns it closes it: `with`, or close().
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket]) -> None:
        self.rank: Final = rank
        self.peers: Final = tuple(sorted(sockets))
        self.ended: Final[set[int]] = set()
        self._why: dict[int, str] = {}
        self._sockets = dict(sockets)
        self._peer_of = {s.fileno(): peer for peer, s in sockets.items()}
        self._inboxes = {peer: Inbox() for peer in sockets}
        self._queues: dict[tuple[int, int], deque[Message]] = {}
        self._buffer = memoryview(bytearray(_CHUNK))
        self._closed = False
        self._poll = select.poll()
        for fd in self._peer_of:
            self._poll.register(fd, select.POLLIN)
        super().__init__()

    def send(self, peer: int, tag: int, payload: bytes = b"", fds: Sequence[int] = (), *, deadline: float) -> None:
        """Send one message; the caller keeps its descriptors. Returns when the system has taken all of it.

        While the peer's buffer is full, messages from all peers are received and queued, so two members may
        send to each other at once; blocks until `deadline`. Raises PeerLost if the peer has ended,
        TransferTimeout (after part of a message, the peer counts as ended: the stream is broken),
        ArenaError for bad descriptors.
        """
        if len(payload) > MAX_PAYLOAD or len(fds) > MAX_FDS or not 0 <= tag < 1 << 32:
            raise TransferError(
                f"a message of {len(payload)} bytes and {len(fds)} descriptors, tag {tag}, cannot be sent; "
                f"the limits are {MAX_PAYLOAD} bytes, {MAX_FDS} descriptors and tags of 32 bits"
            )
        self._check((peer,))
        if peer in self.ended:
            raise self._lost((peer,))
        head = header(tag, len(payload), len(fds))
        sent = self._try_send(peer, [head, payload] if payload else [head], fds)
        if sent == len(head) + len(payload):
            return
        if sent < len(head):
            rest = memoryview(head + payload)[sent:]
        else:
            rest = memoryview(payload)[sent - len(head) :]
        self._send_rest(peer, rest, () if sent else fds, sent > 0, deadline)

    def take(self, peer: int, tag: int, *, deadline: float, strict: bool = True) -> Message:
        """The next message with this tag from this peer; blocks until `deadline`.

        Messages that have arrived are delivered even if the peer has ended since. Raises PeerLost at once
        if the peer, or with `strict` any peer, has ended; TransferTimeout.
        """
        return self.take_any((peer,), tag, deadline=deadline, strict=strict)

    def take_any(self, peers: Collection[int], tag: int, *, deadline: float, strict: bool = True) -> Message:
        """The next message with this tag from whichever of these peers has one; blocks until `deadline`.

        Raises PeerLost if one of them, or with `strict` any peer, has ended and none has a message;
        TransferTimeout.
        """
        self._check(peers)
        late = False
        while True:
            for peer in peers:
                queue = self._queues.get((peer, tag))
                if queue:
                    return queue.popleft()
            lost = self.ended if strict else self.ended.intersection(peers)
            if late:
                raise self._lost(lost) if lost else self._late(peers, f"a message with tag {tag}")
            remaining = deadline - time.monotonic()
            late = remaining <= 0
            # What has already arrived is read before a loss is reported.
            if not self._drain(0.0 if lost or late else remaining) and lost:
                raise self._lost(lost)

    def close(self) -> None:
        """Close all sockets and every received descriptor that nobody took. May be called again."""
        self._closed = True
        for sock in self._sockets.values():
            sock.close()
        for inbox in self._inboxes.values():
            inbox.close()
        for queue in self._queues.values():
            for message in queue:
                close_all(message.fds)
        self._sockets.clear()
        self._inboxes.clear()
        self._queues.clear()

    def _check(self, peers: Collection[int]) -> None:
        if self._closed:
            raise TransferError(f"the domain channel of member {self.rank} is closed; form it again")
        for peer in peers:
            if peer not in self._inboxes:
                raise TransferError(
                    f"member {peer} is not in the domain of member {self.rank}; its peers are {self.peers}"
                )

    def _drain(self, timeout: float) -> bool:
        """Read what there is, waiting up to `timeout` seconds for something; whether anything was ready."""
        events = self._poll.poll(min(timeout, _LONGEST_POLL) * 1000)
        for fd, _ in events:
            self._read(self._peer_of[fd])
        return bool(events)

    def _read(self, peer: int) -> bool:
        """One read from one peer; whether there was something (an end counts)."""
        sock, inbox = self._sockets[peer], self._inboxes[peer]
        try:
            messages = inbox.read(peer, sock, self._buffer)
        except BlockingIOError:
            return False
        except ConnectionError as error:
            self._end(peer, f"broke its connection ({error})")
            return True
        except ArenaError as error:
            self._end(peer, str(error))
            raise
        if messages is None:
            self._end(peer, "closed its connection")
            return True
        for message in messages:
            self._queues.setdefault((peer, message.tag), deque()).append(message)
        return True

    def _end(self, peer: int, why: str) -> None:
        if peer in self.ended:
            return
        self.ended.add(peer)
        self._why[peer] = why
        sock = self._sockets.pop(peer)
        self._poll.unregister(sock)
        del self._peer_of[sock.fileno()]
        sock.close()
        self._inboxes[peer].close()
        self._inboxes[peer] = Inbox()

    def _try_send(self, peer: int, parts: Sequence[bytes | memoryview], fds: Sequence[int]) -> int:
        """How many bytes the system took; 0 if the peer's buffer is full. Descriptors go with the first."""
        sock = self._sockets[peer]
        try:
            if fds:
                return sock.sendmsg(parts, rights(fds))
            return sock.send(parts[0]) if len(parts) == 1 else sock.sendmsg(parts)
        except BlockingIOError:
            return 0
        except ConnectionError as error:
            # What the peer said before it ended is still to be delivered.
            while peer not in self.ended and self._read(peer):
                pass
            self._end(peer, f"broke its connection ({error})")
            raise self._lost((peer,)) from error
        except OSError as error:
            raise ArenaError(
                f"descriptors {list(fds)} cannot be sent to member {peer}: {error}; they must be open, and "
                "the descriptors under way must not exceed the limit on open files (ulimit -n)"
            ) from error

    def _send_rest(self, peer: int, rest: memoryview, fds: Sequence[int], started: bool, deadline: float) -> None:
        sock = self._sockets[peer]
        self._poll.modify(sock, select.POLLIN | select.POLLOUT)
        try:
            while rest:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise self._late((peer,), f"room for {len(rest)} bytes to send")
                for fd, event in self._poll.poll(min(remaining, _LONGEST_POLL) * 1000):
                    if event & ~select.POLLOUT:
                        self._read(self._peer_of[fd])
                if peer in self.ended:
                    raise self._lost((peer,))
                sent = self._try_send(peer, [rest], fds)
                if sent:
                    rest, fds, started = rest[sent:], (), True
        finally:
            if rest and started:
                self._end(peer, "was left with half a message at a deadline or an interrupt")
            elif peer not in self.ended:
                self._poll.modify(sock, select.POLLIN)

    def _lost(self, members: Collection[int]) -> PeerLost:
        named = sorted(members)
        what = "; ".join(f"member {peer} {self._why[peer]}" for peer in named)
        return PeerLost(
            f"member {self.rank} lost its domain: {what}. Form the group again without it or with a new one.",
            named,
        )

    def _late(self, members: Collection[int], what: str) -> TransferTimeout:
        named = sorted(members)
        return TransferTimeout(
            f"the deadline passed while member {self.rank} waited for {what}, from members {named}; "
            "they are stopped, stuck or slow: look at their processes, or allow more time",
            named,
        )


def _collect_fds(into: deque[int], ancillary: Sequence[tuple[int, int, bytes]]) -> None:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds = array("i")
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            into.extend(fds)


def _close_messages(messages: Sequence[Message]) -> None:
    """Messages that nobody will be handed."""
    for message in messages:
        close_all(message.fds)


def _fds_lost(peer: int) -> ArenaError:
    return ArenaError(
        f"descriptors from member {peer} did not arrive: this process has reached its limit on open files; "
        "raise it (ulimit -n)"
    )


def close_all(fds: Collection[int]) -> None:
    """Close these descriptors."""
    for fd in fds:
        os.close(fd)
