"""Peers that do not send what they began, or do not read what they asked for: each is cut off, and costs nobody else."""

from __future__ import annotations

import gc
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_reshard.layout.fragments import canonical, fragment_id
from elastic_reshard.supervisor import calling
from elastic_reshard.supervisor.server import Supervisor
from tests.supervisor.real import Start, call, problem
from tests.supervisor.talk import until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "_SEND_WITHIN", 0.5)
    monkeypatch.setattr(calling, "_READ_WITHIN", 0.5)


def opened(supervisor: Supervisor, receive: int = 0) -> socket.socket:
    host, port = supervisor.url.removeprefix("http://").split(":")
    made = socket.socket()
    if receive:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    made.settimeout(10)
    made.connect((host, int(port)))
    return made


def ended(connection: socket.socket) -> float:
    """Seconds until the other side has hung up, whatever it said before."""
    began = time.monotonic()
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began


def head(supervisor: Supervisor, line: str, *more: str) -> bytes:
    return "\r\n".join([line, "Host: x", f"Authorization: Bearer {supervisor.token}", *more]).encode()


@pytest.mark.parametrize("sent", ["nothing", "half a head", "a head and no body", "half of a second call"])
def test_a_call_that_is_begun_and_never_sent(start: Start, sent: str) -> None:
    supervisor = start()
    with opened(supervisor) as connection:
        if sent == "half a head":
            connection.sendall(head(supervisor, "GET /v1/view HTTP/1.1"))
        elif sent == "a head and no body":
            connection.sendall(head(supervisor, "PUT /v1/policies HTTP/1.1", "Content-Length: 1000") + b"\r\n\r\n{")
        elif sent == "half of a second call":
            connection.sendall(head(supervisor, "GET /v1/health HTTP/1.1") + b"\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            connection.sendall(b"GET /v1/view HT")
        assert 0.3 < ended(connection) < 5
    assert call(supervisor, "GET", "/v1/health").status_code == 200


def test_a_body_that_trickles_for_ever(start: Start) -> None:
    supervisor = start()
    with opened(supervisor) as connection:
        connection.sendall(head(supervisor, "PUT /v1/policies HTTP/1.1", "Content-Length: 100000") + b"\r\n\r\n")
        began = time.monotonic()
        with suppress(ConnectionResetError, BrokenPipeError):
            while time.monotonic() - began < 10:
                connection.sendall(b" ")
                time.sleep(0.02)
        assert 0.3 < time.monotonic() - began < 5


def test_a_large_body_that_comes_steadily_has_its_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "_SLOWEST", 1 << 20)
    supervisor = start()
    body: dict[str, Any] = {"whole": False, "tensors": {"w" * (3 << 20): {"plain": [[1], "int8"]}}}
    raw = canonical(body)
    with opened(supervisor) as connection:
        line = f"PUT /v1/fragments/{fragment_id(body)} HTTP/1.1"
        connection.sendall(head(supervisor, line, f"Content-Length: {len(raw)}") + b"\r\n\r\n")
        began = time.monotonic()
        for at in range(0, len(raw), 1 << 18):
            connection.sendall(raw[at : at + (1 << 18)])
            time.sleep(0.08)
        assert time.monotonic() - began > 0.9  # beyond what a small one gets
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 204")


def test_a_peer_that_never_reads_its_answers(start: Start) -> None:
    """Large answers, many of them on one connection, never taken: cut, and the memory is given back."""
    supervisor = start()
    name = "w" * (8 << 20)
    body: dict[str, Any] = {"whole": False, "tensors": {name: {"plain": [[1], "int8"]}}}
    assert call(supervisor, "PUT", f"/v1/fragments/{fragment_id(body)}", content=canonical(body)).status_code == 204
    line = head(supervisor, f"GET /v1/fragments/{fragment_id(body)} HTTP/1.1") + b"\r\n\r\n"
    sizes = []
    for _ in range(4):
        silent = [opened(supervisor, receive=1 << 14) for _ in range(8)]
        for connection in silent:
            connection.sendall(line)
        until(lambda silent=silent: not established(silent), "all are cut", within=20)  # type: ignore[misc]
        for connection in silent:
            connection.close()
        gc.collect()  # uvicorn's objects of a connection know each other
        sizes.append(resident())
    # Of 8 x 8 MiB in each round nothing is kept.
    assert sizes[-1] - sizes[0] < 32 << 20, sizes
    assert call(supervisor, "GET", "/v1/health").status_code == 200


def test_a_peer_that_never_reads_a_small_answer_is_not_kept_either(start: Start) -> None:
    supervisor = start()
    with opened(supervisor, receive=1 << 14) as connection:
        # Unread answers one after the other, each small, until the buffers between the two are full.
        line = head(supervisor, "GET /openapi.json HTTP/1.1") + b"\r\n\r\n"
        began = time.monotonic()
        try:
            while time.monotonic() - began < 10:
                connection.sendall(line)
        except (ConnectionResetError, BrokenPipeError, TimeoutError):
            pass
        until(lambda: not established([connection]), "it is cut", within=20)


def test_a_peer_that_reads_slowly_gets_everything(start: Start) -> None:
    supervisor = start()
    body: dict[str, Any] = {"whole": False, "tensors": {"w" * (12 << 20): {"plain": [[1], "int8"]}}}
    raw = canonical(body)
    assert call(supervisor, "PUT", f"/v1/fragments/{fragment_id(body)}", content=raw).status_code == 204
    with opened(supervisor, receive=1 << 16) as connection:
        connection.sendall(
            head(supervisor, f"GET /v1/fragments/{fragment_id(body)} HTTP/1.1", "Connection: close") + b"\r\n\r\n"
        )
        found, began = 0, time.monotonic()
        while more := connection.recv(1 << 20):
            found += len(more)
            if time.monotonic() - began < 1.5:  # three times as long as nothing may move
                time.sleep(0.02)
        assert found > len(raw)


def test_a_huge_body_that_says_no_length_is_refused(start: Start) -> None:
    supervisor = start()
    answer = call(supervisor, "PATCH", "/v1/policies", content=(b" " * (1 << 18) for _ in range(5)))
    assert "larger than 1048576 bytes" in problem(answer, 413)
    answer = call(supervisor, "PATCH", "/v1/policies?request_id=k", content=(b" " * (1 << 18) for _ in range(5)))
    assert "larger than 1048576 bytes" in problem(answer, 413)


def established(connections: list[socket.socket]) -> list[socket.socket]:
    """Those that the other side has not hung up on, by the kernel's word (TCP_INFO's state is 1)."""
    return [c for c in connections if c.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1]


def resident() -> int:
    """Bytes of this process, which the supervisor is in."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
