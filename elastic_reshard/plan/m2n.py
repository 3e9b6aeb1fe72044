"""Which tensors of a refit `nccl.m2n` can move, and why it can't move the others.

A pure function of the plan, so every member that has the same plan finds the same tensors in the same order; `digest` names
them. M2N fills the whole region of each of its destination ranks. A landing plan lands a cell in *one* member of a domain, so
a tensor fits only where the plan lands whole regions anyway: where nobody else of the domain wants the region, or it is a
single cell. Tensors of which anything has landed before, lies in the destination's domain, is cut, renamed into parts,
permuted or cast go by the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import xxhash

from elastic_reshard.layout.box import Box
from elastic_reshard.plan.cells import CellGrid
from elastic_reshard.plan.geometry import Geometry
from elastic_reshard.plan.landing import CellRoutes
from elastic_reshard.plan.plan import Plan
from elastic_reshard.plan.routing import Routes
from elastic_reshard.plan.slices import Slice, TensorRef

__all__ = [
    "DTYPES",
    "MAX_SOURCES",
    "MAX_TARGETS",
    "Fast",
    "FastPart",
    "Piece",
    "Side",
    "fast_part",
    "side_of",
    "without",
]

# Limits of nccl-extensions 0.1.0.
MAX_RANK: Final = 3
MAX_SOURCES: Final = 16
MAX_TARGETS: Final = 64
DTYPES: Final = frozenset(
    ("int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "int32", "uint32", "float32", "int64", "uint64",
     "float64")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a call: ranks first, first + 1, ... of the communicator, in C order over `mesh` (one or two axes).

    cuts: of each axis, the dim of the tensor that it cuts; None: it replicates. At most one axis cuts, evenly.
    """

    first: int
    mesh: tuple[int, ...]
    cuts: tuple[int | None, ...]

    @property
    def ranks(self) -> range:
        """Of the communicator."""
        return range(self.first, self.first + math.prod(self.mesh))

    @property
    def parts(self) -> int:
        """Distinct boxes."""
        return math.prod(n for n, dim in zip(self.mesh, self.cuts, strict=True) if dim is not None)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """What each rank holds of a tensor of that shape."""
        return self.box(self.first, shape).shape

    def box(self, rank: int, shape: Sequence[int]) -> Box:
        """Which box of a tensor of that shape a rank holds."""
        lo, hi = [0] * len(shape), list(shape)
        left = rank - self.first
        for n, dim in zip(reversed(self.mesh), reversed(self.cuts), strict=True):
            left, at = divmod(left, n)
            if dim is not None:
                step = shape[dim] // n
                lo[dim], hi[dim] = at * step, (at + 1) * step
        return Box(tuple(lo), tuple(hi))


def side_of(held: Mapping[int, Box], shape: Sequence[int]) -> Side | str:
    """The side on which each rank holds its box, or why there is none."""
    ranks = sorted(held)
    if not ranks:
        return "nobody is there"
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {_few(ranks)} are not one interval"
    boxes = sorted({(b.lo, b.hi) for b in held.values()})
    if len(boxes) == 1:
        whole = Box.whole(tuple(shape))
        if Box(*boxes[0]) != whole:
            return f"together they hold {Box(*boxes[0])} only"
        return Side(ranks[0], (len(ranks),), (None,))
    cut = [d for d in range(len(shape)) if len({(lo[d], hi[d]) for lo, hi in boxes}) > 1]
    if len(cut) != 1:
        return f"it is cut along {len(cut)} dims"
    dim, parts = cut[0], len(boxes)
    step, left = divmod(shape[dim], parts)
    even = [Side(0, (parts,), (dim,)).box(n, shape) for n in range(parts)]
    if left or not step or [Box(lo, hi) for lo, hi in boxes] != even:
        return f"dim {dim} of {shape[dim]} is not cut evenly into {parts}"
    copies, more = divmod(len(ranks), parts)
    number = {(box.lo, box.hi): n for n, box in enumerate(even)}
    order = [number[held[rank].lo, held[rank].hi] for rank in ranks]
    if not more and order == [n // copies for n in range(len(ranks))]:
        return Side(ranks[0], (parts, copies), (dim, None)) if copies > 1 else Side(ranks[0], (parts,), (dim,))
    if not more and order == [n % parts for n in range(len(ranks))]:
        return Side(ranks[0], (copies, parts), (None, dim))
    return "its parts lie in no order that a mesh of two axes has"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one source rank and one destination rank both hold: compared after the call. `sender` is any one of its holders,
    the same for all; M2N itself may have taken the bytes from another."""

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True)
class Fast:
    """One call. tensor: its number in the plan. source_name: of the source's tensor. cells: of each destination rank, the
    numbers of the cells of its region, [first, last)."""

    tensor: int
    target: int
    name: str
    party: int
    source_name: str
    dtype: str
    shape: tuple[int, ...]
    source: Side
    destination: Side
    cells: tuple[tuple[int, int], ...]

    def cells_of(self, rank: int) -> tuple[int, int]:
        """Of one destination rank."""
        return self.cells[rank - self.destination.first]

    def pieces(self) -> Iterator[Piece]:
        """Everything that is to be compared."""
        holders: dict[Box, list[int]] = {}
        for rank in self.source.ranks:
            holders.setdefault(self.source.box(rank, self.shape), []).append(rank)
        for number, receiver in enumerate(self.destination.ranks):
            mine = self.destination.box(receiver, self.shape)
            for box, ranks in holders.items():
                shared = box.intersect(mine)
                if shared is not None and shared.numel:
                    yield Piece(ranks[number % len(ranks)], receiver, shared)


@dataclass(frozen=True)
class FastPart:
    """calls: what M2N moves, in the order of the calls. reasons: of every other tensor, (target, name) -> why not."""

    calls: tuple[Fast, ...]
    reasons: Mapping[tuple[int, str], str]

    @cached_property
    def tensors(self) -> frozenset[int]:
        """Numbers, in the plan, of what the calls move."""
        return frozenset(call.tensor for call in self.calls)

    @cached_property
    def digest(self) -> str:
        """Equal where the same calls will be made in the same order; members compare it before any is entered."""
        calls = [(c.tensor, c.shape, c.dtype, c.source, c.destination) for c in self.calls]
        return xxhash.xxh3_128(repr(calls).encode()).hexdigest()


def fast_part(plan: Plan) -> FastPart:
    """Of a landing plan whose present members are, in order, the ranks of the communicator. Pure; some ms a hundred tensors."""
    finder = _Finder(plan)
    calls: list[Fast] = []
    reasons: dict[tuple[int, str], str] = {}
    for number, ref in enumerate(plan.tensors):
        found = finder.call(number, ref)
        if isinstance(found, str):
            reasons[ref.target, ref.name] = found
        else:
            calls.append(found)
    return FastPart(tuple(calls), reasons)


def without(piece: Slice, tensors: frozenset[int]) -> Slice:
    """The rest of a member's slice: of these tensors only what an install pulls. Rounds keep their numbers; both ends of a
    message leave out the same legs."""
    kept = piece.legs.install | ~np.isin(piece.legs.tensor, np.array(sorted(tensors), dtype=np.int64))
    message = piece.message[kept]
    net = message >= 0
    message[net] = np.unique(message[net], return_inverse=True)[1].reshape(-1)
    return replace(piece, legs=piece.legs.take(kept), message=message)


class _Finder:
    """What tensors of one geometry have in common is found once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        present = [m for m in range(plan.topology.size) if m not in plan.absent]
        self.rank = {member: rank for rank, member in enumerate(present)}
        self._sources: dict[int, Side | str] = {}
        self._routes: dict[int, CellRoutes] = {}

    def call(self, number: int, ref: TensorRef) -> Fast | str:
        plan, geometry = self.plan, self.plan.geometry_of[number]
        faults = self._of_tensor(ref)
        if faults:
            return faults
        party, way = ref.ways[0]
        shape = plan.targets[ref.target][ref.name].shape
        source = self._source(geometry, shape)
        if isinstance(source, str):
            return f"sources: {source}"
        landing = self._landing(number, ref, geometry)
        if isinstance(landing, str):
            return landing
        g, grid = plan.geometries[geometry], plan.cells[ref.target]
        boxes = {rank: _box(g, region) for rank, region in landing.items()}
        destination = side_of(boxes, shape)
        if isinstance(destination, str):
            return f"destinations: {destination}"
        if len(source.ranks) > MAX_SOURCES or len(destination.ranks) > MAX_TARGETS:
            return f"{len(source.ranks)} sources, {len(destination.ranks)} destinations: more than {MAX_SOURCES}, {MAX_TARGETS}"
        if source.ranks[-1] >= destination.first:
            return "sources do not come first in the communicator"
        cells = tuple(_cells(g, grid, ref.name, landing[rank]) for rank in destination.ranks)
        return Fast(number, ref.target, ref.name, party, way.source, ref.dtype, shape, source, destination, cells)

    def _of_tensor(self, ref: TensorRef) -> str:
        """What is wrong with the tensor, whoever holds it; "" for nothing."""
        shape = self.plan.targets[ref.target][ref.name].shape
        if not 1 <= len(shape) <= MAX_RANK:
            return f"it has {len(shape)} dims, not 1 to {MAX_RANK}"
        if not math.prod(shape):
            return "it is empty"
        if ref.dtype not in DTYPES:
            return f"dtype {ref.dtype}"
        if len(ref.ways) != 1:
            return f"it is put together from {len(ref.ways)} tensors or boxes"
        party, way = ref.ways[0]
        held = self.plan.sources[party].layout[way.source]
        if held.dtype != ref.dtype:
            return f"it is cast from {held.dtype} to {ref.dtype}"
        whole = Box.whole(shape)
        if (
            way.permute != tuple(range(len(shape)))
            or (way.source_box, way.destination_box) != (whole, whole)
            or held.shape != shape
        ):
            return "it is a part of a tensor, or permuted"
        return ""

    def _source(self, geometry: int, shape: tuple[int, ...]) -> Side | str:
        if geometry not in self._sources:
            h = self.plan.geometries[geometry].holders
            held: dict[int, Box] = {}
            twice = len(np.unique(h.member)) < len(h.member)
            for member, row in zip(h.member.tolist(), h.entry_row.tolist(), strict=True):
                held[self.rank[member]] = Box(tuple(h.lo[row].tolist()), tuple(h.hi[row].tolist()))
            self._sources[geometry] = "one of them holds several boxes" if twice else side_of(held, shape)
        return self._sources[geometry]

    def _cell_routes(self, number: int, ref: TensorRef, geometry: int) -> CellRoutes | str:
        """Where the cells of the tensor land; made once for all tensors of a geometry, of which nothing has landed."""
        plan, g = self.plan, self.plan.geometries[geometry]
        if number in plan._landed:
            return "some of it has landed before"
        if geometry not in self._routes:
            regions = np.arange(len(g.seekers.lo), dtype=np.int64)
            grid = plan.cells[ref.target]
            self._routes[geometry] = CellRoutes(Routes(g.atoms(regions)), regions, grid, grid.index[ref.name], None)
        return self._routes[geometry]

    def _landing(self, number: int, ref: TensorRef, geometry: int) -> dict[int, int] | str:
        """Communicator rank -> region, of all in whom cells of the tensor land; or why these are not whole regions."""
        routes = self._cell_routes(number, ref, geometry)
        if isinstance(routes, str):
            return routes
        s = self.plan.geometries[geometry].seekers
        if routes.lost.any():
            return "some of it has no source"
        if len(routes.gathering()[0]):
            return "some of it lies in source memory of the destination's domain"
        slots = np.flatnonzero(routes.lands)
        if not len(slots):
            return "none of it lands"
        groups = routes.slot_group[slots]
        of_group = np.bincount(groups, minlength=len(s.region))
        if (of_group != np.bincount(routes.slot_group, minlength=len(s.region)))[of_group > 0].any():
            return "some of it lies in source memory of the destination's domain"
        entry = routes.receiver_of(slots, self.plan.turns[[number]])[0]
        pairs = np.unique(np.stack([groups, entry], 1), axis=0)
        if len(pairs) > len(np.unique(groups)):
            return "its cells land spread over several members of a domain"
        members = s.member[pairs[:, 1]]
        if np.isin(s.member, members).sum() > len(pairs):
            return "a destination wants several boxes of it"
        return {self.rank[int(m)]: int(s.region[group]) for m, group in zip(members, pairs[:, 0], strict=True)}


def _box(g: Geometry, region: int) -> Box:
    return Box(tuple(g.seekers.lo[region].tolist()), tuple(g.seekers.hi[region].tolist()))


def _cells(g: Geometry, grid: CellGrid, name: str, region: int) -> tuple[int, int]:
    number = grid.index[name]
    base = grid.tensors[number].base + grid.base[number]
    table = int(g.seekers.table_region[region])
    return int(base[table]), int(base[table + 1])


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
