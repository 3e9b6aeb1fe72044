"""Cells and ledger: the fixed grid, what lands where, what a later plan makes of what is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.errors import PlanError, ShardLost
from elastic_reshard.layout import Box, Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.plan import CellGrid, Destination, Kind, Ledger, Plan, PlanOptions, Source, Topology
from tests.plan.execute import World, boxes_of_cells, staging_of
from tests.plan.strategies import examples, refits

R, S = Replicate(), Shard(0)
SHAPE = (24, 16)
OPTIONS = PlanOptions(landing=True, cell=64, min_stripe=16, message=256, staging=1 << 16)


def _model(mesh: Mesh, *placements: Replicate | Shard, dtype: str = "float32") -> ModelLayout:
    return ModelLayout({name: TensorLayout(SHAPE, dtype, mesh, placements) for name in ("a", "b")})


def _engines(members: Iterable[int], label: str = "engine") -> Topology:
    """Trainers 0 to 3 in a domain of their own, each pair of the others in one."""
    return Topology.of([("trainer", 0) if m < 4 else (label, m // 2) for m in members])


def _plan(**changes: object) -> Plan:
    """FSDP4 -> two engines of TP2, members 4, 5 and 6, 7."""
    given_ = Plan(
        (Source(_model(Mesh.arange((4,)), S)),),
        (Destination(_model(Mesh.arange((2, 2)), R, S), (4, 5, 6, 7)),),
        _engines(range(8)),
        OPTIONS,
    )
    return replace(given_, **changes)  # type: ignore[arg-type]


def _ledger(plan: Plan, held: dict[tuple[int, int], np.ndarray]) -> Ledger:
    return Ledger(tuple(grid.count for grid in plan.cells), held)


@given(plan=refits(landing=True))
@examples(60)
def test_cells_tile_each_region_and_none_is_larger_than_asked_for(plan: Plan) -> None:
    for target, grid in enumerate(plan.cells):
        seen = 0
        for t, ref in enumerate(plan.tensors):
            if ref.target != target:
                continue
            layout = plan.targets[target][ref.name]
            times = np.zeros(layout.shape, dtype=np.int64)
            for cell, where in boxes_of_cells(plan, t):
                assert cell == seen, "cell numbers run through tensors, regions and cells"
                seen += 1
                assert times[where].size * layout.nbytes <= plan.options.cell * layout.numel
                times[where] += 1
            assert (times == 1).all()
        assert seen == grid.count


def test_the_grid_depends_on_the_destination_layout_and_the_cell_size_only() -> None:
    plan = _plan()
    fewer = _plan(
        sources=(Source(_model(Mesh.arange((2,)), S)),),
        destinations=(Destination(plan.targets[0], (9, 8, 5, 4)),),
        topology=Topology.isolated(10),
        absent=frozenset({3}),
    )
    for grid in (fewer.cells[0], CellGrid.of(plan.targets[0], OPTIONS.cell)):
        assert grid.base.tolist() == plan.cells[0].base.tolist()
        for mine, other in zip(plan.cells[0].tensors, grid.tensors, strict=True):
            regions = np.arange(mine.table.regions)
            assert all((a == b).all() for a, b in zip(mine.boxes(regions), other.boxes(regions), strict=True))
    assert CellGrid.of(plan.targets[0], 128).count < plan.cells[0].count


def test_cells_are_blocks_of_rows_and_their_numbers_are_found_by_region() -> None:
    grid = CellGrid.of(_model(Mesh.arange((2,)), S), 192)  # rows of 64 bytes, 3 to a cell, 12 rows to a region
    _, lo, hi = grid.tensors[0].boxes(np.array([1]))
    assert lo.tolist() == [[12, 0], [15, 0], [18, 0], [21, 0]]
    assert hi.tolist() == [[15, 16], [18, 16], [21, 16], [24, 16]]
    assert grid.cells_of("b", Box((12, 0), (24, 16))).tolist() == [12, 13, 14, 15]
    with pytest.raises(PlanError, match="no region"):
        grid.cells_of("b", Box((0, 0), (24, 16)))


@given(plan=refits(landing=True))
@examples(60)
def test_a_cell_lands_only_in_a_member_that_wants_it(plan: Plan) -> None:
    """So a member's own region bytes bound its landing arena, whatever the plan."""
    world = World(plan)
    ranks = [d.member_of(plan.topology) for d in plan.destinations]
    for (target, member), bits in world.landed().items():
        own = np.concatenate([plan.cells[target].cells_of_rank(int(r)) for r in np.flatnonzero(ranks[0] == member)])
        assert set(np.flatnonzero(bits).tolist()) <= set(own.tolist())


def test_each_domain_lands_one_copy_spread_over_its_members() -> None:
    plan = _plan(destinations=(Destination(_model(Mesh.arange((4,)), R), (4, 5, 6, 7)),))
    landed = World(plan).landed()
    for domain in ((4, 5), (6, 7)):
        assert (np.sum([landed[0, m] for m in domain], axis=0) == 1).all()
        assert abs(int(landed[0, domain[0]].sum()) - int(landed[0, domain[1]].sum())) <= 2


def test_cells_whose_source_lies_in_the_domain_never_land() -> None:
    plan = _plan(topology=Topology.single(8))
    world = World(plan).run().check()
    assert world.landed() == {}
    assert not world.ingress
    assert all(s.legs.install.all() for s in world.slices)


def test_a_member_installs_its_own_bytes_from_its_own_memory() -> None:
    """Also where other members of its domain hold the same: colocated replicas copy, they do not pull."""
    everything = _model(Mesh.arange((3,)), R)
    plan = Plan.between(everything, everything, Topology.single(3), OPTIONS)
    for member in range(3):
        assert plan.slice(member).bytes_by(Kind.SELF, out=False) == everything.nbytes
        assert plan.slice(member).peers(Kind.LOCAL) == []
    World(plan).run().check()


def test_landed_cells_are_not_sent_again_and_their_holder_serves_its_domain() -> None:
    before = World(_plan()).run()
    held = before.landed()
    held = {key: bits & (np.arange(len(bits)) % 3 != 0) for key, bits in held.items()}
    after = _plan(ledger=_ledger(before.plan, held))
    world = World(after)
    world.carry(before, after.ledger or Ledger.empty(()))
    again = world.landed()
    for key, bits in before.landed().items():
        assert (again[key] == (bits & ~held[key])).all()
    world.run().check()
    assert sum(world.ingress.values()) < sum(before.ingress.values())


def test_when_all_has_landed_nothing_moves_between_domains_and_no_source_is_needed() -> None:
    before = World(_plan()).run()
    ledger = _ledger(before.plan, before.landed())
    world = World(_plan(ledger=ledger, absent=frozenset({0, 1, 2, 3})))
    world.carry(before, ledger)
    world.run().check()
    assert not world.ingress


def test_a_joiner_in_another_domain_is_served_by_the_holders_of_landed_cells() -> None:
    """All trainers are gone. Members 8 and 9 join, in a domain of their own; two engines hold the publication."""
    before = World(_plan()).run().check()
    joined = (4, 5, 6, 7, 8, 9)
    wanted = Destination(_model(Mesh.arange((3, 2)), R, S), joined)
    grid = CellGrid.of(wanted.layout, OPTIONS.cell)
    assert grid.count == before.plan.cells[0].count
    ledger = Ledger((grid.count,), before.landed())
    plan = _plan(destinations=(wanted,), topology=_engines(range(10)), ledger=ledger, absent=frozenset({0, 1, 2, 3}))
    world = World(plan)
    world.carry(before, ledger)
    world.run().check()
    assert set(world.ingress) == {plan.topology.domains[8]}
    assert world.ingress[plan.topology.domains[8]] == wanted.layout.nbytes
    assert {m for m in world.sent if world.sent[m]} == {4, 5, 6, 7}, "both engines serve it"
    assert max(world.sent.values()) <= 2 * min(world.sent.values())


def test_a_joiner_takes_from_trainers_and_engines_alike() -> None:
    """Nobody is gone: holders of landed cells are sources beside the trainers."""
    before = World(_plan()).run()
    wanted = Destination(_model(Mesh.arange((3, 2)), R, S), (4, 5, 6, 7, 8, 9))
    ledger = Ledger((before.plan.cells[0].count,), before.landed())
    world = World(_plan(destinations=(wanted,), topology=_engines(range(10)), ledger=ledger))
    world.carry(before, ledger)
    world.run().check()
    assert all(world.sent[m] for m in range(8))


def test_one_holder_serves_many_joiners_within_its_staging() -> None:
    """Trainers are gone and member 4 alone has everything; eight members join, each a domain of its own."""
    options = replace(OPTIONS, staging=1 << 12)
    first = Destination(_model(Mesh.arange((1,)), R), (4,))
    before = World(_plan(destinations=(first,), topology=Topology.isolated(13), options=options)).run()
    all_of_them = Destination(_model(Mesh.arange((9,)), R), tuple(range(4, 13)))
    ledger = Ledger((before.plan.cells[0].count,), before.landed())
    plan = _plan(
        destinations=(all_of_them,),
        topology=Topology.isolated(13),
        ledger=ledger,
        absent=frozenset({0, 1, 2, 3}),
        options=options,
    )
    world = World(plan)
    world.carry(before, ledger)
    world.run().check()
    assert world.sent == {4: 8 * first.layout.nbytes}
    assert all(staging_of(s) <= options.staging for s in world.slices)


def test_shard_lost_names_tensor_and_box() -> None:
    with pytest.raises(ShardLost) as caught:
        _plan(absent=frozenset({1}))
    assert caught.value.lost == (("a", "96 elements of [0:12, 0:16]"), ("b", "96 elements of [0:12, 0:16]"))
    assert "no reachable member holds a 96 elements of [0:12, 0:16]" in str(caught.value)


def test_lost_sources_matter_only_where_their_cells_have_not_landed() -> None:
    """Trainer 1 is gone. Its rows have landed, and of the other trainers' rows nothing has."""
    before = World(_plan()).run()
    rows_of_1 = np.zeros(before.plan.cells[0].count, dtype=bool)
    for t in range(2):
        for cell, where in boxes_of_cells(before.plan, t):
            rows_of_1[cell] = 6 <= where[0].start < 12
    held = {key: bits & rows_of_1 for key, bits in before.landed().items()}
    ledger = _ledger(before.plan, held)
    world = World(_plan(ledger=ledger, absent=frozenset({1})))
    world.carry(before, ledger)
    world.run().check()
    one_short = {key: bits.copy() for key, bits in held.items()}
    missing = int(np.flatnonzero(rows_of_1)[0])
    for bits in one_short.values():
        bits[missing] = False
    with pytest.raises(ShardLost) as caught:
        _plan(ledger=_ledger(before.plan, one_short), absent=frozenset({1}))
    assert caught.value.lost == (("a", "16 elements of [0:12, 0:16]"),)


def test_a_cell_of_which_a_part_is_lost_comes_whole_from_its_holder() -> None:
    """Cells of 4 rows over shards of 6: the second cell of a region needs two trainers, one of which is gone."""
    options = replace(OPTIONS, cell=256)
    before = World(_plan(options=options)).run()
    ledger = _ledger(before.plan, {key: bits for key, bits in before.landed().items() if key[1] in (4, 5)})
    plan = _plan(options=options, ledger=ledger, absent=frozenset({1}))
    world = World(plan)
    world.carry(before, ledger)
    world.run().check()
    whole = [i for i in np.flatnonzero(plan.slice(4).legs.kind == Kind.NET) if plan.slice(4).legs.way[i] < 0]
    assert whole
    assert all(plan.slice(4).legs.extent[i, 0] == 4 for i in whole)


def test_trainers_and_an_engine_in_another_layout_are_sources_of_one_plan() -> None:
    """Two sources that overlap: atoms are cut where either's boxes end, and both send."""
    trainers = Source(_model(Mesh.arange((4,)), S), (0, 1, 2, 3))
    engine = Source(_model(Mesh.arange((3,)), Shard(1)), (4, 5, 6))
    wanted = Destination(_model(Mesh.arange((2,)), S), (7, 8))
    topology = Topology.of(["t", "t", "t", "t", "e", "e", "e", "d", "d"])
    for options in (OPTIONS, replace(OPTIONS, landing=False)):
        world = World(Plan((trainers, engine), (wanted,), topology, options)).run().check()
        assert world.ingress == {2: wanted.layout.nbytes}
        assert all(world.sent[m] for m in range(7))
    # What one source alone no longer has is taken from the other.
    world = World(Plan((trainers, engine), (wanted,), topology, OPTIONS, absent=frozenset({2, 3}))).run().check()
    assert all(world.sent[m] for m in (0, 1, 4, 5, 6))
    with pytest.raises(ShardLost):
        Plan((trainers, engine), (wanted,), topology, OPTIONS, absent=frozenset({2, 5}))


def test_destinations_with_equal_layouts_are_pooled_and_with_unlike_ones_are_not() -> None:
    one = Destination(_model(Mesh.arange((2,)), S), (4, 5))
    two = Destination(_model(Mesh.arange((2,)), S), (6, 7))
    other = Destination(_model(Mesh.arange((2,)), Shard(1)), (8, 9))
    topology = Topology.of(["t"] * 4 + ["d"] * 6)
    source = (Source(_model(Mesh.arange((4,)), S)),)
    for options in (OPTIONS, replace(OPTIONS, landing=False)):
        pooled = Plan(source, (one, two), topology, options)
        assert len(pooled.targets) == 1
        assert World(pooled).run().check().ingress == {1: one.layout.nbytes}
        apart = Plan(source, (one, other), topology, options)
        assert len(apart.targets) == 2
        assert World(apart).run().check().ingress == {1: 2 * one.layout.nbytes}
    mixed = Plan(source, (one, two, other), topology, OPTIONS)
    assert World(mixed).run().check().ingress == {1: 2 * one.layout.nbytes}
    assert {key[0] for key in World(mixed).landed()} == {0, 1}, "each target has a grid and a ledger of its own"


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
@examples(60)
def test_ledgers_travel_as_bitmaps_and_are_merged_bit_by_bit(counts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)

    def any_ledger() -> Ledger:
        keys = {(int(rng.integers(len(counts))), int(rng.integers(4))) for _ in range(4)}
        return Ledger(tuple(counts), {k: rng.random(counts[k[0]]) < 0.5 for k in keys})

    a, b = any_ledger(), any_ledger()
    back = Ledger.unpacked(counts, a.packed)
    assert set(back.held) == set(a.held)
    assert all((back.held[k] == a.held[k]).all() for k in a.held)
    assert back.digest == a.digest
    both = a.merged(b)
    assert both.digest == b.merged(a).digest == both.merged(a).digest
    for key, bits in both.held.items():
        none = np.zeros(counts[key[0]], dtype=bool)
        assert (bits == (a.held.get(key, none) | b.held.get(key, none))).all()
    assert all(member != 2 for _, member in both.without([2]).held)
    for target in range(len(counts)):
        union = np.zeros(counts[target], dtype=bool)
        for (t, member), bits in both.held.items():
            if t == target and member != 2:
                union |= bits
        assert (both.held_by_any(target, [2]) == union).all()


def test_a_ledger_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="does not fit"):
        Ledger((4,), {(0, 1): np.zeros(5, dtype=bool)})
    with pytest.raises(PlanError, match="does not fit"):
        Ledger((4,), {(1, 1): np.zeros(4, dtype=bool)})
    with pytest.raises(PlanError, match="different grids"):
        Ledger.empty((4,)).merged(Ledger.empty((5,)))
    with pytest.raises(PlanError, match="landing"):
        _plan(options=replace(OPTIONS, landing=False), ledger=Ledger.empty((96,)))
    with pytest.raises(PlanError, match="cells"):
        _plan(ledger=Ledger.empty((5,)))
