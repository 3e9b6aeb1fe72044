"""A watchdog's end of a member's or mover's connection: who it is, what it may say when. Garbage ends this connection only."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import ValidationError

from elastic_reshard.arena.channel import Message, close_all
from elastic_reshard.errors import PeerLost, ProtocolError
from elastic_reshard.log import logger
from elastic_reshard.mover.status import StatusReader
from elastic_reshard.protocol.hooks import hook
from elastic_reshard.protocol.ids import PROTOCOL
from elastic_reshard.protocol.messages import Statement
from elastic_reshard.protocol.wire import (
    STRANGER_LIMIT,
    Arena,
    Tag,
    Wire,
    arena_of,
    credentials,
    proof,
    proves,
    words_of,
)
from elastic_reshard.watchdog.hosting import Hosting, Wakes

__all__ = ["Connection", "statement_of"]

_log = logger("watchdog")


def statement_of(raw: bytes | str) -> Statement | None:
    """A member's statement; None if it is none."""
    try:
        return Statement.model_validate_json(raw)
    except ValidationError:
        return None


class Crewing(Protocol):
    """What a mover's connection asks of its watchdog; see `movers.Movers`."""

    def attach(self, connection: Connection, said: dict[str, Any], page: StatusReader) -> str: ...
    def closed(self, connection: Connection) -> None: ...
    def reported(self, connection: Connection, payload: bytes) -> None: ...


class Serving(Hosting, Protocol):
    """What a connection asks of its watchdog; see `service.Service`."""

    @property
    def uplink(self) -> Wakes: ...
    @property
    def movers(self) -> Crewing: ...
    def attach(self, connection: Connection, statement: Statement, raw: bytes) -> str: ...
    def closed(self, connection: Connection) -> None: ...
    def ended(self, name: str, how: str) -> None: ...
    def offer(self, connection: Connection, arena: Arena, fds: Sequence[int]) -> None: ...
    def window(self, member: str, fd: int) -> None: ...
    def drop(self, arenas: list[str]) -> None: ...
    def sweep(self) -> None: ...


class Connection:
    """One connection, from its first byte to its end. member: its id once a member has attached, mover: a mover's; else ""."""

    def __init__(self, service: Serving, sock: socket.socket) -> None:
        self.service = service
        self.who = credentials(sock)
        self.wire = Wire(sock, STRANGER_LIMIT)
        self.member = self.mover = ""
        self._url = ""  # where it was told that the supervisor is
        self._born = service.loop.time()
        self._nonce = secrets.token_hex(16)
        self._proved = False
        self._writing = False

    def greet(self) -> None:
        """Say who we are; refuse other users and members that the kernel cannot name to us."""
        self.service.loop.add_reader(self.wire.fileno(), self._readable)
        if self.who.uid != os.getuid():
            self.refuse("Unauthorized", f"user {self.who.uid} may not speak to a watchdog of user {os.getuid()}")
        elif self.who.pid <= 0:
            self.refuse("MembershipError", "it runs in another pid namespace: give it a host label of its own")
        else:
            service = self.service
            hello = {"protocol": PROTOCOL, "job": service.job, "host": service.host, "watchdog": service.instance}
            self.send(Tag.HELLO, json.dumps({**hello, "nonce": self._nonce}).encode())

    def send(self, tag: Tag, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send or keep; a member that does not read for too long loses its connection (it may attach again)."""
        if self.wire.fileno() < 0:
            return
        if not self.wire.send(tag, payload, fds):
            self.close("it does not read what it is told")
        elif self.wire.pending and not self._writing:
            self._writing = True
            self.service.loop.add_writer(self.wire.fileno(), self._writable)

    def beat(self, now: float) -> None:
        """A sign of life, if there is room for it; strangers have only so long to prove who they are."""
        known = self.member or self.mover
        if not known and now - self._born >= self.service.deadlines.connect:
            self.close("it has not attached in time")
        elif known and not self.wire.pending:
            self.send(Tag.BEAT)

    def refuse(self, kind: str, reason: str) -> None:
        """Say why, and end the connection."""
        _log.warning("member.refused", pid=self.who.pid, uid=self.who.uid, reason=reason)
        self.send(Tag.REFUSE, json.dumps({"kind": kind, "reason": reason}).encode())
        self.close(reason)

    def close(self, why: str) -> None:
        """End the connection. May be called again."""
        fd = self.wire.fileno()
        if fd < 0:
            return
        self.service.loop.remove_reader(fd)
        self.service.loop.remove_writer(fd)
        self.wire.close()
        if self.member:
            _log.info("member.detached", member=self.member, why=why)
        self.service.closed(self)

    def drain(self) -> None:
        """Take in all that has arrived."""
        while self.wire.fileno() >= 0:
            self._readable()
            if self.wire.idle:
                return

    def _writable(self) -> None:
        if self.wire.flush():
            self._writing = False
            self.service.loop.remove_writer(self.wire.fileno())

    def _readable(self) -> None:
        try:
            messages = self.wire.receive()
        except PeerLost as lost:
            self.close(str(lost))
            return
        except ProtocolError as garbage:
            self._garbage(str(garbage))
            return
        while messages:
            message = messages.pop(0)
            if self.wire.fileno() < 0:
                close_all(message.fds)
                continue
            try:
                self._take(message)
            except ProtocolError as garbage:
                self._garbage(str(garbage))

    def _garbage(self, what: str) -> None:
        _log.warning("connection.garbage", member=self.member, pid=self.who.pid, what=what[:500])
        self.close(what)

    def _take(self, message: Message) -> None:
        """One frame. Raises ProtocolError for one that has no business here."""
        tag, payload = message.tag, message.payload
        one = len(message.fds) == 1
        if self.member and tag in (Tag.OFFER, Tag.LANDING) and len(message.fds) in (1, 2):
            self._offered(payload, message.fds, tag == Tag.LANDING)
            return
        if one and self.member and tag == Tag.WINDOW:
            self.service.window(self.member, message.fds[0])
            return
        if one and self._proved and not (self.member or self.mover) and tag == Tag.MOVER:
            self._manned(payload, message.fds[0])
            return
        if message.fds:
            close_all(message.fds)
            raise ProtocolError(f"frame {tag} with {len(message.fds)} descriptors")
        if not self._proved and tag == Tag.AUTH:
            self._authenticate(payload)
        elif self.mover and tag == Tag.REPORT:
            self.service.movers.reported(self, payload)
        elif self._proved and not (self.member or self.mover) and tag == Tag.ATTACH:
            self._attach(payload)
        elif self.member:
            self._member_said(tag, payload)
        else:
            raise ProtocolError(f"frame {tag} before it attached")

    def _member_said(self, tag: int, payload: bytes) -> None:
        service, now = self.service, self.service.loop.time()
        match tag:
            case Tag.STATEMENT:
                statement = statement_of(payload)
                if statement is None or statement.member != self.member:
                    raise ProtocolError("a statement that cannot be read, or of another member")
                if service.house.state(self.member, statement, payload):
                    hook("watchdog.stated")
                    service.uplink.wake()
            case Tag.WITHDRAW:
                arena = payload.decode("ascii", "replace")
                if service.house.withdraw(self.member, arena):
                    service.drop([arena])
                    service.sweep()
            case Tag.SETTLED:
                service.drop(service.house.settled(self.member))
                service.uplink.wake()
            case Tag.LEFT:
                service.ended(self.member, "left")
            case _:
                raise ProtocolError(f"a frame {tag}, at {now:.3f}, that members do not send")

    def _authenticate(self, payload: bytes) -> None:
        said = _strings(payload, "protocol", "nonce", "proof", "url")
        service = self.service
        if said["protocol"] != PROTOCOL:
            self.refuse(
                "JoinRefused",
                f"it speaks protocol {said['protocol']}, the watchdog of host {service.host} speaks {PROTOCOL}; "
                "use one version of elastic_reshard on a host",
            )
            return
        if not proves(said["proof"], service.token, "member", self._nonce, said["nonce"]):
            self.refuse("Unauthorized", f"its token is not that of job {service.job}")
        else:
            self._proved, self._url = True, said["url"]
            self.wire.trust()
            ours = proof(service.token, "watchdog", said["nonce"], self._nonce)
            self.send(Tag.PROVED, json.dumps({"proof": ours}).encode())

    def _attach(self, payload: bytes) -> None:
        statement = statement_of(payload)
        if statement is None:
            raise ProtocolError("an attach that cannot be read")
        if statement.pid != self.who.pid:
            self.refuse("JoinRefused", f"it states process {statement.pid} but is process {self.who.pid}")
            return
        if self._astray(statement.member):
            service = self.service
            self.refuse(
                "JoinRefused",
                f"the watchdog of host {service.host} serves job {service.job} at {service.url}, not at {self._url}; "
                "use that address, or another host label",
            )
            return
        self.member = statement.member
        why = self.service.attach(self, statement, payload)
        if why:
            self.member = ""
            self.refuse("NotAMember" if "has ended" in why else "JoinRefused", why)

    def _astray(self, member: str) -> bool:
        """Whether it wants another supervisor. Only who is new is asked: those that this watchdog or its predecessor has served
        (and movers) came by an address at which the supervisor may be no more."""
        house, address = self.service.house, self.service.address
        if member in house.members or member in house.expected or self._url in address.known:
            return False
        return not (address.look() and self._url == address.url)

    def _manned(self, payload: bytes, fd: int) -> None:
        page = StatusReader(fd)
        try:
            said = _strings(payload, "mover", "member", "transfer")
        except ProtocolError:
            page.close()
            raise
        self.mover = said["mover"]
        why = self.service.movers.attach(self, said, page)
        if why:
            self.mover = ""
            self.refuse("NotAMember", why)

    def _offered(self, payload: bytes, fds: Sequence[int], landing: bool) -> None:
        try:
            arena = arena_of(payload)
            if landing and arena.owner != self.member:
                raise ProtocolError(f"a landing arena of {arena.owner} offered by {self.member}")
        except ProtocolError:
            close_all(fds)
            raise
        self.service.offer(self, arena, fds)


def _strings(payload: bytes, *names: str) -> dict[str, Any]:
    said = words_of(payload)
    if set(said) != set(names):
        raise ProtocolError(f"words that are not {names}")
    if not all(isinstance(said[name], str) for name in names if name != "protocol"):
        raise ProtocolError("words of the wrong kind")
    return said
