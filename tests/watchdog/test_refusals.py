"""Who is turned away, what garbage does, and that nobody else is harmed by it."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import sys
import time

import pytest

from elastic_reshard.arena.channel import rights
from elastic_reshard.errors import JoinRefused, MembershipError, NotAMember, PeerLost, Unauthorized
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.ids import PROTOCOL, incarnation, member_id
from elastic_reshard.protocol.wire import Tag, Wire, arena_payload, proof
from tests.watchdog.world import TOKEN, Local, World, memory, open_files, statement, until


def dial(here: World) -> Wire:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(here.paths().sock))
    return Wire(sock)


def next_frame(wire: Wire, within: float = 5.0) -> tuple[int, bytes]:
    poll = select.poll()
    poll.register(wire.fileno(), select.POLLIN)
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        poll.poll(50)
        for message in wire.receive():
            return message.tag, message.payload
    raise AssertionError("nothing came")


def closed(wire: Wire) -> bool:
    """Whether the watchdog has closed this connection, reading whatever it said before."""
    try:
        while True:
            for message in wire.receive():
                for fd in message.fds:
                    os.close(fd)
            if wire.idle:
                return False
    except PeerLost:
        return True


def proved(here: World) -> Wire:
    wire = dial(here)
    hello = json.loads(next_frame(wire)[1])
    said = {"protocol": PROTOCOL, "url": here.supervisor.url, "nonce": "n"}
    wire.send(Tag.AUTH, json.dumps({**said, "proof": proof(TOKEN, "member", hello["nonce"], "n")}).encode())
    assert next_frame(wire)[0] == Tag.PROVED
    return wire


@pytest.fixture
def here(here: World) -> World:
    """Members of these tests end badly: they are not waited for."""
    here.deadlines = Deadlines(orphan_hold=0.5)
    return here


def attached(here: World) -> tuple[Wire, str]:
    wire, name = proved(here), member_id("raw", incarnation())
    wire.send(Tag.ATTACH, statement(name).model_dump_json().encode())
    until(lambda: name in here.watchdog().members)
    return wire, name


def unharmed(here: World, local: Local) -> str:
    number = local.state()
    until(lambda: here.supervisor.latest(local.member) == number)
    arena = local.offer(1)
    reader = here.local("reader").open()
    assert reader.values(arena)[0] == 1
    reader.link.close()
    assert here.log().count("watchdog.listening") == 1
    return arena


def test_a_wrong_token_another_job_and_another_address_are_refused(here: World) -> None:
    local = here.local().open()
    with pytest.raises(Unauthorized, match="token"):
        here.local("bad", token="wrong").open()
    with pytest.raises(JoinRefused, match="another host label"):
        here.local("astray", url="http://127.0.0.1:1").open()
    stray, liar = here.local("stray"), here.local("liar")
    stray.link._raw = statement(stray.member, host="b").model_dump_json().encode()
    liar.link._raw = statement(liar.member, pid=1).model_dump_json().encode()
    with pytest.raises(JoinRefused, match="states host b"):
        stray.open()
    with pytest.raises(JoinRefused, match="states process"):
        liar.open()
    unharmed(here, local)


def test_the_watchdog_itself_asks_for_the_token(here: World) -> None:
    local = here.local().open()
    for token, side in (("wrong", "member"), (TOKEN, "watchdog")):
        wire = dial(here)
        hello = json.loads(next_frame(wire)[1])
        said = {"protocol": PROTOCOL, "url": here.supervisor.url, "nonce": "n"}
        wire.send(Tag.AUTH, json.dumps({**said, "proof": proof(token, side, hello["nonce"], "n")}).encode())
        tag, payload = next_frame(wire)
        assert tag == Tag.REFUSE
        assert json.loads(payload)["kind"] == "Unauthorized"
        until(lambda: closed(wire))  # noqa: B023 - asked at once
        wire.close()
    unharmed(here, local)


def test_a_member_that_has_left_does_not_come_back(here: World) -> None:
    local = here.local().open()
    gone = here.agent().attached()
    gone.kill()
    until(lambda: here.supervisor.ended(gone.member))
    again = Local(here.config(), member=gone.member)
    with pytest.raises(NotAMember, match="new incarnation"):
        again.open()
    unharmed(here, local)


def test_whoever_does_not_hold_the_token_cannot_pose_as_the_watchdog(here: World) -> None:
    here.paths().make()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(here.paths().sock))
    listener.listen()
    # The impostor is this process: it must not be killed for what it says, and not be believed.
    local = here.local()
    local.link._thread.start()
    wire = Wire(listener.accept()[0])
    wire.send(Tag.HELLO, json.dumps({"protocol": PROTOCOL, "nonce": "x", "watchdog": "f" * 16}).encode())
    assert next_frame(wire)[0] == Tag.AUTH
    wire.send(Tag.PROVED, json.dumps({"proof": "0" * 64}).encode())
    failure = until(lambda: local.link.failure)
    assert isinstance(failure, Unauthorized)
    wire.close()
    listener.close()
    here.paths().sock.unlink()
    local.link.close()
    here.paths().folder.rmdir()


STRANGER = """
import os, socket, sys
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
try:
    sock.connect(sys.argv[1])
except PermissionError:
    print("kept out")
else:
    print(sock.recv(4096)[9:].decode(), sock.recv(1))
"""


def test_another_user_is_kept_out_by_the_folder_and_refused_by_the_socket(here: World) -> None:
    assert os.getuid() == 0, "needs root: only root can become another user"
    local = here.local().open()

    def stranger() -> str:
        command = [sys.executable, "-c", STRANGER, str(here.paths().sock)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout

    assert here.paths().folder.stat().st_mode & 0o777 == 0o700
    assert "kept out" in stranger()
    for path, mode in ((here.folder, 0o755), (here.paths().folder, 0o755), (here.paths().sock, 0o777)):
        path.chmod(mode)
    said = stranger()
    assert "Unauthorized" in said
    assert "user 65534" in said
    assert said.strip().endswith("b''"), "and the connection is closed"
    unharmed(here, local)


def test_a_runtime_folder_that_others_can_write_to_is_refused(here: World) -> None:
    here.folder.chmod(0o777)
    with pytest.raises(MembershipError, match="others cannot write to"):
        here.local().open()
    here.folder.chmod(0o700)


def frame(tag: Tag, payload: bytes) -> bytes:
    return struct.pack("<IIB", tag, len(payload), 0) + payload


STRANGERS_GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n" * 3,
    struct.pack("<IIB", Tag.AUTH, 1 << 31, 0),  # huge
    struct.pack("<IIB", Tag.AUTH, 5000, 0),
    struct.pack("<IIB", Tag.STATEMENT, 2, 0) + b"{}",
    struct.pack("<IIB", Tag.AUTH, 9, 0) + b"not json!",
    struct.pack("<IIB", Tag.AUTH, 2, 0) + b"[]",
    struct.pack("<IIB", Tag.AUTH, 62, 0) + b'{"protocol": 1, "url": 1, "nonce": [1], "proof": {"a": "bbb"}}',
    struct.pack("<IIB", Tag.AUTH, 2, 3) + b"{}",  # announces descriptors that do not come
    frame(Tag.AUTH, b"[" * 4000),
    frame(Tag.AUTH, b'{"protocol":%d,"url":"u","nonce":"\\ud800","proof":"x"}' % PROTOCOL),
    frame(Tag.AUTH, b'{"protocol":%d,"url":"u","nonce":"n","proof":"\\ud800"}' % PROTOCOL),
]


def test_garbage_of_a_stranger_ends_its_connection_only(here: World) -> None:
    assert len(STRANGERS_GARBAGE[6]) == 9 + 62
    local = here.local().open()
    for garbage in STRANGERS_GARBAGE:
        wire = dial(here)
        next_frame(wire)
        wire.sock.send(garbage)
        until(lambda: closed(wire), why=repr(garbage))  # noqa: B023 - asked at once
        wire.close()
    unharmed(here, local)


def test_garbage_of_a_member_ends_its_connection_only(here: World) -> None:
    local = here.local().open()
    arena, fd = memory(0, 8)
    reader, writer = os.pipe()
    other = statement(member_id("other", incarnation())).model_dump_json().encode()
    cases: list[tuple[bytes | Tag, bytes, tuple[int, ...]]] = [
        (struct.pack("<IIB", Tag.STATEMENT, 65 << 20, 0), b"", ()),  # huge
        (Tag.STATEMENT, b"{}", ()),
        (Tag.STATEMENT, other, ()),
        (Tag.OFFER, arena_payload(arena, "nobody", b"{}"), (fd,)),
        (Tag.OFFER, arena_payload("../../etc", local.member, b"{}"), (fd,)),
        (Tag.OFFER, arena_payload(arena, local.member, b"{}"), ()),
        (Tag.OFFER, arena_payload(arena, local.member, b"{}"), (fd, fd, fd)),
        (Tag.WINDOW, b"", ()),
        (Tag.WINDOW, b"", (fd,)),  # of another size
        (Tag.WINDOW, b"", (reader,)),
        (Tag.OFFER, arena_payload(arena, local.member, b"{}"), (reader,)),  # no memory
        (Tag.OFFER, b"no json\nat all", (fd,)),
        (Tag.OFFER, b"[" * 4000 + b"\n{}", (fd,)),
        (Tag.OFFER, arena_payload(arena, local.member, b"\xff"), (fd,)),  # a table that is no text
        (Tag.BEAT, b"", (fd,)),
        (Tag.SUPERVISOR, b"{}", ()),
    ]
    for tag, payload, fds in cases:
        wire, _ = attached(here)
        if isinstance(tag, Tag):
            wire.send(tag, payload, fds)
        else:
            wire.sock.send(tag)
        until(lambda: closed(wire), why=f"{tag!r}")  # noqa: B023 - asked at once
        wire.close()
    for stray in (fd, reader, writer):
        os.close(stray)
    last = unharmed(here, local)
    pid = here.watchdog().pid
    here.local("late").open().values(last)
    until(lambda: sum("memfd" in t for t in open_files(pid)) == 1, why="only what was offered last is kept")


def test_descriptors_that_belong_to_no_frame_are_closed(here: World) -> None:
    local = here.local().open()
    wire = dial(here)
    _, fd = memory(0, 8)
    wire.sock.sendmsg([b"\0"], rights([fd] * 40))
    os.close(fd)
    until(lambda: closed(wire), 2.0)
    wire.close()
    unharmed(here, local)


def test_half_a_frame_keeps_nobody_waiting_and_strangers_have_only_so_long(here: World) -> None:
    local = here.local(deadlines=Deadlines(connect=0.6, orphan_hold=0.5)).open()
    half = dial(here)
    next_frame(half)
    half.sock.send(struct.pack("<IIB", Tag.AUTH, 100, 0) + b"{")
    unharmed(here, local)
    assert not closed(half)
    until(lambda: closed(half), 3.0)
    half.close()


def test_too_many_strangers_do_not_fill_it_up(here: World) -> None:
    local = here.local().open()
    wires = [dial(here) for _ in range(300)]
    until(lambda: sum(closed(w) for w in wires) >= 44, why="those above the limit are closed")
    for wire in wires:
        wire.close()
    unharmed(here, local)


def test_a_member_that_does_not_read_is_let_go_and_harms_nobody(here: World) -> None:
    local = here.local().open()
    wire, name = attached(here)
    table = b" " * (8 << 20)
    for _ in range(20):
        arena, fd = memory(0, 8)
        local.link.offer(arena, fd, table)
        os.close(fd)
        local.link.withdraw(arena)
    until(lambda: "does not read" in here.log(), 20.0)
    assert closed(wire)
    wire.close()
    unharmed(here, local)
    assert not here.supervisor.ended(name), "a connection is no process"
