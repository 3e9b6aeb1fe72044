"""The elastic demo: refits between labelled hosts of one machine, while what makes them is killed, frozen and replaced.

Two trainers and two engines of TP2, each host a label, a real process for everything. A mover is killed and another frozen
while cells move; the trainers are killed right after a publish and come back with an older label; an engine joins on a host
of its own and one leaves. After every install every rank's tensors are compared, bit for bit, with what `bench.values` makes
of the version's number.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Final

from elastic_reshard.bench import elastic_demo_rank as does
from elastic_reshard.bench import rank as on
from elastic_reshard.bench.elastic_demo_cast import CELL, ENGINES, JOINER, RANKS, TRAINERS, DemoSetup
from elastic_reshard.bench.elastic_demo_hit import hit, told
from elastic_reshard.bench.elastic_demo_outcome import Change, Fault, Outcome, Proof
from elastic_reshard.bench.elastic_demo_refit import Refits
from elastic_reshard.bench.elastic_demo_watch import Line, Sight
from elastic_reshard.bench.play import distinct
from elastic_reshard.bench.stage import Gang, Stage
from elastic_reshard.protocol.docs import GroupState, MemberState
from elastic_reshard.protocol.view import Told

__all__ = ["play"]

_TRIES: Final = 12  # refits that may be over before a mover could be hit in their middle
_WITHIN: Final = 20.0  # seconds that an engine has to leave
_CHECKPOINT: Final = 3  # steps between two checkpoints of the trainers
_FIRST: Final = 2  # refits before anything is inflicted: both slots of every arena
_SCENES: Final = 5

Screen = Callable[[Sight], AbstractContextManager[object]]


def play(setup: DemoSetup, screen: Screen, say: Callable[[Line], None]) -> Outcome:
    """Play it. Blocks for a minute or less; every process has ended and every file is removed when it returns or raises, on
    SIGINT, SIGTERM and SIGHUP too (KeyboardInterrupt). screen: shows what the sight sees until it is left; say: is called
    with each line, from more than one thread. From a program's main thread. Raises ReshardError for what could not be
    carried out; what came out wrong is in the outcome."""
    begun = time.monotonic()
    outcome = Outcome(setup)
    with _interrupted() as deaf, Stage(cell=CELL) as stage, deaf(), Sight(stage, begun, say) as sight, screen(sight):
        demo = _Demo(setup, stage, sight, outcome)
        demo.start()
        demo.run()
        demo.prove()
        outcome.lines = sight.lines
    outcome.wrong += [f"{left} had to be killed at the end" for left in stage.left]
    outcome.seconds = time.monotonic() - begun
    return outcome


@contextmanager
def _interrupted() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """SIGTERM and SIGHUP act as SIGINT does. Yields a context from whose end to the end of this one all are ignored: what
    cleans up is not interrupted."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}

    @contextmanager
    def deaf() -> Iterator[None]:
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)

    try:
        yield deaf
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Demo(Refits):
    """The script."""

    def __init__(self, setup: DemoSetup, stage: Stage, sight: Sight, outcome: Outcome) -> None:
        super().__init__(setup, stage, sight, outcome)
        self.random = random.Random(setup.seed)
        self.victims = [[f"trainer-{rank}" for rank in range(len(TRAINERS))], list(ENGINES)]
        self.random.shuffle(self.victims)

    def start(self) -> None:
        """Everybody joins."""
        count = len(TRAINERS) + len(ENGINES)
        self.sight.tell(
            "step", f"{len(TRAINERS)} trainers and {len(ENGINES)} engines of TP{RANKS} start, on {count} hosts"
        )
        self.trainer = self.stage.gang("trainer", "source", self.source, TRAINERS)
        for name, host in ENGINES.items():
            self.engines[name] = self.stage.gang(name, "destination", self.destination, [host] * RANKS)
        self.stage.join(self.trainer, *self.engines.values())

    def run(self) -> None:
        """The scenes in the seed's order, calm refits between them, until there were as many versions as wanted."""
        scenes = [self._mover_killed, self._mover_frozen, self._trainers_killed, self._joins, self._leaves]
        self.random.shuffle(scenes)
        first, second = sorted((scenes.index(self._joins), scenes.index(self._leaves)))
        scenes[first], scenes[second] = self._joins, self._leaves
        for _ in range(_FIRST):
            self.calm()
        spare = self.setup.versions - _FIRST - 6  # mover, mover, trainers and their return, joiner, leaver
        for number, scene in enumerate(scenes):
            scene()
            for _ in range(spare * (number + 1) // _SCENES - spare * number // _SCENES):
                self.calm()

    def prove(self) -> None:
        """Look once more at what every engine serves."""
        view = self.until(lambda v: not any(v.transfers.values()), "no transfer is in hand")
        for name, engine in self.engines.items():
            doc = view.groups[name]
            serving, state = (doc.serving, str(doc.state)) if doc is not None else (0, "gone")
            nbytes = sum(self.destination.local_nbytes(rank) for rank in range(RANKS))
            wrong = tuple(self.look(engine))
            self.outcome.proofs.append(Proof(name, engine.hosts[0], serving, f"step-{self.step}", state, nbytes, wrong))
            if serving != self.version or state != GroupState.CURRENT:
                self.wrong(f"{name} serves version {serving} ({state}) at the end, not {self.version}")
        if not self.outcome.wrong:
            self.sight.tell("calm", f"{', '.join(self.engines)}: every bit is version {self.version}'s")

    # -- movers

    def _mover_killed(self) -> None:
        self._hit("mover killed", signal.SIGKILL, self.victims[0])

    def _mover_frozen(self) -> None:
        self._hit("mover frozen", signal.SIGSTOP, self.victims[1])

    def _hit(self, what: str, number: signal.Signals, among: list[str]) -> None:
        """Refits until the mover of one of these (of one rank, for engines) could be hit in the middle of a transfer."""
        for _ in range(_TRIES):
            name = self.random.choice([n for n in among if n not in ENGINES or n in self.engines])
            victim = f"{name}-{self.random.randrange(RANKS)}" if name in ENGINES else name
            flight = self.begin()
            found = hit(self, flight, victim, number, self.random.uniform(0.15, 0.45))
            times, done = self.published(flight), self.installed(flight)
            doc = self.finish(flight, times, done, what if found is not None else "")
            if found is not None:
                self._recovered(told(self, flight, found, what, done, doc))
                return
        self.wrong(f"{what}: {_TRIES} transfers were over before one could be hit; take a larger model")

    def _recovered(self, fault: Fault) -> None:
        self.outcome.faults.append(fault)
        again = f"{fault.resent / 2**20:.1f} MiB were under way and were moved again"
        self.sight.tell(
            "back", f"version {fault.version} installed everywhere {fault.recovered:.2f} s after it; {again}"
        )

    # -- trainers

    def _trainers_killed(self) -> None:
        """All of them, the moment that the last one's publish has returned; then they are started again."""
        flight = self.begin()
        times, at = self.published(flight), time.monotonic()
        self.stage.dismiss(self.trainer)
        self.sight.tell(
            "fault", f"SIGKILL to all trainers, right after publish of version {flight.version} ({flight.label})"
        )
        done = self.installed(flight)
        doc = self.finish(flight, times, done, "trainers killed")
        committed = max((self.sight.when(e) - at for e in self.events(doc, "publication.committed")), default=0.0)
        resent = max(0, self.outcome.refits[-1].network - flight.needed)
        why = "their arenas live on in their hosts' watchdogs"
        self._recovered(Fault("trainers killed", "trainer", flight.version, None, None, None, max(0.0, committed),
                              done - at, resent, why))  # fmt: skip
        checkpoint = max(0, (self.step - 2) // _CHECKPOINT * _CHECKPOINT)
        self.sight.tell("change", f"trainers start again from their checkpoint of step-{checkpoint}")
        begun, self.step = time.monotonic(), checkpoint
        self.trainer = self.stage.gang("trainer", "source", self.source, TRAINERS)
        self.stage.join(self.trainer)
        self.outcome.changes.append(Change("trainers come back", "trainer", time.monotonic() - begun, 0, True))
        self.calm()

    # -- engines

    def _joins(self) -> None:
        """On a host of its own: what it needs comes over the network, and nobody else has to do anything."""
        name, host = JOINER
        self.sight.tell("change", f"{name} joins on host {host}")
        before, others = self._asks(), self.outcome.refits[-1]
        begun = time.monotonic()
        joiner = self.stage.gang(name, "destination", self.destination, [host] * RANKS)
        self.stage.join(joiner)
        told = [call.result() for call in joiner.begin(on.receive)]
        seconds = time.monotonic() - begun
        network = int(self.publication(self.version).metrics.get("bytes_network", 0)) - others.network
        alone = self._asks() == before
        self.engines[name] = joiner
        self.look(joiner)
        if {int(t["version"]) for t in told} != {self.version}:
            self.wrong(f"{name} was told {told} when it joined, not version {self.version}")
        if network < distinct(self.destination, range(RANKS)):
            self.wrong(f"{name} joined on a host of its own, but {network} bytes went over the network")
        self._changed(Change("engine joins", name, seconds, network, alone))
        self.calm()

    def _leaves(self) -> None:
        """One of those that were there from the beginning, as it was asked to."""
        name = self.random.choice(sorted(set(ENGINES) & set(self.engines)))
        leaver = self.engines.pop(name)
        self.sight.tell("change", f"{name} is asked to leave")
        before, begun = self._asks(), time.monotonic()
        calls = leaver.begin(does.resign)
        self.stage.client.leave_group(name, within=_WITHIN)
        for call in calls:
            call.result()
        self.until(lambda view: not _takes_part(view, leaver), f"{name} has left")
        self.stage.dismiss(leaver)
        self._changed(Change("engine leaves", name, time.monotonic() - begun, 0, self._asks() == before))
        self.calm()

    def _asks(self) -> dict[str, list[tuple[int, int]]]:
        """How often each engine was asked to install, and what it serves."""
        return {name: engine.do(on.asks) for name, engine in self.engines.items()}

    def _changed(self, change: Change) -> None:
        self.outcome.changes.append(change)
        if not change.others:
            self.wrong(f"{change.what}: other engines had to install meanwhile")
        moved = f", {change.network / 2**20:.1f} MiB over the network" if change.network else ""
        others = "; the others did nothing" if change.others else ""
        self.sight.tell("change", f"{change.what}: done in {change.seconds:.2f} s{moved}{others}")


def _takes_part(view: Told, gang: Gang) -> bool:
    docs = [view.members.get(actor.id) for actor in gang.actors]
    return any(doc is not None and doc.state in (MemberState.LIVE, MemberState.LEAVING) for doc in docs)
