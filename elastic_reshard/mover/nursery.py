"""The nursery: a machine's preloaded forkserver of one job, from which all watchdogs of the job get movers. No torch here.

One process without threads that never touches CUDA. It is started by exec (its settings, the token too, come on stdin),
leaves its starter's process tree, loads what movers need, and listens at a Unix socket in the job's runtime folder. A watchdog
proves that it holds the token, asks for a mover, and gets its pid and pidfd. Movers live on when the nursery dies; the next
watchdog that needs one starts another nursery. It goes when no watchdog has been connected for `linger` seconds, and at
once when the last has said goodbye.

Packets (SOCK_SEQPACKET), JSON: nursery {nonce}, watchdog {nonce, proof}, nursery {proof}; then {fork: Birth} answered by
{pid, start} with one descriptor or {error}; {bye: true} is answered by the end of the connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from elastic_reshard.arena.channel import Closing, close_all
from elastic_reshard.errors import MembershipError, PeerLost, Unauthorized
from elastic_reshard.log import logger
from elastic_reshard.protocol.processes import Lock, end_process, spent, started
from elastic_reshard.protocol.wire import credentials, proof, proves

__all__ = ["ANSWER", "PRELOAD", "WORK", "Birth", "Born", "Nursery", "NurseryConfig", "hear", "nonce_of"]

_log = logger("nursery")
WORK: Final = "elastic_reshard.mover.work:Worker"
PRELOAD: Final = ("torch", "elastic_reshard.transport", "elastic_reshard.mover.libraries")
_PACKET: Final = 1 << 16
ANSWER: Final = 2.0  # seconds in which a nursery answers; one that does not is frozen, and replaced
_LOADING: Final = 30.0  # seconds without any work in which one that loads is ended by the next starter
_LOOK: Final = 0.02  # seconds between looks while somebody starts one


@dataclass(frozen=True, slots=True)
class NurseryConfig:
    """Which nursery: its files, and what it is started with.

    work: dotted name of what movers do their work with (`mover.process.Work`); preload: modules loaded before the first
    fork. Both are other than the usual only in this package's tests. linger: seconds without a watchdog before it goes.
    """

    job: str
    sock: Path
    lock: Path
    log: Path
    token: str = field(repr=False)
    work: str = WORK
    preload: tuple[str, ...] = PRELOAD
    linger: float = 10.0

    def settings(self, lock: int) -> dict[str, Any]:
        """What the nursery reads on stdin. lock: the descriptor that it inherits."""
        return {
            **asdict(self), "sock": str(self.sock), "lock_path": str(self.lock), "log": str(self.log), "lock": lock,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Birth:
    """A mover to be made: its id, whose it is, at which socket its watchdog listens, which job's supervisor it serves."""

    mover: str
    member: str
    host: str
    sock: str
    url: str
    deadlines: dict[str, float]


class Born(NamedTuple):
    """A mover that was forked. Whoever takes it closes the pidfd. seconds: what the fork took, the asking included."""

    pid: int
    start: int
    pidfd: int
    seconds: float


class _Gone(PeerLost):
    """The nursery is not there, or no longer; silent: it is there and does not answer. Never leaves this file."""

    def __init__(self, message: str, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


class Nursery(Closing):
    """A watchdog's side. One thread at a time, but for `close`. Nothing is kept of it in forked children."""

    def __init__(self, config: NurseryConfig) -> None:
        self._config = config
        self._sock: socket.socket | None = None
        self._locked_since: float | None = None
        self._why = "no attempt yet"
        self._suspect: tuple[int, int] | None = None  # (pid, start) of one that does not answer
        self._starting: tuple[tuple[int, int] | None, int] = None, 0  # who starts one, and what CPU it has used
        self._starts = 0
        self._closed = threading.Event()
        super().__init__()

    def warm(self, deadline: float) -> None:
        """Have a nursery that listens, started if there is none. Blocks until `deadline` (time.monotonic), 3 s when it has to
        be started. Raises MembershipError."""
        while self._sock is None:
            if self._closed.is_set() or time.monotonic() >= deadline:
                raise MembershipError(
                    f"no nursery of job {self._config.job} was there in time ({self._why}); its log is {self._config.log}"
                )
            if self._suspect is not None or not self._answers():
                self._start(deadline)

    def fork(self, birth: Birth, deadline: float) -> Born:
        """A new mover. Blocks until `deadline` (time.monotonic); 0.03 s when the nursery is there.

        Raises MembershipError when none could be made in time."""
        while True:
            self.warm(deadline)
            began = time.monotonic()
            try:
                said, fds = self._ask({"fork": asdict(birth)})
            except _Gone as gone:  # the fork may have been done: such a mover comes to its watchdog by itself
                self._doubt(gone)
                self._hang_up()
                continue
            if len(fds) == 1 and "pid" in said:
                return Born(int(said["pid"]), int(said["start"]), fds[0], time.monotonic() - began)
            close_all(fds)
            raise MembershipError(f"the nursery of job {self._config.job} could not fork a mover: {said.get('error')}")

    def close(self, goodbye: bool = False) -> None:
        """Hang up; goodbye: tell it that this watchdog needs it no more, or clean up after one that is dead. Any thread; a call
        that waits in another ends soon."""
        self._closed.set()
        try:
            if goodbye and self._sock is None:
                self._sock = self._dial()  # a predecessor's
            if goodbye and self._sock is not None:
                self._sock.send(json.dumps({"bye": True}).encode())
        except (_Gone, Unauthorized, OSError) as error:
            _log.debug("nursery.no_goodbye", why=str(error))
            self._clean_up()
        self._hang_up()

    def _clean_up(self) -> None:
        """Remove the files of a nursery that is dead, if nobody starts another. Returns at once."""
        lock = Lock(self._config.lock)
        if not self._config.lock.exists() or not lock.take():
            return
        try:
            if self._listener() is None:
                for path in (self._config.sock, self._config.log):
                    path.unlink(missing_ok=True)
                lock.remove()
                with contextlib.suppress(OSError):  # watchdogs of the job
                    self._config.lock.parent.rmdir()
        finally:
            lock.release()

    # -- finding it

    def _hang_up(self) -> None:
        if self._sock is not None:
            sock, self._sock = self._sock, None
            sock.close()

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        sock.settimeout(ANSWER)
        try:
            sock.connect(str(self._config.sock))
        except OSError as error:
            sock.close()
            raise _Gone(f"nobody listens at {self._config.sock} ({error})") from error
        return sock

    def _listener(self) -> tuple[int, int] | None:
        """(pid, start) of the process at the socket."""
        try:
            sock = self._connect()
        except _Gone:
            return None
        with sock:
            pid = credentials(sock).pid
        return pid, started(pid)

    def _answers(self) -> bool:
        """Whether there is a connection now, to a nursery that has proved itself."""
        try:
            self._sock = self._dial()
        except _Gone as gone:
            self._doubt(gone)
            return False
        self._starts = 0
        return True

    def _doubt(self, gone: _Gone) -> None:
        self._why = str(gone)
        self._suspect = self._listener() if gone.silent else None

    def _dial(self) -> socket.socket:
        sock, mine = self._connect(), secrets.token_hex(16)
        keep = False
        try:
            theirs = nonce_of(_answer(sock)[0])
            sock.send(
                json.dumps({"nonce": mine, "proof": proof(self._config.token, "watchdog", theirs, mine)}).encode()
            )
            said = _answer(sock)[0]
            if not proves(said.get("proof"), self._config.token, "nursery", mine, theirs):
                raise Unauthorized(
                    f"the nursery at {self._config.sock} is of another token ({said.get('refused', 'it proves another')}); "
                    "a job of one name on one machine has one token: give this job another name, or end the other one"
                )
            keep = True
            return sock
        except OSError as error:
            raise _Gone(f"the nursery ended ({error})") from error
        finally:
            if not keep:
                sock.close()

    def _ask(self, what: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        assert self._sock is not None
        try:
            self._sock.send(json.dumps(what).encode())
            return _answer(self._sock)
        except OSError as error:
            raise _Gone(f"the nursery ended ({error})") from error

    # -- starting it

    def _start(self, deadline: float) -> None:
        """End one that is there and does not answer, start another; wait a moment if somebody else is at it."""
        lock = Lock(self._config.lock)
        if not lock.take():
            self._wait_for(lock)
            return
        self._locked_since = None
        try:
            there, suspect = self._listener(), self._suspect
            self._suspect = None
            if there is not None and there != suspect and self._answers():
                return  # somebody has been faster
            if there is not None and there in (suspect, self._suspect):
                _log.warning("nursery.condemned", job=self._config.job, pid=there[0], why=self._why)
                end_process(*there, ANSWER)
            self._suspect = None
            if self._starts:
                # The last one did not live to listen: not in a hurry, this is somebody's CPU.
                self._closed.wait(min(0.1 * 2**self._starts, 2.0, max(0.0, deadline - time.monotonic())))
                self._why = f"it ended while it was loading: see {self._config.log}"
            self._starts += 1
            _exec(self._config, lock)
        finally:
            lock.release()

    def _wait_for(self, lock: Lock) -> None:
        now = time.monotonic()
        holder = lock.holder()
        starting = (holder, spent(holder[0]) if holder is not None else 0)
        if self._locked_since is None or starting != self._starting:
            self._locked_since, self._starting = now, starting
        if holder is not None and now - self._locked_since >= _LOADING:
            _log.warning("nursery.stuck", job=self._config.job, pid=holder[0])
            end_process(*holder, ANSWER)
            self._locked_since = None
        self._why = f"process {holder[0] if holder else 'unknown'} is starting it"
        self._closed.wait(_LOOK)


def _answer(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    try:
        return hear(sock)
    except TimeoutError as error:
        raise _Gone(f"the nursery does not answer in {ANSWER} s", silent=True) from error


def hear(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One packet. OSError if none comes in time, or none that makes sense."""
    data, fds, _, _ = socket.recv_fds(sock, _PACKET, 4, socket.MSG_CMSG_CLOEXEC)
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        close_all(fds)
        raise ConnectionError("it ended" if not data else "it says what cannot be read")
    return said, list(fds)


def nonce_of(said: dict[str, Any]) -> str:
    """The nonce in a packet. OSError if there is none."""
    nonce = said.get("nonce")
    if not isinstance(nonce, str):
        raise ConnectionError("it greets without a nonce")
    return nonce


def _exec(config: NurseryConfig, lock: Lock) -> None:
    """Start the process; the lock is its own from then on, until it listens. Returns when it has left our tree."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # numpy's BLAS would start threads when it is loaded, and a process with threads must not fork.
    env = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "elastic_reshard.mover", config.job]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=(lock.fd,),
            env=env, cwd="/",
        )  # fmt: skip
    except OSError as error:
        raise MembershipError(f"the nursery of job {config.job} cannot be started ({command[0]}): {error}") from error
    with process:
        try:
            _, said = process.communicate(json.dumps(config.settings(lock.fd)).encode(), _LOADING)
        except subprocess.TimeoutExpired as error:
            process.kill()
            lock.close()  # it may have left before
            raise MembershipError(f"the nursery of job {config.job} did not get going in {_LOADING} s") from error
    if process.returncode:
        raise MembershipError(
            f"the nursery of job {config.job} could not start: {said.decode(errors='replace').strip()[-2000:]}"
        )
    lock.close()
