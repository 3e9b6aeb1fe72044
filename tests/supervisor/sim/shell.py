"""The supervisor's shell, emulated: a journal that outlives it, feeds to hosts, crashes between any two of its acts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic_reshard.protocol.messages import Beat, Ended, Hello, LedgerSaid, MoverSaid, Stated
from elastic_reshard.protocol.view import Farewell, Heard, Told
from elastic_reshard.supervisor import core
from elastic_reshard.supervisor.events import (
    Beaten,
    Cut,
    Effects,
    Event,
    Examine,
    Examined,
    Greeted,
    Ledgered,
    Match,
    Matched,
    MemberEnded,
    Moved,
    Spoken,
    Tick,
)
from tests.supervisor.sim.clock import Link, Proc

if TYPE_CHECKING:
    from tests.supervisor.sim.world import World

__all__ = ["TICK", "Disk", "Supervisor", "answer_examine", "answer_match", "covers", "read_back"]

TICK = 0.5


class Disk:
    """A journal: what was written lasts, and only the last who took a term may write."""

    def __init__(self) -> None:
        self.term, self.weight_version, self.epoch, self.committed = 0, 0, 0, ""
        self.docs: tuple[dict[str, Any], ...] = ({}, {}, {}, {})
        self.written = False

    def write(self, term: int, told: list[Told], weight_version: int) -> bool:
        """All of it, unless another has taken a term."""
        if term != self.term:
            return False
        for one in told:
            for kept, changes in zip(
                self.docs, (one.members, one.groups, one.publications, one.transfers), strict=True
            ):
                for key, doc in changes.items():  # type: ignore[attr-defined]
                    kept.pop(key, None) if doc is None else kept.__setitem__(key, doc)
            self.epoch, self.committed = one.membership_epoch, one.committed
        self.weight_version, self.written = weight_version, True
        return True

    def read(self) -> Told:
        """Everything."""
        members, groups, publications, transfers = (dict(d) for d in self.docs)
        return Told(
            term=self.term, instance="", base=0, revision=1, membership_epoch=self.epoch, committed=self.committed,
            members=members, groups=groups, publications=publications, transfers=transfers,
        )  # fmt: skip


def read_back(told: Told) -> None:
    """What is told travels and is journaled as JSON: it must be readable, and say the same."""
    assert Told.model_validate_json(told.model_dump_json()) == told


def answer_examine(asked: Examine) -> Examined:
    """Layouts by the fragments' first letter: "a" sharded, "b" replicated sources; a group must agree in all of it."""
    sides = []
    for side in (0, 1):
        said = {pair[side] for pair in asked.fragments}
        if len(said) > 1:
            return Examined(asked.group, asked.fragments, None, None, f"fragments differ: {sorted(map(str, said))}")
        one = said.pop()
        sides.append(None if one is None else f"{'SD'[side]}{one}x{len(asked.fragments)}")
    return Examined(asked.group, asked.fragments, sides[0], sides[1])


def answer_match(asked: Match) -> Matched:
    """A destination fragment that begins with "f" fits nothing."""
    fault = "x.weight: shape: (1,) is not (2,)" if asked.destination_layout.startswith("Df") else ""
    return Matched(asked.source_layout, asked.destination_layout, fault)


def covers(layout: str, ranks: frozenset[int]) -> bool:
    """Whether these source ranks hold everything."""
    return bool(ranks) if layout.startswith("Sb") else len(ranks) == int(layout.partition("x")[2])


class Supervisor(Proc):
    """One start of a supervisor."""

    def __init__(self, world: World, disk: Disk, recover_from: int = 0) -> None:
        self.world, self.disk = world, disk
        disk.term += 1
        self.instance = f"i{len(world.supervisors)}"
        super().__init__(world.clock, f"supervisor#{self.instance}")
        now = self.clock.now
        self.job = core.begin(
            "job",
            disk.term,
            self.instance,
            now,
            deadlines=world.deadlines,
            policies=world.policies,
            recover_from=recover_from,
        )
        if disk.written:
            self.job = core.restore(self.job, disk.read(), disk.weight_version, now)
        self.recovered = recover_from > 0
        self.feeds: dict[str, Link] = {}
        self._hosts: dict[Link, Hello] = {}
        self._inbox: list[Event] = []
        self._unwritten: list[Told] = []
        self._scheduled = False
        world.checks.began(self)
        self.after(TICK, self._tick)

    def _tick(self) -> None:
        self.submit(Tick())
        self.after(TICK, self._tick)

    # -- what reaches it

    def received(self, link: Link, said: Any) -> None:
        hello = self._hosts.get(link)
        if said is None:
            if hello is not None and self.feeds.get(hello.host) is link:
                del self.feeds[hello.host]
                self.submit(Cut(hello.host))
        elif isinstance(said, Hello):
            self._greet(link, said)
        elif hello is None or self.feeds.get(hello.host) is not link:
            return  # late, of a connection that another has replaced
        elif isinstance(said, Stated):
            self.submit(Spoken(hello.host, said.statement))
        elif isinstance(said, Ended):
            self.submit(MemberEnded(hello.host, said.member, said.arenas_kept, said.how))
        elif isinstance(said, MoverSaid):
            self.submit(Moved(hello.host, said))
        elif isinstance(said, LedgerSaid):
            self.submit(Ledgered(hello.host, said))
        elif isinstance(said, Beat):
            self.submit(Beaten(hello.host))

    def _greet(self, link: Link, hello: Hello) -> None:
        term, instance = hello.obeyed
        job = self.job
        if job.recover_from and term >= job.term and instance != job.instance:
            if self.disk.term != job.term:
                self.die("fenced by its journal")
                return
            self.disk.term = term + 1
            self.job = replace(job, term=self.disk.term)
            self.world.checks.outbid(self.job)
            for host in self.feeds:
                self._snapshot(host)
        elif term > job.term:
            self.die("fenced by a host")
            return
        elif term == job.term and instance not in ("", job.instance):
            link.close(self)
            return
        old = self.feeds.get(hello.host)
        if old is not None and old is not link:
            old.send(self, Farewell(term=self.job.term, instance=self.instance, reason="another connection"))
            old.close(self)
        self.feeds[hello.host] = link
        self._hosts[link] = hello
        self.submit(Greeted(hello))

    def submit(self, event: Event) -> None:
        """Step it soon, with all that comes meanwhile."""
        self._inbox.append(event)
        if not self._scheduled:
            self._scheduled = True
            self.after(0.002 * self.clock.rng.random(), self._step)

    # -- one step

    def _step(self) -> None:
        self._scheduled = False
        events, self._inbox = self._inbox, []
        before = self.job
        job, effects = core.step(before, events, self.clock.now, covers)
        for happened in effects.happened:
            self.clock.note(f"  [{job.term}]", happened.event, dict(happened.fields))
        if effects.told is not None:
            read_back(effects.told)
            self._unwritten.append(effects.told)
        now = before.recover_from > 0 and not job.recover_from
        if self._unwritten and not job.recover_from and (effects.durable or now):
            if self._may_crash("before it wrote"):
                return
            if not self.disk.write(job.term, self._unwritten, job.weight_version):
                self.die("fenced by its journal")
                return
            self._unwritten = []
            if self._may_crash("after it wrote"):
                return
        self.job = job
        self.world.checks.stepped(self, before, job, effects)
        for question in (*effects.examine, *effects.match):
            self.after(0.2 * self.clock.rng.random() ** 3, self._answer, question)
        if effects.durable and self.clock.chance(0.01):
            self.world.freeze(self)
        self._hang_up_on_silent(effects)
        self.post(self._tell, job, effects)

    def _hang_up_on_silent(self, effects: Effects) -> None:
        """A host that was given up and is still connected must say Hello again."""
        for host in effects.silent:
            link = self.feeds.pop(host, None)
            if link is not None:
                link.close(self)

    def _may_crash(self, when: str) -> bool:
        if not self.clock.chance(0.015):
            return False
        self.world.lose_supervisor(self, when)
        return True

    def _answer(self, question: Examine | Match) -> None:
        self.submit(answer_examine(question) if isinstance(question, Examine) else answer_match(question))

    def _tell(self, job: core.Job, effects: Effects) -> None:
        for host in effects.snapshots:
            self._snapshot(host)
        for host, link in self.feeds.items():
            lost = self.clock.chance(0.003)  # only a snapshot helps then
            if effects.told is not None and host not in effects.snapshots and not lost:
                link.send(self, effects.told)
        for host, numbers in effects.heard.items():
            if host in self.feeds:
                said = Heard(term=job.term, instance=self.instance, revision=job.revision, numbers=dict(numbers))
                self.feeds[host].send(self, said)

    def _snapshot(self, host: str) -> None:
        if host in self.feeds:
            self.feeds[host].send(self, core.snapshot(self.job))
