"""A journal is lost while hosts know unlike much: what the furthest of them knows counts, whoever greets first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from elastic_reshard.protocol.docs import PublicationDoc, PublicationState, SourceDoc
from elastic_reshard.protocol.messages import GroupSpec, Hello, Holding, Statement
from elastic_reshard.supervisor import core
from elastic_reshard.supervisor.events import Beaten, Event, Greeted, Tick
from elastic_reshard.supervisor.state import Publication
from tests.supervisor.sim.shell import answer_examine, answer_match, covers

MOVING, COMMITTED, RELEASED, ABANDONED = PublicationState
States = dict[str, PublicationState]


def name(member: str) -> str:
    return f"{member}@{0:016x}"


def publication(version: int, state: PublicationState) -> PublicationDoc:
    """Written by t-0, which is on host b."""
    source = SourceDoc(member=name("t-0"), rank=0, host="b", arena="a", slot=version % 2, generation=2 * version)
    return PublicationDoc(
        id=f"p{version}.1", weight_version=version, label=None, extras={}, group="t", seq=version, layout="Sa0x1",
        state=state, sources=(source,), ranks=1,
    )  # fmt: skip


def statement(member: str, host: str, held: int = 0) -> Statement:
    """Of the only rank of a group. held: the version that it holds by a verdict."""
    source = member.startswith("t")
    holding = Holding(weight_version=held, publication=f"p{held}.1", ticket=f"e:p{held}.1:1.1") if held else None
    return Statement(
        member=name(member), group=GroupSpec(name=member[0], size=1, rank=0), host=host, pid=1, number=9,
        roles=frozenset({"source" if source else "destination"}), source="a0" if source else None,
        destination=None if source else "dd", holding=holding,
    )  # fmt: skip


def hello(host: str, known: dict[int, PublicationState], *statements: Statement) -> Greeted:
    """A watchdog that knows of these versions."""
    docs = tuple(publication(version, state) for version, state in known.items())
    said = Hello(job="job", host=host, machine="m", watchdog="a", obeyed=(1, "i1"), statements=statements,
                 publications=docs)  # fmt: skip
    return Greeted(said)


class Recovery:
    """A supervisor that started without a journal."""

    def __init__(self, recover_from: int) -> None:
        self.job = core.begin("job", 2, "i2", 0.0, recover_from=recover_from)
        self.ever: list[str] = []

    def step(self, now: float, *events: Event) -> None:
        queue = list(events)
        while queue:
            self.job, effects = core.step(self.job, queue, now, covers)
            if self.job.committed and self.job.committed not in self.ever[-1:]:
                self.ever.append(self.job.committed)
            queue = [*map(answer_examine, effects.examine), *map(answer_match, effects.match)]

    def greeted(self, hellos: Sequence[Greeted]) -> States:
        """All greet; a minute later everybody who could be late is. Which state each publication has then."""
        for number, event in enumerate(hellos):
            assert self.job.recover_from, "it decides before all have said what they have"
            self.ever.clear()
            self.step(1.0 + number, event)
        assert not self.job.recover_from
        for second in range(10, 70):
            self.step(float(second), *(Beaten(event.hello.host) for event in hellos), Tick())
        return {key: one.doc.state for key, one in self.job.publications.items()}


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_what_was_abandoned_while_a_host_was_cut_off_stays_abandoned(order: tuple[int, int]) -> None:
    """Host a was cut off while version 5 moved. It was given up; 6 is committed, and 5 must never follow it."""
    hosts = [
        hello("a", {5: MOVING}, statement("d-0", "a")),
        hello("b", {5: ABANDONED, 6: COMMITTED}, statement("t-0", "b"), statement("e-0", "b")),
    ]
    recovery = Recovery(3)
    assert recovery.greeted([hosts[n] for n in order]) == {"p5.1": ABANDONED, "p6.1": COMMITTED}
    assert recovery.ever == ["p6.1"]


@pytest.mark.parametrize("order", list(permutations(range(2))))
@pytest.mark.parametrize("end", [RELEASED, ABANDONED])
def test_who_forgot_a_version_that_ended_long_ago_is_not_asked_about_it(
    order: tuple[int, int], end: PublicationState
) -> None:
    """Only so many are remembered; the last that was committed, or moved, always is."""
    hosts = [
        hello("a", {4: COMMITTED, 5: MOVING}, statement("d-0", "a")),
        hello("b", {6: end, 7: end}, statement("t-0", "b"), statement("e-0", "b")),
    ]
    recovery = Recovery(3)
    once_committed = RELEASED if end is RELEASED else COMMITTED
    found = recovery.greeted([hosts[n] for n in order])
    assert found == {"p4.1": once_committed, "p5.1": ABANDONED, "p6.1": end, "p7.1": end}
    assert recovery.ever == ([] if end is RELEASED else ["p4.1"])


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_furthest_that_anybody_knows_counts(order: tuple[int, int, int]) -> None:
    hosts = [
        hello("a", {5: MOVING}, statement("d-0", "a")),
        hello("b", {5: COMMITTED}, statement("t-0", "b")),
        hello("c", {5: RELEASED, 6: COMMITTED, 7: MOVING}, statement("e-0", "c")),
    ]
    recovery = Recovery(3)
    found = recovery.greeted([hosts[n] for n in order])
    assert (found["p5.1"], found["p6.1"]) == (RELEASED, COMMITTED)
    assert found["p7.1"] is MOVING  # no engine here can land it
    assert recovery.ever == ["p6.1"]


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_what_a_member_holds_by_a_verdict_was_committed(order: tuple[int, int]) -> None:
    """Its watchdog was replaced and knows nothing; the other was cut off while version 6 moved."""
    hosts = [
        hello("b", {}, statement("t-0", "b"), statement("e-0", "b", held=6)),
        hello("a", {5: COMMITTED, 6: MOVING}, statement("d-0", "a")),
    ]
    recovery = Recovery(3)
    assert recovery.greeted([hosts[n] for n in order]) == {"p5.1": RELEASED, "p6.1": COMMITTED}
    assert recovery.ever == ["p6.1"]


def test_what_nobody_knows_but_who_holds_it_is_not_followed_by_an_older_one() -> None:
    hosts = [
        hello("a", {4: COMMITTED, 5: MOVING}, statement("d-0", "a")),
        hello("b", {}, statement("t-0", "b"), statement("e-0", "b", held=6)),
    ]
    recovery = Recovery(3)
    assert recovery.greeted(hosts) == {"p4.1": RELEASED, "p5.1": ABANDONED}
    assert recovery.ever == []
    assert recovery.job.weight_version == 6


def test_the_dead_of_one_host_do_not_stand_for_the_living_of_another() -> None:
    """A person counts who lives; nothing is decided before host b has said what it knows."""
    said = hello("a", {5: COMMITTED}, statement("d-0", "a"), statement("e-0", "a"))
    recovery = Recovery(2)
    recovery.step(1.0, Greeted(said.hello.model_copy(update={"ended": (name("e-0"),)})))
    assert recovery.job.recover_from
    recovery.step(2.0, hello("b", {6: COMMITTED}, statement("t-0", "b")))
    assert not recovery.job.recover_from
    assert recovery.job.committed == "p6.1"


def test_a_commit_never_goes_back() -> None:
    """Whatever made two move at once: the older one is given up, and holds nothing up."""
    job = core.begin("job", 2, "i2", 0.0, recover_from=1)
    job, _ = core.step(job, [hello("b", {7: COMMITTED}, statement("t-0", "b"))], 1.0, covers)
    publications: dict[str, Publication] = {**job.publications, "p6.1": Publication(publication(6, MOVING), 1.0)}
    job, _ = core.step(replace(job, publications=publications), [Tick()], 40.0, covers)
    assert job.committed == "p7.1"
    assert job.publications["p6.1"].doc.state is ABANDONED
