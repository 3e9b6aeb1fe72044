"""How often the state machine is stepped, by what a step has cost. With few members: at once, and ten times a second when
nothing happens. With many a step takes longer, and one step for all that comes meanwhile is worth a short wait. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["Pace"]

_TICK: Final = 0.1  # seconds between two looks at the clock when nothing happens
_CHEAP: Final = 0.002  # seconds; a step that costs less is never waited for
_LONGEST: Final = 0.08  # seconds that anything is held up for company
_PATIENCE: Final = 4.0  # steps' time
_SHARE: Final = 10.0  # steps in which nothing happens take at most a tenth of the time
_WEIGHT: Final = 0.3  # of the latest step


class Pace:
    """beat: seconds between a host's signs of life: judging may lag behind them by a quarter of that at most."""

    def __init__(self, beat: float) -> None:
        self._slowest = max(_TICK, beat / 4)
        self._cost = 0.0

    def took(self, seconds: float) -> None:
        """A step has been done, disk and telling included."""
        self._cost += _WEIGHT * (seconds - self._cost)

    @property
    def idle(self) -> float:
        """Seconds until the next look at the clock."""
        return min(self._slowest, max(_TICK, _SHARE * self._cost))

    @property
    def gather(self) -> float:
        """Seconds to wait at most, after something has come, for what comes with it."""
        return 0.0 if self._cost < _CHEAP else min(_LONGEST, _PATIENCE * self._cost)

    @property
    def pause(self) -> float:
        """Seconds in which something more must come for the wait to go on."""
        return self.gather / 16
