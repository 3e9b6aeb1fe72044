"""`bench recovery`: communicators formed anew for hundreds of times, movers lost among them; nothing may grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from elastic_reshard.bench.census import count
from elastic_reshard.bench.play import Play
from elastic_reshard.bench.recovery_faults import kill
from elastic_reshard.bench.rows import Row
from elastic_reshard.bench.stage import Stage, until

__all__ = ["many"]

_COUNTS = ("processes", "descriptors", "threads", "memfd", "memfds")


def many(stage: Stage, play: Play, rebuilds: int, say: Callable[[str], None]) -> Row:
    """Every refit forms a communicator anew; each fifth loses a mover, all in their turn."""
    losses = _Losses(stage, play)
    for n in range(min(20, rebuilds)):  # every mover was lost once
        losses.refit(n % 3 == 0)
    before, formed = _quiet(stage, play), losses.formed()
    begun = time.monotonic()
    for n in range(rebuilds):
        losses.refit(n % 5 == 4)
        say(f"rebuild {n + 1}")
    seconds, formed = time.monotonic() - begun, losses.formed() - formed
    after = _quiet(stage, play)
    grown = _grown(before, after)
    return Row(
        f"{rebuilds} refits in a row, {formed} communicators formed, {rebuilds // 5} movers killed: each",
        seconds / rebuilds, "s", "descriptors, threads, memory, processes flat", None, not grown,
        {"before": before, "after": after} | ({"wrong": grown} if grown else {}),
    )  # fmt: skip


class _Losses:
    """Refits of which some lose a mover, each in its turn."""

    def __init__(self, stage: Stage, play: Play) -> None:
        self._stage, self._play, self._turn = stage, play, 0

    def refit(self, lost: bool) -> None:
        """One version."""
        play = self._play
        calls = play.begin()
        if lost:
            play.running()  # or it is over: then the mover is lost between two transfers
            movers = sorted(self._stage.movers().items())
            kill(movers[self._turn % len(movers)][1])
            self._turn += 1
        play.finish(calls)

    def formed(self) -> int:
        """Transfers that were formed so far."""
        return sum(e.event == "transfer.running" for e in self._stage.events())


def _quiet(stage: Stage, play: Play) -> dict[str, dict[str, int]]:
    """What the job's processes hold, by kind, when nothing is under way and every mover is there."""
    members = len(play.trainer) + sum(map(len, play.engines))
    play.refit()
    play.idle()
    until(lambda: len(stage.movers()) == members, "every member has its mover")
    return until(_Still(stage), "what the processes hold does not change", every=0.25)


class _Still:
    """What the job's processes hold, once two looks in a row saw the same: what is being closed is gone by then."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._last: dict[str, dict[str, int]] = {}

    def __call__(self) -> dict[str, dict[str, int]] | None:
        living = sorted(self._stage.living().items())
        pids = {kind: [pid for pid, _ in found] for kind, found in living}
        pids["all"] = [pid for found in pids.values() for pid in found]
        last, self._last = self._last, {kind: count(found).to_data() for kind, found in pids.items()}
        return self._last if _whole(last) == _whole(self._last) else None


def _whole(held: Mapping[str, Mapping[str, int]]) -> dict[str, tuple[int, ...]]:
    return {kind: tuple(numbers[key] for key in _COUNTS) for kind, numbers in held.items()}


def _grown(before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What there is more of than before. Memory of their own may grow by what allocators keep and the record of events."""
    found = []
    for kind, held in after.items():
        if kind == "all":
            continue
        known = before.get(kind, dict.fromkeys(held, 0))
        found += [f"{key} of {kind}: {known[key]} to {held[key]}" for key in _COUNTS if held[key] > known[key]]
        if held["anonymous"] > 1.05 * known["anonymous"] + (8 << 20):
            found.append(f"memory of {kind}: {known['anonymous']} to {held['anonymous']} bytes")
    return found
