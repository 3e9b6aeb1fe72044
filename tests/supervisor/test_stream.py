"""Events as they happen: from any point, over breaks and restarts, for both clients; and readers that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from elastic_reshard.errors import ProtocolError, SupervisorUnreachable, Unauthorized
from elastic_reshard.supervisor import stream
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.client import SupervisorClient
from elastic_reshard.supervisor.client_async import AsyncSupervisorClient
from elastic_reshard.supervisor.following import Follower
from elastic_reshard.supervisor.record import Record
from elastic_reshard.supervisor.server import Options, Supervisor
from tests.supervisor.real import Start, call


@contextmanager
def reader(supervisor: Supervisor, query: str = "", **more: Any) -> Iterator[ClientConnection]:
    address = f"{supervisor.url.replace('http', 'ws')}/v1/events/stream{query}"
    headers = {"Authorization": f"Bearer {supervisor.token}"}
    with connect(address, additional_headers=headers, compression=None, close_timeout=0.5, **more) as connection:
        yield connection


def change(supervisor: Supervisor, value: float) -> None:
    assert call(supervisor, "PATCH", "/v1/policies", json={"late_after": value}).status_code == 200


def values(fields: list[dict[str, Any]]) -> list[str]:
    return [f["policies"].partition("late_after=")[2].partition(",")[0] for f in fields if "policies" in f]


def test_what_came_before_and_then_what_comes(start: Start) -> None:
    supervisor = start()
    for value in range(1, 251):
        change(supervisor, value)
    with reader(supervisor) as connection:
        found: list[dict[str, Any]] = []
        while len(found) < 251:
            page = json.loads(connection.recv(timeout=10))
            assert len(page["events"]) <= 100
            assert (page["instance"], page["dropped"]) == (supervisor.instance, 0)
            found += page["events"]
        assert [e["number"] for e in found] == list(range(1, 252))
        change(supervisor, 999)
        page = json.loads(connection.recv(timeout=10))
        while not page["events"]:
            page = json.loads(connection.recv(timeout=10))
        assert values([e["fields"] for e in page["events"]]) == ["999.0"]
    with reader(supervisor, "?after=250&instance=" + supervisor.instance) as connection:
        assert [e["number"] for e in json.loads(connection.recv(timeout=10))["events"]] == [251, 252]
    with reader(supervisor, "?after=250&instance=another") as connection:
        assert json.loads(connection.recv(timeout=10))["events"][0]["number"] == 1
    with reader(supervisor, "?after=5000") as connection:
        assert json.loads(connection.recv(timeout=10))["events"] == []


def test_who_is_not_let_in(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = start()
    address = f"{supervisor.url.replace('http', 'ws')}/v1/events/stream"
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        with pytest.raises(InvalidStatus) as caught:
            connect(address, additional_headers=headers)
        assert caught.value.response.status_code == 401
    for bad in ("x", "-1", str(1 << 70)):
        with reader(supervisor, f"?after={bad}") as connection, pytest.raises(ConnectionClosed, match="after is the"):
            connection.recv(timeout=10)
    monkeypatch.setattr(stream, "MOST_STREAMS", 1)
    with reader(supervisor) as one:
        one.recv(timeout=10)
        with reader(supervisor) as other, pytest.raises(ConnectionClosed, match="ask GET /v1/events"):
            other.recv(timeout=10)
    with SupervisorClient(supervisor.url, "wrong") as client, pytest.raises(Unauthorized):
        next(client.follow())


def test_a_reader_that_never_reads_is_cut_and_costs_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_PATIENCE", 2.0)
    shells: list[Shell] = []

    class Kept(Shell):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            shells.append(self)

    monkeypatch.setattr("elastic_reshard.supervisor.server.Shell", Kept)
    supervisor = start()
    assert supervisor._loop is not None
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    host, port = supervisor.url.removeprefix("http://").split(":")
    raw.connect((host, int(port)))
    with reader(supervisor, sock=raw, max_queue=1), reader(supervisor, max_size=None) as other:
        try:
            found: list[str] = []
            # More than all buffers between them hold; what is kept for both is the one record.
            for _ in range(2000):
                supervisor._loop.call_soon_threadsafe(shells[0].record.add, "noise", {"text": "x" * 6000})
            while "stream.cut" not in found:
                found += [e["event"] for e in json.loads(other.recv(timeout=10))["events"]]
            assert found.count("noise") == 2000
        finally:
            raw.shutdown(socket.SHUT_RDWR)  # the client library would wait for what it does not read


def test_a_follower_goes_on_over_a_restart(tmp_path: Path) -> None:
    options = Options(runtime=tmp_path / "run", journal=tmp_path / "j")
    first = Supervisor(options)
    change(first, 1.0)
    with SupervisorClient(first.url, first.token) as client:
        news = client.follow(patience=20)
        assert [next(news).event for _ in range(2)] == ["supervisor.started", "policies.changed"]
        change(first, 2.0)
        assert values([next(news).fields]) == ["2.0"]
        first.close(over=False)
        with Supervisor(replace(options, port=int(first.url.rpartition(":")[2]))) as second:
            event = next(news)
            assert (event.number, event.event, event.fields["term"]) == (1, "supervisor.started", 2)
            change(second, 3.0)
            assert values([next(news).fields]) == ["3.0"]
        with pytest.raises(SupervisorUnreachable, match=r"told no events for 0\.1 s"):
            list(client.follow(patience=0.1))
        began = time.monotonic()
        assert list(client.follow(seconds=0.3, patience=20)) == []
        assert 0.25 < time.monotonic() - began < 5


def test_a_follower_ends_when_its_time_is_over(start: Start) -> None:
    supervisor = start()
    with SupervisorClient(supervisor.url, supervisor.token) as client:
        began = time.monotonic()
        assert [e.event for e in client.follow(seconds=2.0)] == ["supervisor.started"]
        assert 1.9 < time.monotonic() - began < 10
        assert [e.number for e in client.follow(1, seconds=0.1)] == []


def test_the_asynchronous_follower_does_the_same(tmp_path: Path) -> None:
    options = Options(runtime=tmp_path / "run", journal=tmp_path / "j")
    first = Supervisor(options)

    async def scene() -> None:
        async with (
            AsyncSupervisorClient(first.url, first.token) as client,
            aclosing(client.follow(patience=20)) as news,
        ):
            assert (await anext(news)).event == "supervisor.started"
            await client.change_policies(late_after=2.0)
            assert values([(await anext(news)).fields]) == ["2.0"]
            await asyncio.to_thread(first.close, over=False)
            second = await asyncio.to_thread(Supervisor, replace(options, port=int(first.url.rpartition(":")[2])))
            try:
                event = await anext(news)
                assert (event.number, event.fields["term"]) == (1, 2)
                assert [e.number async for e in client.follow(1, seconds=0.2)] == []
            finally:
                await asyncio.to_thread(second.close)

    asyncio.run(scene())


def test_what_was_forgotten_is_said() -> None:
    record = Record("i")
    for number in range(10_005):
        record.add("e", {"n": number})
    follower = Follower("http://x", 2, None, 1.0)
    found = list(follower.read(record.page(2, 2).model_dump_json()))
    assert [(e.event, e.number) for e in found] == [("events.dropped", 5), ("e", 6), ("e", 7)]
    assert found[0].fields == {"dropped": 3}
    assert "after=7&instance=i" in follower.address
    with pytest.raises(ProtocolError, match="is no supervisor"):
        list(follower.read("{}"))
    assert record.page(1 << 61, 10).events == []


def test_time_that_the_reader_takes_is_no_silence_of_the_supervisor() -> None:
    follower, broken = Follower("http://x", 0, None, 1.0), ConnectionError("broken")
    page = Record("i").page(0, 10).model_dump_json()
    for _ in range(2):
        list(follower.read(page))
        time.sleep(1.2)  # the reader is busy with what it was told
        assert follower.left > 0
        assert 0 < follower.broke(broken) <= 0.5
    time.sleep(1.2)
    assert "http" not in follower.address
    with pytest.raises(SupervisorUnreachable, match=r"told no events for 1 s: ConnectionError: broken"):
        follower.broke(broken)
    # Silence counts from its beginning, not from the connection's end.
    list(follower.read(page))
    assert follower.left > 0
    time.sleep(1.2)
    with pytest.raises(SupervisorUnreachable):
        follower.broke(broken)


def test_a_follower_whose_reader_was_slow_goes_on_over_a_restart(tmp_path: Path) -> None:
    options = Options(runtime=tmp_path / "run", journal=tmp_path / "j")
    first = Supervisor(options)
    with SupervisorClient(first.url, first.token) as client:
        news = client.follow(patience=0.2)
        assert next(news).event == "supervisor.started"
        first.close(over=False)
        with Supervisor(replace(options, port=int(first.url.rpartition(":")[2]))):
            time.sleep(0.3)  # the reader was busy all the while, longer than its patience
            event = next(news)
            assert (event.event, event.fields["term"]) == ("supervisor.started", 2)
