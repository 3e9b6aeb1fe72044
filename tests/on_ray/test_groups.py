"""The thread that keeps groups, beside a supervisor that has ended: no Ray cluster is needed to see that it goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import ray

from elastic_reshard.errors import (
    Fenced,
    MembershipError,
    ProtocolError,
    ReshardError,
    SupervisorUnreachable,
    Unauthorized,
)
from elastic_reshard.on_ray import Groups, Limits, groups
from tests.on_ray.conftest import until


@pytest.mark.parametrize("why", [Fenced, ProtocolError, SupervisorUnreachable, Unauthorized])
def test_workers_outlive_whatever_ended_the_supervisor(
    monkeypatch: pytest.MonkeyPatch, why: type[ReshardError]
) -> None:
    asked = []

    def ended(job: str, timeout: float, patience: float) -> NoReturn:
        asked.append(job)
        raise why("its disk is full")

    monkeypatch.setattr(groups, "client_of", ended)
    # Not a node, actor or supervisor is there: only what is made of an answer that is an error.
    monkeypatch.setattr("elastic_reshard.on_ray.cluster.nodes", dict)
    monkeypatch.setattr("elastic_reshard.on_ray.cluster.told", lambda key: {})
    with Groups("job", []) as made:
        with made._changed:
            assert made._changed.wait_for(lambda: bool(asked) or made._error is not None, timeout=10)
        made._thread.join(0.5)
        assert made._thread.is_alive()
        assert made.status() == {}


class Workers:
    """Of one group: that they could be ended fails so many times."""

    def __init__(self, name: str, failures: float = 0) -> None:
        self.name, self.failures, self.over = name, failures, False

    def end(self) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise ray.exceptions.RpcError("the control service is away", rpc_code=14)
        self.over = True


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Groups]:
    """Groups that keep these workers, in a cluster of which nothing else is known."""
    kept: dict[str, Any] = {}
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr(Groups, "_try_turn", lambda self: None)
    answers: dict[str, Callable[..., Any]] = {
        "told": lambda key: kept.get(key, {}),
        "keep": kept.__setitem__,
        "drop": lambda key: kept.pop(key, None),
        "kept": lambda prefix: [],
        "rooms": lambda prefix: {},
    }
    for name, answer in answers.items():
        monkeypatch.setattr(f"elastic_reshard.on_ray.cluster.{name}", answer)

    def made(*workers: Workers, adopt: bool = False) -> Groups:
        found = Groups("job", [], Limits(blind=30.0), adopt=adopt)
        found._crews.update({one.name: one for one in workers})  # type: ignore[misc]
        return found

    return made


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` does not wait for what Ray does not take."""
    monkeypatch.setattr(groups, "_END", 0.5)


@pytest.mark.parametrize("adopt", [False, True])
def test_close_ends_all_though_ray_refuses_once(ended: Callable[..., Groups], adopt: bool) -> None:
    first, second = Workers("a", failures=1), Workers("b")
    ended(first, second, adopt=adopt).close()
    assert first.over
    assert second.over


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("adopt", "last"), [(False, "its end is theirs"), (True, r"Groups\('job', \[\], adopt=True\)")]
)
def test_close_says_who_may_still_run(ended: Callable[..., Groups], adopt: bool, last: str) -> None:
    stays, goes = Workers("stays", failures=float("inf")), Workers("goes")
    keeper = ended(stays, goes, adopt=adopt)
    with keeper._changed:
        keeper._stop = True  # as `close` does, which begins to wait when Ray has refused
        keeper._changed.notify_all()
    until(lambda: "away" in keeper._unended, "Ray has refused", 10.0)
    with pytest.raises(MembershipError, match=rf"may still run, of groups stays: .*control service is away.*{last}"):
        keeper.close()
    assert goes.over, "what Ray refuses for one holds up no other"
    stays.failures = 0
    keeper._thread.join(10.0)
    assert stays.over, "it is ended when Ray is seen again"
    keeper.close()


@pytest.mark.usefixtures("short")
def test_an_error_of_the_program_stays_its_error_whoever_may_still_run(ended: Callable[..., Groups]) -> None:
    stays = Workers("stays", failures=float("inf"))
    with pytest.raises(RuntimeError, match="a mistake") as mistake, ended(stays) as keeper:
        raise RuntimeError("a mistake")
    assert any("stays" in note for note in mistake.value.__notes__)
    stays.failures = 0
    keeper._thread.join(10.0)


def test_close_ends_nobody_whom_another_one_keeps(ended: Callable[..., Groups]) -> None:
    theirs = Workers("theirs")
    first = ended(theirs, adopt=True)
    ended(adopt=True)._stop = True  # begun meanwhile; the first has not looked since
    first.close()
    assert not theirs.over
