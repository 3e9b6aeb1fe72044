"""Small pure parts: the view's replica, and the settings that are refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.deadlines import Deadlines, Policies
from elastic_reshard.protocol.docs import MemberDoc, MemberState
from elastic_reshard.protocol.view import Told, View
from elastic_reshard.supervisor import core
from elastic_reshard.supervisor.events import SetPolicies
from elastic_reshard.supervisor.settings import Settings, recall, settings_of
from tests.supervisor import drive

NAMES = [f"m-{i}@{i:016x}" for i in range(4)]


def doc(name: str, reason: str) -> MemberDoc:
    return MemberDoc(
        id=name, group="g", rank=0, roles=frozenset({"source"}), host="h", state=MemberState.LIVE, reason=reason
    )


changes = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["a", "b", "c", None]), max_size=3)


def history(
    steps: list[dict[str, Any]], term: int = 1, instance: str = "i"
) -> tuple[list[Told], list[dict[str, MemberDoc]]]:
    """What a supervisor tells, change by change, and its documents after each."""
    now: dict[str, MemberDoc] = {}
    told, states = [], [dict(now)]
    for revision, step in enumerate(steps, start=1):
        said = {name: None if reason is None else doc(name, reason) for name, reason in step.items()}
        for name, one in said.items():
            now.pop(name, None) if one is None else now.__setitem__(name, one)
        told.append(
            Told(term=term, instance=instance, base=revision, revision=revision + 1, membership_epoch=0, members=said)
        )
        states.append(dict(now))
    return told, states


def whole(states: list[dict[str, MemberDoc]], revision: int, term: int = 1, instance: str = "i") -> Told:
    return Told(
        term=term, instance=instance, base=0, revision=revision, membership_epoch=0, members=states[revision - 1]
    )


@given(st.lists(changes, min_size=1, max_size=8), st.data())
def test_a_replica_is_always_a_state_that_was(steps: list[dict[str, Any]], data: st.DataObject) -> None:
    """Lost and doubled messages: it never goes back, and a gap asks for a snapshot."""
    told, states = history(steps)
    view = View()
    assert view.apply(whole(states, 1))
    for number in data.draw(st.lists(st.integers(0, len(told) - 1), max_size=20)):
        before = view.revision
        obeyed = view.apply(told[number])
        assert view.revision >= before
        assert obeyed == (told[number].base <= before)
        if not obeyed:
            assert view.apply(whole(states, told[number].revision))
        assert view.members == states[view.revision - 1]


@given(st.lists(changes, min_size=1, max_size=6), st.lists(changes, min_size=1, max_size=6))
def test_the_highest_term_is_obeyed(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
    (told, states), (later, after) = history(old), history(new, term=2, instance="j")
    view = View()
    assert view.apply(whole(states, 1))
    assert not view.apply(later[0])  # of a new term: only a snapshot
    assert view.apply(whole(after, 1, 2, "j"))
    for one in (*told, whole(states, len(states))):
        assert not view.apply(one)
    assert not view.apply(whole(states, len(states), 2, "another"))
    assert all(view.apply(one) for one in later)
    assert view.members == after[-1]
    assert view.snapshot() == whole(after, len(after), 2, "j")


@pytest.mark.parametrize(
    "wrong",
    [
        {"evict": 2.9},
        {"watchdog_silent": 0.9},
        {"reregister": 4.0},
        {"forget": 4.0},
        *({f.name: 0.0} for f in fields(Deadlines)),
    ],
)
def test_deadlines_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ProtocolError, match=next(iter(wrong))):
        Deadlines(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"min_groups": -1}, {"late_after": -1.0}, {"gather_window": -0.1}, {"install": 0.0}, {"max_lag": -1}]
)
def test_policies_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=next(iter(wrong))):
        Policies(**wrong)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(("kind", "name"), [(kind, f.name) for kind in (Deadlines, Policies) for f in fields(kind)])
def test_what_is_not_finite_is_refused(kind: type[Deadlines | Policies], name: str, value: float) -> None:
    """It would be journaled and told as null, and nobody could read that."""
    with pytest.raises(ProtocolError, match=name):
        kind(**{name: value})


@pytest.mark.parametrize("name", ["min_groups", "max_lag", "fruitless"])
def test_what_is_counted_is_a_whole_number(name: str) -> None:
    with pytest.raises(ProtocolError, match=f"{name} must be a whole number, not 1.5"):
        Policies(**{name: 1.5})  # type: ignore[arg-type]


def test_policies_that_wait_as_good_as_for_ever_are_kept_and_recalled() -> None:
    job = core.begin("job", 1, "i", 0.0)
    job, effects = core.step(job, [SetPolicies(Policies(late_after=1e9, install=1e308))], 0.0, lambda *_: True)
    assert effects.settings
    kept = Settings.model_validate_json(settings_of(job).model_dump_json())
    assert recall(core.begin("job", 2, "i2", 0.0), kept, 0.0).policies == job.policies


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(ProtocolError) as caught:
        Deadlines(beat=-1.0, connect=0.0, evict=1.0)
    assert all(name in str(caught.value) for name in ("beat", "connect", "reregister")[:2])


@given(st.permutations(range(1, 6)))
def test_the_newest_statement_counts(order: list[int]) -> None:
    """However late, doubled or out of order they arrive."""
    stage = drive.Stage()
    stage.say("host h ; join e-0 e 0/2 destination")
    member = stage.members["e-0"]
    said = []
    for _ in range(5):
        member.ask(1.0)
        said.append(member.statement())
    for number in order:
        stage.tell(drive.Spoken("h", said[number - 1]))
        stage.tell(drive.Spoken("h", said[number - 1]))
    kept = stage.job.members[member.member].said
    assert kept is not None
    assert kept == said[-1]
