"""Keeps a soak's job going: starts again who died, has the trainers publish, reads what everybody writes down. One thread."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable
from pathlib import Path

from chaos.cast import HOSTS, JOB, SEATS, Cast, Player, Seat
from chaos.faults import Fault
from chaos.observer import Observer
from chaos.players import AGAIN
from chaos.sight import Tail, fields_of, journaled

__all__ = ["Stage"]

_PACE = 0.15  # seconds between a publish that is over and the next


class Stage:
    """The job at work. `turn` does what is due, and returns at once."""

    def __init__(self, cast: Cast, observer: Observer) -> None:
        self.cast, self.observer = cast, observer
        self.step = 0
        self.publishing = True
        self.story: list[tuple[float, str, str]] = []  # what happened, for the time line
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._next_step = 0.0
        self._down: set[str] = set()  # seats that are to be started again
        self._looked = 0.0
        self._tails: dict[Path, Tail] = {}
        observer.seats({s.name: s.host for s in SEATS}, {s.name: s.group for s in SEATS})

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do it then."""
        self._serial += 1
        heapq.heappush(self._due, (when, self._serial, what))

    def note(self, what: str, detail: str = "") -> None:
        """For the time line."""
        self.story.append((time.monotonic(), what, detail))

    # -- a turn

    def turn(self) -> None:
        """Everything that is due."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        self._supervise()
        for player in list(self.cast.members.values()):
            if not player.alive:
                self._died(player)
        self._publish(now)
        if now - self._looked > 0.05:
            self._looked = now
            self.read()

    def read(self) -> None:
        """Take in what was written down since the last time."""
        folder = self.cast.records
        for path in [*folder.glob("*.jsonl"), *folder.glob("*.log")]:
            self._tails.setdefault(path, Tail(path))
        for host in HOSTS:
            path = self.cast.runtime / JOB / f"{host}.log"
            self._tails.setdefault(path, Tail(path))
        for path, tail in list(self._tails.items()):
            for line in tail.lines():
                self._take(path, line)

    def _take(self, path: Path, text: str) -> None:
        now = time.monotonic()
        if path.suffix == ".jsonl":
            line = json.loads(text)
            if line["kind"] == "joined" and line["who"] in self.cast.members:
                player = self.cast.members[line["who"]]
                if player.pid == line["pid"]:
                    player.id = line["id"]
            if line["kind"] != "event" or self._current(line["pid"]):
                self.observer.feed(line)
        elif "mover.condemned" in text:
            fields = fields_of(text)
            self.note("mover condemned", f"{fields.get('member')}: {str(fields.get('why'))[:200]}")
            self.observer.condemned(now, path.stem, fields)
        elif "watchdog.condemned" in text:
            fields = fields_of(text)
            self.note("watchdog condemned", f"{fields.get('host')}: {fields.get('why')}")
            self.observer.replaced(now, str(fields.get("host")), int(fields.get("pid", 0)), str(fields.get("why")))

    def _current(self, pid: int) -> bool:
        """Whether a supervisor is the one that counts: what an older one judges in its sleep is nobody's alarm."""
        return self.cast.supervisor is None or pid == self.cast.supervisor.pid or pid not in self._former()

    def _former(self) -> set[int]:
        return {player.pid for player in self.cast.former}

    # -- members

    def begin(self, seat: Seat) -> None:
        """A process for a seat, unless it has one."""
        self._down.discard(seat.name)
        if seat.name not in self.cast.members:
            self.cast.start(seat)

    def _died(self, player: Player) -> None:
        """An end that nobody caused is found out; everybody is started again."""
        now, seat = time.monotonic(), player.seat
        assert seat is not None
        self.read()
        del self.cast.members[player.name]
        code = player.close()
        caused = [f for f in self.observer.faults if any(hurt.pid == player.pid for hurt in f.hurt)]
        if not caused and code != AGAIN:
            self.observer.violation(now, "a process ended by itself", player.name, f"exit status {code}")
        wait = 0.3
        if caused and caused[-1].action in ("kill", "vanish"):
            wait = max(0.0, caused[-1].at + caused[-1].hold - now)
        self._down.add(player.name)
        self.at(now + wait, lambda: self.begin(seat))

    def hale(self, seat: Seat) -> bool:
        """Whether its process lives, has joined, and is not stopped by a fault."""
        player = self.cast.members.get(seat.name)
        if player is None or not player.id or not player.alive:
            return False
        return not any(not f.healed and any(h.pid == player.pid for h in f.hurt) for f in self.observer.faults)

    # -- the supervisor

    def _supervise(self) -> None:
        cast = self.cast
        if cast.listen():
            assert cast.supervisor is not None
            self.note("supervisor", f"term {cast.supervisor.term}")
            for doc in journaled(cast.folder / "journal.sqlite"):
                if doc["state"] in ("committed", "released"):
                    self.observer.committed.setdefault(doc["weight_version"], time.monotonic())
        player = cast.supervisor
        if player is not None and not player.alive:
            self.read()
            caused = [f for f in self.observer.faults if any(h.pid == player.pid for h in f.hurt)]
            cast.supervisor, cast.port = None, 0
            code = player.close()
            cast.relay.to(0)
            if not caused:
                detail = f"exit status {code}, term {player.term}"
                self.observer.violation(time.monotonic(), "a supervisor ended by itself", "supervisor", detail)
            wait = caused[-1].hold if caused else 0.5
            self.at(time.monotonic() + wait, self._begin_supervisor)

    def _begin_supervisor(self) -> None:
        if self.cast.supervisor is None:
            self.cast.start_supervisor()

    def replace_supervisor(self) -> Player | None:
        """It does not answer: another one takes over. The old one."""
        old = self.cast.supervisor
        if old is not None:
            self.cast.former.append(old)
            self.cast.relay.to(0)
            self.cast.port = 0
            self.cast.start_supervisor()
        return old

    # -- publishing

    def _publish(self, now: float) -> None:
        """The next step, when all trainers have done the last."""
        trainers = [self.cast.members.get(seat.name) for seat in SEATS if seat.role == "source"]
        for player in trainers:
            if player is not None and not player.ready:
                self._hear(player)
        if all(p is not None and p.ready for p in trainers):
            if not self._next_step:
                self._next_step = now + _PACE
            if self.publishing and now >= self._next_step:
                self._next_step = 0.0
                self.step += 1
                for player in trainers:
                    if player is not None:
                        self._tell(player)

    def _hear(self, player: Player) -> None:
        try:
            if player.pipe.poll():
                player.pipe.recv()
                player.ready = True
        except (EOFError, ConnectionResetError):
            return  # its end will be seen

    def _tell(self, player: Player) -> None:
        player.ready = False
        try:
            player.pipe.send(self.step)
        except (BrokenPipeError, ConnectionResetError):
            return

    # -- how far everybody is

    def serving(self, seat: Seat) -> int:
        """The step that a seat installed last, by the incarnation that is there."""
        player = self.cast.members.get(seat.name)
        at, step = self.observer.installed.get(seat.name, (0.0, 0))
        return step if player is not None and at >= player.began else 0

    def beyond(self, fault: Fault) -> tuple[bool, bool]:
        """Whether all engines that can be reached serve something published after a fault, and whether all engines do."""
        groups: dict[str, list[Seat]] = {}
        for seat in SEATS:
            if seat.role == "destination":
                groups.setdefault(seat.group, []).append(seat)
        reached = {name: all(map(self.hale, seats)) for name, seats in groups.items()}
        newer = {name: all(self.serving(s) > fault.step for s in seats) for name, seats in groups.items()}
        can = [name for name, there in reached.items() if there]
        return bool(can) and all(newer[name] for name in can), all(newer.values())

    def close(self) -> None:
        """Let go of files."""
        for tail in self._tails.values():
            tail.close()
