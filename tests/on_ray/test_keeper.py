"""The supervisor's actor: what it makes of a start that fails and of a server that has ended. One test is on a real cluster."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import ray

import elastic_reshard as er
from elastic_reshard import on_ray
from elastic_reshard.errors import Fenced, ProtocolError, SupervisorUnreachable
from elastic_reshard.on_ray import cluster, keeper
from elastic_reshard.on_ray.keeper import Keeper
from elastic_reshard.supervisor.server import Options
from tests.on_ray.conftest import QUICK, RayNodes, until

RPC: type[Exception] = ray.exceptions.RpcError


class Exited(BaseException):
    """The process would have ended: with this, Ray starts its actor again."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(code: int) -> NoReturn:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", ends)
    monkeypatch.setattr(keeper, "_AGAIN", 0.0)


def made(tmp_path: Path) -> Keeper:
    return Keeper(keeper._Wanted(Options(journal=tmp_path / "journal", runtime=tmp_path), "127.0.0.1"))


@pytest.mark.usefixtures("exits")
@pytest.mark.parametrize(
    ("again", "why", "ends"),
    [
        (True, OSError("no space left on device"), Exited),
        (True, RPC("the control service is away", 14), Exited),
        (True, ProtocolError("the journal cannot be written"), Exited),
        (True, Fenced("another one is in charge"), Fenced),
        (False, ProtocolError("this address cannot be listened on"), ProtocolError),
    ],
)
def test_a_start_that_fails_is_the_last_only_if_it_is_the_first_or_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool, why: Exception, ends: type[BaseException]
) -> None:
    kept: dict[str, Any] = {"job/supervisor": {"url": "http://127.0.0.1:9", "port": 9}}

    def fails(self: Keeper, before: int, recover: int) -> NoReturn:
        raise why

    monkeypatch.setattr(keeper, "_reconstructed", lambda: again)
    monkeypatch.setattr(cluster, "here", lambda: cluster.Place("n", "127.0.0.1"))
    monkeypatch.setattr(cluster, "told", lambda key: kept.get(key, {}))
    monkeypatch.setattr(cluster, "keep", kept.__setitem__)
    monkeypatch.setattr(Keeper, "_begin", fails)
    with pytest.raises(ends):
        made(tmp_path)
    if ends is Exited:
        assert kept["job/supervisor"]["port"] == 9, "it is tried again there"
        assert str(why) in keeper._fault("job"), "find says it"
    else:
        assert keeper._fault("job") == ""


def bare(tmp_path: Path, supervisor: Any) -> Keeper:
    """One that has begun, without threads."""
    one = Keeper.__new__(Keeper)
    one._wanted = keeper._Wanted(Options(runtime=tmp_path, deadlines=QUICK), "127.0.0.1")
    one._job, one._lock, one._closing, one._supervisor = "job", keeper.threading.Lock(), False, supervisor
    return one


@pytest.mark.usefixtures("exits")
def test_a_server_that_was_closed_and_not_replaced_ends_the_actor(tmp_path: Path) -> None:
    server = er.Supervisor.local(runtime=tmp_path)
    server.close(over=False)
    one = bare(tmp_path, server)
    with pytest.raises(Exited):
        one._guard()
    one._closing = True
    one._guard()  # the job is over


class Recovery(Keeper):
    """`came` by turns; what was begun anew."""

    def __init__(self, tmp_path: Path, *came: int | None, fault: BaseException | None = None) -> None:
        self._wanted = keeper._Wanted(Options(runtime=tmp_path, deadlines=QUICK), "127.0.0.1")
        self._job, self._closing = "job", False
        self.turns, self.begun, self.fault = list(came), list[int](), fault

    def _came(self) -> int | None:
        return self.turns.pop(0)

    def _anew(self, awaited: int) -> None:
        if self.fault is not None:
            raise self.fault
        self.begun.append(awaited)


@pytest.mark.usefixtures("exits")
def test_a_recovery_goes_on_with_who_has_come_as_often_as_one_of_them_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter(range(0, 10**6, 7))  # `reregister`, three times, is 18 s: reached at the third look
    clock = SimpleNamespace(monotonic=lambda: float(next(moments)), sleep=lambda seconds: None)
    monkeypatch.setattr(keeper, "time", clock)
    one = Recovery(tmp_path, None, 3, 2, 2, 2, None, 1, 1, 1, 1, 1, 0)
    one._hurry(3)
    assert one.begun == [2, 1], "with 2, and with 1 when one of the 2 was lost; who is awaited is not asked again"
    assert one.turns == []
    for fault, ends in ((RPC("away", 14), Exited), (OSError("disk"), Exited)):
        with pytest.raises(ends):
            Recovery(tmp_path, 1, 1, 1, 1, 1, fault=fault)._hurry(3)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_supervisor_that_cannot_start_again_does_when_it_can(nodes: RayNodes, runtime: Path) -> None:
    """The node's runtime folder cannot be written when it dies."""
    job = "phoenix"
    found = on_ray.start(job, runtime=runtime, journal=runtime / "journal", deadlines=QUICK)
    actor = ray.get_actor(f"supervisor/{job}", namespace=cluster.NAMESPACE)._actor_id.hex()
    url = runtime / job / "url"
    assert url.read_text() == found.url
    url.unlink()
    (url / "in the way").mkdir(parents=True)
    os.kill(ray._private.state.actors(actor)["Pid"], signal.SIGKILL)
    until(lambda: (cluster.life_of(actor) or ("", 0))[1] >= 2, "a start has failed, and the next one begins", 60)
    with pytest.raises(SupervisorUnreachable, match=r"Its last start failed, and is tried again: IsADirectoryError"):
        on_ray.find(job, timeout=1.0)
    shutil.rmtree(url)
    again = on_ray.find(job, timeout=60.0)
    assert again.token == found.token
    with on_ray.client(job) as client:
        assert client.health()["term"] >= 2
    on_ray.close(job)
