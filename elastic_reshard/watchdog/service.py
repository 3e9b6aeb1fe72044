"""The watchdog's shell: its socket, its members' connections and ends, its clock. What it decides is in `core.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import platform
import signal
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from elastic_reshard.log import logger
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.hooks import hook
from elastic_reshard.protocol.messages import LedgerSaid, MoverSaid, Statement
from elastic_reshard.protocol.places import Address
from elastic_reshard.protocol.processes import serviceable
from elastic_reshard.protocol.view import Told, read_down
from elastic_reshard.protocol.wire import Arena, Tag, arena_payload
from elastic_reshard.watchdog.connection import Connection, statement_of
from elastic_reshard.watchdog.core import Guest, House, Relay
from elastic_reshard.watchdog.drain import asked_until, write_down
from elastic_reshard.watchdog.movers import Movers
from elastic_reshard.watchdog.runtime import Lock, Paths, Record, Resident, read_record, started
from elastic_reshard.watchdog.stock import Stock
from elastic_reshard.watchdog.uplink import Uplink

__all__ = ["Service", "run"]

_log = logger("watchdog")
_STRANGERS: Final = 256  # connections that have not attached yet
_LAST_WORDS: Final = 1.0  # seconds for what is still to be said to the supervisor at the end


class Service:
    """One host's watchdog. All of it runs on one event loop."""

    def __init__(self, settings: dict[str, Any], deadlines: Deadlines) -> None:
        self.job, self.host = settings["job"], settings["host"]
        self.address = Address(settings["url"], self.job, settings["runtime"], settings["seen"])
        self.token: str = settings["token"]
        self.deadlines = deadlines
        self.paths = Paths.of(self.job, self.host, Path(settings["runtime"]))
        self.instance = uuid.uuid4().hex[:16]
        self.loop = asyncio.get_running_loop()
        self.house = House(self.job, self.host, platform.node(), self.instance, deadlines, self.loop.time())
        self.done = asyncio.Event()
        self.uplink = Uplink(self)
        self.movers = Movers(self, settings)
        self.stock = Stock()
        self._connections: set[Connection] = set()
        self._attached: dict[str, Connection] = {}
        self._pidfds: dict[str, tuple[int, int, int]] = {}  # member -> pidfd, pid, start
        self._listener: socket.socket | None = None
        self._inode = (0, 0)
        self._going_since: float | None = None
        self._orderly = False
        self._connection_state = json.dumps({"connected": False, "kind": "", "reason": "not connected yet"}).encode()

    # -- beginning and end

    @property
    def url(self) -> str:
        """Where the supervisor was last known to be."""
        return self.address.url

    def listen(self) -> None:
        """Take the place of whoever was there before. The caller holds the host's lock."""
        self._inherit()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        fresh = self.paths.sock.with_name(self.paths.sock.name + ".new")
        fresh.unlink(missing_ok=True)
        listener.bind(str(fresh))
        os.chmod(fresh, 0o600)
        listener.listen(128)
        fresh.replace(self.paths.sock)
        self._inode = self._socket_file()
        self._listener = listener
        self.loop.add_reader(listener.fileno(), self._accept)
        self.write_record()
        if asked_until(self.paths, self.loop.time()) is not None:  # our predecessor was to drain the host
            self.loop.call_soon(self.drain)
        self.loop.call_soon(self._tick)
        self.loop.call_soon(self.movers.begin)
        _log.info("watchdog.listening", job=self.job, host=self.host, watchdog=self.instance, pid=os.getpid())
        hook("watchdog.listening")

    def _inherit(self) -> None:
        record = read_record(self.paths.record)
        found: dict[str, tuple[str | None, Statement | None]] = {}
        for name, resident in (record.members if record is not None else {}).items():
            said = statement_of(resident.statement) if resident.statement is not None else None
            alive = resident.ended is None and resident.start != 0 and started(resident.pid) == resident.start
            how = resident.ended or "its process ended while its watchdog was replaced"
            found[name] = (None if alive else how, said)
        self.house.inherit(found, self.loop.time())
        for name, (ended, _) in found.items():
            if ended is None and record is not None:
                self._watch(name, record.members[name].pid, record.members[name].start)
        if record is not None:
            self.movers.inherit(record)

    def _socket_file(self) -> tuple[int, int]:
        try:
            found = os.stat(self.paths.sock)
        except FileNotFoundError:
            return (0, 0)
        return (found.st_ino, found.st_dev)

    def write_record(self) -> None:
        """Tell a replacement whom we serve. Once we go it is the replacement's own record that lies there, or none."""
        if self.done.is_set():
            return
        members = {}
        for name in (*self.house.members, *self.house.expected):
            _, pid, start = self._pidfds.get(name, (-1, 0, 0))
            member = self.house.members.get(name, Guest())  # one that is only expected: so it is by the next one too
            said = member.raw.decode() if member.ended is not None and member.raw else None
            members[name] = Resident(pid, start, member.ended, said)
        try:
            record = Record(os.getpid(), started(os.getpid()), self.instance, members, self.movers.recorded())
            record.write(self.paths.record)
        except OSError as error:  # a full disk, say: only a replacement would miss it
            _log.error("record.unwritten", path=str(self.paths.record), error=str(error))

    def _tick(self) -> None:
        now = self.loop.time()
        self.loop.call_later(self.deadlines.watchdog_beat, self._tick)
        for connection in list(self._connections):
            connection.beat(now)
        self.sweep()
        if self._socket_file() not in ((0, 0), self._inode):
            _log.error("watchdog.superseded", host=self.host, watchdog=self.instance)
            self.done.set()
            return
        self._judge()

    def _judge(self) -> None:
        """Go, if there is nothing to guard any more."""
        if self.done.is_set():
            return
        now = self.loop.time()
        why = self.house.departure(now)
        if not why:
            self._going_since = None
            self.movers.stay()
            return
        if not self.movers.end_all("the watchdog goes: " + why):
            # A mover whose end is not seen hangs in the kernel: nothing that we could wait for.
            self._going_since = self._going_since or now
            if now - self._going_since < 2 * self.deadlines.proof_of_death:
                return
        if self._depart():
            hook("watchdog.exiting")
            _log.info("watchdog.exits", host=self.host, why=why)
            if self.house.drain_until is not None:
                self._turn_out()
            self._orderly = True
            self.done.set()

    def _depart(self) -> bool:
        """Remove our files, unless somebody is about to look for us: then later."""
        if not self.paths.folder.exists():
            return True  # somebody has cleaned up before us
        lock = Lock(self.paths.lock)
        if not lock.take():
            return False
        self.close_listener()
        for path in (self.paths.sock, self.paths.record, self.paths.log, self.paths.drain):
            path.unlink(missing_ok=True)
        lock.remove()
        lock.release()
        if self.paths.folder != self.paths.base:
            with contextlib.suppress(OSError):  # other hosts of the job
                self.paths.folder.rmdir()
        return True

    def drain(self) -> None:
        """SIGTERM: the host is to be emptied. The supervisor asks its members to leave; we go when they have, or in time."""
        if self.done.is_set():
            return
        now = self.loop.time()
        until = asked_until(self.paths, now) or now + self.deadlines.drain
        self.house.drain(until - now, now)
        _log.warning("watchdog.drains", host=self.host, within=round(until - now, 3), members=self.house.attached)
        write_down(self.paths, self.house.drain_until or until)
        self.uplink.wake()
        self._judge()

    def _turn_out(self) -> None:
        """Who did not leave in time is told so: it must not start another watchdog on a host that goes."""
        why = f"host {self.host} was drained and its time is over; join again on another host"
        for connection in list(self._attached.values()):
            connection.refuse("NotAMember", why)

    def close_listener(self) -> None:
        """Nobody comes any more."""
        if self._listener is not None:
            self.loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    # -- connections

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        if sum(not (c.member or c.mover) for c in self._connections) >= _STRANGERS:
            sock.close()
            return
        connection = Connection(self, sock)
        self._connections.add(connection)
        connection.greet()

    def attach(self, connection: Connection, statement: Statement, raw: bytes) -> str:
        """A member is there; why it is refused, or ""."""
        name, pid = statement.member, connection.who.pid
        why = self.house.attach(statement, raw, self.loop.time())
        if why:
            return why
        old = self._attached.get(name)
        if old is not None:
            old.member = ""
            old.close("the same member has attached again")
        self._attached[name] = connection
        self._watch(name, pid, started(pid))
        self.write_record()
        _log.info("member.attached", member=name, pid=pid)
        hook("watchdog.attached")
        connection.send(Tag.CONNECTION, self._connection_state)
        if self.house.view.term:
            connection.send(Tag.SUPERVISOR, self.house.view.snapshot().model_dump_json().encode())
        for arena in self.stock.arenas:
            self._pass_on(arena, connection)
        connection.send(Tag.SETTLED)
        self.uplink.wake()
        return ""

    def closed(self, connection: Connection) -> None:
        """A connection has been closed."""
        self._connections.discard(connection)
        if connection.mover:
            self.movers.closed(connection)
        name = connection.member
        if name and self._attached.get(name) is connection:
            del self._attached[name]
            self.house.detach(name, self.loop.time())

    def _watch(self, name: str, pid: int, start: int) -> None:
        self._unwatch(name)
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.loop.call_soon(self.ended, name, "its process has ended")
            return
        self._pidfds[name] = (pidfd, pid, start)
        self.loop.add_reader(pidfd, self.ended, name, "its process has ended")

    def _unwatch(self, name: str) -> None:
        if name in self._pidfds:
            pidfd, _, _ = self._pidfds.pop(name)
            self.loop.remove_reader(pidfd)
            os.close(pidfd)

    def ended(self, name: str, how: str) -> None:
        """A member's process has ended, or it has left. What it said before is heard first."""
        connection = self._attached.get(name)
        if connection is not None and how != "left":
            connection.drain()
        if self.house.end(name, how, self.loop.time()):
            _log.warning("member.ended", member=name, how=how)
            hook("watchdog.ended")
        self.stock.drop_window(name)
        self._unwatch(name)
        connection = self._attached.get(name)
        if connection is not None:
            connection.close(how)
        self.write_record()
        self.sweep()
        self._judge()

    # -- arenas

    def offer(self, connection: Connection, arena: Arena, fds: Sequence[int]) -> None:
        """Take an arena in (and its descriptors over) and pass it on to everybody else. Raises ProtocolError."""
        fresh = self.stock.put(arena.arena, fds, arena.table)
        if not self.house.offer(connection.member, arena.arena, arena.owner):
            if fresh:
                self.stock.drop(arena.arena)
            connection.send(Tag.DROPPED, arena.arena.encode())
        elif fresh:
            hook("watchdog.offered")
            for other in list(self._attached.values()):
                if other is not connection:
                    self._pass_on(arena.arena, other)
            self.movers.act()

    def window(self, member: str, fd: int) -> None:
        """Keep a member's window for its mover; the descriptor is ours from now on."""
        self.stock.put_window(member, fd)
        self.movers.act()

    def _pass_on(self, arena: str, to: Connection) -> None:
        fds, table = self.stock.arenas[arena]
        owner = self.house.arenas[arena]
        if owner != to.member:
            to.send(Tag.OFFER, arena_payload(arena, owner, table), fds)

    def drop(self, arenas: list[str]) -> None:
        """These are kept no more; tell everybody."""
        for arena in arenas:
            self.stock.drop(arena)
            self.movers.dropped(arena)
            _log.info("arena.dropped", arena=arena)
            for connection in list(self._attached.values()):
                connection.send(Tag.DROPPED, arena.encode())

    def sweep(self) -> None:
        """Drop what nobody needs; say to the supervisor what changed."""
        before = len(self.house.members)
        self.drop(self.house.sweep(self.loop.time()))
        if len(self.house.members) != before:
            self.write_record()
        self.movers.act()
        self.uplink.wake()

    # -- the supervisor

    def ready(self) -> bool:
        """Whether to introduce ourselves to the supervisor."""
        now = self.loop.time()
        return self.house.ready(now) and self.movers.crew.ready(now)

    def hello(self) -> bytes:
        """The first message of a connection."""
        crew = self.movers.crew
        crew.refresh()
        crew.unsaid.clear()
        return self.house.hello(crew.known(), self.movers.ledgers())

    def refresh(self) -> None:
        """A beat is due."""
        self.movers.refresh()

    def say(self, said: list[MoverSaid | LedgerSaid]) -> None:
        """Tell the supervisor something of movers."""
        self.house.say(said)
        self.uplink.wake()

    def told(self, raw: bytes) -> Relay:
        """A message of the supervisor has come. Raises pydantic's ValidationError if it is none."""
        said = read_down(raw)
        relay = self.house.hear(said)
        if relay is not Relay.PASS_ON:
            _log.warning("supervisor.not_followed", kind=said.kind, term=said.term, why=relay.value)
            return relay
        hook("watchdog.told")
        for connection in list(self._attached.values()):
            connection.send(Tag.SUPERVISOR, raw)
        if isinstance(said, Told):
            self.connection_state(True)
            self.sweep()
        return relay

    def connection_state(self, connected: bool, kind: str = "", reason: str = "") -> None:
        """Tell the members whether the supervisor is heard; `kind` names an error that trying again does not mend."""
        state = json.dumps({"connected": connected, "kind": kind, "reason": reason[:1000]}).encode()
        if state == self._connection_state:
            return
        self._connection_state = state
        for connection in list(self._attached.values()):
            connection.send(Tag.CONNECTION, state)

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fault of ours: go, and let a member start a fresh watchdog, rather than guard with half a memory."""
        loop.default_exception_handler(context)
        self.done.set()

    async def close(self) -> None:
        """Say the last words, close everything."""
        self.close_listener()
        await self.uplink.close(_LAST_WORDS)
        self.movers.close(self._orderly)
        for connection in list(self._connections):
            connection.close("the watchdog goes")
        for name in list(self._pidfds):
            self._unwatch(name)
        self.stock.close()


def run(settings: dict[str, Any], lock: Lock) -> None:
    """Serve until there is nothing to guard. Blocks; the caller is a process of its own. lock: the host's, signed; it is
    given back as soon as this watchdog listens."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("websockets").setLevel(logging.WARNING)
    serviceable()
    asyncio.run(_serve(settings, lock))


async def _serve(settings: dict[str, Any], lock: Lock) -> None:
    service = Service(settings, Deadlines(**settings["deadlines"]))
    service.loop.set_exception_handler(service.failed)
    hook("watchdog.forked")
    # Before anybody can read who we are: whoever drains the host sends SIGTERM to each new watchdog at once.
    service.loop.add_signal_handler(signal.SIGTERM, service.drain)
    service.listen()
    lock.clear()
    lock.release()
    uplink = asyncio.create_task(service.uplink.run())
    waiting = asyncio.create_task(service.done.wait())
    try:
        await asyncio.wait({uplink, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if uplink.done():
            uplink.result()
    finally:
        await service.close()
        for task in (uplink, waiting):
            task.cancel()
        await asyncio.gather(uplink, waiting, return_exceptions=True)
