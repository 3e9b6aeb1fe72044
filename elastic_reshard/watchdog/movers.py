"""The movers of a host: forked from the machine's nursery, told their transfers, watched, condemned. Decisions are `crew.py`'s.

All of it runs on the watchdog's event loop, but for what would block it: the nursery's answers and layouts' bodies, each in a
thread of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from pydantic import ValidationError

from elastic_reshard.arena.channel import close_all
from elastic_reshard.errors import ArenaError, ProtocolError, ReshardError
from elastic_reshard.log import logger
from elastic_reshard.mover.core import Given, Task
from elastic_reshard.mover.nursery import PRELOAD, WORK, Birth, Born, Nursery, NurseryConfig
from elastic_reshard.mover.status import StatusReader
from elastic_reshard.protocol.bits import pack
from elastic_reshard.protocol.hooks import hook
from elastic_reshard.protocol.messages import LedgerSaid, MoverSaid
from elastic_reshard.protocol.processes import DUMP, started
from elastic_reshard.protocol.wire import Tag
from elastic_reshard.watchdog.connection import Connection
from elastic_reshard.watchdog.crew import Action, Assign, Condemn, Crew, Fetch, Fork, Order, Scene, arenas_of, foreseen
from elastic_reshard.watchdog.hosting import Hosting
from elastic_reshard.watchdog.runtime import Deckhand, Paths, Record
from elastic_reshard.watchdog.shelf import lent
from elastic_reshard.watchdog.stock import Stock

if TYPE_CHECKING:
    from elastic_reshard.arena.ledgers import LedgerReader

__all__ = ["Movers"]

_log = logger("watchdog")
_LOOK: Final = 0.1  # seconds for a condemned mover to write down its stacks
_FORK: Final = 30.0  # seconds for a mover, its nursery's loading included
_FETCH: Final = 5.0
_AGAIN: Final = 0.5  # seconds after a fetch that failed


class Manned(Hosting, Protocol):
    """What the movers ask of their watchdog; see `service.Service`."""

    @property
    def paths(self) -> Paths: ...
    @property
    def stock(self) -> Stock: ...
    def write_record(self) -> None: ...
    def say(self, said: list[MoverSaid | LedgerSaid]) -> None: ...


class Movers:
    """All movers of one watchdog. settings: the watchdog's; tests name another `work` and `preload` for the nursery in it."""

    def __init__(self, service: Manned, settings: dict[str, Any]) -> None:
        self._service = service
        self.crew = Crew(service.deadlines, lambda: uuid.uuid4().hex, service.loop.time())
        files = Paths.of_nursery(service.job, Path(settings["runtime"]))
        self._nursery = Nursery(
            NurseryConfig(service.job, files.sock, files.lock, files.log, service.token,
                          settings.get("work") or WORK, tuple(settings.get("preload", PRELOAD)))
        )  # fmt: skip
        self._asking = asyncio.Lock()  # the nursery answers one at a time
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: dict[str, Connection] = {}
        self._pages: dict[str, StatusReader] = {}
        self._pidfds: dict[str, int] = {}
        self._layouts: dict[str, str] = {}
        self._fetching: set[str] = set()
        self._ledgers: dict[str, LedgerReader] = {}
        self._warmed = self._going = False
        self._timer: asyncio.TimerHandle | None = None

    # -- beginning and end

    def inherit(self, record: Record) -> None:
        """Know a predecessor's movers that live, and those that do not."""
        now = self._service.loop.time()
        for mover, hand in record.movers.items():
            self.crew.expect(mover, hand.member, hand.pid, hand.start, hand.transfer, now)
            if not self._watch(mover, hand.pid, hand.start):
                self._service.loop.call_soon(self._ended, mover)

    def begin(self) -> None:
        """Start to look at them regularly."""
        self._tick()

    def recorded(self) -> dict[str, Deckhand]:
        """Those that live, for a replacement."""
        return {h.mover: Deckhand(h.member, h.pid, h.start, h.transfer) for h in self.crew.hands.values() if h.pid}

    def end_all(self, why: str) -> bool:
        """The watchdog is about to go, for good: end every mover. Whether all have ended; call again until they have, or
        until you cannot wait. Returns at once."""
        self._going = True
        for hand in list(self.crew.hands.values()):
            if hand.pid and not hand.condemned:
                self._condemn(self.crew.condemn(hand.mover, why))
        return not self.crew.hands and not any(not t.done() for t in self._tasks)

    def stay(self) -> None:
        """The watchdog is not about to go, or no longer: somebody has come."""
        self._going = False

    def close(self, orderly: bool) -> None:
        """Let go of everything; the movers, if there are any left, live on. orderly: the nursery is told goodbye."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        self._nursery.close(goodbye=orderly)
        for pidfd in self._pidfds.values():
            self._service.loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        for page in self._pages.values():
            page.close()
        self._pages.clear()
        for ledger in self._ledgers.values():
            ledger.close()
        self._ledgers.clear()

    # -- looking and deciding

    def _tick(self) -> None:
        loop, period = self._service.loop, self._service.deadlines.mover_beat / 2
        self._timer = loop.call_later(period, self._tick)
        for mover, page in self._pages.items():
            self.crew.glanced(mover, page.glance(), loop.time())
        self._do(self.crew.tick(loop.time(), period))
        self.act()

    def act(self) -> None:
        """Do what is to be done now. Call it whenever something has changed. Returns at once."""
        if self._going:
            return
        scene = self._scene()
        if not self._warmed and scene.current and foreseen(scene.view, scene.host):
            self._warmed = True
            self._spawn(self._warm())
        self._do(self.crew.decide(scene, self._service.loop.time()))
        self.say()

    def _scene(self) -> Scene:
        house = self._service.house
        members = {*house.members, *house.expected}
        living = {*house.expected, *(name for name, guest in house.members.items() if guest.ended is None)}
        windowless = {name for name in living if self._service.stock.window(name) < 0}
        return Scene(house.view, house.host, house.obeyed, house.arenas, members, self._layouts, windowless)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Fork(mover, member):
                    self._spawn(self._fork(mover, member))
                case Assign():
                    self._assign(action)
                case Order(mover, transfer):
                    payload = transfer.model_dump_json().encode() if transfer is not None else b""
                    self._connections[mover].send(Tag.ORDER, payload)
                case Fetch(layout):
                    if layout not in self._fetching:
                        self._fetching.add(layout)
                        self._spawn(self._fetch(layout))
                case Condemn():
                    self._condemn(action)

    def _spawn(self, what: Coroutine[Any, Any, None]) -> None:
        task = self._service.loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a fault of ours: the watchdog goes, and is replaced
            self._service.loop.call_exception_handler({"message": "movers", "exception": error, "task": task})

    # -- the nursery

    async def _warm(self) -> None:
        try:
            async with self._asking:
                await asyncio.to_thread(self._nursery.warm, time.monotonic() + _FORK)
        except (ReshardError, OSError) as error:
            _log.warning("nursery.unavailable", host=self._service.host, why=str(error))

    async def _fork(self, mover: str, member: str) -> None:
        service = self._service
        hook("watchdog.forking")
        birth = Birth(mover, member, service.host, str(service.paths.sock), service.url, service.deadlines.to_data())
        try:
            async with self._asking:
                born = await asyncio.to_thread(self._nursery.fork, birth, time.monotonic() + _FORK)
        except (ReshardError, OSError) as error:  # also a full disk, or too many open files: tried again
            _log.error("mover.not_forked", member=member, mover=mover, why=str(error))
            self.crew.not_forked(mover, service.loop.time())
            return
        self._born(mover, member, born)

    def _born(self, mover: str, member: str, born: Born) -> None:
        if not self.crew.forked(mover, born.pid, born.start, self._service.loop.time()):
            signal.pidfd_send_signal(born.pidfd, signal.SIGKILL)
            os.close(born.pidfd)
            return
        _log.info("mover.born", member=member, mover=mover, pid=born.pid, seconds=round(born.seconds, 4))
        if mover in self._pidfds:
            os.close(born.pidfd)
        else:
            self._keep(mover, born.pidfd)
        self._service.write_record()
        if self._going:
            self.end_all("the watchdog goes")

    def _keep(self, mover: str, pidfd: int) -> None:
        self._pidfds[mover] = pidfd
        self._service.loop.add_reader(pidfd, self._ended, mover)

    def _watch(self, mover: str, pid: int, start: int) -> bool:
        """See the end of a process; whether it lives."""
        if mover in self._pidfds:
            return True
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        if started(pid) != start:
            os.close(pidfd)
            return False
        self._keep(mover, pidfd)
        return True

    # -- what movers say

    def attach(self, connection: Connection, said: dict[str, Any], page: StatusReader) -> str:
        """A mover is there (again); why it is refused, or ""."""
        mover, member, pid = said["mover"], said["member"], connection.who.pid
        start = started(pid)
        why = self.crew.attach(mover, member, said["transfer"], pid, start, self._service.loop.time())
        if not why and not self._watch(mover, pid, start):
            self.crew.ended(mover)
            why = "its process has ended"
        if why:
            page.close()
            return why
        old = self._pages.pop(mover, None)
        if old is not None:
            old.close()
        self._pages[mover] = page
        before = self._connections.pop(mover, None)
        self._connections[mover] = connection
        if before is not None:
            before.mover = ""
            before.close("the same mover has attached again")
        _log.info("mover.attached", member=member, mover=mover, pid=pid, transfer=said["transfer"])
        self._service.write_record()
        return ""

    def closed(self, connection: Connection) -> None:
        """A mover's connection has been closed."""
        if self._connections.get(connection.mover) is connection:
            del self._connections[connection.mover]
            self.crew.detach(connection.mover)

    def reported(self, connection: Connection, payload: bytes) -> None:
        """A REPORT. Raises ProtocolError if it is none."""
        try:
            said = MoverSaid.model_validate_json(payload)
        except ValidationError as error:
            raise ProtocolError(f"a mover's report that cannot be read: {error}") from error
        if not self.crew.reported(connection.mover, said):
            raise ProtocolError(f"a report of mover {said.mover} of {said.member} by mover {connection.mover}")
        if said.state in ("ready", "running", "out"):
            _log.info(f"mover.{said.state}", member=said.member, transfer=said.transfer, outcome=said.outcome,
                      reason=said.reason[:300])  # fmt: skip
        self.say()  # before it may be condemned for it
        self.act()

    def refresh(self) -> None:
        """Just before a beat: say how far those that run have come."""
        self.crew.refresh()
        self.say()

    def say(self) -> None:
        """Pass on what is new; what a landing slot holds goes before the word that its mover is out."""
        for said in self.crew.outgoing():
            ledgers = self.ledgers(said.member) if said.state in ("out", "ended") else []
            self._service.say([*ledgers, said])

    # -- transfers

    def _assign(self, action: Assign) -> None:
        transfer, publication, mover = action.transfer, action.publication, action.mover
        house = self._service.house
        needed, more = arenas_of(transfer, publication, house.host)
        member = self.crew.hands[mover].member
        lands = {doc.arena for doc in transfer.landings if doc.member == member}
        given: list[Given] = []
        try:
            for arena in sorted(a for a in needed | more if a in house.arenas):
                fds, table = self._service.stock.arenas[arena]
                writable = arena in lands and house.arenas[arena] == member
                # Opened anew from our read-only one: the only writable descriptor there is besides its owner's.
                mode = os.O_RDWR if writable else os.O_RDONLY
                given.append(Given(arena, house.arenas[arena], table.decode(), writable, lent(fds[0], mode)))
                if len(fds) > 1:
                    given[-1] = given[-1]._replace(memory=lent(fds[1], mode))
            names = {publication.layout, transfer.source.layout, *(d.layout for d in transfer.destinations)}
            known = house.members.get(member)
            stated = known.statement if known is not None else None
            task = Task(
                transfer, publication, {name: self._layouts[name] for name in names}, tuple(given),
                stated.device if stated is not None else "", self._service.stock.window(member),
            )  # fmt: skip
            self._service.write_record()
            self._connections[mover].send(Tag.TASK, task.payload(), task.fds)
        finally:
            close_all([fd for g in given for fd in g.fds])
        _log.info("mover.tasked", member=member, mover=mover, transfer=transfer.id, arenas=len(given))

    async def _fetch(self, layout: str) -> None:
        try:
            self._layouts[layout] = await asyncio.to_thread(_body, self._service.url, self._service.token, layout)
        except ReshardError as error:
            _log.warning("layout.not_fetched", layout=layout, why=str(error))
            await asyncio.sleep(_AGAIN)
        finally:
            self._fetching.discard(layout)
        self.act()

    def ledgers(self, member: str = "") -> list[LedgerSaid]:
        """What landing slots hold, a member's or all."""
        house, found = self._service.house, []
        for arena, owner in house.arenas.items():
            if member in ("", owner) and self._ledger(arena) is not None:
                for slot in range(self._ledgers[arena].slots):
                    publication, bits = self._ledgers[arena].state(slot)
                    if publication:
                        found.append(LedgerSaid(member=owner, arena=arena, slot=slot, publication=publication,
                                                bits=pack(bits)))  # fmt: skip
        return found

    def _ledger(self, arena: str) -> LedgerReader | None:
        (fd, *_), table = self._service.stock.arenas[arena]
        if arena not in self._ledgers and b'"landing"' in table[:200]:
            from elastic_reshard.arena.ledgers import LedgerReader

            try:
                self._ledgers[arena] = LedgerReader(os.dup(fd), table)
            except ArenaError as error:
                _log.error("ledger.unreadable", arena=arena, why=str(error))
        return self._ledgers.get(arena)

    def dropped(self, arena: str) -> None:
        """An arena is kept no more."""
        ledger = self._ledgers.pop(arena, None)
        if ledger is not None:
            ledger.close()

    # -- the end of a mover

    def _condemn(self, action: Condemn) -> None:
        """A look at its stacks if it runs, then SIGKILL; never SIGCONT, never SIGTERM: a woken one would write."""
        hook("watchdog.condemning")
        hand = self.crew.hands[action.mover]
        _log.warning("mover.condemned", member=hand.member, mover=hand.mover, pid=hand.pid, why=action.why)
        pidfd = self._pidfds.get(action.mover)
        if pidfd is None:
            self._service.loop.call_soon(self._ended, action.mover)
            return
        loop, deadlines = self._service.loop, self._service.deadlines
        if action.dump and _runs(hand.pid) and _signal(pidfd, DUMP):
            loop.call_later(_LOOK, self._kill, action.mover, pidfd)
        else:
            _signal(pidfd, signal.SIGKILL)
        loop.call_later(_LOOK + deadlines.proof_of_death, self._unproved, action.mover)

    def _kill(self, mover: str, pidfd: int) -> None:
        if self._pidfds.get(mover) == pidfd:
            _signal(pidfd, signal.SIGKILL)

    def _unproved(self, mover: str) -> None:
        if mover in self.crew.hands:
            _log.error("mover.no_proof", mover=mover, pid=self.crew.hands[mover].pid,
                       why="it was killed, but its end was not seen: it hangs in the kernel")  # fmt: skip

    def _ended(self, mover: str) -> None:
        """Its process has ended. What it said before is heard first."""
        pidfd = self._pidfds.pop(mover, None)
        if pidfd is not None:
            self._service.loop.remove_reader(pidfd)
            os.close(pidfd)
        hand = self.crew.hands.get(mover)
        if hand is None:
            return
        connection = self._connections.get(mover)
        if connection is not None:
            connection.drain()
            connection.close("its process has ended")
        page = self._pages.pop(mover, None)
        if page is not None:
            self.crew.glanced(mover, page.glance(), self._service.loop.time())
            page.close()
        if mover not in self.crew.hands:
            return
        self.crew.ended(mover)
        _log.warning("mover.ended", member=hand.member, mover=mover, pid=hand.pid, condemned=hand.condemned)
        self.say()
        self._service.write_record()
        self.act()


def _runs(pid: int) -> bool:
    """Whether a process is neither stopped nor at its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "RSD"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _signal(pidfd: int, what: signal.Signals) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, what)
    except ProcessLookupError:
        return False
    return True


def _body(url: str, token: str, layout: str) -> str:
    """A layout's body, from the supervisor. Blocks for some seconds at most."""
    from elastic_reshard.layout.fragments import canonical
    from elastic_reshard.supervisor.client import SupervisorClient

    with SupervisorClient(url, token, timeout=_FETCH) as client:
        return canonical(client.layout(layout)).decode()
