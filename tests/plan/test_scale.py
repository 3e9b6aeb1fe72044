"""Ten thousand members: slices that were made apart fit together, and making one needs neither the others' time nor memory."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.plan import Kind, Plan, PlanOptions, Slice, Topology
from elastic_reshard.plan.cost import cost

MEMBERS, SOURCES = 10_000, 5_000
SHAPES = {"embed": (151936, 2560), "gate": (9728, 2560), "norm": (2560,)}
# A slice takes some ten milliseconds; this only tells a hang or a pairwise loop (25 million pairs) from a slow machine.
HANG = 60.0


def _plan(landing: bool) -> Plan:
    """FSDP5000 -> TP8 DP625 in domains of 8, three tensors of a real model and a second layer."""
    source, destination = Mesh.arange((SOURCES,)), Mesh.arange((625, 8), first=SOURCES)
    have, want = (
        ModelLayout(
            {f"{layer}.{n}": TensorLayout(s, "bfloat16", mesh, p) for layer in range(2) for n, s in SHAPES.items()}
        )
        for mesh, p in ((source, (Shard(0),)), (destination, (Replicate(), Shard(0))))
    )
    return Plan.between(have, want, Topology.blocks(MEMBERS, 8), PlanOptions(landing=landing))


def _between(s: Slice, peer: int, *, out: bool) -> Counter[tuple[int, ...]]:
    """Everything that both ends of a pair must agree upon."""
    legs = s.legs.take((s.legs.kind == Kind.NET) & (s.legs.out == out) & (s.legs.peer == peer))
    columns = (
        legs.round,
        legs.tensor,
        legs.region,
        legs.ordinal,
        legs.first,
        legs.last,
        legs.cell,
        *legs.lo.T,
        *legs.extent.T,
    )
    return Counter(zip(*(c.tolist() for c in columns), strict=True))


@pytest.mark.parametrize("landing", [False, True])
def test_what_a_member_sends_to_another_is_what_that_one_receives_from_it(landing: bool) -> None:
    begun = time.monotonic()
    plan = _plan(landing)
    rng = np.random.default_rng(7)
    pairs = 0
    for sender in rng.choice(SOURCES, 2, replace=False).tolist():
        s = plan.slice(sender)
        for receiver in rng.choice(s.peers(Kind.NET), 2, replace=False).tolist():
            there = _between(plan.slice(receiver), sender, out=False)
            assert _between(s, receiver, out=True) == there
            pairs += len(there) > 0
    for receiver in (SOURCES + rng.choice(MEMBERS - SOURCES, 2, replace=False)).tolist():
        s = plan.slice(receiver)
        for sender in rng.choice(s.peers(Kind.NET), 2, replace=False).tolist():
            assert _between(plan.slice(sender), receiver, out=True) == _between(s, sender, out=False)
    assert pairs == 4
    assert time.monotonic() - begun < HANG


def test_a_member_receives_its_share_and_its_domain_all_that_it_wants() -> None:
    plan = _plan(landing=False)
    domain = [plan.slice(m) for m in range(SOURCES + 320, SOURCES + 328)]
    assert sum(s.bytes_by(Kind.NET, out=False) for s in domain) == plan.targets[0].nbytes
    for s in domain:
        wanted = plan.targets[0].local_nbytes(s.member)
        assert s.bytes_by(Kind.NET, out=False) + s.bytes_by(Kind.LANDED, out=False) == wanted


def test_slices_need_little_memory() -> None:
    plan = _plan(landing=False)
    plan.slice(0)
    tracemalloc.start()
    for member in (1, SOURCES + 1):
        plan.slice(member)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


def test_the_cost_of_the_whole_plan_is_counted_without_slices() -> None:
    """One tensor, 3 million (sender, receiver) pairs."""
    begun = time.monotonic()
    source, destination = Mesh.arange((SOURCES,)), Mesh.arange((625, 8), first=SOURCES)
    have = ModelLayout({"w": TensorLayout((155_000, 512), "bfloat16", source, (Shard(0),))})
    want = ModelLayout({"w": TensorLayout((155_000, 512), "bfloat16", destination, (Replicate(), Shard(0)))})
    plan = Plan.between(have, want, Topology.blocks(MEMBERS, 8))
    found = cost(plan)
    assert found.net == found.lower_bound == 625 * want.nbytes
    assert found.source_balance == 1.0
    for member in (0, 1234, SOURCES, MEMBERS - 1):
        s = plan.slice(member)
        assert found.links[Kind.NET].sent[member] == s.bytes_by(Kind.NET, out=True)
        assert found.links[Kind.NET].received[member] == s.bytes_by(Kind.NET, out=False)
    assert time.monotonic() - begun < HANG


def test_staging_holds_at_that_scale() -> None:
    """The embedding takes many rounds; no round may hold more than half of what is staged for two."""
    plan = _plan(landing=False)
    assert plan.rounds.parts.max() > 1
    for member in (0, 4999, SOURCES, MEMBERS - 1):
        s = plan.slice(member)
        net = s.legs.kind == Kind.NET
        assert 2 * np.bincount(s.legs.round[net], s.nbytes[net]).max(initial=0) <= plan.options.staging
