"""Rounds: staging is bounded, used well, and nobody waits for rounds in which others are busy."""

from __future__ import annotations

import numpy as np
import pytest

from elastic_reshard.layout import Mesh, ModelLayout, Placement, Replicate, Shard, StridedShard, TensorLayout
from elastic_reshard.plan import Kind, Plan, PlanOptions, Topology
from tests.plan.execute import staging_of

MEMBERS = 16
STAGING = 1 << 20
BUDGET = STAGING // 8  # bytes of one round, one direction


def _all_to_all(sizes: list[int], options: PlanOptions) -> Plan:
    """Each of 16 members sends 15/16 of a row shard of so many bytes and receives 15/16 of a column shard, over the network."""
    mesh = Mesh.arange((MEMBERS,))
    have, want = (
        ModelLayout(
            {
                str(i): TensorLayout((MEMBERS, 16 * (n // 32)), "bfloat16", mesh, (placement,))
                for i, n in enumerate(sizes)
            }
        )
        for placement in (Shard(0), Shard(1))
    )
    return Plan.between(have, want, Topology.isolated(MEMBERS), options)


def _awkward(plan: Plan) -> list[int]:
    """Bytes of tensors that fill a round of plans with these options as far as it may be filled."""
    budget = 32 * plan.rounds.piece
    return [budget * 49 // 100, budget * 49 // 100, budget * 74 // 100]


def _fullest(plan: Plan) -> float:
    """The most staging that any member needs, as a share of what it may have."""
    return max(staging_of(plan.slice(m)) for m in range(plan.topology.size)) / plan.options.staging


def test_rounds_of_many_tensors_are_filled_and_never_too_full() -> None:
    """Two tensors nearly fill a round and the largest that still goes in one piece begins in it."""
    options = PlanOptions(message=1 << 16, staging=STAGING, min_stripe=16)
    assert 0.75 < _fullest(_all_to_all(_awkward(_all_to_all([512], options)) * 4, options)) <= 1


@pytest.mark.parametrize("budgets", [0.7, 0.8, 1, 3, 7.3, 20])
@pytest.mark.parametrize("message", [1 << 12, STAGING // 4])
def test_tensors_of_several_rounds_are_dealt_out_evenly(budgets: float, message: int) -> None:
    """Also where a whole leg would fit into a message, and a message is as large as two rounds' budgets."""
    plan = _all_to_all([int(BUDGET * budgets)] * 3, PlanOptions(message=message, staging=STAGING, min_stripe=16))
    assert 0.15 < _fullest(plan) <= 1


def test_legs_are_cut_finer_than_rows_where_rows_are_larger_than_staging_allows() -> None:
    """Stripes prefer cuts at whole rows of up to 64 KiB; here a round's budget is 16 KiB."""
    options = PlanOptions(message=1 << 15, staging=1 << 17)
    mesh, shape = Mesh.arange((8,)), (8 << 6, 1 << 15)  # rows of 64 KiB
    have, want = (ModelLayout({"w": TensorLayout(shape, "bfloat16", mesh, (p,))}) for p in (Shard(0), Replicate()))
    plan = Plan.between(have, want, Topology.isolated(8), options)
    assert 0.15 < _fullest(plan) <= 1


def test_legs_that_skip_groups_in_equal_steps_do_not_meet_in_one_round() -> None:
    """HSDP8x2 -> TP256 on the other dim in 8 domains: each holder serves one domain of each region, so that its groups are
    8 apart. Dealing rounds by the group's number would use one round in 8 wherever 8 divides their number."""
    replicas, shards, regions = 8, 2, 256
    have = TensorLayout(
        (shards * 64, regions * 16), "bfloat16", Mesh.arange((replicas, shards)), (Replicate(), Shard(0))
    )
    mesh = Mesh.arange((replicas, regions), first=replicas * shards)
    want = TensorLayout(have.shape, "bfloat16", mesh, (Replicate(), Shard(1)))
    topology = Topology.of(["s"] * replicas * shards + [f"d{m // regions}" for m in range(replicas * regions)])
    parts = set()
    for budgets in range(5, 13):
        staging = 8 * (have.nbytes // shards) // budgets + 256
        options = PlanOptions(message=staging // 16, staging=staging, min_stripe=16)
        plan = Plan.between(ModelLayout({"w": have}), ModelLayout({"w": want}), topology, options)
        parts.add(int(plan.rounds.parts[0]))
        assert all(staging_of(plan.slice(m)) <= staging for m in (0, 7, 15))
    assert 8 in parts


@pytest.mark.parametrize(
    ("have", "want"),
    [
        ((StridedShard(0, 3),), (Replicate(),)),
        ((Replicate(),), (StridedShard(0, 3),)),
        ((StridedShard(0, 3),), (Shard(1),)),
    ],
    ids=str,
)
@pytest.mark.parametrize("domains", ["abcdefgh", "aaaabbbb", "aaaaaaaa", "abababab", "aabbaabb"])
def test_members_with_several_boxes_and_readers_in_the_domain(
    have: tuple[Placement, ...], want: tuple[Placement, ...], domains: str
) -> None:
    """A member's boxes count together, and so does what it lays out for readers of its domain."""
    source, destination = (
        ModelLayout({str(i): TensorLayout((11 * 64, 64), "bfloat16", mesh, p) for i in range(5)})
        for mesh, p in ((Mesh.arange((4,)), have), (Mesh.arange((4,), first=4), want))
    )
    options = PlanOptions(message=256, staging=1 << 13, min_stripe=16)
    assert _fullest(Plan.between(source, destination, Topology.of(domains), options)) <= 1


@pytest.mark.parametrize(("holders", "readers"), [(1, 7), (2, 3), (3, 2), (3, 7), (4, 8), (5, 11)])
def test_several_holders_and_more_readers_in_one_domain(holders: int, readers: int) -> None:
    """Readers are cut over holders at uneven places, so that ranges laid out for two readers overlap without being equal."""
    options = PlanOptions(message=256, staging=1 << 15, min_stripe=16)

    def without_turns(sizes: list[int]) -> list[tuple[int, ...]]:
        """Each size a geometry of its own, with empty ones between, so that each holder has the same label for all."""
        return [
            shape
            for i, n in enumerate(sizes)
            for shape in ((n // 2 - i,), *((0, 1 + i * holders + k) for k in range(holders - 1)))
        ]

    def plan(sizes: list[int]) -> Plan:
        have, want = (
            ModelLayout(
                {str(shape): TensorLayout(shape, "bfloat16", mesh, (Replicate(),)) for shape in without_turns(sizes)}
            )
            for mesh in (Mesh.arange((holders,)), Mesh.arange((readers,), first=holders))
        )
        return Plan.between(have, want, Topology.single(holders + readers), options)

    full = plan(_awkward(plan([16])))
    assert len({turn % holders for turn, ref in zip(full.turns, full.tensors, strict=True) if ref.dims == 1}) == 1
    assert _fullest(full) <= 1
    assert all(not (full.slice(m).legs.kind == Kind.NET).any() for m in range(holders + readers))


def test_rounds_of_tensors_with_other_senders_and_receivers_are_side_by_side() -> None:
    options = PlanOptions(message=64, staging=1024, min_stripe=16)

    def stage(first: int) -> TensorLayout:
        return TensorLayout((64, 8), "float32", Mesh.arange((1,), first=first), (Shard(0),))

    alone = Plan.between(ModelLayout({"a": stage(0)}), ModelLayout({"a": stage(1)}), Topology.isolated(2), options)
    four = Plan.between(
        ModelLayout({n: stage(i) for i, n in enumerate("abcd")}),
        ModelLayout({n: stage(4 + i) for i, n in enumerate("abcd")}),
        Topology.isolated(8),
        options,
    )
    assert four.rounds.count == alone.rounds.count > 1
    assert len(set(four.rounds.first.tolist())) == 1


def test_small_tensors_share_rounds_and_messages() -> None:
    plan = _all_to_all([512] * 64, PlanOptions())
    assert plan.rounds.count == 1
    s = plan.slice(3)
    assert len(np.unique(s.message[s.message >= 0])) == 2 * (MEMBERS - 1)
