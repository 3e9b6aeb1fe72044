"""What is written down of groups for a driver that is started again, and what it makes of that. Pure.

Not written down: moments (clocks of another process mean nothing) and deaths, which are counted anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from elastic_reshard.on_ray.events import Phase, Run, Size, State
from elastic_reshard.on_ray.plan import begin, more

__all__ = ["STARTED", "resume", "runs", "words"]

_RAN: Final = (Phase.RUNNING, Phase.LEAVING)
STARTED: Final = (Phase.STARTING, *_RAN)  # all its workers were made


def words(state: State) -> dict[str, Any]:
    """All that must outlive the driver, for JSON."""
    return {
        "runs": [
            {"name": r.name, "fleet": r.fleet, "ranks": r.ranks, "attempt": r.attempt, "phase": str(r.phase),
             "unwanted": r.unwanted, "reason": r.reason}
            for r in state.runs.values()
        ],
        "indices": dict(state.indices),
        "grows": sorted(state.grows),
    }  # fmt: skip


def runs(said: Mapping[str, Any], sizes: Mapping[str, Size]) -> list[Run]:
    """Groups of these words, in their order, without those whose fleet is no more. A group that is of another size now is as
    one that was not started."""
    found = []
    for one in said.get("runs", ()):
        fleet, phase = str(one["fleet"]), Phase(one["phase"])
        if fleet not in sizes:
            continue
        ranks = sizes[fleet].ranks
        if ranks != int(one["ranks"]) and phase is not Phase.DONE:
            phase = Phase.PAUSED
        found.append(
            Run(str(one["name"]), fleet, ranks, phase, int(one["attempt"]),
                unwanted=bool(one["unwanted"]), reason=str(one["reason"]))
        )  # fmt: skip
    return found


def resume(said: Mapping[str, Any], sizes: Mapping[str, Size], there: Collection[str], now: float) -> State:
    """The state from which a driver goes on. there: groups all of whose workers still run, of the attempt that is written down.

    They go on; what was done stays done; all others, those given up too, are started again as a new attempt. A fleet that is
    written down has as many groups as it had, whatever its size says now; one that is not begins. Raises as `begin`."""
    fresh = begin(sizes, now)
    known = {str(name): int(count) for name, count in said.get("indices", {}).items() if name in sizes}
    kept = {run.name: _again(run, run.name in there, now) for run in runs(said, sizes)}
    state = replace(fresh, runs=kept, indices=known, grows=frozenset(str(name) for name in said.get("grows", ())))
    for name, size in sizes.items():
        if name not in known:
            state = more(state, name, size.groups, now)
    return state


def _again(run: Run, there: bool, now: float) -> Run:
    if run.phase is Phase.DONE:
        return replace(run, since=now)
    if there:
        return replace(run, phase=Phase.RUNNING if run.phase in _RAN else Phase.STARTING, since=now)
    if run.unwanted:
        return replace(run, phase=Phase.DONE, since=now)
    return replace(run, phase=Phase.PAUSED, since=now, until=now, reason="its driver was started again")
