"""A watchdog's movers: the real `Crew`, driven as `watchdog.movers` drives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_reshard.protocol.messages import LedgerSaid, MoverSaid
from elastic_reshard.watchdog.crew import Action, Assign, Condemn, Crew, Fetch, Fork, Order, Scene
from tests.supervisor.sim.clock import Link
from tests.supervisor.sim.memory import LandingArena, packed
from tests.supervisor.sim.movers import Mover

if TYPE_CHECKING:
    from tests.supervisor.sim.house import Watchdog

__all__ = ["Deck"]


class Deck:
    """The movers of one watchdog."""

    def __init__(self, dog: Watchdog) -> None:
        self.dog, self.world = dog, dog.world
        self.crew = Crew(dog.world.deadlines, dog.world.new_id, dog.clock.now)
        self._wires: dict[str, Link] = {}
        self._names: dict[Link, str] = {}
        self._watched: set[str] = set()
        self._layouts: set[str] = set()
        self._ticking = False

    # -- its predecessor, its end

    def inherit(self, old: Deck) -> None:
        """What its record says: movers that live, and those that do not."""
        for hand in old.crew.hands.values():
            if hand.pid:
                self.crew.expect(hand.mover, hand.member, hand.pid, hand.start, hand.transfer, self.dog.clock.now)
                self._watch(self.world.movers[hand.mover])
        self._tick_on()

    def end_all(self) -> None:
        """The watchdog goes for good."""
        for hand in self.crew.hands.values():
            if hand.pid:
                self.world.movers[hand.mover].die("its watchdog goes")

    # -- looking and deciding

    def _tick_on(self) -> None:
        if not self._ticking and self.crew.hands:
            self._ticking = True
            self.dog.after(self._period, self._tick)

    @property
    def _period(self) -> float:
        return self.world.deadlines.mover_beat / 2

    def _tick(self) -> None:
        now, self._ticking = self.dog.clock.now, False
        for hand in self.crew.hands.values():
            if hand.here:
                self.crew.glanced(hand.mover, self.world.movers[hand.mover].glance(), now)
        self._do(self.crew.tick(now, self._period))
        self.act()

    def act(self) -> None:
        """Do what is to be done now."""
        house = self.dog.house
        if not house.view.transfers and not self.crew.hands and not self.crew.words:
            return
        scene = Scene(
            house.view, house.host, house.obeyed, house.arenas, {*house.members, *house.expected}, self._layouts
        )
        self._do(self.crew.decide(scene, self.dog.clock.now))
        self.say()
        self._tick_on()

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Fork(mover, member):
                    self.dog.after(0.02 + 0.1 * self.world.rng.random(), self._fork, mover, member)
                case Assign(mover, transfer, publication):
                    self._wires[mover].send(self.dog, ("task", transfer, publication))
                case Order(mover, transfer):
                    self._wires[mover].send(self.dog, ("order", transfer))
                case Condemn(mover, why, dump):
                    self.dog.clock.note(self.dog.name, "CONDEMNS", self.world.movers[mover].name, why)
                    self.dog.after(0.1 if dump else 0.0, self._kill, mover)
                case Fetch(layout):
                    self.dog.after(0.01, self._fetched, layout)

    def _fetched(self, layout: str) -> None:
        self._layouts.add(layout)
        self.act()

    def _fork(self, mover: str, member: str) -> None:
        if self.dog.clock.chance(0.02):
            self.crew.not_forked(mover, self.dog.clock.now)
            return
        made = self.world.new_mover(self.dog.host, member, mover)
        self.dog.after(0.01 * self.world.rng.random(), self._forked, made)

    def _forked(self, made: Mover) -> None:
        if not self.crew.forked(made.mover, made.pid, 0, self.dog.clock.now):
            made.die("nobody waits for it")
            return
        self._watch(made)

    def _kill(self, mover: str) -> None:
        made = self.world.movers[mover]
        if made.alive:
            made.die("condemned")
        elif mover in self.crew.hands:
            self._ended(mover)

    def _watch(self, made: Mover) -> None:
        """By pidfd."""
        if made.mover in self._watched:
            return
        self._watched.add(made.mover)
        if made.alive:
            made.on_death.append(lambda: self.dog.after(0.03, self._ended, made.mover))
        else:
            self.dog.after(0.0, self._ended, made.mover)

    def _ended(self, mover: str) -> None:
        if mover not in self.crew.hands:
            return
        hand = self.crew.hands[mover]
        if hand.here:
            self.crew.glanced(mover, self.world.movers[mover].glance(), self.dog.clock.now)
        self.crew.ended(mover)
        self.say()
        self.act()

    # -- what movers say

    def takes(self, link: Link, said: Any) -> bool:
        """A message of a mover, or the end of its connection; whether it was one."""
        if link in self._names:
            self._heard(link, self._names[link], said)
            return True
        if said is not None and isinstance(said, tuple) and said[0] == "mover":
            self._attach(link, said[1], said[2])
            return True
        return False

    def _heard(self, link: Link, mover: str, said: Any) -> None:
        if self._wires.get(mover) is not link:
            return
        if said is None:
            del self._wires[mover]
            self.crew.detach(mover)
            return
        assert self.crew.reported(mover, said[1]) or mover not in self.crew.hands
        self.say()
        self.act()

    def _attach(self, link: Link, made: Mover, transfer: str) -> None:
        why = self.crew.attach(made.mover, made.member, transfer, made.pid, 0, self.dog.clock.now)
        if why:
            link.send(self.dog, ("refuse", why))
            return
        self._names[link], self._wires[made.mover] = made.mover, link
        self._watch(made)
        self.act()

    def refresh(self) -> None:
        """Just before a beat."""
        self.crew.refresh()
        self.say()

    def say(self) -> None:
        """What is new; a ledger goes before the word that its mover is out."""
        words: list[MoverSaid | LedgerSaid] = []
        for said in self.crew.outgoing():
            words += [*(self.ledgers(said.member) if said.state in ("out", "ended") else []), said]
        if words:
            self.dog.house.say(words)
            self.dog.flush()

    def ledgers(self, member: str = "") -> list[LedgerSaid]:
        """What landing slots hold."""
        found = []
        for name, owner in self.dog.house.arenas.items():
            arena = self.world.memory(name)
            if member not in ("", owner) or not isinstance(arena, LandingArena):
                continue
            for slot, publication in enumerate(arena.publications):
                if publication:
                    bits = packed(arena.own, arena.held[slot])
                    found.append(LedgerSaid(member=owner, arena=name, slot=slot, publication=publication, bits=bits))
        return found

    def hello(self) -> bytes:
        """The first message of a connection."""
        self.crew.refresh()
        self.crew.unsaid.clear()
        return self.dog.house.hello(self.crew.known(), self.ledgers())
