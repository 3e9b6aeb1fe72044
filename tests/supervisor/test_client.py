"""The client against a real supervisor, against none, and against what is no supervisor."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_reshard.errors import LayoutError, ProtocolError, RefitTimeout, SupervisorUnreachable, Unauthorized
from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.supervisor.client import SupervisorClient
from elastic_reshard.supervisor.server import Options, Supervisor
from tests.supervisor.talk import Host, body, key, name, statement


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TOKEN", "URL", "RUNTIME"):
        monkeypatch.delenv(f"ELASTIC_RESHARD_{variable}", raising=False)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor.local(runtime=tmp_path / "run") as running:
        yield running


@pytest.fixture
def client(supervisor: Supervisor) -> Iterator[SupervisorClient]:
    with SupervisorClient(supervisor.url, supervisor.token) as made:
        yield made


def test_everything_a_supervisor_can_be_asked(supervisor: Supervisor, client: SupervisorClient) -> None:
    assert client.put_fragment(body()) == key()
    assert client.health()["instance"] == supervisor.instance
    with Host(supervisor) as host:
        host.admitted([statement(0, 1), statement(1, 1)])
        host.publish(1, number=2)
        host.listen(lambda: bool(host.view.publications))
        view = client.view()
        assert view == host.view.snapshot()
        assert client.view(after=1, wait=5) == view
        assert client.members() == host.view.members
        assert client.groups() == host.view.groups
        assert client.publications() == host.view.publications
        assert client.events(limit=1).events[0].event == "supervisor.started"
        assert client.events(after=1, wait=5).events[0].number == 2
        layout = host.view.groups["trainer"].source_layout
        assert layout is not None
        assert client.layout(layout)["tensors"]["w"]["shape"] == [4, 4]
        (publication,) = host.view.publications
        assert client.abandon(publication, "why not").reason == "why not"
        assert client.leave_member(name(0), 50).leave_within == 50
        assert set(client.leave_group("trainer", 40)) == {name(0), name(1)}
        host.listen(lambda: {m.leave_within for m in host.view.members.values()} == {40})
    wanted = replace(client.policies(), max_lag=2, late_after=0.0, min_rate=2.0, fruitless=7)
    assert client.set_policies(wanted) == client.policies() == wanted
    assert Policies() != wanted


def test_the_membership_is_changed_and_waited_for(supervisor: Supervisor, client: SupervisorClient) -> None:
    client.put_fragment(body())
    with Host(supervisor) as host, host.beating():
        host.admitted([statement(0, 1), statement(1, 1)])
        engines = [
            statement(0, 1, group=g, size=1, roles={"destination"}, source=None, destination=key()) for g in "efg"
        ]
        assert client.growing() is None
        assert client.transfers() == {}
        first = client.grow(groups=2, within=60, name="two", wait=False)
        assert (first.done, first.missing) == (False, 2)
        host.admitted(engines[:2])
        grown = client.grow(groups=2, within=60, name="two")
        assert (grown.done, grown.admitted, grown.missing) == (True, ("e", "f"), 0)
        assert client.growing() == grown
        few = client.grow(members=2, within=0)
        assert (few.done, few.admitted, few.missing) == (True, (), 2)
        host.admitted(engines[2:])
        assert client.hosts()["a"].members == dict.fromkeys(host.view.members, "live")
        assert not client.shrink(["e"], within=60, wait=False).done
        out = client.shrink(["e", "f"], within=0)
        assert (out.done, set(out.members)) == (True, {engines[0].member, engines[1].member})
        assert client.leave_member(engines[2].member, 600, force=True).state == "lost"
        assert client.drain("a", within=60, wait=False).missing == (name(0), name(1))
        assert client.drain("a", within=0.2).done
        assert client.drain("a", within=0.2).members == {}


class Stubborn(http.server.BaseHTTPRequestHandler):
    """A supervisor whose members never leave and where nobody ever joins."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        grow = {"name": "g", "groups": 2, "members": 0, "left": 0.0, "done": False, "missing": 2}
        parting = {"done": False, "members": {}, "missing": [name(0)]}
        found = json.dumps(grow if self.path.startswith("/v1/grow") else parting).encode()
        self.send_response(202)
        self.send_header("content-length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    def log_message(self, *_: object) -> None:
        pass


def test_waiting_has_an_end_that_names_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_reshard.supervisor.calls.GRACE", 0.2)
    with answering(Stubborn) as url, SupervisorClient(url, "token") as client:
        for call, said in (
            (lambda: client.drain("a", within=0.1), f"host a: {name(0)} did not leave within 0.1 s"),
            (lambda: client.shrink(["x", "y"], within=0.1), f"groups x, y: {name(0)} did not leave"),
            (lambda: client.grow(groups=2, within=0.1, name="g"), "grow g: 2 of 2 groups are missing"),
        ):
            began = time.monotonic()
            with pytest.raises(RefitTimeout, match=said) as caught:
                call()
            assert 0.25 < time.monotonic() - began < 5
            assert caught.value.members == (() if "grow" in said else (name(0),))


def test_refusals_are_our_errors(client: SupervisorClient) -> None:
    with pytest.raises(ProtocolError, match="POST /v1/members/no%2Fbody/leave: 404"):
        client.leave_member("no/body")
    with pytest.raises(ProtocolError, match="404: no group 'nobody'; there are none"):
        client.leave_group("nobody")
    with pytest.raises(ProtocolError, match="POST /v1/hosts/x%2Fy/drain: 404: "):
        client.drain("x/y")
    with pytest.raises(ProtocolError, match="POST /v1/groups/shrink: 404: no group 'x', 'y'; there are none"):
        client.shrink(["x", "y"])
    for both in ({}, {"groups": 1, "members": 1}):
        with pytest.raises(ProtocolError, match=r"422: .*say groups or members"):
            client.grow(**both)
    assert client.growing() is None
    with pytest.raises(ProtocolError, match=r"404: no transfer 'p1:1\.1'; there are none"):
        client.transfer("p1:1.1")
    with pytest.raises(ProtocolError, match="404: no layout 'ab'"):
        client.layout("ab")
    with pytest.raises(LayoutError, match="422: not a fragment"):
        client.put_fragment({"tensors": 5})
    with pytest.raises(LayoutError, match="413: the body is larger than"):
        client.put_fragment({"whole": False, "tensors": {"w" * (64 << 20): {"plain": [[1], "int8"]}}})
    with pytest.raises(ProtocolError, match=r"422: query\.wait"):
        client.view(wait=31)


def test_a_wrong_token_is_told_apart(supervisor: Supervisor) -> None:
    with SupervisorClient(supervisor.url, "wrong") as client:
        calls: tuple[Callable[[], object], ...] = (
            client.view, client.health, client.hosts, client.transfers, client.growing, lambda: client.leave_group("x"),
            lambda: client.drain("x"), lambda: client.shrink(["x"]), lambda: client.grow(groups=1),
            lambda: client.put_fragment(body()),
        )  # fmt: skip
        for call in calls:
            with pytest.raises(Unauthorized, match=r"\$ELASTIC_RESHARD_TOKEN"):
                call()
    with pytest.raises(Unauthorized, match="printable ASCII"):
        SupervisorClient(supervisor.url, "töken")


def test_nobody_and_somebody_who_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"127.0.0.1:{deaf.getsockname()[1]}"
        with SupervisorClient(url, "token", timeout=0.2) as client:
            before = time.monotonic()
            with pytest.raises(
                SupervisorUnreachable, match=f"the supervisor at http://{url} did not answer GET /v1/view"
            ):
                client.view()
            assert time.monotonic() - before < 5
    with SupervisorClient(url, "token") as client, pytest.raises(SupervisorUnreachable, match="ConnectError"):
        client.view()
    with SupervisorClient(url, "token", patience=0.3) as client:
        before = time.monotonic()
        with pytest.raises(SupervisorUnreachable):
            client.view()
        assert 0.25 < time.monotonic() - before < 5


class Foreign(http.server.BaseHTTPRequestHandler):
    """Answers everything, with something else."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(kind: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server that answers so; its url."""
    with http.server.HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_what_is_no_supervisor_is_said_to_be_none() -> None:
    with answering(Foreign) as url, SupervisorClient(url, "token") as client:
        for call in (client.view, client.members, client.health, client.policies, client.hosts, client.growing):
            with pytest.raises(ProtocolError, match="is no supervisor, or one of another version"):
                call()
        with pytest.raises(ProtocolError, match="501"):
            client.leave_group("x")


def test_a_patient_client_waits_for_a_restart(tmp_path: Path) -> None:
    options = Options(runtime=tmp_path / "run", journal=tmp_path / "j")
    first = Supervisor(options)
    with SupervisorClient(first.url, first.token, patience=20) as client:
        assert client.health()["term"] == 1
        first.close(over=False)
        terms: list[int] = []
        waiting = threading.Thread(target=lambda: terms.append(client.health()["term"]))
        waiting.start()
        with Supervisor(replace(options, port=int(first.url.rpartition(":")[2]))):
            waiting.join(20)
        assert terms == [2]


def test_url_and_token_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervisor: Supervisor) -> None:
    monkeypatch.setenv("ELASTIC_RESHARD_RUNTIME", str(tmp_path / "run"))
    for given in ({}, {"url": supervisor.url}, {"job": "job"}):
        with SupervisorClient.found(**given) as client:  # type: ignore[arg-type]
            assert client.health()["job"] == "job"
    with pytest.raises(ProtocolError, match="no supervisor is written down"):
        SupervisorClient.found(job="other")
    with pytest.raises(Unauthorized, match="is not known here"):
        SupervisorClient.found("127.0.0.1:1")
    monkeypatch.setenv("ELASTIC_RESHARD_RUNTIME", str(tmp_path / "empty"))
    monkeypatch.setenv("ELASTIC_RESHARD_URL", supervisor.url)
    monkeypatch.setenv("ELASTIC_RESHARD_TOKEN", supervisor.token)
    with SupervisorClient.found() as client:
        assert client.health()["job"] == "job"
