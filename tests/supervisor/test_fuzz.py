"""The HTTP interface against calls made from its own description, right ones and wrong ones: it never breaks, and every answer
is as described. A live job is behind it; what the calls do to it is done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from elastic_reshard.protocol.messages import Landing, MoverSaid
from elastic_reshard.supervisor.server import Options, Supervisor
from tests.supervisor.real import call, heard, put_fragment
from tests.supervisor.talk import Host, key, name, statement, until

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: the extra `fuzz` has it")

LONG = 400
DEFAULT = 5


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Supervisor]:
    """A supervisor with two hosts, a gang, an engine and a transfer in hand."""
    landing = Landing(arena="cd" * 16, cells=1, cell=1 << 20)
    more: dict[str, Any] = {"roles": {"destination"}, "source": None, "destination": key(), "host": "b"}
    engine = statement(0, 1, group="engine", size=1, landing=landing, **more)
    with Supervisor(Options(runtime=tmp_path / "run", journal=tmp_path / "j")) as supervisor:
        put_fragment(supervisor)
        with Host(supervisor) as host, Host(supervisor, "b") as other, host.beating(), other.beating():
            host.admitted([statement(0, 1), statement(1, 1)])
            other.admitted([engine])
            heard(host).listen(lambda: "engine" in host.view.groups)
            host.publish(1, number=2)
            host.listen(lambda: bool(host.view.transfers))
            (transfer,) = host.view.transfers.values()
            host.say(MoverSaid(member=name(0), mover="ab", transfer=transfer.id, state="starting"))
            until(lambda: bool(call(supervisor, "GET", "/v1/hosts").json()["a"]["movers"]), "the mover is known")
            with reading(host), reading(other):
                yield supervisor


@contextmanager
def reading(host: Host) -> Iterator[None]:
    """It takes whatever it is told, so that it is not cut off."""
    over = threading.Event()

    def take() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                host.socket.recv(timeout=0.1)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def names(supervisor: Supervisor) -> dict[str, list[str]]:
    """What there is, by the parameter of a path."""
    found = call(supervisor, "GET", "/v1/view").json()
    layouts = [g["source_layout"] for g in found["groups"].values() if g["source_layout"]]
    return {
        "member": [*found["members"], "nobody@0000000000000000"], "group": [*found["groups"], "shrink"],
        "host": ["a", "b"], "publication": [*found["publications"], "p0.0"], "transfer": list(found["transfers"]),
        "name": ["one", "two"], "fragment": [key()], "layout": layouts,
    }  # fmt: skip


def fuzz(supervisor: Supervisor, examples: int) -> int:
    """So many calls of every operation; how many in all."""
    schema = schemathesis.openapi.from_dict(call(supervisor, "GET", "/openapi.json").json())
    schema.config.update(base_url=supervisor.url)
    checks = schemathesis.checks
    wanted = [
        checks.not_a_server_error,
        *(
            check
            for check in checks.CHECKS.get_all()
            if check.__name__
            in (
                "status_code_conformance",
                "content_type_conformance",
                "response_headers_conformance",
                "response_schema_conformance",
            )
        ),
    ]
    assert len(wanted) == 5
    known = names(supervisor)
    headers = {"Authorization": f"Bearer {supervisor.token}"}
    made = 0
    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in sorted(operations, key=lambda one: one.method != "get"):
        strategies = [operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode]

        @seed(1)
        @settings(
            max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=strategies[0] | strategies[1])
        def check(case: Any) -> None:
            nonlocal made
            made += 1
            for parameter in list(case.path_parameters or ()):
                if made % 2 and known[parameter]:
                    case.path_parameters[parameter] = known[parameter][made // 2 % len(known[parameter])]
            if "wait" in (case.query or {}) and case.query["wait"] not in (0, None) and _number(case.query["wait"]):
                case.query["wait"] = 0.001
            answer = case.call(headers={**headers, **dict(case.headers or {})} | headers, timeout=10)
            case.validate_response(answer, checks=wanted, headers=headers)

        check()
    return made


def _number(text: Any) -> bool:
    try:
        return 0 <= float(text) <= 30
    except (TypeError, ValueError):
        return False


def test_hundreds_of_calls_and_every_answer_is_as_described(live: Supervisor) -> None:
    assert fuzz(live, DEFAULT) >= 120
    assert call(live, "GET", "/v1/ready").json() == {"ready": True}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_thousands_of_calls_and_every_answer_is_as_described(live: Supervisor) -> None:
    assert fuzz(live, LONG) >= 8000
    assert call(live, "GET", "/v1/ready").json() == {"ready": True}
