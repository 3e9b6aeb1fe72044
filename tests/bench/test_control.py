"""`bench control`: a real supervisor's process, every word over a real WebSocket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from websockets.sync.server import ServerConnection, serve

from elastic_reshard.bench.control import ControlSetup, control_tables, measure_control, rows_of, steps
from elastic_reshard.bench.control_cast import TRAINER, Cast
from elastic_reshard.bench.control_line import Line, dial
from elastic_reshard.bench.control_server import ServerProcess
from elastic_reshard.errors import ProtocolError
from elastic_reshard.supervisor.client import SupervisorClient

ROOT = Path(__file__).parents[2]


def test_everybody_has_a_host_and_engines_have_one_each() -> None:
    for members in (16, 100, 1000, 1003):
        cast = Cast(members)
        assert len(cast.players) == members == sum(map(len, cast.by_host))
        assert cast.hosts == -(-members // 8)
        assert all(len({p.host for p in engine}) == 1 for engine in cast.engines.values())
        assert {p.said.group.size for p in cast.trainers} == {len(cast.trainers)}
        assert abs(2 * len(cast.trainers) - members) <= 8


def test_a_small_job_is_measured_and_comes_out_right() -> None:
    said: list[str] = []
    setup = ControlSetup((32, 16), refits=2, changes=2, beats=1.0)
    found = measure_control(setup, said.append)
    assert [f.members for f in found] == [16, 32]
    assert len(said) == steps(setup)
    for figures in found:
        assert len(figures.begin) == len(figures.commit) == len(figures.whole) == 2
        assert 0 < figures.begin[0] < figures.whole[0]
        assert figures.memory > 10 << 20
        assert figures.told > 1000
        assert 0 <= figures.beats_share < 1
        assert all(row.right for row in rows_of(figures))
        json.dumps(figures.to_data())
    assert control_tables(found)
    assert control_tables(found[:1])


def test_the_supervisors_own_word_agrees_with_what_was_played(tmp_path: Path) -> None:
    from elastic_reshard.bench import control as c
    from elastic_reshard.bench.control_hosts import Crowd

    async def play(server: ServerProcess) -> None:
        cast = Cast(24)
        figures = c.ControlFigures(24, 3)
        async with Crowd(cast, server.url, server.token) as crowd:
            await c._join(figures, crowd, server)
            for number in (1, 2, 3):
                await c._refit(figures, crowd, number)
            view = await asyncio.to_thread(client.view)
            assert view.groups[TRAINER].whole  # type: ignore[union-attr]
            served = {g.serving for name, g in view.groups.items() if g is not None and name != TRAINER}
            assert served == {3}
            assert crowd.view.revision <= view.revision

    with ServerProcess(tmp_path) as server, SupervisorClient(server.url, server.token) as client:
        c._put_fragment(server)
        asyncio.run(play(server))
        assert client.health()["job"] == "control"
        before = server.cpu()
        assert before > 0
    assert not Path(f"/proc/{server.pid}").exists()


@pytest.mark.parametrize("size", [0, 1, 125, 126, 4000, 65535, 65536, 1 << 20])
def test_a_line_reads_and_writes_messages_of_every_length(size: int) -> None:
    came = threading.Event()
    heard: list[bytes | str] = []

    def echo(connection: ServerConnection) -> None:
        for message in connection:
            heard.append(message)
            connection.ping(b"alive")
            connection.send(message)
            connection.send("end")
            came.set()

    async def play(port: int, keep: int) -> list[tuple[bytes, int]]:
        got: list[tuple[bytes, int]] = []
        over = asyncio.Event()

        def hear(raw: bytes, length: int) -> None:
            got.append((raw, length))
            if raw == b"end":
                over.set()

        line: Line = await dial(f"http://127.0.0.1:{port}", "t", keep, hear, lambda _: None)
        line.send(text)
        await asyncio.wait_for(over.wait(), 10)
        line.abort()
        await line.closed.wait()
        return got

    text = bytes(97 + i % 26 for i in range(size))
    with serve(echo, "127.0.0.1", 0, compression=None, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.socket.getsockname()[1]
        whole = asyncio.run(play(port, 0))
        head = asyncio.run(play(port, 400))
        server.shutdown()
        thread.join()
    assert whole == [(text, size), (b"end", 3)]
    assert head == [(text[:400], size), (b"end", 3)]
    assert heard == [text.decode(), text.decode()]


def test_a_line_says_why_it_is_refused(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, pytest.raises(ProtocolError, match="401"):
        asyncio.run(dial(server.url, "wrong-token", 0, lambda *_: None, lambda _: None))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(dial(f"http://127.0.0.1:{nobody.getsockname()[1]}", "t", 0, lambda *_: None, lambda _: None))


def test_the_command_refuses_what_it_can_not_simulate() -> None:
    for members, why in (("1,2", "16 to 100,000"), ("many", "numbers separated")):
        done = subprocess.run(
            [sys.executable, "-m", "elastic_reshard", "bench", "control", "--members", members],
            capture_output=True, text=True, timeout=60, cwd=ROOT, env=dict(os.environ), check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert why in done.stderr
