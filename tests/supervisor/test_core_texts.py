"""What is told in the worst case can be read by all: documents are copied without being checked, and readers check them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_reshard.protocol.base import fitting
from elastic_reshard.protocol.docs import MemberDoc, PublicationState
from elastic_reshard.protocol.messages import Fill, GroupSpec, Hello, Reach, Statement
from elastic_reshard.supervisor import core
from elastic_reshard.supervisor.events import Event, Greeted, MemberEnded, Spoken
from tests.supervisor.sim.shell import answer_examine, answer_match, read_back

RANKS = 128


def replicas(number: int, count_from: int = 0, **said: object) -> Iterator[Spoken]:
    """Statements of a group each of whose ranks has all."""
    for rank in range(RANKS):
        named = {"member": name(rank), "group": GroupSpec(name="trainer", size=RANKS, rank=rank), "host": "h"}
        told = {"roles": {"source"}, "pid": 1, "number": number, "source": "b0", "count_from": count_from}
        yield Spoken("h", Statement(**(named | told | said)))  # type: ignore[arg-type]


def name(rank: int) -> str:
    return f"trainer-of-the-large-model-{rank}@{rank:016x}"


class Told:
    """A supervisor whose every word is read back."""

    def __init__(self) -> None:
        self.job = core.begin("job", 1, "i", 0.0)
        self.now = 0.0

    def step(self, *events: Event) -> None:
        queue = list(events)
        while queue:
            self.now += 0.01
            self.job, effects = core.step(self.job, queue, self.now, lambda layout, ranks: bool(ranks))
            if effects.told is not None:
                read_back(effects.told)
            queue = [*map(answer_examine, effects.examine), *map(answer_match, effects.match)]
        read_back(core.snapshot(self.job))


def test_many_that_are_lost_one_after_the_other_leave_words_that_can_be_read() -> None:
    """128 replicas of one version: nobody has it any more when the last is lost, and all are to be named."""
    supervisor = Told()
    supervisor.step(Greeted(Hello(job="job", host="h", machine="m", watchdog="a")))
    supervisor.step(*replicas(1))
    count = supervisor.job.groups["trainer"].doc.count_from
    supervisor.step(*replicas(2, count))
    fill = Fill(arena="a", slot=0, generation=2, seq=count + 1, fragment="b0")
    supervisor.step(*replicas(3, count, fills=(fill,)))
    (publication,) = supervisor.job.publications.values()
    assert publication.doc.state is PublicationState.MOVING

    for rank in range(RANKS):
        ended = MemberEnded("h", name(rank), arenas_kept=False, how="killed" * 680)
        supervisor.step(ended)
    (publication,) = supervisor.job.publications.values()
    assert publication.doc.state is PublicationState.ABANDONED
    assert publication.doc.reason.startswith(f"the memory of {name(0)}, {name(1)}, ")
    assert publication.doc.reason.endswith(f"{name(7)} and 120 more is gone")


def test_a_fabric_of_a_long_name_is_shown_cut() -> None:
    supervisor = Told()
    supervisor.step(Greeted(Hello(job="job", host="h", machine="m", watchdog="a")))
    reach = Reach(device="0", cluster="c" * 4096, clique=1)
    supervisor.step(*list(replicas(1, reach=reach))[:1])
    assert supervisor.job.members[name(0)].doc.fabric == fitting("c" * 4096 + "/1")


@pytest.mark.parametrize(("length", "kept"), [(4096, 4096), (4097, 4092), (10_000, 4092)])
def test_a_text_is_cut_where_readers_would_refuse_it(length: int, kept: int) -> None:
    text = fitting("x" * length)
    assert text == "x" * kept + ("" if kept == length else " ...")
    MemberDoc(id="a", group="g", rank=0, roles=frozenset({"source"}), host="h", state="lost", reason=text)  # type: ignore[arg-type]
