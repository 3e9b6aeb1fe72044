"""The measurements of one section, one after the other: each has a share of the section's time, what fails is reported in its
place, and what is known so far is told after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from elastic_reshard.bench.guarded import print_result
from elastic_reshard.bench.stage import within
from elastic_reshard.errors import ReshardError

__all__ = ["FAILURES", "Tell", "Way", "failure", "run_ways"]

# Called by a measurement with all that it has so far, JSON-ready: kept if it is cut, or fails.
Tell = Callable[[Mapping[str, Any]], None]
Way = Callable[[Tell], Any]

# What a measurement may fail with, and the next one goes on: torch's and CUDA's are RuntimeErrors, pydantic's ValueErrors.
FAILURES: Final = (
    ReshardError, RuntimeError, OSError, EOFError, LookupError, ValueError, TypeError, ArithmeticError, AssertionError,
)  # fmt: skip
_SHARE: Final = 1.6  # of its even part of what is left, a measurement may take
_LEAST: Final = 3.0  # seconds: with less it is not begun
_ENDING: Final = 12.0  # seconds that ending a stage may take


def failure(error: BaseException) -> dict[str, Any]:
    """How it is reported."""
    return {"error": f"{type(error).__name__}: {error}"[-1500:]}


def run_ways(seconds: float, ways: Mapping[str, Way], found: dict[str, Any]) -> dict[str, Any]:
    """Run all, in order, in so many seconds and what ending takes; results under their names in `found`, which is returned, and
    printed after each and whenever one tells something: a part that is ended from outside has told what it had. One that fails
    has what it had told, and its error."""

    def telling(name: str) -> Tell:
        def tell(so_far: Mapping[str, Any]) -> None:
            found[name] = dict(so_far)
            print_result(found)

        return tell

    # By then what is ended early has ended, too.
    end = time.monotonic() + seconds - min(_ENDING, seconds / 4)
    for number, (name, run) in enumerate(ways.items()):
        left = end - time.monotonic()
        if left < _LEAST:
            found[name] = {"error": f"not begun: the {seconds:g} s of its section were over"}
            continue
        begun = time.monotonic()
        try:
            with within(min(left, _SHARE * left / (len(ways) - number))):
                found[name] = run(telling(name))
        except FAILURES as error:
            found[name] = {**found.get(name, {}), **failure(error)}
        if isinstance(found[name], dict):
            found[name]["took s"] = round(time.monotonic() - begun, 1)
        print_result(found)
    return found
