"""Boxes that become other boxes: fused, transposed and cut parameters, planned and carried out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from elastic_reshard.errors import LayoutMismatch
from elastic_reshard.layout import (
    Box,
    Correspondence,
    Mesh,
    ModelLayout,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
)
from elastic_reshard.plan import Kind, Plan, PlanOptions, Topology
from tests.plan.execute import World, least_ingress

R, S = Replicate(), Shard(0)
TRAINERS, ENGINE = Mesh.arange((3,)), Mesh.arange((2, 2), first=3)
TOPOLOGY = Topology.of(["t", "t", "t", "d", "d", "e", "e"])
OPTIONS = PlanOptions(min_stripe=16, cell=64, message=128, staging=1 << 14)


def _run(source: ModelLayout, destination: ModelLayout, ways: list[Correspondence]) -> list[World]:
    worlds = []
    for landing in (False, True):
        options = PlanOptions(min_stripe=16, cell=64, message=128, staging=1 << 14, landing=landing)
        plan = Plan.between(source, destination, TOPOLOGY, options, ways)
        worlds.append(World(plan).run().check())
        assert worlds[-1].ingress == least_ingress(plan)
    return worlds


def _qkv(rows: tuple[int, int, int]) -> tuple[ModelLayout, list[Correspondence]]:
    """Three parameters of that many rows, and how they lie one below the other."""
    names = ("q", "k", "v")
    source = ModelLayout(
        {n: TensorLayout((count, 5), "float32", TRAINERS, (S,)) for n, count in zip(names, rows, strict=True)}
    )
    ends = list(itertools.accumulate(rows))
    ways = [
        Correspondence(n, "qkv", None, Box((end - count, 0), (end, 5)))
        for n, count, end in zip(names, rows, ends, strict=True)
    ]
    return source, ways


@pytest.mark.parametrize("rows", [(8, 2, 2), (7, 3, 1), (1, 1, 1), (5, 0, 4)])
@pytest.mark.parametrize("placements", [(R, S), (S, R), (R, Shard(1)), (R, StridedShard(0, 2))], ids=str)
def test_q_k_and_v_become_one(rows: tuple[int, int, int], placements: tuple[Placement, ...]) -> None:
    """Cuts of the fused tensor fall where they fall, across the parts."""
    source, ways = _qkv(rows)
    fused = ModelLayout({"qkv": TensorLayout((sum(rows), 5), "float32", ENGINE, placements)})
    for world in _run(source, fused, ways):
        full = np.concatenate([np.arange(count * 5).reshape(count, 5) for count in rows])
        for (member, _), got in world.live.items():
            for box, at in fused["qkv"].boxes(member):
                where = tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))
                np.testing.assert_array_equal(got[where], full[box.slices()])


def test_one_becomes_q_k_and_v() -> None:
    source = ModelLayout({"qkv": TensorLayout((12, 5), "float32", TRAINERS, (S,))})
    parts = {"q": (0, 8), "k": (8, 10), "v": (10, 12)}
    split = ModelLayout({n: TensorLayout((b - a, 5), "float32", ENGINE, (R, S)) for n, (a, b) in parts.items()})
    _run(source, split, [Correspondence("qkv", n, Box((a, 0), (b, 5)), None) for n, (a, b) in parts.items()])


@pytest.mark.parametrize("permute", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_dims_in_any_order(permute: tuple[int, ...], cut: int) -> None:
    shape = (4, 5, 6)
    source = ModelLayout({"w": TensorLayout(shape, "bfloat16", TRAINERS, (Shard(cut),))})
    turned = ModelLayout(
        {"w": TensorLayout(tuple(shape[p] for p in permute), "bfloat16", ENGINE, (Shard(0), Shard(2)))}
    )
    for world in _run(source, turned, [Correspondence("w", "w", permute=permute)]):
        full = np.arange(120).reshape(shape).transpose(permute)
        for (member, _), got in world.live.items():
            ((box, _),) = turned["w"].boxes(member)
            np.testing.assert_array_equal(got, full[box.slices()])


def test_a_box_inside_of_a_tensor_leaves_the_rest_where_it_is() -> None:
    """A padded vocabulary: 10 of 12 rows go on; member 2 has only padding left for the last of them."""
    source = ModelLayout({"e": TensorLayout((12, 4), "float32", TRAINERS, (S,))})
    cut = ModelLayout({"e": TensorLayout((7, 4), "float32", ENGINE, (R, S))})
    for world in _run(source, cut, [Correspondence("e", "e", Box((1, 0), (8, 4)), None)]):
        assert not world.sent[2], "rows 8 to 12 are wanted by nobody"
        np.testing.assert_array_equal(world.live[3, 0], np.arange(4, 20).reshape(4, 4))


def test_parts_transposed_and_concatenated_at_once() -> None:
    source = ModelLayout(
        {
            "up": TensorLayout((6, 4), "float32", TRAINERS, (S,)),
            "gate": TensorLayout((6, 4), "float32", TRAINERS, (Shard(1),)),
        }
    )
    both = ModelLayout({"w": TensorLayout((4, 12), "float32", ENGINE, (S, Shard(1)))})
    ways = [
        Correspondence("gate", "w", None, Box((0, 0), (4, 6)), (1, 0)),
        Correspondence("up", "w", None, Box((0, 6), (4, 12)), (1, 0)),
    ]
    for world in _run(source, both, ways):
        grid = np.arange(24).reshape(6, 4).T
        full = np.concatenate([grid, grid], axis=1)
        np.testing.assert_array_equal(world.live[6, 0], full[2:, 6:])


def test_several_tensors_may_come_from_one() -> None:
    """Tied weights: the source holds one embedding, the destination wants it twice."""
    source = ModelLayout({"embed": TensorLayout((9, 4), "float32", TRAINERS, (S,))})
    tied = ModelLayout({n: TensorLayout((9, 4), "float32", ENGINE, (R, S)) for n in ("embed", "head")})
    _run(source, tied, [Correspondence("embed", "embed"), Correspondence("embed", "head")])


def test_layers_that_are_alike_share_a_geometry_and_others_do_not() -> None:
    source, ways = _qkv((8, 2, 2))
    layers = ModelLayout({f"{i}.{n}": t for i in range(4) for n, t in source.items()})
    fused = ModelLayout({f"{i}.qkv": TensorLayout((12, 5), "float32", ENGINE, (R, S)) for i in range(4)})
    all_ways = [
        Correspondence(f"{i}.{c.source}", f"{i}.{c.destination}", c.source_box, c.destination_box)
        for i in range(4)
        for c in ways
    ]
    plan = Plan.between(layers, fused, TOPOLOGY, OPTIONS, all_ways)
    assert plan.geometry_of == (0, 0, 0, 0)
    assert plan.turns.tolist() == [0, 1, 2, 3]
    assert World(plan).run().check().received
    other = [Correspondence("0.q", "0.qkv", None, Box((4, 0), (12, 5))), *all_ways[1:]]
    other[1] = Correspondence("0.k", "0.qkv", None, Box((0, 0), (2, 5)))
    other[2] = Correspondence("0.v", "0.qkv", None, Box((2, 0), (4, 5)))
    plan = Plan.between(layers, fused, TOPOLOGY, OPTIONS, other)
    assert plan.geometry_of == (0, 1, 1, 1)
    World(plan).run().check()


def test_correspondences_that_leave_holes_or_overlap_are_refused() -> None:
    source, ways = _qkv((8, 2, 2))
    fused = ModelLayout({"qkv": TensorLayout((12, 5), "float32", ENGINE, (R, S))})
    with pytest.raises(LayoutMismatch, match="hole"):
        Plan.between(source, fused, TOPOLOGY, OPTIONS, ways[:2])
    with pytest.raises(LayoutMismatch, match="overlap"):
        Plan.between(source, fused, TOPOLOGY, OPTIONS, [*ways, Correspondence("k", "qkv", None, Box((9, 0), (11, 5)))])
    with pytest.raises(LayoutMismatch, match="shape"):
        Plan.between(source, fused, TOPOLOGY, OPTIONS, [Correspondence("q", "qkv")])


def test_the_sender_reads_its_own_dims_in_destination_order() -> None:
    """A leg's offsets are in destination order, also where the source is transposed."""
    source = ModelLayout({"w": TensorLayout((6, 4), "float32", Mesh.arange((1,)), (R,))})
    turned = ModelLayout({"w": TensorLayout((4, 6), "float32", Mesh.arange((2,), first=1), (Shard(1),))})
    plan = Plan.between(source, turned, Topology.isolated(3), OPTIONS, [Correspondence("w", "w", permute=(1, 0))])
    legs = plan.slice(0).legs
    second = np.flatnonzero((legs.kind == Kind.NET) & (legs.peer == 2))
    assert legs.source_at[second].tolist() == [[0, 3]] * len(second)
    assert legs.extent[second].tolist() == [[4, 3]] * len(second)
