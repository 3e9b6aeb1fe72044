"""The description of the HTTP interface: whole, with examples that are true, and errors that say what to do."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_reshard.supervisor import client, client_async
from elastic_reshard.supervisor.answers import Problem
from elastic_reshard.supervisor.api_examples import examples
from tests.supervisor.real import Start, call, pair


@pytest.fixture
def described(start: Start) -> dict[str, Any]:
    found: dict[str, Any] = call(start(), "GET", "/openapi.json").json()
    return found


def operations(described: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(p, m, o) for p, methods in described["paths"].items() for m, o in methods.items()]


def test_every_operation_has_examples_and_says_how_it_may_fail(described: dict[str, Any]) -> None:
    found = operations(described)
    assert len(found) >= 32
    assert {o["operationId"] for _, _, o in found} == set(examples())
    for path, method, operation in found:
        where = f"{method} {path}"
        assert operation.get("description"), where
        for parameter in operation.get("parameters", ()):
            assert parameter["in"] != "path" or parameter["example"], where
        if "requestBody" in operation:
            assert operation["requestBody"]["content"]["application/json"]["example"], where
        for code, answer in operation["responses"].items():
            for kind, content in answer.get("content", {}).items():
                assert "example" in content, f"{where} {code}"
                assert kind == ("application/json" if code < "400" else "application/problem+json"), f"{where} {code}"
                if code >= "400":
                    assert content["example"]["status"] == int(code), where
                    assert Problem.model_validate(content["example"]).remedy, where
        named = {p["name"] for p in operation.get("parameters", ())}
        acting = method != "get" and "fragments" not in path
        assert ({"Idempotency-Key", "request_id"} <= named) == acting, where


def test_what_the_examples_send_is_taken(start: Start, described: dict[str, Any]) -> None:
    """Against a job that has none of their names: it is understood, and answered as described."""
    supervisor = start()
    with pair(supervisor):
        sent = 0
        for path, method, operation in operations(described):
            names = {p["name"]: p["example"] for p in operation.get("parameters", ()) if p["in"] == "path"}
            example = examples()[operation["operationId"]]
            answer = call(supervisor, method.upper(), path.format(**names), json=example.sent)
            assert str(answer.status_code) in operation["responses"], (method, path, answer.text)
            assert answer.status_code < 500
            if method in ("post", "put", "patch") and "{" not in path:
                assert answer.status_code in (200, 202, 404), (method, path, answer.text)
            sent += 1
        assert sent >= 32


def test_problems_say_what_to_do(start: Start) -> None:
    supervisor = start()
    for method, path, body, status in (
        ("GET", "/v1/groups/nobody", None, 404),
        ("GET", "/v1/nothing", None, 404),
        ("DELETE", "/v1/view", None, 405),
        ("POST", "/v1/grow", {"groups": -1}, 422),
        ("GET", "/v1/events?after=1e99", None, 422),
    ):
        found = Problem.model_validate(call(supervisor, method, path, json=body).json())
        assert (found.status, found.type) == (status, "about:blank")
        assert found.detail
        assert found.remedy.endswith(".")
        assert (found.errors is not None) == (status == 422)


def test_while_a_journal_is_recovered_it_is_not_ready_and_says_why(start: Start) -> None:
    supervisor = start(recover_from=2)
    answer = call(supervisor, "GET", "/v1/ready")
    assert answer.status_code == 503
    assert "0 of 2 members have said what they have" in answer.json()["detail"]
    assert answer.json()["remedy"]
    with pair(supervisor):
        assert call(supervisor, "GET", "/v1/ready").json() == {"ready": True}


def test_both_clients_can_ask_for_all_of_it(described: dict[str, Any]) -> None:
    """No operation without a method, and the same methods in both."""
    sync, twin = (
        {name for name in vars(kind) if not name.startswith("_")}
        for kind in (client.SupervisorClient, client_async.AsyncSupervisorClient)
    )
    assert sync - {"close"} == twin - {"aclose"}
    renamed = {
        "get_layout": "layout", "growth": "growing", "cancel": "cancel_grow", "all_progress": "progress",
        "member": "members", "group": "groups", "publication": "publications",
    }  # fmt: skip
    asked = {o["operationId"] for _, _, o in operations(described)} - {"get_fragment"}
    assert {renamed.get(name, name) for name in asked} <= sync
