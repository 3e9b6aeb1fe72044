"""A small world for watchdogs: a stand-in supervisor, links in this process, members in processes of their own."""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.docs import MemberDoc, MemberState, PublicationDoc, TransferDoc
from elastic_reshard.protocol.ids import incarnation, member_id
from elastic_reshard.protocol.messages import Beat, Ended, GroupSpec, Hello, Stated, Statement, read_up
from elastic_reshard.protocol.view import Farewell, Heard, Told
from elastic_reshard.watchdog.link import HostConfig, HostLink
from elastic_reshard.watchdog.runtime import Paths, Record, end_process, running

TOKEN = "secret-of-the-job"
JOB, HOST = "job", "a"
SOON = 5.0


def until(what: Callable[[], Any], within: float = SOON, why: str = "") -> Any:
    """Wait for a condition; its value. Fails when time is over."""
    deadline = time.monotonic() + within
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {within} s: {why or what}"
        time.sleep(0.005)


def open_files(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


class StandIn:
    """Speaks as a supervisor does: a snapshot after Hello, members it heard of are LIVE, Heard for each statement."""

    def __init__(self, token: str = TOKEN) -> None:
        self.token = token
        self.term, self.revision = 1, 1
        self.instance = "i1"
        self.members: dict[str, MemberDoc] = {}
        self.publications: dict[str, PublicationDoc] = {}
        self.transfers: dict[str, TransferDoc] = {}
        self.ups: list[tuple[float, Any]] = []
        self.reading = threading.Event()
        self.reading.set()
        self.answering = True
        self.lock = threading.RLock()
        self._connections: list[ServerConnection] = []
        self._server: Server | None = None
        self.port = 0
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        """Listen (again, at the same port)."""
        self._server = serve(
            self._serve, "127.0.0.1", self.port, process_request=self._check, compression=None, close_timeout=0.1
        )
        self.port = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def down(self) -> None:
        """As if killed: connections and the listening socket are gone."""
        self.reading.set()
        with self.lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_RDWR)
        if self._server is not None:
            self._server.shutdown()
            self._thread.join()
            self._server = None
        until(lambda: not self._connections, why="connections of the stand-in end")

    def _check(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "no\n")
        if request.path.startswith("/v1/layouts/"):
            return connection.respond(HTTPStatus.OK, json.dumps({"tensors": {}, "id": request.path.rpartition("/")[2]}))
        return None if request.path == "/v1/host" else connection.respond(HTTPStatus.NOT_FOUND, "no\n")

    def _serve(self, connection: ServerConnection) -> None:
        with self.lock:
            self._connections.append(connection)
        try:
            while True:
                self.reading.wait()
                raw = connection.recv()
                with self.lock:
                    said = read_up(raw)
                    self.ups.append((time.monotonic(), said))
                    if self.answering:
                        self._answer(connection, said)
        except (ConnectionClosed, OSError):
            pass
        finally:
            with self.lock:
                self._connections.remove(connection)
            connection.socket.close()

    def _answer(self, connection: ServerConnection, said: Any) -> None:
        match said:
            case Hello():
                for statement in said.statements:
                    self._know(statement)
                connection.send(self.snapshot().model_dump_json())
                self.heard({s.member: s.number for s in said.statements}, connection)
            case Stated(statement=statement):
                if self._know(statement):
                    self.tell(members={statement.member: self.members[statement.member]})
                self.heard({statement.member: statement.number}, connection)

    def _know(self, statement: Statement) -> bool:
        if statement.member in self.members:
            return False
        self.members[statement.member] = MemberDoc(
            id=statement.member, group=statement.group.name, rank=0, roles=statement.roles, host=statement.host,
            state=MemberState.LIVE,
        )  # fmt: skip
        return True

    def snapshot(self) -> Told:
        return Told(
            term=self.term, instance=self.instance, base=0, revision=self.revision, membership_epoch=1,
            members=dict(self.members), publications=dict(self.publications), transfers=dict(self.transfers),
        )  # fmt: skip

    def tell(self, base: int | None = None, **documents: Any) -> None:
        """A delta to all that are connected."""
        with self.lock:
            before = self.revision
            self.revision += 1
            for kind in ("members", "publications", "transfers"):
                kept = getattr(self, kind)
                kept.update(documents.get(kind, {}))
                for gone in [key for key, doc in kept.items() if doc is None and kind != "members"]:
                    del kept[gone]
            self.send(
                Told(term=self.term, instance=self.instance, base=before if base is None else base,
                     revision=self.revision, membership_epoch=1, **documents)
            )  # fmt: skip

    def heard(self, numbers: dict[str, int], connection: ServerConnection) -> None:
        if numbers:
            connection.send(
                Heard(term=self.term, instance=self.instance, revision=self.revision, numbers=numbers).model_dump_json()
            )

    def send(self, said: Told | Heard | Farewell | str) -> None:
        """This, as it is, to all that are connected."""
        with self.lock:
            for connection in self._connections:
                with suppress(ConnectionClosed):
                    connection.send(said if isinstance(said, str) else said.model_dump_json())

    def state_of(self, member: str, state: MemberState) -> None:
        """Tell that a member is in this state."""
        with self.lock:
            self.tell(members={member: self.members[member].model_copy(update={"state": state})})

    def said(self, kind: type, since: float = 0.0) -> list[Any]:
        with self.lock:
            return [m for at, m in self.ups if isinstance(m, kind) and at >= since]

    def hellos(self) -> list[Hello]:
        return self.said(Hello)

    def ended(self, member: str) -> list[Ended]:
        return [m for m in self.said(Ended) if m.member == member]

    def beats(self) -> list[Beat]:
        return self.said(Beat)

    def latest(self, member: str) -> int:
        """The highest number of a statement heard of a member."""
        with self.lock:
            told = [m.statement for m in self.said(Stated)] + [s for m in self.hellos() for s in m.statements]
        return max((s.number for s in told if s.member == member), default=-1)


def statement(member: str, number: int = 1, pid: int | None = None, host: str = HOST, **more: Any) -> Statement:
    return Statement(
        member=member, group=GroupSpec(name=f"g-{member.partition('@')[0]}", size=1, rank=0),
        roles=frozenset({"source"}), host=host, pid=os.getpid() if pid is None else pid, number=number, **more,
    )  # fmt: skip


class Local:
    """A member in this process: its link, and what it heard."""

    def __init__(self, config: HostConfig, name: str = "m", member: str = "") -> None:
        self.member = member or member_id(name, incarnation())
        self.config = config
        self.heard: list[Any] = []
        self.changes = 0
        self.number = 1
        self.link = HostLink(
            config, statement(self.member, host=config.host), hear=self.heard.append, changed=self._change
        )

    def _change(self) -> None:
        self.changes += 1

    def open(self, within: float = 10.0) -> Local:
        self.link.open(time.monotonic() + within)
        return self

    def state(self, **more: Any) -> int:
        self.number += 1
        self.link.state(statement(self.member, self.number, host=self.config.host, **more))
        return self.number

    def offer(self, start: int = 0, count: int = 512) -> str:
        """Offer an arena that holds the numbers from `start` on."""
        arena, fd = memory(start, count)
        self.link.offer(arena, fd, table_of(start, count))
        os.close(fd)
        return arena

    def values(self, arena: str, within: float = SOON) -> list[int]:
        """What is in an arena of this host, by its table, read through a descriptor that must be read-only."""
        held = self.link.arena(arena, time.monotonic() + within)
        try:
            return read(held.fd, held.table)
        finally:
            os.close(held.fd)


def fork_behind_our_back() -> int:
    """As a library in C forks: what Python does in forked children is not done."""
    return int(ctypes.PyDLL(None).fork())


@contextmanager
def bystander(fork: Callable[[], int]) -> Iterator[int]:
    """A forked child that sleeps, with copies of all our descriptors, as a data loader's worker would be."""
    pid = fork()
    if pid == 0:
        while True:
            ctypes.PyDLL(None).pause()
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def memory(start: int, count: int) -> tuple[str, int]:
    fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, b"".join((start + i).to_bytes(8, "little") for i in range(count)))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return uuid.uuid4().hex, fd


def landing(cells: int) -> tuple[str, int, bytes]:
    """An arena with the ledgers of a landing arena and no tensors: (id, read-write descriptor, table)."""
    stride = 4096
    assert 256 + cells <= stride
    fd = os.memfd_create("landing", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2 * stride)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    slots = [{"word": at, "publication": at + 64, "ledger": at + 256, "tensors": {}} for at in (0, stride)]
    said = {"version": 1, "kind": "landing", "cells": cells, "cell": 1 << 20, "slots": slots}
    return uuid.uuid4().hex, fd, json.dumps(said).encode()


def table_of(start: int, count: int) -> bytes:
    return json.dumps({"start": start, "count": count}).encode()


def read(fd: int, table: bytes) -> list[int]:
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    said = json.loads(table)
    with mmap.mmap(fd, 8 * said["count"], prot=mmap.PROT_READ) as mapped:
        found = [int.from_bytes(mapped[8 * i : 8 * i + 8], "little") for i in range(said["count"])]
    assert found == list(range(said["start"], said["start"] + said["count"]))
    return found


class Agent:
    """A member in a process of its own (tests/watchdog/agent.py), told what to do line by line."""

    def __init__(self, config: HostConfig, name: str, mode: str = "plain", hooks: dict[str, Any] | None = None) -> None:
        said = {"url": config.url, "token": config.token, "runtime": str(config.runtime), "host": config.host,
                "deadlines": config.deadlines.to_data(), "name": name, "mode": mode, "work": config.work}  # fmt: skip
        env = {**os.environ, **({"ELASTIC_RESHARD_TEST_HOOKS": json.dumps(hooks)} if hooks else {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.watchdog.agent", json.dumps(said)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            cwd=Path(__file__).parent.parent.parent,
        )  # fmt: skip
        self.member = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def attached(self) -> Agent:
        """Wait until it has opened its link."""
        self.member = self.answer()["member"]
        return self

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"agent ended with {self.process.wait()}"
        return json.loads(line)

    def ask(self, what: str, **more: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Leave in good order if it still can."""
        frozen = Path(f"/proc/{self.process.pid}/stat")
        asleep = frozen.exists() and frozen.read_text().rpartition(")")[2].split()[0] == "T"
        if self.member and self.process.poll() is None and not asleep:
            self.ask("leave")
        self.process.kill()
        with self.process:
            pass


class World:
    """A runtime folder and a stand-in; everything that is made by it is ended by it, and the watchdog must go by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.supervisor = StandIn()
        self.deadlines = Deadlines()
        self.work = ""
        self._locals: list[Local] = []
        self._agents: list[Agent] = []

    def config(self, **changes: Any) -> HostConfig:
        said: dict[str, Any] = {
            "job": JOB, "host": HOST, "url": self.supervisor.url, "token": TOKEN, "runtime": self.folder,
            "deadlines": self.deadlines, "work": self.work,
        }  # fmt: skip
        return HostConfig(**{**said, **changes})

    def local(self, name: str = "m", **changes: Any) -> Local:
        self._locals.append(Local(self.config(**changes), name))
        return self._locals[-1]

    def agent(self, name: str = "far", mode: str = "plain", hooks: dict[str, Any] | None = None) -> Agent:
        self._agents.append(Agent(self.config(), name, mode, hooks))
        return self._agents[-1]

    def running(self) -> Record | None:
        return running(JOB, HOST, self.folder)

    def watchdog(self) -> Record:
        return until(self.running, why="a watchdog runs")

    def paths(self) -> Paths:
        return Paths.of(JOB, HOST, self.folder)

    def freeze(self) -> Record:
        record = self.watchdog()
        os.kill(record.pid, signal.SIGSTOP)
        return record

    def kill(self) -> Record:
        record = self.watchdog()
        assert end_process(record.pid, record.start, 2.0)
        return record

    def log(self) -> str:
        return self.paths().log.read_text() if self.paths().log.exists() else ""

    def end(self) -> None:
        """All leave; no transfer needs what they leave behind."""
        if self.supervisor.transfers:
            self.supervisor.tell(transfers=dict.fromkeys(self.supervisor.transfers))
        while self._agents:
            self._agents.pop().end()
        while self._locals:
            self._locals.pop().link.close()

    def clean_up(self) -> None:
        """After a failure: nothing may stay."""
        record = self.running()
        if record is not None:
            end_process(record.pid, record.start, 2.0)


@contextmanager
def world(folder: Path) -> Iterator[World]:
    made = World(folder)
    try:
        yield made
        made.end()
        until(lambda: made.running() is None and not any(folder.rglob("*")), why="the watchdog goes, and its files")
    except BaseException:
        print(*made.folder.rglob("*"), made.log(), sep="\n")
        raise
    finally:
        made.end()
        made.supervisor.down()
        made.clean_up()
