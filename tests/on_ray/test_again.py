"""What the next driver makes of what is written down: pure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.on_ray import events, plan
from elastic_reshard.on_ray.again import STARTED, resume, runs, words
from elastic_reshard.on_ray.events import Ended, Limits, Phase, Placed, Resize, Size, Start, Tick, Viewed
from tests.on_ray.test_plan import World

SIZES = {"trainer": Size(2, 1), "engine": Size(1, 3, grows=True)}


def left() -> dict[str, Any]:
    """The trainer and engine-0 run, engine-1 is done, engine-2 waits; through JSON, as it is kept."""
    world = World(trainer=SIZES["trainer"], engine=SIZES["engine"])
    for name in ("trainer", "engine-0", "engine-1"):
        world.whole(name)
    world.tell(Ended("engine-1", 1, 0))
    assert world.run("engine-1").phase is Phase.DONE
    found: dict[str, Any] = json.loads(json.dumps(words(world.state)))
    return found


def test_who_runs_goes_on_and_what_is_done_stays_done() -> None:
    state = resume(left(), SIZES, {"trainer", "engine-0"}, 7.0)
    assert {name: (run.phase, run.attempt) for name, run in state.runs.items()} == {
        "trainer": (Phase.RUNNING, 1),
        "engine-0": (Phase.RUNNING, 1),
        "engine-1": (Phase.DONE, 1),
        "engine-2": (Phase.PAUSED, 1),
    }
    _, actions = plan.step(state, Tick(), 7.0, Limits())
    assert actions == [Start("engine-2", 2)], "under a name that no earlier attempt had"


def test_who_is_not_there_any_more_is_started_anew_without_blame() -> None:
    state = resume(left(), SIZES, {"engine-0"}, 7.0)
    assert state.runs["trainer"].failures == ()
    _, actions = plan.step(state, Tick(), 7.0, Limits())
    assert actions == [Start("trainer", 2), Start("engine-2", 2)]


def test_nothing_is_left_by_nobody() -> None:
    assert resume({}, SIZES, (), 7.0) == plan.begin(SIZES, 7.0)


def test_the_program_has_changed_meanwhile() -> None:
    sizes = {"trainer": Size(4, 1), "judge": Size(1, 2)}
    assert [run.name for run in runs(left(), sizes) if run.phase in STARTED] == [], "two ranks are no group of four"
    state = resume(left(), sizes, (), 7.0)
    assert {name: run.ranks for name, run in state.runs.items()} == {"trainer": 4, "judge-0": 1, "judge-1": 1}
    assert state.runs["trainer"].phase is Phase.PAUSED


@pytest.mark.parametrize("groups", [1, 9])
def test_the_number_of_groups_is_what_it_was(groups: int) -> None:
    state = resume(left(), {**SIZES, "engine": Size(1, groups, grows=True)}, (), 7.0)
    assert [name for name in state.runs if name.startswith("engine")] == ["engine-0", "engine-1", "engine-2"]


def test_who_was_to_go_goes_on_going() -> None:
    world = World(engine=Size(1, 2))
    world.whole("engine-0")
    world.whole("engine-1")
    world.tell(Resize("engine", 1))
    said = words(world.state)
    state = resume(said, {"engine": Size(1, 2)}, {"engine-0", "engine-1"}, 7.0)
    _, actions = plan.step(state, Viewed(frozenset()), 7.0, Limits())
    assert actions == [events.Ask("engine-1")]
    assert resume(said, {"engine": Size(1, 2)}, {"engine-0"}, 7.0).runs["engine-1"].phase is Phase.DONE


_group = st.sampled_from(["trainer", "engine-0", "engine-1"])
_event = st.one_of(
    st.just(Tick()),
    st.builds(Placed, _group, st.integers(1, 3)),
    st.builds(Ended, _group, st.integers(1, 3), st.integers(0, 1), st.sampled_from(["", "died"])),
    st.builds(Viewed, st.frozensets(_group), st.dictionaries(_group, st.booleans(), max_size=2)),
    st.builds(Resize, st.just("engine"), st.integers(0, 3)),
)


@given(st.lists(_event, max_size=30), st.lists(_event, max_size=10), st.data())
def test_no_attempt_is_ever_started_twice(
    before: list[events.Event], after: list[events.Event], data: st.DataObject
) -> None:
    """Whenever the driver dies, and whoever of its workers lives."""
    sizes = {"trainer": Size(2, 1), "engine": Size(2, 2)}
    world = World(trainer=sizes["trainer"], engine=sizes["engine"])
    started = {action for event in before for action in world.tell(event, 3.0) if isinstance(action, Start)}
    said = json.loads(json.dumps(words(world.state)))
    could = [run.name for run in runs(said, sizes) if run.phase in STARTED]
    there = data.draw(st.sets(st.sampled_from(could))) if could else set()
    world.state = resume(said, sizes, there, world.now)
    for event in (Tick(), *after):
        for action in world.tell(event, 3.0):
            if isinstance(action, Start):
                assert action not in started
                started.add(action)
    begun = [run for run in world.state.runs.values() if run.phase in STARTED]
    assert all(Start(run.name, run.attempt) in started for run in begun)
