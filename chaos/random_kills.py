"""SIGKILLs any one process of a small job at random moments, by seed, and looks at everything after each kill.

    python -m chaos.random_kills --seed 7 --kills 200

The job: two trainers that publish all the time, two engines of two ranks that install all the time, their supervisor and their
watchdog. After a kill the victim is started again (a watchdog is replaced by the members themselves); then the job must go on,
versions only rise, whatever an install returned must be what was published, bit for bit, and nobody else was given up.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_reshard.protocol.deadlines import Deadlines, Policies
from tests.elastic import rank as on
from tests.elastic.world import Actor, Call, Died, Failed, Settings, World, same, until

__all__ = ["Kills", "Report", "main", "run"]

# What a call may say when one process of the job was killed under it.
EXPECTED = {"GroupBroken", "RefitTimeout", "PublicationAbandoned", "SlotsBusy", "NothingInstallable"}
KINDS = ("trainer", "engine", "watchdog", "supervisor")
_CALL = 6.0  # seconds of one call: longer than a watchdog's replacement


@dataclass
class Report:
    """What was killed, and what the survivors held before and after."""

    kills: Counter[str] = field(default_factory=Counter)
    versions: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    before: dict[str, dict[str, int]] = field(default_factory=dict)
    after: dict[str, dict[str, int]] = field(default_factory=dict)


class Kills:
    """One job under fire. Every assertion names the seed and the kill."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random, self.seed = world, random.Random(seed), seed
        self.report = Report()
        self.step = 0
        world.start_supervisor()
        self.trainer = world.trainer().join()
        self.engines = [world.engine(number).join() for number in range(2)]
        self.newest = {engine.name: 0 for engine in self.engines}
        self.labels: dict[int, str] = {}
        self.go_on()

    # -- the job at work

    def go_on(self) -> None:
        """A publish goes all the way, without a fault: every engine installs it whole."""
        for attempt in range(3):
            self.step += 1
            label = f"s{self.step}"
            self.trainer.publish(label)
            told = [call.outcome(15.0) for call in self.trainer.begin(on.committed, label, 10.0)]
            if all(isinstance(version, int) for version in told):
                break
            # A rank that was replaced may have begun to count in the middle of this one; the next one counts.
            assert attempt < 2, f"publishes do not get through: {told}"
        version = same(told)
        self.note(version, label)
        for engine in self.engines:
            result = engine.install()
            assert (result["weight_version"], result["label"]) == (version, label)
            self.newest[engine.name] = version

    def note(self, version: int, label: str | None) -> None:
        """A version stands for one label, for ever."""
        assert self.labels.setdefault(version, label or "") == label, f"version {version} was given twice"

    def under_way(self) -> list[tuple[Actor, Call]]:
        """Everybody at work at once."""
        self.step += 1
        label = f"s{self.step}"
        calls = [(actor, actor.begin(on.publish, label, _CALL)) for actor in self.trainer]
        for engine in self.engines:
            calls += [(actor, actor.begin(on.install, _CALL)) for actor in engine]
        return calls

    def look(self, calls: Sequence[tuple[Actor, Call]], victim: Actor | None) -> None:
        """How the calls ended: right bytes, or an error that says what to do."""
        for actor, call in calls:
            told = call.outcome(_CALL + 10.0)
            if isinstance(told, Died):
                assert actor is victim, f"{actor.name} died, but nobody killed it: {told}"
            elif isinstance(told, Failed):
                assert told.kind in EXPECTED, f"{actor.name} was told {told}"
                self.report.errors[told.kind] += 1
            elif isinstance(told, dict):
                assert not told["wrong"], f"{actor.name} was told CURRENT of {told['label']} with wrong {told['wrong']}"
                self.note(told["weight_version"], told["label"])
                gang = actor.name.rpartition("-")[0]
                assert told["weight_version"] >= self.newest[gang], "versions only rise"

    # -- kills

    def one(self) -> str:
        """Kill one process at a random moment; start it again; look at everything."""
        kind = self.random.choice(KINDS)
        gang = self.trainer if kind == "trainer" else self.random.choice(self.engines)
        rank = self.random.randrange(2)
        members = {a.id for g in (self.trainer, *self.engines) for a in g}
        victim: Actor | None = gang[rank] if kind in ("trainer", "engine") else None
        calls = self.under_way()
        time.sleep(self.random.random() * 0.03)
        if victim is not None:
            os.kill(victim.pid, signal.SIGKILL)
        elif kind == "watchdog":
            os.kill(self.world.watchdog().pid, signal.SIGKILL)
        else:
            self.world.kill_supervisor()
            time.sleep(self.random.random() * 0.1)
            self.world.start_supervisor()
        self.look(calls, victim)
        gone = set()
        if victim is not None:
            victim.ended()
            gone = {victim.id}
            victim.close()
            self.world.forget(victim)
            gang.replace(rank)
        self.report.kills[kind] += 1
        self.go_on()
        self.nobody_else(members - gone)
        return kind

    def nobody_else(self, members: set[str]) -> None:
        """Everybody who was not killed takes part."""
        view = self.world.view()
        lost = [m for m in members if (doc := view.members[m]) is None or doc.state != "live"]
        assert not lost, f"given up although nothing of theirs was killed: {lost}"
        versions = sorted(p.weight_version for p in view.publications.values() if p)
        assert len(set(versions)) == len(versions), f"a version was given twice: {versions}"

    def holdings(self) -> dict[str, dict[str, int]]:
        """What each process holds, when nothing is under way."""
        return {actor.name: actor.do(on.usage) for gang in (self.trainer, *self.engines) for actor in gang}

    def run(self, kills: int, say: Any = None) -> Report:
        """So many kills."""
        for number in range(kills):
            try:
                kind = self.one()
            except AssertionError as error:
                raise AssertionError(f"seed {self.seed}, kill {number + 1}: {error}") from error
            if say is not None:
                say(f"kill {number + 1}: {kind}; versions up to {max(self.labels)}")
            if number + 1 == min(5, kills):
                self.report.before = self.holdings()
        self.report.after, self.report.versions = self.holdings(), max(self.labels)
        return self.report


def run(folder: Path, seed: int, kills: int, say: Any = None) -> Report:
    """A job with so many kills in a folder; nothing of it is left when this returns. AssertionError for whatever is wrong."""
    settings = Settings(Deadlines(orphan_hold=2.0), Policies(install=5.0))
    with World(folder, settings) as world:
        report = Kills(world, seed).run(kills, say)
    until(lambda: world.watchdog() is None or None, "the watchdog has gone")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=15)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), chosen.seed, chosen.kills, lambda text: print(text, flush=True))
    print(f"{dict(report.kills)}; {report.versions} versions; calls that ended in {dict(report.errors)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
