"""`HostLink.offer_landing`: the frames on the wire, with descriptors, and again for every watchdog that comes."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.messages import GroupSpec, Statement
from elastic_reshard.protocol.wire import Tag, Wire, arena_of
from elastic_reshard.watchdog.find import Found
from elastic_reshard.watchdog.link import HostConfig, HostLink
from tests.watchdog.world import memory, table_of

ME = f"e@{0:016x}"


class Watchdog:
    """The other end of a link: what it was told, in order, and how its descriptors are open."""

    def __init__(self, link: HostLink) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.wire = Wire(theirs)
        self.found = Found(Wire(ours), "w1", os.getpid(), os.pidfd_open(os.getpid()))
        link._attach(self.found)

    def told(self, count: int) -> list[tuple[Tag, str, bool]]:
        """(tag, arena, whether it may be written) of the next frames that carry an arena, or end the attach."""
        found: list[tuple[Tag, str, bool]] = []
        deadline = time.monotonic() + 5
        while len(found) < count:
            assert time.monotonic() < deadline, found
            for message in self.wire.receive():
                arena = ""
                if message.tag in (Tag.OFFER, Tag.LANDING):
                    arena = arena_of(message.payload).arena
                writable = any(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR for fd in message.fds)
                for fd in message.fds:
                    os.close(fd)
                if message.tag != Tag.ATTACH:
                    found.append((Tag(message.tag), arena or message.payload.decode(), writable))
        return found

    def close(self) -> None:
        self.found.close()
        self.wire.close()


@pytest.fixture
def link() -> Iterator[HostLink]:
    config = HostConfig(
        job="job", host="h", url="http://127.0.0.1:9", token="t", runtime=Path("unused"), deadlines=Deadlines()
    )
    said = Statement(
        member=ME,
        group=GroupSpec(name="g", size=1, rank=0),
        roles=frozenset({"destination"}),
        host="h",
        pid=1,
        number=1,
    )
    made = HostLink(config, said, hear=lambda _: None, changed=lambda: None)
    yield made
    made._found = None
    made.close()


def test_a_landing_arena_is_offered_to_be_written_and_to_each_new_watchdog_again(link: HostLink) -> None:
    (source, a), (landing, b) = memory(0, 8), memory(9, 8)
    link.offer(source, a, table_of(0, 8))
    first = Watchdog(link)
    assert first.told(2) == [(Tag.OFFER, source, True), (Tag.SETTLED, "", False)]
    link.offer_landing(landing, b, table_of(9, 8))
    assert first.told(1) == [(Tag.LANDING, landing, True)]
    os.close(a)
    os.close(b)  # the link has its own
    first.close()
    second = Watchdog(link)
    assert second.told(3) == [(Tag.OFFER, source, True), (Tag.LANDING, landing, True), (Tag.SETTLED, "", False)]
    held = link.arena(landing, time.monotonic())
    assert fcntl.fcntl(held.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    os.close(held.fd)
    link.withdraw(landing)
    assert second.told(1) == [(Tag.WITHDRAW, landing, False)]
    second.close()
    third = Watchdog(link)
    assert third.told(2) == [(Tag.OFFER, source, True), (Tag.SETTLED, "", False)]
    third.close()
