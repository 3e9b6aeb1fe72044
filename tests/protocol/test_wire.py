"""Frames over Unix sockets that never wait."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from elastic_reshard.errors import PeerLost, ProtocolError
from elastic_reshard.protocol.wire import ROOM, STRANGER_LIMIT, Tag, Wire, arena_of, arena_payload, credentials, proof


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    left, right = (Wire(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield left, right
    left.close()
    right.close()


def frames(wire: Wire, count: int, sender: Wire | None = None) -> list[tuple[int, bytes, tuple[int, ...]]]:
    found = []
    poll = select.poll()
    poll.register(wire.fileno(), select.POLLIN)
    while len(found) < count:
        if sender is not None:
            sender.flush()
        assert poll.poll(5000), f"{len(found)} of {count}"
        found += [(m.tag, m.payload, m.fds) for m in wire.receive()]
    return found


def same(one: int, other: int) -> bool:
    return os.fstat(one).st_ino == os.fstat(other).st_ino


def test_frames_arrive_whole_in_order_with_their_descriptors(ends: tuple[Wire, Wire]) -> None:
    left, right = ends
    fds = [os.memfd_create(f"f{i}") for i in range(3)]
    left.send(Tag.STATEMENT, b"one")
    left.send(Tag.OFFER, b"two", (fds[0],))
    left.send(Tag.BEAT)
    left.send(Tag.OFFER, b"x" * 300_000, (fds[1], fds[2]))
    left.send(Tag.STATEMENT, b"last")
    got = frames(right, 5, left)
    assert [(tag, len(payload), len(passed)) for tag, payload, passed in got] == [
        (Tag.STATEMENT, 3, 0), (Tag.OFFER, 3, 1), (Tag.BEAT, 0, 0), (Tag.OFFER, 300_000, 2), (Tag.STATEMENT, 4, 0)
    ]  # fmt: skip
    passed = [*got[1][2], *got[3][2]]
    assert all(same(a, b) for a, b in zip(fds, passed, strict=True))
    assert all(not os.get_inheritable(fd) for fd in passed)
    for fd in (*fds, *passed):
        os.close(fd)
    assert right.receive() == []
    assert right.idle


def test_a_full_buffer_keeps_frames_and_never_waits(ends: tuple[Wire, Wire]) -> None:
    left, right = ends
    fd = os.memfd_create("late")
    payload = bytes(range(256)) * 4096
    for _ in range(8):
        assert left.send(Tag.SUPERVISOR, payload)
    assert left.pending
    assert left.send(Tag.OFFER, b"after", (fd,))
    os.close(fd)  # the caller's to close at once
    got = frames(right, 9, left)
    assert all(p == payload for _, p, _ in got[:8])
    assert got[8][1] == b"after"
    os.close(got[8][2][0])
    assert not left.pending
    assert left.queued == 0


def test_a_peer_that_does_not_read_is_reported(ends: tuple[Wire, Wire]) -> None:
    left, _ = ends
    big = bytes(60 << 20)
    while left.send(Tag.SUPERVISOR, big):
        assert left.queued <= ROOM + len(big)
    assert left.pending


def test_what_was_said_before_the_end_is_read_first(ends: tuple[Wire, Wire]) -> None:
    left, right = ends
    left.send(Tag.STATEMENT, b"last words")
    left.close()
    assert right.send(Tag.BEAT), "not an error: the reader finds the end"
    assert right.broken
    assert [m.payload for m in right.receive()] == [b"last words"]
    with pytest.raises(PeerLost):
        right.receive()


def test_half_sent_frames_wait_for_their_rest(ends: tuple[Wire, Wire]) -> None:
    left, right = ends
    raw = struct.pack("<IIB", Tag.STATEMENT, 6, 0) + b"abcdef"
    for at in range(len(raw)):
        assert right.receive() == []
        left.sock.send(raw[at : at + 1])
    assert [m.payload for m in right.receive()] == [b"abcdef"]
    left.sock.send(raw[:12])
    assert right.receive() == []
    left.close()
    with pytest.raises(PeerLost):
        right.receive()


def test_bounds() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    left, right = Wire(one), Wire(other, STRANGER_LIMIT)
    left.send(Tag.AUTH, b"x" * STRANGER_LIMIT)
    assert frames(right, 1)
    left.send(Tag.AUTH, b"x" * (STRANGER_LIMIT + 1))
    with pytest.raises(ProtocolError, match="limits"):
        right.receive()
    right.close()
    left.close()


@pytest.mark.parametrize("raw", [b"\xff" * 64, struct.pack("<IIB", 1, 1 << 31, 0), struct.pack("<IIB", 1, 0, 254)])
def test_garbage(ends: tuple[Wire, Wire], raw: bytes) -> None:
    left, right = ends
    left.sock.send(raw)
    with pytest.raises(ProtocolError):
        right.receive()


def test_descriptors_of_garbage_are_closed(ends: tuple[Wire, Wire]) -> None:
    left, right = ends
    fd = os.memfd_create("lost")
    before = len(os.listdir("/proc/self/fd"))
    left.send(Tag.OFFER, b"good", (fd,))
    left.sock.sendmsg([struct.pack("<IIB", 1, 0, 9)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))])
    (good,) = right.receive()
    os.close(good.fds[0])
    with pytest.raises(ProtocolError):
        right.receive()
    right.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    os.close(fd)


def test_a_thread_and_an_event_loop_understand_each_other() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    payload = b"y" * 2_000_000

    def echo() -> None:
        wire = Wire(other)
        for tag, got, _ in frames(wire, 3):
            wire.send(Tag(tag), got)
        poll = select.poll()
        poll.register(wire.fileno(), select.POLLOUT)
        while not wire.flush():
            poll.poll(5000)
        wire.close()

    async def talk() -> list[bytes]:
        loop, wire = asyncio.get_running_loop(), Wire(one)
        got: list[bytes] = []
        done = asyncio.Event()

        def readable() -> None:
            try:
                got.extend(m.payload for m in wire.receive())
            except PeerLost:
                done.set()

        def writable() -> None:
            if wire.flush():
                loop.remove_writer(wire.fileno())

        loop.add_reader(wire.fileno(), readable)
        for part in (b"a", payload, b"c"):
            wire.send(Tag.STATEMENT, part)
        loop.add_writer(wire.fileno(), writable)
        await asyncio.wait_for(done.wait(), 10)
        loop.remove_reader(wire.fileno())
        wire.close()
        return got

    thread = threading.Thread(target=echo)
    thread.start()
    assert asyncio.run(talk()) == [b"a", payload, b"c"]
    thread.join()


def test_forked_children_hold_no_end(ends: tuple[Wire, Wire]) -> None:
    left, right = ends
    pid = os.fork()
    if pid == 0:
        os._exit(int(left.fileno() != -1 or right.fileno() != -1))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert left.send(Tag.BEAT)
    assert frames(right, 1)


def test_credentials_and_proofs(ends: tuple[Wire, Wire]) -> None:
    who = credentials(ends[0].sock)
    assert (who.pid, who.uid) == (os.getpid(), os.getuid())
    assert proof("t", "member", "a", "b") == proof("t", "member", "a", "b")
    assert len({proof("t", "member", "a", "b"), proof("u", "member", "a", "b"), proof("t", "watchdog", "a", "b"),
                proof("t", "member", "b", "a"), proof("t", "member", "ab", "")}) == 5  # fmt: skip


def test_offers() -> None:
    owner = "m@" + "0" * 16
    assert tuple(arena_of(arena_payload("a" * 32, owner, b'{"x":\n1}'))) == ("a" * 32, owner, b'{"x":\n1}')
    for bad in (b"", b"[]", b"{}\n", b'["a"]\n', arena_payload("a" * 31, owner, b""), arena_payload("a" * 32, "m", b""),
                arena_payload("a" * 32, owner + "\n", b"")):  # fmt: skip
        with pytest.raises(ProtocolError):
            arena_of(bad)
