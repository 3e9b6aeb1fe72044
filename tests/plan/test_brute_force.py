"""Small layouts of every kind against an oracle that lists indices: sizes 0 to 17, meshes of one and two axes of up to 12
members, every combination of placements on both sides, several topologies, streaming and landing.

Each run goes through the whole product in steps: the default run takes a part of it in which every value of every factor
meets every value of every other, the long run takes far more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from elastic_reshard.layout import Mesh, ModelLayout, Placement, Replicate, Shard, StridedShard, TensorLayout
from elastic_reshard.plan import Destination, Plan, PlanOptions, Source, Topology
from tests.layout.oracle import held
from tests.plan.execute import World, least_ingress

MESHES = [(1,), (2,), (3,), (4,), (5,), (7,), (12,), (1, 3), (2, 2), (2, 3), (3, 2), (4, 2), (3, 4), (6, 2)]
ONE_DIM: list[Placement] = [Replicate(), Shard(0), StridedShard(0, 2), StridedShard(0, 3)]
TWO_DIMS: list[Placement] = [Replicate(), Shard(0), Shard(1), StridedShard(0, 2), StridedShard(1, 2)]
SHAPES_OF_ONE = [(n,) for n in range(18)]
SHAPES_OF_TWO = list(itertools.product([0, 1, 2, 3, 5, 8, 17], [1, 2, 3, 7]))
KINDS_AND_SHAPES: list[tuple[list[Placement], list[tuple[int, ...]]]] = [
    (ONE_DIM, [*SHAPES_OF_ONE]),
    (TWO_DIMS, [*SHAPES_OF_TWO]),
]
# Elements of 16 bytes, so that stripes and cells are single elements and small tensors are cut at all.
DTYPES = ["complex128", "float64"]

TOPOLOGIES: dict[str, Callable[[int, int], list[int]]] = {
    "isolated": lambda sources, members: list(range(members)),
    "single": lambda sources, members: [0] * members,
    "sides apart": lambda sources, members: [int(m >= sources) for m in range(members)],
    "blocks of 3": lambda sources, members: [m // 3 for m in range(members)],
    "every other": lambda sources, members: [m % 2 for m in range(members)],
    "mixed": lambda sources, members: [m % 4 if m < sources else (m + 1) % 3 for m in range(members)],
}


def _combinations(mesh: tuple[int, ...], kinds: list[Placement]) -> list[tuple[Placement, ...]]:
    return list(itertools.product(kinds, repeat=len(mesh)))


def _picked(count: int, number: int, total: int) -> Iterator[int]:
    """`count` numbers below `total`, other ones for each `number`, together evenly spread."""
    step = next(s for s in range(max(1, int(total * 0.618)), total + 2) if np.gcd(s, total) == 1)
    return ((number * count + i) * step % total for i in range(min(count, total)))


def _plan(number: int, source: tuple[int, ...], destination: tuple[int, ...], tensors: int) -> Plan:
    """One plan of many tensors, each with its own shape and placements."""
    sources, wanted = int(np.prod(source)), int(np.prod(destination))
    colocated = number % 5 == 0
    members = max(sources, wanted) if colocated else sources + wanted
    label = list(TOPOLOGIES.values())[number % len(TOPOLOGIES)]
    meshes = Mesh.arange(source), Mesh.of(np.arange(wanted)[::-1].reshape(destination))
    have, want = {}, {}
    for dims, (kinds, shapes) in enumerate(KINDS_AND_SHAPES, 1):
        ours, theirs = _combinations(source, kinds), _combinations(destination, kinds)
        for at in _picked(tensors, number, len(ours) * len(theirs) * len(shapes)):
            a, rest = at % len(ours), at // len(ours)
            b, shape = rest % len(theirs), shapes[rest // len(theirs)]
            name, dtype = f"{dims}d {at}", DTYPES[at % len(DTYPES)]
            have[name] = TensorLayout(shape, dtype, meshes[0], ours[a])
            want[name] = TensorLayout(shape, dtype, meshes[1], theirs[b])
    return Plan(
        (Source(ModelLayout(have)),),
        (Destination(ModelLayout(want), tuple(range(members - wanted, members))),),
        Topology.of(label(sources, members)),
        PlanOptions(
            message=64,
            staging=1 << 14,
            min_stripe=16,
            cell=[16, 48, 128][number // 6 % 3],
            landing=number // 7 % 2 == 1,
        ),
    )


def _check(plan: Plan) -> None:
    world = World(plan).run()
    for (member, t), got in world.live.items():
        layout = plan.targets[0][plan.tensors[t].name]
        rank = plan.destinations[0].member_of(plan.topology).tolist().index(member)
        at = tuple(int(c[0]) for c in np.nonzero(layout.mesh.grid == rank))
        rows = [held(n, d, layout.mesh, layout.placements, at) for d, n in enumerate(layout.shape)]
        full = np.arange(layout.numel).reshape(layout.shape)
        np.testing.assert_array_equal(got, full[np.ix_(*rows)], err_msg=f"{layout} at member {member}")
    assert world.ingress == least_ingress(plan)


def _run(share: slice, tensors: int) -> int:
    count = 0
    for number, (source, destination) in list(enumerate(itertools.product(MESHES, MESHES)))[share]:
        plan = _plan(number, source, destination, tensors)
        _check(plan)
        count += len(plan.tensors)
    return count


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 4))])
def test_all_pairs_of_meshes_with_some_of_their_placements_and_sizes(part: int) -> None:
    assert _run(slice(part, None, 4), 2) > 190


def test_the_picked_tensors_meet_every_placement_and_size_on_both_sides() -> None:
    seen = set()
    for number, (source, destination) in enumerate(itertools.product(MESHES, MESHES)):
        plan = _plan(number, source, destination, 2)
        for name, have in plan.sources[0].layout.items():
            want = plan.targets[0][name]
            seen |= {("from", *have.placements), ("to", *want.placements), ("shape", *have.shape)}
    two = [pair for mesh in MESHES for kinds in (ONE_DIM, TWO_DIMS) for pair in _combinations(mesh, kinds)]
    assert seen >= {(side, *p) for side in ("from", "to") for p in two}
    assert seen >= {("shape", *shape) for shape in SHAPES_OF_ONE + SHAPES_OF_TWO}


@pytest.mark.parametrize("shape", SHAPES_OF_ONE, ids=str)
def test_every_size_between_two_and_three_members_in_every_placement(shape: tuple[int]) -> None:
    """Small enough to be complete: all placements on both sides."""
    for number, (a, b) in enumerate(itertools.product(ONE_DIM, ONE_DIM)):
        have = ModelLayout({"w": TensorLayout(shape, "complex128", Mesh.arange((2,)), (a,))})
        want = ModelLayout({"w": TensorLayout(shape, "complex128", Mesh.arange((3,)), (b,))})
        domains = list(TOPOLOGIES.values())[(number + shape[0]) % len(TOPOLOGIES)](2, 5)
        options = PlanOptions(message=64, staging=4096, min_stripe=16, cell=16, landing=bool(number // 4 % 2))
        _check(Plan((Source(have),), (Destination(want, (2, 3, 4)),), Topology.of(domains), options))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(14))
def test_all_pairs_of_meshes_with_many_of_their_placements_and_sizes(part: int) -> None:
    assert _run(slice(part, None, 14), 16) > 14 * 28


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mesh", [((2,), (3,)), ((2, 2), (3,)), ((3,), (2, 2))], ids=str)
@pytest.mark.parametrize("landing", [False, True])
def test_all_placements_and_sizes_between_small_meshes_in_every_topology(
    mesh: tuple[tuple[int, ...], tuple[int, ...]], landing: bool
) -> None:
    source, destination = (Mesh.arange(m) for m in mesh)
    pairs = itertools.product(
        _combinations(mesh[0], ONE_DIM), _combinations(mesh[1], ONE_DIM), [(n,) for n in (0, 1, 2, 3, 5, 6, 7, 11)]
    )
    have, want = {}, {}
    for number, (a, b, shape) in enumerate(pairs):
        have[str(number)] = TensorLayout(shape, "complex128", source, a)
        want[str(number)] = TensorLayout(shape, "complex128", destination, b)
    members = source.size + destination.size
    options = PlanOptions(message=64, staging=1 << 14, min_stripe=16, cell=32, landing=landing)
    for label in TOPOLOGIES.values():
        topology = Topology.of(label(source.size, members))
        there = Destination(ModelLayout(want), tuple(range(source.size, members)))
        _check(Plan((Source(ModelLayout(have)),), (there,), topology, options))
