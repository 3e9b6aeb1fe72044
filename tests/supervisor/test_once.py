"""Acting calls that are named act once: sent twice, sent at once, sent to a supervisor that was killed meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from elastic_reshard.supervisor import requests
from elastic_reshard.supervisor.client import SupervisorClient
from elastic_reshard.supervisor.server import Supervisor
from tests.supervisor.real import Start, call, pair, problem
from tests.supervisor.talk import Host, name, statement
from tests.supervisor.test_app_membership import happened
from tests.test_cli_job import Running, Shell


def named(supervisor: Supervisor | Running, method: str, path: str, key: str, **more: object) -> httpx.Response:
    return call(supervisor, method, path, headers={"Idempotency-Key": key}, **more)  # type: ignore[arg-type]


def test_a_call_that_is_sent_twice_acts_once_and_is_answered_alike(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host:
        path = f"/v1/members/{name(0)}/leave"
        first = named(supervisor, "POST", path, "k", json={"within": 60, "force": False})
        assert (first.status_code, first.headers.get("Idempotency-Replayed")) == (202, None)
        call(supervisor, "POST", path, json={"within": 90})
        # Other blanks, another order, by the query: the same call.
        body = '{"force":false,\n "within": 60}'
        again = call(
            supervisor, "POST", f"{path}?request_id=k", content=body, headers={"content-type": "application/json"}
        )
        assert (again.status_code, again.json()) == (202, first.json())
        assert again.headers["Idempotency-Replayed"] == "true"
        host.listen(lambda: host.view.members[name(0)].leave_within == 90)
        assert len(happened(supervisor, "member.leave_asked")) == 2


def test_nothing_is_acknowledged_that_would_not_be_on_disk(start: Start, tmp_path: Path) -> None:
    """While a lost journal is recovered nothing is written."""
    supervisor = start(journal=tmp_path / "lost", recover_from=2)
    for how in ({}, {"Idempotency-Key": "k"}):
        answer = call(supervisor, "PATCH", "/v1/policies", headers=how, json={"late_after": 7})
        assert "0 of 2 members have said what they have; nothing was done" in problem(answer, 503)
    assert call(supervisor, "GET", "/v1/policies").json()["late_after"] == 30
    with pair(supervisor) as host:
        host.listen(lambda: len(host.view.members) == 2)
        assert named(supervisor, "PATCH", "/v1/policies", "k", json={"late_after": 7}).status_code == 200


def test_a_name_is_of_one_call_only(start: Start) -> None:
    supervisor = start()
    with pair(supervisor):
        path = f"/v1/members/{name(0)}/leave"
        assert named(supervisor, "POST", path, "k", json={"within": 60}).status_code == 202
        for method, other, body in (
            ("POST", path, {"within": 61}),
            ("POST", f"/v1/members/{name(1)}/leave", {"within": 60}),
            ("PATCH", "/v1/policies", {"late_after": 1}),
        ):
            assert "'k' was the name of another call" in problem(named(supervisor, method, other, "k", json=body), 409)
        both = call(supervisor, "POST", f"{path}?request_id=a", headers={"Idempotency-Key": "b"}, json={"within": 60})
        assert "a call has one name" in problem(both, 422)
        for bad in ("", "x" * 129, "with blank"):
            problem(call(supervisor, "POST", path, params={"request_id": bad}, json={"within": 60}), 422)
        assert len(happened(supervisor, "member.leave_asked")) == 1


def test_a_call_that_was_refused_may_be_sent_again_when_it_can_be_obeyed(start: Start) -> None:
    supervisor = start()
    path = f"/v1/members/{name(0)}/leave"
    problem(named(supervisor, "POST", path, "k", json={"within": 60}), 404)
    with pair(supervisor):
        assert named(supervisor, "POST", path, "k", json={"within": 60}).status_code == 202


def test_many_at_once_act_once(start: Start) -> None:
    supervisor = start()
    with pair(supervisor):
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(named(supervisor, "POST", "/v1/hosts/a/drain?wait=0.2", "k", json={"within": 60}))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert [(a.status_code, a.json()["missing"]) for a in answers] == [(202, [name(0), name(1)])] * 8
        assert len(happened(supervisor, "host.drained")) == 1
        assert len(happened(supervisor, "member.leave_asked")) == 2


def test_what_is_not_done_yet_is_told_anew_and_asked_for_no_second_time(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host:
        first = named(supervisor, "POST", "/v1/hosts/a/drain", "k", json={"within": 60})
        assert (first.status_code, first.headers["Retry-After"]) == (202, "1")
        call(supervisor, "DELETE", "/v1/hosts/a/drain")
        again = named(supervisor, "POST", "/v1/hosts/a/drain", "k", json={"within": 60})
        assert (again.status_code, again.json()["missing"]) == (202, [name(0), name(1)])
        assert call(supervisor, "GET", "/v1/hosts").json()["a"]["drained"] is None
        host.state(*(statement(r, 2, leaving=True) for r in (0, 1)))
        done = named(supervisor, "POST", "/v1/hosts/a/drain?wait=9", "k", json={"within": 60})
        assert (done.status_code, done.json()["done"]) == (200, True)


def test_a_bounded_number_is_remembered(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST", 3)
    supervisor = start()
    for number in range(5):
        assert named(supervisor, "PATCH", "/v1/policies", f"k{number}", json={"late_after": number}).status_code == 200
    again = named(supervisor, "PATCH", "/v1/policies", "k4", json={"late_after": 4})
    assert again.headers["Idempotency-Replayed"] == "true"
    assert (
        "Idempotency-Replayed" not in named(supervisor, "PATCH", "/v1/policies", "k0", json={"late_after": 0}).headers
    )


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def test_over_a_kill_of_the_supervisor(shell: Shell) -> None:
    """SIGKILL after an answer, and after an act whose answer was never made: the same name, the same answer, one act."""
    first = shell.supervisor()
    with SupervisorClient(first.url, first.token) as client:
        client.put_fragment({"whole": False, "tensors": {"w": {"plain": [[4, 4], "float32"]}}})
    with Host(first) as host, host.beating():  # type: ignore[arg-type]
        host.admitted([statement(0, 1), statement(1, 1)])
        leave = f"/v1/members/{name(0)}/leave"
        asked = named(first, "POST", leave, "leave", json={"within": 600}).json()
        other = named(first, "PATCH", "/v1/policies", "policies", json={"late_after": 7.5, "max_lag": 2}).json()
        grow = named(first, "POST", "/v1/grow", "grow", json={"groups": 2, "within": 600}).json()
        drained = named(first, "POST", "/v1/hosts/a/drain", "drain", json={"within": 300})
        assert (drained.status_code, drained.json()["missing"]) == (202, [name(0), name(1)])
        assert call(first, "DELETE", "/v1/hosts/a/drain").json()["drained"] is None  # type: ignore[arg-type]
    first.process.kill()
    first.process.communicate(timeout=20)
    second = shell.supervisor(port=int(first.url.rpartition(":")[2]))
    assert second.term == 2
    for key, method, path, body, told in (
        ("leave", "POST", leave, {"within": 600}, asked),
        ("policies", "PATCH", "/v1/policies", {"late_after": 7.5, "max_lag": 2}, other),
    ):
        again = named(second, method, path, key, json=body)
        assert (again.json(), again.headers["Idempotency-Replayed"]) == (told, "true")
        problem(named(second, method, path, key, json={"within": 1}), 409)
    grown = named(second, "POST", "/v1/grow", "grow", json={"groups": 2, "within": 600}).json()
    assert (grown["name"], grown["missing"], grown["done"]) == (grow["name"], 2, False)
    assert call(second, "GET", "/v1/policies").json()["late_after"] == 7.5  # type: ignore[arg-type]
    # The drain had acted, its answer was "not yet", and it was lifted: it does not begin again, it is told how far it is.
    again = named(second, "POST", "/v1/hosts/a/drain", "drain", json={"within": 300})
    assert (again.status_code, again.json()["missing"]) == (202, [name(0), name(1)])
    assert happened(second, "member.leave_asked") == []  # type: ignore[arg-type]
    assert happened(second, "host.drained") == []  # type: ignore[arg-type]
    assert call(second, "GET", "/v1/hosts").json()["a"]["drained"] is None  # type: ignore[arg-type]
    assert second.end()[0] == 0
