"""The processes of a soak's job: started, found, started again. As an orchestrator does, it knows pids and names."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from chaos import plants, players
from chaos.relay import Relay
from elastic_reshard.protocol.deadlines import Deadlines, Policies
from elastic_reshard.protocol.processes import started
from elastic_reshard.supervisor.server import Options
from elastic_reshard.watchdog import runtime as watchdogs
from tests import processes

__all__ = ["HOSTS", "JOB", "Cast", "Player", "Seat", "state_of"]

JOB, TOKEN = "soak", "the-token-of-the-soak"
# Orphans are kept as long as an orchestrator mostly takes to bring a host back.
DEADLINES = Deadlines(orphan_hold=6.0)
POLICIES = Policies(late_after=3.0, gather_window=2.0, install=8.0)
CELL = 1 << 14
_PRELOAD = ["torch", "torch.distributed.tensor", "chaos.players", "elastic_reshard.supervisor.api"]


@dataclass(frozen=True)
class Seat:
    """A member's place."""

    name: str
    group: str
    size: int
    rank: int
    role: str
    host: str


def _seats() -> Iterator[Seat]:
    for rank, host in enumerate("aab"):
        yield Seat(f"trainer-{rank}", "trainer", 3, rank, "source", host)
    for group, hosts in (("engine0", "cc"), ("engine1", "bd"), ("engine2", "d")):
        for rank, host in enumerate(hosts):
            yield Seat(f"{group}-{rank}", group, len(hosts), rank, "destination", host)


SEATS = tuple(_seats())
HOSTS = tuple(sorted({seat.host for seat in SEATS}))


@dataclass(eq=False)
class Player:
    """One process that the soak started."""

    name: str
    process: Any
    pipe: Connection
    seat: Seat | None = None
    id: str = ""  # of the member, once it has joined
    ready: bool = False  # it waits for a word
    began: float = field(default_factory=time.monotonic)
    start: int = 0
    term: int = 0

    def __post_init__(self) -> None:
        self.pid: int = self.process.pid
        self.start = started(self.pid)

    @property
    def alive(self) -> bool:
        """Frozen ones too."""
        return self.process.exitcode is None

    def close(self) -> int:
        """End it, whatever it does; its exit status."""
        self.process.kill()
        self.process.join()
        code = int(self.process.exitcode)
        self.process.close()
        self.pipe.close()
        return code


class Cast:
    """Everybody. One thread."""

    def __init__(self, folder: Path, soak: str, plant: str) -> None:
        processes._context.set_forkserver_preload(_PRELOAD)
        self.folder, self.runtime = folder, folder / "run"
        self.runtime.mkdir(mode=0o700)
        self.records = folder / "records"
        self.records.mkdir()
        self.injected = plants.Injected(soak, str(folder), plant)
        self.members: dict[str, Player] = {}
        self.supervisor: Player | None = None
        self.former: list[Player] = []  # supervisors that were replaced and have not ended
        self.relay = Relay()
        self.port = 0
        self._starts = 0

    # -- what the orchestrator starts

    def start(self, seat: Seat) -> Player:
        """A process for a seat, which joins."""
        path, pipe, theirs = self._new(seat.name)
        part = players.Part(
            seat.name, seat.group, seat.size, seat.rank, seat.role, seat.host, self.relay.url, TOKEN, str(self.runtime), path,
            self.injected, plants.environment(self.injected),
        )  # fmt: skip
        run = players.trainer if seat.role == "source" else players.engine
        process = processes._context.Process(target=run, args=(theirs, part))
        process.start()
        theirs.close()
        made = self.members[seat.name] = Player(seat.name, process, pipe, seat)
        return made

    def start_supervisor(self) -> Player:
        """On the journal, behind the address that everybody knows; see `listen`."""
        path, pipe, theirs = self._new("supervisor")
        options = Options(
            job=JOB, journal=self.folder / "journal.sqlite", token=TOKEN, policies=POLICIES, deadlines=DEADLINES,
            runtime=self.runtime, cell=CELL,
        )  # fmt: skip
        process = processes._context.Process(target=players.supervisor, args=(theirs, options, path, self.injected))
        process.start()
        theirs.close()
        self.supervisor = Player("supervisor", process, pipe)
        return self.supervisor

    def listen(self) -> bool:
        """Whether the supervisor has just said where it listens: it is reached from now on."""
        found = self.supervisor
        if found is None or found.ready or not found.pipe.poll():
            return False
        try:
            url, found.term = found.pipe.recv()
        except (EOFError, ConnectionResetError):
            return False
        found.ready = True
        self.port = int(url.rpartition(":")[2])
        self.relay.to(self.port)
        return True

    def _new(self, name: str) -> tuple[str, Connection, Connection]:
        self._starts += 1
        ours, theirs = processes._context.Pipe()
        return str(self.records / f"{name}.{self._starts}.jsonl"), ours, theirs

    # -- what the job started by itself

    def watchdog(self, host: str) -> Any:
        """The host's, frozen or not; None if there is none."""
        return watchdogs.running(JOB, host, self.runtime)

    def movers(self, host: str) -> dict[str, tuple[int, int]]:
        """(pid, start) by member, of those that live."""
        record = self.watchdog(host)
        hands = record.movers.values() if record is not None else ()
        return {h.member: (h.pid, h.start) for h in hands if h.start and watchdogs.started(h.pid) == h.start}

    def nursery(self) -> tuple[int, int] | None:
        """(pid, start) of the process from which movers are forked."""
        spawned = self.spawned()
        parents = {pid: _stat(pid)[1] for pid in spawned}
        for pid, (command, start) in spawned.items():
            if "elastic_reshard.mover" in command and parents[pid] not in spawned:
                forked = [p for p, parent in parents.items() if parent == pid]
                if forked or not self._is_mover(pid):
                    return pid, start
        return None

    def _is_mover(self, pid: int) -> bool:
        return any(pid == mover for host in HOSTS for mover, _ in self.movers(host).values())

    def spawned(self) -> dict[int, tuple[str, int]]:
        """(command, start) by pid of all living processes that members started by exec, and of what these forked."""
        mark, found = f'"soak": "{self.injected.soak}"'.encode(), {}
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                if mark in Path(f"/proc/{name}/environ").read_bytes():
                    command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    begun = started(int(name))
                    if begun:
                        found[int(name)] = (command.strip(), begun)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    # -- the end

    def close(self) -> None:
        """End everything that this soak started, by its pid."""
        for player in [*self.members.values(), *self.former, self.supervisor]:
            if player is not None:
                player.close()
        self.members.clear()
        self.former.clear()
        self.supervisor = None
        self.relay.__exit__(None, None, None)
        for pid, (_, begun) in self.spawned().items():
            send(pid, begun, signal.SIGKILL)


def send(pid: int, begun: int, what: signal.Signals) -> bool:
    """A signal to the very process that started then; whether it was there."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if started(pid) != begun:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, what)
            return True
        return False
    finally:
        os.close(pidfd)


def _stat(pid: int) -> tuple[str, int]:
    """(state, parent)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return fields[0], int(fields[1])


def state_of(pid: int) -> str:
    """Of a process, as /proc says it: T stopped, X gone."""
    return _stat(pid)[0]
