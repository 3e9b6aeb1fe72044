"""A supervisor that runs: its socket, its thread, its place in the runtime folder, its end."""

from __future__ import annotations

import asyncio
import atexit
import errno
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import uvicorn

from elastic_reshard.errors import Fenced, ProtocolError
from elastic_reshard.protocol import ids, places
from elastic_reshard.protocol.deadlines import Deadlines, Policies
from elastic_reshard.supervisor import core
from elastic_reshard.supervisor.api import make_app
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.calling import CallProtocol
from elastic_reshard.supervisor.hosts import HostProtocol
from elastic_reshard.supervisor.journal import MEMORY, Journal
from elastic_reshard.supervisor.settings import recall

__all__ = ["LARGEST", "Options", "Supervisor"]

# Seconds for the last words to every host.
_FAREWELL: Final = 1.0
# Bytes of a message of a host; as many as its watchdog takes of one of ours.
LARGEST: Final = 64 << 20
# Bytes. The planner takes no less; more would make a landing of one tensor all or nothing.
_LEAST_CELL: Final = 16
_MOST_CELL: Final = 1 << 30


def _told(record: logging.LogRecord) -> bool:
    """Whether uvicorn is to tell of it: not of connections that a supervisor's own end has cut off."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


@dataclass(frozen=True, slots=True)
class Options:
    """How a supervisor is started.

    host, port: where it listens; port 0: a free one. journal: a path; None: one that ends with this process.
    token: None: $ELASTIC_RESHARD_TOKEN, else one is made and kept in the runtime folder. runtime: that folder's path.
    recover_from: with an empty journal: decide nothing until so many members have said what they have.
    cell: bytes of the cells by which weights move between hosts; the same at every start of one job.
    verify: how landed cells are checked: digests of samples, or of every byte. ProtocolError for what cannot work.
    """

    job: str = "job"
    host: str = "127.0.0.1"
    port: int = 0
    journal: str | Path | None = None
    token: str | None = field(default=None, repr=False)
    policies: Policies = field(default_factory=Policies)
    deadlines: Deadlines = field(default_factory=Deadlines)
    runtime: str | Path | None = None
    recover_from: int = 0
    cell: int = 1 << 20
    verify: Literal["sampled", "full"] = "sampled"

    def __post_init__(self) -> None:
        if not _LEAST_CELL <= self.cell <= _MOST_CELL:
            raise ProtocolError(f"cell ({self.cell} bytes) must be {_LEAST_CELL} to {_MOST_CELL} bytes; 1 MiB is usual")
        if self.verify not in ("sampled", "full"):
            raise ProtocolError(f"verify must be 'sampled' or 'full', not {self.verify!r}")


class Supervisor:
    """One running supervisor, in a thread of this process. Any thread may call; use it as a context manager or `close` it.

    url, token, job, term, instance: what it is. Raises ProtocolError if the port, the journal or the runtime folder cannot
    be used; then nothing is left behind.
    """

    def __init__(self, options: Options) -> None:
        self.job, self.instance = options.job, ids.incarnation()
        self._options = options
        self._folder = places.job_folder(options.job, options.runtime)
        self.token, self._given = _token(options, self._folder)
        self._written: dict[str, places.Written] = {}
        self._error: BaseException | None = None
        self._over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._ready, self._done = threading.Event(), threading.Event()
        self._socket = _listen(options.host, options.port)
        try:
            self.url = _url(options.host, self._socket)
            self._journal = Journal.open(options.journal or MEMORY, options.job)
        except BaseException:
            self._socket.close()
            raise
        try:
            self._job = self._begun(options)
        except BaseException:
            self._socket.close()
            self._journal.close()
            raise
        self.term = self._job.term
        self._publish()
        self._thread = threading.Thread(target=self._main, name=f"elastic-reshard-supervisor-{self.job}", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._done.is_set():
            self._thread.join()
            self.wait(0)
        atexit.register(self.close)

    @classmethod
    def local(
        cls,
        job: str = "job",
        port: int = 0,
        *,
        journal: str | Path | None = None,
        token: str | None = None,
        policies: Policies | None = None,
        deadlines: Deadlines | None = None,
        runtime: str | Path | None = None,
        cell: int = 1 << 20,
        verify: Literal["sampled", "full"] = "sampled",
    ) -> Supervisor:
        """A supervisor inside this process, on loopback, for driver scripts; it ends with the process."""
        return cls(
            Options(
                job=job, port=port, journal=journal, token=token, policies=policies or Policies(),
                deadlines=deadlines or Deadlines(), runtime=runtime, cell=cell, verify=verify,
            )
        )  # fmt: skip

    def _begun(self, options: Options) -> core.Job:
        begun = self._journal.begin(self.instance)
        now = time.monotonic()
        job = core.begin(
            options.job, begun.term, self.instance, now, deadlines=options.deadlines, policies=options.policies,
            recover_from=options.recover_from if begun.told is None else 0, cell=options.cell, verify=options.verify,
        )  # fmt: skip
        job = job if begun.told is None else core.restore(job, begun.told, begun.weight_version, now)
        self._requests = begun.requests
        return recall(job, begun.settings, now) if begun.settings is not None else job

    # -- its place

    def _publish(self) -> None:
        if self._given:
            (self._folder / "token").unlink(missing_ok=True)
        else:
            self._written["token"] = places.write_private(self._folder / "token", self.token)
        self._written["url"] = places.write_private(self._folder / "url", self.url)

    def _unpublish(self, over: bool) -> None:
        """A supervisor that will start again finds its token; one whose job is over leaves nothing. What a successor has
        written stays: it may have this one's port, and so its url, before this one has ended."""
        for what, written in self._written.items():
            if what == "url" or over:
                places.take_back(self._folder / what, written)

    # -- its life

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has ended (at most `timeout` seconds): whether it has. Raises what it ended by: Fenced when another
        supervisor took over, ProtocolError when the journal cannot be written."""
        ended = self._done.wait(timeout)
        if ended and self._error is not None:
            raise self._error
        return ended

    def close(self, over: bool = True) -> None:
        """End it, within about two seconds. over: the job has ended, hosts need keep nothing; else it may start again, and
        everybody goes on serving and waits for it. Idempotent."""
        atexit.unregister(self.close)
        if self._thread.is_alive() and self._loop is not None and self._stopping is not None:
            self._over = over
            with suppress(RuntimeError):  # its loop is closed when it has ended by itself meanwhile
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - whatever ended it, `wait` raises it
            self._error = error
        finally:
            self._socket.close()
            self._journal.close()
            self._unpublish(self._over)
            self._done.set()
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        shell = Shell(self._job, self._journal, self._requests)
        config = uvicorn.Config(
            make_app(shell, self.token), lifespan="off", http=CallProtocol, ws=HostProtocol, loop="asyncio", log_config=None,
            access_log=False, ws_max_size=LARGEST, ws_ping_interval=None, ws_per_message_deflate=False,
            timeout_graceful_shutdown=1, server_header=False,
        )  # fmt: skip
        logging.getLogger("uvicorn.error").addFilter(_told)
        server = uvicorn.Server(config)
        shell.record.add(
            "supervisor.started", {"job": self.job, "term": self.term, "instance": self.instance, "url": self.url}
        )
        tasks = [
            asyncio.create_task(shell.run()),
            asyncio.create_task(server.serve(sockets=[self._socket])),
            asyncio.create_task(self._stopping.wait()),
        ]
        self._ready.set()
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = tasks[0].exception() if tasks[0].done() else None
            await self._farewell(shell, error)
        finally:
            shell.stop()
            server.should_exit = True
            await asyncio.wait(tasks[:2])
            tasks[2].cancel()
            failed = [e for task in tasks[:2] if (e := task.exception()) is not None]
            shell.close(flush=not failed)
        if failed:
            raise failed[0]

    async def _farewell(self, shell: Shell, error: BaseException | None) -> None:
        """Last words where there is something to say. A supervisor that will start again only closes its connections;
        members take none but "over" for the end of the job."""
        if error is not None:
            shell.record.add("supervisor.ended", {"reason": str(error), "fenced": isinstance(error, Fenced)})
        if error is None and not self._over:
            return
        text = shell.farewell_text(str(error) if error is not None else "the job is over", over=error is None)
        for feed in list(shell.feeds.values()):
            feed.end(text)
        until = time.monotonic() + _FAREWELL
        while shell.feeds and time.monotonic() < until:
            await asyncio.sleep(0.005)


def _token(options: Options, folder: Path) -> tuple[str, bool]:
    """The token, and whether it was given. A start after another takes the token that was made then."""
    given = options.token or os.environ.get(places.TOKEN_VARIABLE)
    if given is not None:
        if len(given) < 8 or not given.isascii() or not given.isprintable() or " " in given:
            raise ProtocolError("the job's token must be at least 8 printable ASCII characters without blanks")
        return given, True
    try:
        return (folder / "token").read_text().strip() or secrets.token_urlsafe(32), False
    except FileNotFoundError:
        return secrets.token_urlsafe(32), False


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket of our own, so that no port is chosen, freed and then taken by somebody else."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, proto)
    except OSError as error:
        raise ProtocolError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(1024)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise ProtocolError(
                f"port {port} of {host} is taken by another process; choose another, or 0 for a free one"
            ) from error
        raise ProtocolError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return made


def _url(host: str, listening: socket.socket) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return (
        f"http://[{shown}]:{listening.getsockname()[1]}"
        if ":" in shown
        else f"http://{shown}:{listening.getsockname()[1]}"
    )
