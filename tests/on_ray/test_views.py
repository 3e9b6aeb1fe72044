"""What is made of what the supervisor and Ray say of groups of workers: pure."""

from __future__ import annotations

from collections.abc import Set

import pytest

from elastic_reshard.on_ray.events import Ended
from elastic_reshard.on_ray.fleet import Gone
from elastic_reshard.on_ray.views import broken_of, end_of, held_of
from elastic_reshard.protocol.docs import GroupDoc, GroupState, MemberDoc, MemberState, PublicationState
from elastic_reshard.supervisor.answers import Growth
from elastic_reshard.supervisor.events import Grow, Leave
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


LIVE, LOST, JOINING, ORPHANED = MemberState.LIVE, MemberState.LOST, MemberState.JOINING, MemberState.ORPHANED
OUT = "left out by force"


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


def test_a_grow_holds_those_that_are_there() -> None:
    """Which actors they run in nobody has said yet: that is told of who is admitted."""
    groups = {name: group(name, f"{name}-0@1", f"{name}-1@1") for name in ("new", "alien", "in", "past")}
    groups["half"] = group("half", "half-0@1", "")
    members = {m: member(rank, JOINING) for doc in groups.values() for rank, m in enumerate(doc.members) if m}
    members["past-0@1"] = member(0, LOST, "its process has ended")
    grow = Growth(
        name="g", groups=9, members=0, left=9.0, done=False, ready=("new", "alien", "in", "past", "half", "gone"),
        admitted=("in",),
    )  # fmt: skip
    mine = {"new", "in", "past", "half", "gone", "none"}
    assert held_of(grow, groups, members, mine) == {"new"}
    assert held_of(grow.model_copy(update={"done": True}), groups, members, mine) == frozenset()
    assert held_of(None, groups, members, mine) == frozenset()


def test_a_grow_holds_who_is_there_by_what_the_real_supervisor_says() -> None:
    scene = Scene(1)

    def held() -> frozenset[str]:
        asked = scene.job.growing
        growth = Growth(
            name=asked.name, groups=asked.groups, members=0, left=9.0, done=asked.done, ready=asked.ready,
            admitted=asked.admitted,
        )  # fmt: skip
        groups, members = ({n: known.doc for n, known in k.items()} for k in (scene.job.groups, scene.job.members))
        return held_of(growth, groups, members, groups)

    scene.world.supervisors[-1].submit(Grow("g", groups=2, members=0, within=60.0))
    scene.join("e2", scene.world.engines[0], "h2")
    scene.until(lambda: scene.job.growing and scene.job.growing.ready, 10.0)
    assert held() == {"e2"}
    scene.join("e3", scene.world.engines[0], "h2")
    scene.until(lambda: scene.job.growing.admitted, 10.0)
    assert held() == frozenset()


@pytest.mark.parametrize(
    ("docs", "broken"),
    [
        ([member(0, LIVE), member(1, LIVE)], False),
        ([member(0, LIVE), member(1, LOST, OUT)], True),
        ([member(0, LIVE), member(1, LOST, OUT), member(1, JOINING, incarnation=2)], False),
        ([member(0, LIVE), member(1, LOST, "left")], False),
        ([member(0, LIVE), member(1, ORPHANED, OUT)], True),
        ([member(0, LIVE), member(1, ORPHANED, "left")], False),
        ([member(0, LIVE), member(1, MemberState.FORFEIT, "host h was silent")], False),
        ([], False),
    ],
)
def test_a_group_is_broken_without_a_member_that_was_put_out(docs: list[MemberDoc], broken: bool) -> None:
    members = {doc.id: doc for doc in docs}
    assert broken_of(members, {"e": set(members)}, ()) == ({"e"} if broken else set())
    assert broken_of(members, {"e": {"e-0@1"}}, ()) == frozenset(), "members of an earlier attempt do not count"
    assert broken_of(members, {"e": set(members)}, {"e"}) == frozenset()


def test_who_came_in_the_place_of_who_was_put_out_need_not_be_admitted_yet() -> None:
    """Till then nobody has said in which actor it runs."""
    docs = [member(0, LIVE), member(1, LOST, OUT), member(1, JOINING, incarnation=2)]
    assert broken_of({doc.id: doc for doc in docs}, {"e": {"e-0@1", "e-1@1"}}, ()) == frozenset()


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(("gang", "state"), [("e0", LOST), ("e0", ORPHANED), ("t", ORPHANED)])
def test_who_left_is_told_from_who_was_put_out(gang: str, state: MemberState, forced: bool) -> None:
    """By what the real supervisor says of them. After a commit what they hold goes on to be of use."""
    scene = Scene(1)
    if state is ORPHANED:
        version = scene.publish()
        scene.until(lambda: scene.state(version) is PublicationState.COMMITTED, 20.0)
    name = next(m for m in scene.job.members if m.startswith(gang))
    if forced:
        scene.world.supervisors[-1].submit(Leave(members=(name,), force=True))
    else:
        scene.world.members[name].leave(0.1)
    scene.until(lambda: scene.job.members[name].doc.state is state, 10.0)
    members = {m: known.doc for m, known in scene.job.members.items()}
    of = {gang: {m for m in members if m.startswith(gang)}}
    assert broken_of(members, of, ()) == ({gang} if forced else set())
