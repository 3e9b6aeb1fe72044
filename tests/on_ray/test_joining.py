"""Joining by a job's name: a real supervisor, watchdog and members; only what Ray answers is given."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

import elastic_reshard as er
from elastic_reshard import on_ray
from elastic_reshard.errors import SupervisorUnreachable
from elastic_reshard.on_ray import cluster, joining
from elastic_reshard.protocol.docs import MemberState
from tests.on_ray.conftest import QUICK, until

JOB = "ghost"
NODE = "ab" * 28


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[er.Supervisor]:
    """It is found by its job's name. Nobody follows it any more when a test is over."""
    monkeypatch.setattr(joining, "_LOOK", 0.02)
    with er.Supervisor.local(job=JOB, runtime=tmp_path, deadlines=QUICK) as running:
        found = on_ray.Found(JOB, running.url, running.token)
        monkeypatch.setattr(joining, "find", lambda job, timeout=0.0: found)
        monkeypatch.setattr(cluster, "here", lambda: cluster.Place(NODE, "127.0.0.1"))
        monkeypatch.setattr(cluster, "told", lambda key: {"url": running.url})
        yield running
    until(lambda: followers() == 0, "who left is not followed for", 5.0)


class Store:
    """Ray's own store, which fails so many times."""

    def __init__(self, failures: float) -> None:
        self.failures, self.members = failures, set[str]()

    def keep(self, key: str, value: Any) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise ray.exceptions.RpcError("the control service is away", rpc_code=14)
        self.members.add(key.rpartition("/")[2])


def join(runtime: Path, name: str = "engine") -> er.Member:
    layout = er.ModelLayout({"w": er.TensorLayout((4,), "float32", er.Mesh.arange((1,)), (er.Replicate(),))})
    return on_ray.join(
        JOB, name=name, role="destination", group=er.Group(name, 1, 0), tensors={"w": torch.zeros(4)}, layout=layout,
        runtime=runtime, deadline=20.0,
    )  # fmt: skip


def followers() -> int:
    return sum(thread.name == f"elastic-reshard-follow-{JOB}" for thread in threading.enumerate())


def test_a_member_of_which_ray_cannot_be_told_leaves_no_ghost(
    supervisor: er.Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, vouch = Store(failures=1), joining._vouch
    monkeypatch.setattr(cluster, "keep", store.keep)
    with join(tmp_path, "other") as other, er.SupervisorClient(supervisor.url, supervisor.token) as client:
        assert store.members == {other.id}, "it was told again"
        store.failures = float("inf")
        with monkeypatch.context() as now:  # it has all the time to be admitted, and none after
            now.setattr(joining, "_vouch", lambda job, member, end: vouch(job, member, time.monotonic() + 0.3))
            with pytest.raises(SupervisorUnreachable, match=r"engine@\w+: Ray could not be told .*service is away"):
                join(tmp_path)
        store.failures = 0
        with join(tmp_path) as member:  # of the same name
            assert store.members == {other.id, member.id}
            there = {name for name, doc in client.members().items() if doc.state is MemberState.LIVE}
            assert there == {other.id, member.id}


def test_one_thread_follows_the_supervisor_for_all_who_join_here(
    supervisor: er.Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it writes is what Ray says last, whoever has written something older meanwhile; it ends with the last of them."""
    monkeypatch.setattr(cluster, "keep", Store(failures=0).keep)
    with join(tmp_path, "one"), join(tmp_path, "two"):
        assert followers() == 1
    until(lambda: followers() == 0, "who left is not followed for", 5.0)
    over = threading.Event()
    monkeypatch.setattr(joining, "_always", lambda: not over.is_set())
    for _ in range(3):
        assert on_ray.seat(JOB, runtime=tmp_path).url == supervisor.url
    assert followers() == 1, "an actor that starts its child again"
    (written,) = tmp_path.glob("*/url")
    written.write_text("http://127.0.0.1:9")
    until(lambda: written.read_text() == supervisor.url, "what Ray says is written again", 5.0)
    over.set()
    until(lambda: followers() == 0, "it ends", 5.0)


def test_it_goes_on_whatever_ray_says_once_it_was_shut_down(
    supervisor: er.Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray.shutdown` in a program that then begins anew: in between Ray's store raises what no user of it should see."""
    over, away, asked = threading.Event(), threading.Event(), threading.Event()

    def told(key: str) -> dict[str, str]:
        if away.is_set():
            asked.set()
            raise AttributeError("'NoneType' object has no attribute 'internal_kv_get'")
        return {"url": supervisor.url}

    monkeypatch.setattr(cluster, "told", told)
    monkeypatch.setattr(joining, "_always", lambda: not over.is_set())
    away.set()
    on_ray.seat(JOB, runtime=tmp_path)
    assert asked.wait(5.0)
    away.clear()
    on_ray.seat(JOB, runtime=tmp_path)
    (written,) = tmp_path.glob("*/url")
    written.write_text("http://127.0.0.1:9")
    until(lambda: written.read_text() == supervisor.url, "a supervisor that moves is followed as before", 5.0)
    assert followers() == 1
    over.set()


def test_ray_is_not_asked_for_those_who_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been shut down since."""
    left, asked = threading.Event(), list[str]()
    monkeypatch.setattr(joining, "time", SimpleNamespace(sleep=lambda seconds: left.set()))
    monkeypatch.setattr(cluster, "told", lambda key: asked.append(key) or {})
    monkeypatch.setitem(joining._following, tmp_path / "url", [lambda: not left.is_set()])
    joining._follow(JOB, tmp_path / "url")
    assert asked == []
    assert tmp_path / "url" not in joining._following
