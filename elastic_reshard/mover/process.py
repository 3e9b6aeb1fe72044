"""A mover's main: the control thread, which beats and speaks with the watchdog, and the worker's thread beside it.

It is forked from the nursery, connects to its watchdog's socket as members do, and again to a replacement at the same socket;
what the worker does goes on meanwhile. It is ended by SIGKILL; by itself it ends only when no watchdog wants it for
`orphan_hold` seconds, or when one refuses it. It holds no lock and no file that anybody would miss.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import secrets
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from pydantic import ValidationError

from elastic_reshard.arena.channel import Message, close_all
from elastic_reshard.errors import PeerLost, ProtocolError
from elastic_reshard.log import logger
from elastic_reshard.mover.core import Abort, Action, Begin, Core, Feed, Finish, Hold, Progress, Task, Until
from elastic_reshard.mover.nursery import Birth
from elastic_reshard.mover.status import State, StatusPage
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.docs import TransferDoc
from elastic_reshard.protocol.hooks import hook
from elastic_reshard.protocol.ids import PROTOCOL
from elastic_reshard.protocol.processes import DUMP
from elastic_reshard.protocol.wire import Tag, Wire, proof, proves, words_of

__all__ = ["Work", "main"]

_log = logger("mover")
_STATES: Final = {"starting": State.STARTING, "ready": State.READY, "running": State.RUNNING, "out": State.OUT}


class Work(Protocol):
    """The worker: one transfer at a time, in a thread of its own. Made by `Work(member, page, say)`.

    Called by the control thread; each returns at once. say(Progress) is called by the worker's thread whenever something
    has changed, "out" last, after the worker has returned from every operation, also if the work broke.
    begin: only when no transfer is in hand; it owns the task's descriptors. finish: only after "out".
    """

    def begin(self, task: Task) -> None: ...
    def feed(self, values: Mapping[str, Mapping[str, str]]) -> None: ...
    def hold(self) -> None: ...
    def until(self, number: int) -> None: ...
    def abort(self) -> None: ...
    def finish(self) -> None: ...


Maker = Callable[[str, StatusPage, Callable[[Progress], None]], Work]


def main(birth: Birth, token: str, work: str) -> int:
    """Be a mover; the process's exit status. Blocks for its whole life. work: dotted name of a `Maker`."""
    faulthandler.register(DUMP, file=sys.stderr, all_threads=True)
    module, _, name = work.partition(":")
    maker: Maker = getattr(importlib.import_module(module), name)
    return _Mover(birth, token, maker).run()


class _Mover:
    def __init__(self, birth: Birth, token: str, maker: Maker) -> None:
        self._birth, self._deadlines = birth, Deadlines(**birth.deadlines)
        self._line = _Line(birth, token, self._deadlines.connect)
        self._core = Core(birth.member, birth.mover)
        self._page = StatusPage()
        self._news: deque[Progress] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._last = Progress("", "out")
        self._work = maker(birth.member, self._page, self._say)

    def _say(self, progress: Progress) -> None:
        """The worker's thread says where it is."""
        last, self._last = self._last, progress
        _pass(last, progress)
        self._page.state(_STATES[progress.state])
        self._news.append(progress)
        os.eventfd_write(self._wake, 1)

    def run(self) -> int:
        """Until nobody wants it."""
        period = self._deadlines.mover_beat / 2
        _log.info("mover.started", member=self._birth.member, mover=self._birth.mover, pid=os.getpid())
        hook("mover.started")
        quiet, last = 0.0, time.monotonic()
        while True:
            self._page.beat()
            self._line.open()
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            if self._line.fileno() >= 0:
                poll.register(self._line.fileno(), select.POLLIN | (select.POLLOUT if self._line.pending else 0))
            poll.poll(period * 1000)
            now = time.monotonic()
            # A mover that was frozen has not been waiting.
            quiet, last = quiet + min(now - last, 2 * period), now
            if self._listen():
                quiet = 0.0
            if self._line.refused or quiet >= self._deadlines.orphan_hold:
                why = self._line.refused or f"no watchdog for {self._deadlines.orphan_hold} s"
                _log.info("mover.exits", member=self._birth.member, mover=self._birth.mover, why=why)
                return 0
            self._hear_worker()
            self._report()

    def _listen(self) -> bool:
        """Take in what the watchdog said; whether there was something from one that has proved itself."""
        messages = self._line.receive()
        while messages:
            try:
                self._take(messages.pop(0))
            except ProtocolError as error:
                for rest in messages:
                    close_all(rest.fds)
                messages = []
                self._line.drop(str(error))
        if self._line.fresh:
            self._line.fresh = False
            said = json.dumps({**self._line.who, "transfer": self._core.transfer}).encode()
            self._line.send(Tag.MOVER, said, (self._page.fd,))
            self._core.unsaid = self._core.progress is not None
            return True
        return self._line.heard()

    def _take(self, message: Message) -> None:
        match message.tag:
            case Tag.TASK:
                try:
                    task = Task.read(message.payload, message.fds)
                except ProtocolError:
                    close_all(message.fds)
                    raise
                self._do(self._core.tasked(task))
            case Tag.ORDER:
                self._do(self._core.ordered(_order(message.payload)))
            case Tag.BEAT:
                pass
            case _:
                close_all(message.fds)
                raise ProtocolError(f"a frame {message.tag} that a mover is not told")

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Begin(task):
                    self._page.fresh()
                    self._page.state(State.STARTING)
                    self._work.begin(task)
                case Feed(values):
                    self._work.feed(values)
                case Hold():
                    self._work.hold()
                case Until(number):
                    self._work.until(number)
                case Abort():
                    self._work.abort()
                case Finish():
                    self._work.finish()
                    self._page.state(State.IDLE)

    def _hear_worker(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        while self._news:
            self._do(self._core.progressed(self._news.popleft()))
            self._report()  # each step by itself: a state that was passed quickly is said too

    def _report(self) -> None:
        said = self._core.said
        if self._core.unsaid and self._line.proved and said is not None:
            self._core.unsaid = False
            self._line.send(Tag.REPORT, said.model_dump_json().encode())


def _order(payload: bytes) -> TransferDoc | None:
    if not payload:
        return None
    try:
        return TransferDoc.model_validate_json(payload)
    except ValidationError as error:
        raise ProtocolError(f"an order that cannot be read: {error}") from error


def _pass(last: Progress, now: Progress) -> None:
    """Points of the protocol, in the worker's thread, before anybody is told."""
    same = last.transfer == now.transfer
    if now.state == "ready" and not (same and last.state == "ready"):
        hook("mover.planned")
    if now.state == "running" and not (same and last.state == "running"):
        hook("mover.formed")
    if now.state == "running" and now.began > (last.began if same else 0):
        hook("mover.round")
    if now.state == "out":
        hook("mover.out")


class _Line:
    """The connection to the watchdog, made again whenever it is lost. Never waits.

    proved: both sides have shown the token. fresh: that has just happened. refused: why it does not want us, "" if it does.
    """

    def __init__(self, birth: Birth, token: str, patience: float) -> None:
        self.who = {"mover": birth.mover, "member": birth.member}
        self.proved = self.fresh = False
        self.refused = ""
        self._birth, self._token, self._patience = birth, token, patience
        self._wire: Wire | None = None
        self._mine = self._theirs = ""
        self._since = 0.0
        self._heard = False

    def fileno(self) -> int:
        """For pollers; -1 while there is none."""
        return self._wire.fileno() if self._wire is not None else -1

    @property
    def pending(self) -> bool:
        """Whether something waits for room."""
        return self._wire is not None and self._wire.pending

    def heard(self) -> bool:
        """Whether a watchdog that has proved itself has said anything since the last call."""
        heard, self._heard = self._heard, False
        return heard

    def open(self) -> None:
        """Connect, if there is no connection; give up one that does not prove itself in time."""
        if self._wire is not None:
            if not self.proved and time.monotonic() - self._since >= self._patience:
                self.drop("it did not prove itself in time")
            return
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        except OSError:  # too many open files
            return
        try:
            sock.connect(self._birth.sock)
        except OSError:  # nobody there, or too many who ask
            sock.close()
            return
        self._wire, self._since = Wire(sock), time.monotonic()

    def drop(self, why: str) -> None:
        """End the connection."""
        if self._wire is not None:
            _log.warning("watchdog.lost", member=self._birth.member, mover=self._birth.mover, why=why[:500])
            self._wire.close()
            self._wire, self.proved, self.fresh = None, False, False

    def send(self, tag: Tag, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        """Hand over, or keep until there is room."""
        if self._wire is not None and not self._wire.send(tag, payload, fds):
            self.drop("it does not read")

    def receive(self) -> list[Message]:
        """What it said, without what only concerns the connection."""
        found: list[Message] = []
        while self._wire is not None:
            try:
                self._wire.flush()
                messages = self._wire.receive()
                while messages:
                    message = messages.pop(0)
                    if self.proved and message.tag != Tag.REFUSE:
                        found.append(message)
                        self._heard = True
                    else:
                        close_all(message.fds)
                        self._greeted(message)
            except (PeerLost, ProtocolError) as error:
                self.drop(str(error))
                break
            if self._wire is None or self._wire.idle:
                break
        return found

    def _greeted(self, message: Message) -> None:
        said = words_of(message.payload)
        match message.tag:
            case Tag.REFUSE:
                self.refused = str(said.get("reason"))
            case Tag.HELLO:
                self._mine, self._theirs = secrets.token_hex(16), str(said.get("nonce"))
                words = {"protocol": PROTOCOL, "url": self._birth.url, "nonce": self._mine}
                answer = proof(self._token, "member", self._theirs, self._mine)
                self.send(Tag.AUTH, json.dumps({**words, "proof": answer}).encode())
            case Tag.PROVED:
                if not proves(said.get("proof"), self._token, "watchdog", self._mine, self._theirs):
                    raise ProtocolError("whoever listens at the watchdog's socket does not hold the job's token")
                self.proved = self.fresh = True
            case _:
                raise ProtocolError(f"a frame {message.tag} before it has proved itself")
