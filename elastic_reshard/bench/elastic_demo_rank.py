"""What a member's process of the elastic demo is asked to do, beside `bench.rank`."""

from __future__ import annotations

import time

from elastic_reshard.bench import values
from elastic_reshard.bench.rank import State

__all__ = ["publish", "resign"]

_DEADLINE = 100.0


def publish(state: State, version: int, label: str) -> dict[str, float]:
    """Write a version's values into the live tensors and publish them; does not wait for the commit. The tensors are wiped
    afterwards, as by further training. When it was called and returned (time.monotonic), and its bytes."""
    values.fill(state.at.layout, state.tensors, state.at.rank, version)
    begun = time.monotonic()
    publication = state.m.publish(label, timeout=_DEADLINE)
    returned = time.monotonic()
    values.poison(state.tensors)
    return {"begun": begun, "returned": returned, "nbytes": float(publication.nbytes)}


def resign(state: State) -> None:
    """Wait until this member is asked to leave, and leave."""
    for event in state.m.watch(timeout=_DEADLINE):
        if event.kind == "leave":
            state.m.leave(_DEADLINE)
            return
