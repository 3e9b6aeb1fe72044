"""A real supervisor: terms, journals and ports, and how it ends."""

from __future__ import annotations

import http.client
import socket
import sqlite3
import threading
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from elastic_reshard.errors import Fenced, ProtocolError
from elastic_reshard.protocol.places import Place, place_of
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.journal import Journal
from elastic_reshard.supervisor.server import Supervisor
from tests.supervisor.real import Start, call, heard, last_words, pair, put_fragment
from tests.supervisor.talk import Host, name, statement

# -- terms


def test_a_host_that_obeyed_a_later_term_ends_this_supervisor(start: Start, tmp_path: Path) -> None:
    supervisor = start()
    with pair(supervisor, host="b") as good, Host(supervisor, obeyed=(7, "later")) as host:
        assert "has obeyed term 7 of job job, this supervisor has 1" in last_words(host)
        assert "This one ends" in last_words(good)
        with pytest.raises(Fenced, match="has obeyed term 7"):
            supervisor.wait(10)
    assert not (tmp_path / "run" / "job" / "url").exists()


def test_of_two_on_one_journal_the_older_ends_and_tells_its_hosts(start: Start, tmp_path: Path) -> None:
    journal = tmp_path / "j"
    old = start(journal=journal)
    with Host(old) as host:
        put_fragment(old)
        new = start(journal=journal)
        assert (old.term, new.term) == (1, 2)
        host.state(statement(0, 1), statement(1, 1))  # their admission has to be written
        assert "has term 2, this supervisor has 1" in last_words(host)
        assert not host.view.groups or not host.view.groups["trainer"].whole, "told, and never written"
        with pytest.raises(Fenced):
            old.wait(10)
        with Host(new, obeyed=(1, old.instance), statements=(statement(0, 1), statement(1, 1))) as again:
            again.listen(lambda: "trainer" in again.view.groups and again.view.groups["trainer"].whole)
            assert again.view.term == 2


def test_a_restart_keeps_documents_and_layouts_and_takes_the_next_term(start: Start, tmp_path: Path) -> None:
    first = start(journal=tmp_path / "j")
    with pair(first) as host:
        host.publish(1, number=2)
        host.listen(lambda: bool(host.view.publications))
        before = host.view.snapshot()
        states = host.publish(1, number=3)
        first.close(over=False)
        with pytest.raises(ConnectionClosed):
            host.listen(lambda: False)
        assert host.farewell is None
    port = int(first.url.rpartition(":")[2])
    second = start(journal=tmp_path / "j", port=port)
    assert (second.url, second.token, second.term) == (first.url, first.token, 2)
    found = call(second, "GET", "/v1/view").json()
    assert found["publications"] == before.model_dump(mode="json")["publications"]
    assert set(found["members"]) == set(before.members)
    assert found["groups"]["trainer"]["source_layout"] == before.groups["trainer"].source_layout  # type: ignore[union-attr]
    with Host(second, obeyed=(1, first.instance), statements=states) as host:
        host.view.apply(before)
        host.listen(lambda: host.view.term == 2 and host.heard == {name(0): 3, name(1): 3})
        assert host.view.groups["trainer"].whole
        assert list(host.view.publications) == list(before.publications)


def test_a_lost_journal_is_recovered_from_members_above_the_term_they_obeyed(start: Start, tmp_path: Path) -> None:
    supervisor = start(journal=tmp_path / "lost", recover_from=2)
    put_fragment(supervisor)
    assert httpx.get(f"{supervisor.url}/v1/health").json() == {"status": "recovering"}
    with (
        heard(Host(supervisor, "b")) as early,
        Host(supervisor, obeyed=(41, "before"), statements=(statement(0, 5),)) as host,
    ):
        host.listen(lambda: host.view.term == 42)
        early.listen(lambda: early.view.term == 42 and early.snapshots == 2)
        host.listen(lambda: host.heard == {name(0): 5})
        assert "trainer" not in host.view.groups
        journal = Journal.open(tmp_path / "lost", "job")
        assert journal._connection.execute("SELECT COUNT(*) FROM docs").fetchone() == (0,)
        journal.close()
        host.state(statement(1, 3))
        host.listen(lambda: "trainer" in host.view.groups and host.view.groups["trainer"].whole)
    supervisor.close(over=False)
    again = start(journal=tmp_path / "lost", recover_from=2)
    assert again.term == 43
    assert set(call(again, "GET", "/v1/members").json()) == {name(0), name(1)}


# -- ports, places, ends


def test_a_port_that_is_taken_is_named_and_nothing_is_left(start: Start, tmp_path: Path) -> None:
    """CASES B48: the port is taken between its choice and its use."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ProtocolError, match=f"port {port} of 127.0.0.1 is taken by another process"):
            start(port=port, journal=tmp_path / "j")
    assert not (tmp_path / "j").exists()
    assert not (tmp_path / "run" / "job" / "url").exists()
    with pytest.raises(ProtocolError, match="cannot listen on"):
        start(host="no.such.host.invalid")


def test_port_0_is_a_port_that_nobody_else_gets(start: Start) -> None:
    supervisors = [start(job=f"job-{i}") for i in range(4)]
    assert len({s.url for s in supervisors}) == 4
    for one in supervisors:
        assert call(one, "GET", "/v1/health").json()["job"] == one.job


def test_a_journal_that_cannot_be_used_leaves_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"garbage " * 1000)
    with pytest.raises(ProtocolError, match="is no journal"):
        start(journal=tmp_path / "j")
    assert not (tmp_path / "run" / "job" / "url").exists()


def test_the_end_of_a_job_is_told_and_leaves_nothing(start: Start, tmp_path: Path) -> None:
    supervisor = start()
    folder = tmp_path / "run" / "job"
    assert (folder / "url").read_text() == supervisor.url
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    with pair(supervisor) as host:
        closing = threading.Thread(target=supervisor.close)
        closing.start()
        assert last_words(host) == "the job is over"
        assert host.farewell is not None
        assert host.farewell.over
        closing.join(10)
    assert list(folder.iterdir()) == []
    assert supervisor.wait(0)
    supervisor.close()


@pytest.mark.parametrize("over", [True, False])
def test_an_ending_supervisor_leaves_its_successors_place_alone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """Its port is free before its last work is done: a successor on a fixed port has the same url, and maybe its token."""
    listening, go_on = threading.Event(), threading.Event()

    class Slow(Shell):
        def close(self, flush: bool) -> None:
            listening.set()
            assert go_on.wait(20)
            super().close(flush)

    monkeypatch.setattr("elastic_reshard.supervisor.server.Shell", Slow)
    first = start()
    monkeypatch.undo()
    closing = threading.Thread(target=first.close, args=(over,))
    closing.start()
    try:
        assert listening.wait(20)
        second = start(port=int(first.url.rpartition(":")[2]))
        assert (second.url, second.token) == (first.url, first.token)
    finally:
        go_on.set()
        closing.join(20)
    assert first.wait(0)
    place = place_of(job="job", runtime=tmp_path / "run")
    assert place == Place("job", second.url, second.token)
    second.close()
    assert list((tmp_path / "run" / "job").iterdir()) == []


def test_calls_that_wait_are_answered_when_it_ends(start: Start) -> None:
    supervisor = start()
    host, port = supervisor.url.removeprefix("http://").split(":")
    waiting = [http.client.HTTPConnection(host, int(port), timeout=10) for _ in range(2)]
    for connection, path in zip(waiting, ("/v1/view?after=1&wait=20", "/v1/events?after=1&wait=20"), strict=True):
        connection.request("GET", path, headers={"Authorization": f"Bearer {supervisor.token}"})
    assert call(supervisor, "GET", "/v1/health").status_code == 200  # the two have come in before this one
    supervisor.close()
    for connection in waiting:
        assert connection.getresponse().status == 200
        connection.close()


def test_a_disk_that_fails_ends_it_before_anyone_is_told(start: Start, tmp_path: Path) -> None:
    supervisor = start(journal=tmp_path / "j")
    with Host(supervisor) as host:
        put_fragment(supervisor)
        with sqlite3.connect(tmp_path / "j") as sql:
            sql.execute("DROP TABLE docs")
        sql.close()
        host.state(statement(0, 1), statement(1, 1))
        assert "cannot be read or written: no such table: docs" in last_words(host)
        assert not host.view.groups["trainer"].whole
        with pytest.raises(ProtocolError, match="Nothing was told that is not on disk"):
            supervisor.wait(10)


def test_one_in_a_driver_script_needs_nothing(tmp_path: Path) -> None:
    with Supervisor.local(runtime=tmp_path / "run") as supervisor, pair(supervisor) as host:
        assert supervisor.url.startswith("http://127.0.0.1:")
        assert host.view.groups["trainer"].whole
    assert supervisor.wait(0)
