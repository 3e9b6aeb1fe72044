"""Frames between a watchdog and the members of its host, over non-blocking Unix stream sockets.

A `Wire` is one end of a connection. It works under asyncio (add_reader, add_writer) and under a thread's own poll: it
never waits. Framing, and how descriptors travel, are those of `arena.channel`. What comes from a peer is bounded; a peer
that sends garbage loses its connection and nothing else happens.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

from elastic_reshard.arena.channel import Closing, Inbox, Message, close_all, header, rights
from elastic_reshard.errors import ArenaError, PeerLost, ProtocolError

__all__ = ["Credentials", "Tag", "Wire", "arena_of", "arena_payload", "credentials", "proof", "proves", "words_of"]

LIMIT: Final = 64 << 20  # bytes of a frame of an authenticated peer: a supervisor's snapshot, a table of an arena
STRANGER_LIMIT: Final = 4096  # bytes of a frame of one that has not proved anything yet
ROOM: Final = 128 << 20  # bytes kept for a peer that does not read
_CHUNK: Final = 1 << 16
_STRAY_FDS: Final = 16
_UCRED: Final = struct.Struct("3i")
_ARENA: Final = re.compile(r"[0-9a-f]{32}")
_OWNER: Final = re.compile(r"[A-Za-z0-9._-]{1,143}@[0-9a-f]{16}")


class Tag(IntEnum):
    """What a frame is. W: said by watchdogs, M: by members, V: by movers (who also say AUTH)."""

    HELLO = 1  # W, JSON: protocol, job, host, watchdog (its instance), nonce
    AUTH = 2  # M, JSON: protocol, url, nonce, proof
    PROVED = 3  # W, JSON: proof
    REFUSE = 4  # W, JSON: kind (an error's name), reason; then the connection ends
    ATTACH = 5  # M: a Statement
    SETTLED = 6  # M: all that it holds was offered. W: all that it holds was passed on
    STATEMENT = 7  # M: a Statement
    OFFER = 8  # both, with one descriptor, or two (control, device memory): an arena (`arena_payload`)
    DROPPED = 9  # W: id of an arena that is not kept any more
    WITHDRAW = 10  # M: id of an arena of its own
    LEFT = 11  # M: it takes part no more, on purpose
    SUPERVISOR = 12  # W: a message of the supervisor as it came
    CONNECTION = 13  # W, JSON: connected, kind (an error's name or ""), reason
    BEAT = 14  # W
    LANDING = 15  # M, with descriptors as OFFER, read-write: its landing arena (`arena_payload`)
    MOVER = 16  # V, with one descriptor, its status page: JSON mover, member, transfer ("" at first); instead of ATTACH
    TASK = 17  # W, with descriptors: a transfer to take part in (`mover.core.Task`)
    ORDER = 18  # W: the TransferDoc as it is told now; empty: the transfer is over
    REPORT = 19  # V: a MoverSaid
    WINDOW = 20  # M, with one descriptor, read-write: its window (`protocol.window`), for its mover
    START = 21  # V to V, over TCP: a word about the start of a round (`protocol.starts`)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who was at the other end when the connection was made (for a listener: when it began to listen)."""

    pid: int
    uid: int


def credentials(sock: socket.socket) -> Credentials:
    """The other end's process, by the kernel's word."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Credentials(pid, uid)


def proof(token: str, side: str, *nonces: str) -> str:
    """That whoever says it holds the job's token; `proves` compares. Nonces may be any text that JSON can say."""
    return hmac.digest(token.encode(), _bytes("\0".join((side, *nonces))), "sha256").hex()


def proves(said: object, token: str, side: str, *nonces: str) -> bool:
    """Whether what somebody said, of whatever kind, is that proof."""
    return isinstance(said, str) and hmac.compare_digest(_bytes(proof(token, side, *nonces)), _bytes(said))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def words_of(payload: bytes) -> dict[str, Any]:
    """The words of a frame in JSON: an object of texts, numbers, truths and nulls. Raises ProtocolError for anything else."""
    try:
        said = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"words that cannot be read: {payload[:80]!r}") from error
    if not isinstance(said, dict) or any(isinstance(word, dict | list) for word in said.values()):
        raise ProtocolError(f"words of the wrong kind: {payload[:80]!r}")
    return said


class Arena(NamedTuple):
    """An arena as told: who owns it, and its table."""

    arena: str
    owner: str
    table: bytes


def arena_payload(arena: str, owner: str, table: bytes) -> bytes:
    """Payload of an OFFER."""
    return json.dumps([arena, owner]).encode() + b"\n" + table


def arena_of(payload: bytes) -> Arena:
    """What an OFFER says. Raises ProtocolError."""
    head, _, table = payload.partition(b"\n")
    try:
        arena, owner = json.loads(head)
        table.decode()  # movers are given it as text
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"an offer of an arena that cannot be read: {error}") from error
    if (
        not isinstance(arena, str)
        or not isinstance(owner, str)
        or not _ARENA.fullmatch(arena)
        or not _OWNER.fullmatch(owner)
    ):
        raise ProtocolError(f"an offer of an arena whose id and owner are said to be {head[:240]!r}")
    return Arena(arena, owner, table)


class Wire(Closing):
    """One end of a connection. Takes the socket over. One thread reads; sends of several threads need a lock.

    Closed by hand, and by itself in forked children. `broken`: the other end is gone for what we send; what it said
    before can still be read. limit: bytes of a frame that is received; room: bytes kept for an end that does not read.
    """

    def __init__(self, sock: socket.socket, limit: int = LIMIT, room: int = ROOM) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.broken = False
        self.idle = False  # the last read found nothing
        self.queued = 0  # bytes
        self._inbox = Inbox(limit)
        self._room = room
        self._buffer = memoryview(bytearray(_CHUNK))
        self._queue: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        super().__init__()

    def fileno(self) -> int:
        """For pollers; -1 once closed."""
        return self.sock.fileno()

    def trust(self) -> None:
        """The other end has proved who it is: it may send long frames."""
        self._inbox.limit = LIMIT

    def receive(self) -> list[Message]:
        """The frames that one read completes, oldest first; none if nothing has arrived. Never waits.

        Whoever takes them owns their descriptors. Raises PeerLost at the end of the connection, ProtocolError for
        what is no frame; then close it."""
        self.idle = False
        try:
            messages = self._inbox.read(0, self.sock, self._buffer)
        except BlockingIOError:
            self.idle = True
            return []
        except ConnectionError as error:
            raise PeerLost(f"the other end broke the connection ({error})") from error
        except ArenaError as error:
            raise ProtocolError(f"the other end sent what is no frame: {error}") from error
        if messages is None:
            raise PeerLost("the other end closed the connection")
        # A long frame's own descriptors come with its first byte.
        strays = len(self._inbox.fds) - (self._inbox.header[1] if self._inbox.body is not None else 0)
        if strays > _STRAY_FDS:
            for message in messages:
                close_all(message.fds)
            raise ProtocolError(f"the other end sent {strays} descriptors that belong to no frame")
        return messages

    def send(self, tag: Tag, payload: bytes = b"", fds: Sequence[int] = ()) -> bool:
        """Hand a frame to the system, or keep it until `flush`; the caller keeps its descriptors. Never waits.

        False if more than `room` bytes would be kept: then this frame is not: the other end does not read."""
        if self.broken:
            return True
        if self.queued + len(payload) > self._room:
            return False
        whole = memoryview(header(tag, len(payload), len(fds)) + payload)
        try:
            copies = tuple(os.dup(fd) for fd in fds)
        except OSError:  # at the limit on open files
            self._break()
            return True
        self._queue.append((whole, copies))
        self.queued += len(whole)
        self.flush()
        return True

    def flush(self) -> bool:
        """Hand over what is kept, as far as the system takes it; whether nothing is kept any more. Never waits."""
        while self._queue:
            data, fds = self._queue[0]
            try:
                sent = self.sock.sendmsg([data], rights(fds)) if fds else self.sock.send(data)
            except BlockingIOError:
                return False
            except OSError:  # also: more descriptors under way than the system allows
                self._break()
                return True
            close_all(fds)
            self.queued -= sent
            if sent == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = (data[sent:], ())
        return True

    @property
    def pending(self) -> bool:
        """Whether something is kept: call `flush` when there is room."""
        return bool(self._queue)

    def close(self) -> None:
        """Close the socket and every descriptor that is under way. May be called again."""
        self.sock.close()
        self._drop_queue()
        self._inbox.close()

    def _break(self) -> None:
        self.broken = True
        self._drop_queue()
        # The reader finds the end, after what was said before it.
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _drop_queue(self) -> None:
        while self._queue:
            close_all(self._queue.popleft()[1])
        self.queued = 0
