"""A peer is killed or frozen while NCCL moves, and which ways out return on the survivors. Nothing of this project is in it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elastic_reshard.bench import gpu_nccl as on
from elastic_reshard.bench.gpu_ways import FAILURES, failure
from elastic_reshard.bench.stage import Call

__all__ = ["Case", "cases", "play"]

_FLIGHT = {"m2n": 1 << 30, "allreduce": 64 << 20}  # bytes of one operation; all-reduces go through the host on one GPU
_TIMES = {"m2n": 400, "allreduce": 20}  # operations that survivors launch
_VICTIMS = 0.25  # the part of them that the victim launches: a frozen process's GPU still does what was launched
_TRIES = 3
_FORM = 90.0


@dataclass(frozen=True)
class Case:
    """what: "m2n" or "allreduce"; how: "abort", "shrink" or "revoke"; fault: SIGKILL or SIGSTOP to the last rank."""

    what: str
    how: str
    fault: signal.Signals

    def __str__(self) -> str:
        return f"{self.what} in flight, peer {self.fault.name}, {self.how}"


def cases() -> list[Case]:
    """What is shown; the all-reduce shows that the same ways out work where M2N is not in them."""
    found = [Case("allreduce", "abort", signal.SIGKILL)]
    for fault in (signal.SIGKILL, signal.SIGSTOP):
        found += [Case("m2n", how, fault) for how in ("abort", "shrink", "revoke")]
    return found


def play(size: int, gpus: int, limit: float) -> Iterator[dict[str, Any]]:
    """Each case in processes of its own; what was seen, or how it failed, one after the other. limit: seconds that survivors
    are given."""
    todo = cases()
    waiting = on.Ranks(size, gpus).__enter__()  # imports take seconds: the next processes import meanwhile
    for number, case in enumerate(todo):
        ranks, begun = waiting, time.monotonic()
        if number + 1 < len(todo):
            waiting = on.Ranks(size, gpus).__enter__()
        try:
            found = _case(ranks, case, limit)
        except FAILURES as error:
            found = failure(error)
        ended = time.monotonic()
        ranks.__exit__(None, None, None)
        yield {
            "case": str(case), "what": case.what, "how": case.how, "fault": case.fault.name, **found,
            "all ended by SIGKILL in s": round(time.monotonic() - ended, 2), "took s": round(time.monotonic() - begun, 1),
        }  # fmt: skip


def _case(ranks: on.Ranks, case: Case, limit: float) -> dict[str, Any]:
    victim = ranks.size - 1
    survivors = list(range(victim))
    formed = ranks.form()
    one = max(ranks.do(on.warm, case.what, _FLIGHT[case.what], limit=_FORM))
    times = _TIMES[case.what]
    for attempt in range(_TRIES):
        flying = ranks.begin(on.fly, case.what, times, ranks=survivors)
        flying |= ranks.begin(on.fly, case.what, int(_VICTIMS * times), ranks=[victim])
        flying[victim].result(10)
        os.kill(ranks.actors[victim].pid, case.fault)
        for rank in survivors:
            flying[rank].result(10)
        time.sleep(1.0)  # whatever was on its way without the victim has arrived
        seen = {rank: _answer(call, 5) for rank, call in ranks.begin(on.probe, ranks=survivors).items()}
        if any(not s.get("done") for s in seen.values()):
            break
        if case.fault is signal.SIGKILL:
            return {"error": f"all of it had arrived before the fault (attempt {attempt + 1}); nothing was in flight"}
        os.kill(ranks.actors[victim].pid, signal.SIGCONT)
    left = ranks.begin(on.leave, case.how, [victim], limit, ranks=survivors)
    ways = {rank: _answer(call, limit + 5) for rank, call in left.items()}
    back = [rank for rank, way in ways.items() if way.get("returned")]
    errors = sorted({str(s.get("async error")) for s in seen.values()})
    raised = sorted({way["error"] for way in ways.values() if way.get("error")})
    return {
        "formed s": round(formed, 2), "one operation ms": round(1e3 * one, 1), "async errors": errors,
        "in flight on": [rank for rank, s in seen.items() if not s.get("done")], "returned on": back,
        "of survivors": len(survivors), "within s": limit,
        "seconds": [ways[rank]["seconds"] for rank in back], "raised": raised,
        "hangs": len(back) < len(survivors),
    }  # fmt: skip


def _answer(call: Call, limit: float) -> dict[str, Any]:
    """A survivor's answer; that it gave none is one too."""
    if not call.done(limit):
        return {"returned": False, "seconds": None, "error": "the process did not even answer", "done": False}
    found: dict[str, Any] = call.result(1)
    return found
