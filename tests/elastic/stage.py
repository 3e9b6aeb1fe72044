"""A job over several hosts in which transfers take several rounds, so that something can happen in the middle of one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_reshard.protocol.processes import started
from elastic_reshard.protocol.wire import credentials
from elastic_reshard.watchdog.runtime import Paths
from tests.elastic import rank as on
from tests.elastic.actors import Actor, _state, until
from tests.elastic.world import Gang, Hold, World, results, same

__all__ = [
    "BIG",
    "CELL",
    "MIDDLE",
    "SETTINGS",
    "SIZE",
    "Stage",
    "everything_of",
    "freeze",
    "gone",
    "kill",
    "nursery",
    "vanish",
    "wake",
]

# 32 MiB: four rounds when two members send it to two hosts.
SIZE = 32 << 20
BIG = {f"w{i}": ((1024, 1024), "float32", 0) for i in range(8)}
CELL = 1 << 14
# Of a world whose processes are held: that is no stall, and what hangs is not to be mended by waiting for one.
# Movers wait longer for a watchdog than it takes to replace a frozen one.
SETTINGS: dict[str, Any] = {"cell": CELL, "hooks": {}, "stall": 60.0, "form": 60.0, "orphan_hold": 6.0}
MIDDLE = 4  # of the passings of "mover.round": when all are at their last round of four, a part has landed everywhere


class Stage:
    """A trainer gang, and an engine for each list of hosts; all are joined. Publishes are labelled s1, s2, ...: as long as all
    of them are committed, the labels' numbers are the versions."""

    def __init__(
        self,
        world: World,
        trainer: Sequence[str] = ("a",),
        engines: Sequence[Sequence[str]] = (("b",), ("c",)),
        shapes: Mapping[str, Any] = BIG,
        size: int = 2,
    ) -> None:
        self.world, self.shapes, self.step = world, shapes, 0
        self.trainer = world.trainer(2, hosts=trainer)
        self.engines = [world.engine(number, size, hosts=hosts) for number, hosts in enumerate(engines)]
        world.join(self.trainer, *self.engines, shapes=shapes)

    def everybody(self) -> list[Actor]:
        """All members."""
        return [*self.trainer, *(actor for engine in self.engines for actor in engine)]

    def replace(self, gang: Gang, *ranks: int) -> None:
        """New processes in the places of some."""
        gang.replace(*ranks, shapes=self.shapes)

    # -- publishing

    def publish(self) -> str:
        """Publish the next label; it."""
        self.step += 1
        self.trainer.publish(f"s{self.step}")
        return f"s{self.step}"

    def serves(self, label: str, *engines: Gang) -> None:
        """All ranks of these engines (all, if none are given) wait for a newer version: it is the label's, bit for bit."""
        chosen = engines or self.engines
        found = same(results([actor.begin(on.receive) for engine in chosen for actor in engine]))
        assert found == on.content(label), f"version {found} came first, not {label}"
        for engine in chosen:
            engine.holds(label)

    def catches_up(self, label: str, *engines: Gang) -> None:
        """All ranks of these install until they serve the label's version, over older ones perhaps."""
        results([actor.begin(on.reach, on.content(label)) for engine in engines for actor in engine])
        for engine in engines:
            engine.holds(label)

    def refit(self) -> str:
        """Publish, and see it served by all; the label."""
        label = self.publish()
        self.serves(label)
        return label

    def smooth(self) -> None:
        """A refit in one epoch: nothing of what was before is left over."""
        self.whole(self.refit())

    def middle(self, *held: Actor, nth: int = MIDDLE, **more: Any) -> tuple[str, Hold]:
        """Publish, and wait until the movers of some (all, if none are given) are in the middle of the transfer: all wait
        there to be released. The label."""
        hold = self.world.hold("mover.round", nth, **more)
        label = self.publish()
        hold.has(*(actor.id for actor in held or self.everybody()))
        return label, hold

    # -- what became of it

    def publication(self, label: str) -> Any:
        """Its document."""
        return next(p for p in self.world.view().publications.values() if p is not None and p.label == label)

    def attempts(self, label: str) -> int:
        """Epochs in which it was moved."""
        key = self.publication(label).id
        return sum(e.fields["publication"] == key for e in self.world.events("transfer.forming"))

    def broken(self, label: str) -> list[str]:
        """Why its transfers broke."""
        key = self.publication(label).id
        return [e.fields["reason"] for e in self.world.events("transfer.breaking") if e.fields["publication"] == key]

    def story(self, label: str) -> list[str]:
        """What became of its transfers."""
        key = self.publication(label).id
        ours = {e.fields["transfer"] for e in self.world.events("transfer.forming") if e.fields["publication"] == key}
        return [f"{e.event} {e.fields}" for e in self.world.events("") if e.fields.get("transfer") in ours]

    def heard(self, label: str) -> set[str]:
        """Members whose movers the supervisor has heard of in a transfer of it."""
        ours = f"{self.publication(label).id}:"
        with self.world.client() as client:
            return {
                m for h in client.hosts().values() for m, said in h.movers.items() if said.transfer.startswith(ours)
            }

    def network(self, label: str) -> float:
        """Bytes that went over the network for it."""
        return float(self.publication(label).metrics["bytes_network"])

    def whole(self, label: str) -> None:
        """It was moved in one epoch, which nothing broke."""
        found = (self.broken(label), self.attempts(label))
        assert found == ([], 1), f"{label} was moved in one epoch: {found}; {self.story(label)}"

    def rebuilt(self, label: str, *named: Actor) -> None:
        """One transfer of it broke, because of one of these if there is proof of that, and the next one did the rest."""
        reasons = self.broken(label)
        assert len(reasons) == 1, f"one loss is one rebuild: {reasons}; {self.story(label)}"
        assert self.attempts(label) == 2, f"{label} was moved in two epochs: {self.attempts(label)}"
        assert not named or any(actor.id in reasons[0] for actor in named), f"who was lost is named: {reasons[0]}"


def kill(*pids: int) -> None:
    """SIGKILL to all at once."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    """SIGSTOP, and see it stopped."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _state(pid) in "TX" or None, f"{pid} is stopped")


def wake(pid: int) -> None:
    """SIGCONT, if it is there."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def gone(pid: int, what: str, limit: float = 5.0) -> None:
    """Wait for a process's end."""
    until(lambda: started(pid) == 0 or None, f"{what} (process {pid}) has ended", limit)


def everything_of(world: World, host: str) -> list[int]:
    """All processes of a host: its watchdog, its members', their movers."""
    record = world.watchdog(host)
    members = [resident.pid for resident in record.members.values() if resident.ended is None]
    return [record.pid, *members, *world.movers(host).values()]


def vanish(world: World, host: str) -> None:
    """All processes of a host are killed at once, and have ended. (A machine's nursery is of all its labelled hosts.)"""
    pids = everything_of(world, host)
    for pid in pids:  # so that none sees another's end
        os.kill(pid, signal.SIGSTOP)
    kill(*pids)
    for pid in pids:
        gone(pid, f"a process of host {host}")


def nursery(world: World) -> int:
    """The machine's forkserver: whoever listens at its socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(Paths.of_nursery(world.job, world.runtime).sock))
        return credentials(sock).pid
