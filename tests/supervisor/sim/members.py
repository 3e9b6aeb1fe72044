"""Members: the real `MemberCore` under a user that publishes and installs, with memory in which mixed versions show."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic_reshard.member.core import MemberCore, SlotState
from elastic_reshard.protocol.docs import PublicationDoc
from elastic_reshard.protocol.messages import Fill, GroupSpec, Landing
from elastic_reshard.protocol.view import Farewell, Heard, Told
from tests.supervisor.sim.clock import Link, Proc
from tests.supervisor.sim.house import Watchdog
from tests.supervisor.sim.memory import CELLS, PIECES, cells_of

if TYPE_CHECKING:
    from tests.supervisor.sim.world import World

__all__ = ["Member", "Round"]

SLACK = 1.3  # seconds: a call may overrun its deadline by the piece it is copying


@dataclass(frozen=True)
class Round:
    """What a gang publishes once, all ranks the same; `uid` is in every tensor of it."""

    uid: int
    label: str | None
    fragment: str


@dataclass
class Publishing:
    """A publish call."""

    round: Round
    seq: int
    arena: str
    deadline: float
    slot: SlotState | None = None
    pieces: int = 0


@dataclass
class Installing:
    """An install call."""

    deadline: float
    state: str = "asking"
    pull: deque[tuple[str, int, tuple[int, ...]]] = field(default_factory=deque)
    read: dict[tuple[str, int], int] = field(default_factory=dict)


class Member(Proc):
    """One incarnation. Everything its user does happens in `advance`, whenever something was heard or a timer ran out."""

    def __init__(self, world: World, name: str, spec: GroupSpec, roles: frozenset[Any], host: str) -> None:
        super().__init__(world.clock, name)
        self.world, self.host = world, host
        self.core = MemberCore(name, spec, roles, host, 1)
        self.on_death: list[Callable[[], None]] = []
        self.wire: Link | None = None
        self.todo: deque[Round] = deque()
        self.publishing: Publishing | None = None
        self.installing: Installing | None = None
        self.tensors: dict[int, Any] = {}
        self.results: list[str] = []
        self.leave_at: float | None = None
        self.obedient = True  # leaves when asked
        self.froze = 0.0
        self.fragment: str | None = None  # of its newest arena
        self._making = False  # a landing arena

    # -- life

    def die(self, how: str = "killed") -> None:
        if self.alive:
            super().die(how)
            for tell in self.on_death:
                tell()

    def wake(self) -> None:
        self.froze = self.clock.now
        super().wake()

    def attach(self) -> None:
        """Find the host's watchdog, or start one, and say everything."""
        if self.wire is not None:
            self.wire.close(self)
        dog = self.world.watchdog(self.host)
        self.wire = Link(self.clock, self, dog, local=True)
        self.wire.send(self, ("attach", self._statement()))
        for arena in self.world.memories():
            if self in arena.holders:
                self.wire.send(self, ("offer", arena.arena, arena.owner))
        self.wire.send(self, ("settled",))

    def suspect(self, dog: Watchdog) -> None:
        """The watchdog was silent for too long."""
        if self.world.watchdogs.get(self.host) is dog and (dog.frozen or not dog.alive):
            dog.heir()
        if self.wire is None or dog in self.wire.ends:
            self.attach()

    def received(self, link: Link, said: Any) -> None:
        if link is not self.wire:
            return
        if said is None:
            self.wire = None
            dog = self.world.watchdogs[self.host]
            self.after(0.02 + 0.1 * self.clock.rng.random(), self.suspect, dog)
        elif isinstance(said, (Told, Heard, Farewell)):
            before = self.core.view.revision
            if not self.core.hear(said) and self.core.view.obeys(said.term, said.instance):
                self.attach()
            elif self.core.view.revision != before:
                self.world.checks.replica(self.name, self.core.view)
            if self.core.unsaid:
                self.say()
            self.advance()
        elif said[0] == "offer":
            self.world.memory(said[1]).holders.add(self)
        elif said[0] == "dropped" and self.world.memory(said[1]).owner != self.name:
            self.world.memory(said[1]).holders.discard(self)

    def _statement(self) -> Any:
        return self.core.statement()

    def say(self) -> None:
        """State everything anew."""
        statement = self._statement()
        if self.wire is not None:
            self.wire.send(self, ("state", statement))

    def _tell(self, *said: Any) -> None:
        if self.wire is not None:
            self.wire.send(self, said)

    def advance(self) -> None:
        """Go on with whatever this member's user is doing."""
        if not self.alive:
            return
        if self.core.out:
            self._ousted()
            return
        me = self.core.me
        if me is not None and me.leave_within is not None and self.obedient and not self.core.leaving:
            self.leave(me.leave_within)
        self._land_on()
        self._publish_on()
        self._install_on()

    def _ousted(self) -> None:
        """NotAMember: every call ends, and so does the process."""
        self.publishing = self.installing = None
        self.todo.clear()
        why = self.core.out
        farewell = self.core.farewell
        self.world.checks.must(farewell is None or farewell.over, f"{self.name} takes a farewell for good: {why}")
        if self.core.leaving:
            self._tell("left")
        self.after(0.2, self.die, f"out: {why}")

    def leave(self, within: float) -> None:
        """m.leave()"""
        self.core.leaving = True
        self.say()
        self.after(within, self._leave_now)

    def _leave_now(self) -> None:
        self._tell("left")
        self.die("left")

    # -- landing

    def _land_on(self) -> None:
        """As `member.lander`: an arena when it is due, and away with those that nobody needs."""
        for gone in self.core.unused_landings():
            self._tell("withdraw", gone)
            self.world.memory(gone).holders.discard(self)
        layout = self.core.landing_due()
        if layout is not None and not self._making:
            self._making = True
            self.after(0.01 + self._copy_time(), self._made_landing, layout)

    def _made_landing(self, layout: str) -> None:
        self._making = False
        if self.core.landing_due() != layout:
            return
        own = cells_of(layout, self.core.group.rank)
        arena = self.world.new_landing(self, layout, own)
        self._tell("offer", arena, self.name)
        self.core.new_landing(Landing(arena=arena, cells=len(own), cell=1 << 20), layout)
        self.say()

    # -- publishing

    @property
    def idle(self) -> bool:
        """Whether it has published all it was to."""
        return self.publishing is None and not self.todo

    def _publish_on(self) -> None:
        call = self.publishing
        if call is None:
            if not self.todo or not self.core.my_group:
                return
            round_ = self.todo.popleft()
            if round_.label is None and self.core.must_label:
                self._ended(None, "refused without a label")
                self.after(0.0, self.advance)
                return
            call = self._begin_publish(round_)
        if call.slot is not None:
            return  # a copy is under way
        if not call.arena:
            self._accept(call)
            return
        slot, say = self.core.claim(call.arena)
        if slot is not None:
            call.slot = slot
            self.world.checks.writes(self, slot)
            arena = self.world.arenas[slot.arena]
            arena.generations[slot.slot] += 1
            self.after(self._copy_time(), self._write, call)
        elif self.clock.now >= call.deadline:
            self._end_publish("busy: " + "; ".join(self.core.holders(call.arena)))
            if self.core.unclaim():
                self.say()
        elif say:
            self.say()

    def _accept(self, call: Publishing) -> None:
        """A changed layout is accepted before anything is copied."""
        if self.core.accepted == call.round.fragment:
            call.arena = self._new_arena()
            self.advance()
        elif self.clock.now >= call.deadline:
            self.core.source, self.core.source_from = self.fragment, 0
            self.say()
            self._end_publish("layout not accepted")

    def _new_arena(self) -> str:
        arena = self.world.new_arena(self)
        self.core.new_arena(arena, 2)
        self._tell("offer", arena, self.name)
        self.fragment = self.core.source
        return arena

    def _begin_publish(self, round_: Round) -> Publishing:
        seq = self.core.next_publish(round_.label)
        if not self.core.slots:
            self._new_arena()
        changed = round_.fragment != self.fragment
        patience = 0.5 + 3 * self.clock.rng.random()
        if self.clock.calm:
            patience = 12.0
        arena = "" if changed else self.core.slots[-1].arena
        call = self.publishing = Publishing(round_, seq, arena, self.clock.now + patience)
        if changed:
            self.core.source, self.core.source_from = round_.fragment, seq
            self.say()
        self.after(patience, self.advance)
        return call

    def _copy_time(self) -> float:
        rng = self.clock.rng
        return 0.02 * rng.random() if rng.random() < 0.85 else 0.3 * rng.random()

    def _write(self, call: Publishing) -> None:
        slot = call.slot
        if slot is None or self.publishing is not call:
            return
        arena = self.world.arenas[slot.arena]
        if call.pieces < PIECES:
            for cell in self._shard(call.round)[call.pieces :: PIECES]:
                arena.cells[slot.slot][cell] = (call.round.uid, cell)
            call.pieces += 1
            self.after(self._copy_time(), self._write, call)
            return
        arena.generations[slot.slot] += 1
        fill = Fill(
            arena=slot.arena, slot=slot.slot, generation=arena.generations[slot.slot], seq=call.seq,
            label=call.round.label, fragment=call.round.fragment,
        )  # fmt: skip
        self.core.offer(slot, fill)
        self.world.checks.offered(self, fill, call.round)
        self.say()
        self._end_publish("published")
        for gone in self.core.unused_arenas(call.arena):
            self._tell("withdraw", gone)
            self.world.arenas[gone].holders.discard(self)

    def _shard(self, round_: Round) -> tuple[int, ...]:
        return cells_of(f"S{round_.fragment}x{self.core.group.size}", self.core.group.rank)

    def _end_publish(self, result: str) -> None:
        self._ended(self.publishing, result)
        self.publishing = None
        self.after(0.0, self.advance)

    def _ended(self, call: Publishing | Installing | None, result: str) -> None:
        self.results.append(result)
        self.clock.note(self.name, "call ended:", result)
        if call is not None:
            self.world.checks.in_time(self, call.deadline, SLACK)

    # -- installing

    def install(self, patience: float) -> None:
        """m.install(timeout)"""
        if self.installing is not None or self.core.out or not self.alive:
            return
        self.core.ask(patience)
        self.installing = Installing(self.clock.now + patience)
        self.say()
        self.after(patience, self.advance)

    def _install_on(self) -> None:
        call = self.installing
        if call is None or call.state == "pulling":
            return
        verdict = self.core.answer()
        if verdict is not None:
            self._end_install(verdict, verdict.verdict)
            return
        ticket = self.core.grant()
        if ticket is not None:
            publication = self.core.view.publications.get(ticket.publication)
            self.core.take_up(ticket)
            self.say()
            call.state = "pulling"
            if publication is None or not self._open(call, publication):
                self._report(call, "a slot is not what the publication says")
                return
            self.after(self._copy_time(), self._pull, call)
        elif self.clock.now >= call.deadline:
            self._end_install(None, "timeout")

    def _open(self, call: Installing, publication: PublicationDoc) -> bool:
        """What is to be copied from where on this host; whether every slot has what the publication says now."""
        group = self.core.my_group
        layout = group.destination_layout if group is not None else None
        wanted = set(cells_of(layout, self.core.group.rank)) if layout is not None else set(range(CELLS))
        found: dict[tuple[str, int], list[int]] = {}
        for source in publication.sources:
            arena = self.world.arenas[source.arena]
            if source.host != self.host or self not in arena.holders:
                continue
            if arena.generations[source.slot] != source.generation:
                return False
            cells = wanted & set(cells_of(publication.layout, source.rank))
            self._plan_pull(call, found, (source.arena, source.slot), cells, source.generation)
            wanted -= cells
        for part in publication.landings:
            landed = self.world.landing_arenas[part.arena]
            if part.host != self.host or part.layout != layout or not wanted:
                continue
            if self not in landed.holders or landed.publications[part.slot] != publication.id:
                continue
            cells = wanted & landed.held[part.slot]
            self._plan_pull(call, found, (part.arena, part.slot), cells, landed.generations[part.slot])
            wanted -= cells
        for at, some in found.items():
            call.pull.extend((*at, tuple(sorted(some)[piece::PIECES])) for piece in range(PIECES))
        self.tensors = {c: v for c, v in self.tensors.items() if any(c in some for some in found.values())}
        return not wanted

    @staticmethod
    def _plan_pull(
        call: Installing,
        found: dict[tuple[str, int], list[int]],
        at: tuple[str, int],
        cells: set[int],
        generation: int,
    ) -> None:
        if cells:
            found.setdefault(at, []).extend(cells)
            call.read[at] = generation

    def _pull(self, call: Installing) -> None:
        if self.installing is not call:
            return
        if self.clock.now >= call.deadline and call.pull:
            self._report(call, "its deadline passed")
        elif call.pull:
            arena, slot, cells = call.pull.popleft()
            held = self.world.memory(arena).cells[slot]
            self.tensors.update((cell, held.get(cell)) for cell in cells)
            self.after(self._copy_time(), self._pull, call)
        elif self._unchanged(call.read):
            self._report(call, "")
        else:
            self._report(call, "a slot was written while it was read")

    def _unchanged(self, read: dict[tuple[str, int], int]) -> bool:
        """The comparison after the copies; a switch for the test that leaves it out."""
        return all(self.world.memory(a).generations[s] == g for (a, s), g in read.items())

    def _report(self, call: Installing, fault: str) -> None:
        call.state = "waiting"
        self.core.report(not fault, fault, 0.1, 5)
        self.say()
        self.advance()

    def _end_install(self, verdict: Any, result: str) -> None:
        call, self.installing = self.installing, None
        self.core.end_call(verdict)
        self.world.checks.held(self)
        self.say()
        self._ended(call, result)
