"""What is made of what the supervisor and Ray say of groups of workers: pure."""

from __future__ import annotations

from collections.abc import Set

import pytest

from elastic_reshard.on_ray.events import Ended
from elastic_reshard.on_ray.fleet import Gone
from elastic_reshard.on_ray.views import broken_of, end_of, held_of
from elastic_reshard.protocol.docs import GroupDoc, GroupState, MemberDoc, MemberState
from elastic_reshard.supervisor.answers import Growth
from elastic_reshard.supervisor.events import Leave
from tests.supervisor.sim.scenes import Scene

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


def member(rank: int, state: MemberState, reason: str = "", incarnation: int = 1) -> MemberDoc:
    return MemberDoc(
        id=f"e-{rank}@{incarnation}",
        group="e",
        rank=rank,
        roles=frozenset({"destination"}),
        host="h",
        state=state,
        reason=reason,
    )


LIVE, LOST, OUT = MemberState.LIVE, MemberState.LOST, "left out by force"


@pytest.mark.parametrize(
    ("docs", "broken"),
    [
        ([member(0, LIVE), member(1, LIVE)], False),
        ([member(0, LIVE), member(1, LOST, OUT)], True),
        ([member(0, LIVE), member(1, LOST, OUT), member(1, MemberState.JOINING, incarnation=2)], False),
        ([member(0, LIVE), member(1, LOST, "left")], False),
        ([member(0, LIVE), member(1, MemberState.FORFEIT, "host h was silent")], False),
        ([], False),
    ],
)
def test_a_group_is_broken_without_a_member_that_was_put_out(docs: list[MemberDoc], broken: bool) -> None:
    members = {doc.id: doc for doc in docs}
    assert broken_of(members, {"e": set(members)}, ()) == ({"e"} if broken else set())
    assert broken_of(members, {"e": {"e-0@1"}}, ()) == frozenset(), "members of an earlier attempt do not count"
    assert broken_of(members, {"e": set(members)}, {"e"}) == frozenset()


@pytest.mark.parametrize("forced", [False, True])
def test_who_left_is_told_from_who_was_put_out(forced: bool) -> None:
    """By what the real supervisor says of them."""
    scene = Scene(1)
    name = next(m for m in scene.job.members if m.startswith("e0"))
    if forced:
        scene.world.supervisors[-1].submit(Leave(members=(name,), force=True))
    else:
        scene.world.members[name].leave(0.1)
    scene.until(lambda: scene.job.members[name].doc.state is LOST, 10.0)
    members = {m: known.doc for m, known in scene.job.members.items()}
    of = {"e0": {m for m in members if m.startswith("e0")}}
    assert broken_of(members, of, ()) == ({"e0"} if forced else set())
