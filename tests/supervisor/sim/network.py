"""Hosts, and the network between them and to the supervisor: what is cut, and when it heals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.supervisor.sim.clock import Link, Proc

if TYPE_CHECKING:
    from tests.supervisor.sim.world import World

__all__ = ["Network"]


class Network:
    """control: hosts that do not reach the supervisor; apart: hosts that reach only each other's movers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.control: set[str] = set()
        self.apart: set[str] = set()
        self._held: list[Link] = []

    def data(self, a: str, b: str) -> bool:
        """Whether movers of these hosts reach each other."""
        return (a in self.apart) == (b in self.apart)

    def cut(self, hosts: Iterable[str], control: bool, data: bool) -> None:
        """A partition. Connections to the supervisor break, or just carry nothing."""
        hosts, clock = set(hosts), self.world.clock
        clock.note("PARTITION", sorted(hosts), "control" if control else "", "data" if data else "")
        if data:
            self.apart = hosts
        for host in hosts if control else ():
            self.control.add(host)
            dog = self.world.watchdogs.get(host)
            if dog is not None and dog.uplink is not None:
                if self.world.rng.random() < 0.5:
                    dog.uplink.sever()
                else:
                    dog.uplink.hold()
                    self._held.append(dog.uplink)

    def heal(self) -> None:
        """All of it is over."""
        if not self.control and not self.apart:
            return
        self.world.clock.note("HEALED")
        self.control, self.apart = set(), set()
        while self._held:
            self._held.pop().release()
        for meeting in self.world.meetings.values():
            meeting.kick()

    def processes(self, host: str) -> list[Proc]:
        """All that runs on a host; its watchdog first."""
        dog = self.world.watchdogs.get(host)
        members = [m for m in self.world.members.values() if m.host == host]
        movers = [m for m in self.world.movers.values() if m.host == host]
        return [p for p in ([dog] if dog is not None else []) + [*members, *movers] if p.alive]
