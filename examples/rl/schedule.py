"""Which nodes are taken and given, and when: plain data. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["SHORT", "Fault", "Schedule", "full"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is taken, once the run has reached a step, or so many seconds after the fault before it.

    what: "kill": a node goes at once. "drain": it goes `seconds` after a notice. "add": a node comes. node: "spot-N", which
    has room for one engine group, or "gang-N", for the trainers. at_step: None: `after` seconds after the one before it.
    """

    what: Literal["kill", "drain", "add"]
    node: str
    at_step: int | None = None
    after: float = 0.0
    seconds: float = 0.0


class Schedule:
    """Which faults are due. Pure: told the step and the time."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._faults = list(faults)
        self._last = 0.0

    def due(self, step: int, now: float) -> list[Fault]:
        """Those whose time has come, in order; each once."""
        found = []
        while self._faults:
            first = self._faults[0]
            reached = step >= first.at_step if first.at_step is not None else now >= self._last + first.after
            if not reached:
                break
            found.append(self._faults.pop(0))
            self._last = now
        return found

    @property
    def left(self) -> int:
        """How many are still to come."""
        return len(self._faults)


def full(steps: int) -> tuple[Fault, ...]:
    """Of a run of minutes: an engine's node is killed, another one drained, the trainers' node killed, an engine's again."""
    return (
        Fault("kill", "spot-0", at_step=steps * 15 // 100),
        Fault("add", "spot-2", after=5.0),
        Fault("add", "spot-3", at_step=steps * 30 // 100),
        Fault("drain", "spot-1", at_step=steps * 35 // 100, seconds=15.0),
        Fault("kill", "gang-0", at_step=steps * 53 // 100 + 5),
        Fault("add", "gang-1", after=3.0),
        Fault("kill", "spot-2", at_step=steps * 75 // 100),
        Fault("add", "spot-4", after=5.0),
    )


# Of the short form.
SHORT = (
    Fault("kill", "spot-0", at_step=4),
    Fault("add", "spot-2", after=1.0),
    Fault("kill", "gang-0", at_step=8),
    Fault("add", "gang-1", after=1.0),
)
