"""A host's watchdog, which can be killed, frozen and replaced: the real `House` and the real `Crew`, driven as `service.py` and
`movers.py` do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_reshard.protocol.messages import Hello, Statement, read_up
from elastic_reshard.protocol.view import Farewell, Heard, Told
from elastic_reshard.watchdog.core import House, Relay
from tests.supervisor.sim.clock import Link, Proc
from tests.supervisor.sim.crews import Deck

if TYPE_CHECKING:
    from tests.supervisor.sim.members import Member
    from tests.supervisor.sim.world import World

__all__ = ["Watchdog"]


class Watchdog(Proc):
    """One watchdog of a host."""

    def __init__(self, world: World, host: str, count: int) -> None:
        super().__init__(world.clock, f"watchdog#{host}{count}")
        self.world, self.host = world, host
        instance = f"{count + 1:x}"
        self.house = House("job", host, f"machine-of-{host}", instance, world.deadlines, self.clock.now)
        self.deck = Deck(self)
        self.uplink: Link | None = None
        self.wires: dict[str, Link] = {}
        self._names: dict[Link, str] = {}
        self._watched: set[str] = set()
        self.connecting = False
        self.after(world.deadlines.beat, self._beat)

    # -- time

    def _beat(self) -> None:
        self.deck.refresh()
        self.house.beat()
        for arena in self.house.sweep(self.clock.now):
            self._drop(arena)
        if self.house.departure(self.clock.now):
            self.deck.end_all()
            self.die(self.house.departure(self.clock.now))
            return
        for name in [*self.house.members, *self.house.expected]:
            self._watch(name)
        self.flush()
        self.after(self.world.deadlines.beat, self._beat)

    def _watch(self, name: str) -> None:
        """By pidfd: an end is seen whenever it was."""
        if name in self._watched:
            return
        self._watched.add(name)
        member = self.world.members[name]
        if member.alive:
            member.on_death.append(lambda: self.after(0.001 + 0.05 * self.clock.rng.random(), self.ended, name))
        elif self.house.members.get(name) is None or self.house.members[name].ended is None:
            self.after(0.001, self.ended, name)

    def ended(self, name: str, how: str = "its process has ended") -> None:
        """A member's end is seen; what it had said before is heard first."""
        if name in self.wires:
            self.after(0.02, self.ended, name, how)
            return
        if self.house.end(name, how, self.clock.now):
            self.flush()
            self.deck.act()

    # -- the supervisor's side

    def _connect(self) -> None:
        ready = self.house.ready(self.clock.now) and self.deck.crew.ready(self.clock.now)
        if self.uplink is not None or self.connecting or not ready:
            return
        self.connecting = True
        self.after(self.clock.delay(), self._connected)

    def _connected(self) -> None:
        self.connecting = False
        target = self.world.dial(self.host)
        if self.uplink is not None:
            return
        if target is None:
            self.after(0.3, self._connect)
            return
        self.uplink = Link(self.clock, self, target)
        hello = read_up(self.deck.hello())
        assert isinstance(hello, Hello)
        self.uplink.send(self, hello)

    def flush(self) -> None:
        """Say what is to be said."""
        if self.uplink is None:
            self._connect()
        elif self.house.unsaid:
            for raw in self.house.outgoing():
                self.uplink.send(self, read_up(raw))

    def _hang_up(self) -> None:
        if self.uplink is not None:
            self.uplink.close(self)
        self.uplink = None
        self.house.cut()
        self.after(0.05 + 0.3 * self.clock.rng.random(), self._connect)

    def received(self, link: Link, said: Any) -> None:
        if self.deck.takes(link, said):
            return
        if link is self.uplink:
            self._downward(said)
        elif isinstance(said, (Told, Heard, Farewell)) or (said is None and link not in self._names):
            return  # of a connection that was given up
        else:
            self._upward(link, said)

    def _downward(self, said: Any) -> None:
        if said is None:
            self.uplink = None
            self.house.cut()
            self.after(0.05 + 0.3 * self.clock.rng.random(), self._connect)
            return
        match self.house.hear(said):
            case Relay.PASS_ON:
                self.world.checks.replica(self.name, self.house.view)
                self.deck.act()
                for wire in self.wires.values():
                    wire.send(self, said)
            case Relay.RECONNECT:
                self._hang_up()
            case Relay.IGNORE:
                pass
        self.flush()

    # -- the members' side

    def _upward(self, link: Link, said: Any) -> None:
        now = self.clock.now
        if said is None:
            name = self._names.pop(link)
            if self.wires.get(name) is link:
                del self.wires[name]
                if name in self.house.members:
                    self.house.detach(name, now)
            return
        what, *rest = said
        if what == "attach":
            self._attach(link, rest[0])
            self.deck.act()
            return
        name = self._names.get(link, "")
        if self.wires.get(name) is not link:
            return
        self._said(name, what, rest)
        self.flush()
        self.deck.act()

    def _said(self, name: str, what: str, rest: list[Any]) -> None:
        match what:
            case "state":
                if self.house.state(name, rest[0], rest[0].model_dump_json().encode()):
                    self.world.read[name] = rest[0].number
            case "offer":
                self._offer(name, *rest)
            case "settled":
                for arena in self.house.settled(name):
                    self._drop(arena)
            case "withdraw":
                if self.house.withdraw(name, rest[0]):
                    self._drop(rest[0])
            case "left":
                self.house.end(name, "left", self.clock.now)

    def _attach(self, link: Link, statement: Statement) -> None:
        name = statement.member
        if self.house.attach(statement, statement.model_dump_json().encode(), self.clock.now):
            link.close(self)
            return
        old = self.wires.get(name)
        if old is not None:
            self._names.pop(old, None)
            old.close(self)
        self.wires[name], self._names[link] = link, name
        self.world.read[name] = statement.number
        self._watch(name)
        if self.house.view.term:
            link.send(self, self.house.view.snapshot())
        for arena in self.house.arenas:
            link.send(self, ("offer", arena))
        self.flush()

    def _offer(self, by: str, arena: str, owner: str) -> None:
        known = arena in self.house.arenas
        if not self.house.offer(by, arena, owner) or known:
            return
        self.world.memory(arena).holders.add(self)
        for name, wire in self.wires.items():
            if name != by:
                wire.send(self, ("offer", arena))

    def _drop(self, arena: str) -> None:
        self.world.memory(arena).holders.discard(self)
        self.world.checks.dropped(self, arena)
        for wire in self.wires.values():
            wire.send(self, ("dropped", arena))

    # -- its successor

    def heir(self) -> Watchdog:
        """Killed with proof by a member, which starts another."""
        self.die("replaced")
        new = self.world.start_watchdog(self.host)
        left: dict[str, tuple[str | None, Statement | None]] = {}
        for name, known in self.house.members.items():
            member: Member = self.world.members[name]
            how = known.ended or (None if member.alive else "its process has ended")
            left[name] = (how, known.statement)
        new.house.inherit(left, self.clock.now)
        new.deck.inherit(self.deck)
        return new
