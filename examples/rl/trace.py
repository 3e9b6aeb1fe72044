"""What a run's events say: pace, lag, refit times, and what each fault cost. Pure.

**What a fault cost**, measured the same way for every mode. A fault is a node that is killed, or the notice that it will be, at
`t0`, when the newest step of the line was `s0`. The pace before is the median time between steps of the last 10. The run has
*recovered* at the first step `s` at `t` from which on, at once,
  1. `s > s0`: steps that were lost with the trainers have been trained again;
  2. the last 3 steps went, on average, at no more than 1.5 times the pace before;
  3. every engine group serves weights of the present line that were published after `t0`, the group that was hit a new one.
**Recovery** is `t - t0`. **Wall-clock lost** is `t - t0 - (s - s0) * pace`: by how much the run is behind one without it.
Where the next fault comes before recovery, the first one is charged with both (`overlaps`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

__all__ = ["Cost", "Trace", "read"]

Event = Mapping[str, Any]
_BEFORE, _AFTER, _SLOWER = 10, 3, 1.5
_FINAL = 10  # steps, of whose rewards the final reward is the mean


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one fault. recovery, lost: seconds; None: it had not recovered when the run ended. overlaps: nor when the next
    came."""

    at: float
    step: int
    what: str
    node: str
    pace: float
    recovery: float | None
    lost: float | None
    overlaps: bool = False


class Trace:
    """The events of one run, in the order of their times. Seconds count from its first step."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = sorted(events, key=lambda event: float(event["t"]))
        about = self._all("run")
        self.about: Event = about[0] if about else {}
        self.steps = self._all("step")
        self.zero = float(self.steps[0]["t"]) if self.steps else 0.0

    def _all(self, *names: str) -> list[Event]:
        return [event for event in self.events if event["event"] in names]

    def at(self, event: Event) -> float:
        """When it was."""
        return float(event["t"]) - self.zero

    @property
    def seconds(self) -> float:
        """From the first step to the last."""
        return self.at(self.steps[-1]) if self.steps else 0.0

    def final(self) -> dict[int, Event]:
        """The steps of the line that counts, by number: the last time that each was trained."""
        return {int(step["step"]): step for step in self.steps}

    @property
    def final_reward(self) -> float:
        """Mean over the last steps."""
        counted = self.final()
        return mean(float(counted[number]["reward"]) for number in sorted(counted)[-_FINAL:]) if counted else 0.0

    @property
    def checked(self) -> int:
        """Samples whose log-probabilities were recomputed under their version."""
        return sum(int(step["checked"]) for step in self.steps)

    @property
    def difference(self) -> float:
        """The largest difference that was found."""
        return max((float(step["difference"]) for step in self.steps), default=0.0)

    @property
    def counts(self) -> Mapping[str, int]:
        """What the buffer counted."""
        ends = self._all("end")
        return dict(ends[-1]["counts"]) if ends else {}

    def refits(self) -> list[tuple[float, float]]:
        """(when it was published, seconds until the last engine group that took it had installed it) of each version."""
        taken: dict[tuple[str, int], float] = {}
        for event in self._all("install"):
            taken[str(event["line"]), int(event["step"])] = float(event["t"])
        found = []
        for event in self._all("publish"):
            end = taken.get((str(event["line"]), int(event["step"])))
            if end is not None:
                found.append((self.at(event), end - float(event["t"])))
        return found

    def faults(self) -> list[Event]:
        """Kills and notices; the kill that a notice was of is not counted again."""
        return [e for e in self._all("fault") if e["what"] in ("kill", "drain") and not e.get("noticed")]

    def costs(self) -> list[Cost]:
        """Of each fault."""
        faults = self.faults()
        ends = [*(float(fault["t"]) for fault in faults[1:]), float("inf")][: len(faults)]
        return [self._cost(fault, end) for fault, end in zip(faults, ends, strict=True)]

    def _cost(self, fault: Event, following: float) -> Cost:
        begun = float(fault["t"])
        before = [step for step in self.steps if float(step["t"]) <= begun][-_BEFORE - 1 :]
        gaps = [float(b["t"]) - float(a["t"]) for a, b in pairwise(before)]
        pace, reached = (median(gaps) if gaps else 0.0), int(before[-1]["step"]) if before else 0
        about = (begun - self.zero, reached, str(fault["what"]), str(fault["node"]), pace)
        ready = self._served(fault)
        for i, step in enumerate(self.steps):
            t, last = float(step["t"]), self.steps[max(0, i - _AFTER) : i + 1]
            if ready is None or t < ready or t <= begun or int(step["step"]) <= reached or len(last) <= _AFTER:
                continue
            whole = int(step["step"]) - int(last[0]["step"]) == _AFTER
            if whole and (t - float(last[0]["t"])) / _AFTER <= _SLOWER * pace:
                lost = t - begun - (int(step["step"]) - reached) * pace
                return Cost(*about, t - begun, lost, t > following)
        return Cost(*about, None, None, following < float("inf"))

    def _served(self, fault: Event) -> float | None:
        """From when on every engine group serves what was published after the fault, by whoever trains then."""
        begun, engines = float(fault["t"]), int(self.about["engines"])
        hit = "engine.gone" if str(fault["node"]).startswith("spot") else "begin"
        seen, line = False, None
        published: set[tuple[str, int]] = set()
        served: set[str] = set()
        for event in self.events:
            if float(event["t"]) <= begun:
                continue
            seen = seen or event["event"] == hit
            if event["event"] == "publish":
                published.add((str(event["line"]), int(event["step"])))
            elif event["event"] == "engine.gone":
                served.discard(str(event["group"]))
            elif event["event"] == "begin":
                line = str(event["line"])
                served.clear()
            elif event["event"] == "install" and (event["line"], event["step"]) in published:
                if line is None or event["line"] == line:
                    served.add(str(event["group"]))
                if seen and len(served) == engines:
                    return float(event["t"])
        return None


def read(path: Path) -> Trace:
    """A run's file of events; a line that was cut off by the run's end is left out."""
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return Trace(events)
