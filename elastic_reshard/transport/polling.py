"""Waiting without a call that cannot be left: ask, look around, sleep a little."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

__all__ = ["poll", "whole_ms"]

# Asked without sleeping at first, for what takes less than the shortest sleep (70 us on Linux); then sleeps are an eighth of
# the time waited so far, at most the longest.
_AWAKE_S: Final = 100e-6
_LONGEST_S: Final = 0.5e-3
_SHORTEST_S: Final = 20e-6


def poll(done: Callable[[], bool], deadline: float, look: Callable[[], None] = lambda: None) -> bool:
    """Whether it is done; blocks until then, at most until `deadline` (time.monotonic). look: called between; what it raises
    ends the wait."""
    begun = time.monotonic()
    while not done():
        look()
        now = time.monotonic()
        if now >= deadline:
            return False
        if now - begun < _AWAKE_S:
            continue
        time.sleep(min(_LONGEST_S, max(_SHORTEST_S, (now - begun) / 8), deadline - now))
    return True


def whole_ms(seconds: float) -> timedelta:
    """A limit for torch's waits, which count whole milliseconds: rounded up, at least one. Rounded down, as they do it, a wait
    ends before its deadline, and looks like a connection that broke."""
    return timedelta(milliseconds=max(1, math.ceil(1000 * seconds)))
