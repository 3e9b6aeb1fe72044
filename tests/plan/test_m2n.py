"""Which tensors `nccl.m2n` can move: against every mesh that there is, and against what the plan lands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.layout import Box, Correspondence, Mesh, ModelLayout, Replicate, Shard, TensorLayout, catalog
from elastic_reshard.plan import Destination, Kind, Ledger, Plan, PlanOptions, Source, Topology
from elastic_reshard.plan.m2n import DTYPES, Fast, Side, fast_part, side_of, without
from tests.plan.execute import World
from tests.plan.strategies import examples, layouts, refits

R = Replicate()
OPTIONS = PlanOptions(landing=True, cell=64, min_stripe=16, message=256, staging=1 << 16)


def _sides(first: int, size: int, dims: int) -> Iterator[Side]:
    """Every side of so many ranks."""
    meshes = [(size,), *((a, size // a) for a in range(1, size + 1) if size % a == 0)]
    for mesh in meshes:
        yield Side(first, mesh, (None,) * len(mesh))
        for axis, dim in itertools.product(range(len(mesh)), range(dims)):
            yield Side(first, mesh, tuple(dim if n == axis else None for n in range(len(mesh))))


def _even(side: Side, shape: tuple[int, ...]) -> bool:
    cuts = [(n, dim) for n, dim in zip(side.mesh, side.cuts, strict=True) if dim is not None]
    return all(shape[dim] % n == 0 and shape[dim] >= n for n, dim in cuts)


def _exists(held: Mapping[int, Box], shape: tuple[int, ...]) -> bool:
    """Whether any mesh of M2N's gives each rank its box; by trying all."""
    ranks = sorted(held)
    if not ranks or ranks[-1] - ranks[0] + 1 != len(ranks):
        return False
    return any(
        _even(side, shape) and all(side.box(rank, shape) == box for rank, box in held.items())
        for side in _sides(ranks[0], len(ranks), len(shape))
    )


@pytest.mark.parametrize("size", range(1, 9))
def test_every_side_that_m2n_has_is_found_again(size: int) -> None:
    shape, seen = (8, 24, 7), 0
    for side in _sides(3, size, 3):
        if not _even(side, shape):
            continue
        held = {rank: side.box(rank, shape) for rank in side.ranks}
        found = side_of(held, shape)
        assert isinstance(found, Side), f"{side}: {found}"
        assert {rank: found.box(rank, shape) for rank in found.ranks} == held
        assert all(box.shape == found.local_shape(shape) for box in held.values())
        seen += 1
    assert seen > 2


@given(data=st.data())
@examples(60)
def test_a_side_is_found_exactly_where_one_exists(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 4, 6, 8]), min_size=1, max_size=3)))
    layout = data.draw(layouts(shape, "float32", data.draw(st.integers(1, 8))))
    boxes = {rank: layout.boxes(rank) for rank in layout.mesh.ranks}
    if any(len(b) != 1 for b in boxes.values()):
        return  # nothing, or several boxes: the finder refuses these before
    held = {rank: b[0][0] for rank, b in boxes.items()}
    found = side_of(held, shape)
    assert isinstance(found, Side) == _exists(held, shape), f"{layout}: {found}"
    if isinstance(found, Side):
        assert {rank: found.box(rank, shape) for rank in found.ranks} == held


def _held(plan: Plan, t: int, rank_of: Mapping[int, int]) -> dict[int, list[Box]]:
    """Boxes of the source tensor by communicator rank."""
    party, way = plan.tensors[t].ways[0]
    layout, members = plan.sources[party].layout[way.source], plan.sources[party].member_of(plan.topology)
    found = {int(members[r]): [box for box, _ in layout.boxes(r)] for r in layout.mesh.ranks}
    return {rank_of[m]: boxes for m, boxes in found.items() if m in rank_of and boxes}


def _landed(plan: Plan, world: World, t: int) -> tuple[dict[int, set[int]], bool]:
    """(cells that each member lands of a tensor, whether all of their bytes come over the network)."""
    cells: dict[int, set[int]] = {}
    outside = True
    for s in world.slices:
        legs = s.legs
        rows = np.flatnonzero(~legs.install & ~legs.out & (legs.cell >= 0) & (legs.tensor == t))
        if len(rows):
            cells[s.member] = set(legs.cell[rows].tolist())
            outside &= bool((legs.kind[rows] == Kind.NET).all())
    return cells, outside


def _could(plan: Plan, world: World, t: int) -> bool:
    """Whether M2N could move a tensor, from the slices of all members and by trying every mesh."""
    ref = plan.tensors[t]
    layout = plan.targets[ref.target][ref.name]
    present = [m for m in range(plan.topology.size) if m not in plan.absent]
    rank_of = {m: rank for rank, m in enumerate(present)}
    cells, outside = _landed(plan, world, t)
    ways = ref.ways
    if not cells or not outside or len(ways) != 1 or ref.dtype not in DTYPES or not 1 <= len(layout.shape) <= 3:
        return False
    if plan.sources[ways[0][0]].layout[ways[0][1].source].shape != layout.shape:
        return False
    if ways[0][1].permute != tuple(range(len(layout.shape))):
        return False
    source = _held(plan, t, rank_of)
    boxes: dict[int, Box] = {}
    for m, landed in cells.items():
        rank = world.expected.rank(ref.target, m)
        assert rank is not None
        mine = [box for box, _ in layout.boxes(rank)]
        if len(mine) != 1 or landed != set(plan.cells[ref.target].cells_of(ref.name, mine[0]).tolist()):
            return False
        boxes[rank_of[m]] = mine[0]
    if any(len(b) != 1 for b in source.values()) or max(source) >= min(boxes):
        return False
    return _exists({rank: b[0] for rank, b in source.items()}, layout.shape) and _exists(boxes, layout.shape)


def _fill(plan: Plan, world: World, call: Fast) -> None:
    """What M2N does, on the landing memory of a world."""
    present = [m for m in range(plan.topology.size) if m not in plan.absent]
    for rank in call.destination.ranks:
        box, member = call.destination.box(rank, call.shape), present[rank]
        world.landing[member, call.tensor][...] = world.expected.full(call.tensor)[box.slices()]


def _check(plan: Plan) -> int:
    """A plan, in every respect; how many tensors are fast."""
    world = World(plan)
    fast = fast_part(plan)
    assert fast.digest == fast_part(replace(plan)).digest
    found = {call.tensor for call in fast.calls}
    for t, ref in enumerate(plan.tensors):
        why = fast.reasons.get((ref.target, ref.name))
        assert (t in found) == _could(plan, world, t), f"{ref.name}: {why}"
        assert (t in found) != bool(why), "fast, or with a reason, and never both"
    for call in fast.calls:
        cells, _ = _landed(plan, world, call.tensor)
        mine = {rank: set(range(*call.cells_of(rank))) for rank in call.destination.ranks}
        present = [m for m in range(plan.topology.size) if m not in plan.absent]
        assert {present[rank]: c for rank, c in mine.items()} == cells
        covered = dict.fromkeys(call.destination.ranks, 0)
        for piece in call.pieces():
            assert call.source.box(piece.sender, call.shape).contains(piece.box)
            assert call.destination.box(piece.receiver, call.shape).contains(piece.box)
            covered[piece.receiver] += piece.box.numel
        assert covered == {rank: math.prod(call.destination.local_shape(call.shape)) for rank in covered}
        _fill(plan, world, call)
    world.slices = [without(s, fast.tensors) for s in world.slices]
    assert not any(np.isin(s.legs.tensor[~s.legs.install], list(found)).any() for s in world.slices)
    world.run().check()
    return len(found)


@given(plan=refits(landing=True))
@examples(25)
def test_exactly_what_the_plan_lands_whole_is_fast_and_the_rest_still_comes(plan: Plan) -> None:
    _check(plan)


SHAPES = ((8, 4), (4, 12), (24,), (4, 8, 2), (6, 6), (16, 16))


def _user_plan(data: st.DataObject) -> Plan:
    """FSDP or HSDP trainers, engines of any TP and DP, on hosts of any size."""
    dp, fsdp, engines, tp = (data.draw(st.sampled_from(n)) for n in ([1, 1, 2], [1, 2, 4], [1, 2], [1, 2, 4]))
    have, want = {}, {}
    for n, shape in enumerate(SHAPES):
        ways: list[Replicate | Shard] = [Replicate(), *map(Shard, range(len(shape)))]
        cut = data.draw(st.sampled_from(ways))
        have[f"t{n}"] = TensorLayout(shape, "float32", Mesh.arange((dp, fsdp)), (R, Shard(0)))
        want[f"t{n}"] = TensorLayout(shape, "float32", Mesh.arange((tp,)), (cut,))
    sources = dp * fsdp
    hosts = data.draw(st.sampled_from([1, 2, 4]))
    labels = [("s", n // hosts) for n in range(sources)] + [("d", n // hosts) for n in range(engines * tp)]
    return Plan(
        (Source(ModelLayout(have), tuple(range(sources))),),
        tuple(
            Destination(ModelLayout(want), tuple(range(sources + e * tp, sources + (e + 1) * tp)))
            for e in range(engines)
        ),
        Topology.of(labels),
        OPTIONS,
    )


@given(data=st.data())
@examples(8)
def test_meshes_as_users_have_them(data: st.DataObject) -> None:
    _check(_user_plan(data))


@pytest.mark.long
@given(data=st.data())
@examples(150)
def test_many_meshes_as_users_have_them(data: st.DataObject) -> None:
    _check(_user_plan(data))


def _one(shape: tuple[int, ...] = (8, 8), dtype: str = "float32", **changes: object) -> Plan:
    """FSDP2 -> TP2, a domain each."""
    source = ModelLayout({"a": TensorLayout(shape, dtype, Mesh.arange((2,)), (Shard(0),))})
    target = ModelLayout({"a": TensorLayout(shape, dtype, Mesh.arange((2,)), (Shard(len(shape) - 1),))})
    plan = Plan((Source(source, (0, 1)),), (Destination(target, (2, 3)),), Topology((0, 0, 1, 1)), OPTIONS)
    return replace(plan, **changes)  # type: ignore[arg-type]


def _why(plan: Plan) -> str:
    return next(iter(fast_part(plan).reasons.values()), "")


def test_what_is_fast_is_said_in_ranks_of_the_communicator() -> None:
    (call,) = fast_part(_one()).calls
    assert (call.source, call.destination) == (Side(0, (2,), (0,)), Side(2, (2,), (1,)))
    assert [(p.sender, p.receiver, p.box) for p in call.pieces()] == [
        (0, 2, Box((0, 0), (4, 4))), (1, 2, Box((4, 0), (8, 4))), (0, 3, Box((0, 4), (4, 8))), (1, 3, Box((4, 4), (8, 8))),
    ]  # fmt: skip


def test_each_limit_has_a_reason_of_its_own() -> None:
    assert "4 dims" in _why(_one((2, 2, 2, 2)))
    assert "dtype bool" in _why(_one(dtype="bool"))
    assert "not cut evenly" in _why(_one((7, 8)))
    assert "it is empty" in _why(_one((0, 8)))
    assert "source memory" in _why(_one(topology=Topology((0, 1, 1, 2))))
    coarse = replace(OPTIONS, cell=1024)  # each region one cell, half of which is gathered from the domain's own source
    assert "source memory" in _why(_one(topology=Topology((0, 1, 1, 2)), options=coarse))
    assert "together they hold" in _why(_one(topology=Topology((0, 0, 0, 1))))
    turned = Correspondence("a", "a", permute=(1, 0))
    assert "permuted" in _why(replace(_one(), sources=(replace(_one().sources[0], correspondences=(turned,)),)))


def test_what_has_landed_in_part_goes_by_the_rounds() -> None:
    plan = _one((16, 16))
    count = plan.cells[0].count
    held = np.zeros(count, dtype=bool)
    held[0] = True
    assert "landed before" in _why(replace(plan, ledger=Ledger((count,), {(0, 2): held})))
    assert fast_part(replace(plan, ledger=Ledger((count,), {}))).calls


def test_replicas_of_one_domain_share_the_cells_so_that_m2n_would_fill_too_much() -> None:
    plan = _one((16, 16))
    twice = (plan.destinations[0], replace(plan.destinations[0], members=(4, 5)))
    together = replace(plan, destinations=twice, topology=Topology((0, 0, 1, 1, 1, 1)))
    assert "spread over several members" in _why(together)
    apart = replace(together, topology=Topology((0, 0, 1, 1, 2, 2)))
    (call,) = fast_part(apart).calls
    assert call.destination == Side(2, (2, 2), (None, 1))


def test_sources_that_come_later_are_refused() -> None:
    plan = _one()
    late = replace(plan, sources=(replace(plan.sources[0], members=(2, 3)),),
                   destinations=(replace(plan.destinations[0], members=(0, 1)),))  # fmt: skip
    assert "come first" in _why(late)


def test_more_ranks_than_m2n_takes_are_refused() -> None:
    shape = (34, 34)
    source = ModelLayout({"a": TensorLayout(shape, "float32", Mesh.arange((17,)), (Shard(0),))})
    target = ModelLayout({"a": TensorLayout(shape, "float32", Mesh.arange((1,)), (R,))})
    plan = Plan((Source(source, tuple(range(17))),), (Destination(target, (17,)),), Topology((*(0,) * 17, 1)), OPTIONS)
    assert "17 sources" in _why(plan)


def test_absent_members_move_the_ranks_and_may_tear_an_interval() -> None:
    shape = (8, 8)
    source = ModelLayout({"a": TensorLayout(shape, "float32", Mesh.arange((2, 2)), (R, Shard(0)))})
    plan = replace(
        _one(),
        sources=(Source(source, (0, 1, 2, 3)),),
        destinations=(replace(_one().destinations[0], members=(4, 5)),),
        topology=Topology((0, 0, 0, 0, 1, 1)),
    )
    assert fast_part(plan).calls[0].source == Side(0, (2, 2), (None, 0))
    half = replace(plan, absent=frozenset({0, 1}))
    assert (fast_part(half).calls[0].source, fast_part(half).calls[0].destination.first) == (Side(0, (2,), (0,)), 2)
    assert "no order" in _why(replace(plan, absent=frozenset({3})))


def test_a_whole_model_between_two_hosts() -> None:
    """Qwen3-0.6B, FSDP2 -> TP2: every matrix is fast; norms too, each in whom its one cell lands."""
    spec = catalog.model("Qwen3-0.6B")
    a, b = (catalog.layout(spec, catalog.Parallelism.parse(p)) for p in ("fsdp2", "tp2"))
    plan = Plan((Source(a, (0, 1)),), (Destination(b, (2, 3)),), Topology((0, 0, 1, 1)), PlanOptions(landing=True))
    fast = fast_part(plan)
    assert not fast.reasons
    assert len(fast.calls) == len(b)
    norm = next(c for c in fast.calls if c.name == "model.norm.weight")
    assert len(norm.destination.ranks) == 1
