"""A member's link to its host's watchdog: a library thread that speaks, listens, holds descriptors and guards the watchdog.

Everything that a member offers is kept here, so that a new watchdog gets it again: what the member states of itself, its own
arenas, and O_RDONLY descriptors of everybody else's. The thread never touches a tensor.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from pydantic import ValidationError

from elastic_reshard.arena.channel import Closing, Message, close_all
from elastic_reshard.errors import (
    MembershipError,
    NotAMember,
    PeerLost,
    ProtocolError,
    RefitTimeout,
    ReshardError,
    SupervisorUnreachable,
    Unauthorized,
)
from elastic_reshard.log import logger
from elastic_reshard.protocol.hooks import hook
from elastic_reshard.protocol.messages import Statement
from elastic_reshard.protocol.view import Farewell, Heard, Told, read_down
from elastic_reshard.protocol.wire import Tag, arena_of, arena_payload, words_of
from elastic_reshard.watchdog.find import Finder, Found, refusal
from elastic_reshard.watchdog.patience import Patience
from elastic_reshard.watchdog.shelf import HeldArena, Shelf
from elastic_reshard.watchdog.start import HostConfig

__all__ = ["HeldArena", "HostConfig", "HostLink"]

_log = logger("link")
_LAST_WORDS: Final = 1.0  # seconds for what is still to be said to the watchdog at the end
_LEAVE: Final = 3.0  # seconds for finding a watchdog to say goodbye to
_AGAIN: Final = 0.5  # seconds before the next try to replace a watchdog, if one failed


class HostLink(Closing):
    """One member's link. Call `open` once, then any of the others from any thread; `close` at the end.

    hear: each message of the supervisor. changed: something else did (connected, arenas, a new watchdog). Both are called
    in the library thread: they must return soon, for while they run nobody guards the watchdog. Deadlines are absolute,
    of time.monotonic(). A forked child owns nothing of it.
    """

    def __init__(
        self,
        config: HostConfig,
        statement: Statement,
        *,
        hear: Callable[[Told | Heard | Farewell], None],
        changed: Callable[[], None],
    ) -> None:
        self._config, self._hear, self._changed = config, hear, changed
        self._member = statement.member
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._statement = statement
        self._raw = statement.model_dump_json().encode()
        self._unsent = False
        self._shelf = Shelf()
        self._landings: set[str] = set()  # of the shelf's arenas, those in which this member lands
        self._found: Found | None = None
        self._connected = False
        self._failure: ReshardError | None = None
        self._fault: ReshardError | None = None  # of the watchdog's connection to the supervisor
        self._reason = ""
        self._watchdog = ""
        self._stop_at: float | None = None
        self._leaving = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._finder = Finder(config, self._stopping)
        # Daemonic: a user's process that just ends is seen by the watchdog.
        self._thread = threading.Thread(target=self._run, name=f"elastic_reshard {self._member}", daemon=True)
        super().__init__()

    # -- for the member, any thread

    def open(self, deadline: float) -> None:
        """Start the host's watchdog if there is none, attach, and wait until the supervisor has answered it.
        Blocks until `deadline`. Raises SupervisorUnreachable, Unauthorized, JoinRefused, MembershipError; then, as after an
        interrupt, the link is closed."""
        try:
            self._thread.start()
            within = max(0.0, deadline - time.monotonic())
            with self._lock:
                self._news.wait_for(lambda: self._connected or self._fatal() is not None, within)
                fatal, connected, reason = self._fatal(), self._connected, self._reason or self._finder.reason
            if not connected:
                raise fatal or SupervisorUnreachable(
                    f"member {self._member} got no answer from the supervisor at {self._config.url} in time ({reason}); "
                    "start it, or look at the address and the network"
                )
        except BaseException:
            self.close(deadline=deadline)
            raise

    def state(self, statement: Statement) -> None:
        """Say this, the member's latest statement. When it returns, the watchdog's socket has it, or it is kept and said when
        there is room or a watchdog. Never blocks for longer than others hold the lock (no waiting in there)."""
        raw = statement.model_dump_json().encode()
        with self._lock:
            if statement.number < self._statement.number:
                return
            self._statement, self._raw, self._unsent = statement, raw, True
            self._push()

    def offer(self, arena: str, fd: int, table: bytes, memory: int = -1) -> None:
        """Offer an arena of this member's own. Descriptors (memory: a device's) stay the caller's. Never waits. NotAMember."""
        self._offer(Tag.OFFER, arena, fd, table, memory)

    def offer_landing(self, arena: str, fd: int, table: bytes, memory: int = -1) -> None:
        """As `offer`, a landing arena: read-write, for the member's mover to write; others are given it to read."""
        self._offer(Tag.LANDING, arena, fd, table, memory)

    def _offer(self, tag: Tag, arena: str, fd: int, table: bytes, memory: int) -> None:
        with self._lock:
            self._check()
            copy, more = os.dup(fd), os.dup(memory) if memory >= 0 else -1
            self._shelf.put(arena, self._member, table, copy, more)
            if tag is Tag.LANDING:
                self._landings.add(arena)
            self._send(tag, arena_payload(arena, self._member, table), self._shelf.arenas[arena].fds)

    def offer_window(self, fd: int) -> None:
        """Give this member's window (`protocol.window`) to its mover, also by a new watchdog. As `offer`. Once."""
        with self._lock:
            self._check()
            self._shelf.window = os.dup(fd)
            self._send(Tag.WINDOW, b"", (self._shelf.window,))

    def withdraw(self, arena: str) -> None:
        """Give up an arena of this member's own: nobody gets it any more, and others let go of it. Never waits."""
        with self._lock:
            if self._shelf.owner(arena) == self._member:
                self._shelf.drop(arena)
                self._landings.discard(arena)
                self._send(Tag.WITHDRAW, arena.encode())

    def arena(self, arena: str, deadline: float) -> HeldArena:
        """An arena of this host, own or another's; waits until it is known. Raises RefitTimeout, NotAMember."""
        with self._lock:
            self._news.wait_for(
                lambda: arena in self._shelf.arenas or self._failure is not None or self._stop_at is not None,
                max(0.0, deadline - time.monotonic()),
            )
            if arena not in self._shelf.arenas:
                self._check()
                raise RefitTimeout(
                    f"member {self._member} was not given arena {arena} on host {self._config.host} in time; its owner has "
                    "withdrawn it or is on another host"
                )
            return self._shelf.lend(arena)

    @property
    def connected(self) -> bool:
        """Whether the watchdog is there and hears a supervisor that it obeys."""
        return self._connected

    @property
    def watchdog_instance(self) -> str:
        """Which watchdog serves this member; "" while none does."""
        return self._watchdog

    @property
    def failure(self) -> ReshardError | None:
        """Why the link has ended for good; None while it works."""
        return self._failure

    def close(self, graceful: bool = True, deadline: float | None = None) -> None:
        """End the link. graceful: tell the watchdog that this member has left (up to 1 s, 3 s without a watchdog).
        Not graceful: the watchdog takes it for a member that may come back. Blocks 10 s at most, or until `deadline` but 1 s;
        what is left to do then is done without the caller. May be called again, from any thread."""
        if os.getpid() != self._pid:
            self._abandon()
            return
        with self._lock:
            if self._stop_at is None:
                self._stop_at = time.monotonic() + (_LEAVE if graceful and self._watchdog else 0.0)
            self._leaving = graceful
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
            self._news.notify_all()
        within = _LEAVE + self._config.deadlines.connect + self._config.deadlines.proof_of_death
        if deadline is not None:
            within = min(within, max(_LAST_WORDS, deadline - time.monotonic()))
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(within)
        elif self._thread.ident is None:
            self._let_go()

    # -- under the lock

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._stop_at is not None:
            raise NotAMember(f"the link of member {self._member} is closed; join again")

    def _fatal(self) -> ReshardError | None:
        return self._failure or self._fault

    def _send(self, tag: Tag, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        if self._found is None:
            return  # all is said at the next attach
        self._found.wire.send(tag, payload, fds)
        if self._found.wire.pending and self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _push(self) -> None:
        # Only the latest statement waits for room, however many were made meanwhile.
        if self._unsent and self._found is not None and not self._found.wire.pending:
            self._unsent = False
            self._send(Tag.STATEMENT, self._raw)

    # -- the library thread

    def _stopping(self) -> bool:
        return self._stop_at is not None and time.monotonic() >= self._stop_at

    def _run(self) -> None:
        lost: Found | None = None  # not to be trusted any more, perhaps alive
        found: Found | None = None
        why, last, since = "", "", 0.0
        try:
            while True:
                found = self._find(lost, why)
                if found is None:
                    return
                if why:
                    event = "watchdog.reattached" if found.watchdog == last else "watchdog.replaced"
                    seconds = round(time.monotonic() - since, 3)
                    _log.warning(event, member=self._member, watchdog=found.watchdog, seconds=seconds)
                if lost is not None:
                    lost.close()
                    lost = None
                last = found.watchdog
                why, silent = self._serve(found)
                if not why:
                    return
                since = time.monotonic()
                _log.warning("watchdog.lost", member=self._member, watchdog=found.watchdog, pid=found.pid, why=why)
                found.wire.close()
                if silent:
                    lost = found
                else:
                    found.close()
                found = None
                hook("link.replacing")
                self._changed()
        except ReshardError as error:
            self._failed(error)
        finally:
            for watchdog in filter(None, (lost, found)):
                watchdog.close()
            if self._stop_at is None and self._failure is None:
                self._failed(
                    MembershipError(f"the library thread of member {self._member} ended by an error of its own")
                )
            self._let_go()

    def _find(self, lost: Found | None, why: str) -> Found | None:
        while not self._stopping():
            try:
                return self._finder.find(lost, why)
            except ReshardError as error:
                # Before the first attach it is the caller's to know; later a member is not given up for this.
                if not self._watchdog or type(error) is not MembershipError:
                    raise
                _log.error("watchdog.not_replaced", member=self._member, why=str(error))
                self._reason = str(error)
                time.sleep(_AGAIN)
        return None

    def _failed(self, error: ReshardError) -> None:
        with self._lock:
            self._failure = error
            self._connected = False
            self._news.notify_all()
        self._changed()

    def _serve(self, found: Found) -> tuple[str, bool]:
        """Attach, and be served until this watchdog is lost. Why it is, "" if we go; and whether it may still live."""
        self._attach(found)
        poll = select.poll()
        poll.register(found.wire.fileno(), select.POLLIN)
        poll.register(found.pidfd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        deadlines = self._config.deadlines
        patience = Patience(deadlines.watchdog_silent, deadlines.watchdog_beat, time.monotonic())
        try:
            while True:
                poll.modify(found.wire.fileno(), select.POLLIN | (select.POLLOUT if found.wire.pending else 0))
                patience.due(time.monotonic(), deadlines.watchdog_beat)
                ready = {fd for fd, _ in poll.poll(deadlines.watchdog_beat * 1000)}
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._take_all(found):
                    patience.heard(time.monotonic())
                if found.pidfd in ready:
                    return "its process has ended", False
                if self._stop_at is not None:
                    self._farewell(found)
                    return "", False
                self._flush(found)
                if patience.silent(time.monotonic()):
                    return f"it was silent for {deadlines.watchdog_silent} s", True
        except PeerLost as error:
            return str(error), False
        except ProtocolError as error:
            return str(error), True
        finally:
            with self._lock:
                self._found, self._connected, self._unsent = None, False, False

    def _attach(self, found: Found) -> None:
        with self._lock:
            self._found = found
            self._watchdog, self._reason, self._fault = found.watchdog, "", None
            self._unsent = False
            self._send(Tag.ATTACH, self._raw)
            for arena, kept in self._shelf.arenas.items():
                tag = Tag.LANDING if arena in self._landings else Tag.OFFER
                self._send(tag, arena_payload(arena, kept.owner, kept.table), kept.fds)
            if self._shelf.window >= 0:
                self._send(Tag.WINDOW, b"", (self._shelf.window,))
            self._send(Tag.SETTLED)

    def _flush(self, found: Found) -> None:
        with self._lock:
            if found.wire.pending:
                found.wire.flush()
            self._push()

    def _farewell(self, found: Found) -> None:
        if not self._leaving:
            return
        deadline = time.monotonic() + _LAST_WORDS
        with self._lock:
            self._push()
            self._send(Tag.LEFT)
            poll = select.poll()
            poll.register(found.wire.fileno(), select.POLLOUT)
            while not found.wire.flush() and time.monotonic() < deadline:
                poll.poll(max(0.0, deadline - time.monotonic()) * 1000)

    def _take_all(self, found: Found) -> bool:
        """Take in all that has arrived; whether there was something. Raises PeerLost, ProtocolError, refusals."""
        something = False
        while True:
            messages = found.wire.receive()
            if found.wire.idle:
                return something
            something = True
            while messages:
                message = messages.pop(0)
                try:
                    self._take(message)
                except ReshardError:
                    for rest in messages:
                        close_all(rest.fds)
                    raise

    def _take(self, message: Message) -> None:
        match message.tag:
            case Tag.SUPERVISOR:
                try:
                    said = read_down(message.payload)
                except ValidationError as error:
                    raise ProtocolError(
                        f"the watchdog passed on what is no message of a supervisor: {error}"
                    ) from error
                self._hear(said)
            case Tag.CONNECTION:
                self._connection(message.payload)
            case Tag.OFFER if len(message.fds) in (1, 2):
                self._offered(message.payload, message.fds)
            case Tag.DROPPED:
                self._dropped(message.payload.decode("ascii", "replace"))
            case Tag.REFUSE:
                raise refusal(message.payload)
            case Tag.SETTLED | Tag.BEAT:
                pass
            case _:
                close_all(message.fds)
                raise ProtocolError(f"the watchdog sent a frame {message.tag} that this version does not know")

    def _connection(self, payload: bytes) -> None:
        said = words_of(payload)
        connected, kind, reason = bool(said.get("connected")), said.get("kind"), str(said.get("reason"))
        with self._lock:
            self._connected, self._reason = connected, reason
            self._fault = Unauthorized(reason) if kind == "Unauthorized" else None
            self._news.notify_all()
        self._changed()

    def _offered(self, payload: bytes, fds: Sequence[int]) -> None:
        try:
            arena, owner, table = arena_of(payload)
        except ProtocolError:
            close_all(fds)
            raise
        with self._lock:
            if arena in self._shelf.arenas or owner == self._member:
                close_all(fds)
            else:
                self._shelf.put(arena, owner, table, *fds)
            self._news.notify_all()
        self._changed()

    def _dropped(self, arena: str) -> None:
        with self._lock:
            if self._shelf.owner(arena) != self._member:
                self._shelf.drop(arena)
        self._changed()

    # -- the end

    def _let_go(self) -> None:
        with self._lock:
            self._connected, self._watchdog = False, ""
            self._shelf.close()
            if self._wake >= 0:
                wake, self._wake = self._wake, -1
                os.close(wake)
            self._news.notify_all()

    def _abandon(self) -> None:
        """In a forked child: close the copies, own nothing. The parent's thread may have held the lock."""
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._stop_at = 0.0
        self._failure = NotAMember(f"member {self._member} belongs to the process that forked this one; join anew here")
        if self._found is not None:
            found, self._found = self._found, None
            found.close()
        self._let_go()
