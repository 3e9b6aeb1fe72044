"""Routing: which holder serves which part of an atom, and which member of a domain receives it.

The demand line. An atom that G demanders want is G copies of its elements laid end to end; its S holders cut that line
into S equal parts. So every holder sends the same, whatever G and S are, and no demander is cut more often than it
must be. Members of a receiving domain cut what enters the domain in the same way. Cuts fall on quanta.

Labels (which holder, which receiver) are turned by one place from tensor to tensor, so that what is too small to cut
is spread over all of them as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from elastic_reshard.layout.table import Int
from elastic_reshard.plan.geometry import Atoms
from elastic_reshard.plan.overlap import ragged

__all__ = ["Pieces", "Routes"]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Quanta first[i]:last[i] of a pair's atom, from the holder and to the receiver with these labels (not yet turned)."""

    pair: Int
    first: Int
    last: Int
    source: Int
    receiver: Int


def _cut(quanta: Int, cuts: tuple[tuple[Int, Int], tuple[Int, Int]], origin: tuple[Int, Int]) -> Pieces:
    """Cut each pair's quanta at both sets of (pair, position); labels count the cuts passed, from `origin`."""
    count = len(quanta)
    pair = np.concatenate([np.arange(count), cuts[0][0], cuts[1][0]])
    position = np.concatenate([np.zeros(count, dtype=np.int64), cuts[0][1], cuts[1][1]])
    kind = np.repeat(np.array([2, 0, 1]), [count, len(cuts[0][0]), len(cuts[1][0])])
    order = np.lexsort((position, pair))  # stable, so a pair's beginning comes first
    pair, position, kind = pair[order], position[order], kind[order]
    begin = np.searchsorted(pair, np.arange(count))[pair] if count else pair
    end = np.append(position[1:], 0)
    last_of_pair = np.append(pair[1:] != pair[:-1], True)[: len(pair)]
    end = np.where(last_of_pair, quanta[pair], end)
    labels = []
    for k in (0, 1):
        passed = np.cumsum(kind == k)
        labels.append(origin[k][pair] + passed - passed[begin] if count else passed)
    kept = end > position
    return Pieces(pair[kept], position[kept], end[kept], labels[0][kept], labels[1][kept])


def _line_cuts(index: Int, demanders: Int, parts: Int, length: Int) -> tuple[Int, tuple[Int, Int]]:
    """Where demander `index`'s stretch of the line is cut: (label at its beginning, (pair, position) of each cut)."""
    first = index * parts // demanders
    last = -(-((index + 1) * parts) // demanders) - 1
    pair, label = ragged(np.maximum(last - first, 0), first + 1)
    position = label * (demanders * length)[pair] // parts[pair] - (index * length)[pair]
    return first, (pair, np.clip(position, 0, length[pair]))


class Routes:
    """Routing of some atoms. Pure arithmetic on arrays; equal on every member that asks about the same atom."""

    def __init__(self, atoms: Atoms) -> None:
        self.atoms = atoms
        self.seekers = atoms.geometry.seekers
        self._groups = max(1, len(self.seekers.region))
        group = self.seekers.group_at(atoms.region[atoms.entry_atom], atoms.geometry.domains[atoms.member])
        entries = np.flatnonzero(group >= 0)
        key = atoms.entry_atom[entries] * self._groups + group[entries]
        order = np.lexsort((atoms.member[entries], key))
        # Pairs (atom, group) whose domain has a holder of its own, and those holders.
        self._local, first = np.unique(key[order], return_index=True)
        self._local_ptr = np.append(first, len(order))
        self.local_entry = atoms.entry[entries[order]]

    def _span(self, atom: Int) -> tuple[Int, Int]:
        return (
            np.searchsorted(self._local, atom * self._groups),
            np.searchsorted(self._local, (atom + 1) * self._groups),
        )

    def local_at(self, atom: Int, group: Int) -> Int:
        """Index of the pair among the local ones, -1 for a pair that must be served over the network."""
        key = atom * self._groups + group
        at = np.searchsorted(self._local, key)
        if not len(self._local):
            return np.full(len(key), -1, dtype=np.int64)
        return np.where(self._local[np.minimum(at, len(self._local) - 1)] == key, at, -1)

    def local_groups(self, atom: Int) -> tuple[Int, Int]:
        """(index into `atom`, group) for every group whose domain has a holder of the atom."""
        begin, end = self._span(atom)
        row, at = ragged(end - begin, begin)
        return row, self._local[at] % self._groups

    def local_holders(self, at: Int) -> tuple[Int, Int]:
        """(first, number) of the pairs' holders in `local_entry`, the holders' entries of all local pairs."""
        return self._local_ptr[at], self._local_ptr[at + 1] - self._local_ptr[at]

    @cached_property
    def _in_region(self) -> Int:
        """Elements of all atoms of each atom's region."""
        a = self.atoms
        total = np.zeros(int(a.region.max(initial=-1)) + 1, dtype=np.int64)
        np.add.at(total, a.region, a.numel)
        return total[a.region]

    @cached_property
    def _local_sums(self) -> tuple[Int, Int]:
        """Local pairs by (group, atom), and the running sum of their elements (one longer)."""
        atom, group = self._local // self._groups, self._local % self._groups
        order = np.lexsort((atom, group))
        sums = np.concatenate([[0], np.cumsum(self.atoms.numel[atom[order]])])
        return (group * (len(self.atoms.lo) + 1) + atom)[order], sums.astype(np.int64)

    def _stretch(self, atom: Int, group: Int) -> tuple[Int, Int]:
        """Of what must enter the group's domain for the atom's region: (elements before the atom, all elements)."""
        keys, sums = self._local_sums
        stride = len(self.atoms.lo) + 1
        begin = sums[np.searchsorted(keys, group * stride)]
        here = sums[np.searchsorted(keys, group * stride + atom)]
        end = sums[np.searchsorted(keys, (group + 1) * stride)]
        return self.atoms.before[atom] - (here - begin), self._in_region[atom] - (end - begin)

    def remote(self, atom: Int, group: Int) -> Pieces:
        """Pieces of remote pairs: sources are labels into the atom's holders, receivers into the group's members."""
        a, s = self.atoms, self.seekers
        region = a.region[atom]
        begin, end = self._span(atom)
        earlier = np.searchsorted(self._local, atom * self._groups + group) - begin
        index = group - s.groups[region] - earlier
        demanders = s.groups[region + 1] - s.groups[region] - (end - begin)
        quanta = a.quanta[atom]
        source, by_source = _line_cuts(index, demanders, a.copies[atom], quanta)
        before, length = self._stretch(atom, group)
        width = s.width[group]
        receiver = before * width // length
        last = -(-((before + a.numel[atom]) * width) // length) - 1
        pair, label = ragged(np.maximum(last - receiver, 0), receiver + 1)
        place = (label * length[pair] // width[pair] - before[pair]) // a.quantum[atom][pair]
        return _cut(quanta, (by_source, (pair, np.clip(place, 0, quanta[pair]))), (source, receiver))

    def local(self, at: Int, reader: Int) -> Pieces:
        """Pieces of local pairs for the reader with that position in its group; sources are labels into the pair's
        local holders. Receivers have no meaning here."""
        atom, group = self._local[at] // self._groups, self._local[at] % self._groups
        quanta = self.atoms.quanta[atom]
        _, holders = self.local_holders(at)
        source, cuts = _line_cuts(reader, self.seekers.width[group], holders, quanta)
        none = np.zeros(0, dtype=np.int64)
        return _cut(quanta, (cuts, (none, none)), (source, np.zeros(len(at), dtype=np.int64)))

    def holds(self, atom: Int, member: int) -> npt.NDArray[np.bool_]:
        """Whether the member holds each of the atoms."""
        mine = np.unique(self.atoms.entry_atom[self.atoms.member == member])
        return np.isin(atom, mine)
