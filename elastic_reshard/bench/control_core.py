"""The supervisor's state machine alone, in this process: events per second, without sockets, disk or JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_reshard.bench.control_cast import JOB, TRAINER, Cast, Player
from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.docs import TransferState
from elastic_reshard.protocol.messages import LedgerSaid, MoverSaid
from elastic_reshard.protocol.view import View
from elastic_reshard.supervisor import core
from elastic_reshard.supervisor.events import Beaten, Event, Examined, Greeted, Ledgered, Matched, Moved, Spoken

__all__ = ["CoreFigures", "measure_core"]

_BUDGET: Final = 1.0  # seconds for each figure
_BATCH: Final = 100
_SOURCE, _DESTINATION = "a" * 32, "b" * 32


@dataclass(frozen=True)
class CoreFigures:
    """beats, statements: events per second, one a step; batched: statements, 100 a step. refit: seconds of a whole refit in
    steps of 100, of `refit_events` events."""

    beats: float
    statements: float
    batched: float
    refit: float
    refit_events: int


class _Machine:
    """One job, stepped by hand. What it tells is kept as a view."""

    def __init__(self, cast: Cast) -> None:
        self.cast, self.view, self.now = cast, View(), 0.0
        self.job = core.begin(JOB, 1, "i", 0.0, cell=cast.cell)
        self.view.apply(core.snapshot(self.job))
        self.events, self.seconds = 0, 0.0

    def step(self, events: Sequence[Event]) -> None:
        """One step, and those that answer its questions."""
        queue = list(events)
        while queue:
            self.now += 0.001
            began = time.perf_counter()
            self.job, effects = core.step(self.job, queue, self.now, _covers)
            self.seconds += time.perf_counter() - began
            self.events += len(queue)
            if effects.told is not None:
                self.view.apply(effects.told)
            queue = [_examined(ask.group, ask.fragments) for ask in effects.examine]
            queue += [Matched(ask.source_layout, ask.destination_layout, "") for ask in effects.match]

    def take(self, events: Iterable[Event], batch: int = _BATCH) -> None:
        """All of these, so many a step."""
        waiting = list(events)
        for at in range(0, len(waiting), batch):
            self.step(waiting[at : at + batch])

    def spoken(self, players: Iterable[Player]) -> list[Event]:
        return [Spoken(self.cast.label(p.host), p.said) for p in players]

    def words(self, words: Iterable[tuple[Player, MoverSaid | LedgerSaid]]) -> list[Event]:
        return [
            Moved(self.cast.label(p.host), said)
            if isinstance(said, MoverSaid)
            else Ledgered(self.cast.label(p.host), said)
            for p, said in words
        ]


def _covers(_: str, ranks: frozenset[int]) -> bool:
    return bool(ranks)


def _examined(group: str, fragments: tuple[tuple[str | None, str | None], ...]) -> Examined:
    source = fragments[0][0] is not None
    return Examined(group, fragments, _SOURCE if source else None, None if source else _DESTINATION)


def measure_core(cast: Cast) -> CoreFigures:
    """Play a job of this cast. Blocks for some seconds. Raises ProtocolError if it does not come out as it must."""
    machine = _Machine(cast)
    machine.take((Greeted(cast.hello(host)) for host in range(cast.hosts)), cast.hosts)
    machine.take(machine.spoken(cast.count(machine.view.groups[TRAINER])), cast.members)
    if not cast.live(machine.view):
        raise ProtocolError("not everybody was admitted")
    machine.events, machine.seconds = 0, 0.0
    _refit(machine)
    refit, events = machine.seconds, machine.events
    everybody = list(cast.players.values())
    return CoreFigures(
        _rate(machine, [Beaten(cast.label(host)) for host in range(cast.hosts)], 1),
        _rate(machine, _anew(machine, everybody), 1), _rate(machine, _anew(machine, everybody), _BATCH),
        refit, events,
    )  # fmt: skip


def _refit(machine: _Machine) -> None:
    cast = machine.cast
    machine.take(machine.spoken(cast.publish(1)))
    transfer = next(iter(machine.view.transfers.values()))
    machine.take(machine.words(cast.ready(transfer)))
    transfer = next(iter(machine.view.transfers.values()))
    if transfer.state is not TransferState.RUNNING:
        raise ProtocolError(f"the transfer is {transfer.state}, not running")
    machine.take([*machine.words(cast.ledgers(transfer)), *machine.words(cast.out(transfer))])
    machine.take(machine.spoken(cast.ask(1)))
    machine.take(machine.spoken(cast.pulled(machine.view.groups)))
    machine.take(machine.spoken(cast.installed(machine.view.groups)))
    serving = {machine.view.groups[name].serving for name in cast.engines}
    if serving != {1}:
        raise ProtocolError(f"engines serve {serving}, not version 1")


def _anew(machine: _Machine, players: Sequence[Player]) -> list[Event]:
    """Each says the same once more, as a new statement."""
    for player in players:
        player.state()
    return machine.spoken(players)


def _rate(machine: _Machine, events: Sequence[Event], batch: int) -> float:
    """Events per second, in a second's time or until all are taken."""
    machine.events, machine.seconds = 0, 0.0
    at = 0
    while at < len(events) and machine.seconds < _BUDGET:
        machine.step(events[at : at + batch])
        at += batch
    return machine.events / machine.seconds
