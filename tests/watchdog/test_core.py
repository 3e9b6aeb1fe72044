"""What a watchdog decides, by tables: no processes, no clock."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.docs import (
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
)
from elastic_reshard.protocol.messages import Ended, Hello, LedgerSaid, MoverSaid, read_up
from elastic_reshard.protocol.view import Farewell, Heard, Told
from elastic_reshard.watchdog.core import House, Relay
from elastic_reshard.watchdog.patience import Patience
from tests.watchdog.world import statement

M, N = "m@" + "1" * 16, "n@" + "2" * 16
A, B = "a" * 32, "b" * 32
D = Deadlines()


def house(*members: str) -> House:
    made = House("job", "a", "machine", "f" * 16, D, 0.0)
    for member in members:
        attach(made, member)
    return made


def attach(made: House, member: str, number: int = 1, now: float = 0.0) -> str:
    said = statement(member, number)
    return made.attach(said, said.model_dump_json().encode(), now)


def connect(made: House, **told: Any) -> list[Any]:
    hello = read_up(made.hello())
    hear(made, base=0, **told)
    return [hello, *said(made)]


def hear(made: House, base: int | None = None, term: int = 1, **documents: Any) -> Relay:
    revision = made.view.revision
    return made.hear(
        Told(term=term, instance=f"i{term}", base=revision if base is None else base, revision=revision + 1,
             membership_epoch=1, **documents)
    )  # fmt: skip


def heard(made: House, **numbers: int) -> None:
    names = {"m": M, "n": N}
    made.hear(Heard(term=1, instance="i1", revision=1, numbers={names[k]: v for k, v in numbers.items()}))


def said(made: House) -> list[Any]:
    return [read_up(raw) for raw in made.outgoing()]


def member(name: str, state: MemberState) -> dict[str, MemberDoc]:
    doc = MemberDoc(id=name, group="g", rank=0, roles=frozenset({"source"}), host="a", state=state)
    return {name: doc}


def publication(arena: str, state: PublicationState, host: str = "a") -> dict[str, PublicationDoc]:
    source = SourceDoc(member=M, rank=0, host=host, arena=arena, slot=0, generation=2)
    doc = PublicationDoc(id="p1.1", weight_version=1, label=None, extras={}, group="g", seq=1, layout="ab", state=state,
                         sources=(source,))  # fmt: skip
    return {"p1.1": doc}


def ticket(publication: str | None) -> dict[str, GroupDoc]:
    given = (
        TicketDoc(id="t", publication=publication, weight_version=1, attempt=1, asks={}, within=1.0)
        if publication
        else None
    )
    doc = GroupDoc(name="e", size=1, roles=frozenset({"destination"}), members=("",), whole=True, state=GroupState.STALE,
                   ticket=given)  # fmt: skip
    return {"e": doc}


def dead_owner(state: MemberState | None, **told: Any) -> House:
    """M offered A and has ended; the supervisor has taken in all it said, and M is in this state."""
    made = house(M, N)
    made.offer(M, A, M)
    connect(made, members=member(M, MemberState.LIVE))
    heard(made, m=1, n=1)
    made.end(M, "killed", 1.0)
    documents = member(M, state) if state is not None else {M: None}
    hear(made, members=documents, **told)
    return made


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (MemberState.LIVE, True),
        (MemberState.JOINING, True),
        (MemberState.ORPHANED, True),
        (MemberState.LEAVING, True),
        (MemberState.LOST, False),
        (MemberState.FORFEIT, False),
        (MemberState.REFUSED, False),
        (None, False),
    ],
)
def test_an_ended_owners_arena_is_kept_as_long_as_the_supervisor_counts_on_it(
    state: MemberState | None, kept: bool
) -> None:
    made = dead_owner(state)
    assert made.sweep(1.1) == ([] if kept else [A])
    assert (A in made.arenas) is kept


@pytest.mark.parametrize(
    ("state", "granted", "kept"),
    [
        (PublicationState.MOVING, False, True),
        (PublicationState.COMMITTED, False, True),
        (PublicationState.RELEASED, False, False),
        (PublicationState.RELEASED, True, True),
        (PublicationState.ABANDONED, False, False),
    ],
)
def test_an_arena_is_kept_while_a_publication_or_a_ticket_refers_to_it(
    state: PublicationState, granted: bool, kept: bool
) -> None:
    groups = ticket("p1.1" if granted else None)
    made = dead_owner(MemberState.LOST, publications=publication(A, state), groups=groups)
    assert made.sweep(1.1) == ([] if kept else [A])


def test_a_publication_of_another_host_or_arena_keeps_nothing() -> None:
    made = dead_owner(MemberState.LOST, publications=publication(A, PublicationState.COMMITTED, host="b"))
    assert made.sweep(1.1) == [A]
    made = dead_owner(MemberState.LOST, publications=publication(B, PublicationState.COMMITTED))
    assert made.sweep(1.1) == [A]


@pytest.mark.parametrize("where", ["publication", "transfer", "elsewhere", "released"])
def test_a_landing_arena_is_kept_while_a_publication_or_a_transfer_refers_to_it(where: str) -> None:
    landing = LandingDoc(
        member=M, group="e", rank=0, host="b" if where == "elsewhere" else "a", layout="bb", arena=A, slot=0
    )
    state = PublicationState.RELEASED if where in ("transfer", "released") else PublicationState.COMMITTED
    told = publication(B, state)["p1.1"].model_copy(update={"landings": (landing,) if where != "transfer" else ()})
    party = PartyDoc(group="e", layout="bb", members=(0,))
    moving = TransferDoc(
        id="p1.1:1.1", publication="p1.1", epoch=1, state=TransferState.BREAKING, members=(M,), hosts=("a",), source=party,
        destinations=(party,), landings=(landing,), cell=1, message=1, staging=1, plan="x",
    )  # fmt: skip
    transfers = {moving.id: moving} if where == "transfer" else {}
    made = dead_owner(MemberState.LOST, publications={"p1.1": told}, transfers=transfers)
    assert made.sweep(1.1) == ([] if where in ("publication", "transfer") else [A])


def test_words_of_movers_are_said_in_order_and_only_to_one_that_hears() -> None:
    made = house(M)
    words = [LedgerSaid(member=M, arena=A, slot=0, publication="p1.1", bits=""),
             MoverSaid(member=M, mover="a" * 32, transfer="t", state="out")]  # fmt: skip
    made.say(words)
    assert [m.kind for m in said(made)] == ["stated"], "the next Hello says it"
    hello = read_up(made.hello(words[1:], words[:1]))  # type: ignore[arg-type]
    assert (hello.movers, hello.ledgers) == ((words[1],), (words[0],))  # type: ignore[union-attr]
    made.say(words)
    assert said(made) == words
    made.say(words)
    made.cut()
    assert said(made) == []


def test_nothing_is_dropped_that_the_supervisor_may_not_have_heard_of() -> None:
    made = house(M, N)
    made.offer(M, A, M)
    connect(made)
    heard(made, m=1)
    late = statement(M, 2)
    made.state(M, late, late.model_dump_json().encode())
    made.end(M, "killed", 1.0)
    assert made.sweep(1.1) == [], "statement 2 was not taken in"
    heard(made, m=2)
    assert made.sweep(1.1) == [A]


def test_nothing_is_dropped_without_a_current_view() -> None:
    made = dead_owner(MemberState.LOST)
    made.cut()
    assert made.sweep(100.0) == []
    made.hello()
    heard(made, m=1)
    assert made.sweep(100.0) == [], "connected, no snapshot yet"
    hear(made, base=0)
    assert made.sweep(100.0) == [A]


def test_a_living_owners_arenas_are_its_own_to_give_up() -> None:
    made = house(M, N)
    made.offer(M, A, M)
    connect(made)
    heard(made, m=1)
    assert made.sweep(1000.0) == []
    assert not made.withdraw(N, A)
    assert made.withdraw(M, A)
    assert not made.withdraw(M, A)


def test_an_end_is_told_once_and_once_more_when_its_arenas_are_gone() -> None:
    made = dead_owner(MemberState.ORPHANED)
    assert said(made) == [Ended(member=M, arenas_kept=True, how="killed")]
    made.sweep(1.1)
    assert not made.end(M, "killed", 1.2)
    assert said(made) == []
    hear(made, members=member(M, MemberState.LOST))
    assert made.sweep(1.3) == [A]
    assert said(made) == [Ended(member=M, arenas_kept=False, how="killed")]
    assert M not in made.members
    assert said(made) == []


def test_hello_says_everything_and_again_what_a_lost_connection_may_have_lost() -> None:
    made = house(M, N)
    made.offer(M, A, M)
    made.end(M, "killed", 1.0)
    made.end(N, "left", 1.0)
    for _ in range(2):
        hello, *rest = connect(made)
        assert [s.member for s in hello.statements] == [M, N]
        assert hello.ended == (M, N)
        assert rest == [Ended(member=N, arenas_kept=False, how="left")], "whose arenas are kept is said"
        made.cut()
    assert said(made) == []


def test_a_hello_says_where_weights_lie_only_of_what_may_be_installed() -> None:
    """A supervisor without a journal needs no more, and 4,000 landing members fit into one message."""
    count, states = 4000, [PublicationState.MOVING, PublicationState.COMMITTED]
    states += 8 * [PublicationState.RELEASED, PublicationState.ABANDONED]
    names = [f"engine-{i:04}@{i:016x}" for i in range(count)]
    landings = tuple(
        LandingDoc(member=name, group="engine", rank=i, size=count, layout="f" * 32, host=f"host-{i // 8}", arena=f"{i:032x}",
                   slot=0)
        for i, name in enumerate(names)
    )  # fmt: skip
    sources = tuple(SourceDoc(member=f"trainer-{i}@{i:016x}", rank=i, host=f"host-{i // 8}", arena=f"{i:032x}", slot=1,
                              generation=2) for i in range(1000))  # fmt: skip
    landed = tuple(LandedDoc(host=f"host-{i // 8}", layout="f" * 32, ranks=tuple(range(i, i + 8)), by=tuple(names[i : i + 8]))
                   for i in range(0, count, 8))  # fmt: skip
    docs = [
        PublicationDoc(id=f"p1.{i}", weight_version=i + 1, label=None, extras={}, group="trainer", seq=i, layout="ab",
                       state=state, sources=sources, landings=landings, landed=landed)
        for i, state in enumerate(states)
    ]  # fmt: skip
    made = house(M)
    hear(made, base=0, publications={doc.id: doc for doc in docs})
    raw = made.hello()
    assert len(raw) < 8 << 20
    hello = read_up(raw)
    assert isinstance(hello, Hello)
    assert hello.publications[:2] == tuple(docs[:2])
    for said, doc in zip(hello.publications[2:], docs[2:], strict=True):
        assert said == doc.model_copy(update={"landings": (), "landed": ()})
    assert made.view.publications == {doc.id: doc for doc in docs}


def test_what_is_said_up_is_the_latest_only() -> None:
    made = house(M)
    connect(made)
    for number in (2, 3, 5, 4):
        new = statement(M, number)
        assert made.state(M, new, new.model_dump_json().encode()) is (number != 4)
    made.beat()
    first, beat = said(made)
    assert (first.statement.number, beat.kind, beat.revision) == (5, "beat", 1)
    assert not made.unsaid


def test_terms() -> None:
    made = house(M)
    connect(made)
    assert hear(made, term=3, base=0) is Relay.PASS_ON
    assert hear(made, term=2, base=0) is Relay.IGNORE
    assert made.hear(Farewell(term=2, instance="i2", over=True)) is Relay.IGNORE
    assert not made.over
    assert made.hear(Told(term=3, instance="twin", base=0, revision=9, membership_epoch=1)) is Relay.IGNORE
    assert hear(made, term=3, base=made.view.revision + 5) is Relay.RECONNECT
    assert read_up(made.hello()).obeyed == (3, "i3")  # type: ignore[union-attr]
    assert made.hear(Farewell(term=3, instance="i3", over=True)) is Relay.PASS_ON
    assert made.over


def test_when_it_goes() -> None:
    made = house()
    assert not made.departure(2 * D.connect - 0.1)
    assert made.departure(2 * D.connect) == "no member has come"
    attach(made, M)
    assert not made.departure(1e6)
    attach(made, N)
    made.end(M, "left", 5.0)
    assert not made.departure(6.0)
    made.end(N, "left", 7.0)
    assert made.departure(7.0) == "its last member has left"


@pytest.mark.parametrize("order", [("killed", "left"), ("left", "killed")])
def test_it_is_the_last_that_counts(order: tuple[str, str]) -> None:
    made = house(M, N)
    made.detach(M, 1.0)
    made.end(M, order[0], 1.0)
    made.detach(N, 2.0)
    made.end(N, order[1], 2.0)
    assert bool(made.departure(2.0)) is (order[1] == "left")
    assert order[1] != "killed" or not made.departure(2.0 + D.orphan_hold - 0.1)
    assert made.departure(2.0 + D.orphan_hold)


def test_living_members_without_a_connection_are_waited_for() -> None:
    made = house(M, N)
    made.detach(M, 1.0)
    made.end(N, "left", 2.0)
    assert not made.departure(2.0)
    assert made.departure(2.0 + D.orphan_hold)
    made.hear(Farewell(term=1, instance="i1", over=True))
    assert made.departure(2.0) == "the job is over"
    attach(made, M)
    assert not made.departure(3.0)


def test_a_replacement_waits_for_those_its_predecessor_served() -> None:
    made = house()
    dead = statement(N, 4)
    made.inherit({M: (None, None), N: ("killed", dead)}, 0.0)
    other = "o@" + "3" * 16
    attach(made, other)
    made.settled(other)
    assert not made.ready(0.1)
    assert made.ready(D.watchdog_silent / 2), "not for ever"
    attach(made, M, 3)
    assert not made.ready(0.1), "M has not offered all it holds"
    made.settled(M)
    assert made.ready(0.1)
    hello = read_up(made.hello())
    assert {s.member: s.number for s in hello.statements} == {N: 4, other: 1, M: 3}  # type: ignore[union-attr]
    assert hello.ended == (N,)  # type: ignore[union-attr]


def test_a_replacement_does_not_go_before_those_its_predecessor_served_have_come() -> None:
    made = house()
    made.inherit({M: (None, None)}, 0.0)
    attach(made, N)
    made.end(N, "left", 1.0)
    assert not made.departure(1.0)
    assert made.departure(1.0 + D.orphan_hold)
    made.end(M, "killed", 2.0)
    assert not made.departure(2.0)


def test_what_an_owner_withdrew_behind_our_back_is_dropped() -> None:
    made = house(M, N)
    assert made.offer(N, A, M), "its owner has not said all"
    made.offer(M, B, M)
    assert made.settled(M) == [A]
    assert not made.offer(N, A, M), "not any more"
    assert made.offer(N, B, M)
    assert not made.offer(N, B, N), "an id has one owner"


def test_arenas_of_an_owner_that_nobody_knows_are_kept_for_a_while() -> None:
    made = house(N)
    made.offer(N, A, M)
    connect(made)
    assert made.sweep(D.orphan_hold - 0.1) == []
    assert made.sweep(D.orphan_hold) == [A]


def test_ended_is_final() -> None:
    made = house(M)
    made.end(M, "killed", 1.0)
    assert "new incarnation" in attach(made, M, 2)


def test_messages_are_json() -> None:
    made = house(M)
    assert json.loads(made.hello())["kind"] == "hello"
    made.cut()
    assert not made.obeyed


class TestPatience:
    def test_silence_is_judged_when_the_tick_was_on_time(self) -> None:
        judge = Patience(2.0, 0.25, 0.0)
        now = 0.0
        while now < 1.9:
            judge.due(now, 0.25)
            now += 0.25
            assert judge.silent(now) is (now >= 2.0)
        judge.heard(now)
        judge.due(now, 0.25)
        assert not judge.silent(now + 0.25)

    def test_a_late_judge_grants_two_beats(self) -> None:
        judge = Patience(2.0, 0.25, 0.0)
        judge.due(0.0, 0.25)
        assert not judge.silent(10.0)
        judge.due(10.0, 0.25)
        assert not judge.silent(10.25)
        judge.due(10.25, 0.25)
        assert judge.silent(10.5)

    def test_what_was_heard_lately_is_not_forgotten_by_a_grant(self) -> None:
        judge = Patience(2.0, 0.25, 0.0)
        judge.due(0.0, 0.25)
        judge.heard(9.9)
        assert not judge.silent(10.0)
        judge.due(11.7, 0.1)
        assert not judge.silent(11.8)
