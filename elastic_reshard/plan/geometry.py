"""The geometry of one tensor's refit: who holds which box, who wants which box, and the atoms where they meet.

Everything is in the destination tensor's coordinates. A geometry knows no tensor name and no byte: it is planned once
per pair of layouts and instantiated for every tensor that has it (28 layers share one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from elastic_reshard.layout.box import Box
from elastic_reshard.layout.table import Int, RegionTable, group_rows, volumes
from elastic_reshard.plan.overlap import intersecting, ragged

__all__ = ["Atoms", "Geometry", "Holders", "Seekers", "holders_of", "seekers_of"]


@dataclass(frozen=True, eq=False)
class Holders:
    """Boxes that sources hold. Row r is [lo[r], hi[r]); entries ptr[r]:ptr[r+1] are its holders, sorted by member.

    `base` is where the row's box begins in the holder's local tensor, dims in destination order. `way` says by which
    (source, correspondence) of the tensor the row came.
    """

    lo: Int  # [rows, dims]
    hi: Int
    way: Int  # [rows]
    ptr: Int  # [rows + 1]
    member: Int  # [entries]
    base: Int  # [entries, dims]
    ways: int
    sources: int

    @cached_property
    def entry_row(self) -> Int:
        """Row of each entry."""
        return np.repeat(np.arange(len(self.lo), dtype=np.int64), np.diff(self.ptr))

    @cached_property
    def by_member(self) -> Int:
        """Entries sorted by member."""
        return np.argsort(self.member, kind="stable")

    def rows_of(self, member: int) -> Int:
        """Rows that one member holds, sorted."""
        a, b = np.searchsorted(self.member, [member, member + 1], sorter=self.by_member)
        return np.sort(self.entry_row[self.by_member[a:b]])


def holders_of(
    ways: Sequence[tuple[RegionTable, Int, Box, Box, tuple[int, ...]]], absent: Int, sources: int
) -> Holders:
    """Rows from (table, member of rank, source box, destination box, permute) of each way; `absent` members hold nothing."""
    parts = []
    for number, (table, member_of, a, b, permute) in enumerate(ways):
        p = list(permute)
        lo = np.maximum(table.lo, np.asarray(a.lo, dtype=np.int64))
        hi = np.minimum(table.hi, np.asarray(a.hi, dtype=np.int64))
        member = member_of[table.ranks]
        meets: npt.NDArray[np.bool_] = np.all(lo < hi, axis=1)
        kept = meets[table.entry_region] & ~np.isin(member, absent)
        entries = np.flatnonzero(kept)
        region = table.entry_region[entries]
        shift = np.asarray(b.lo, dtype=np.int64) - np.asarray(a.lo, dtype=np.int64)[p]
        base = (table.local[entries] + lo[region] - table.lo[region])[:, p]
        parts.append((lo[region][:, p] + shift, hi[region][:, p] + shift, member[entries], base, region, number))
    lo, hi, member, base = (np.concatenate([part[i] for part in parts]) for i in range(4))
    region = np.concatenate([part[4] for part in parts])
    way = np.concatenate([np.full(len(part[4]), part[5], dtype=np.int64) for part in parts])
    order, first = group_rows([way, region], member)
    head = order[first]
    return Holders(
        lo[head], hi[head], way[head], np.append(first, len(order)), member[order], base[order], len(ways), sources
    )


@dataclass(frozen=True, eq=False)
class Seekers:
    """Regions that destinations want, and by domain, the members that want them. `table_region` is each one's number in
    the layout's own table (regions that only absent members want are left out here).

    Group g is (region[g], domain[g]); its members are entries ptr[g]:ptr[g+1], sorted. Groups are sorted by
    (region, domain); those of region k are groups[k]:groups[k+1].
    """

    table_region: Int  # [regions]
    lo: Int  # [regions, dims]
    hi: Int
    groups: Int  # [regions + 1]
    region: Int  # [groups]
    domain: Int
    ptr: Int  # [groups + 1]
    member: Int  # [entries]
    local: Int  # [entries, dims]

    @cached_property
    def width(self) -> Int:
        """Members of each group."""
        return np.diff(self.ptr)

    @cached_property
    def widest(self) -> Int:
        """Most members that any domain has on a region, [regions]."""
        return np.maximum.reduceat(self.width, self.groups[:-1]) if len(self.width) else self.width

    @cached_property
    def entry_group(self) -> Int:
        """Group of each entry."""
        return np.repeat(np.arange(len(self.region), dtype=np.int64), self.width)

    @cached_property
    def _by_member(self) -> Int:
        return np.argsort(self.member, kind="stable")

    def entries_of(self, member: int) -> Int:
        """Entries of one member."""
        a, b = np.searchsorted(self.member, [member, member + 1], sorter=self._by_member)
        return np.sort(self._by_member[a:b])

    def group_at(self, region: Int, domain: Int) -> Int:
        """Group of (region, domain), -1 where the domain does not want the region."""
        stride = int(max(self.domain.max(initial=0), domain.max(initial=0))) + 1
        keys = self.region * stride + self.domain
        wanted = region * stride + domain
        at = np.searchsorted(keys, wanted)
        found = (at < len(keys)) & (keys[np.minimum(at, len(keys) - 1)] == wanted) if len(keys) else at < 0
        return np.where(found, at, -1)


def seekers_of(table: RegionTable, members_of: Sequence[Int], domains: Int, absent: Int) -> Seekers:
    """Groups of one destination layout that several parties may share (one `member_of` array each)."""
    region = np.tile(table.entry_region, len(members_of))
    member = np.concatenate([m[table.ranks] for m in members_of])
    local = np.tile(table.local, (len(members_of), 1))
    kept = ~np.isin(member, absent)
    region, member, local = region[kept], member[kept], local[kept]
    wanted = np.unique(region)
    region = np.searchsorted(wanted, region)
    domain = domains[member]
    order, first = group_rows([region, domain], member)
    head = order[first]
    return Seekers(
        wanted,
        table.lo[wanted],
        table.hi[wanted],
        np.searchsorted(region[head], np.arange(len(wanted) + 1)),
        region[head],
        domain[head],
        np.append(first, len(order)),
        member[order],
        local[order],
    )


@dataclass(frozen=True, eq=False)
class Geometry:
    """Holders and seekers of tensors that share layouts; `itemsize` of what travels."""

    holders: Holders
    seekers: Seekers
    domains: Int
    itemsize: int
    min_stripe: int

    @property
    def dims(self) -> int:
        """Dims of the destination tensor."""
        return int(self.seekers.lo.shape[1])

    def regions_near(self, member: int) -> Int:
        """Destination regions that concern one member: those it wants, and those that overlap what it holds."""
        s, h = self.seekers, self.holders
        mine = s.region[s.entry_group[s.entries_of(member)]]
        rows = h.rows_of(member)
        _, near = intersecting(h.lo[rows], h.hi[rows], s.lo, s.hi)
        return np.unique(np.concatenate([mine, near]))

    def atoms(self, regions: Int) -> Atoms:
        """The atoms of the given regions (sorted, distinct)."""
        h, s = self.holders, self.seekers
        row, j = intersecting(h.lo, h.hi, s.lo[regions], s.hi[regions])
        lo = np.maximum(h.lo[row], s.lo[regions[j]])
        hi = np.minimum(h.hi[row], s.hi[regions[j]])
        if h.sources > 1:
            lo, hi, region, ptr, rows = _refined(lo, hi, regions[j], row)
        else:  # rows of one source are disjoint: each intersection is an atom with one row
            order = np.lexsort((*reversed(lo.T), regions[j]))
            lo, hi, region, rows = lo[order], hi[order], regions[j][order], row[order]
            ptr = np.arange(len(rows) + 1, dtype=np.int64)
        return Atoms(self, lo, hi, region, *_expand(h, ptr, rows))


def _expand(h: Holders, ptr: Int, rows: Int) -> tuple[Int, Int]:
    """From rows per atom to holders' entries per atom, sorted by member: (ptr, entries)."""
    atom = np.repeat(np.arange(len(ptr) - 1, dtype=np.int64), np.diff(ptr))
    at, entry = ragged(h.ptr[rows + 1] - h.ptr[rows], h.ptr[rows])
    atom = atom[at]
    order = np.lexsort((h.member[entry], atom))
    atom, entry = atom[order], entry[order]
    twice = np.zeros(len(atom), dtype=bool)  # a member that holds an atom by two ways counts once
    twice[1:] = (atom[1:] == atom[:-1]) & (h.member[entry[1:]] == h.member[entry[:-1]])
    atom, entry = atom[~twice], entry[~twice]
    return np.searchsorted(atom, np.arange(len(ptr))), entry


def _refined(lo: Int, hi: Int, region: Int, row: Int) -> tuple[Int, Int, Int, Int, Int]:
    """Atoms where rows of several sources overlap: the grid of all their cuts, region by region."""
    los, his, regions, counts, rows = [], [], [], [], []
    for k in np.unique(region):
        here = np.flatnonzero(region == k)
        cuts = [np.unique(np.concatenate([lo[here, d], hi[here, d]])) for d in range(lo.shape[1])]
        grid = np.stack(np.meshgrid(*[np.arange(len(c) - 1) for c in cuts], indexing="ij"), -1) if cuts else None
        index = grid.reshape(-1, lo.shape[1]) if grid is not None else np.zeros((1, 0), dtype=np.int64)
        a = np.stack([c[index[:, d]] for d, c in enumerate(cuts)], 1) if cuts else index
        b = np.stack([c[index[:, d] + 1] for d, c in enumerate(cuts)], 1) if cuts else index
        i, cell = intersecting(lo[here], hi[here], a, b)
        held, per = np.unique(cell, return_counts=True)
        los.append(a[held])
        his.append(b[held])
        regions.append(np.full(len(held), k, dtype=np.int64))
        counts.append(per)
        rows.append(row[here[i]])
    if not los:
        return lo, hi, region, np.zeros(1, dtype=np.int64), row
    ptr = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
    return np.concatenate(los), np.concatenate(his), np.concatenate(regions), ptr, np.concatenate(rows)


@dataclass(frozen=True, eq=False)
class Atoms:
    """Boxes of a region within which the holders do not change, sorted by (region, lo). Entries ptr[a]:ptr[a+1] are the
    holders of atom a, sorted by member. Every member that builds the atoms of a region builds the same ones."""

    geometry: Geometry
    lo: Int  # [atoms, dims]
    hi: Int
    region: Int
    ptr: Int
    entry: Int  # entries of geometry.holders

    @cached_property
    def numel(self) -> Int:
        """Elements per atom."""
        numel: Int = volumes(self.lo, self.hi)
        return numel

    @cached_property
    def copies(self) -> Int:
        """Holders per atom."""
        return np.diff(self.ptr)

    @cached_property
    def entry_atom(self) -> Int:
        """Atom of each entry."""
        return np.repeat(np.arange(len(self.lo), dtype=np.int64), self.copies)

    @cached_property
    def member(self) -> Int:
        """Member of each entry."""
        return self.geometry.holders.member[self.entry]

    @cached_property
    def ordinal(self) -> Int:
        """Position of each atom among those of its region."""
        return np.arange(len(self.region)) - np.searchsorted(self.region, self.region)

    @cached_property
    def before(self) -> Int:
        """Elements of the atoms before each one in its region."""
        total = np.cumsum(self.numel) - self.numel
        before: Int = total - total[np.searchsorted(self.region, self.region)]
        return before

    @cached_property
    def quantum(self) -> Int:
        """Elements between places where an atom may be cut: whole rows where that still leaves 32 cuts for each part,
        at least `min_stripe` bytes. Depends only on what every member knows of the atom."""
        g = self.geometry
        shape = self.hi - self.lo
        inner = np.ones((len(shape), g.dims + 1), dtype=np.int64)
        inner[:, :-1] = np.cumprod(shape[:, ::-1], axis=1)[:, ::-1]
        parts = np.maximum(self.copies, g.seekers.widest[self.region] if len(self.region) else 1)
        fine = np.clip(self.numel * g.itemsize // (32 * parts), g.min_stripe, 1 << 16)
        fits = inner[:, 1:] * g.itemsize <= fine[:, None] if g.dims else np.ones((len(shape), 0), dtype=bool)
        row = np.where(fits, inner[:, 1:], 1).max(axis=1, initial=1)
        quantum: Int = row * -(-g.min_stripe // (row * g.itemsize))
        return quantum

    @cached_property
    def quanta(self) -> Int:
        """Quanta per atom, the last may be short."""
        return -(-self.numel // self.quantum)
