"""A real supervisor for tests of its HTTP side, and what they say to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from elastic_reshard.layout.fragments import canonical
from elastic_reshard.supervisor.server import Options, Supervisor
from tests.supervisor.talk import Host, body, key, statement

Start = Callable[..., Supervisor]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Supervisors with a runtime folder of their own, ended after the test."""
    monkeypatch.delenv("ELASTIC_RESHARD_TOKEN", raising=False)
    made: list[Supervisor] = []

    def begin(**options: Any) -> Supervisor:
        made.append(Supervisor(Options(**({"runtime": tmp_path / "run"} | options))))
        return made[-1]

    yield begin
    for supervisor in made:
        supervisor.close()


def call(supervisor: Supervisor, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {supervisor.token}"} | more.pop("headers", {})
    return httpx.request(
        method, supervisor.url + path, headers=headers, timeout=10, trust_env=False, verify=False, **more
    )


def put_fragment(supervisor: Supervisor, said: dict[str, Any] | None = None) -> None:
    said = said or body()
    done = call(supervisor, "PUT", f"/v1/fragments/{key(said['tensors']['w']['plain'][0][0])}", content=canonical(said))
    assert done.status_code == 204, done.text


def problem(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    found = answer.json()
    assert found["status"] == status
    assert found["title"]
    return str(found["detail"])


def last_words(host: Host) -> str:
    host.listen(lambda: host.farewell is not None)
    assert host.farewell is not None
    with pytest.raises(ConnectionClosed):
        host.socket.recv(timeout=10)
    return host.farewell.reason


def heard(host: Host) -> Host:
    """Once it has the view."""
    host.listen(lambda: host.snapshots == 1)
    return host


def pair(supervisor: Supervisor, **hello: Any) -> Host:
    """A host with a trainer group of two that is admitted."""
    put_fragment(supervisor)
    host = Host(supervisor, **hello)
    host.admitted([statement(0, 1), statement(1, 1)])
    return host
