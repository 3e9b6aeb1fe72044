"""Rounds: which tensors move together, so that staging stays bounded and nobody waits for a round he has no part in.

Every member goes through the same rounds, so both ends of a message meet. Tensors are taken from all holders' sets in
turn (pipeline stages send side by side), each at the earliest round at which its senders and receivers are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastic_reshard.layout.table import Int
from elastic_reshard.plan.geometry import Geometry

__all__ = ["Rounds", "schedule"]

# In a round a member may begin one tensor more than its budget, may send and receive, and two rounds are under way.
_SHARE_OF_STAGING = 8


@dataclass(frozen=True, eq=False)
class Rounds:
    """Tensor t moves in rounds first[t] .. first[t] + parts[t] - 1, an equal part of each leg in each; `order` is the
    sequence of the tensors in messages."""

    first: Int
    parts: Int
    order: Int
    count: int

    @staticmethod
    def bounds(numel: Int, quantum: Int, parts: Int, index: Int) -> tuple[Int, Int]:
        """Part `index` of `parts` of legs of that many elements, cut at quanta: (first, last)."""
        quanta = -(-numel // quantum)
        return (
            np.minimum(quanta * index // parts * quantum, numel),
            np.minimum(quanta * (index + 1) // parts * quantum, numel),
        )


def _weights(g: Geometry) -> tuple[int, int]:
    """Most bytes of one tensor that any holder sends, and that any member receives: upper bounds."""
    h, s = g.holders, g.seekers
    held = np.prod(h.hi - h.lo, axis=1, dtype=np.int64)
    wanted = np.prod(s.hi - s.lo, axis=1, dtype=np.int64)
    demand = int(np.diff(s.groups).max(initial=0))
    sent = held * np.maximum(1, -(-demand // np.maximum(1, np.diff(h.ptr))))
    received = -(-wanted[s.region] // np.maximum(1, s.width))
    return int(sent.max(initial=0)) * g.itemsize, int(received.max(initial=0)) * g.itemsize


def schedule(geometries: Sequence[Geometry], of_tensor: Sequence[int], members: int, staging: int) -> Rounds:
    """Rounds for tensors of these geometries, `of_tensor[t]` each one's. Pure and equal on every member."""
    budget = max(1, staging // _SHARE_OF_STAGING)
    weights = [_weights(g) for g in geometries]
    senders = [np.unique(g.holders.member) for g in geometries]
    receivers = [np.unique(g.seekers.member) for g in geometries]
    order = _interleaved([s.tobytes() for s in senders], [max(1, *w) for w in weights], of_tensor)
    busy_out, busy_in = np.zeros(members, dtype=np.int64), np.zeros(members, dtype=np.int64)
    first, parts = (np.zeros(len(of_tensor), dtype=np.int64) for _ in range(2))
    for t in order:
        g = of_tensor[t]
        sent, received = weights[g]
        start = max(int(busy_out[senders[g]].max(initial=0)), int(busy_in[receivers[g]].max(initial=0)))
        first[t] = start // budget
        parts[t] = max(1, -(-max(sent, received) // budget))
        busy_out[senders[g]] = start + sent
        busy_in[receivers[g]] = start + received
    return Rounds(first, parts, order, int((first + parts).max(initial=0)))


def _interleaved(sets: Sequence[bytes], weights: Sequence[int], of_tensor: Sequence[int]) -> Int:
    """Tensors of all sets of senders, so that each set is as far through its own bytes as the others."""
    total: dict[bytes, int] = {}
    middle = np.zeros(len(of_tensor))
    for t, g in enumerate(of_tensor):
        before = total.get(sets[g], 0)
        middle[t] = before + weights[g] / 2
        total[sets[g]] = before + weights[g]
    share = np.array([total[sets[g]] for g in of_tensor], dtype=np.float64)
    return np.argsort(middle / share if len(share) else middle, kind="stable")
