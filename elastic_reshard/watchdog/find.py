"""A member's way to its host's watchdog: find it, prove who one is, start it if there is none, replace it if it is lost.

Whoever starts or replaces holds the host's lock, and looks again when it has it: two at once make one watchdog.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from elastic_reshard.arena.channel import Message
from elastic_reshard.errors import JoinRefused, MembershipError, NotAMember, PeerLost, ProtocolError, ReshardError
from elastic_reshard.errors import Unauthorized as _Unauthorized
from elastic_reshard.log import logger
from elastic_reshard.protocol.hooks import hook
from elastic_reshard.protocol.ids import PROTOCOL
from elastic_reshard.protocol.wire import Tag, Wire, credentials, proof, proves, words_of
from elastic_reshard.watchdog.patience import Patience
from elastic_reshard.watchdog.runtime import Lock, condemn, end_process, read_record, spent
from elastic_reshard.watchdog.start import HostConfig, start

__all__ = ["Finder", "Found", "refusal"]

_log = logger("link")
_LOOK: Final = 0.01  # seconds between looks while somebody starts a watchdog
_TURN: Final = 0.1  # longest wait without a look at whether we are still to go on


class Found(NamedTuple):
    """A watchdog that has proved itself, on a connection of its own. Whoever holds it closes both."""

    wire: Wire
    watchdog: str
    pid: int
    pidfd: int

    def close(self) -> None:
        """Let go of it."""
        self.wire.close()
        os.close(self.pidfd)


class _Suspect(NamedTuple):
    """A process at the host's socket that does not answer."""

    pid: int
    pidfd: int
    why: str


class _Silent(PeerLost):
    """It is there and does not answer; never leaves this file."""


def refusal(payload: bytes) -> ReshardError:
    """The error that a REFUSE or a CONNECTION frame names."""
    try:
        said = words_of(payload)
        kind, reason = str(said["kind"]), str(said["reason"])
    except (ProtocolError, KeyError):
        return ProtocolError("the watchdog refused this member in words that cannot be read")
    known = {error.__name__: error for error in (_Unauthorized, JoinRefused, NotAMember, MembershipError)}
    return known.get(kind, JoinRefused)(f"refused: {reason}")


class Finder:
    """Finds the watchdog of a host. One thread uses it. stopping: asked every tenth of a second."""

    def __init__(self, config: HostConfig, stopping: Callable[[], bool]) -> None:
        self.config = config
        self.reason = "no attempt yet"
        self._paths = config.paths
        self._stopping = stopping
        self._locked_since: float | None = None
        self._starting: tuple[tuple[int, int] | None, int] = None, 0  # who starts one, and what CPU it has used
        self._starts = 0
        self._deaf = False  # the last one dialled took nobody in, all the time

    def find(self, lost: Found | None = None, why: str = "") -> Found | None:
        """A watchdog that answers, started if need be; None if it was told to stop. Blocks until then.

        lost: one that is not to be trusted any more, because of `why`: killed with proof of death, if it is still the
        host's. Raises Unauthorized, JoinRefused, MembershipError."""
        try:
            return self._find(lost, why)
        except OSError as error:  # too many open files, a full disk: it may pass
            raise MembershipError(
                f"this process cannot get to the watchdog of host {self.config.host}: {error}; look at its limits, and at the "
                f"disk of {self._paths.base}"
            ) from error

    def _find(self, lost: Found | None, why: str) -> Found | None:
        suspect = _Suspect(lost.pid, os.dup(lost.pidfd), why) if lost is not None else None
        try:
            while not self._stopping():
                self.config = self.config.followed()
                found = self._look() if suspect is None else None
                if isinstance(found, Found):
                    self._starts, self._locked_since = 0, None
                    return found
                suspect = suspect or found
                if self._take_place(suspect) and suspect is not None:
                    os.close(suspect.pidfd)
                    suspect = None
            return None
        finally:
            if suspect is not None:
                os.close(suspect.pidfd)

    def _look(self) -> Found | _Suspect | None:
        sock = self._dial()
        if sock is None:
            return None
        pid = credentials(sock).pid
        wire = Wire(sock, room=sys.maxsize)  # what a member offers is its own measure
        keep = False
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            wire.close()
            return None
        try:
            watchdog = self._prove(wire)
            keep = True
            return Found(wire, watchdog, pid, pidfd)
        except _Silent:
            keep = True
            wire.close()
            return _Suspect(pid, pidfd, "it does not answer")
        except PeerLost as error:
            self.reason = f"it went away: {error}"
            return None
        finally:
            if not keep:
                wire.close()
                os.close(pidfd)

    def _dial(self) -> socket.socket | None:
        """Whoever listens at the host's socket; None if nobody takes us in. Blocks `watchdog_silent` at most."""
        self._deaf = False
        deadlines, where = self.config.deadlines, str(self._paths.sock)
        patience = Patience(deadlines.watchdog_silent, deadlines.watchdog_beat, time.monotonic())
        while True:
            kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            sock, taken = socket.socket(socket.AF_UNIX, kind), False
            try:
                sock.connect(where)
                taken = True
                return sock
            except PermissionError as error:
                raise MembershipError(f"{where} is not for user {os.getuid()}: {error}") from error
            except (FileNotFoundError, ConnectionError) as error:
                self.reason = f"nobody listens at {where} ({error})"
                return None
            except BlockingIOError:  # a full backlog: many who ask, or it is frozen
                self.reason = f"nobody is taken in at {where}: too many wait"
            finally:
                if not taken:
                    sock.close()
            self._deaf = patience.silent(time.monotonic())
            if self._deaf or self._stopping():
                return None
            patience.due(time.monotonic(), _LOOK)
            time.sleep(_LOOK)

    def _prove(self, wire: Wire) -> str:
        """Both sides show that they hold the token; the watchdog's instance."""
        config, mine = self.config, secrets.token_hex(16)
        hello = _read(self._await(wire, Tag.HELLO))
        if hello.get("protocol") != PROTOCOL:
            raise JoinRefused(
                f"the watchdog of host {config.host} speaks protocol {hello.get('protocol')}, this process {PROTOCOL}; "
                "use one version of elastic_reshard on a host"
            )
        theirs = str(hello.get("nonce"))
        said = {"protocol": PROTOCOL, "url": config.url, "nonce": mine}
        wire.send(Tag.AUTH, json.dumps({**said, "proof": proof(config.token, "member", theirs, mine)}).encode())
        proved = _read(self._await(wire, Tag.PROVED)).get("proof")
        if not proves(proved, config.token, "watchdog", mine, theirs):
            raise _Unauthorized(f"whoever listens at {self._paths.sock} does not hold the token of job {config.job}")
        return str(hello.get("watchdog"))

    def _await(self, wire: Wire, tag: Tag) -> bytes:
        deadlines = self.config.deadlines
        patience = Patience(deadlines.watchdog_silent, deadlines.watchdog_beat, time.monotonic())
        poll = select.poll()
        poll.register(wire.fileno(), select.POLLIN)
        while True:
            patience.due(time.monotonic(), _TURN)
            poll.poll(_TURN * 1000)
            for message in wire.receive():
                return _payload(message, tag)
            if self._stopping():
                raise PeerLost("told to stop")
            if patience.silent(time.monotonic()):
                raise _Silent("it does not answer")

    def _take_place(self, suspect: _Suspect | None) -> bool:
        """Kill the suspect, start a watchdog; whether the suspect is not the host's watchdog any more. Never waits long:
        if somebody else is about to do it, look again later."""
        hook("link.missing")
        self._paths.make()
        lock = Lock(self._paths.lock)
        if not lock.take():
            self._wait_for(lock)
            return False
        self._locked_since = None
        try:
            sock = self._dial()
            if sock is not None:
                pid = credentials(sock).pid
                sock.close()
                if suspect is None or pid != suspect.pid:
                    time.sleep(_LOOK)  # somebody has been faster, or it is there and has no time for us
                    return True
            elif self._stopping():
                return False
            if suspect is not None:
                self._condemn(suspect)
            if self._deaf:
                self._condemn_deaf()
            hook("link.locked")
            if self._starts:
                # The last one did not live to listen: not in a hurry, this is somebody's CPU.
                time.sleep(min(0.1 * 2**self._starts, 1.0))
                self.reason = f"the watchdog ended while it was starting; its log is {self._paths.log}{self._log_end()}"
                _log.error("watchdog.start_failed", host=self.config.host, starts=self._starts, why=self.reason)
            self._starts += 1
            began = time.monotonic()
            start(self.config, lock)
            _log.info("watchdog.started", host=self.config.host, seconds=round(time.monotonic() - began, 3))
            return True
        finally:
            lock.release()

    def _condemn(self, suspect: _Suspect) -> None:
        within = self.config.deadlines.proof_of_death
        _log.warning("watchdog.condemned", host=self.config.host, pid=suspect.pid, why=suspect.why)
        if not condemn(suspect.pidfd, within):
            raise MembershipError(
                f"the watchdog of host {self.config.host} (process {suspect.pid}) was killed because {suspect.why}, but its "
                f"end was not seen in {within} s; it hangs in the kernel: use another host label, or restart the machine"
            )

    def _condemn_deaf(self) -> None:
        """One that nobody can connect to is named by its record."""
        record = read_record(self._paths.record)
        if record is None or not record.alive:
            return
        try:
            pidfd = os.pidfd_open(record.pid)
        except ProcessLookupError:
            return
        try:
            if record.alive:  # as before it was opened
                self._condemn(_Suspect(record.pid, pidfd, "it takes nobody in"))
        finally:
            os.close(pidfd)

    def _wait_for(self, lock: Lock) -> None:
        """Somebody else starts a watchdog; one that hangs while starting is ended: it uses no CPU. One that is slow is not."""
        now = time.monotonic()
        holder = lock.holder()
        starting = (holder, spent(holder[0]) if holder is not None else 0)
        if self._locked_since is None or starting != self._starting:
            self._locked_since, self._starting = now, starting
        if holder is not None and now - self._locked_since >= self.config.deadlines.connect:
            _log.warning("watchdog.stuck", host=self.config.host, pid=holder[0])
            end_process(*holder, self.config.deadlines.proof_of_death)
            self._locked_since = None
        self.reason = f"somebody else (process {holder[0] if holder else 'unknown'}) is starting the watchdog"
        time.sleep(_LOOK)

    def _log_end(self) -> str:
        try:
            return ": " + self._paths.log.read_text(errors="replace")[-1000:]
        except OSError:
            return ""


def _payload(message: Message, tag: Tag) -> bytes:
    for fd in message.fds:
        os.close(fd)
    if message.tag == Tag.REFUSE:
        raise refusal(message.payload)
    if message.tag != tag or message.fds:
        raise JoinRefused(f"the process at the watchdog's socket says {message.tag} where {tag.name} was due")
    return message.payload


def _read(payload: bytes) -> dict[str, Any]:
    try:
        return words_of(payload)
    except ProtocolError as error:
        raise JoinRefused(f"the process at the watchdog's socket says {error}") from error
