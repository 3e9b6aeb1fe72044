"""Histories with one thing that goes wrong at a chosen moment, and nothing else: what it costs can be counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.protocol.docs import GroupState, PublicationDoc, PublicationState, TransferState
from tests.supervisor.sim.movers import Mover
from tests.supervisor.sim.world import Gang, World

__all__ = ["Scene"]


class Scene:
    """Two trainers and some engines, each group on hosts of its own unless `at` says otherwise; everything is prompt."""

    def __init__(
        self, seed: int, sharded: bool = True, engines: Sequence[int] = (2, 2), late_after: float = 60.0
    ) -> None:
        self.world = world = World(seed, still=True, hosts=2 + len(engines))
        world.policies = Policies(late_after=late_after, gather_window=1.0, install=6.0, min_groups=1)
        world.supervisors[0].job = _with(world.supervisors[0].job, world.policies)
        world.trainer = self.gang("t", 2, "source", ["h0", "h1"], "a0" if sharded else "b0")
        world.engines = [self.gang(f"e{i}", n, "destination", [f"h{2 + i}"] * n) for i, n in enumerate(engines)]
        world.gangs = [world.trainer, *world.engines]
        world.installers = list(world.engines)
        world.start()
        self.until(lambda: world.trainer.ranks and world.trainer.ready() and self.groups_whole(), 10.0)

    def gang(self, name: str, size: int, role: Any, hosts: list[str], fragment: str = "") -> Gang:
        """A group on these hosts."""
        gang = Gang(self.world, name, size, frozenset({role}), fragment)
        gang.hosts = hosts
        return gang

    def join(self, name: str, like: Gang, host: str) -> Gang:
        """One more engine comes, of the same layout as another."""
        gang = self.gang(name, like.size, "destination", [host] * like.size)
        gang.lands = like.lands
        self.world.gangs.append(gang)
        self.world.installers.append(gang)
        gang.complete()
        self.world.serve(gang)
        return gang

    def groups_whole(self) -> bool:
        """Whether every group is admitted and has memory to land in."""
        job = self.world.supervisors[-1].job
        members = [m for g in self.world.installers for m in g.ranks]
        return len(job.groups) == len(self.world.gangs) and all(g.doc.whole for g in job.groups.values()) and all(
            m.core.landing is not None for m in members
        )  # fmt: skip

    def until(self, condition: Callable[[], Any], within: float) -> float:
        """Let things happen until the condition holds; how long that took. AssertionError after `within` virtual seconds."""
        world, since = self.world, self.world.clock.now
        while not condition():
            last = "\n".join(list(world.clock.log)[-40:])
            assert world.clock.now - since < within, f"not within {within} s\n{last}"
            world.clock.next_event()
            world.checks.each()
        return world.clock.now - since

    def publish(self) -> PublicationDoc:
        """A round, until it moves."""
        before = self.world.supervisors[-1].job.weight_version
        self.until(self.world.trainer.round, 10.0)
        self.until(lambda: self.world.supervisors[-1].job.weight_version > before, 10.0)
        return max((p.doc for p in self.job.publications.values()), key=lambda d: d.weight_version)

    @property
    def job(self) -> Any:
        """The supervisor's state."""
        return self.world.supervisors[-1].job

    def state(self, publication: PublicationDoc) -> PublicationState:
        """Now."""
        found: PublicationState = self.job.publications[publication.id].doc.state
        return found

    def current(self, publication: PublicationDoc, groups: Sequence[str] | None = None) -> bool:
        """Whether these groups (or all) serve it."""
        names = groups if groups is not None else [g.name for g in self.world.installers]
        docs = [self.job.groups[n].doc for n in names if n in self.job.groups]
        return len(docs) == len(names) and all(
            d.state is GroupState.CURRENT and d.serving_publication == publication.id for d in docs
        )

    def in_the_middle(self) -> None:
        """Until a transfer runs and some of it has landed."""

        def some() -> bool:
            transfer = next(iter(self.job.transfers.values()), None)
            return (
                transfer is not None
                and transfer.doc.state is TransferState.RUNNING
                and any(m.work and m.work.cells for m in self.movers())
            )

        self.until(some, 10.0)

    def movers(self, group: str = "") -> list[Mover]:
        """Those alive, of a group or of all."""
        return [m for m in self.world.movers.values() if m.alive and m.member.startswith(group)]

    def formed(self, publication: PublicationDoc) -> int:
        """How many transfers there were for it."""
        return self.world.landings.formed.get(publication.id, 0)

    def most_arrivals(self) -> int:
        """How often a cell came into a domain, at most."""
        return max(self.world.landings.arrivals.values(), default=0)


def _with(job: Any, policies: Policies) -> Any:
    from dataclasses import replace

    return replace(job, policies=policies)
