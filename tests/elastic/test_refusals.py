"""Who is not let in, and what is said."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_reshard as er
from tests.elastic import rank as on
from tests.elastic.rank import State
from tests.elastic.world import Failed, World, until


def test_layouts_that_do_not_fit_are_refused_at_join_with_every_violation(world: World) -> None:
    trainer = world.trainer().join()
    wrong = on.SHAPES | {"wide": ((48, 41), "float32", 0), "odd": ((7, 10), "int64", 0), "more": ((4, 4), "float32", 0)}
    engine = world.engine()
    calls = [actor.begin(on.join, engine.seat(rank), shapes=wrong) for rank, actor in enumerate(engine)]
    refused = [call.outcome() for call in calls]
    assert {r.kind for r in refused} == {"JoinRefused"}
    for one in refused:
        for name in ("wide", "odd", "more"):
            assert name in one.text
    assert world.engine(1).join().version() == 0, "the job goes on"
    trainer.publish("s1")
    assert trainer.committed("s1") == 1


def _short_of_memory(state: State) -> dict[str, Any]:
    large = {"wide": torch.empty(1 << 26)}  # 256 MiB that is never touched
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))
    return {"tensors": large, "layout": None}


def test_memory_that_does_not_fit_is_refused_at_join(world: World) -> None:
    lonely = world.trainer(size=1)
    with pytest.raises(Failed, match="RLIMIT_AS leaves") as refused:
        lonely.join(extra=_short_of_memory)
    assert refused.value.kind == "ArenaError"
    assert "(0.50 GiB)" in refused.value.text
    assert "nothing was taken" in refused.value.text
    assert world.view().members == {}


def test_a_group_that_is_not_complete_names_who_is_missing(world: World) -> None:
    trainer = world.trainer()
    told = trainer[1].begin(on.join, trainer.seat(1), deadline=1.5).outcome(limit=5.0)
    assert told.kind == "RefitTimeout"
    assert "missing: rank 0" in told.text
    assert "rank 1" not in told.text.split("missing")[1]
    world.until(lambda v: not v.members, "who gave up has left")
    trainer.join()


def test_a_second_process_of_the_same_rank_is_told_who_holds_it(world: World) -> None:
    trainer = world.trainer().join()
    second = world.actor("trainer-0")
    told = second.begin(on.join, trainer.seat(0), deadline=1.5).outcome()
    assert told.kind == "RefitTimeout"
    assert f"rank 0 of trainer is held by {trainer[0].id}" in told.text
    engine = world.engine().join()
    trainer.publish("s1")
    assert engine.receive("s1") == 1


@pytest.mark.parametrize("first", [True, False], ids=["starts the watchdog", "finds a watchdog"])
def test_a_wrong_token_is_refused_at_join(make_world: Callable[..., World], first: bool) -> None:
    world = make_world(token="the-right-token")
    if not first:
        world.trainer().join()
    engine = world.engine(size=1)
    told = engine[0].begin(on.join, engine.seat(0, token="some-other-token"), deadline=5.0).outcome()
    assert told.kind == "Unauthorized"
    assert "token" in told.text
    assert all(doc.group != "engine0" for doc in world.view().members.values() if doc)


def test_arguments_that_cannot_work_are_all_named(world: World) -> None:
    engine = world.engine(size=1)
    told = engine[0].begin(on.join, engine.seat(0, roles=()), deadline=5.0).outcome()
    assert "roles are" in told.text
    with pytest.raises(er.ReshardError, match=r"rank 5 is none of a group of 2.*a source gives its tensors"):
        er.join(world.url, name="x", group=er.Group("g", 2, 5), role="source", runtime=world.runtime)


def test_no_supervisor_says_so_within_the_deadline(make_world: Callable[..., World]) -> None:
    world = make_world(start=False, token="the-right-token")
    world.url = "http://127.0.0.1:9"
    trainer = world.trainer(size=1)
    told = trainer[0].begin(on.join, trainer.seat(0), deadline=1.0).outcome(limit=6.0)
    assert told.kind == "SupervisorUnreachable"
    assert world.url in told.text
    until(lambda: world.watchdog() is None or None, "no watchdog is left", 5.0)
