"""Landing plans: a domain lands one copy of the cells it lacks, spread over the members that want them; each member
pulls its regions later, at install.

A cell that lies wholly in source memory of the domain never lands: install pulls it from there. A cell of which any
part must come from outside lands whole, in one member, so that a ledger bit always means the whole cell. Cells that
landed before are not moved again, and whoever holds them may be their source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from elastic_reshard.layout.table import Int, volumes
from elastic_reshard.plan.cells import CellGrid
from elastic_reshard.plan.geometry import Geometry
from elastic_reshard.plan.ledger import Ledger
from elastic_reshard.plan.legs import Kind, Legs
from elastic_reshard.plan.overlap import intersecting, ragged
from elastic_reshard.plan.rounds import Rounds
from elastic_reshard.plan.routing import Routes

__all__ = ["CellRoutes", "landed_cells", "landed_load", "landing_legs"]

_Bool = npt.NDArray[np.bool_]


def landing_legs(
    g: Geometry,
    member: int,
    turns: Int,
    grid: CellGrid,
    tensors: Sequence[int],
    target: int,
    ledger: Ledger | None,
) -> list[Legs]:
    """All legs of one member, transfer and install. `tensors` are the grid's numbers of the geometry's tensors; legs
    count among them. Tensors of which nothing landed are routed together."""
    regions = g.regions_near(member)
    if not len(regions):
        return []
    routes = Routes(g.atoms(regions))
    fresh, parts = [], []
    for t, number in enumerate(tensors):
        landed = landed_cells(g, grid, number, target, ledger)
        if landed is None:
            fresh.append(t)
        else:
            parts += CellRoutes(routes, regions, grid, number, landed).legs(member, np.array([t]), turns[[t]])
    if fresh:
        chosen = np.array(fresh)
        cells = CellRoutes(routes, regions, grid, tensors[fresh[0]], None)
        bases = grid.base[np.asarray(tensors)[chosen]]
        parts += cells.legs(member, chosen, turns[chosen], bases - bases[0])
    return [p for p in parts if len(p)]


def landed_cells(
    g: Geometry, grid: CellGrid, number: int, target: int, ledger: Ledger | None
) -> tuple[Int, Int] | None:
    """(cell, seekers' entry) of every landed cell of one tensor, cells numbered in the tensor; None if there is none."""
    s = g.seekers
    if ledger is None or not len(s.table_region):
        return None
    cell, holder = ledger.holders(target, int(grid.base[number]), int(grid.base[number + 1]))
    region = np.searchsorted(grid.tensors[number].base, cell, side="right") - 1
    at = np.searchsorted(s.table_region, region)
    known = (at < len(s.table_region)) & (s.table_region[np.minimum(at, len(s.table_region) - 1)] == region)
    cell, holder, at = cell[known], holder[known], at[known]
    group = s.group_at(at, g.domains[holder])
    # An absent member is no seeker; its cells do not count.
    row, entry = ragged(np.where(group >= 0, s.width[group], 0), s.ptr[group])
    same = s.member[entry] == holder[row]
    return (cell[row[same]], entry[same]) if same.any() else None


def landed_load(g: Geometry, grid: CellGrid, number: int, landed: tuple[Int, Int]) -> tuple[Int, int]:
    """(members that hold landed cells of a tensor, about the most bytes any of them sends to domains that lack them)."""
    s, (cell, entry) = g.seekers, landed
    group = s.entry_group[entry]
    region = s.region[group]
    base = grid.tensors[number].base
    nbytes = volumes(s.lo, s.hi) * g.itemsize // np.maximum(1, np.diff(base)[s.table_region])
    groups = max(1, len(s.region))
    supplied = np.bincount(np.unique(cell * groups + group) // groups, minlength=int(cell.max()) + 1)
    lacking = np.diff(s.groups)[region] - supplied[cell]
    sent = np.zeros(len(g.domains), dtype=np.int64)
    np.add.at(sent, s.member[entry], -(-nbytes[region] * lacking // np.bincount(cell)[cell]))
    return np.unique(s.member[entry]), int(sent.max())


@dataclass(frozen=True, eq=False)
class _Pairs:
    """(cell, atom) pairs of the relevant regions: the box they share."""

    cell: Int
    atom: Int
    lo: Int
    hi: Int
    number: Int  # position among the pairs of the cell

    @cached_property
    def numel(self) -> Int:
        """Elements of each shared box."""
        numel: Int = volumes(self.lo, self.hi)
        return numel


class CellRoutes:
    """The cells of some regions of one tensor, and where each lands."""

    def __init__(
        self, routes: Routes, regions: Int, grid: CellGrid, number: int, landed: tuple[Int, Int] | None
    ) -> None:
        self.routes, self.atoms, self.s = routes, routes.atoms, routes.seekers
        cells = grid.tensors[number]
        which, self.lo, self.hi = cells.boxes(self.s.table_region[regions])
        self.region = regions[which]
        first = np.searchsorted(which, np.arange(len(regions)))
        self.in_region = np.arange(len(which)) - first[which]
        table = self.s.table_region[self.region]
        self.number = cells.base[table] + self.in_region  # in the tensor
        self.base = int(grid.base[number])
        self.numel = volumes(self.lo, self.hi)
        self.pairs = self._pairs()
        covered = np.zeros(len(self.numel), dtype=np.int64)
        np.add.at(covered, self.pairs.cell, self.pairs.numel)
        self.missing = self.numel - covered
        self.lost: _Bool = self.missing > 0
        self._place(landed)

    def _pairs(self) -> _Pairs:
        a = self.atoms
        atom, cell = intersecting(a.lo, a.hi, self.lo, self.hi)
        number = np.arange(len(cell)) - np.searchsorted(cell, cell)
        return _Pairs(cell, atom, np.maximum(a.lo[atom], self.lo[cell]), np.minimum(a.hi[atom], self.hi[cell]), number)

    def _place(self, landed: tuple[Int, Int] | None) -> None:
        """For every (cell, group) slot: does the cell land there, with whom, and which demander is the group?"""
        s, p = self.s, self.pairs
        groups = np.diff(s.groups)[self.region]
        self.slot_base = np.concatenate([[0], np.cumsum(groups)]).astype(np.int64)
        self.slot_cell, self.slot_group = ragged(groups, s.groups[self.region])
        pair, group = self.routes.local_groups(self.pairs.atom)
        local = np.zeros(len(self.slot_cell), dtype=np.int64)
        np.add.at(local, self.slot_of(p.cell[pair], group), 1)
        atoms = np.bincount(p.cell, minlength=len(self.numel))
        foreign = (local < atoms[self.slot_cell]) | self.lost[self.slot_cell]
        self.held_slot, self.held_entry = self._held(landed)
        present = np.zeros(len(foreign), dtype=bool)
        present[self.held_slot] = True
        self.present: _Bool = present
        self.lands: _Bool = foreign & ~present
        order = np.lexsort((self.slot_cell, self.slot_group))
        index, total = _counted(self.lands[order], self.slot_group[order])
        width = s.width[self.slot_group[order]]
        self.receiver, self.progress, self.load, self.index = (np.zeros(len(order), dtype=np.int64) for _ in range(4))
        self.index[order] = index
        self.receiver[order] = index * width // np.maximum(1, total)
        self.progress[order] = index * width % np.maximum(1, total)
        self.load[order] = np.maximum(1, total)
        self.demand_index, self.demanders = _counted(self.lands, self.slot_cell)

    def _held(self, landed: tuple[Int, Int] | None) -> tuple[Int, Int]:
        """(slot, entry) of landed cells in these regions, by slot and entry."""
        none = np.zeros(0, dtype=np.int64)
        if landed is None:
            return none, none
        order = np.argsort(self.number)
        at = np.searchsorted(self.number[order], landed[0])
        at = order[np.minimum(at, len(order) - 1)]
        known = self.number[at] == landed[0]
        slot = self.slot_of(at[known], self.s.entry_group[landed[1][known]])
        by = np.lexsort((landed[1][known], slot))
        return slot[by], landed[1][known][by]

    def unheld(self) -> Int:
        """Elements of each region that no source has, in cells that nobody landed: [all regions of the geometry]."""
        ptr, _ = self._held_by_cell
        gone = np.zeros(len(self.s.lo), dtype=np.int64)
        np.add.at(gone, self.region, np.where(np.diff(ptr) == 0, self.missing, 0))
        return gone

    def slot_of(self, cell: Int, group: Int) -> Int:
        """The slot of (cell, group)."""
        return self.slot_base[cell] + group - self.s.groups[self.region[cell]]

    @cached_property
    def _held_by_cell(self) -> tuple[Int, Int]:
        """Landed cells' holders in all domains: ([cells + 1], entry)."""
        cell = self.slot_cell[self.held_slot]
        order = np.lexsort((self.held_entry, cell))
        return np.searchsorted(cell[order], np.arange(len(self.numel) + 1)), self.held_entry[order]

    def picked(self, slot: Int, pair: Int, turns: Int) -> tuple[Int, _Bool]:
        """The sender of pair's box (or of the whole lost cell, pair -1) to a slot, per tensor: [tensors, slots].

        (entry, whether it is a seekers' entry that holds the landed cell). Candidates are the atom's holders, then those
        of the cell; the demand line is cut by cells."""
        ptr, held = self._held_by_cell
        cell = self.slot_cell[slot]
        by_cell = ptr[cell + 1] - ptr[cell]
        atom = self.pairs.atom[pair] if len(self.pairs.atom) else np.zeros(len(pair), dtype=np.int64)
        by_atom = np.where(pair >= 0, self.atoms.copies[atom] if len(self.pairs.atom) else 0, 0)
        count = by_atom + by_cell
        cells = self.load[slot]
        line = self.demand_index[slot] * cells + self.index[slot]
        label = line * count // (self.demanders[slot] * cells)
        turned = (label[None, :] + turns[:, None]) % np.maximum(1, count)[None, :]
        landed = turned >= by_atom[None, :]
        a = self.atoms
        from_atom = np.zeros_like(turned)
        if len(a.entry):
            from_atom = a.entry[np.minimum(a.ptr[atom] + np.where(landed, 0, turned), len(a.entry) - 1)]
        if not len(held):
            return from_atom, landed
        from_cell = held[np.minimum(ptr[cell] + np.where(landed, turned - by_atom, 0), len(held) - 1)]
        return np.where(landed, from_cell, from_atom), landed

    def pairs_of(self, slot: Int) -> tuple[Int, Int]:
        """All pairs of the slots' cells: (index into `slot`, pair)."""
        begin = np.searchsorted(self.pairs.cell, self.slot_cell[slot])
        end = np.searchsorted(self.pairs.cell, self.slot_cell[slot], side="right")
        return ragged(end - begin, begin)

    def member_of(self, sender: Int, landed: _Bool) -> Int:
        """Members of picked senders."""
        h, s = self.atoms.geometry.holders.member, self.s.member
        if not len(h):
            return s[sender]
        return np.where(landed, s[np.minimum(sender, len(s) - 1)], h[np.minimum(sender, len(h) - 1)])

    def _concerning(self, member: int) -> _Bool:
        """Slots of the member's own groups, and of cells that it holds anything of."""
        ptr, held = self._held_by_cell
        cell = np.zeros(len(self.numel), dtype=bool)
        cell[self.pairs.cell[self.routes.holds(self.pairs.atom, member)]] = True
        cell[np.repeat(np.arange(len(cell)), np.diff(ptr))[self.s.member[held] == member]] = True
        mine: _Bool = np.isin(self.slot_group, self.s.entry_group[self.s.entries_of(member)])
        return mine | cell[self.slot_cell]

    def shipments(self, member: int | None = None) -> tuple[Int, Int]:
        """(slot, pair) of everything that enters a domain; pair -1 for a lost cell, which comes whole. For one member:
        at least all that it sends or receives."""
        p = self.pairs
        lands = self.lands if member is None else self.lands & self._concerning(member)
        landing = np.flatnonzero(lands & ~self.lost[self.slot_cell])
        row, pair = self.pairs_of(landing)
        slot = landing[row]
        far = self.routes.local_at(p.atom[pair], self.slot_group[slot]) < 0
        whole = np.flatnonzero(lands & self.lost[self.slot_cell])
        return (
            np.concatenate([slot[far], whole]),
            np.concatenate([pair[far], np.full(len(whole), -1, dtype=np.int64)]),
        )

    def receiver_of(self, slot: Int, turns: Int) -> Int:
        """Seekers' entry that lands a slot's cell, per tensor: [tensors, slots]."""
        group = self.slot_group[slot]
        turned = (self.receiver[slot][None, :] + turns[:, None]) % self.s.width[group][None, :]
        return self.s.ptr[group][None, :] + turned

    def legs(self, member: int, tensors: Int, turns: Int, shift: Int | None = None) -> list[Legs]:
        """All legs of one member for these tensors; `shift` adds to the cell numbers of each."""
        add = shift if shift is not None else np.zeros(len(tensors), dtype=np.int64)
        return [
            part.replace(tensor=tensors[part.tensor], cell=part.cell + self.base + add[part.tensor])
            for part in (
                *self._transfer(member, turns),
                *self._gathered(member, turns),
                *self._installed(member, turns),
            )
        ]

    def _transfer(self, member: int, turns: Int) -> Iterable[Legs]:
        """What the member sends into other domains and receives into its own."""
        slot, pair = self.shipments(member)
        if not len(slot):
            return
        s = self.s
        sender, landed = self.picked(slot, pair, turns)
        frm = self.member_of(sender, landed)
        receiver = self.receiver_of(slot, turns)
        for out in (True, False):
            mine = frm == member if out else s.member[receiver] == member
            t, i = np.nonzero(mine)
            peer = s.member[receiver[t, i]] if out else frm[t, i]
            for side in (False, True):
                c = landed[t, i] == side
                yield self._rows(
                    Kind.NET,
                    out,
                    peer[c],
                    t[c],
                    slot[i[c]],
                    pair[i[c]],
                    (sender[t[c], i[c]], side),
                    receiver[t[c], i[c]],
                )

    def gathering(self) -> tuple[Int, Int]:
        """(slot, pair) of parts of landing cells that the domain's own sources have."""
        pair, group = self.routes.local_groups(self.pairs.atom)
        slot = self.slot_of(self.pairs.cell[pair], group)
        keep = self.lands[slot] & ~self.lost[self.pairs.cell[pair]]
        return slot[keep], pair[keep]

    def _gathered(self, member: int, turns: Int) -> Iterable[Legs]:
        """Those parts, pulled into the landing arena."""
        s = self.s
        slot, pair = self.gathering()
        near = s.domain[self.slot_group[slot]] == self.atoms.geometry.domains[member]
        slot, pair = slot[near], pair[near]
        receiver = self.receiver_of(slot, turns)
        t, i = np.nonzero(s.member[receiver] == member)
        yield self._near(member, t, slot[i], pair[i], receiver[t, i], turns, install=False)

    def _installed(self, member: int, turns: Int) -> Iterable[Legs]:
        """What the member pulls when it installs: landed cells from their holders, the others from source memory."""
        s = self.s
        mine = s.entries_of(member)
        slot = np.flatnonzero(np.isin(self.slot_group, s.entry_group[mine]))
        entry_of_group = np.full(len(s.region), -1, dtype=np.int64)
        entry_of_group[s.entry_group[mine]] = mine
        reader = entry_of_group[self.slot_group]
        for kind in ("present", "lands"):
            chosen = slot[(self.present if kind == "present" else self.lands)[slot]]
            holder = (
                self.present_holder(chosen, reader[chosen], turns)
                if kind == "present"
                else self.receiver_of(chosen, turns)
            )
            t, i = np.indices(holder.shape, dtype=np.int64).reshape(2, -1)
            owner = holder.ravel()
            yield self._rows(
                Kind.LANDED, False, s.member[owner], t, chosen[i], np.full(len(i), -1), (owner, True), reader[chosen[i]]
            ).replace(install=np.ones(len(i), dtype=bool))
        near = slot[~self.present[slot] & ~self.lands[slot]]
        row, pair = self.pairs_of(near)
        t, i = np.indices((len(turns), len(pair)), dtype=np.int64).reshape(2, -1)
        at = near[row[i]]
        yield self._near(member, t, at, pair[i], reader[at], turns, install=True)

    def present_holder(self, slot: Int, reader: Int, turns: Int) -> Int:
        """Who in the domain serves a landed cell: the reader itself if it can, else one after the other."""
        begin = np.searchsorted(self.held_slot, slot)
        count = np.searchsorted(self.held_slot, slot, side="right") - begin
        label = self.in_region[self.slot_cell[slot]] + reader
        chosen = self.held_entry[begin[None, :] + (label[None, :] + turns[:, None]) % count[None, :]]
        row, at = ragged(count, begin)
        own = np.zeros(len(slot), dtype=bool)
        own[row[self.held_entry[at] == reader[row]]] = True
        return np.where(own[None, :], reader[None, :], chosen)

    def near_source(self, slot: Int, pair: Int, reader: Int, turn: Int) -> Int:
        """The holders' entry in the slot's domain that member reader[i] pulls a pair from: its own where it has one."""
        atom = self.pairs.atom[pair]
        first, count = self.routes.local_holders(self.routes.local_at(atom, self.slot_group[slot]))
        label = self.in_region[self.slot_cell[slot]] + turn
        entry = self.routes.local_entry[first + label % count]
        row, index = ragged(count, first)
        held = self.routes.local_entry[index]
        own = self.atoms.geometry.holders.member[held] == reader[row]
        entry[row[own]] = held[own]
        return entry

    def _near(self, member: int, t: Int, slot: Int, pair: Int, target: Int, turns: Int, *, install: bool) -> Legs:
        """Pulls of pairs from source memory in the domain: the member's own where it has them."""
        entry = self.near_source(slot, pair, np.full(len(slot), member), turns[t])
        peer = self.atoms.geometry.holders.member[entry]
        legs = self._rows(Kind.LOCAL, False, peer, t, slot, pair, (entry, False), target)
        kind = np.where(legs.peer == member, int(Kind.SELF), legs.kind)
        return legs.replace(kind=kind, install=np.full(len(legs), install))

    def _rows(
        self, kind: Kind, out: bool, peer: Int, t: Int, slot: Int, pair: Int, source: tuple[Int, bool], target: Int
    ) -> Legs:
        """Legs of pairs' boxes, or of whole cells where pair is -1."""
        s, h, p, n = self.s, self.atoms.geometry.holders, self.pairs, len(slot)
        cell = self.slot_cell[slot]
        whole = pair < 0
        lo, hi = self.lo[cell].copy(), self.hi[cell].copy()
        lo[~whole], hi[~whole] = p.lo[pair[~whole]], p.hi[pair[~whole]]
        region = self.region[cell]
        entry, landed = source
        if landed:
            way = np.full(n, -1, dtype=np.int64)
            source_at = lo - s.lo[region] + s.local[entry]
        else:
            row = h.entry_row[entry]
            way = h.way[row]
            source_at = lo - h.lo[row] + h.base[entry]
        number = np.full(n, -1, dtype=np.int64)
        number[~whole] = p.number[pair[~whole]]
        return Legs(
            kind=np.full(n, int(kind), dtype=np.int64),
            out=np.full(n, out),
            peer=peer,
            tensor=t,
            way=way,
            region=region,
            ordinal=(self.in_region[cell] << 32) + number + 1,
            first=np.zeros(n, dtype=np.int64),
            last=volumes(lo, hi),
            lo=lo,
            extent=hi - lo,
            source_at=source_at,
            target_at=lo - s.lo[region] + s.local[target],
            round=np.zeros(n, dtype=np.int64),
            install=np.zeros(n, dtype=bool),
            cell=self.number[cell],
            grain=np.ones(n, dtype=np.int64),
            # The place in the receiver's own run of cells, and each domain's receivers begin elsewhere.
            spread=((self.progress[slot] << 32) // self.load[slot] + Rounds.spread(0 * cell, self.slot_group[slot]))
            & 0xFFFFFFFF,
        )


def _counted(chosen: _Bool, key: Int) -> tuple[Int, Int]:
    """For rows sorted by key: how many chosen rows of the same key come before each, and how many there are."""
    before: Int = np.cumsum(chosen) - chosen
    begin = np.searchsorted(key, key)
    end = np.searchsorted(key, key, side="right")
    sums = np.append(before, before[-1] + chosen[-1] if len(chosen) else 0)
    return before - before[begin] if len(key) else before, sums[end] - sums[begin]
