"""What is made of what the supervisor and Ray say of groups of workers: pure."""

from __future__ import annotations

from collections.abc import Set

import pytest

from elastic_reshard.on_ray.events import Ended
from elastic_reshard.on_ray.fleet import Gone
from elastic_reshard.on_ray.views import end_of, held_of
from elastic_reshard.protocol.docs import GroupDoc, GroupState
from elastic_reshard.supervisor.answers import Growth

HERE, THERE = "home", "spot"


@pytest.mark.parametrize(
    ("gone", "dead", "emptied", "fault", "drained"),
    [
        (Gone(0, "closed by peer"), set(), set(), "closed by peer", False),
        (Gone(0, "closed by peer"), {THERE}, set(), "closed by peer", False),
        (Gone(1, "its actor is dead"), {THERE}, set(), "its node spot is dead", False),
        (Gone(0, "closed by peer"), set(), {THERE}, "closed by peer", True),
        (Gone(0), set(), {THERE}, "", False),
        (Gone(1), set(), {THERE}, "", True),
    ],
)
def test_an_end_is_told_with_all_that_may_explain_it(
    gone: Gone, dead: Set[str], emptied: Set[str], fault: str, drained: bool
) -> None:
    found = end_of("trainer", 3, gone, [HERE, THERE], dead, emptied)
    assert found == Ended("trainer", 3, gone.rank, fault, frozenset({HERE, THERE}), drained)


def test_a_rank_that_never_ran_was_nowhere() -> None:
    assert end_of("trainer", 1, Gone(0, "no luck"), ["", ""], (), ()).nodes == frozenset()


def group(name: str, *members: str) -> GroupDoc:
    return GroupDoc(
        name=name,
        size=len(members),
        roles=frozenset({"destination"}),
        members=members,
        whole=False,
        state=GroupState.STALE,
    )


def test_a_grow_holds_those_that_are_there_by_their_present_attempt() -> None:
    groups = {name: group(name, f"{name}-0@1", f"{name}-1@1") for name in ("new", "old", "in", "half")}
    of = {"new": {"new-0@1", "new-1@1"}, "old": {"old-0@1"}, "in": {"in-0@1", "in-1@1"}, "none": set[str]()}
    grow = Growth(
        name="g", groups=9, members=0, left=9.0, done=False, ready=("new", "old", "in", "none"), admitted=("in",)
    )
    assert held_of(grow, groups, of) == {"new"}
    assert held_of(grow.model_copy(update={"done": True}), groups, of) == frozenset()
    assert held_of(None, groups, of) == frozenset()
