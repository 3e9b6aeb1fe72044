"""A job under fire: 3 trainers and 5 inference ranks on 4 labelled hosts publish and install all the time, while processes and
hosts are killed, frozen and woken by seed; an observer that shares no code with the job looks at everything.

    elastic-reshard chaos soak --minutes 15 --seed 1         # or python -m chaos.soak

Ends with a report, JSON and one page of HTML; exit status 1 if anything was violated. --plant breaks the job on purpose: the
soak must see it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chaos import players, report
from chaos.cast import DEADLINES, HOSTS, JOB, SEATS, Cast, Player, send, state_of
from chaos.faults import Fault, Script, hurt_of, inflict
from chaos.observer import ZOMBIE, Observer
from chaos.plants import PLANTS, SEEN
from chaos.sight import Sight
from chaos.stage import Stage

__all__ = ["Soak", "main", "soak"]

RECOVERY = 60.0  # seconds after its victims are back in which a fault must be over
_GONE = 15.0  # seconds in which a frozen process that is the job's own to replace must be gone
_MOVERS = len(SEATS) + 2  # processes of movers and nurseries at most, but for those that are about to end
_LEAKED = 6.0  # seconds that there may be more


class Soak:
    """One run."""

    def __init__(self, folder: Path, seed: int, seconds: float, plant: str, say: Callable[[str], None]) -> None:
        self.faults: list[Fault] = []
        self.observer = Observer(self.faults)
        self.cast = Cast(folder, uuid.uuid4().hex, plant)
        self.stage = Stage(self.cast, self.observer)
        self.script = Script(seed, plant)
        self.seed, self.seconds, self.plant, self.say = seed, seconds, plant, say
        self.sight = Sight(lambda: self.cast.port)
        self.began = time.monotonic()
        self.most: dict[str, int] = {}
        self._hold = folder / "hold"
        self._many_since = self._counted = 0.0
        self._zombies: dict[int, tuple[Player, float]] = {}
        self._said = 0

    # -- time

    def _turn(self) -> None:
        self.stage.turn()
        now = time.monotonic()
        for fault in self.faults:
            if not fault.over:
                self._follow(fault, now)
        self._watch_zombies(now)
        if now - self._counted > 1.0:
            self._counted = now
            self._count(now)
            self.observer.late(now, [p.pid for p in self.cast.members.values() if p.alive])
        for finding in self._news():
            self.say(f"{finding.at - self.began:7.1f} s  {finding.what}: {finding.who}: {finding.detail}")
        time.sleep(0.01)

    def _news(self) -> list[Any]:
        found = [*self.observer.violations, *self.observer.alarms]
        fresh, self._said = found[self._said :] if len(found) > self._said else [], len(found)
        return fresh

    def _until(self, ready: Callable[[], bool], limit: float) -> bool:
        deadline = time.monotonic() + limit
        while not ready():
            if time.monotonic() > deadline or self._caught():
                return ready()
            self._turn()
        return True

    def _caught(self) -> bool:
        """Whether the planted bug was seen."""
        return bool(self.plant) and any(f.what == SEEN[self.plant] for f in self.observer.violations)

    # -- the run

    def run(self) -> dict[str, Any]:
        """The whole of it; the report. Nothing of it is left when this returns."""
        try:
            up = self._start()
            end = time.monotonic() + (self.seconds if up else 0.0)
            while time.monotonic() < end and not self._caught():
                self._episode()
            if up and not self._caught():
                self._settle()
                self._end()
            self.observer.finish()
        finally:
            self._hold.unlink(missing_ok=True)
            self.sight.close()
            self.stage.read()
            self.stage.close()
            self.cast.close()
        return report.made(self)

    def _start(self) -> bool:
        """Whether the job came up. One that did not is ended without more."""
        self.cast.start_supervisor()
        for seat in SEATS:
            self._until(lambda: self.cast.port != 0, 20.0)
            self.stage.begin(seat)
        calm = Fault(0, "start", "job", 0.0, False, at=time.monotonic())
        if not self._until(lambda: self.stage.beyond(calm)[1], 90.0) and not self._caught():
            self.observer.violation(time.monotonic(), "the job did not come up", "job", "no version everywhere in 90 s")
            return False
        self.say(f"{time.monotonic() - self.began:7.1f} s  the job is up: {len(SEATS)} members on {len(HOSTS)} hosts")
        return True

    def _episode(self) -> None:
        """A fault, perhaps another one meanwhile, and the recovery."""
        self._until(lambda: False, self.script.gap())
        first = self._inflict(False)
        after = self.script.second()
        # A nursery is missed only by who needs a mover.
        kind = ("kill", "mover") if first is not None and first.target == "nursery" else None
        if first is not None and (after is not None or kind is not None):
            self._until(lambda: False, after or 0.2)
            self._inflict(True, kind)
        self._until(lambda: all(f.over for f in self.faults), RECOVERY + 20.0)
        for fault in self.faults:
            if not fault.over and not self._caught():
                self.observer.violation(time.monotonic(), "no recovery", ", ".join(sorted(fault.names())),
                                        f"fault {fault.number}, {fault.kind}: {self._where()}")  # fmt: skip
                fault.healed = fault.healed or time.monotonic()
                fault.whole = fault.recovered = time.monotonic()

    def _where(self) -> str:
        return str(
            {s.name: self.stage.serving(s) for s in SEATS if s.role == "destination"} | {"step": self.stage.step}
        )

    def _inflict(self, overlaps: bool, kind: tuple[str, str] | None = None) -> Fault | None:
        fault = self.script.next(overlaps, kind)
        spared = {name for f in self.faults if not f.healed for name in (*f.names(), f"{f.target} {f.host}")}
        if self.script.holds_open():
            self._hold.touch()
            self.stage.at(time.monotonic() + 0.9, lambda: self._hold.unlink(missing_ok=True))
            self._until(lambda: self.sight.transfer == "running", 0.6)
        self.stage.read()
        fault.step, fault.busy = self.stage.step, bool(self.sight.transfer)
        self.faults.append(fault)
        if not inflict(fault, self.cast, self.script, spared):
            self.faults.remove(fault)
            return None
        self.stage.note(fault.kind, ", ".join(sorted(fault.names())))
        self.say(
            f"{fault.at - self.began:7.1f} s  fault {fault.number}: {fault.kind}: {', '.join(sorted(fault.names()))}"
        )
        self._mend_later(fault)
        return fault

    # -- mending

    def _mend_later(self, fault: Fault) -> None:
        when = fault.at + fault.hold
        if fault.action == "pause":
            self.stage.at(when, lambda: self._wake(fault))
        elif fault.action == "stop" and fault.target == "member":
            self.stage.at(when, lambda: [send(h.pid, h.start, signal.SIGKILL) for h in fault.hurt])
        elif fault.action == "stop" and fault.target == "supervisor":
            self.stage.at(when, lambda: self._take_over(fault))
        elif fault.action == "stop" and fault.target == "nursery":
            # Whom nobody needs nobody finds frozen.
            self.stage.at(when, lambda: [send(h.pid, h.start, signal.SIGKILL) for h in fault.hurt])

    def _wake(self, fault: Fault) -> None:
        for hurt in fault.hurt:
            send(hurt.pid, hurt.start, signal.SIGCONT)
        fault.healed = time.monotonic()

    def _take_over(self, fault: Fault) -> None:
        old = self.stage.replace_supervisor()
        if old is not None:
            delay = 0.5 + 4.0 * self.script.choose.random()

            def wake() -> None:
                send(old.pid, old.start, signal.SIGCONT)
                self._zombies[old.pid] = (old, time.monotonic())

            self.stage.at(time.monotonic() + delay, wake)

    def _watch_zombies(self, now: float) -> None:
        for pid, (player, woken) in list(self._zombies.items()):
            late = now - woken > ZOMBIE
            if late and player.alive:
                self.observer.violation(
                    now, "a supervisor of an older term lives on", "supervisor", f"term {player.term}"
                )
            if late or not player.alive:
                del self._zombies[pid]
                self.cast.former.remove(player)
                player.close()

    def _follow(self, fault: Fault, now: float) -> None:
        """Whether a fault's victims are back, and everybody has gone on."""
        if not fault.healed and self._mended(fault, now):
            fault.healed = now
        reached, everywhere = self.stage.beyond(fault)
        if reached and not fault.recovered:
            fault.recovered = now
        if everywhere and fault.healed and not fault.whole:
            fault.whole = now

    def _mended(self, fault: Fault, now: float) -> bool:
        names = {hurt.name for hurt in fault.hurt if hurt.what == "member"}
        if names:
            there = [self.cast.members.get(name) for name in names]
            old = {hurt.pid for hurt in fault.hurt}
            return all(p is not None and p.id and p.pid not in old for p in there)
        if fault.target == "supervisor":
            player = self.cast.supervisor
            return fault.action != "pause" and player is not None and player.ready and player.pid != fault.hurt[0].pid
        if fault.action == "pause":
            return False
        left = [h for h in fault.hurt if state_of(h.pid) not in "ZX"]
        if left and now - fault.at > _GONE:
            detail = f"{fault.kind}, pid {left[0].pid}, for {_GONE} s"
            self.observer.violation(now, "a frozen process was not replaced", left[0].name, detail)
            send(left[0].pid, left[0].start, signal.SIGKILL)
        return not left

    # -- looking around

    def _count(self, now: float) -> None:
        """Processes and descriptors, now."""
        spawned = self.cast.spawned()
        movers = [pid for pid, (command, _) in spawned.items() if "elastic_reshard.mover" in command]
        guards = [pid for pid, (command, _) in spawned.items() if "elastic_reshard.watchdog" in command]
        self._most("movers and nurseries", len(movers))
        self._most("watchdogs", len(guards))
        for what, pids in (
            ("mover", movers),
            ("watchdog", guards),
            ("member", [p.pid for p in self.cast.members.values()]),
        ):
            for pid in pids:
                fds, memfds = _descriptors(pid)
                self._most(f"descriptors of a {what}", fds)
                self._most(f"memfds of a {what}", memfds)
        frozen = sum(state_of(pid) == "T" for pid in movers)
        if len(movers) - frozen <= _MOVERS:
            self._many_since = now
        elif now - self._many_since > _LEAKED:
            self._many_since = now
            detail = f"{len(movers)} processes of movers and nurseries, at most {_MOVERS} are needed"
            self.observer.violation(now, "movers are leaked", "movers", detail)

    def _most(self, what: str, count: int) -> None:
        self.most[what] = max(self.most.get(what, 0), count)

    # -- the end

    def _settle(self) -> None:
        """No more faults: all get the newest version; and it is still there for one that comes later, without a publish."""
        now = time.monotonic()
        calm = Fault(0, "end", "faults", 0.0, False, at=now, step=self.stage.step)
        if not self._until(lambda: self.stage.beyond(calm)[1], 30.0):
            self.observer.violation(time.monotonic(), "not everywhere after the faults", "engines", self._where())
        self.stage.publishing = False
        self._until(self._quiet, 15.0)
        newest = max(self.observer.committed, default=0)
        label = self.observer.labels.get(newest, "s0")
        if not self._until(lambda: self._all_serve(int(label[1:])), 20.0):
            self.observer.violation(
                time.monotonic(), "the newest is not everywhere", "engines", f"{label}: {self._where()}"
            )
        for name in ("engine2-0", "engine0-1"):
            player = self.cast.members[name]
            late = Fault(len(self.faults) + 1, "kill", "member", 0.3, False, at=time.monotonic(), step=self.stage.step)
            self.faults.append(late)
            late.hurt = [hurt_of(player)]
            send(player.pid, player.start, signal.SIGKILL)
            if not self._until(lambda player=player, name=name: self._again(name, player, int(label[1:])), 30.0):  # type: ignore[misc]
                self.observer.violation(
                    time.monotonic(), "a committed version was lost", name, f"{label}: {self._where()}"
                )

    def _again(self, name: str, old: Player, step: int) -> bool:
        player = self.cast.members.get(name)
        return player is not None and player is not old and self._all_serve(step)

    def _quiet(self) -> bool:
        trainers = [self.cast.members.get(s.name) for s in SEATS if s.role == "source"]
        return all(p is not None and p.ready for p in trainers)

    def _all_serve(self, step: int) -> bool:
        return all(self.stage.serving(s) >= step for s in SEATS if s.role == "destination")

    def _end(self) -> None:
        """The job is over: whatever it started goes by itself, and leaves nothing."""
        self._count(time.monotonic())
        self.stage.read()
        self.observer.over = True
        for player in self.cast.members.values():
            player.pipe.close()
        self._wait_for([*self.cast.members.values()], players.RECEIVE + 5.0)
        supervisor = self.cast.supervisor
        if supervisor is not None:
            supervisor.pipe.send("over")
            self._wait_for([supervisor], 5.0)
        deadline = time.monotonic() + DEADLINES.orphan_hold + 5.0
        while self.cast.spawned() and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid, (command, _) in self.cast.spawned().items():
            self.observer.violation(time.monotonic(), "a process was left behind", str(pid), command)
        while (left := _files(self.cast.runtime)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for path in left:
            self.observer.violation(time.monotonic(), "a file was left behind", path, JOB)

    def _wait_for(self, ending: list[Player], limit: float) -> None:
        deadline = time.monotonic() + limit
        while any(p.alive for p in ending) and time.monotonic() < deadline:
            time.sleep(0.02)
        for player in ending:
            if player.alive:
                self.observer.violation(time.monotonic(), "a process does not end", player.name, f"in {limit} s")


def _files(folder: Path) -> list[str]:
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()]


def _descriptors(pid: int) -> tuple[int, int]:
    """(all, memfds) of a process."""
    try:
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return 0, 0  # it goes, or has just closed one
    return len(links), sum(link.startswith("/memfd:") for link in links)


def soak(folder: Path, seed: int, seconds: float, plant: str = "", say: Callable[[str], None] = lambda _: None) -> Any:
    """Run it in an empty folder (its path short: Unix sockets lie in it); the report, as report.made."""
    return Soak(folder, seed, seconds, plant, say).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", choices=sorted(PLANTS), default="", help=str(PLANTS))
    parser.add_argument("--report", type=Path, default=Path("soak"), help="a folder for soak.json and soak.html")
    parser.add_argument(
        "--keep", action="store_true", help="also keep what the processes wrote down, if it was violated"
    )
    chosen = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        told = soak(folder, chosen.seed, chosen.minutes * 60, chosen.plant, lambda text: print(text, flush=True))
        chosen.report.mkdir(parents=True, exist_ok=True)
        report.write(told, chosen.report)
        if chosen.keep and told["violations"]:
            shutil.copytree(folder / "records", chosen.report / "records", dirs_exist_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(report.summary(told))
    print(f"report: {chosen.report / 'soak.json'}, {chosen.report / 'soak.html'}")
    return 1 if told["violations"] or told["alarms"] else 0


if __name__ == "__main__":
    sys.exit(main())
