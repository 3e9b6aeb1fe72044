"""One history: a job of a trainer gang and engines, its operators and its faults, all by one seed."""

from __future__ import annotations

from typing import Any

from elastic_reshard.protocol.deadlines import Deadlines, Policies
from elastic_reshard.protocol.messages import GroupSpec
from elastic_reshard.supervisor.events import SetPolicies
from tests.supervisor.sim import faults
from tests.supervisor.sim.checks import Broken, Checks, Over
from tests.supervisor.sim.clock import Clock, Proc
from tests.supervisor.sim.house import Watchdog
from tests.supervisor.sim.landings import Landings
from tests.supervisor.sim.members import Member, Round
from tests.supervisor.sim.memory import Arena, LandingArena, Memory
from tests.supervisor.sim.movers import Meeting, Mover
from tests.supervisor.sim.network import Network
from tests.supervisor.sim.shell import Disk, Supervisor

__all__ = ["Broken", "Gang", "World"]


class Gang:
    """The user's side of a group: it starts ranks, and gives a trainer's ranks the same rounds."""

    def __init__(self, world: World, name: str, size: int, roles: frozenset[Any], fragment: str) -> None:
        self.world, self.name, self.size, self.roles, self.fragment = world, name, size, roles, fragment
        self.ranks: list[Member] = []
        self.given: list[Member] = []
        self.step = 0
        self.labelled = world.clock.rng.random() < 0.6
        one = world.rng.choice(world.hosts)
        spread = world.rng.random() < 0.6
        self.lands = world.rng.choice(["dd", "d5"])
        self.hosts = [world.rng.choice(world.hosts) if spread else one for _ in range(size)]

    @property
    def source(self) -> bool:
        """Whether it publishes."""
        return "source" in self.roles

    @property
    def living(self) -> list[Member]:
        """Ranks whose processes are there."""
        return [m for m in self.ranks if m.alive]

    def start(self, rank: int) -> Member:
        """A fresh incarnation of a rank."""
        world = self.world
        name = f"{self.name}-{rank}@{len(world.members):016x}"
        member = Member(world, name, GroupSpec(name=self.name, size=self.size, rank=rank), self.roles,
                        self.hosts[rank])  # fmt: skip
        member.obedient = world.clock.rng.random() < 0.7
        if self.source:
            # Who joins others has their layout, which may not be the one that was wanted.
            self.fragment = next((m.fragment for m in self.living if m.fragment), self.fragment)
            member.core.source = member.fragment = self.fragment
        if "destination" in self.roles:
            member.core.destination = self.lands
        world.members[name] = member
        world.clock.note("start", name)
        member.attach()
        return member

    def complete(self) -> None:
        """Start the ranks that are not there."""
        there = {m.core.group.rank: m for m in self.living}
        if len(there) < self.size:
            kept = next((m.fragment for m in self.living if m.fragment), None)
            for member in self.living:
                member.todo.clear()  # they meet the newcomer before they go on
                if member.fragment != kept:
                    member.die("it heard too late of a layout that the others have")
            there = {m.core.group.rank: m for m in self.living}
        self.ranks = [there[r] if r in there else self.start(r) for r in range(self.size)]

    def restart(self) -> None:
        """All ranks anew, from an older checkpoint; what of the old ones is frozen stays so for a while."""
        for member in self.living:
            if not (member.frozen and self.world.clock.chance(0.3)):
                member.die("gang restart")
        self.step = max(0, self.step - self.world.clock.rng.randint(0, 3))
        self.ranks = [self.start(r) for r in range(self.size)]

    def ready(self) -> bool:
        """Whether the ranks meet in the gang's barrier: all idle, and those who are new have joined. What the others have heard
        of that is not asked."""
        new = [m for m in self.ranks if m not in self.given]
        return all(m.alive and m.idle for m in self.ranks) and all(m.core.admitted for m in new)

    def round(self) -> bool:
        """Give every rank the same to publish."""
        # Ranks that were given all the same may run ahead of each other.
        ahead = self.world.clock.chance(0.2) and self.given == self.ranks and all(len(m.todo) < 2 for m in self.ranks)
        if not ahead and not self.ready():
            return False
        self.given = list(self.ranks)
        self.labelled |= any(m.core.must_label for m in self.ranks)
        if self.world.clock.chance(0.05):
            self.fragment = f"{self.fragment[0]}{self.world.clock.rng.randint(0, 3)}"
        self.step += 1
        self.world.rounds += 1
        round_ = Round(self.world.rounds, f"step-{self.step}" if self.labelled else None, self.fragment)
        self.world.clock.note(self.name, "ROUND", round_)
        for member in self.ranks:
            member.todo.append(round_)
            member.after(0.05 * self.world.clock.rng.random(), member.advance)
        return True


class World:
    """Everything that is there. `run` plays the history of its seed; Broken is a broken promise.

    still: nothing goes wrong and nothing is late by chance. hosts: so many; by chance if 0."""

    def __init__(self, seed: int, still: bool = False, hosts: int = 0) -> None:
        self.clock = Clock(seed)
        self.clock.still = still
        rng = self.rng = self.clock.rng
        self.hosts = [f"h{n}" for n in range(hosts or rng.choice([1, 1, 2, 2, 3, 4]))]
        self.deadlines = Deadlines(orphan_hold=30.0 if len(self.hosts) == 1 else 10.0, forget=6.0)
        self.network = Network(self)
        self.policies = Policies(late_after=5.0, gather_window=1.0, install=6.0, min_groups=rng.choice([0, 1, 1, 1, 2]),
                                 max_lag=rng.choice([None, None, None, 0, 2]))  # fmt: skip
        self.checks = Checks(self)
        self.members: dict[str, Member] = {}
        self.arenas: dict[str, Arena] = {}
        self.landing_arenas: dict[str, LandingArena] = {}
        self.movers: dict[str, Mover] = {}
        self.meetings: dict[Any, Meeting] = {}
        self.landings = Landings(self)
        self.slow: dict[str, float] = {}  # groups whose movers carry, or plan, slowly
        self.dull: set[str] = set()
        self.closed: set[str] = set()  # groups whose members' windows are closed
        self.watchdogs: dict[str, Watchdog] = {}
        self.dogs = self.rounds = 0
        self.recover_from = 0  # while a journal is lost
        self.knowers: list[Watchdog] = []  # who alone know then what was
        self.ids = 0
        self.read: dict[str, int] = {}  # the last statement of each member that a watchdog took in
        self.supervisors: list[Supervisor] = []
        self.disk = Disk()
        self.start_supervisor()
        both = rng.random() < 0.15
        roles = frozenset({"source", "destination"} if both else {"source"})
        fragment = rng.choice(["a0", "a0", "b0"])
        self.trainer = Gang(self, "t", rng.choice([1, 2, 2, 3]), roles, fragment)
        engines = rng.choice([1, 1, 2]) if not both else rng.choice([0, 1])
        engine = frozenset({"destination"})
        self.engines = [Gang(self, f"e{i}", rng.choice([1, 2, 2]), engine, "") for i in range(engines)]
        self.gangs = [self.trainer, *self.engines]
        self.installers = [g for g in self.gangs if "destination" in g.roles]

    # -- parts

    def start_supervisor(self) -> Supervisor:
        """The next term."""
        recover_from = 0 if self.disk.written else self.recover_from
        supervisor = Supervisor(self, self.disk, recover_from)
        self.supervisors.append(supervisor)
        self.clock.note("start", supervisor.name, "term", supervisor.job.term, "recover_from", recover_from)
        return supervisor

    def new_id(self) -> str:
        """Of a mover."""
        self.ids += 1
        return f"{self.ids:032x}"

    def new_mover(self, host: str, member: str, mover: str) -> Mover:
        """Forked."""
        made = self.movers[mover] = Mover(self, host, member, mover, len(self.movers) + 1)
        self.clock.note("start", made.name)
        made.slowness = self.slow.get(member.partition("-")[0], 1.0)
        self.landings.forked(made)
        return made

    def quicken(self) -> None:
        """Nothing is slow any more."""
        self.slow.clear()
        for mover in self.movers.values():
            mover.slowness = 1.0

    def dial(self, host: str = "") -> Supervisor | None:
        """Who answers at the supervisor's address."""
        if host in self.network.control:
            return None
        living = [s for s in self.supervisors if s.alive]
        if len(living) > 1 and self.clock.chance(0.15):
            return living[-2]
        return living[-1] if living else None

    def start_watchdog(self, host: str) -> Watchdog:
        """Another watchdog."""
        dog = self.watchdogs[host] = Watchdog(self, host, self.dogs)
        self.dogs += 1
        self.clock.note("start", dog.name)
        return dog

    def watchdog(self, host: str) -> Watchdog:
        """The host's watchdog, started if there is none."""
        dog = self.watchdogs.get(host)
        if dog is None:
            return self.start_watchdog(host)
        return dog if dog.alive else dog.heir()

    def new_arena(self, member: Member) -> str:
        """Memory of this member, in its own hands."""
        name = f"{len(self.arenas) + len(self.landing_arenas) + 1:x}"
        self.arenas[name] = Arena(name, member.name)
        self.arenas[name].holders.add(member)
        return name

    def new_landing(self, member: Member, layout: str, own: tuple[int, ...]) -> str:
        """Memory for this member to land in."""
        name = f"{len(self.arenas) + len(self.landing_arenas) + 1:x}"
        self.landing_arenas[name] = LandingArena(name, member.name, layout, own)
        self.landing_arenas[name].holders.add(member)
        return name

    def memory(self, arena: str) -> Arena | LandingArena:
        """Of either kind."""
        return self.arenas[arena] if arena in self.arenas else self.landing_arenas[arena]

    def memories(self) -> list[Memory]:
        """All that there ever was."""
        return [*self.arenas.values(), *self.landing_arenas.values()]

    def may_be_heard(self, name: str) -> bool:
        """Whether something of a member may still be on its way to a supervisor."""
        member = self.members[name]
        dog = self.watchdogs.get(member.host)
        return member.alive or dog is None or name in dog.house.members or not dog.house.connected

    # -- faults

    def freeze(self, proc: Proc) -> None:
        """For a while; a watchdog that is silent for too long is replaced."""
        proc.freeze()
        rng = self.rng
        if isinstance(proc, Watchdog):
            for member in self.members.values():
                if member.alive and member.wire is not None and proc in member.wire.ends:
                    member.after(2.0 + 0.2 * rng.random(), self._suspect, member, proc)
        self.clock.after(rng.choice([0.2, 1.0, 3.0, 8.0]) * (0.5 + rng.random()), self._wake, proc)

    def _suspect(self, member: Member, dog: Watchdog) -> None:
        if dog.frozen or not dog.alive:
            member.suspect(dog)

    def _wake(self, proc: Proc) -> None:
        proc.wake()

    def lose_supervisor(self, supervisor: Supervisor, when: str) -> None:
        """SIGKILL, and somebody starts it again."""
        supervisor.die(when)
        self.clock.after(3 * self.rng.random(), self.revive)

    def revive(self) -> None:
        """Start a supervisor unless one is there."""
        if any(s.alive and not s.frozen for s in self.supervisors):
            return
        self.start_supervisor()

    def knowing(self, boss: Supervisor) -> list[Watchdog]:
        """The watchdogs that know all that the supervisor has told. Others were cut off, frozen or are new."""
        told = (boss.job.term, boss.job.revision)
        awake = (d for d in self.watchdogs.values() if d.alive and not d.frozen)
        return [d for d in awake if (d.house.view.term, d.house.view.revision) == told]

    @property
    def recovering(self) -> bool:
        """Whether only watchdogs know what was."""
        return self.recover_from > 0 and not self.disk.written

    def lose_journal(self, knowers: list[Watchdog]) -> None:
        """The supervisor and its disk are gone. A person starts another, and says how many members there are."""
        for one in self.supervisors:
            one.die("with its disk")
        self.disk = Disk()
        self.knowers = knowers
        self.recover_from = max(1, sum(m.alive for m in self.members.values()))
        self.clock.after(self.rng.random(), self.revive)

    def fault(self) -> None:
        """One fault or one act of an operator, by chance."""
        faults.happen(self)

    # -- time

    def run(self, seconds: float = 14.0) -> None:
        """The whole history: trouble, then calm, then what must have come about."""
        self.start()
        self.clock.after(0.5, self._train)
        troubles = self.rng.choice([1, 3, 5, 8])
        for _ in range(troubles):
            self.clock.at(0.5 + (seconds - 1) * self.rng.random(), self.fault)
        try:
            self._until(seconds)
            self.settle()
        except Over as over:
            self.clock.note(over)

    def start(self) -> None:
        """All ranks come, and engines install what there is."""
        for gang in self.gangs:
            for rank in range(gang.size):
                self.clock.after(0.3 * self.rng.random(), self._begin, gang, rank)
        for gang in self.installers:
            self.clock.after(1.0, self.serve, gang)

    def settle(self) -> None:
        """Calm: whoever is left gets well, and what was promised must come about."""
        self.clock.calm = True
        self.clock.note("CALM")
        self.network.heal()
        for proc in [*self.members.values(), *self.watchdogs.values(), *self.movers.values(), *self.supervisors]:
            proc.wake()
        self.quicken()
        for old in self.supervisors[:-1]:
            old.die("an older one")
        if not self.supervisors[-1].alive:
            self.start_supervisor()
        self.policies = Policies(
            min_groups=min(1, len(self.installers)), late_after=2.0, gather_window=1.0, install=6.0
        )
        self.supervisors[-1].submit(SetPolicies(self.policies))
        known = {m for g in self.gangs for m in g.ranks}
        for member in self.members.values():
            if member not in known:
                member.die("of an older gang")
        self._until(self.clock.now + 4.0)
        if self.supervisors[-1].job.recover_from:
            # The person who waits for members that are gone says how many there are.
            self.recover_from = max(1, sum(m.alive for m in self.members.values()))
            self.supervisors[-1].die("to be started anew")
            self.start_supervisor()
        self._until(self.clock.now + 8.0)
        trains = self.rng.random() < 0.7
        final, until = 0, self.clock.now + 60.0
        why = "it has not begun"
        while why and self.clock.now < until:
            for gang in self.gangs:
                if trains or gang is not self.trainer or "destination" in gang.roles:
                    gang.complete()
            if self.checks.voided:
                self.checks.voided, final = False, 0
            if trains and not final and self.trainer.round():
                final = self.rounds
            self._until(self.clock.now + 0.5)
            why = self.checks.settled(final)
        self.checks.must(not why, f"it did not get well: {why}")
        self.installers = []
        for member in self.members.values():
            member.todo.clear()
        self._until(self.clock.now + 14.0)
        self.checks.at_rest()

    def _begin(self, gang: Gang, rank: int) -> None:
        if not any(m.core.group.rank == rank for m in gang.ranks):
            gang.ranks.append(gang.start(rank))
            gang.ranks.sort(key=lambda m: m.core.group.rank)

    def _train(self) -> None:
        if len(self.trainer.ranks) == self.trainer.size:
            self.trainer.round()
        if not self.clock.calm:
            self.clock.after(self.rng.choice([0.3, 1.0, 2.0]) * (0.5 + self.rng.random()), self._train)

    def serve(self, gang: Gang) -> None:
        """Its ranks install whenever there is something, for ever."""
        for member in gang.living if gang in self.installers else ():
            news = member.core.installable() is not None or self.rng.random() < 0.1
            if news and self.rng.random() < 0.95:
                patience = self.rng.choice([0.3, 2.0, 4.0]) if not self.clock.calm else 6.0
                member.after(0.05 * self.rng.random(), member.install, patience)
        self.clock.after(0.4 + 0.4 * self.rng.random(), self.serve, gang)

    def _until(self, when: float) -> None:
        while self.clock.now < when and self.clock.next_event():
            self.checks.each()
