"""Which faults, to whom, for how long: by seed. What was done to whom is kept, so that others can say who was hurt and when."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from chaos.cast import HOSTS, Cast, Player, send, state_of

__all__ = ["Fault", "Hurt", "Script", "hurt_of", "inflict"]

# (what, to what): how often. kill: SIGKILL. stop: SIGSTOP for good (the orchestrator ends members and supervisors that do not
# answer; everybody else is the job's own to replace). pause: SIGSTOP, then SIGCONT. vanish: all of a host at once.
KINDS = {
    ("kill", "member"): 12,
    ("kill", "mover"): 14,
    ("kill", "member and mover"): 6,
    ("kill", "watchdog"): 8,
    ("kill", "nursery"): 5,
    ("kill", "supervisor"): 8,
    ("stop", "member"): 5,
    ("stop", "mover"): 8,
    ("stop", "watchdog"): 5,
    ("stop", "nursery"): 3,
    ("stop", "supervisor"): 4,
    ("pause", "member"): 8,
    ("pause", "mover"): 8,
    ("pause", "watchdog"): 5,
    ("pause", "nursery"): 3,
    ("pause", "supervisor"): 5,
    ("vanish", "host"): 7,
}
# For a planted bug: what shows it.
_SHOWS = {"term": [("stop", "supervisor")], "zombie": [("stop", "mover")], "leak": [("kill", "mover")]}


@dataclass(frozen=True)
class Hurt:
    """One process, and what was done to it. name: the member's, a mover's member's, or what else it is."""

    what: str
    name: str
    host: str
    pid: int
    start: int


@dataclass(eq=False)
class Fault:
    """One fault. hold: seconds until the orchestrator, or SIGCONT, mends what is its to mend. Times by time.monotonic; 0.0:
    not yet. step: the last that was published when it came. overlaps: it came before the one before it was over."""

    number: int
    action: str
    target: str
    hold: float
    overlaps: bool
    at: float = 0.0
    step: int = 0
    host: str = ""
    busy: bool = False  # while a transfer was under way
    hurt: list[Hurt] = field(default_factory=list)
    healed: float = 0.0
    recovered: float = 0.0  # all groups that can be reached serve something newer
    whole: float = 0.0  # all groups do

    @property
    def kind(self) -> str:
        """In words."""
        return f"{self.action} {self.target}"

    @property
    def over(self) -> bool:
        """Whether everything is as it was before."""
        return bool(self.healed and self.whole)

    def names(self) -> set[str]:
        """Of who was hurt."""
        return {hurt.name for hurt in self.hurt}


class Script:
    """The same faults in the same order for the same seed; whom they hit depends on who is there."""

    def __init__(self, seed: int, plant: str) -> None:
        self._random, self.choose = (
            random.Random(seed),
            random.Random(seed + 1),
        )  # what, and whom: that depends on the moment
        self._plant, self._number = plant, 0

    def next(self, overlaps: bool, kind: tuple[str, str] | None = None) -> Fault:
        """The next one; of a kind that is wanted."""
        self._number += 1
        kinds = list(KINDS)
        action, target = self._random.choices(kinds, [KINDS[kind] for kind in kinds])[0]
        action, target = kind or (action, target)
        hold = self._hold(action, target)
        if self._plant and self._number % 2:
            action, target = self._random.choice(_SHOWS[self._plant])
        return Fault(self._number, action, target, hold, overlaps)

    def _hold(self, action: str, target: str) -> float:
        short = 0.1 + 0.9 * self._random.random()
        long = self._random.uniform(1.0, 7.0)
        if action == "kill":
            return short
        if action == "vanish":
            return long
        # Half of those that wake do so before anybody may have given them up.
        return long if action == "stop" or self._random.random() < 0.5 else short

    def gap(self) -> float:
        """Seconds between a recovery and the next fault."""
        return self._random.uniform(0.05, 1.2)

    def second(self) -> float | None:
        """Seconds after a fault at which another comes, mostly None."""
        after = self._random.uniform(0.02, 2.0)
        return after if self._random.random() < 0.35 else None

    def holds_open(self) -> bool:
        """Whether a transfer is to be held open around the fault."""
        return self._random.random() < 0.5


def inflict(fault: Fault, cast: Cast, script: Script, spared: set[str]) -> bool:
    """Do it; whether there was anybody to do it to. spared: names of those who are hurt already."""
    victims = list(_victims(fault, cast, script, spared))
    if not victims:
        return False
    what = signal.SIGKILL if fault.action in ("kill", "vanish") else signal.SIGSTOP
    fault.at = time.monotonic()
    fault.hurt = [hurt for hurt in victims if send(hurt.pid, hurt.start, what)]
    if fault.target == "host":
        _again(fault, cast)
    return bool(fault.hurt)


def _again(fault: Fault, cast: Cast) -> None:
    """A dying host starts nothing: a watchdog or mover that began while the others were killed goes too."""
    for _ in range(3):
        time.sleep(0.02)
        fresh = [h for h in _of_host(fault.host, cast) if h not in fault.hurt and state_of(h.pid) not in "ZX"]
        fault.hurt += [hurt for hurt in fresh if send(hurt.pid, hurt.start, signal.SIGKILL)]


def _victims(fault: Fault, cast: Cast, script: Script, spared: set[str]) -> Iterator[Hurt]:
    choose = script.choose.choice
    members = sorted(n for n, p in cast.members.items() if p.alive and p.id and n not in spared)
    free = [h for h in HOSTS if not any(n in spared for n in (f"watchdog {h}", f"host {h}"))]
    match fault.target:
        case "member" if members:
            yield hurt_of(cast.members[choose(members)])
        case "mover" | "member and mover":
            movers = {
                member.rpartition("@")[0]: (*hand, host) for host in HOSTS for member, hand in cast.movers(host).items()
            }
            yield from _mover(fault, cast, movers, members, script)
        case "watchdog" if free:
            fault.host = choose(free)
            record = cast.watchdog(fault.host)
            if record is not None:
                yield Hurt("watchdog", f"watchdog {fault.host}", fault.host, record.pid, record.start)
        case "nursery" if "nursery" not in spared:
            found = cast.nursery()
            if found is not None:
                yield Hurt("nursery", "nursery", "", *found)
        case "supervisor" if cast.supervisor is not None and cast.supervisor.ready and "supervisor" not in spared:
            yield Hurt("supervisor", "supervisor", "", cast.supervisor.pid, cast.supervisor.start)
        case "host" if free:
            fault.host = choose(free)
            yield from _of_host(fault.host, cast)


def _mover(
    fault: Fault, cast: Cast, movers: dict[str, tuple[int, int, str]], members: list[str], script: Script
) -> Iterator[Hurt]:
    names = sorted(movers if fault.target == "mover" else movers.keys() & set(members))
    if not names:
        return
    name = script.choose.choice(names)
    pid, start, host = movers[name]
    fault.host = host
    yield Hurt("mover", name, host, pid, start)
    if fault.target == "member and mover":
        yield hurt_of(cast.members[name])


def hurt_of(player: Player) -> Hurt:
    """A member, as somebody who is hurt."""
    assert player.seat is not None
    return Hurt("member", player.name, player.seat.host, player.pid, player.start)


def _of_host(host: str, cast: Cast) -> Iterator[Hurt]:
    for player in cast.members.values():
        if player.seat is not None and player.seat.host == host and player.alive:
            yield hurt_of(player)
    movers = cast.movers(host)
    record = cast.watchdog(host)
    if record is not None:
        yield Hurt("watchdog", f"watchdog {host}", host, record.pid, record.start)
    for member, (pid, start) in movers.items():
        yield Hurt("mover", member.rpartition("@")[0], host, pid, start)
