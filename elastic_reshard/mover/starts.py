"""The line over which movers agree on the start of a round (`protocol.starts`), over TCP beside a network of groups.

Rank 0's process has a thread with the starter in it; every mover of the transfer, rank 0 too, has a line to it. Where to call,
and a secret, go with the values by which the communicator meets, so they come from holders of the job's token. Used only where
somebody's window counts, and kernels wait for peers: messages over gloo need none of it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from elastic_reshard import interfaces
from elastic_reshard.arena.channel import close_all
from elastic_reshard.communicator.base import Backend
from elastic_reshard.errors import PeerLost, ProtocolError, TransferTimeout
from elastic_reshard.log import logger
from elastic_reshard.mover.gate import Gate
from elastic_reshard.protocol.starts import Asking, Device, Starter, Way, Word
from elastic_reshard.protocol.wire import STRANGER_LIMIT, Tag, Wire

__all__ = ["KEY", "Line", "Stand", "Starts", "listens_at"]

_log = logger("mover")
KEY: Final = "starts"  # among the values of a communicator
_LOOK: Final = 0.005  # seconds between looks at gate and window while nothing is heard
_SECRET: Final = 32  # bytes
_HELLO: Final = struct.Struct(f"<i{_SECRET}s")
_ROOM: Final = 1 << 22  # bytes kept for an end that does not read
_STRANGERS: Final = 64  # connections that have not said who they are, at most
_LOOPBACK: Final = "127.0.0.1"


def listens_at(backend: Backend) -> str:
    """By which address others reach this process: as the backend has chosen; loopback for one that stays on a machine."""
    address = getattr(backend, "address", None)
    return address.address if isinstance(address, interfaces.Address) else _LOOPBACK


class _Caller:
    """One connection to the stand. rank: -1 until it has said it."""

    def __init__(self, sock: socket.socket) -> None:
        self.wire = Wire(sock, STRANGER_LIMIT, _ROOM)
        self.rank, self.writing = -1, False


class Stand:
    """Rank 0's: listens, and has the starter in a thread of its own until `close`. told: what the others need to call it."""

    def __init__(self, address: str, size: int) -> None:
        self._size, self._starter = size, Starter()
        self._secret = secrets.token_bytes(_SECRET)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=size + _STRANGERS)
        self._listener.setblocking(False)
        self.told = f"{address} {self._listener.getsockname()[1]} {self._secret.hex()}".encode()
        self._end = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock, self._ended = threading.Lock(), False
        self._callers: dict[int, _Caller] = {}  # by descriptor
        self._by_rank: dict[int, _Caller] = {}
        self._selector = selectors.DefaultSelector()
        threading.Thread(target=self._run, name="starter", daemon=True).start()

    def close(self) -> None:
        """End it: every line of the others ends too. Returns at once; may be called again; any thread."""
        with self._lock:
            if not self._ended:
                os.eventfd_write(self._end, 1)
            self._ended = True

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._end, selectors.EVENT_READ)
        try:
            while True:
                ready = {key.fd for key, _ in self._selector.select()}
                if self._end in ready:
                    return
                for fd in ready:
                    if fd == self._listener.fileno():
                        self._accept()
                    elif fd in self._callers:
                        self._serve(self._callers[fd])
        finally:
            self._listener.close()
            for caller in self._callers.values():
                caller.wire.close()
            self._selector.close()
            with self._lock:
                self._ended = True
                os.close(self._end)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone already, or there is no descriptor left
            return
        strangers = [caller for caller in self._callers.values() if caller.rank < 0]
        if len(strangers) >= _STRANGERS:
            self._drop(strangers[0], "too many who do not say who they are")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller = _Caller(sock)
        self._callers[caller.wire.fileno()] = caller
        self._selector.register(caller.wire.fileno(), selectors.EVENT_READ)

    def _serve(self, caller: _Caller) -> None:
        try:
            caller.wire.flush()
            while True:
                for message in caller.wire.receive():
                    close_all(message.fds)
                    self._heard(caller, message.payload)
                if caller.wire.idle:
                    break
        except PeerLost:  # also of one that is done
            self._drop(caller, "")
        except ProtocolError as error:
            self._drop(caller, str(error))
        else:
            self._watch(caller)

    def _heard(self, caller: _Caller, payload: bytes) -> None:
        if caller.rank < 0:
            caller.rank = self._proved(payload)
            caller.wire.trust()
            self._by_rank[caller.rank] = caller
            return
        for rank, word in self._starter.heard(caller.rank, Word.of(payload, self._size)):
            other = self._by_rank[rank]
            if not other.wire.send(Tag.START, word.to_bytes()):
                _log.warning("starts.unread", rank=rank)  # its end will be somebody's to see
            if other is not caller:
                self._watch(other)

    def _proved(self, payload: bytes) -> int:
        try:
            rank, secret = _HELLO.unpack(payload)
        except struct.error as error:
            raise ProtocolError(f"whoever calls the starter does not say who it is ({error})") from error
        if not hmac.compare_digest(secret, self._secret) or not 0 <= rank < self._size or rank in self._by_rank:
            raise ProtocolError(
                f"whoever calls the starter as rank {rank} is not of this communicator, or called before"
            )
        return int(rank)

    def _watch(self, caller: _Caller) -> None:
        if caller.wire.pending != caller.writing and caller.wire.fileno() in self._callers:
            caller.writing = caller.wire.pending
            self._selector.modify(caller.wire.fileno(), selectors.EVENT_READ | selectors.EVENT_WRITE * caller.writing)

    def _drop(self, caller: _Caller, why: str) -> None:
        if why:
            _log.warning("starts.dropped", rank=caller.rank, why=why)
        if caller.rank >= 0:
            self._starter.gone(caller.rank)
        self._selector.unregister(caller.wire.fileno())
        del self._callers[caller.wire.fileno()]
        caller.wire.close()


class Line:
    """One mover's connection to the starter. One thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._wire = Wire(sock, STRANGER_LIMIT, _ROOM)
        self._poll = select.poll()
        self._poll.register(self._wire.fileno(), select.POLLIN)

    @classmethod
    def call(cls, told: bytes, rank: int, deadline: float, gate: Gate) -> Line:
        """Connect as this rank to who told so. Blocks until `deadline` (time.monotonic) at most, or the gate's abort.
        PeerLost or TransferTimeout, which name rank 0; TransferError when aborted; ProtocolError for another text."""
        try:
            address, port, secret = told.decode().split(" ")
            hello = _HELLO.pack(rank, bytes.fromhex(secret))
            info = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
        except (ValueError, OSError, struct.error) as error:
            raise ProtocolError(f"rank 0 told {told[:80]!r} instead of where its starter listens ({error})") from error
        sock = socket.socket(info[0], socket.SOCK_STREAM)
        try:
            _connect(sock, info[4], deadline, gate)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = cls(sock)
        except BaseException:
            sock.close()
            raise
        line._wire.send(Tag.START, hello)
        return line

    def say(self, words: Sequence[Word]) -> None:
        """Hand over. PeerLost if the starter does not read."""
        for word in words:
            if not self._wire.send(Tag.START, word.to_bytes()):
                raise PeerLost("the starter at rank 0 does not read; form anew without it", (0,))

    def hear(self, patience: float) -> list[Word]:
        """What the starter said; waits for that `patience` seconds at most. PeerLost when its line has ended."""
        self._wire.flush()
        if not self._poll.poll(patience * 1000):
            return []
        try:
            return [Word.of(message.payload, 1 << 30) for message in self._wire.receive()]
        except (PeerLost, ProtocolError) as error:
            raise PeerLost(
                f"the line to rank 0, which says when a round starts, has ended ({error}); form anew without it", (0,)
            ) from error

    def close(self) -> None:
        """End it. May be called again."""
        self._wire.close()


def _connect(sock: socket.socket, address: tuple[object, ...], deadline: float, gate: Gate) -> None:
    sock.setblocking(False)
    with suppress(BlockingIOError):
        sock.connect(address)
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLOUT)
    while not poll.poll(_LOOK * 1000):
        gate.way(0)  # raises once aborted
        if time.monotonic() >= deadline:
            raise TransferTimeout(f"rank 0 did not answer at {address[0]}, where its starter listens, in time", (0,))
    failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failed:
        raise PeerLost(
            f"rank 0 cannot be reached at {address[0]}, where its starter listens ({os.strerror(failed)}); form anew",
            (0,),
        )


# Where it is shown for whom a start waits: (rank, None for nobody; for the own window; for that rank's window).
Show = Callable[[int | None, bool, bool], None]


class Starts:
    """One run's starts: the gate, this member's window (turn; None: it has none that counts), and the line. One thread."""

    def __init__(self, line: Line, gate: Gate, turn: Device | None, show: Show) -> None:
        self._line, self._gate, self._turn, self._show = line, gate, turn, show

    def begin(self, number: int, peers: Sequence[int], *, round_: int) -> bool:
        """Block until this round, counted as `round_` by the gate, may be launched, and all of its circle launch it; then this
        mover is inside its window. False: it is not to be run. number: of the start, rising, alike on all members.

        TransferError once the gate is aborted, PeerLost when the starter is gone; then it is outside."""
        asking, shown = Asking(number, peers, self._turn), _Last(self._show)
        launched = False
        try:
            while (way := self._gate.way(round_)) is not Way.ENDED:
                may, words = asking.step(way, time.monotonic())
                self._line.say(words)
                if may and self._gate.begin(round_):
                    launched = True
                    return True
                shown.show(asking)
                if not may:
                    for word in self._line.hear(_LOOK):
                        asking.heard(word)
            return False
        finally:
            shown.clear()
            if not launched:
                words = asking.give_up()
                with suppress(PeerLost):
                    self._line.say(words)


class _Last:
    """What was shown last: words are said when they change."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._said: tuple[bool, tuple[int, bool] | None] = (False, None)

    def show(self, asking: Asking) -> None:
        now = (asking.shut, asking.held)
        if now != self._said:
            self._said = now
            rank, window = asking.held if asking.held is not None else (None, False)
            self._show(rank, asking.shut, window)

    def clear(self) -> None:
        if self._said != (False, None):
            self._show(None, False, False)
