"""Forming a domain channel: who is let in, and who is named when the mesh does not form."""

from __future__ import annotations

import os
import socket
import struct
import time

import pytest

from elastic_reshard.arena import DomainChannel, Listener, connect_mesh
from elastic_reshard.errors import PeerLost, PeerRefused, TransferTimeout
from tests.arena.helpers import SECRET, at_once, meet, soon
from tests.processes import Rank, run_ranks


def meet_or_say_why(me: Rank, wrong: int) -> tuple[str, tuple[int, ...]]:
    try:
        channel = meet(me, b"another" if me.rank == wrong else SECRET, 2.0)
    except (PeerLost, TransferTimeout) as error:
        return type(error).__name__, error.members
    channel.close()
    return "met", channel.peers


def test_a_wrong_secret_is_not_let_in() -> None:
    results = run_ranks(meet_or_say_why, 3, 2, group=False)
    assert results[0] == results[1] == ("TransferTimeout", (2,))
    assert results[2][0] == "PeerLost"
    assert set(results[2][1]) < {0, 1}


def test_a_wrong_secret_lets_nobody_in() -> None:
    results = run_ranks(meet_or_say_why, 2, 0, group=False)
    assert results == [("TransferTimeout", (1,)), ("PeerLost", (0,))]


def test_garbage_hellos_are_dropped_and_members_still_meet() -> None:
    with Listener() as zero, Listener() as one, Listener() as elsewhere:
        addresses = {0: zero.address, 1: one.address}
        hello = _hello_of_member_1(elsewhere)
        other_sender = hello[:8] + struct.pack("<I", 0) + hello[12:]
        garbage = [os.urandom(48), b"er", b"", hello, other_sender, hello[:-1], os.urandom(5000)]
        intruders = []
        for data in garbage:
            for stay in (False, True):
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(zero.address)
                sock.sendall(data)
                intruders.append(sock)
                if not stay:
                    sock.close()
        left, right = at_once(
            lambda: connect_mesh(0, addresses, zero, SECRET, soon()),
            lambda: connect_mesh(1, addresses, one, SECRET, soon()),
        )
        with left, right:
            right.send(0, 1, b"in", deadline=soon())
            assert left.take(1, 1, deadline=soon()).payload == b"in"
        for sock in intruders:
            sock.close()


def _hello_of_member_1(elsewhere: Listener) -> bytes:
    """A good hello, but meant for another listener."""
    with Listener() as own:
        hello = b""

        def catch() -> None:
            nonlocal hello
            elsewhere.socket.setblocking(True)
            sock, _ = elsewhere.socket.accept()
            with sock:
                hello = sock.recv(100)

        _, error = at_once(catch, lambda: connect_mesh(1, {0: elsewhere.address, 1: own.address}, own, SECRET, soon()))
    assert isinstance(error, PeerLost)
    assert len(hello) == 48
    return hello


def test_an_impostor_at_the_address_is_refused() -> None:
    with Listener() as impostor, Listener() as own:

        def answer() -> None:
            impostor.socket.setblocking(True)
            sock, _ = impostor.socket.accept()
            with sock:
                hello = sock.recv(48)
                sock.sendall(hello)  # our own hello sent back is no answer
                sock.recv(1)

        addresses = {0: impostor.address, 1: own.address}
        _, error = at_once(answer, lambda: connect_mesh(1, addresses, own, SECRET, soon()))
        assert isinstance(error, PeerRefused)
        assert error.member == 0


def test_the_same_member_is_let_in_once() -> None:
    with Listener() as zero, Listener() as one, Listener() as two:
        addresses = {0: zero.address, 1: one.address, 2: two.address}
        results = at_once(
            lambda: connect_mesh(0, addresses, zero, SECRET, soon(1.5)),
            lambda: connect_mesh(1, {0: zero.address, 1: one.address}, one, SECRET, soon(1.0)),
            lambda: connect_mesh(1, {0: zero.address, 1: two.address}, two, SECRET, soon(1.0)),
        )
    assert isinstance(results[0], TransferTimeout)
    assert results[0].members == (2,)
    kinds = [type(result) for result in results[1:]]
    assert sorted(kind.__name__ for kind in kinds) == ["DomainChannel", "PeerLost"]
    for result in results[1:]:
        if isinstance(result, DomainChannel):
            result.close()


def test_members_that_do_not_come_are_named_at_the_deadline() -> None:
    with Listener() as zero, Listener() as one, Listener() as two, Listener() as three:
        addresses = {0: zero.address, 1: one.address, 2: two.address, 3: three.address}
        started = time.monotonic()
        low, high = at_once(
            lambda: connect_mesh(0, addresses, zero, SECRET, started + 0.5),
            lambda: connect_mesh(2, addresses, two, SECRET, started + 0.5),
        )
        took = time.monotonic() - started
    assert isinstance(low, TransferTimeout)
    assert isinstance(high, TransferTimeout)
    assert low.members == (1, 3)
    assert high.members == (1, 3)
    assert 0.5 <= took < 3.0


def test_a_listener_that_is_gone_is_a_loss_at_once() -> None:
    with Listener() as own:
        gone = Listener()
        gone.close()
        gone.close()
        started = time.monotonic()
        with pytest.raises(PeerLost, match="member 0 cannot be reached") as lost:
            connect_mesh(1, {0: gone.address, 1: own.address}, own, SECRET, soon())
        assert lost.value.members == (0,)
        assert time.monotonic() - started < 1.0


def test_a_full_backlog_is_waited_for() -> None:
    with Listener() as zero, Listener() as one:
        zero.socket.listen(0)
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(zero.address)
        addresses = {0: zero.address, 1: one.address}
        with pytest.raises(TransferTimeout) as late:
            connect_mesh(1, addresses, one, SECRET, soon(0.1))
        assert late.value.members == (0,)
        left, right = at_once(
            lambda: connect_mesh(0, addresses, zero, SECRET, soon()),
            lambda: connect_mesh(1, addresses, one, SECRET, soon()),
        )
        waiting.close()
        left.close()
        right.close()
