"""Movers: the real `mover.core.Core` over a stand-in for its work, with a data plane that breaks as gloo's does.

A peer that is dead either shows at once or never (FACTS.md); one that is frozen or cut off never does. Everything is carried
in rounds; a cell's bytes are read from the sender's memory when they travel, so old or foreign bytes show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elastic_reshard.mover.core import Abort, Action, Begin, Core, Feed, Finish, Hold, Progress, Task, Until
from elastic_reshard.mover.status import Glance
from elastic_reshard.protocol.docs import PublicationDoc, SourceDoc, TransferDoc
from tests.supervisor.sim.clock import Link, Proc
from tests.supervisor.sim.memory import LandingArena
from tests.supervisor.sim.plans import Rounds, Ship, planned

if TYPE_CHECKING:
    from tests.supervisor.sim.world import World

__all__ = ["Mover"]

BEAT = 0.125


@dataclass(eq=False)
class Work:
    """One transfer as the mover carries it out."""

    doc: TransferDoc
    publication: PublicationDoc
    progress: Progress
    rounds: Rounds = ()
    values: Any = None
    meeting: Meeting | None = None
    began: int = 0
    cells: int = 0
    pending: set[Ship] = field(default_factory=set)
    running: bool = False
    shut: bool = False  # it waits for its member's window
    aborted: bool = False
    closed: bool = False
    end: int | None = None

    @property
    def out(self) -> bool:
        """Whether it has returned from every operation."""
        return self.progress.state == "out"


class Meeting:
    """A communicator: those who were told the same values."""

    def __init__(self, world: World, present: tuple[str, ...]) -> None:
        self.world, self.present = world, present
        self.there: dict[str, tuple[Mover, Work]] = {}
        self._formed = False
        self._flying: set[Ship] = set()
        self._decided: set[tuple[str, str]] = set()

    def join(self, mover: Mover, work: Work) -> None:
        """A mover tries to meet the others."""
        self.there[mover.member] = (mover, work)
        self.kick()

    def gone(self, member: str) -> bool:
        """Whether a peer's connections are closed."""
        if member not in self.there:
            return False
        mover, work = self.there[member]
        return not mover.alive or (work.out and work.progress.outcome == "failed")

    def _talk(self, a: Mover, b: Mover) -> bool:
        return a.awake and b.awake and self.world.network.data(a.host, b.host)

    def kick(self) -> None:
        """Something has changed: see what can go on."""
        if not self._formed:
            self._form()
        for mover, work in list(self.there.values()):
            if mover.alive and not work.out and (work.pending or not self._formed):
                self._look(mover, work)

    def _form(self) -> None:
        movers = [m for m, _ in self.there.values()]
        pairs = all(self._talk(a, b) for a in movers for b in movers if a is not b)
        if set(self.there) == set(self.present) and pairs and not any(map(self.gone, self.present)):
            self._formed = True
            for mover, work in self.there.values():
                mover.after(0.005 + 0.02 * self.world.rng.random(), mover.formed, work)

    def _look(self, mover: Mover, work: Work) -> None:
        peers = {s.other(mover.member) for s in work.pending} if self._formed else set(self.there) - {mover.member}
        for peer in sorted(peers):
            if self.gone(peer) and (mover.member, peer) not in self._decided:
                self._decided.add((mover.member, peer))
                if self.world.rng.random() < 0.5:  # else nothing is ever seen of it
                    mover.after(0.015 + 0.045 * self.world.rng.random(), mover.broke, work, "Connection closed by peer")
        for ship in sorted(work.pending):
            if ship.receiver != mover.member or ship in self._flying:
                continue
            sender, theirs = self.there[ship.sender]
            if theirs.began > ship.round and not theirs.out and self._talk(sender, mover):
                self._flying.add(ship)
                took = (0.01 + 0.05 * self.world.rng.random()) * max(mover.slowness, sender.slowness)
                self.world.clock.after(took, self._arrive, ship)

    def _arrive(self, ship: Ship) -> None:
        self._flying.discard(ship)
        (sender, theirs), (receiver, ours) = self.there[ship.sender], self.there[ship.receiver]
        if theirs.out or ours.out or ship not in ours.pending or not self._talk(sender, receiver):
            return
        value = sender.bytes_of(theirs, ship)
        if value is None:
            sender.broke(theirs, "its source slot was written again")
            return
        receiver.land(ours, ship, value)

    def over(self, ship: Ship) -> None:
        """A cell has landed."""
        for member in (ship.sender, ship.receiver):
            mover, work = self.there[member]
            work.pending.discard(ship)
            if not work.pending and work.running and not work.out:
                mover.after(0.001, mover.go_on, work)


class Mover(Proc):
    """One mover process of a member."""

    def __init__(self, world: World, host: str, member: str, mover: str, pid: int) -> None:
        super().__init__(world.clock, f"mover#{pid} of {member}")
        self.world, self.host, self.member, self.mover, self.pid = world, host, member, mover, pid
        self.core = Core(member, mover)
        self.work: Work | None = None
        self.wire: Link | None = None
        self.on_death: list[Callable[[], None]] = []
        self.slowness = 1.0
        self.froze: float | None = None
        self.hangs = False
        self._alone = 0.0  # how long it has had no watchdog
        self.after(0.01, self._attach)

    # -- life

    @property
    def awake(self) -> bool:
        """Runs."""
        return self.alive and not self.frozen

    def freeze(self) -> None:
        if self.awake:
            self.froze = self.clock.now
        super().freeze()

    def wake(self) -> None:
        if self.hangs:
            self.come_back()
            return
        super().wake()
        self.froze = None
        self._kick()

    def hang(self) -> None:
        """In the kernel: what is sent to kill it changes nothing before it is back."""
        self.hangs = True
        self.freeze()

    def come_back(self) -> None:
        """From the kernel. What was under way there is done, and a little more than that, before it dies of the kill."""
        self.hangs = False
        self.wake()
        self.after(0.5, self.die, "killed long ago")

    def die(self, how: str = "killed") -> None:
        if self.alive and not self.hangs:
            super().die(how)
            for tell in self.on_death:
                tell()
            self._kick()

    def _kick(self) -> None:
        if self.work is not None and self.work.meeting is not None:
            self.work.meeting.kick()

    # -- its watchdog

    def _attach(self) -> None:
        dog = self.world.watchdogs.get(self.host)
        if self.wire is not None:
            return
        if dog is None or not dog.alive:
            self._alone += 0.2
            if self._alone >= self.world.deadlines.orphan_hold:
                self.die("no watchdog")
            self.after(0.2, self._attach)
            return
        self.wire = Link(self.clock, self, dog, local=True)
        self.wire.send(self, ("mover", self, self.core.transfer))
        self.core.unsaid = self.core.progress is not None
        self._report()

    def received(self, link: Link, said: Any) -> None:
        if link is not self.wire:
            return
        self._alone = 0.0
        if said is None:
            self.wire = None
            self.after(0.1, self._attach)
        elif said[0] == "refuse":
            self.die(f"refused: {said[1]}")
        elif said[0] == "task":
            self._do(self.core.tasked(Task(transfer=said[1], publication=said[2], layouts={}, arenas=())))
        else:
            self._do(self.core.ordered(said[1]))
        self._report()

    def _report(self) -> None:
        said = self.core.said
        if self.core.unsaid and self.wire is not None and said is not None:
            self.core.unsaid = False
            self.wire.send(self, ("report", said))

    def glance(self) -> Glance:
        """What its page shows; a dead one's is as it was."""
        work = self.work
        beats = int((self.clock.now if self.froze is None else self.froze) / BEAT)
        if work is None:
            return Glance(beats, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        peer = cell = 0
        if work.shut:
            peer = cell = work.doc.members.index(self.member) + 1
        elif work.pending and self.slowness == 1.0:
            ship = min(work.pending)
            peer, cell = work.doc.members.index(ship.other(self.member)) + 1, ship.cell + 1
        return Glance(beats, 3, peer, cell, 0, work.cells, work.began, 0, work.cells, 0)

    # -- its work

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Begin(task):
                    self._begin(task.transfer, task.publication)
                case Feed(values):
                    self._feed(values)
                case Hold():
                    self._hold()
                case Until(number):
                    self._until(number)
                case Abort():
                    self._abort()
                case Finish():
                    self.world.landings.finished(self)
                    self.work = None

    def _say(self, work: Work, **changes: Any) -> None:
        if work is not self.work or work.out:
            return
        work.progress = replace(work.progress, began=work.began, cells=work.cells, received=work.cells, **changes)
        self._do(self.core.progressed(work.progress))
        self._report()

    def _begin(self, doc: TransferDoc, publication: PublicationDoc) -> None:
        work = self.work = Work(doc, publication, Progress(doc.id, "starting"))
        self.world.landings.began(self, doc)
        slow = 0.3 if self.clock.still else self.world.rng.choice([0.05, 0.05, 0.3, 2.0])
        if self.member.partition("-")[0] in self.world.dull:
            slow = 1000.0
        self.after(slow * self.world.rng.random() * min(10.0, self.slowness), self._plan, work)

    def _plan(self, work: Work) -> None:
        if work.out or work is not self.work:
            return
        if work.aborted:
            self._out(work, "stopped")
            return
        work.rounds, lost = planned(work.doc, work.publication)
        slot = self._slot(work)
        if slot is not None:
            self.world.landings.reset(self, *slot, work.publication.id)
            slot[0].begin(slot[1], work.publication.id)
        if lost:
            self._out(work, "refused", error="ShardLost", reason=f"cells {lost} are with nobody")
        else:
            self._say(work, state="ready", values={"at": f"{self.pid:x}"}, config="gloo")

    def _slot(self, work: Work) -> tuple[LandingArena, int] | None:
        """Where it lands."""
        part = next((p for p in work.doc.landings if p.member == self.member), None)
        return (self.world.landing_arenas[part.arena], part.slot) if part is not None else None

    def _out(self, work: Work, outcome: str, **more: Any) -> None:
        self._say(work, state="out", outcome=outcome, **more)
        if work.meeting is not None:
            work.meeting.kick()

    def _feed(self, values: Any) -> None:
        work = self.work
        if work is None or work.meeting is not None or work.aborted or work.out:
            return
        key = (work.doc.id, tuple(sorted((m, v["at"]) for m, v in values.items())))
        work.meeting = self.world.meetings.setdefault(key, Meeting(self.world, work.doc.present))
        self.world.landings.forms(self, work.doc)
        work.meeting.join(self, work)

    def formed(self, work: Work) -> None:
        """The communicator is there."""
        if work is self.work and not work.out and not work.aborted:
            work.running = True
            self._say(work, state="running")
            self.go_on(work)

    def go_on(self, work: Work) -> None:
        """The next round, if there is one that may begin."""
        if work is not self.work or work.out or not work.running or work.pending:
            return
        number = work.began
        if number >= len(work.rounds):
            self._out(work, "done")
        elif work.end is not None and number >= work.end:
            self._out(work, "stopped")
        elif not work.closed or work.end is not None:
            was, work.shut = work.shut, self.member.partition("-")[0] in self.world.closed
            if work.shut:
                if not was:
                    self._knock(work)
                return
            work.began += 1
            work.pending = {s for s in work.rounds[number] if self.member in (s.sender, s.receiver)}
            if not work.pending:
                self.after(0.001, self.go_on, work)
            elif work.meeting is not None:
                work.meeting.kick()

    def _knock(self, work: Work) -> None:
        """Look at the window again and again."""
        if work is self.work and not work.out and work.shut:
            self.go_on(work)
            self.after(0.005, self._knock, work)

    def _hold(self) -> None:
        if self.work is not None and not self.work.out:
            self.work.closed = True
            self._say(self.work, held=True)

    def _until(self, number: int) -> None:
        work = self.work
        if work is not None:
            self.world.checks.must(
                number + 1 >= work.began, f"{self.name} is to end after {number}, began {work.began}"
            )
            work.end = number + 1
            self.go_on(work)

    def _abort(self) -> None:
        work = self.work
        if work is None or work.out:
            return
        work.aborted = True
        if work.meeting is None:
            if work.progress.state == "ready":
                self._out(work, "stopped")
        elif work.shut:
            self._out(work, "stopped")
        elif self.world.rng.random() < 0.6:  # else a blocked operation stays blocked
            self.after(0.1 * self.world.rng.random(), self._out, work, "failed")

    def broke(self, work: Work, why: str) -> None:
        """An operation failed."""
        if work is self.work and not work.out:
            self._out(work, "failed", error="TransferError", reason=why)

    # -- bytes

    def bytes_of(self, work: Work, ship: Ship) -> Any:
        """What it sends now; None if its slot is not what it was."""
        sources = [s for s in work.publication.sources if s.member == self.member]
        found = next((self._read(s, ship.cell) for s in sources if ship.cell in self._has(s, work)), None)
        if found is not None:
            return found[0]
        slot = self._slot(work)
        if (
            slot is None
            or slot[0].publications[slot[1]] != work.publication.id
            or ship.cell not in slot[0].held[slot[1]]
        ):
            return None
        return slot[0].cells[slot[1]][ship.cell]

    @staticmethod
    def _has(source: SourceDoc, work: Work) -> tuple[int, ...]:
        from tests.supervisor.sim.memory import cells_of

        return cells_of(work.publication.layout, source.rank)

    def _read(self, source: SourceDoc, cell: int) -> tuple[Any] | None:
        arena = self.world.arenas[source.arena]
        if arena.generations[source.slot] != source.generation:
            return None
        return (arena.cells[source.slot].get(cell),)

    def land(self, work: Work, ship: Ship, value: Any) -> None:
        """Bytes have come: they are written, then the ledger's bit is set. Whatever runs and has the slot mapped can do it."""
        slot = self._slot(work)
        if slot is None:
            self.world.checks.fail(f"{self.name} lands cell {ship.cell} nowhere")
            return
        arena, at = slot
        arena.cells[at][ship.cell] = value
        self.world.landings.wrote(self, arena, at, ship.cell)
        self.after(0.001, self._mark, work, ship, arena, at)

    def _mark(self, work: Work, ship: Ship, arena: LandingArena, at: int) -> None:
        arena.held[at].add(ship.cell)
        work.cells += 1
        self.world.landings.marked(self, work.doc, arena, at, ship.cell)
        if work.meeting is not None:
            work.meeting.over(ship)
