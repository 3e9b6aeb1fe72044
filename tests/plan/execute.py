"""Carries out plans in memory, without processes: the oracle for planner tests.

Every element's value is its global index in its source tensor, so that a byte at a wrong place shows.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_reshard.layout import Box, TensorLayout
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.plan import CellGrid, Kind, Ledger, Plan, Slice, boxes_of_range

Array = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]
Index = tuple[slice, ...]
Memory = dict[tuple[int, int], Array]

UNSET = -1


def at_box(offset: tuple[int, ...], box: Box) -> Index:
    """Index of a box's elements in a local tensor where they begin at `offset`."""
    return tuple(slice(a, a + n) for a, n in zip(offset, box.shape, strict=True))


def rank_of(ranks: Array, member: int) -> int | None:
    """The group rank that a member has."""
    found = np.flatnonzero(ranks == member)
    return int(found[0]) if len(found) else None


def cut_out(layout: TensorLayout, rank: int | None, full: Array) -> Array | None:
    """A rank's local tensor out of the global one."""
    shape = layout.local_shape(rank) if rank is not None else None
    if shape is None:
        return None
    assert rank is not None
    local = np.full(shape, UNSET, dtype=np.int64)
    for box, at in layout.boxes(rank):
        local[at_box(at, box)] = full[box.slices()]
    return local


def numbered(layout: TensorLayout) -> Array:
    """The global tensor whose values are its indices."""
    return np.arange(layout.numel, dtype=np.int64).reshape(layout.shape)


class Expected:
    """What a plan must lead to, by its correspondences on the global tensors."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.source_ranks = [s.member_of(plan.topology) for s in plan.sources]
        self._sources: dict[tuple[int, str, int], Array | None] = {}
        self._full: dict[int, Array] = {}

    def source(self, party: int, name: str, member: int) -> Array:
        """The member's local source tensor."""
        key = party, name, member
        if key not in self._sources:
            layout = self.plan.sources[party].layout[name]
            self._sources[key] = cut_out(layout, rank_of(self.source_ranks[party], member), numbered(layout))
        found = self._sources[key]
        assert found is not None, f"the plan takes bytes of {name} from member {member}, outside of its layout"
        return found

    def full(self, tensor: int) -> Array:
        """The global destination tensor."""
        if tensor not in self._full:
            ref = self.plan.tensors[tensor]
            full = np.full(self.plan.targets[ref.target][ref.name].shape, UNSET, dtype=np.int64)
            for party, c in ref.ways:
                assert c.source_box is not None
                assert c.destination_box is not None
                values = numbered(self.plan.sources[party].layout[c.source])[c.source_box.slices()]
                full[c.destination_box.slices()] = values.transpose(c.permute)
            self._full[tensor] = full
        return self._full[tensor]

    def rank(self, target: int, member: int) -> int | None:
        """The rank by which a member wants the target layout."""
        for d in self.plan.destinations:
            if d.layout.content_id == self.plan.targets[target].content_id:
                rank = rank_of(d.member_of(self.plan.topology), member)
                if rank is not None:
                    return rank
        return None

    def local(self, tensor: int, member: int) -> Array | None:
        """What the member's destination tensor must hold in the end, None for a member without it."""
        ref = self.plan.tensors[tensor]
        return cut_out(self.plan.targets[ref.target][ref.name], self.rank(ref.target, member), self.full(tensor))


class World:
    """All members' memory, and counts of what moved. `landing` carries what a plan before this one landed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.expected = Expected(plan)
        self.slices = [plan.slice(m) for m in range(plan.topology.size)]
        self.live: Memory = {}  # (member, tensor): destination tensors
        self.landing: Memory = {}
        for t in range(len(plan.tensors)):
            for m in range(plan.topology.size):
                want = self.expected.local(t, m)
                if want is not None:
                    self.live[m, t] = np.full_like(want, UNSET)
                    self.landing[m, t] = np.full_like(want, UNSET)
        self.ingress: Counter[int] = Counter()
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()

    def run(self) -> World:
        """Transfer, all rounds; then install."""
        stores = self.landing if self.plan.options.landing else self.live
        rows = [self._rows(s) for s in self.slices]
        for r in range(self.plan.rounds.count):
            outbox: dict[tuple[int, int], deque[tuple[Any, Array]]] = defaultdict(deque)
            for s, mine in zip(self.slices, rows, strict=True):
                for i in mine[r, Kind.NET, True]:
                    outbox[s.member, int(s.legs.peer[i])].append(self._send(s, i))
            for s, mine in zip(self.slices, rows, strict=True):
                for i in mine[r, Kind.NET, False]:
                    waiting = outbox[int(s.legs.peer[i]), s.member]
                    assert waiting, f"received, but nobody sends it: {name_of(s, i)}"
                    self._receive(s, i, *waiting.popleft(), stores)
            assert not any(outbox.values()), "sent, but nobody receives it"
            for kind in (Kind.SELF, Kind.LOCAL, Kind.LANDED):
                for s, mine in zip(self.slices, rows, strict=True):
                    for i in mine[r, kind, False]:
                        self._pull(s, i, stores)
        for s in self.slices:
            for i in np.flatnonzero(s.legs.install & ~s.legs.out).tolist():
                self._pull(s, i, self.live)
        return self

    def check(self) -> World:
        """Every wanted element is there and right; that none came twice is checked when it is written."""
        for (m, t), got in self.live.items():
            if m not in self.plan.absent:
                np.testing.assert_array_equal(got, self.expected.local(t, m))
        return self

    def carry(self, before: World, kept: Ledger) -> None:
        """Keep of what an earlier plan landed only the ledger's cells: all else is poisoned."""
        for (m, t), store in before.landing.items():
            ref = self.plan.tensors[t]
            there = np.zeros(store.shape, dtype=bool)
            bits = kept.held.get((ref.target, m))
            if bits is not None:
                for cell, where in cells_of(self.plan.cells[ref.target], self.plan, self.expected, t, m):
                    there[where] |= bits[cell]
            self.landing[m, t] = np.where(there, store, UNSET)

    def landed(self) -> dict[tuple[int, int], Bits]:
        """Per target and member, the cells that this plan lands there."""
        held = {}
        for target, grid in enumerate(self.plan.cells):
            for s in self.slices:
                legs = s.legs
                into = ~legs.install & ~legs.out & (legs.cell >= 0)
                into &= np.array([ref.target for ref in s.tensors])[legs.tensor] == target
                bits = np.zeros(grid.count, dtype=bool)
                bits[legs.cell[into]] = True
                if bits.any():
                    held[target, s.member] = bits
        return held

    def _rows(self, s: Slice) -> dict[tuple[int, Kind, bool], list[int]]:
        found: dict[tuple[int, Kind, bool], list[int]] = defaultdict(list)
        legs = s.legs
        for i in np.flatnonzero(~legs.install).tolist():
            assert 0 <= legs.round[i] < s.rounds
            found[int(legs.round[i]), Kind(int(legs.kind[i])), bool(legs.out[i])].append(i)
        return found

    def _boxes(self, s: Slice, i: int) -> Iterator[tuple[Index, Index]]:
        """(sender's index, receiver's index) per box of a leg, dims of the tensor only."""
        legs, dims = s.legs, s.tensors[s.legs.tensor[i]].dims
        extent = tuple(legs.extent[i, :dims].tolist())
        origins = legs.source_at[i, :dims].tolist(), legs.target_at[i, :dims].tolist()
        for at, size in boxes_of_range(extent, int(legs.first[i]), int(legs.last[i])):
            source, target = (
                tuple(slice(o + a, o + a + n) for o, a, n in zip(origin, at, size, strict=True)) for origin in origins
            )
            yield source, target

    def _memory_of(self, s: Slice, i: int, sender: int) -> Array:
        t, way = int(s.legs.tensor[i]), int(s.legs.way[i])
        if way < 0:
            return (self.landing if self.plan.options.landing else self.live)[sender, t]
        party, c = s.tensors[t].ways[way]
        assert sender not in self.plan.absent, "the plan takes bytes from an absent member"
        return self.expected.source(party, c.source, sender).transpose(c.permute)

    def _send(self, s: Slice, i: int) -> tuple[Any, Array]:
        memory = self._memory_of(s, i, s.member)
        self.sent[s.member] += int(s.nbytes[i])
        return name_of(s, i), np.concatenate([memory[source].ravel() for source, _ in self._boxes(s, i)])

    def _receive(self, s: Slice, i: int, name: Any, flat: Array, stores: Memory) -> None:
        sender, domains = int(s.legs.peer[i]), self.plan.topology.domains
        assert name == name_of(s, i), "both ends of a pair must have the same order"
        assert domains[sender] != domains[s.member]
        store, at = stores[s.member, int(s.legs.tensor[i])], 0
        for _, target in self._boxes(s, i):
            n = store[target].size
            self._write(store, target, flat[at : at + n].reshape(store[target].shape), s, i)
            at += n
        assert at == len(flat)
        self.ingress[domains[s.member]] += int(s.nbytes[i])
        self.received[s.member] += int(s.nbytes[i])

    def _pull(self, s: Slice, i: int, stores: Memory) -> None:
        owner = int(s.legs.peer[i])
        assert self.plan.topology.domains[owner] == self.plan.topology.domains[s.member]
        memory, store = self._memory_of(s, i, owner), stores[s.member, int(s.legs.tensor[i])]
        for source, target in self._boxes(s, i):
            self._write(store, target, memory[source], s, i)

    def _write(self, store: Array, target: Index, values: Array, s: Slice, i: int) -> None:
        assert values.shape == store[target].shape
        assert (values != UNSET).all(), f"unset bytes moved: {name_of(s, i)} kind {s.legs.kind[i]}"
        assert (store[target] == UNSET).all(), "delivered twice"
        store[target] = values


def name_of(s: Slice, i: int) -> tuple[int, ...]:
    """What identifies a leg at both ends."""
    legs = s.legs
    return tuple(int(c[i]) for c in (legs.tensor, legs.region, legs.ordinal, legs.first, legs.last))


def cells_of(grid: CellGrid, plan: Plan, expected: Expected, tensor: int, member: int) -> Iterator[tuple[int, Index]]:
    """(number in the grid, index in the member's local tensor) of every cell of the member's regions of a tensor."""
    ref = plan.tensors[tensor]
    layout = plan.targets[ref.target][ref.name]
    rank = expected.rank(ref.target, member)
    assert rank is not None
    number = grid.index[ref.name]
    for e in layout.table.entries_of(rank):
        k = layout.table.entry_region[e]
        _, lo, hi = grid.tensors[number].boxes(np.array([k]))
        shift = layout.table.local[e] - layout.table.lo[k]
        base = int(grid.tensors[number].base[k] + grid.base[number])
        for j in range(len(lo)):
            yield (
                base + j,
                tuple(slice(a, b) for a, b in zip((lo[j] + shift).tolist(), (hi[j] + shift).tolist(), strict=True)),
            )


class Masks:
    """By masks over one whole destination tensor: what each domain wants, and what its present sources hold."""

    def __init__(self, plan: Plan, tensor: int) -> None:
        ref, domains, expected = plan.tensors[tensor], plan.topology.domains, Expected(plan)
        layout = plan.targets[ref.target][ref.name]
        self.wanted: dict[int, Bits] = {}
        self.held: dict[int, Bits] = {d: np.zeros(layout.shape, dtype=bool) for d in set(domains)}
        for m in range(plan.topology.size):
            rank = expected.rank(ref.target, m)
            if rank is None or m in plan.absent or layout.local_shape(rank) is None:
                continue
            mask = self.wanted.setdefault(domains[m], np.zeros(layout.shape, dtype=bool))
            for box, _ in layout.boxes(rank):
                mask[box.slices()] = True
        for party, c in ref.ways:
            have = plan.sources[party].layout[c.source]
            assert c.source_box is not None
            assert c.destination_box is not None
            for rank in have.mesh.ranks:
                m = int(expected.source_ranks[party][rank])
                if m in plan.absent:
                    continue
                own = np.zeros(have.shape, dtype=bool)
                for box, _ in have.boxes(rank):
                    own[box.slices()] = True
                self.held[domains[m]][c.destination_box.slices()] |= own[c.source_box.slices()].transpose(c.permute)
        self.anywhere = np.logical_or.reduce(list(self.held.values()))


def least_ingress(plan: Plan) -> Counter[int]:
    """Bytes that each domain wants and has no source of, per destination layout: the least that can enter it."""
    need: Counter[int] = Counter()
    for t, ref in enumerate(plan.tensors):
        masks = Masks(plan, t)
        for domain, wanted in masks.wanted.items():
            need[domain] += int((wanted & ~masks.held[domain]).sum()) * itemsize(ref.dtype)
    return +need


def cell_ingress(plan: Plan) -> Counter[int]:
    """As `least_ingress`, for a plan with a ledger: cells that landed in a domain do not enter it again, and cells that
    present sources do not cover come whole, from whoever landed them."""
    assert plan.ledger is not None
    need: Counter[int] = Counter()
    for t, ref in enumerate(plan.tensors):
        masks = Masks(plan, t)
        landed = {d: plan.ledger.held_by_any(ref.target, _outside(plan, d)) for d in masks.wanted}
        for cell, where in boxes_of_cells(plan, t):
            for domain, wanted in masks.wanted.items():
                if not wanted[where].any() or landed[domain][cell]:
                    continue
                own = masks.held[domain][where] if masks.anywhere[where].all() else np.zeros(())
                need[domain] += int(np.sum(np.ones_like(wanted[where]) & (own == 0))) * itemsize(ref.dtype)
    return +need


def _outside(plan: Plan, domain: int) -> set[int]:
    return {m for m, d in enumerate(plan.topology.domains) if d != domain} | plan.absent


def boxes_of_cells(plan: Plan, tensor: int) -> Iterator[tuple[int, Index]]:
    """(number, index in the global tensor) of every cell of a tensor."""
    ref = plan.tensors[tensor]
    grid = plan.cells[ref.target]
    number = grid.index[ref.name]
    _, lo, hi = grid.tensors[number].boxes(np.arange(grid.tensors[number].table.regions))
    for j in range(len(lo)):
        where = tuple(slice(a, b) for a, b in zip(lo[j].tolist(), hi[j].tolist(), strict=True))
        yield int(grid.base[number]) + j, where


def lost_tensors(plan_of: Plan, absent: frozenset[int], ledger: Ledger | None = None) -> set[str]:
    """Names of the tensors of which wanted elements are gone once these members are absent: no source that is present
    has them, and nobody present has landed their cell."""
    gone = set()
    plan = object.__new__(Plan)  # not checked: that is what the caller wants to know
    plan.__dict__.update(plan_of.__dict__ | {"absent": absent, "ledger": ledger})
    for t, ref in enumerate(plan.tensors):
        masks = Masks(plan, t)
        for cell, where in boxes_of_cells(plan, t):
            wanted = any(mask[where].any() for mask in masks.wanted.values())
            landed = ledger is not None and ledger.held_by_any(ref.target, absent)[cell]
            if wanted and not landed and not masks.anywhere[where].all():
                gone.add(ref.name)
    return gone


def staging_of(s: Slice) -> int:
    """The most staging a slice can need if none of its tensors lies in an arena: what it sends and receives over the
    network and lays out for readers of its domain (equal ranges once), in the fullest round, for two rounds."""
    legs, need, shown = s.legs, np.zeros(max(1, s.rounds), dtype=np.int64), set()
    for i in np.flatnonzero(~legs.install).tolist():
        kind, r = Kind(int(legs.kind[i])), int(legs.round[i])
        if kind == Kind.LOCAL and legs.out[i] and (r, name_of(s, i)) not in shown:
            shown.add((r, name_of(s, i)))
        elif kind != Kind.NET:
            continue
        need[r] += s.nbytes[i]
    return 2 * int(need.max())
