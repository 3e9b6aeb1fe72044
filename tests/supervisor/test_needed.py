"""Layouts that nobody needs are forgotten, and no other: over histories in virtual time, in the journal, and for real."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.errors import Fenced
from elastic_reshard.protocol.docs import (
    EraDoc,
    GroupDoc,
    GroupState,
    LandedDoc,
    LandingDoc,
    MemberDoc,
    MemberState,
    PartyDoc,
    PublicationDoc,
    PublicationState,
    TransferDoc,
    TransferState,
)
from elastic_reshard.supervisor import app, core, layouts, needed
from elastic_reshard.supervisor.events import Effects, Event, Examine, Examined
from elastic_reshard.supervisor.journal import MEMORY, Journal
from elastic_reshard.supervisor.state import Covers, Group, Job, Member, Publication, Transfer
from tests.supervisor.real import Start, call, pair, put_fragment
from tests.supervisor.sim.run import play
from tests.supervisor.talk import body, key, name, statement, until

_NAMES = ("layout", "source_layout", "destination_layout", "fragments", "source", "destination")


def named(said: Any, below: str = "") -> Iterator[str]:
    """Every layout and fragment that documents name, by the names of their fields, wherever these are."""
    if isinstance(said, dict):
        for field, value in said.items():
            yield from named(value, field)
    elif isinstance(said, list):
        for value in said:
            yield from named(value, below)
    elif isinstance(said, str) and below in _NAMES and said:
        yield said


def watched(job: Job, events: Sequence[Event], now: float, covers: Covers) -> tuple[Job, Effects]:
    """A step after which all that anybody may ask for is needed, and nothing that nobody can."""
    asked = set()

    def covered(layout: str, ranks: frozenset[int]) -> bool:
        asked.add(layout)
        return covers(layout, ranks)

    after, effects = STEP(job, events, now, covered)
    wanted = needed.needed(after)
    assert asked <= wanted | needed.needed(job), "the step itself asked for it"
    for question in (*effects.examine, *effects.match):
        if isinstance(question, Examine):
            assert {one for pair in question.fragments for one in pair if one} <= wanted
        else:
            assert {question.source_layout, question.destination_layout} <= wanted
    docs = core.snapshot(after).model_dump(mode="json")
    told = {one for kind in ("groups", "publications", "transfers") for one in named(list(docs[kind].values()))}
    assert told <= wanted, "somebody may read it in the view"
    stated = {one for m in after.members.values() if m.said for one in (m.said.source, m.said.destination) if one}
    assert stated <= wanted
    examined = {
        one
        for group in after.groups.values()
        for pairs in (group.asked or (), group.examined.fragments if group.examined else ())
        for pair_ in pairs
        for one in pair_
        if one
    }
    joined = {
        one
        for g in after.groups.values()
        if g.examined
        for one in (g.examined.source_layout, g.examined.destination_layout)
    }
    pairs = {one for both in after.matching for one in both}
    assert wanted <= told | stated | examined | joined | pairs, "nobody can ask for it"
    if len(after.fits) > len(job.fits):
        assert {one for both in after.fits for one in both} <= wanted
    return after, effects


STEP = core.step


@pytest.mark.parametrize("seed", range(20))
def test_what_is_needed_over_histories(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Answers of Match are forgotten as soon as can be: every promise holds all the same."""
    monkeypatch.setattr(needed, "_FITS", 0)
    monkeypatch.setattr(core, "step", watched)
    broken = play(seed)
    assert not broken, broken


def test_each_place_that_names_one_needs_it() -> None:
    """One by one: in histories most are named in several places at once."""
    era = EraDoc(members=("m",), start=0, layout="era", fragments=(("era-f", None),))
    doc = GroupDoc(
        name="g", size=1, roles=frozenset({"source"}), members=("m",), whole=True, state=GroupState.STALE,
        source_layout="s", destination_layout="d", fragments=(("f", "g"),), eras=(era,),
    )  # fmt: skip
    examined = Examined("g", (("xf", "xg"),), "xs", "xd", "")
    group = Group(doc, asked=(("af", "ag"),), examined=examined)
    landing = LandingDoc(host="h", domain="h", member="m", group="g", rank=0, layout="to", arena="ab" * 16, slot=0)
    landed = LandedDoc(host="h", domain="h", layout="in", ranks=(0,))
    publication = PublicationDoc(
        id="p1.1", weight_version=1, label=None, extras={}, group="g", seq=1, layout="p", state=PublicationState.MOVING,
        sources=(), landings=(landing,), landed=(landed,),
    )  # fmt: skip
    transfer = TransferDoc(
        id="t1.1", publication="p1.1", epoch=1, state=TransferState.FORMING, members=("m",), hosts=("h",),
        source=PartyDoc(group="g", layout="ts", members=(0,)), destinations=(PartyDoc(group="g", layout="td", members=(0,)),),
        landings=(landing.model_copy(update={"layout": "tl"}),), cell=1, message=1, staging=1, plan="x",
    )  # fmt: skip
    said = statement(0, 1, source="abc", destination="def", roles={"source", "destination"})
    job = Job(
        "job", 1, "i", groups={"g": group}, publications={"p1.1": Publication(publication, 0.0)},
        transfers={"t1.1": Transfer(transfer, 0.0, 0.0, 0.0)},
        members={"m": Member(MemberDoc(id="m", group="g", rank=0, roles=frozenset({"source"}), host="h",
                                       state=MemberState.LIVE), said)},
        matching=frozenset({("a1", "a2")}), fits={("o1", "o2"): ""},
    )  # fmt: skip
    assert needed.needed(job) == {
        "era", "era-f", "s", "d", "f", "g", "xf", "xg", "xs", "xd", "af", "ag", "to", "in", "p", "ts", "td", "tl", "abc", "def",
        "a1", "a2",
    }  # fmt: skip


_ids = st.sampled_from("abcdef")


@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.frozensets(_ids), st.frozensets(_ids)), max_size=30))
def test_only_what_was_not_needed_for_long_enough_goes(
    looks: list[tuple[float, frozenset[str], frozenset[str]]],
) -> None:
    """looks: seconds after the one before, who is there (those that were dropped are made again), who is needed."""
    since: dict[str, float] = {}
    unneeded: dict[str, float] = {}
    now = 1000.0
    for after, there, wanted in looks:
        now += after
        since, gone = needed.idle(since, there, wanted, now, 60.0)
        unneeded = {one: unneeded.get(one, now) for one in there - wanted}
        assert gone == {one for one, at in unneeded.items() if now - at >= 60.0}
        for one in gone:
            del unneeded[one]
        assert since == unneeded


def test_bodies_go_from_the_journal_and_only_by_who_is_in_charge(tmp_path: Path) -> None:
    old, new = Journal.open(tmp_path / "j", "job"), Journal.open(tmp_path / "j", "job")
    old.begin("i1")
    old.put_fragment("f1", b"1")
    old.put_fragment("f2", b"2")
    old.put_layout("l1", b"3")
    assert old.bodies() == {"f1", "f2", "l1"}
    new.begin("i2")
    with pytest.raises(Fenced):
        old.drop_bodies(["f1"])
    assert new.bodies() == {"f1", "f2", "l1"}
    new.drop_bodies(["f1", "l1", "unknown"])
    assert new.bodies() == {"f2"}
    assert new.fragment("f1") is None
    assert new.layout("l1") is None
    old.close()
    new.close()


def test_a_body_that_is_handed_in_again_starts_its_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    journal = Journal.open(MEMORY, "job")
    journal.begin("i")
    kept = layouts.Layouts(journal)
    journal.put_fragment("f", b"1")
    assert kept.prune((), now) == 0
    now = layouts.KEEP - 1.0
    kept.touch("f")  # handed in again: its member is about to say that it has it
    now = layouts.KEEP + 1.0
    assert kept.prune((), now) == 0
    now = 2 * layouts.KEEP
    assert kept.prune({"f"}, now) == 0
    assert kept.prune((), now) == 0
    now = 3 * layouts.KEEP
    assert kept.prune((), now) == 1
    assert journal.fragment("f") is None
    kept.close()
    journal.close()


def test_a_supervisor_forgets_old_layouts_and_starts_again_with_those_it_needs(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_PRUNE", 0.1)
    monkeypatch.setattr(layouts, "KEEP", 0.5)
    supervisor = start(journal=tmp_path / "j", token="a-token-of-a-test")
    with pair(supervisor) as host:
        first = host.view.groups["trainer"].source_layout
        put_fragment(supervisor, body(5))  # the layout of both changes
        host.state(statement(0, 2, source=key(5)), statement(1, 2, source=key(5)))
        host.listen(lambda: host.view.groups["trainer"].source_layout != first)
        second = host.view.groups["trainer"].source_layout

        def status(path: str) -> int:
            return call(supervisor, "GET", path).status_code

        until(lambda: status(f"/v1/layouts/{first}") == 404, "the old layout is forgotten")
        until(lambda: status(f"/v1/fragments/{key()}") == 404, "and what it was made of")
        assert status(f"/v1/layouts/{second}") == 200
        assert "layouts.forgotten" in call(supervisor, "GET", "/v1/events").text
        put_fragment(supervisor)  # and back to the first, as if it had never been there
        host.state(statement(0, 3), statement(1, 3))
        host.listen(lambda: host.view.groups["trainer"].source_layout == first)
        until(lambda: status(f"/v1/layouts/{second}") == 404, "now the other one is forgotten")
        assert status(f"/v1/layouts/{first}") == 200
    supervisor.close(over=False)
    again = start(journal=tmp_path / "j", token="a-token-of-a-test")
    assert call(again, "GET", f"/v1/layouts/{first}").status_code == 200
    assert call(again, "GET", "/v1/groups").json()["trainer"]["members"] == [name(0), name(1)]
