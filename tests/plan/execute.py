"""Carries out plans in memory, without processes: the oracle for planner tests.

Every element's value is its global index, so a byte that goes to a wrong place shows.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from elastic_reshard.layout import Box
from elastic_reshard.plan import Kind, Plan, Slice, boxes_of_range

UNSET = -1


def local_source(plan: Plan, party: int, name: str, member: int) -> np.ndarray | None:
    """The member's local source tensor: values are global indices of the *source* tensor."""
    source = plan.sources[party]
    layout = source.layout[name]
    ranks = source.member_of(plan.topology)
    rank = np.flatnonzero(ranks == member)
    shape = layout.local_shape(int(rank[0])) if len(rank) else None
    if shape is None:
        return None
    full = np.arange(layout.numel, dtype=np.int64).reshape(layout.shape)
    local = np.full(shape, UNSET, dtype=np.int64)
    for box, at in layout.boxes(int(rank[0])):
        local[tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))] = full[box.slices()]
    return local


def destination_rank(plan: Plan, target: int, member: int) -> int | None:
    for d in plan.destinations:
        if d.layout.content_id == plan.targets[target].content_id:
            rank = np.flatnonzero(d.member_of(plan.topology) == member)
            if len(rank):
                return int(rank[0])
    return None


def expected(plan: Plan, tensor: int, member: int) -> np.ndarray | None:
    """What the member's destination tensor must hold in the end, by correspondences on the full tensors."""
    ref = plan.tensors[tensor]
    layout = plan.targets[ref.target][ref.name]
    rank = destination_rank(plan, ref.target, member)
    shape = layout.local_shape(rank) if rank is not None else None
    if shape is None:
        return None
    full = np.full(layout.shape, UNSET, dtype=np.int64)
    for party, c in ref.ways:
        have = plan.sources[party].layout[c.source]
        values = np.arange(have.numel, dtype=np.int64).reshape(have.shape)
        full[c.destination_box.slices()] = values[c.source_box.slices()].transpose(c.permute)
    local = np.full(shape, UNSET, dtype=np.int64)
    for box, at in layout.boxes(rank):
        local[tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))] = full[box.slices()]
    return local


class World:
    """All members' memory, and counters of what moved."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.slices = [plan.slice(m) for m in range(plan.topology.size)]
        self.live: dict[tuple[int, int], np.ndarray] = {}  # (member, tensor): destination tensors
        self.landing: dict[tuple[int, int], np.ndarray] = {}
        for t in range(len(plan.tensors)):
            for m in range(plan.topology.size):
                want = expected(plan, t, m)
                if want is not None:
                    self.live[m, t] = np.full_like(want, UNSET)
                    self.landing[m, t] = np.full_like(want, UNSET)
        self.writes: Counter[tuple[int, int]] = Counter()
        self.ingress: Counter[int] = Counter()
        self.sent: Counter[int] = Counter()

    def boxes(self, s: Slice, i: int):
        """(sender's index, receiver's index) per box of a leg, dims of the tensor only."""
        legs, dims = s.legs, s.tensors[s.legs.tensor[i]].dims
        extent = tuple(legs.extent[i, :dims].tolist())
        for at, size in boxes_of_range(extent, int(legs.first[i]), int(legs.last[i])):
            yield tuple(
                tuple(slice(o + a, o + a + n) for o, a, n in zip(origin[i, :dims].tolist(), at, size, strict=True))
                for origin in (legs.source_at, legs.target_at)
            )

    def sender_memory(self, s: Slice, i: int, sender: int) -> np.ndarray:
        legs = s.legs
        t = int(legs.tensor[i])
        ref = s.tensors[t]
        if legs.way[i] < 0:
            return (self.landing if self.plan.options.landing else self.live)[sender, t]
        party, c = ref.ways[int(legs.way[i])]
        local = local_source(self.plan, party, c.source, sender)
        assert local is not None, "the plan takes bytes from somebody outside of the source layout"
        return local.transpose(c.permute)

    def run(self) -> None:
        """Transfer, all rounds; then install."""
        plan, landing = self.plan, self.plan.options.landing
        for r in range(max((s.rounds for s in self.slices), default=0)):
            outbox: dict[tuple[int, int], list] = defaultdict(list)
            for s in self.slices:
                for i in self._rows(s, r, Kind.NET, out=True):
                    memory = self.sender_memory(s, i, s.member)
                    flat = np.concatenate([memory[src].ravel() for src, _ in self.boxes(s, i)])
                    outbox[s.member, int(s.legs.peer[i])].append((self._name(s, i), flat))
                    self.sent[s.member] += int(s.nbytes[i])
            for s in self.slices:
                for i in self._rows(s, r, Kind.NET, out=False):
                    sender = int(s.legs.peer[i])
                    name, flat = outbox[sender, s.member].pop(0)
                    assert name == self._name(s, i), "both ends of a pair must have the same order"
                    at = 0
                    for _, dst in self.boxes(s, i):
                        store = (self.landing if landing else self.live)[s.member, int(s.legs.tensor[i])]
                        n = store[dst].size
                        self._write(store, dst, flat[at : at + n].reshape(store[dst].shape), s, i)
                        at += n
                    assert at == len(flat)
                    assert plan.topology.domains[sender] != plan.topology.domains[s.member]
                    self.ingress[plan.topology.domains[s.member]] += int(s.nbytes[i])
            assert not any(outbox.values()), "sent, but nobody receives it"
            for kind in (Kind.SELF, Kind.LOCAL, Kind.LANDED):
                for s in self.slices:
                    for i in self._rows(s, r, kind, out=False):
                        self._pull(s, i, self.landing if landing else self.live)
        for s in self.slices:
            for i in np.flatnonzero(s.legs.install & ~s.legs.out):
                self._pull(s, int(i), self.live)

    def _rows(self, s: Slice, r: int, kind: Kind, *, out: bool) -> list[int]:
        legs = s.legs
        return np.flatnonzero((legs.round == r) & (legs.kind == kind) & (legs.out == out) & ~legs.install).tolist()

    def _name(self, s: Slice, i: int) -> tuple:
        legs = s.legs
        return (*(int(c[i]) for c in (legs.tensor, legs.region, legs.ordinal, legs.first, legs.last)),)

    def _pull(self, s: Slice, i: int, stores) -> None:
        legs, owner = s.legs, int(s.legs.peer[i])
        assert self.plan.topology.domains[owner] == self.plan.topology.domains[s.member]
        memory, store = self.sender_memory(s, i, owner), stores[s.member, int(legs.tensor[i])]
        for src, dst in self.boxes(s, i):
            self._write(store, dst, memory[src], s, i)

    def _write(self, store: np.ndarray, dst: tuple, values: np.ndarray, s: Slice, i: int) -> None:
        assert values.shape == store[dst].shape
        assert (values != UNSET).all(), f"unset bytes moved: {self._name(s, i)} kind {s.legs.kind[i]}"
        assert (store[dst] == UNSET).all(), "delivered twice"
        store[dst] = values

    def check(self) -> None:
        """Every wanted element is there, exactly once (twice is caught when written), and right."""
        for (m, t), got in self.live.items():
            if m in self.plan.absent:
                continue
            np.testing.assert_array_equal(got, expected(self.plan, t, m))

    def distinct_bytes(self) -> Counter[int]:
        """Bytes that each domain needs and has no source of, per destination layout: the least that can enter it."""
        from elastic_reshard.layout.dtypes import itemsize

        need: Counter[int] = Counter()
        plan = self.plan
        domains = plan.topology.domains
        for t, ref in enumerate(plan.tensors):
            layout = plan.targets[ref.target][ref.name]
            wanted: dict[int, np.ndarray] = {}
            for m in range(plan.topology.size):
                rank = destination_rank(plan, ref.target, m)
                if rank is None or m in plan.absent or layout.local_shape(rank) is None:
                    continue
                mask = wanted.setdefault(domains[m], np.zeros(layout.shape, dtype=bool))
                for box, _ in layout.boxes(rank):
                    mask[box.slices()] = True
            for party, c in ref.ways:
                source = plan.sources[party]
                have = source.layout[c.source]
                ranks = source.member_of(plan.topology)
                for rank in have.mesh.ranks:
                    m = int(ranks[rank])
                    if m in plan.absent or domains[m] not in wanted:
                        continue
                    for box, _ in have.boxes(rank):
                        own = np.zeros(have.shape, dtype=bool)
                        own[box.slices()] = True
                        view = wanted[domains[m]][(..., *c.destination_box.slices())]
                        view &= ~own[(..., *c.source_box.slices())].transpose(c.permute)
            for domain, mask in wanted.items():
                need[domain] += int(mask.sum()) * itemsize(ref.dtype)
        return +need


def whole(shape: tuple[int, ...]) -> Box:
    return Box.whole(shape)
