"""Calls of actors that always end: with a deadline of their own beside what they are asked to wait."""

from __future__ import annotations

from typing import Any

import ray

from rl.settings import RunFailed

__all__ = ["get"]

_REPLY = 60.0  # seconds that a busy machine may need beside


def get(call: Any, wait: float = 0.0) -> Any:
    """The answer of a call of the hub, which waits `wait` seconds at most. RunFailed if there is none: the hub is on the
    node that is never taken, so the run is over."""
    try:
        return ray.get(call, timeout=wait + _REPLY)
    except ray.exceptions.GetTimeoutError as error:
        raise RunFailed(f"the hub did not answer within {wait + _REPLY:g} s") from error
