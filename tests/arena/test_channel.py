"""The domain channel between real processes: order, descriptors, large messages, deaths, intruders."""

from __future__ import annotations

import fcntl
import hashlib
import os
import resource
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic_reshard.arena import DomainChannel, HostArena, Listener, MappedArena, Message, connect_mesh
from elastic_reshard.errors import ArenaError, PeerLost, TransferError, TransferTimeout
from tests.arena.helpers import SECRET, meet, soon
from tests.processes import Rank, run_ranks

HEADER = struct.Struct("<IIB")


def pair() -> tuple[DomainChannel, DomainChannel]:
    """Two ends in this process, ranks 0 and 1."""
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    return DomainChannel(0, {1: left}), DomainChannel(1, {0: right})


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def await_state(pid: int, state: str) -> None:
    """Wait until the process is in that state of /proc (T: stopped)."""
    deadline = soon(10)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline
        time.sleep(0.002)


# A mesh: every message arrives once, in order per tag, at whom it was sent to.


def everyone_to_everyone(me: Rank) -> list[str]:
    with meet(me) as channel:
        assert channel.peers == tuple(r for r in range(me.size) if r != me.rank)
        for i in range(20):
            for peer in channel.peers:
                channel.send(peer, i % 3, f"{me.rank}>{peer} {i}".encode(), deadline=soon())
        got = []
        for tag in (2, 0, 1):
            for peer in reversed(channel.peers):
                for i in range(tag, 20, 3):
                    message = channel.take(peer, tag, deadline=soon())
                    assert (message.peer, message.tag, message.fds) == (peer, tag, ())
                    assert message.payload == f"{peer}>{me.rank} {i}".encode()
                    got.append(message.payload.decode())
        for peer in channel.peers:  # nobody closes before all have taken
            channel.send(peer, 9, deadline=soon())
        waiting = set(channel.peers)
        while waiting:
            waiting.remove(channel.take_any(waiting, 9, deadline=soon(), strict=False).peer)
    return got


def test_mesh_of_four_delivers_each_message_once_and_in_order() -> None:
    results = run_ranks(everyone_to_everyone, 4, group=False)
    assert len({text for got in results for text in got}) == 4 * 3 * 20


def test_a_member_alone_is_a_mesh() -> None:
    with Listener() as listener, connect_mesh(5, {5: listener.address}, listener, SECRET, soon()) as channel:
        assert channel.peers == ()


def test_tags_are_queued_apart_and_what_has_come_is_delivered_after_the_deadline() -> None:
    left, right = pair()
    with left, right:
        for i in range(5):
            left.send(1, 7, bytes([i]), deadline=soon())
            left.send(1, (1 << 32) - 1, bytes([i + 100]), deadline=soon())
        past = time.monotonic() - 1
        assert [right.take(0, (1 << 32) - 1, deadline=past).payload[0] for _ in range(5)] == list(range(100, 105))
        assert [right.take(0, 7, deadline=past).payload[0] for _ in range(5)] == list(range(5))
        with pytest.raises(TransferTimeout, match=r"member 1 waited for a message with tag 7, from members \[0\]"):
            right.take(0, 7, deadline=past)


def test_take_any_gives_what_is_there() -> None:
    a, b = socket.socketpair(), socket.socketpair()
    for sock in (*a, *b):
        sock.setblocking(False)
    with (
        DomainChannel(0, {1: a[0], 2: b[0]}) as channel,
        DomainChannel(1, {0: a[1]}) as one,
        DomainChannel(2, {0: b[1]}) as two,
    ):
        two.send(0, 3, b"two", deadline=soon())
        assert channel.take_any((1, 2), 3, deadline=soon()).peer == 2
        one.send(0, 3, b"one", deadline=soon())
        assert channel.take_any((1, 2), 3, deadline=soon()).peer == 1
        with pytest.raises(TransferTimeout) as late:
            channel.take_any((1, 2), 3, deadline=soon(0.05))
        assert late.value.members == (1, 2)


# Framing.


@pytest.mark.parametrize("seed", range(8))
def test_frames_arrive_whole_however_they_are_cut(seed: int) -> None:
    """Raw bytes in random pieces, descriptors with the first byte of their frame as the format says."""
    rng = np.random.default_rng(seed)
    raw, end = socket.socketpair()
    end.setblocking(False)
    raw.settimeout(10)
    sent: list[tuple[int, bytes, list[int]]] = []
    with raw, DomainChannel(0, {1: end}) as channel:
        before = open_descriptors()

        def write() -> None:
            for _ in range(60):
                tag, size = int(rng.integers(4)), int(rng.choice([0, 0, 1, 8, 9, 10, 500, 70_000]))
                payload = rng.bytes(size)
                fds = [os.memfd_create(f"n{len(sent)}-{i}") for i in range(int(rng.choice([0, 0, 1, 3])))]
                sent.append((tag, payload, [os.fstat(fd).st_ino for fd in fds]))
                frame = memoryview(HEADER.pack(tag, size, len(fds)) + payload)
                first = int(rng.integers(1, 20))
                socket.send_fds(raw, [frame[:first]], fds)
                rest = frame[first:]
                while rest:
                    piece = int(rng.choice([1, 5, 4000, 100_000]))
                    raw.sendall(rest[:piece])
                    rest = rest[piece:]
                for fd in fds:
                    os.close(fd)

        writer = threading.Thread(target=write)
        writer.start()
        for at in range(60):
            deadline = soon(10)
            while len(sent) <= at:
                assert time.monotonic() < deadline
                time.sleep(0.0005)
            tag, payload, inodes = sent[at]
            message = channel.take(1, tag, deadline=deadline)
            assert message.payload == payload
            assert [os.fstat(fd).st_ino for fd in message.fds] == inodes
            for fd in message.fds:
                assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
                os.close(fd)
        writer.join()
        assert open_descriptors() == before


def large_to_everyone(me: Rank, size: int) -> list[str]:
    payload = np.arange(me.rank, me.rank + size // 8, dtype=np.int64).tobytes()
    with meet(me) as channel:
        for peer in channel.peers:
            channel.send(peer, 1, payload, deadline=soon(40))
        digests = []
        for peer in channel.peers:
            got = np.frombuffer(channel.take(peer, 1, deadline=soon(40)).payload, dtype=np.int64)
            assert np.array_equal(got, np.arange(peer, peer + size // 8))
            digests.append(hashlib.sha256(got).hexdigest())
        for peer in channel.peers:
            channel.send(peer, 2, deadline=soon())
        for peer in channel.peers:
            channel.take(peer, 2, deadline=soon(), strict=False)
    return digests


@pytest.mark.parametrize(("ranks", "size"), [(2, 48 << 20), (4, 6 << 20)])
def test_large_payloads_to_each_other_at_once_do_not_deadlock(ranks: int, size: int) -> None:
    results = run_ranks(large_to_everyone, ranks, size, group=False)
    assert len({digest for result in results for digest in result}) == ranks


# Descriptors.


def pass_arenas(me: Rank) -> int:
    with meet(me) as channel:
        if me.rank == 0:
            arenas = [HostArena(1 << 20) for _ in range(3)]
            for at, arena in enumerate(arenas):
                arena.empty((1 << 17,), torch.int64).copy_(torch.arange(at << 17, (at + 1) << 17))
            fds = [arena.readonly_fd() for arena in arenas]
            channel.send(1, 1, b"x" * 200_000, deadline=soon())
            channel.send(1, 1, b"two", fds[:2], deadline=soon())
            channel.send(1, 2, deadline=soon())
            channel.send(1, 1, b"y" * 200_000, fds[2:], deadline=soon())
            channel.send(1, 1, b"many", [fds[0]] * 253, deadline=soon())
            channel.send(1, 5, b"untaken", fds, deadline=soon())
            for fd in fds:
                os.close(fd)
            channel.take(1, 3, deadline=soon())
            return 0
        assert channel.take(0, 1, deadline=soon()).fds == ()
        two = channel.take(0, 1, deadline=soon())
        third = channel.take(0, 1, deadline=soon())
        assert (two.payload, third.payload) == (b"two", b"y" * 200_000)
        values = 0
        for at, fd in enumerate((*two.fds, *third.fds)):
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            seen = MappedArena(fd).view(0, (1 << 17,), (8,), 8)
            assert np.array_equal(seen, np.arange(at << 17, (at + 1) << 17, dtype=np.uint64))
            values += len(seen)
        del seen
        assert channel.take(0, 2, deadline=soon()).fds == ()
        many = channel.take(0, 1, deadline=soon())
        assert len(set(many.fds)) == 253
        for fd in many.fds:
            os.close(fd)
        with pytest.raises(TransferTimeout):
            channel.take(0, 4, deadline=soon(0.2))  # reads what is untaken
        assert _memfds() == 3
        channel.send(0, 3, deadline=soon())
    assert _memfds() == 0, "close() closes what nobody took"
    return values


def _memfds() -> int:
    return sum("memfd:" in os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))


def test_descriptors_come_with_their_messages() -> None:
    assert run_ranks(pass_arenas, 2, group=False) == [0, 3 << 17]


def starve(me: Rank) -> str:
    with meet(me) as channel:
        if me.rank == 0:
            fd = os.memfd_create("one")
            channel.send(1, 1, fds=[fd] * 50, deadline=soon())
            os.close(fd)
            with pytest.raises(PeerLost) as lost:
                channel.take(1, 2, deadline=soon())
            return str(lost.value.members)
        before = open_descriptors()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 5, limits[1]))
        with pytest.raises(ArenaError, match="limit on open files") as refused:
            channel.take(0, 1, deadline=soon())
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert open_descriptors() == before - 1, "what did arrive is closed, and the connection too"
        with pytest.raises(PeerLost, match="limit on open files"):
            channel.take(0, 1, deadline=soon())
        return str(refused.value)


def test_a_process_that_can_take_no_more_descriptors_says_so() -> None:
    results = run_ranks(starve, 2, group=False)
    assert results[0] == "(1,)"
    assert "ulimit -n" in results[1]


# Deaths and stops.


def outlive(me: Rank) -> float:
    channel = meet(me)
    if me.rank == 2:
        channel.take(0, 1, deadline=soon())
        channel.take(1, 1, deadline=soon())
        channel.send(0, 1, b"last words", deadline=soon())
        channel.send(0, 2, struct.pack("d", time.monotonic()), deadline=soon())
        channel.send(1, 2, struct.pack("d", time.monotonic()), deadline=soon())
        os.kill(os.getpid(), signal.SIGKILL)
    channel.send(2, 1, deadline=soon())
    (died,) = struct.unpack("d", channel.take(2, 2, deadline=soon()).payload)
    waited_on = 2 if me.rank == 0 else 0
    with pytest.raises(PeerLost, match=r"member 2 (closed|broke) its connection") as lost:
        channel.take(waited_on, 3, deadline=soon())
    seen = time.monotonic() - died
    assert lost.value.members == (2,)
    assert channel.ended == {2}
    with pytest.raises(PeerLost):
        channel.take_any((1 - me.rank, 2), 3, deadline=soon(), strict=False)
    with pytest.raises(PeerLost):
        channel.send(2, 1, deadline=soon())
    if me.rank == 0:
        assert channel.take(2, 1, deadline=soon()).payload == b"last words"
    channel.send(1 - me.rank, 4, b"alive", deadline=soon())
    assert channel.take(1 - me.rank, 4, deadline=soon(), strict=False).payload == b"alive"
    with pytest.raises(TransferTimeout):
        channel.take(1 - me.rank, 5, deadline=soon(0.1), strict=False)
    channel.send(1 - me.rank, 6, deadline=soon())
    channel.take(1 - me.rank, 6, deadline=soon(), strict=False)
    channel.close()
    return seen


def test_a_killed_peer_is_seen_within_a_second_by_all_and_its_last_words_are_delivered() -> None:
    results = run_ranks(outlive, 3, group=False, lost=(2,))
    assert max(results[:2]) < 1.0


def kill_in_large_message(me: Rank, sender: int) -> float:
    channel = meet(me)
    payload = bytes(32 << 20)
    if me.rank == 1:
        channel.send(0, 1, struct.pack("i", os.getpid()), deadline=soon())
        if sender == 1:
            channel.send(0, 2, payload, deadline=soon(60))
        signal.pause()
    (pid,) = struct.unpack("i", channel.take(1, 1, deadline=soon()).payload)
    await_state(pid, "S")
    times = []

    def kill() -> None:
        times.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(0.2, kill)
    timer.start()
    if sender == 0:
        with pytest.raises(PeerLost) as lost:
            channel.send(1, 2, payload, deadline=soon())
    else:
        timer.join()
        with pytest.raises(PeerLost) as lost:
            channel.take(1, 2, deadline=soon())
    seen = time.monotonic() - times[0]
    assert lost.value.members == (1,)
    channel.close()
    return seen


@pytest.mark.parametrize("sender", [0, 1])
def test_a_peer_killed_in_the_middle_of_a_large_message(sender: int) -> None:
    assert run_ranks(kill_in_large_message, 2, sender, group=False, lost=(1,))[0] < 1.0


def outwait(me: Rank) -> list[float]:
    channel = meet(me)
    if me.rank == 1:
        channel.send(0, 1, struct.pack("i", os.getpid()), deadline=soon())
        os.kill(os.getpid(), signal.SIGSTOP)
    (pid,) = struct.unpack("i", channel.take(1, 1, deadline=soon()).payload)
    await_state(pid, "T")
    overdue = []
    calls = (
        lambda deadline: channel.take(1, 2, deadline=deadline),
        lambda deadline: channel.send(1, 2, bytes(8 << 20), deadline=deadline),
    )
    for call in calls:
        deadline = soon(0.4)
        with pytest.raises(TransferTimeout) as late:
            call(deadline)
        overdue.append(time.monotonic() - deadline)
        assert late.value.members == (1,)
    assert channel.ended == {1}, "half a message is under way: nothing may follow it"
    with pytest.raises(PeerLost, match="half a message"):
        channel.send(1, 2, deadline=soon())
    channel.close()
    return overdue


def test_a_stopped_peer_is_a_timeout_at_the_deadline() -> None:
    overdue = run_ranks(outwait, 2, group=False, lost=(1,))[0]
    assert all(0 <= late < 1.0 for late in overdue)


def fill(channel: DomainChannel) -> int:
    """Send messages with tags 0, 1, ... to member 1 until its buffer is full; how many went."""
    for tag in range(1 << 20):
        try:
            channel.send(1, tag, deadline=soon(0.05))
        except TransferTimeout as late:
            if late.members != (1,) or "room for 9 bytes" not in str(late):
                raise
            return tag
    raise AssertionError("a buffer without end")


def test_a_full_buffer_times_out_and_leaves_the_stream_whole_if_nothing_was_sent() -> None:
    left, right = pair()
    with left, right:
        count = fill(left)
        assert left.ended == set()
        assert count > 10
        assert all(right.take(0, tag, deadline=soon()).tag == tag for tag in range(count))
        left.send(1, 5, b"after", deadline=soon())
        assert right.take(0, 5, deadline=soon()).payload == b"after"


def test_descriptors_of_a_message_that_had_to_wait_come_with_it() -> None:
    left, right = pair()
    with left, right:
        fill(left)
        fd = os.memfd_create("waited")
        inode = os.fstat(fd).st_ino
        taken: list[Message] = []
        # Later, so that the first attempt to send finds no room.
        reader = threading.Timer(0.2, lambda: taken.append(right.take(0, 1 << 20, deadline=soon())))
        reader.start()
        left.send(1, 1 << 20, b"waited", [fd], deadline=soon())
        reader.join()
        (message,) = taken
        os.close(fd)
        assert [os.fstat(got).st_ino for got in message.fds] == [inode]
        os.close(message.fds[0])


def test_what_has_come_is_delivered_before_the_loss_of_another_is_reported() -> None:
    a, b = socket.socketpair(), socket.socketpair()
    for sock in (*a, *b):
        sock.setblocking(False)
    with DomainChannel(0, {1: a[0], 2: b[0]}) as channel, DomainChannel(1, {0: a[1]}) as one:
        b[1].close()
        with pytest.raises(PeerLost):
            channel.take(1, 1, deadline=soon())
        assert channel.ended == {2}
        for i in range(3):
            one.send(0, i, bytes(50_000), deadline=soon())
        assert len(channel.take(1, 1, deadline=soon()).payload) == 50_000
        with pytest.raises(PeerLost) as lost:
            channel.take(1, 1, deadline=soon())
        assert lost.value.members == (2,)


def leave_a_child(me: Rank) -> float:
    channel = meet(me)
    if me.rank == 1:
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            signal.pause()
            os._exit(0)
        channel.send(0, 1, struct.pack("i", child), deadline=soon())
        channel.take(0, 1, deadline=soon())
        os.kill(os.getpid(), signal.SIGKILL)
    (child,) = struct.unpack("i", channel.take(1, 1, deadline=soon()).payload)
    await_state(child, "S")
    started = time.monotonic()
    channel.send(1, 1, deadline=soon())
    try:
        with pytest.raises(PeerLost):
            channel.take(1, 2, deadline=soon(10))
        seen = time.monotonic() - started
        assert Path(f"/proc/{child}").exists(), "the child outlives its parent, or nothing was shown"
    finally:
        os.kill(child, signal.SIGKILL)
    channel.close()
    return seen


def test_a_forked_child_does_not_hide_its_parents_death() -> None:
    assert run_ranks(leave_a_child, 2, group=False, lost=(1,))[0] < 1.0


def test_closing_is_an_end_for_the_peer_and_final_here() -> None:
    left, right = pair()
    left.send(1, 1, b"first", deadline=soon())
    left.close()
    left.close()
    with pytest.raises(TransferError, match="closed"):
        left.send(1, 1, deadline=soon())
    with pytest.raises(TransferError, match="closed"):
        left.take(1, 1, deadline=soon())
    with right:
        with pytest.raises(PeerLost) as lost:
            right.send(0, 1, b"too late", deadline=soon())
        assert lost.value.members == (0,)
        assert right.take(0, 1, deadline=soon()).payload == b"first"
        with pytest.raises(PeerLost):
            right.take(0, 1, deadline=soon())


def test_what_cannot_be_sent_is_refused() -> None:
    left, right = pair()
    with left, right:
        for tag, fds in ((-1, []), (1 << 32, []), (1, [0] * 254)):
            with pytest.raises(TransferError, match="cannot be sent"):
                left.send(1, tag, fds=fds, deadline=soon())
        for peer in (0, 2):
            with pytest.raises(TransferError, match=r"its peers are \(1,\)"):
                left.send(peer, 1, deadline=soon())
            with pytest.raises(TransferError, match=r"its peers are \(1,\)"):
                left.take(peer, 1, deadline=soon())
        reader, writer = os.pipe()
        os.close(reader)
        os.close(writer)
        with pytest.raises(ArenaError, match="cannot be sent to member 1"):
            left.send(1, 1, fds=[reader], deadline=soon())
        left.send(1, 1, b"still whole", deadline=soon())
        assert right.take(0, 1, deadline=soon()).payload == b"still whole"
