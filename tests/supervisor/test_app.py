"""A real supervisor on loopback and real sockets: what it lets in, whom it tells what, and how it ends."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from elastic_reshard.errors import ProtocolError
from elastic_reshard.layout.fragments import canonical
from elastic_reshard.protocol.ids import PROTOCOL
from elastic_reshard.protocol.messages import Beat, Ended, Hello, Stated
from elastic_reshard.protocol.view import read_down
from elastic_reshard.supervisor.server import LARGEST, Options, Supervisor
from tests.supervisor.real import Start, call, last_words, pair, problem, put_fragment
from tests.supervisor.talk import QUICK, Host, body, key, name, statement, until

# -- who is let in


def test_every_call_wants_the_token(start: Start) -> None:
    supervisor = start()
    assert httpx.get(f"{supervisor.url}/v1/health").json() == {"status": "ok"}
    assert httpx.get(f"{supervisor.url}/v1/ready").json() == {"ready": True}
    paths = call(supervisor, "GET", "/openapi.json").json()["paths"]
    wanted = {"/v1/view", "/v1/fragments/{fragment}", "/v1/groups/{group}/leave", "/v1/hosts/{host}/drain", "/v1/grow"}
    assert wanted <= set(paths)
    tried = 0
    for path, methods in paths.items():
        for method in methods:
            if path in ("/v1/health", "/v1/ready"):
                continue
            for token in (None, "", "Bearer", "Bearer wrong", supervisor.token, f"bearer {supervisor.token}x"):
                headers = {} if token is None else {"Authorization": token}
                answer = httpx.request(method.upper(), supervisor.url + path, headers=headers, verify=False)
                assert "token" in problem(answer, 401)
                assert answer.headers["www-authenticate"] == "Bearer"
                tried += 1
    assert tried >= 21 * 6
    docs = httpx.get(f"{supervisor.url}/docs").text
    # It asks for the token: only what is known by its digest may run there.
    assert docs.count("https://") == docs.count('integrity="sha384-') == 2
    assert supervisor.token not in repr(Options(token=supervisor.token))
    found = call(supervisor, "GET", "/v1/health").json()
    assert (found["job"], found["term"], found["instance"]) == ("job", 1, supervisor.instance)


def test_no_host_is_let_in_without_the_token(start: Start) -> None:
    supervisor = start()
    address = supervisor.url.replace("http", "ws") + "/v1/host"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {supervisor.token}"}):
        with pytest.raises(InvalidStatus) as caught:
            connect(address, additional_headers=headers)
        assert caught.value.response.status_code == 401
    with Host(supervisor) as host:
        host.listen(lambda: host.view.term == 1)


def test_a_given_token_is_the_token(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert start(token="given-token").token == "given-token"
    assert not (tmp_path / "run" / "job" / "token").exists()
    monkeypatch.setenv("ELASTIC_RESHARD_TOKEN", "from-the-environment")
    assert start(job="other").token == "from-the-environment"
    for bad in ("short", "with blanks in it", "nön-ascii-token"):
        with pytest.raises(ProtocolError, match="token must be at least 8"):
            start(token=bad)


# -- what is refused


def raw(supervisor: Supervisor, head: str, *chunks: bytes) -> bytes:
    """The status line of an answer to bytes sent as they are."""
    address = supervisor.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=10) as connection:
        lines = [head, "Host: x", f"Authorization: Bearer {supervisor.token}"]
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        for chunk in chunks:
            connection.sendall(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        found = b""
        while b"\r\n" not in found:
            more = connection.recv(4096)
            assert more, "no answer"
            found += more
        return found.split(b"\r\n")[0]


def test_huge_bodies_are_refused_before_they_are_read(start: Start) -> None:
    supervisor = start()
    fragment = f"PUT /v1/fragments/{key()} HTTP/1.1\r\n"
    for head, least in ((fragment, 64 << 20), ("PUT /v1/policies HTTP/1.1\r\n", 1 << 20)):
        line = raw(supervisor, f"{head}Content-Length: {least + 1}")
        assert line.startswith(b"HTTP/1.1 413")
    assert raw(supervisor, f"{fragment}Content-Length: none").startswith(b"HTTP/1.1 4")
    chunked = "PUT /v1/policies HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
    assert raw(supervisor, chunked, *[b" " * (1 << 18)] * 4, b" ").startswith(b"HTTP/1.1 413")
    assert call(supervisor, "GET", "/v1/health").status_code == 200


def test_garbage_gets_a_problem_document(start: Start) -> None:
    supervisor = start()
    assert "not JSON" in problem(call(supervisor, "PUT", "/v1/fragments/ab", content=b"\xff\x00{"), 400)
    assert "nested" in problem(call(supervisor, "PUT", "/v1/fragments/ab", content=b"[" * 200_000), 400)
    assert "not a fragment" in problem(call(supervisor, "PUT", "/v1/fragments/ab", content=b"[1]"), 422)
    wrong = problem(call(supervisor, "PUT", "/v1/fragments/ab", content=canonical(body())), 422)
    assert key() in wrong
    for content in (b"", b"{", b"[]", b'{"min_groups": 1}', b"\xff"):
        answer = call(supervisor, "PUT", "/v1/policies", content=content, headers={"content-type": "application/json"})
        assert problem(answer, answer.status_code)
        assert answer.status_code == (400 if content == b"\xff" else 422)
    policies = call(supervisor, "GET", "/v1/policies").json()
    assert "must not be negative" in problem(
        call(supervisor, "PUT", "/v1/policies", json=policies | {"min_groups": -1}), 422
    )
    problem(call(supervisor, "PUT", "/v1/policies", json=policies | {"unknown": 1}), 422)
    assert "min_rate must be positive" in problem(
        call(supervisor, "PUT", "/v1/policies", json=policies | {"min_rate": 0}), 422
    )
    problem(call(supervisor, "GET", "/v1/events?after=-1"), 422)
    problem(call(supervisor, "GET", "/v1/events?limit=x"), 422)
    assert call(supervisor, "GET", "/v1/policies").json() == policies


def test_unknown_names_are_not_found(start: Start) -> None:
    supervisor = start()
    with pair(supervisor):
        assert name(0) in problem(call(supervisor, "POST", "/v1/members/nobody@0/leave"), 404)
        assert "there are trainer" in problem(
            call(supervisor, "POST", "/v1/groups/nobody/leave", json={"within": 1}), 404
        )
        for path in ("/v1/publications/p1", "/v1/fragments/ab", "/v1/layouts/ab", "/v1/nothing"):
            problem(call(supervisor, "GET", path), 404)
        problem(call(supervisor, "POST", "/v1/publications/p1/abandon"), 404)
        problem(call(supervisor, "DELETE", "/v1/view"), 405)


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        ({"job": "other"}, "this supervisor is job 'job', host a belongs to job 'other'"),
        ({"protocol": 99}, f"this supervisor speaks protocol {PROTOCOL}, host a speaks 99"),
        ({"obeyed": (1, "another")}, "obeys another supervisor of term 1"),
    ],
)
def test_a_host_that_does_not_belong_is_told_why(start: Start, hello: dict[str, Any], said: str) -> None:
    supervisor = start()
    with pair(supervisor, host="b") as good, Host(supervisor, "a", **hello) as host:
        assert said in last_words(host)
        good.state(statement(0, 2))
        good.listen(lambda: good.heard[name(0)] == 2)


@pytest.mark.parametrize("frame", ["", "{", "[]", '{"kind": "hello"}', '{"kind": "nothing"}', b"\xff\xfe", "beat"])
def test_garbage_frames_end_that_connection_alone(start: Start, frame: str | bytes) -> None:
    supervisor = start()
    with pair(supervisor, host="b") as good:
        address = supervisor.url.replace("http", "ws") + "/v1/host"
        first = Beat().model_dump_json() if frame == "beat" else frame
        headers = {"Authorization": f"Bearer {supervisor.token}"}
        with connect(address, additional_headers=headers) as connection:
            connection.send(first)
            assert json.loads(connection.recv(timeout=10))["kind"] == "farewell"
            with pytest.raises(ConnectionClosed):
                connection.recv(timeout=10)
        with Host(supervisor, "a") as host:
            host.listen(lambda: host.view.term == 1)
            host.socket.send("{" if frame == "beat" else frame)
            assert last_words(host)
        good.state(statement(0, 2))
        good.listen(lambda: good.heard[name(0)] == 2)


def test_huge_frames_and_silence_end_that_connection_alone(start: Start) -> None:
    supervisor = start(deadlines=QUICK)
    headers = {"Authorization": f"Bearer {supervisor.token}"}
    address = supervisor.url.replace("http", "ws") + "/v1/host"
    with (
        Host(supervisor) as good,
        good.beating(),
        connect(address, additional_headers=headers) as silent,
    ):
        with Host(supervisor, "b") as host:
            host.listen(lambda: host.view.term == 1)
            with suppress(ConnectionClosed):  # while it is sent, or after
                host.socket.send("x" * (LARGEST + 1))
            with pytest.raises(ConnectionClosed):
                host.socket.recv(timeout=10)
        with pytest.raises(ConnectionClosed):
            silent.recv(timeout=10)
        good.say(Beat())
        good.listen(lambda: good.view.term == 1)


def test_a_hello_of_a_huge_job_is_taken_in(start: Start) -> None:
    """Of thousands of members: more than 16 MiB. What is not text here is blank."""
    supervisor = start()
    headers = {"Authorization": f"Bearer {supervisor.token}"}
    hello = Hello(job="job", host="a", machine="m", watchdog="ab").model_dump_json()
    address = supervisor.url.replace("http", "ws") + "/v1/host"
    with connect(address, additional_headers=headers, compression=None) as host:
        host.send(hello.ljust(LARGEST // 2))
        told = read_down(host.recv(timeout=10))
        assert (told.term, told.instance) == (1, supervisor.instance)


# -- what is told


def test_members_are_admitted_and_everybody_is_told(start: Start) -> None:
    supervisor = start()
    with Host(supervisor, "b") as other, pair(supervisor) as host:
        assert host.heard == {name(0): 1, name(1): 1}
        assert host.view.groups["trainer"].whole
        assert host.snapshots == 1
        other.listen(lambda: other.view.revision == host.view.revision)
        assert other.view.snapshot() == host.view.snapshot()
        assert other.heard == {}
        members = call(supervisor, "GET", "/v1/members").json()
        assert members == {k: m.model_dump(mode="json") for k, m in host.view.members.items()}
        groups = call(supervisor, "GET", "/v1/groups").json()
        assert groups["trainer"]["members"] == [name(0), name(1)]
        assert call(supervisor, "GET", "/v1/view").text == host.view.snapshot().model_dump_json()
        layout = call(supervisor, "GET", f"/v1/layouts/{groups['trainer']['source_layout']}").json()
        assert layout["tensors"]["w"]["shape"] == [4, 4]
        assert layout["correspondences"] is None
        assert call(supervisor, "GET", f"/v1/fragments/{key()}").content == canonical(body())
        found = call(supervisor, "GET", "/v1/health").json()["hosts"]
        assert found == {h: {"connected": True, "waiting": 0, "overflows": 0} for h in "ab"}


def test_fragments_may_come_after_the_statements_that_name_them(start: Start) -> None:
    supervisor = start()
    with Host(supervisor) as host:
        host.state(statement(0, 1), statement(1, 1, source=key(5)))
        host.listen(lambda: host.heard == {name(0): 1, name(1): 1})
        until(lambda: "layouts.awaited" in call(supervisor, "GET", "/v1/events").text, "the question waits")
        assert not host.view.groups["trainer"].whole
        put_fragment(supervisor)
        host.state(statement(1, 2))
        host.listen(lambda: host.view.groups["trainer"].whole)


def test_fragments_that_do_not_fit_are_refused_with_every_violation(start: Start) -> None:
    supervisor = start()
    put_fragment(supervisor)
    put_fragment(supervisor, body(5))
    with Host(supervisor) as host:
        host.state(statement(0, 1), statement(1, 1, source=key(5)))
        host.listen(lambda: {m.state for m in host.view.members.values()} == {"refused"})
        assert "w: layout: source ranks 0 and [1] hold unlike tensors" in host.view.members[name(0)].reason


def test_a_publication_is_minted_seen_and_abandoned(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host:
        host.publish(1, number=2)
        host.listen(lambda: bool(host.view.publications))
        (publication,) = host.view.publications.values()
        assert (publication.label, publication.weight_version) == ("step", 1)
        path = f"/v1/publications/{publication.id}"
        assert call(supervisor, "GET", path).json() == publication.model_dump(mode="json")
        assert list(call(supervisor, "GET", "/v1/publications").json()) == [publication.id]
        found = call(supervisor, "POST", f"{path}/abandon", json={"reason": "not this one"}).json()
        assert (found["state"], found["reason"]) == ("abandoned", "not this one")


def test_what_was_committed_cannot_be_abandoned(start: Start) -> None:
    supervisor = start()
    policies = call(supervisor, "GET", "/v1/policies").json() | {"min_groups": 0, "late_after": 0.0}
    assert call(supervisor, "PUT", "/v1/policies", json=policies).json() == policies
    with pair(supervisor) as host:
        host.publish(1, number=2)
        host.listen(lambda: host.view.committed != "")
        detail = problem(call(supervisor, "POST", f"/v1/publications/{host.view.committed}/abandon"), 409)
        assert "is committed: only one that moves can be abandoned" in detail


def test_members_and_groups_are_asked_to_leave(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host:
        found = call(supervisor, "POST", f"/v1/members/{name(0)}/leave", json={"within": 60}).json()
        assert found["leave_within"] == 60
        host.listen(lambda: host.view.members[name(0)].leave_within == 60)
        assert host.view.members[name(1)].leave_within is None
        asked = call(supervisor, "POST", "/v1/groups/trainer/leave", json={"within": 0})
        assert asked.status_code == 202
        assert set(asked.json()) == {name(0), name(1)}
        host.listen(lambda: "trainer" not in host.view.groups)
        assert {m.state for m in host.view.members.values()} <= {"lost"}
        problem(call(supervisor, "POST", "/v1/groups/trainer/leave", json={"within": -1}), 422)


def test_events_are_numbered_paged_and_waited_for(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host:
        whole = call(supervisor, "GET", "/v1/events?limit=1000").json()
        numbers = [e["number"] for e in whole["events"]]
        assert numbers == list(range(1, len(numbers) + 1))
        named = [e["event"] for e in whole["events"]]
        assert named[0] == "supervisor.started"
        assert {"member.joining", "member.live", "group.admitted"} <= set(named)
        ats = [e["at"] for e in whole["events"]]
        assert ats == sorted(ats)
        pages, after = [], 0
        while (page := call(supervisor, "GET", f"/v1/events?after={after}&limit=2").json())["events"]:
            assert len(page["events"]) <= 2
            pages += page["events"]
            after = page["next"]
        assert pages == whole["events"]
        answers: list[dict[str, Any]] = []
        waiting = threading.Thread(
            target=lambda: answers.append(call(supervisor, "GET", f"/v1/events?after={after}&wait=9").json())
        )
        waiting.start()
        host.say(Ended(member=name(0), how="killed"))
        waiting.join(10)
        assert answers[0]["events"][0]["number"] == after + 1
        assert answers[0]["dropped"] == 0


def test_the_view_can_be_waited_for(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host:
        assert call(supervisor, "GET", "/v1/view?after=1&wait=9").json()["revision"] == host.view.revision
        same = call(supervisor, "GET", f"/v1/view?after={host.view.revision}&wait=0.05").json()
        assert same["revision"] == host.view.revision
        problem(call(supervisor, "GET", "/v1/view?wait=1000"), 422)


def test_a_second_connection_of_a_host_takes_the_place_of_the_first(start: Start) -> None:
    supervisor = start(deadlines=QUICK)
    with pair(supervisor) as old, Host(supervisor, watchdog="cd", statements=(statement(0, 2), statement(1, 2))) as new:
        assert "took its place" in last_words(old)
        new.listen(lambda: new.heard == {name(0): 2, name(1): 2})
        assert call(supervisor, "GET", "/v1/health").json()["hosts"]["a"]["connected"]
        # Beyond eviction: the first one's end must not count against the host.
        for _ in range(12):
            new.say(Beat())
            new.say(Stated(statement=statement(0, 3)))
            assert call(supervisor, "GET", f"/v1/view?after={new.view.revision}&wait=0.1").status_code == 200
        new.listen(lambda: new.heard[name(0)] == 3)
        assert {m.state for m in new.view.members.values()} == {"live"}


def test_a_label_in_use_by_another_machine_is_refused(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host, Host(supervisor, machine="another") as other:
        assert "in use by another machine (m); give each machine its own label" in last_words(other)
        host.state(statement(0, 2))
        host.listen(lambda: host.heard[name(0)] == 2)


# -- slow clients


def flood(supervisor: Supervisor, host: Host, seq: int) -> None:
    """One publish, committed at once, with 200 kB of extras: told three times."""
    if seq == 1:
        policies = call(supervisor, "GET", "/v1/policies").json() | {"min_groups": 0, "late_after": 0.0}
        assert call(supervisor, "PUT", "/v1/policies", json=policies).status_code == 200
    before = host.view.committed
    host.publish(seq, number=seq + 1, extras={"x": secrets.token_urlsafe(200_000)})
    host.listen(lambda: host.view.committed != before and host.heard == {name(0): seq + 1, name(1): seq + 1})


def connections(supervisor: Supervisor) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = call(supervisor, "GET", "/v1/health").json()["hosts"]
    return found


def test_a_host_that_reads_slowly_costs_a_snapshot_not_memory_nor_others(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host, Slow(supervisor) as slow:
        most = seq = 0
        while not connections(supervisor)["slow"]["overflows"]:
            seq += 1
            assert seq < 200, "its buffers never fill"
            flood(supervisor, host, seq)
            most = max(most, connections(supervisor)["slow"]["waiting"])
        assert 1 << 20 < most <= 4 << 20
        assert connections(supervisor)["a"]["overflows"] == 0
        assert host.snapshots == 1
        newest = host.view.revision
        slow.listen(lambda: slow.view.revision >= newest)
        assert slow.snapshots == 2
        assert slow.view.snapshot() == host.view.snapshot()


def test_a_host_that_never_reads_is_cut(start: Start) -> None:
    # Long enough for its buffers to fill before its silence alone is a reason.
    supervisor = start(deadlines=replace(QUICK, evict=2.0, reregister=2.4))
    with pair(supervisor) as host, Slow(supervisor) as slow:
        seq = 0
        while connections(supervisor).get("slow", {"connected": False})["connected"]:
            seq += 1
            assert seq < 400, "it is never cut"
            flood(supervisor, host, seq)
        cut = [e["fields"] for e in events(supervisor) if e["event"] == "host.cut"]
        assert cut == [{"host": "slow", "reason": "it did not read for 2.0 s"}]
        assert host.snapshots == 1
        with pytest.raises((ConnectionClosed, OSError)):
            slow.listen(lambda: False)


def events(supervisor: Supervisor) -> list[dict[str, Any]]:
    """All that are remembered."""
    found: list[dict[str, Any]] = []
    while True:
        after = found[-1]["number"] if found else 0
        page = call(supervisor, "GET", f"/v1/events?after={after}&limit=1000").json()["events"]
        if not page:
            return found
        found += page


class Slow(Host):
    """Reads only when `listen` is called: small buffers, and a client library that stops reading when nobody takes."""

    def __init__(self, supervisor: Supervisor) -> None:
        address = supervisor.url.removeprefix("http://").split(":")
        raw_ = socket.socket()
        raw_.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        raw_.connect((address[0], int(address[1])))

        super().__init__(supervisor, "slow", connection=raw_)
