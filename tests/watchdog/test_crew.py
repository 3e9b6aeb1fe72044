"""What a watchdog decides about movers, by tables: no processes, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from elastic_reshard.mover.status import Glance
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.docs import (
    LandingDoc,
    MemberDoc,
    MemberState,
    PartyDoc,
    PublicationDoc,
    PublicationState,
    SourceDoc,
    TransferDoc,
    TransferState,
)
from elastic_reshard.protocol.messages import MoverSaid
from elastic_reshard.protocol.view import View
from elastic_reshard.watchdog.crew import (
    NOBODY,
    Action,
    Assign,
    Condemn,
    Crew,
    Fetch,
    Fork,
    Order,
    Scene,
    arenas_of,
    foreseen,
)

M, N, FAR = "m@" + "1" * 16, "n@" + "2" * 16, "far@" + "3" * 16
A, B, S = "a" * 32, "b" * 32, "c" * 32
D = Deadlines(abort=1.0)
PERIOD = D.mover_beat / 2


def doc(number: int = 1, state: TransferState = TransferState.FORMING, **more: Any) -> TransferDoc:
    landings = tuple(
        LandingDoc(member=member, group="e", rank=rank, host="a", layout="bb", arena=arena, slot=0)
        for rank, (member, arena) in enumerate(((M, A), (N, B)))
    )
    said: dict[str, Any] = {
        "id": f"p1.1:1.{number}", "publication": "p1.1", "epoch": number, "state": state, "members": (FAR, M, N),
        "hosts": ("z", "a", "a"), "absent": (2,), "source": PartyDoc(group="t", layout="aa", members=(0,)),
        "destinations": (PartyDoc(group="e", layout="bb", members=(1, 2)),), "landings": landings, "cell": 1,
        "message": 1, "staging": 1, "plan": "x",
    }  # fmt: skip
    return TransferDoc(**{**said, **more})


def publication() -> PublicationDoc:
    source = SourceDoc(member=FAR, rank=0, host="z", arena=S, slot=0, generation=2)
    return PublicationDoc(id="p1.1", weight_version=1, label=None, extras={}, group="t", seq=1, layout="aa",
                          state=PublicationState.MOVING, sources=(source,))  # fmt: skip


def scene(*transfers: TransferDoc, **changes: Any) -> Scene:
    view = View()
    view.transfers = {t.id: t for t in transfers}
    view.publications = {"p1.1": publication()}
    made = Scene(view, "a", True, {A: M, B: N}, {M, N}, {"aa", "bb"})
    return replace(made, **changes)


def crew(now: float = 0.0) -> Crew:
    numbers = count(1)
    return Crew(D, lambda: f"{next(numbers):032x}", now)


X, Y = f"{1:032x}", f"{2:032x}"


def kinds(actions: Iterable[Action]) -> list[type]:
    return [type(action) for action in actions]


def attached(now: float = 0.0, number: int = 1) -> Crew:
    """A crew with the mover X of M, attached, that has the task of this transfer."""
    made = crew()
    assert made.decide(scene(doc(number)), now) == [Fork(X, M)]
    assert made.forked(X, 7, 70, now)
    assert made.attach(X, M, "", 7, 70, now) == ""
    assert made.decide(scene(doc(number)), now) == [Assign(X, doc(number), publication())]
    return made


def say(made: Crew, state: Any, number: int = 1, mover: str = X, **more: Any) -> None:
    assert made.reported(mover, MoverSaid(member=M, mover=mover, transfer=doc(number).id, state=state, **more))


def running() -> Crew:
    made = attached()
    say(made, "running")
    made.decide(scene(doc(state=TransferState.RUNNING)), 0.0)
    made.outgoing()
    return made


def alive(made: Crew, since: float, until: float, **more: int) -> list[Action]:
    """Ticks on time, with a beat in each."""
    actions: list[Action] = []
    now = since
    while now < until:
        now += PERIOD
        beats = round(now / PERIOD)
        for mover in made.hands:
            made.glanced(mover, Glance(**{**dict.fromkeys(Glance._fields, 0), "beats": beats, **more}), now)
        actions += made.tick(now, PERIOD)
    return actions


def silent(made: Crew, since: float, until: float) -> tuple[float, list[Action]]:
    """Ticks on time without a beat, up to the first action."""
    now = since
    while now < until:
        now += PERIOD
        actions = made.tick(now, PERIOD)
        if actions:
            return now, actions
    return now, []


def test_present_members_of_this_host_get_a_mover_each_once() -> None:
    made = crew()
    assert made.decide(scene(), 0.0) == []
    assert made.decide(scene(doc(absent=())), 0.0) == [Fork(X, M), Fork(Y, N)]
    assert made.decide(scene(doc(absent=())), 0.1) == []
    assert crew().decide(scene(doc()), 0.0) == [Fork(X, M)], "N is absent, FAR is elsewhere"
    assert crew().decide(scene(doc(), current=False), 0.0) == [], "without a supervisor nothing is begun"
    assert crew().decide(scene(doc(), members=set()), 0.0) == [Fork(X, M)], "a dead member's too"


def test_a_fork_that_failed_is_tried_again_soon() -> None:
    made = crew()
    made.decide(scene(doc()), 0.0)
    made.not_forked(X, 1.0)
    assert made.decide(scene(doc()), 1.1) == []
    assert made.decide(scene(doc()), 1.6) == [Fork(Y, M)]


def test_a_mover_that_came_though_its_fork_was_called_failed_stays() -> None:
    """A nursery that is killed after the fork, before it answers: the mover attaches, it is asked again in vain."""
    made = crew()
    made.decide(scene(doc()), 0.0)
    assert made.attach(X, M, "", 7, 70, 0.1) == ""
    made.not_forked(X, 0.2)
    assert alive(made, 0.2, 1.0) == [], "its page is looked at"
    assert made.decide(scene(doc()), 1.0) == [Assign(X, doc(), publication())]
    made.ended(X)
    made.not_forked(X, 1.1)  # it came and went before the answer
    assert made.hands == {}


def test_the_task_waits_for_layouts_and_arenas() -> None:
    made = crew()
    made.decide(scene(doc()), 0.0)
    assert made.decide(scene(doc()), 0.0) == [], "not there yet"
    made.attach(X, M, "", 7, 70, 0.0)
    assert made.decide(scene(doc(), layouts=()), 0.0) == [Fetch("aa"), Fetch("bb")]
    assert made.decide(scene(doc(), layouts={"aa"}), 0.0) == [Fetch("bb")]
    assert made.decide(scene(doc(), arenas={}), 0.0) == []
    assert made.decide(scene(doc(), arenas={A: M}), 0.0) == [Assign(X, doc(), publication())]
    assert made.decide(scene(doc()), 0.0) == []


def test_which_arenas_go_with_a_task() -> None:
    near = publication().model_copy(update={"sources": (
        SourceDoc(member=FAR, rank=0, host="z", arena=S, slot=0, generation=2),
        SourceDoc(member=N, rank=1, host="a", arena=B, slot=0, generation=2))})  # fmt: skip
    assert arenas_of(doc(landings=doc().landings[:1]), near, "a") == ({A}, {B}), "N is absent, its arena is not"
    assert arenas_of(doc(absent=()), near, "a") == ({A, B}, set())
    assert arenas_of(doc(), near, "z") == ({S}, set())


def test_orders_are_told_when_they_change_and_again_to_one_that_has_attached_again() -> None:
    made = attached()
    assert made.decide(scene(doc()), 0.0) == []
    changed = doc(values={M: {"k": "00"}})
    assert made.decide(scene(changed), 0.0) == [Order(X, changed)]
    assert made.decide(scene(changed), 0.0) == []
    made.detach(X)
    later = doc(state=TransferState.RUNNING)
    assert made.decide(scene(later), 0.1) == []
    assert made.attach(X, M, later.id, 7, 70, 0.2) == ""
    assert made.decide(scene(later), 0.2) == [Order(X, later)]
    say(made, "out", outcome="done")
    assert made.decide(scene(), 0.3) == [Order(X, None)]
    assert made.decide(scene(), 0.3) == []
    made.attach(X, M, later.id, 7, 70, 0.4)
    assert made.decide(scene(), 0.4) == [Order(X, None)], "it may have missed it"


def test_one_that_is_out_takes_the_next_transfer() -> None:
    made = running()
    say(made, "out", outcome="done")
    assert made.decide(scene(doc(1), doc(2)), 0.1) == [Order(X, doc(1))], "the first is not over for the others"
    assert made.decide(scene(doc(2)), 0.2) == [Order(X, None), Assign(X, doc(2), publication())]


def test_one_that_is_busy_gets_no_task() -> None:
    made = running()
    assert made.decide(scene(doc(2)), 0.1) == [Order(X, None)]


@pytest.mark.parametrize("gone", [False, True])
def test_who_is_not_out_of_a_broken_epoch_in_time_is_condemned(gone: bool) -> None:
    made = running()
    broken = scene() if gone else scene(doc(state=TransferState.BREAKING))
    assert kinds(made.decide(broken, 10.0)) == [Order]
    assert alive(made, 10.0, 10.75) == []
    assert made.decide(broken, 10.8) == []
    [found] = alive(made, 10.75, 11.2)
    assert isinstance(found, Condemn)
    assert (found.mover, found.dump) == (X, True)
    assert "not out of all operations of transfer p1.1:1.1" in found.why
    assert alive(made, 11.2, 20.0) == [], "once"
    assert made.decide(broken, 20.0) == []


@pytest.mark.parametrize(("network", "within"), [("gloo", 0.5), ("pretend", 0.5), ("nccl", 1.0), ("nccl_m2n", 1.0)])
@pytest.mark.parametrize("gone", [False, True])
def test_an_abort_over_nccl_is_given_its_time(network: str, within: float, gone: bool) -> None:
    """A survivor's abort takes 0.5 to 0.8 s there; its mover is sound."""
    made = running()
    made.deadlines = Deadlines()
    made.decide(scene(doc(state=TransferState.RUNNING, network=network)), 9.0)
    broken = scene() if gone else scene(doc(state=TransferState.BREAKING, network=network))
    made.decide(broken, 10.0)
    assert alive(made, 10.0, 10.0 + within - PERIOD) == []
    [found] = alive(made, 10.0 + within - PERIOD, 10.0 + within + 2 * PERIOD)
    assert isinstance(found, Condemn)
    assert found.why.endswith(f"in {within} s")


def test_who_still_plans_is_given_its_time() -> None:
    """A plan can't be broken off; until the values are told it hinders nobody."""
    made = attached()
    say(made, "starting")
    broken = scene(doc(state=TransferState.BREAKING))
    made.decide(scene(doc()), 0.0)
    made.decide(broken, 10.0)
    assert alive(made, 10.0, 19.5) == []
    [found] = alive(made, 19.5, 20.6)
    assert isinstance(found, Condemn)


def test_who_is_out_in_time_is_not() -> None:
    made = running()
    broken = scene(doc(state=TransferState.BREAKING))
    made.decide(broken, 10.0)
    alive(made, 10.0, 10.5)
    say(made, "out", outcome="stopped")
    assert made.decide(broken, 10.6) == []
    assert alive(made, 10.6, 15.0) == []
    assert made.decide(scene(doc(2)), 15.0) == [Order(X, None), Assign(X, doc(2), publication())]


def test_one_without_beats_is_condemned() -> None:
    made = running()
    alive(made, 0.0, 5.0)
    at, [found] = silent(made, 5.0, 10.0)
    assert D.mover_silent <= at - 5.0 <= D.mover_silent + 2 * PERIOD
    assert isinstance(found, Condemn)
    assert (found.mover, found.dump) == (X, True)
    assert "no sign of life" in found.why


def test_a_late_judge_grants_two_beats() -> None:
    made = running()
    alive(made, 0.0, 5.0)
    assert made.tick(30.0, PERIOD) == [], "nobody beat, as far as it can tell: it was away itself"
    at, [_] = silent(made, 30.0, 35.0)
    assert 2 * D.mover_beat <= at - 30.0 <= 2 * D.mover_beat + 2 * PERIOD


def test_one_that_was_forked_has_longer_to_attach_for_the_first_time() -> None:
    made = crew()
    made.decide(scene(doc()), 0.0)
    assert silent(made, 0.0, 20.0)[1] == [], "its nursery loads"
    made.forked(X, 7, 70, 20.0)
    at, [_] = silent(made, 20.0, 40.0)
    assert D.connect <= at - 20.0 <= D.connect + 2 * PERIOD


def test_the_dead_are_replaced_for_another_transfer_only_and_after_the_proof() -> None:
    made = running()
    made.condemn(X, "for a test")
    assert kinds(made.decide(scene(doc(2)), 0.0)) == [], "not before its death is proved"
    made.ended(X)
    [ended] = made.outgoing()
    assert (ended.state, ended.outcome, ended.condemned, ended.transfer) == ("ended", "failed", "for a test", doc().id)
    assert made.decide(scene(doc()), 0.0) == []
    assert made.decide(scene(doc(), doc(2)), 0.0) == [Fork(Y, M)]
    assert made.attach(Y, M, "", 8, 80, 0.1) == ""
    assert made.decide(scene(doc()), 0.1) == [], "nor is another given the first"
    assert made.decide(scene(doc(), doc(2)), 0.1) == [Assign(Y, doc(2), publication())]


def test_what_an_out_mover_achieved_survives_its_end() -> None:
    made = running()
    say(made, "out", outcome="done", cells=5)
    made.ended(X)
    said = made.outgoing()[-1]
    assert (said.state, said.outcome, said.cells) == ("ended", "done", 5)


def test_one_whose_work_failed_is_condemned_after_it_was_heard() -> None:
    made = running()
    say(made, "out", outcome="failed", error="DigestMismatch", reason="other bytes")
    assert [m.state for m in made.outgoing()] == ["out"]
    [found] = made.decide(scene(doc(state=TransferState.RUNNING)), 1.0)
    assert isinstance(found, Condemn)
    assert "DigestMismatch" in found.why
    for outcome, error in (("done", ""), ("stopped", ""), ("refused", "ShardLost"), ("failed", "PeerLost")):
        other = running()
        say(other, "out", outcome=outcome, error=error)
        assert other.decide(scene(doc(state=TransferState.RUNNING)), 1.0) == []


def test_an_idle_one_goes_with_its_member_and_no_sooner() -> None:
    made = running()
    say(made, "out", outcome="done")
    assert kinds(made.decide(scene(doc(), members=set()), 0.0)) == [Order], "the transfer is not over"
    assert kinds(made.decide(scene(), 0.0)) == [Order]
    assert made.decide(scene(members=set(), current=False), 0.0) == []
    assert made.decide(scene(doc(2, state=TransferState.RUNNING), members=set()), 0.0) == [], "it may be needed"
    assert kinds(made.decide(scene(members=set()), 0.0)) == [Condemn]


def test_what_a_replacement_expects() -> None:
    made = crew(100.0)
    made.expect(X, M, 7, 70, doc().id, 100.0)
    assert not made.ready(100.1)
    assert made.decide(scene(current=False), 100.1) == [], "without a view nothing is known of transfers"
    assert made.decide(scene(doc(state=TransferState.RUNNING)), 100.1) == []
    assert made.attach(X, M, doc().id, 8, 80, 100.2), "another process"
    assert made.attach(X, M, doc().id, 7, 70, 100.2) == ""
    assert made.ready(100.2)
    assert kinds(made.decide(scene(doc(state=TransferState.RUNNING)), 100.2)) == [Order]
    late = crew(100.0)
    late.expect(X, M, 7, 70, doc().id, 100.0)
    at, [found] = silent(late, 100.0, 110.0)
    assert D.mover_silent <= at - 100.0 <= D.mover_silent + 2 * PERIOD
    assert isinstance(found, Condemn)
    assert late.ready(102.0), "not for ever"
    [said] = late.known()
    assert (said.member, said.mover, said.transfer, said.unheard) == (M, X, doc().id, True), "a Hello names it"
    late.ended(X)
    [said] = late.known()
    assert (said.state, said.unheard) == ("ended", False)


def condemned(made: Crew, now: float, seconds: float) -> list[MoverSaid]:
    """What is said in so many seconds after X was condemned."""
    made.outgoing()
    alive(made, now, now + seconds)
    return made.outgoing()


def test_one_whose_end_is_not_seen_is_said_to_be_condemned() -> None:
    made = running()
    made.condemn(X, "no sign of life")
    assert condemned(made, 0.0, D.proof_of_death) == [], "its end may yet be seen"
    [said] = condemned(made, D.proof_of_death, 3 * PERIOD)
    assert (said.mover, said.transfer, said.state, said.condemned) == (X, doc().id, "running", "no sign of life")
    assert condemned(made, 4.0, 5.0) == [], "once"
    made.refresh()
    assert all(word.condemned for word in (*made.outgoing(), *made.known())), "what its page shows changes nothing"
    say(made, "out", outcome="failed", error="PeerLost")
    assert made.outgoing()[-1].condemned, "nor what it says before it dies"
    assert made.decide(scene(doc(2)), 9.0) == [], "its member gets no other"
    made.ended(X)
    assert made.outgoing()[-1].state == "ended"
    assert made.decide(scene(doc(2)), 9.0) == [Fork(Y, M)]


@pytest.mark.parametrize("state", ["", "starting", "ready"])
def test_so_is_one_that_hangs_before_it_runs(state: str) -> None:
    made = attached()
    if state:
        say(made, state)
    made.condemn(X, "no sign of life")
    [said] = condemned(made, 0.0, D.proof_of_death + 3 * PERIOD)
    assert (said.state, said.transfer, said.condemned) == (state or "starting", doc().id, "no sign of life")


def test_so_is_an_idle_one_and_one_that_never_attached() -> None:
    made = running()
    say(made, "out", outcome="done")
    made.decide(scene(doc(2)), 0.0)
    made.condemn(X, "no sign of life")
    [said] = condemned(made, 0.0, D.proof_of_death + 3 * PERIOD)
    assert (said.state, said.outcome, said.condemned) == ("out", "done", "no sign of life")
    late = crew()
    late.decide(scene(doc()), 0.0)
    late.forked(X, 7, 70, 0.0)
    at, [_] = silent(late, 0.0, 10.0)
    [said] = condemned(late, at, D.proof_of_death + 3 * PERIOD)
    assert (said.state, said.transfer) == ("starting", doc().id)
    assert said.condemned


def test_one_that_was_expected_in_a_transfer_and_never_had_it_is_spoken_for() -> None:
    """Else whoever heard that it lives would wait for it, and then do without it for ever."""
    made = crew(100.0)
    made.expect(X, M, 7, 70, doc().id, 100.0)
    assert made.known()[0].unheard
    assert made.attach(X, M, "", 7, 70, 100.2) == ""
    made.decide(scene(current=False), 100.3)
    assert made.outgoing() == [], "without a view nothing is known of transfers"
    made.decide(scene(doc(2)), 100.4)
    [said] = made.outgoing()
    assert (said.mover, said.transfer, said.state, said.outcome) == (X, doc().id, "out", "stopped")


def test_one_that_nobody_expected() -> None:
    made = crew()
    assert made.attach(X, M, "", 7, 70, 0.0) == "", "its predecessor was gone before it wrote it down"
    assert made.decide(scene(doc()), 0.0) == [Assign(X, doc(), publication())]
    assert "another mover" in made.attach(Y, M, "", 8, 80, 0.0)
    made.condemn(X, "why not")
    assert "condemned" in made.attach(X, M, "", 7, 70, 0.0)


def test_two_processes_of_one_fork() -> None:
    made = crew()
    made.decide(scene(doc()), 0.0)
    assert made.attach(X, M, "", 7, 70, 0.0) == "", "the answer was lost, and asked for again"
    assert not made.forked(X, 8, 80, 0.1), "the second is to be killed"


def test_a_member_that_never_had_the_task_is_spoken_for() -> None:
    made = crew()
    breaking = doc(state=TransferState.BREAKING)
    assert made.decide(scene(breaking), 0.5) == []
    assert made.outgoing() == [], "a mover of a predecessor may yet come"
    made.decide(scene(breaking), 0.5 + D.mover_silent)
    [said] = made.outgoing()
    assert (said.mover, said.state, said.transfer) == (NOBODY, "ended", breaking.id)
    made.decide(scene(breaking), 9.0)
    assert made.outgoing() == []
    there = crew()
    there.decide(scene(doc()), 0.0)
    there.decide(scene(breaking), 0.1)
    [said] = there.outgoing()
    assert (said.mover, said.state, said.outcome) == (X, "out", "stopped")


def test_the_page_is_told_with_beats_while_it_runs() -> None:
    made = running()
    alive(made, 0.0, 1.0, peer=1, cell=8, cells=5, began=2, received=77)
    made.refresh()
    [said] = made.outgoing()
    assert (said.cells, said.began, said.received, said.waits, said.window) == (5, 2, 77, (FAR, 7), False)
    alive(made, 1.0, 2.0, peer=1, cell=8, cells=5, began=2, received=77)
    made.refresh()
    assert made.outgoing() == [], "nothing new"
    alive(made, 1.5, 2.0, peer=1, cell=1, window=1)
    made.refresh()
    assert made.outgoing()[0].window, "it waits for that member's window"
    alive(made, 2.0, 3.0, peer=99, cell=8)
    made.refresh()
    assert made.outgoing()[0].waits is None, "no such position"
    say(made, "out", outcome="done", cells=9)
    alive(made, 3.0, 4.0, cells=1)
    made.refresh()
    assert [m.cells for m in made.outgoing()] == [9], "out is the last word"


def test_words_are_forgotten_with_their_transfer() -> None:
    made = running()
    made.ended(X)
    made.decide(scene(doc()), 0.0)
    assert set(made.words) == {M}, "Hello says it again"
    made.outgoing()
    made.decide(scene(current=False), 0.0)
    assert set(made.words) == {M}
    made.decide(scene(), 0.0)
    assert made.words == {}


def test_what_another_says_is_not_heard() -> None:
    made = attached()
    for wrong in (
        MoverSaid(member=N, mover=X, transfer=doc().id, state="out"),
        MoverSaid(member=M, mover=Y, transfer=doc().id, state="out"),
        MoverSaid(member=M, mover=X, transfer=doc().id, state="ended"),
    ):
        assert not made.reported(X, wrong)
    assert not made.reported(Y, MoverSaid(member=M, mover=Y, transfer=doc().id, state="out"))


@pytest.mark.parametrize(
    ("here", "there", "likely"),
    [
        ({"source"}, {"destination"}, True),
        ({"destination"}, {"source"}, True),
        ({"source"}, {"source"}, False),
        ({"source", "destination"}, set(), False),
        ({"source", "destination"}, {"destination"}, True),
    ],
)
def test_when_a_nursery_is_loaded_ahead(here: set[Any], there: set[Any], likely: bool) -> None:
    view = View()
    for name, host, roles in ((M, "a", here), (FAR, "z", there)):
        view.members[name] = MemberDoc(id=name, group="g", rank=0, roles=frozenset(roles), host=host,
                                       state=MemberState.LIVE)  # fmt: skip
    assert foreseen(view, "a") is likely
    view.members = {name: m.model_copy(update={"state": MemberState.LOST}) for name, m in view.members.items()}
    assert not foreseen(view, "a")


def test_who_must_take_turns_is_not_given_a_transfer_without_its_window() -> None:
    made, paused = crew(), doc(paused=(1,))
    made.decide(scene(paused), 0.0)
    made.forked(X, 7, 70, 0.0)
    made.attach(X, M, "", 7, 70, 0.0)
    assert made.decide(scene(paused, windowless={M}), 0.1) == []
    assert made.decide(scene(paused, windowless={N}), 0.2) == [Assign(X, paused, publication())]
    other = crew()
    other.decide(scene(doc()), 0.0)
    other.forked(X, 7, 70, 0.0)
    other.attach(X, M, "", 7, 70, 0.0)
    assert other.decide(scene(doc(), windowless={M}), 0.1) == [Assign(X, doc(), publication())], (
        "its window does not count"
    )
