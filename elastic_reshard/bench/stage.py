"""A job of real processes that a measuring program commands, kills and counts: a supervisor, groups of members on labelled
hosts, and what they start (watchdogs, the nursery, movers).

One pipe per process. Everything that the job started has ended when the stage is left, whatever happened on it.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from elastic_reshard.bench import census
from elastic_reshard.bench import rank as on
from elastic_reshard.errors import PeerLost, ReshardError, TransferTimeout
from elastic_reshard.layout import ModelLayout
from elastic_reshard.protocol.base import Role
from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.protocol.processes import end_process, started
from elastic_reshard.supervisor.client import SupervisorClient
from elastic_reshard.supervisor.server import Options
from elastic_reshard.watchdog.runtime import VARIABLE, running

__all__ = ["LIMIT", "Actor", "Call", "Gang", "Stage", "patience", "until", "within"]

T = TypeVar("T")
LIMIT = 120.0  # seconds; only catches hangs
_JOB = "bench"
_end: ContextVar[float] = ContextVar("end", default=math.inf)
_GOODBYE = 5.0
PRELOAD = ("torch", "torch.distributed.tensor", "elastic_reshard.bench.rank", "elastic_reshard.supervisor.api")


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """All waits for processes of a stage that this context begins end after so many seconds at most: one that hangs costs the
    measurements after it no more."""
    token = _end.set(min(_end.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _end.reset(token)


def patience(limit: float = LIMIT) -> float:
    """Seconds that a wait may take here."""
    return max(0.0, min(limit, _end.get() - time.monotonic()))


def until(ready: Callable[[], T | None], what: str, limit: float = LIMIT, every: float = 0.001) -> T:
    """Wait until `ready` returns something true; looks each `every` seconds. TransferTimeout, saying what, after `limit`."""
    limit = patience(limit)
    deadline = time.monotonic() + limit
    while not (found := ready()):
        if time.monotonic() > deadline:
            raise TransferTimeout(f"waited {limit:g} s for: {what}")
        time.sleep(every)
    return found


class Call:
    """Something that another process is doing."""

    def __init__(self, actor: Actor, what: str) -> None:
        self._actor, self._what = actor, what

    def done(self, within: float = 0.0) -> bool:
        """Whether it ends within so many seconds."""
        return self._actor.pipe.poll(within)

    def result(self, limit: float = LIMIT) -> Any:
        """Its result. Raises ReshardError with the traceback of what it raised, PeerLost, TransferTimeout."""
        actor, limit = self._actor, patience(limit)
        if not actor.pipe.poll(limit):
            raise TransferTimeout(f"{actor.name} did not end {self._what} in {limit:g} s")
        try:
            ok, value = actor.pipe.recv()
        except (EOFError, ConnectionError):
            raise PeerLost(f"{actor.name} ended in {self._what}; look at the system log") from None
        if not ok:
            raise ReshardError(f"{actor.name} failed in {self._what}; its traceback:\n{value}")
        return value


class Actor:
    """One process, that does one thing at a time: `begin` a function of a module there, whose first argument is its State."""

    def __init__(self, name: str, context: ForkServerContext) -> None:
        self.name = name
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(theirs, name), name=name, daemon=True)
        self.process.start()
        theirs.close()
        self.pid = self.process.pid or 0
        self.id = ""

    def begin(self, fn: Callable[..., Any], *args: Any) -> Call:
        """Call it there; do not wait."""
        self.pipe.send((fn, args))
        return Call(self, fn.__name__)

    def do(self, fn: Callable[..., T], *args: Any) -> T:
        """Call it there and wait."""
        found: T = self.begin(fn, *args).result()
        return found

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def _main(pipe: Connection, name: str) -> None:
    """Do what is asked for until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, name="die-with-parent", daemon=True).start()
    state = on.State(name)
    while True:
        try:
            fn, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = (True, fn(state, *args))
        except BaseException:  # noqa: BLE001 - whatever it was, the parent is told in full
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


class Gang(Sequence[Actor]):
    """A group's processes, by rank, each on its host."""

    def __init__(self, stage: Stage, name: str, role: Role, layout: ModelLayout, hosts: Sequence[str]) -> None:
        self.name, self.role, self.layout, self.hosts = name, role, layout, tuple(hosts)
        self.actors = [stage.actor(f"{name}-{rank}") for rank in range(len(hosts))]

    def __getitem__(self, rank: Any) -> Any:
        return self.actors[rank]

    def __len__(self) -> int:
        return len(self.actors)

    def begin(self, fn: Callable[..., Any], *args: Any) -> list[Call]:
        """Call a function in all."""
        return [actor.begin(fn, *args) for actor in self.actors]

    def do(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """Call a function in all and wait; results by rank."""
        return [call.result() for call in self.begin(fn, *args)]


class Stage:
    """One job. Use it as a context manager. left: what had not gone by itself at its end and was killed."""

    def __init__(self, cell: int = 1 << 20, policies: Policies | None = None) -> None:
        self._cell, self._policies = cell, policies or Policies()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD))
        self._actors: list[Actor] = []
        self._stack = contextlib.ExitStack()
        self.gangs: dict[str, Gang] = {}
        self.supervisor: Actor | None = None
        self.url, self.token, self._port = "", "", 0
        self.left: list[str] = []

    def __enter__(self) -> Self:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.folder.chmod(0o700)
        try:
            self.start_supervisor()
            self.client = self._stack.enter_context(SupervisorClient(self.url, self.token, patience=10.0))
        except BaseException:
            self._close()
            raise
        return self

    def actor(self, name: str) -> Actor:
        """A new process, which ends with the stage."""
        made = Actor(name, self._context)
        self._actors.append(made)
        return made

    def gang(self, name: str, role: Role, layout: ModelLayout, hosts: Sequence[str]) -> Gang:
        """Processes of a group; they have not joined."""
        self.gangs[name] = Gang(self, name, role, layout, hosts)
        return self.gangs[name]

    def join(self, *gangs: Gang) -> None:
        """All of several groups join at the same time."""
        calls = []
        for gang in gangs:
            for rank, actor in enumerate(gang.actors):
                seat = on.Seat(self.url, str(self.folder), self.token, gang.name, len(gang), rank, gang.role,
                               gang.hosts[rank], gang.layout)  # fmt: skip
                calls.append((actor, actor.begin(on.join, seat)))
        for actor, call in calls:
            actor.id = call.result()

    def start_supervisor(self) -> float:
        """Start it, or start it again on the same journal and port; when it was there (time.monotonic)."""
        options = Options(job=_JOB, port=self._port, journal=self.folder / "journal.sqlite", token=self.token or None,
                          runtime=self.folder, cell=self._cell, policies=self._policies)  # fmt: skip
        self.supervisor = self.actor("supervisor")
        self.url, self.token = self.supervisor.do(on.serve, options)
        self._port = int(self.url.rpartition(":")[2])
        return time.monotonic()

    def dismiss(self, gang: Gang) -> None:
        """SIGKILL to a group's processes at once, and their ends."""
        for actor in gang.actors:
            actor.process.kill()
        for actor in gang.actors:
            self._actors.remove(actor)
            actor.close()

    def kill_supervisor(self) -> None:
        """SIGKILL, and its end."""
        assert self.supervisor is not None
        gone, self.supervisor = self.supervisor, None
        self._actors.remove(gone)
        gone.close()

    @property
    def hosts(self) -> list[str]:
        """Labels."""
        return sorted({host for gang in self.gangs.values() for host in gang.hosts})

    def movers(self, host: str | None = None) -> dict[str, int]:
        """Process of each mover that lives, by member, on a host or on all."""
        found = {}
        for label in [host] if host is not None else self.hosts:
            record = running(_JOB, label, self.folder)
            for hand in record.movers.values() if record is not None else ():
                if started(hand.pid) == hand.start:
                    found[hand.member] = hand.pid
        return found

    def processes_of(self, host: str) -> list[int]:
        """Of members, watchdog and movers of a host."""
        record = running(_JOB, host, self.folder)
        members = [actor.pid for gang in self.gangs.values() for label, actor in zip(gang.hosts, gang.actors, strict=True)
                   if label == host]  # fmt: skip
        return [*members, *([record.pid] if record is not None else []), *self.movers(host).values()]

    def living(self) -> dict[str, list[tuple[int, int]]]:
        """Every process of the job by kind, as (pid, start)."""
        found: dict[str, list[tuple[int, int]]] = {}
        for actor in self._actors:
            if at := started(actor.pid):
                found.setdefault("supervisor" if actor is self.supervisor else "members", []).append((actor.pid, at))
        for pid, at, kind in census.started_with(f"{VARIABLE}={self.folder}"):
            found.setdefault(kind, []).append((pid, at))
        return found

    # -- the end

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        """End members, then the job: watchdogs, nursery and movers go by themselves; who does not is killed, and named."""
        try:
            members = [actor for actor in self._actors if actor is not self.supervisor]
            for actor in members:
                actor.close()
                self._actors.remove(actor)
            if self.supervisor is not None:
                with contextlib.suppress(ReshardError, OSError):  # then they are killed below
                    call = self.supervisor.begin(on.stop_serving)
                    if call.done(_GOODBYE):
                        call.result()
            # Whatever `within` says: what does not go by itself was killed too early else.
            deadline = time.monotonic() + _GOODBYE
            while self._others() and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            for actor in self._actors:
                actor.close()
            self._actors.clear()
            for pid, at, kind in self._others():
                self.left.append(f"{kind} {pid}")
                end_process(pid, at, _GOODBYE)
            self._stack.close()

    def _others(self) -> list[tuple[int, int, str]]:
        return list(census.started_with(f"{VARIABLE}={self.folder}"))

    def events(self, after: int = 0) -> Iterator[Any]:
        """The supervisor's events since its start, above a number."""
        while True:
            page = self.client.events(after, 1000)
            yield from page.events
            if not page.events:
                return
            after = page.next
