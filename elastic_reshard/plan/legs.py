"""Legs: what one member sends, receives, serves and pulls. Arrays; one row is one linear range of one atom of one tensor.

kind      what moves                                              sender's memory       receiver's memory
SELF      a member's own source to its own destination            source tensor         destination tensor
LOCAL     a source in the receiver's domain, pulled by the reader  source tensor         destination tensor
NET       into a domain, once                                      source tensor         destination tensor (landed)
LANDED    what a member of the domain received, pulled by others   its destination       destination tensor
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_reshard.layout.table import Int
from elastic_reshard.plan.geometry import Atoms, Geometry
from elastic_reshard.plan.overlap import ragged
from elastic_reshard.plan.rounds import Rounds
from elastic_reshard.plan.routing import Routes

__all__ = ["Kind", "Legs", "offsets", "streaming_legs"]

_SOURCE, _DESTINATION = 0, 1


class Kind(IntEnum):
    """How a leg moves."""

    SELF = 0
    LOCAL = 1
    NET = 2
    LANDED = 3


@dataclass(frozen=True, eq=False)
class Legs:
    """Columns of equal length. For tensors of one geometry; `tensor` counts within it until the plan renumbers it.

    lo, extent: the atom, in destination coordinates. first, last: the elements of it that move, in C order.
    source_at: where the atom begins in the sender's local tensor (source tensor with dims in destination order; for
    LANDED the sender's destination tensor). target_at: where in the receiver's local destination tensor. Each is right
    on the sides that need it: readers know both. round: when it moves. install: moves when the member installs, in no
    round. cell: its cell in landing plans, else -1. grain: elements between places where the leg may be cut further.
    spread: below 2**32, the same at both ends: the place among the rounds of its tensor, in 2**32ths (`Rounds.spread`).
    """

    kind: Int
    out: npt.NDArray[np.bool_]
    peer: Int
    tensor: Int
    way: Int
    region: Int
    ordinal: Int
    first: Int
    last: Int
    lo: Int
    extent: Int
    source_at: Int
    target_at: Int
    round: Int
    install: npt.NDArray[np.bool_]
    cell: Int
    grain: Int
    spread: Int

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def numel(self) -> Int:
        """Elements that each leg moves."""
        return self.last - self.first

    def take(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Legs:
        """The chosen rows, in that order."""
        return Legs(*(getattr(self, f.name)[index] for f in fields(self)))

    def replace(self, **columns: npt.NDArray[Any]) -> Legs:
        """With other values in some columns."""
        return Legs(*(columns.get(f.name, getattr(self, f.name)) for f in fields(self)))

    @staticmethod
    def concat(parts: Iterable[Legs], dims: int) -> Legs:
        """One after another, boxes padded to `dims`."""
        padded = list(parts)

        def wide(part: Legs, name: str) -> npt.NDArray[np.int64]:
            column: npt.NDArray[np.int64] = getattr(part, name)
            if column.ndim == 2 and column.shape[1] < dims:
                fill = 1 if name == "extent" else 0
                return np.pad(column, ((0, 0), (0, dims - column.shape[1])), constant_values=fill)
            return column

        if not padded:
            none, box, no = (
                np.zeros(0, dtype=np.int64),
                np.zeros((0, dims), dtype=np.int64),
                np.zeros(0, dtype=np.bool_),
            )
            wides, flags = ("lo", "extent", "source_at", "target_at"), ("out", "install")
            empty: list[Any] = [box if f.name in wides else no if f.name in flags else none for f in fields(Legs)]
            return Legs(*empty)
        return Legs(*(np.concatenate([wide(p, f.name) for p in padded]) for f in fields(Legs)))


def offsets(atoms: Atoms, atom: Int, entry: Int, side: int) -> Int:
    """Where atoms begin in the local tensors of holders' (side 0) or seekers' (side 1) entries: [legs, dims]."""
    g = atoms.geometry
    if side == _SOURCE:
        return atoms.lo[atom] - g.holders.lo[g.holders.entry_row[entry]] + g.holders.base[entry]
    return atoms.lo[atom] - g.seekers.lo[atoms.region[atom]] + g.seekers.local[entry]


def make_legs(
    atoms: Atoms,
    kind: Kind,
    out: bool,
    peer: Int,
    tensor: Int,
    atom: Int,
    quanta: tuple[Int, Int] | None,
    source: tuple[Int, int],
    target: Int,
) -> Legs:
    """Rows of one kind. `source` is (entry, side) of the sender, `target` the receiver's seekers' entry."""
    n = len(atom)
    numel = atoms.numel[atom]
    if quanta is None:
        first, last = np.zeros(n, dtype=np.int64), numel
    else:
        first, last = (np.minimum(q * atoms.quantum[atom], numel) for q in quanta)
    entry, side = source
    way = atoms.geometry.holders.way[atoms.geometry.holders.entry_row[entry]] if side == _SOURCE else np.full(n, -1)
    return Legs(
        kind=np.full(n, int(kind), dtype=np.int64),
        out=np.full(n, out),
        peer=peer,
        tensor=tensor,
        way=way,
        region=atoms.region[atom],
        ordinal=atoms.ordinal[atom],
        first=first,
        last=last,
        lo=atoms.lo[atom],
        extent=atoms.hi[atom] - atoms.lo[atom],
        source_at=offsets(atoms, atom, entry, side),
        target_at=offsets(atoms, atom, target, _DESTINATION),
        round=np.zeros(n, dtype=np.int64),
        install=np.zeros(n, dtype=bool),
        cell=np.full(n, -1, dtype=np.int64),
        grain=atoms.quantum[atom],
        spread=Rounds.spread(atoms.ordinal[atom], atoms.geometry.seekers.entry_group[target]),
    )


def streaming_legs(g: Geometry, member: int, turns: Int) -> list[Legs]:
    """All legs of one member for tensors whose labels are turned by `turns` (one per tensor)."""
    regions = g.regions_near(member)
    if not len(regions):
        return []
    routes = Routes(g.atoms(regions))
    return [part for part in (*_receiving(routes, member, turns), *_sending(routes, member, turns)) if len(part)]


def _turned(label: Int, count: Int, turns: Int) -> Int:
    """Labels of every piece for every tensor: [tensors, pieces]."""
    return (label[None, :] + turns[:, None]) % count[None, :]


def _receiving(routes: Routes, member: int, turns: Int) -> Iterable[Legs]:
    atoms, s, h = routes.atoms, routes.seekers, routes.atoms.geometry.holders
    entry = s.entries_of(member)
    entry_of_region = np.full(len(s.lo), -1, dtype=np.int64)
    entry_of_region[s.region[s.entry_group[entry]]] = entry
    atom = np.flatnonzero(entry_of_region[atoms.region] >= 0)
    mine = entry_of_region[atoms.region[atom]]
    group = s.entry_group[mine]
    held = routes.holds(atom, member)
    at = routes.local_at(atom, group)

    own = np.flatnonzero(atoms.member == member)
    own_entry = np.full(len(atoms.lo), -1, dtype=np.int64)
    own_entry[atoms.entry_atom[own]] = atoms.entry[own]
    t, p = np.indices((len(turns), int(held.sum())), dtype=np.int64).reshape(2, -1)
    a = atom[held][p]
    yield make_legs(
        atoms, Kind.SELF, False, np.full(len(p), member), t, a, None, (own_entry[a], _SOURCE), mine[held][p]
    )

    pulled = np.flatnonzero((at >= 0) & ~held)
    pieces = routes.local(at[pulled], mine[pulled] - s.ptr[group[pulled]])
    first, count = routes.local_holders(at[pulled])
    t, p = np.indices((len(turns), len(pieces.pair)), dtype=np.int64).reshape(2, -1)
    turned = _turned(pieces.source, count[pieces.pair], turns).ravel()
    source = routes.local_entry[first[pieces.pair[p]] + turned]
    i = pulled[pieces.pair[p]]
    yield make_legs(
        atoms,
        Kind.LOCAL,
        False,
        h.member[source],
        t,
        atom[i],
        (pieces.first[p], pieces.last[p]),
        (source, _SOURCE),
        mine[i],
    )
    far = np.flatnonzero(at < 0)
    yield from _entering(routes, member, turns, atom[far], group[far], mine[far])


def _entering(routes: Routes, member: int, turns: Int, atom: Int, group: Int, mine: Int) -> Iterable[Legs]:
    """What enters the member's domain: received by itself, or pulled from whoever receives it."""
    atoms, s, h = routes.atoms, routes.seekers, routes.atoms.geometry.holders
    pieces = routes.remote(atom, group)
    t, p = np.indices((len(turns), len(pieces.pair)), dtype=np.int64).reshape(2, -1)
    i = pieces.pair[p]
    receiver = s.ptr[group[i]] + _turned(pieces.receiver, s.width[group[pieces.pair]], turns).ravel()
    source = _turned(pieces.source, atoms.copies[atom[pieces.pair]], turns).ravel()
    source = atoms.entry[atoms.ptr[atom[i]] + source]
    quanta = pieces.first[p], pieces.last[p]

    def rows(chosen: Int, kind: Kind, out: bool, peer: Int, frm: tuple[Int, int], to: Int) -> Legs:
        q = quanta[0][chosen], quanta[1][chosen]
        return make_legs(atoms, kind, out, peer, t[chosen], atom[i[chosen]], q, frm, to)

    landed = np.flatnonzero(receiver == mine[i])
    yield rows(landed, Kind.NET, False, h.member[source[landed]], (source[landed], _SOURCE), mine[i[landed]])
    others = np.flatnonzero(receiver != mine[i])
    owner = receiver[others]
    yield rows(others, Kind.LANDED, False, s.member[owner], (owner, _DESTINATION), mine[i[others]])
    g = group[i[landed]]
    at, reader = ragged(s.width[g], s.ptr[g])
    kept = reader != mine[i[landed[at]]]
    at, reader = landed[at[kept]], reader[kept]
    yield rows(at, Kind.LANDED, True, s.member[reader], (mine[i[at]], _DESTINATION), reader)


def _sending(routes: Routes, member: int, turns: Int) -> Iterable[Legs]:
    atoms, s = routes.atoms, routes.seekers
    held = np.flatnonzero(atoms.member == member)
    atom, entry = atoms.entry_atom[held], atoms.entry[held]
    pair, group = ragged(np.diff(s.groups)[atoms.region[atom]], s.groups[atoms.region[atom]])
    at = routes.local_at(atom[pair], group)

    near = np.flatnonzero((at >= 0) & (s.domain[group] == atoms.geometry.domains[member]))
    which, reader = ragged(s.width[group[near]], s.ptr[group[near]])
    which = near[which]
    kept = ~_holds_any(atoms, atom[pair[which]], s.member[reader])
    which, reader = which[kept], reader[kept]
    pieces = routes.local(at[which], reader - s.ptr[group[which]])
    first, count = routes.local_holders(at[which])
    turned = _turned(pieces.source, count[pieces.pair], turns)
    source = routes.local_entry[first[pieces.pair] + turned]
    t, p = np.nonzero(source == entry[pair[which]][pieces.pair])
    i = pieces.pair[p]
    yield make_legs(
        atoms,
        Kind.LOCAL,
        True,
        s.member[reader[i]],
        t,
        atom[pair[which[i]]],
        (pieces.first[p], pieces.last[p]),
        (entry[pair[which[i]]], _SOURCE),
        reader[i],
    )

    far = np.flatnonzero(at < 0)
    a, g, e = atom[pair[far]], group[far], entry[pair[far]]
    pieces = routes.remote(a, g)
    source = atoms.ptr[a[pieces.pair]] + _turned(pieces.source, atoms.copies[a[pieces.pair]], turns)
    t, p = np.nonzero(atoms.entry[source] == e[pieces.pair])
    i = pieces.pair[p]
    receiver = s.ptr[g[i]] + (pieces.receiver[p] + turns[t]) % s.width[g[i]]
    quanta = pieces.first[p], pieces.last[p]
    yield make_legs(atoms, Kind.NET, True, s.member[receiver], t, a[i], quanta, (e[i], _SOURCE), receiver)


def _holds_any(atoms: Atoms, atom: Int, member: Int) -> npt.NDArray[np.bool_]:
    """Whether member[i] holds atom[i]."""
    stride = int(max(atoms.member.max(initial=0), member.max(initial=0))) + 1
    held: npt.NDArray[np.bool_] = np.isin(atom * stride + member, atoms.entry_atom * stride + atoms.member)
    return held
