"""`bench recovery`: weights between hosts, and how long it takes to go on after the loss of anything.

Two trainers on hosts of their own, two engines of TP2 on hosts of theirs: four labels of one machine, a real process for
everything. Every version is checked bit for bit in every engine. What a figure is compared with is taken in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic_reshard.bench import recovery_faults as faults
from elastic_reshard.bench.play import Play
from elastic_reshard.bench.recovery_many import many
from elastic_reshard.bench.recovery_warm import warm
from elastic_reshard.bench.rows import Row
from elastic_reshard.bench.stage import Stage
from elastic_reshard.bench.synthetic import transformer, uniform

__all__ = ["RecoverySetup", "measure_recovery", "memory_needed", "steps"]

TRAINERS, ENGINES = ("a", "b"), (("c", "c"), ("d", "d"))
_RANKS = 2


@dataclass(frozen=True)
class RecoverySetup:
    """nbytes: of the model; small: of the model that is rebuilt for `rebuilds` times. repeats: refits without a fault."""

    nbytes: int = 1 << 30
    repeats: int = 5
    rebuilds: int = 200
    small: int = 8 << 20


def memory_needed(setup: RecoverySetup) -> int:
    """Bytes: trainers' tensors, two slots, and the bare copy's; three engines' tensors and two landing slots; processes."""
    return setup.nbytes * (1 + 2 + 2 + 3 + 6) + (2 << 30)


def steps(setup: RecoverySetup) -> int:
    """How often `measure_recovery` says what it does."""
    return setup.repeats + 10 + setup.rebuilds


def measure_recovery(setup: RecoverySetup, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measure everything; blocks for minutes. No process of it is left, whatever happens. Raises ReshardError for what
    could not be carried out at all; wrong bytes and outcomes are in the rows."""
    rows = []
    for part in (_hosts, _stuck, _many):
        say(f"{part.__name__.strip('_')}: starting processes")
        rows += part(setup, say)
    return rows


def _played(stage: Stage, play: Play, rows: list[Row]) -> list[Row]:
    """With what was found wrong at the end."""
    wrong = [*play.wrong, *(f"{left} did not go by itself" for left in stage.left)]
    rows[-1].beside |= {"wrong": [*rows[-1].beside.get("wrong", []), *wrong]} if wrong else {}
    rows[-1].right &= not wrong
    return rows


def _hosts(setup: RecoverySetup, say: Callable[[str], None]) -> list[Row]:
    layouts = transformer(setup.nbytes, len(TRAINERS), len(ENGINES), _RANKS)
    with Stage() as stage:
        play = Play(stage, layouts, TRAINERS, ENGINES)
        rows, whole = warm(stage, play, setup.repeats, say)
        for name, gang in (("sending", play.trainer), ("receiving", play.engines[0])):
            say(f"a {name} mover is killed")
            rows.append(faults.mover_killed(play, name, gang, whole))
        say("the supervisor is killed")
        rows.append(faults.supervisor_killed(stage, play))
        say("an engine joins on another host")
        rows.append(faults.joiner(stage, play))
        say("a host vanishes")
        rows.append(faults.host_vanishes(stage, play, whole))
    return _played(stage, play, rows)


def _stuck(setup: RecoverySetup, say: Callable[[str], None]) -> list[Row]:
    """Messages so large that gloo does not tell a peer's death: survivors hang until they are condemned."""
    layouts = uniform(setup.nbytes, len(TRAINERS), len(ENGINES), _RANKS)
    with Stage(cell=faults.LARGE) as stage:
        play = Play(stage, layouts, TRAINERS, ENGINES)
        for _ in range(2):
            play.refit()
        say("a peer is killed in a large message")
        rows = [faults.condemned(stage, play)]
    return _played(stage, play, rows)


def _many(setup: RecoverySetup, say: Callable[[str], None]) -> list[Row]:
    layouts = transformer(setup.small, len(TRAINERS), len(ENGINES), _RANKS)
    with Stage() as stage:
        play = Play(stage, layouts, TRAINERS, ENGINES)
        rows = [many(stage, play, setup.rebuilds, say)]
    return _played(stage, play, rows)
