"""Rounds: which tensors move together, so that staging stays bounded and nobody waits for a round he has no part in.

Every member goes through the same rounds, so both ends of a message meet. Tensors are taken from all holders' sets in
turn (pipeline stages send side by side), each at the earliest round at which its senders and receivers are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from elastic_reshard.layout.table import Int, volumes
from elastic_reshard.plan.geometry import Geometry
from elastic_reshard.plan.overlap import intersecting

__all__ = ["Rounds", "schedule"]

# In a round a member may begin one tensor more than its budget, may send and receive, and two rounds are under way.
_SHARE_OF_STAGING: Final = 8
# Of its budget, what a tensor of several rounds may fill on average: its legs are dealt out, not cut to measure.
_FILL: Final = (3, 4)
# Legs of tensors of several rounds are cut down to this share of a budget, and dealt out.
_PIECES: Final = 32
# Multiples of these, mod 2**32, are spread evenly over any number of rounds, whatever their stride (the plastic number's
# inverse and its square: the best pair for two counters).
_STEPS: Final = (3242174889, 2447445414)


@dataclass(frozen=True, eq=False)
class Rounds:
    """Tensor t moves in rounds first[t] .. first[t] + parts[t] - 1, an equal part of each leg in each; `order` is the
    sequence of the tensors in messages. Legs of tensors of several parts are cut to about `piece` bytes."""

    first: Int
    parts: Int
    order: Int
    count: int
    piece: int

    @staticmethod
    def spread(ordinal: Int, group: Int) -> Int:
        """A number below 2**32 for the leg of an atom to a group: legs of any member are spread evenly over them."""
        return (ordinal * _STEPS[0] + group * _STEPS[1]) & 0xFFFFFFFF

    @staticmethod
    def bounds(numel: Int, quantum: Int, parts: Int, index: Int) -> tuple[Int, Int]:
        """Part `index` of `parts` of legs of that many elements, cut at quanta: (first, last)."""
        quanta = -(-numel // quantum)
        return (
            np.minimum(quanta * index // parts * quantum, numel),
            np.minimum(quanta * (index + 1) // parts * quantum, numel),
        )


def _weights(g: Geometry) -> tuple[int, int]:
    """Most bytes of one tensor that any holder sends (or shows its domain), and that any member receives: upper bounds."""
    h, s = g.holders, g.seekers
    held = volumes(h.lo, h.hi)[h.entry_row]
    wanted = volumes(s.lo, s.hi)[s.region]
    sent, received = (np.zeros(len(g.domains), dtype=np.int64) for _ in range(2))
    np.add.at(sent, h.member, _net_elements(g, held) + held * _near_copies(g))
    np.add.at(received, s.member, (-(-wanted // np.maximum(1, s.width)))[s.entry_group])
    return int(sent.max(initial=0)) * g.itemsize, int(received.max(initial=0)) * g.itemsize


def _net_elements(g: Geometry, held: Int) -> Int:
    """Elements that each holder's entry sends at most: its part of the demand line, and for each place where the line is
    cut one quantum of each atom (see `Atoms.quantum`); never more than its box once for each demand that it touches."""
    h, s = g.holders, g.seekers
    own = np.isin(g.domains[h.member], s.domain)
    others = len(np.unique(s.domain)) - own
    demand = np.minimum(int(np.diff(s.groups).max(initial=0)), others)
    replicas = np.diff(h.ptr)[h.entry_row]
    touched = -(-demand // replicas)
    row, _ = intersecting(h.lo, h.hi, s.lo, s.hi)
    atoms = np.bincount(row, minlength=len(h.lo))[h.entry_row]
    quanta = held // (32 * replicas) + 2 * atoms * max(1, g.min_stripe // g.itemsize)
    found: Int = np.minimum(held * touched, -(-held * demand // replicas) + (touched + 1) * quanta)
    return found


def _near_copies(g: Geometry) -> Int:
    """How many copies of its box each holder's entry lays out at most for readers in its domain. Readers that want the
    same range share one; when several holders serve more readers than they are, ranges differ at both ends of a share."""
    h, s = g.holders, g.seekers
    domain = g.domains[h.member]
    readers = np.zeros(int(g.domains.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(readers, s.domain, s.width)
    key = h.entry_row * len(readers) + domain
    _, at, count = np.unique(key, return_inverse=True, return_counts=True)
    alone = (count[at] == 1) | (readers[domain] <= count[at])
    seekers = np.unique(s.member)
    others = np.bincount(g.domains[seekers], minlength=len(readers))[domain] - np.isin(h.member, seekers)
    copies: Int = np.where(others == 0, 0, np.where(alone, 1, 3))
    return copies


def schedule(
    geometries: Sequence[Geometry],
    of_tensor: Sequence[int],
    members: int,
    staging: int,
    landed: Mapping[int, tuple[Int, int]],
) -> Rounds:
    """Rounds for tensors of these geometries, `of_tensor[t]` each one's. Pure and equal on every member.

    landed: of tensors with landed cells, who holds them and the most bytes any of them sends.
    """
    budget = max(1, staging // _SHARE_OF_STAGING)
    weights = [_weights(g) for g in geometries]
    senders = [np.unique(g.holders.member) for g in geometries]
    receivers = [np.unique(g.seekers.member) for g in geometries]
    order = _interleaved([s.tobytes() for s in senders], [max(1, *w) for w in weights], of_tensor)
    busy_out, busy_in = np.zeros(members, dtype=np.int64), np.zeros(members, dtype=np.int64)
    first, parts = (np.zeros(len(of_tensor), dtype=np.int64) for _ in range(2))
    for t in order:
        g = of_tensor[t]
        (sent, received), sending = weights[g], senders[g]
        if int(t) in landed:
            holders, load = landed[int(t)]
            sent, sending = max(sent, load), np.union1d(sending, holders)
        start = max(int(busy_out[sending].max(initial=0)), int(busy_in[receivers[g]].max(initial=0)))
        first[t] = start // budget
        most = max(sent, received)
        if most > budget * _FILL[0] // _FILL[1]:
            parts[t] = -(-most * _FILL[1] // (budget * _FILL[0]))
            end = int(first[t] + parts[t]) * budget  # whose last round nothing else shares
            busy_out[sending] = busy_in[receivers[g]] = end
        else:
            parts[t] = 1
            busy_out[sending] = start + sent
            busy_in[receivers[g]] = start + received
    return Rounds(first, parts, order, int((first + parts).max(initial=0)), max(1, budget // _PIECES))


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
