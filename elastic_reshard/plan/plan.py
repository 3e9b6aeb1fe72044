"""The plan: who sends which elements to whom, in which rounds. A pure function whose content id is its name.

Nothing here knows addresses, sockets or torch. A plan is made from what every member can know (layouts, domains,
options), so every member makes the same one; each asks it only for its own slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

import numpy as np
import xxhash

from elastic_reshard.errors import LayoutMismatch, PlanError, ShardLost, Violation
from elastic_reshard.layout.box import Box
from elastic_reshard.layout.correspondence import Correspondence
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.layout.model import ModelLayout, WireDtype, match
from elastic_reshard.layout.table import Int, volumes
from elastic_reshard.layout.tensor import TensorLayout
from elastic_reshard.plan.cells import CellGrid
from elastic_reshard.plan.geometry import Atoms, Geometry, holders_of, seekers_of
from elastic_reshard.plan.landing import CellRoutes, landed_cells, landed_load, landing_legs
from elastic_reshard.plan.ledger import Ledger
from elastic_reshard.plan.legs import Legs, streaming_legs
from elastic_reshard.plan.parties import Destination, Source, Topology
from elastic_reshard.plan.rounds import Rounds, schedule
from elastic_reshard.plan.routing import Routes
from elastic_reshard.plan.slices import Slice, TensorRef, assemble

__all__ = ["PLANNER_VERSION", "Plan", "PlanOptions"]

# Part of every plan's content id: plans of unlike planners never mix.
PLANNER_VERSION = 1


@dataclass(frozen=True)
class PlanOptions:
    """How a plan cuts. All sizes in bytes.

    message: most bytes of one message. 1 MiB: the larger, the more often gloo loses
        sight of a peer's death in one.
    staging: most staging memory of one member.
    min_stripe: least bytes of a stripe when replicas share a region.
    cell: size of the cells of landing plans; changing it changes every ledger.
    landing: land cells in arenas for a later install, instead of streaming into the destination's tensors.
    """

    message: int = 1 << 20
    staging: int = 64 << 20
    min_stripe: int = 1 << 12
    cell: int = 1 << 20
    landing: bool = False

    def __post_init__(self) -> None:
        if min(self.message, self.min_stripe, self.cell) < 16 or self.staging < 4 * self.message:
            raise PlanError(
                f"staging ({self.staging}) must be at least 4 messages ({self.message}); message, min_stripe "
                f"({self.min_stripe}) and cell ({self.cell}) at least 16 bytes"
            )


@dataclass(frozen=True)
class Plan:
    """A refit from `sources` to `destinations`.

    destinations that share a layout share its regions: what a domain needs of it enters once.
    absent: members that neither send nor receive (dead, or left out).
    ledger: what landed before (landing plans only); cells that are there are not moved again, and their holders are
    sources.
    Raises LayoutMismatch (every violation), PlanError, ShardLost (bytes that nobody holds) before anything moves.
    """

    sources: tuple[Source, ...]
    destinations: tuple[Destination, ...]
    topology: Topology
    options: PlanOptions = field(default_factory=PlanOptions)
    wire_dtype: WireDtype = None
    absent: frozenset[int] = frozenset()
    ledger: Ledger | None = None

    def __post_init__(self) -> None:
        if not self.sources or not self.destinations:
            raise PlanError("a plan needs at least one source and one destination")
        if self.ledger is not None and not self.options.landing:
            raise PlanError("a ledger belongs to landing plans; pass PlanOptions(landing=True)")
        _ = self._refs
        if self.ledger is not None and self.ledger.cells != tuple(grid.count for grid in self.cells):
            raise PlanError(
                f"the ledger counts {self.ledger.cells} cells, the destination layouts have "
                f"{tuple(grid.count for grid in self.cells)}: it belongs to other layouts or another cell size"
            )
        self._refuse_lost()

    @classmethod
    def between(
        cls,
        source: ModelLayout,
        destination: ModelLayout,
        topology: Topology,
        options: PlanOptions | None = None,
        correspondences: Sequence[Correspondence] | None = None,
        wire_dtype: WireDtype = None,
    ) -> Plan:
        """One source and one destination whose ranks are the members themselves."""
        given = tuple(correspondences) if correspondences is not None else None
        return cls(
            (Source(source, None, given),),
            (Destination(destination),),
            topology,
            options or PlanOptions(),
            wire_dtype,
        )

    @cached_property
    def targets(self) -> tuple[ModelLayout, ...]:
        """The distinct destination layouts, in order of first appearance."""
        return tuple({d.layout.content_id: d.layout for d in self.destinations}.values())

    @cached_property
    def _matched(self) -> list[list[dict[str, list[Correspondence]]]]:
        """Per target and source: destination name -> correspondences."""
        found: list[list[dict[str, list[Correspondence]]]] = []
        faults: list[Violation] = []
        for target in self.targets:
            per_source = []
            for source in self.sources:
                by_name: dict[str, list[Correspondence]] = {}
                try:
                    for c in match(source.layout, target, source.correspondences, self.wire_dtype):
                        by_name.setdefault(c.destination, []).append(c)
                except LayoutMismatch as error:
                    faults += error.violations
                per_source.append(by_name)
            found.append(per_source)
        if faults:
            raise LayoutMismatch(faults)
        return found

    @cached_property
    def _refs(self) -> tuple[tuple[TensorRef, ...], tuple[Geometry, ...], tuple[int, ...]]:
        """All tensors of all targets; the distinct geometries; which one each tensor has."""
        absent = np.array(sorted(self.absent), dtype=np.int64)
        source_members = [s.member_of(self.topology) for s in self.sources]
        refs: list[TensorRef] = []
        known: dict[object, int] = {}
        geometries: list[Geometry] = []
        of_tensor: list[int] = []
        for number, target in enumerate(self.targets):
            wanted = [d.member_of(self.topology) for d in self.destinations if d.layout.content_id == target.content_id]
            for name, layout in target.items():
                ways = tuple((p, c) for p, by_name in enumerate(self._matched[number]) for c in by_name.get(name, []))
                key = (number, layout.content_id, tuple(self._way_key(p, c) for p, c in ways))
                if key not in known:
                    known[key] = len(geometries)
                    geometries.append(self._geometry(layout, ways, source_members, wanted, absent))
                of_tensor.append(known[key])
                refs.append(TensorRef(number, name, layout.dtype, len(layout.shape), ways))
        return tuple(refs), tuple(geometries), tuple(of_tensor)

    def _way_key(self, party: int, c: Correspondence) -> object:
        return (party, self.sources[party].layout[c.source].content_id, c.source_box, c.destination_box, c.permute)

    def _geometry(
        self,
        layout: TensorLayout,
        ways: Sequence[tuple[int, Correspondence]],
        source_members: Sequence[Int],
        wanted: Sequence[Int],
        absent: Int,
    ) -> Geometry:
        rows = [
            (
                self.sources[p].layout[c.source].table,
                source_members[p],
                c.source_box or Box.whole(()),
                c.destination_box or Box.whole(()),
                c.permute or (),
            )
            for p, c in ways
        ]
        return Geometry(
            holders_of(rows, absent, len({p for p, _ in ways})),
            seekers_of(layout.table, wanted, self.topology.array, absent),
            self.topology.array,
            itemsize(layout.dtype),
            self.options.min_stripe,
        )

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """Every destination tensor of every target, in order: what `Legs.tensor` counts."""
        return self._refs[0]

    @property
    def geometries(self) -> tuple[Geometry, ...]:
        """The distinct geometries."""
        return self._refs[1]

    @property
    def geometry_of(self) -> tuple[int, ...]:
        """Which geometry each tensor has."""
        return self._refs[2]

    @cached_property
    def turns(self) -> Int:
        """By how many places the labels of each tensor are turned: its number among those of its geometry."""
        seen: dict[int, int] = {}
        turns = []
        for g in self.geometry_of:
            turns.append(seen.get(g, 0) + g)
            seen[g] = seen.get(g, 0) + 1
        return np.array(turns, dtype=np.int64)

    @cached_property
    def rounds(self) -> Rounds:
        """The rounds of all tensors."""
        return schedule(self.geometries, self.geometry_of, self.topology.size, self.options.staging, self._landed)

    @cached_property
    def _landed(self) -> dict[int, tuple[Int, int]]:
        """Of each tensor with landed cells, who holds them and the most that any of them sends."""
        found = {}
        for t, ref in enumerate(self.tensors if self.ledger is not None else ()):
            grid, g = self.cells[ref.target], self.geometries[self.geometry_of[t]]
            number = grid.index[ref.name]
            landed = landed_cells(g, grid, number, ref.target, self.ledger)
            if landed is not None:
                found[t] = landed_load(g, grid, number, landed)
        return found

    @cached_property
    def cells(self) -> tuple[CellGrid, ...]:
        """The cell grid of each target: a function of its layout and the cell size only."""
        return tuple(CellGrid.of(target, self.options.cell) for target in self.targets)

    @cached_property
    def digest(self) -> str:
        """Content id: equal for equal inputs, on every member and after every restart."""
        h = xxhash.xxh3_128(f"plan {PLANNER_VERSION} {sorted(asdict(self.options).items())}".encode())
        for source in self.sources:
            ways = source.correspondences
            h.update(f"S {source.layout.content_id} {source.members} {ways}".encode())
        for destination in self.destinations:
            h.update(f"D {destination.layout.content_id} {destination.members}".encode())
        wire = sorted(self.wire_dtype.items()) if isinstance(self.wire_dtype, Mapping) else self.wire_dtype
        h.update(f"{self.topology.domains} {wire} {sorted(self.absent)}".encode())
        h.update(self.ledger.digest.encode() if self.ledger is not None else b"-")
        return h.hexdigest()

    def slice(self, member: int) -> Slice:
        """What one member does. Builds nothing of the others'. PlanError for a member outside the topology."""
        if not 0 <= member < self.topology.size:
            raise PlanError(f"member {member} is outside of a topology of {self.topology.size} members")
        of_tensor = np.asarray(self.geometry_of, dtype=np.int64)
        parts: list[Legs] = []
        if member not in self.absent:
            for number, geometry in enumerate(self.geometries):
                tensors = np.flatnonzero(of_tensor == number)
                parts += [legs.replace(tensor=tensors[legs.tensor]) for legs in self._legs(geometry, member, tensors)]
        return assemble(member, parts, self.tensors, self.rounds, self.options.message, self.digest)

    def _legs(self, geometry: Geometry, member: int, tensors: Int) -> list[Legs]:
        if not self.options.landing:
            return streaming_legs(geometry, member, self.turns[tensors])
        refs = [self.tensors[t] for t in tensors]
        grid = self.cells[refs[0].target]
        return landing_legs(
            geometry, member, self.turns[tensors], grid, [grid.index[r.name] for r in refs], refs[0].target, self.ledger
        )

    def _refuse_lost(self) -> None:
        """ShardLost when a region has elements that no source and no holder of a landed cell has."""
        if not self.absent and all(t.declared is None for s in self.sources for t in s.layout.values()):
            return  # a mesh layout without anybody missing covers its tensor
        lost: list[tuple[str, str]] = []
        for number, g in enumerate(self.geometries):
            regions = np.arange(len(g.seekers.lo), dtype=np.int64)
            atoms = g.atoms(regions)
            gone = volumes(g.seekers.lo, g.seekers.hi)
            np.subtract.at(gone, atoms.region, atoms.numel)
            if not gone.any():
                continue
            for t in np.flatnonzero(np.asarray(self.geometry_of) == number):
                ref = self.tensors[t]
                left = gone if self.ledger is None else self._not_landed(ref, g, atoms)
                for k in np.flatnonzero(left):
                    box = Box(tuple(g.seekers.lo[k].tolist()), tuple(g.seekers.hi[k].tolist()))
                    lost.append((ref.name, f"{left[k]} elements of {box}"))
        if lost:
            raise ShardLost(lost)

    def _not_landed(self, ref: TensorRef, g: Geometry, atoms: Atoms) -> Int:
        """Of each region, the elements that no source has and that lie in cells nobody present has landed."""
        grid = self.cells[ref.target]
        number = grid.index[ref.name]
        landed = landed_cells(g, grid, number, ref.target, self.ledger)
        return CellRoutes(Routes(atoms), np.arange(len(g.seekers.lo)), grid, number, landed).unheld()
