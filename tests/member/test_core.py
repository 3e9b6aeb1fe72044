"""`MemberCore`: which slot may be written, which ticket is taken up, what a call was answered."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.member.core import MemberCore
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
    SourceDoc,
    TicketDoc,
    TransferDoc,
    TransferState,
    VerdictDoc,
)
from elastic_reshard.protocol.messages import Fill, GroupSpec, Landing
from elastic_reshard.protocol.view import Farewell, Heard, Told

ME, OTHER = f"a@{0:016x}", f"b@{1:016x}"
MOVING, COMMITTED, RELEASED, ABANDONED = PublicationState


class World:
    """A member and what it is told."""

    def __init__(self) -> None:
        self.core = MemberCore(ME, GroupSpec(name="g", size=2, rank=0), frozenset({"source", "destination"}), "h", 1)
        self.core.new_arena("aa", 2)
        self.revision = 0
        self.group = GroupDoc(name="g", size=2, roles=frozenset({"source", "destination"}), members=(ME, OTHER), whole=True,
                              state=GroupState.STALE, count_from=1 << 32, floor=1 << 32)  # fmt: skip
        self.tell()

    def tell(self, publications: dict[str, Any] | None = None, committed: str = "", **group: Any) -> None:
        """A change of the view."""
        self.group = self.group.model_copy(update=group)
        told = Told(term=1, instance="i", base=self.revision, revision=self.revision + 1, membership_epoch=1,
                    committed=committed, groups={"g": self.group}, publications=publications or {})  # fmt: skip
        assert self.core.hear(told)
        self.revision += 1

    def hear(self, number: int) -> None:
        """The supervisor has taken in a statement."""
        self.core.hear(Heard(term=1, instance="i", revision=self.revision, numbers={ME: number}))

    def publish(self, generation: int = 2) -> tuple[int, int]:
        """(slot, number) of a publish that is offered."""
        seq = self.core.next_publish()
        slot, _ = self.core.claim("aa")
        assert slot is not None
        self.core.offer(slot, Fill(arena="aa", slot=slot.slot, generation=generation, seq=seq, fragment="ff"))
        self.core.statement()
        return slot.slot, seq

    def publication(self, seq: int, slot: int, state: PublicationState, version: int = 1, generation: int = 2) -> Any:
        """A document of a publish of both ranks."""
        sources = tuple(SourceDoc(member=m, rank=r, host="h", arena="aa" if m == ME else "bb", slot=slot, generation=generation)
                        for r, m in enumerate((ME, OTHER)))  # fmt: skip
        return PublicationDoc(id=f"p{version}", weight_version=version, label=None, extras={}, group="g", seq=seq, layout="L",
                              state=state, sources=sources)  # fmt: skip


@pytest.fixture
def world() -> World:
    return World()


def test_a_rank_that_the_group_has_not_is_a_stranger_to_it(world: World) -> None:
    """Who was started for a larger group hears of the one that is there: it is refused, and can read why."""
    stranger = MemberCore(f"c@{2:016x}", GroupSpec(name="g", size=4, rank=3), frozenset({"source"}), "h", 1)
    me = MemberDoc(id=stranger.member, group="g", rank=3, roles=frozenset({"source"}), host="h",
                   state=MemberState.REFUSED, reason="the group has 2 ranks")  # fmt: skip
    group = world.group.model_copy(update={"fragments": (("f0", None), ("f1", None))})
    told = Told(term=1, instance="i", base=0, revision=1, membership_epoch=1, groups={"g": group}, members={me.id: me})
    assert stranger.hear(told)
    assert stranger.out == "the group has 2 ranks"
    assert (stranger.admitted, stranger.accepted, stranger.count_from) == (False, None, 0)
    world.tell(fragments=group.fragments)
    assert (world.core.admitted, world.core.accepted, world.core.count_from) == (True, "f0", 1 << 32)


def ticket(name: str, ask: int, publication: str = "p1") -> TicketDoc:
    return TicketDoc(
        id=name, publication=publication, weight_version=1, attempt=1, asks={ME: ask, OTHER: 1}, within=9.0
    )


def verdict(name: str, kind: Any, ask: int) -> VerdictDoc:
    return VerdictDoc(ticket=name, verdict=kind, weight_version=1, publication="p1", asks={ME: ask, OTHER: 1})


# -- slots


def test_two_publishes_take_two_slots_and_a_third_takes_one_back(world: World) -> None:
    (first, _), (second, _) = world.publish(), world.publish()
    assert {first, second} == {0, 1}
    slot, say = world.core.claim("aa")
    assert (slot, say) == (None, True)
    said = world.core.statement()
    assert [f.slot for f in said.fills] == [second]
    assert world.core.claim("aa") == (None, False)  # nobody has heard it yet
    world.hear(said.number)
    slot, _ = world.core.claim("aa")
    assert slot is not None
    assert slot.slot == first


def test_a_call_that_gives_up_offers_again_what_it_took_back(world: World) -> None:
    world.publish()
    world.publish()
    assert world.core.claim("aa") == (None, True)
    world.core.statement()
    assert world.core.unclaim()
    assert len(world.core.statement().fills) == 2
    assert not world.core.unclaim()


def test_what_was_minted_while_it_was_taken_back_is_not_waited_for(world: World) -> None:
    """History 161: the member waited for its own withdrawal until the deadline, beside a slot that it could take back."""
    first, seq = world.publish()
    second, _ = world.publish()
    world.core.claim("aa")
    said = world.core.statement()
    world.tell({"p1": world.publication(seq, first, COMMITTED)}, floor=seq)
    world.hear(said.number)
    assert world.core.claim("aa") == (None, True)
    said = world.core.statement()
    assert second not in [f.slot for f in said.fills]
    world.hear(said.number)
    slot, _ = world.core.claim("aa")
    assert slot is not None
    assert slot.slot == second


@pytest.mark.parametrize("state", [MOVING, COMMITTED])
def test_a_slot_in_use_is_held_and_its_holder_named(world: World, state: PublicationState) -> None:
    first, seq = world.publish()
    world.tell({"p1": world.publication(seq, first, state)}, floor=seq)
    second, _ = world.publish()
    assert second != first
    world.core.claim("aa")
    held = world.core.holders("aa")
    assert held[first].startswith(f"slot {first}: version 1 ({state}")
    assert world.core.published(seq)[0] == str(state)


@pytest.mark.parametrize("state", [RELEASED, ABANDONED])
def test_a_slot_is_free_when_its_version_is_over(world: World, state: PublicationState) -> None:
    first, seq = world.publish()
    world.tell({"p1": world.publication(seq, first, state)}, floor=seq)
    world.publish()
    slot, say = world.core.claim("aa")
    assert slot is not None
    assert (slot.slot, say) == (first, False)


def test_a_publish_below_the_floor_is_void_and_its_slot_free(world: World) -> None:
    first, seq = world.publish()
    world.tell(floor=2 << 32, count_from=2 << 32)
    assert world.core.published(seq) == ("void", None)
    slot, _ = world.core.claim("aa")
    assert slot is not None
    assert world.core.next_publish() == (2 << 32) + 1
    assert first in (0, 1)


def test_a_call_that_failed_is_made_again_under_the_label_of_its_step(world: World) -> None:
    core, start = world.core, world.core.count_from

    def offered(label: str) -> int:
        slot, _ = core.claim("aa")
        assert slot is not None
        core.offer(slot, Fill(arena="aa", slot=slot.slot, generation=2, seq=core.count, fragment="ff", label=label))
        return core.count - start

    calls = [core.next_publish("a") - start, core.next_publish("a") - start, offered("a")]  # failed, failed again, done
    calls += [core.next_publish("b") - start, core.next_publish("c") - start, offered("c")]  # failed, gone on
    world.tell(floor=core.count)
    calls += [
        core.next_publish("c") - start,
        core.next_publish("c") - start,
        offered("c"),
    ]  # these labels tell nothing apart
    calls += [core.next_publish() - start, core.next_publish() - start]
    assert calls == [1, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7]
    core.next_publish("d")
    world.tell(count_from=2 << 32, floor=2 << 32)
    assert core.next_publish("d") == (2 << 32) + 1, "a failed one of an earlier count is over"


def test_a_late_rank_hears_of_the_version_that_others_began(world: World) -> None:
    era = EraDoc(members=(ME, OTHER), start=1 << 32, layout="L", fragments=(("ff", None), ("ff", None)))
    world.tell(eras=(era,))
    _, seq = world.publish()
    doc = world.publication(seq, 0, COMMITTED)
    doc = doc.model_copy(update={"sources": doc.sources[1:]})
    world.tell({"p1": doc}, floor=seq)
    assert world.core.published(seq) == ("committed", doc)
    assert world.core.claim("aa")[0] is not None  # nobody reads its slot


def test_a_version_of_an_earlier_gang_of_that_name_answers_nothing(world: World) -> None:
    _, seq = world.publish()
    doc = world.publication(seq, 0, RELEASED)
    doc = doc.model_copy(update={"sources": (doc.sources[1].model_copy(update={"member": f"a@{7:016x}"}),)})
    world.tell({"p1": doc})
    assert world.core.published(seq) == ("offered", None)


def test_an_older_arena_goes_when_nobody_needs_it(world: World) -> None:
    first, seq = world.publish()
    world.tell({"p1": world.publication(seq, first, COMMITTED)}, floor=seq)
    world.core.new_arena("cc", 2)
    assert world.core.unused_arenas("cc") == []
    world.tell({"p1": world.publication(seq, first, RELEASED)})
    assert world.core.unused_arenas("cc") == ["aa"]
    assert {s.arena for s in world.core.slots} == {"cc"}


@given(st.lists(st.sampled_from(["publish", "taken in", "mint", "commit", "release", "give up"]), max_size=30))
def test_slots_in_use_are_never_claimed(acts: list[str]) -> None:
    """Whatever is minted of what was offered by the last statement taken in, no slot of it is written until it is over."""
    world, taken_in, docs, version = World(), (), {}, 0
    writes: dict[int, int] = {}
    for act in acts:
        core = world.core
        if act == "publish":
            seq = core.next_publish()
            slot, say = core.claim("aa")
            if slot is None:
                if say:
                    core.statement()
                continue
            used = {
                (s.slot, s.generation) for d in docs.values() if d.state in (MOVING, COMMITTED) for s in d.sources[:1]
            }
            assert (slot.slot, writes.get(slot.slot, 0)) not in used
            assert not any(f.slot == slot.slot and f.seq > world.group.floor for f in taken_in)
            writes[slot.slot] = writes.get(slot.slot, 0) + 2
            core.offer(slot, Fill(arena="aa", slot=slot.slot, generation=writes[slot.slot], seq=seq, fragment="ff"))
            core.statement()
        elif act == "give up":
            if core.unclaim():
                core.statement()
        elif act == "taken in":
            said = core.statement()
            taken_in = said.fills
            world.hear(said.number)
        elif act == "mint":
            ready = [f for f in taken_in if f.seq > world.group.floor]
            if ready and not any(d.state is MOVING for d in docs.values()):
                fill, version = max(ready, key=lambda f: f.seq), version + 1
                docs[f"p{version}"] = world.publication(fill.seq, fill.slot, MOVING, version, fill.generation)
                world.tell(docs, floor=fill.seq)
        else:
            was, now = {"commit": (MOVING, COMMITTED), "release": (COMMITTED, RELEASED)}[act]
            key = next((k for k, d in docs.items() if d.state is was), None)
            if key is not None:
                docs[key] = docs[key].model_copy(update={"state": now})
                world.tell(docs)


# -- tickets and verdicts


def test_a_ticket_answers_one_call_once(world: World) -> None:
    world.core.ask(5)
    world.tell(ticket=ticket("x", 2))
    assert world.core.grant() is None  # of another call
    world.tell(ticket=ticket("x", 1))
    granted = world.core.grant()
    assert granted is not None
    world.core.take_up(granted)
    assert world.core.grant() is None
    world.core.report(True, "", 1.0, 8)
    assert world.core.answer() is None
    world.tell(ticket=None, verdict=verdict("x", "current", 1))
    world.core.end_call(world.core.answer())
    assert world.core.holding is not None
    assert world.core.holding.ticket == "x"


def test_what_was_pulled_under_a_call_that_ended_is_kept_for_the_next(world: World) -> None:
    world.core.ask(5)
    world.tell(ticket=ticket("x", 1))
    granted = world.core.grant()
    assert granted is not None
    world.core.take_up(granted)
    world.core.report(True, "", 1.0, 8)
    world.core.end_call(world.core.answer())
    assert world.core.holding is None
    world.core.ask(5)
    assert (world.core.install.ticket, world.core.install.outcome) == ("x", "pulled")
    world.tell(ticket=None, verdict=verdict("x", "current", 1))
    world.core.end_call(world.core.answer())
    assert world.core.holding is not None


def test_a_ticket_that_was_decided_is_not_stated_as_undecided(world: World) -> None:
    """History 1: a later supervisor, whose view had no verdict, made a group PARTIAL that was CURRENT."""
    world.core.ask(5)
    world.tell(ticket=ticket("x", 1))
    granted = world.core.grant()
    assert granted is not None
    world.core.take_up(granted)
    world.core.report(True, "", 1.0, 8)
    world.tell(ticket=None, verdict=verdict("x", "current", 1))
    world.core.end_call(world.core.answer())
    world.tell(verdict=None)
    world.core.ask(5)
    assert (world.core.install.ticket, world.core.install.outcome) == (None, "none")
    world.tell(ticket=ticket("x", 2))
    assert world.core.grant() is None  # it holds that already


@pytest.mark.parametrize("change", [{"whole": False}, {"members": (ME, f"c@{2:016x}")}])
def test_what_is_held_is_over_when_a_rank_is_lost(world: World, change: dict[str, Any]) -> None:
    test_a_ticket_answers_one_call_once(world)
    world.tell(**change)
    assert world.core.holding is None


def test_partial_and_a_call_that_ends_while_it_pulls_hold_nothing(world: World) -> None:
    test_a_ticket_answers_one_call_once(world)
    world.core.ask(5)
    world.tell(ticket=ticket("y", 2), verdict=None)
    granted = world.core.grant()
    assert granted is not None
    world.core.take_up(granted)
    assert world.core.holding is None
    world.core.end_call(None)
    assert world.core.install.outcome == "failed"
    world.tell(ticket=None, verdict=verdict("y", "partial", 2))
    world.core.ask(5)
    assert world.core.answer() is None  # the old verdict does not answer the new call


# -- who is obeyed


def test_a_farewell_and_a_word_of_an_older_term_are_told_apart(world: World) -> None:
    core = world.core
    assert not core.hear(Farewell(term=1, instance="another", over=True))
    assert core.out == ""
    assert core.hear(Farewell(term=1, instance="i", over=True))
    assert core.out == "its job is over"
    assert core.hear(Told(term=2, instance="j", base=0, revision=1, membership_epoch=1))
    assert not core.hear(Told(term=1, instance="i", base=0, revision=9, membership_epoch=1))


def test_a_heard_before_its_view_counts_only_with_it(world: World) -> None:
    world.core.statement()
    world.core.hear(Heard(term=1, instance="i", revision=world.revision + 1, numbers={ME: 1}))
    assert world.core.heard == 0
    world.hear(1)
    world.hear(0)
    assert world.core.heard == 1


# -- landing


class Hosts:
    """A destination member on host "h", and what the view shows of other hosts."""

    def __init__(self, roles: frozenset[Any] = frozenset({"destination"})) -> None:
        self.core = MemberCore(ME, GroupSpec(name="g", size=2, rank=0), roles, "h", 1)
        self.revision = 0
        self.group = GroupDoc(name="g", size=2, roles=roles, members=(ME, OTHER), whole=True, state=GroupState.STALE,
                              destination_layout="L1")  # fmt: skip
        self.tell()

    def tell(self, **documents: Any) -> None:
        committed = documents.pop("committed", "")
        told = Told(term=1, instance="i", base=self.revision, revision=self.revision + 1, membership_epoch=1,
                    committed=committed, groups={"g": self.group}, **documents)  # fmt: skip
        assert self.core.hear(told)
        self.revision += 1

    def member(self, name: str, host: str, role: Any, state: MemberState = MemberState.LIVE) -> None:
        doc = MemberDoc(id=name, group="t", rank=0, roles=frozenset({role}), host=host, state=state)
        self.tell(members={name: doc})

    def change(self, **group: Any) -> None:
        self.group = self.group.model_copy(update=group)
        self.tell()


def doc_of(
    state: PublicationState, sources: list[str], landings: dict[str, str] | None = None, **more: Any
) -> PublicationDoc:
    return PublicationDoc(
        id="p1", weight_version=1, label=None, extras={}, group="t", seq=1, layout="S", state=state,
        sources=tuple(SourceDoc(member=f"t{r}", rank=r, host=h, arena="a", slot=0, generation=2)
                      for r, h in enumerate(sources)),
        landings=tuple(LandingDoc(member="x", group="g", rank=0, host=host, layout="L1", arena=arena, slot=0)
                       for arena, host in (landings or {}).items()), **more,
    )  # fmt: skip


def test_a_landing_arena_is_wanted_when_weights_may_come_from_another_host() -> None:
    here = Hosts()
    assert not here.core.wants_landing()
    here.member(ME, "h", "destination")
    here.member("t0", "h", "source")
    assert not here.core.wants_landing()
    here.member("e", "far", "destination")
    assert not here.core.wants_landing()  # the trainer is here
    for state, wanted in (
        (MemberState.JOINING, True),
        (MemberState.LIVE, True),
        (MemberState.LEAVING, True),
        (MemberState.ORPHANED, True),
        (MemberState.LOST, False),
        (MemberState.FORFEIT, False),
        (MemberState.REFUSED, False),
    ):
        here.member("t1", "far", "source", state)
        assert here.core.wants_landing() is wanted, state
        assert (here.core.landing_due() == "L1") is wanted
    here.member("t0", "h", "source", MemberState.LOST)
    assert here.core.wants_landing()  # no trainer anywhere, but `e` may have it
    here.tell(members={"e": None})
    assert not here.core.wants_landing()
    for state, sources, landings, wanted in (
        (MOVING, ["far"], {}, True),
        (COMMITTED, ["h", "far"], {}, True),
        (COMMITTED, ["h"], {"aa": "far"}, True),
        (COMMITTED, ["h"], {"aa": "h"}, False),
        (RELEASED, ["far"], {}, False),
        (ABANDONED, ["far"], {}, False),
    ):
        here.tell(publications={"p1": doc_of(state, sources, landings)})
        assert here.core.wants_landing() is wanted, (state, sources, landings)


def test_sources_and_groups_that_are_not_admitted_make_no_landing_arena() -> None:
    trainer = Hosts(frozenset({"source"}))
    trainer.member("t1", "far", "source")
    assert not trainer.core.wants_landing()
    here = Hosts()
    here.member("t1", "far", "source")
    here.change(whole=False)
    assert here.core.wants_landing()
    assert here.core.landing_due() is None
    here.change(whole=True, destination_layout=None)
    assert here.core.landing_due() is None
    here.change(destination_layout="L1")
    assert here.core.landing_due() == "L1"


def test_a_landing_arena_is_stated_and_goes_with_its_layout_once_nothing_needs_it() -> None:
    here = Hosts()
    here.member("t1", "far", "source")
    assert here.core.statement().landing is None
    first = Landing(arena="a1", cells=3, cell=64, nbytes=999)
    here.core.new_landing(first, "L1")
    assert here.core.landing_due() is None
    assert here.core.statement().landing == first
    here.change(whole=False, destination_layout=None)  # of a supervisor that must examine again
    assert here.core.statement().landing == first
    here.tell(publications={"p1": doc_of(COMMITTED, ["far"], {"a1": "h"})})
    here.change(whole=True, destination_layout="L2")
    assert here.core.unsaid
    assert here.core.statement().landing is None
    assert here.core.landing_due() == "L2"
    second = Landing(arena="a2", cells=4, cell=64)
    here.core.new_landing(second, "L2")
    assert here.core.statement().landing == second
    assert not here.core.has_unused_landings()
    party = PartyDoc(group="g", layout="L1", members=(0,))
    moving = TransferDoc(
        id="x1", publication="p1", epoch=1, state=TransferState.RUNNING, members=("m",), hosts=("h",), source=party,
        destinations=(party,), landings=doc_of(MOVING, [], {"a1": "h"}).landings, cell=64, message=64, staging=512, plan="ab",
    )  # fmt: skip
    here.tell(publications={"p1": doc_of(RELEASED, ["far"], {"a1": "h"})}, transfers={"x1": moving})
    assert here.core.unused_landings() == []
    here.tell(transfers={"x1": None})
    assert here.core.has_unused_landings()
    assert here.core.unused_landings() == ["a1"]
    assert here.core.unused_landings() == []


def test_installable_is_what_has_arrived_on_the_hosts_of_all_ranks() -> None:
    here = Hosts()

    def told(**more: Any) -> bool:
        here.tell(publications={"p1": doc_of(COMMITTED, **more)}, committed="p1")
        return here.core.installable() is not None

    def landed(host: str, *ranks: int, layout: str = "L1") -> LandedDoc:
        return LandedDoc(host=host, layout=layout, ranks=ranks)

    assert told(sources=["h", "h"])
    assert not told(sources=["h", "far"])
    assert not told(sources=["far"], landed=(landed("h", 0), landed("far", 1)))
    assert not told(sources=["far"], landed=(landed("h", 0, 1, layout="L2"),))
    assert told(sources=["far"], landed=(landed("h", 0, 1),))
    here.member(OTHER, "g2", "destination")
    assert not told(sources=["far"], landed=(landed("h", 0, 1),))
    assert told(sources=["far"], landed=(landed("h", 0), landed("g2", 1)))
    here.member(OTHER, "h", "destination")
    here.change(state=GroupState.COMPLETE)
    assert told(sources=["h", "far"])  # by a replica that is here
    assert not told(sources=["far"])
    here.change(state=GroupState.LANDING)
    assert not told(sources=["h", "far"])


@pytest.mark.parametrize(
    ("asked", "leaving", "over", "parting"),
    [(None, False, False, False), (3.0, False, False, True), (None, True, False, True), (None, False, True, True)],
)
def test_whose_end_is_no_news(world: World, asked: float | None, leaving: bool, over: bool, parting: bool) -> None:
    doc = MemberDoc(id=ME, group="g", rank=0, roles=world.core.roles, host="h", state=MemberState.LOST,
                    reason="left out by force", leave_within=asked)  # fmt: skip
    world.core.hear(Told(term=1, instance="i", base=world.revision, revision=world.revision + 1, membership_epoch=1,
                         members={ME: doc}))  # fmt: skip
    world.core.leaving = leaving
    if over:
        world.core.hear(Farewell(term=1, instance="i", over=True))
    assert world.core.out == ("its job is over" if over else "left out by force")
    assert world.core.parting is parting
