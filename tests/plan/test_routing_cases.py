"""The routing cases that peers get wrong: bytes into domains, and how the sources share the work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.layout.catalog import model
from elastic_reshard.plan import Destination, Kind, Plan, PlanOptions, Source, Topology
from elastic_reshard.plan.cost import cost
from tests.plan.execute import World

R, S = Replicate(), Shard(0)


@dataclass(frozen=True)
class Case:
    """Meshes and placements of both sides, and the size of a domain. The two sides share no domain."""

    source: tuple[int, ...]
    destination: tuple[int, ...]
    domain: int
    sharded: bool = True  # whether the source's last axis shards

    def plan(self, shapes: list[tuple[int, ...]], landing: bool = False) -> Plan:
        first = int(np.prod(self.source))
        members = first + int(np.prod(self.destination))
        meshes = Mesh.arange(self.source), Mesh.arange(self.destination, first=first)
        placements = (*[R] * (len(self.source) - 1), S if self.sharded else R), (R, S)
        have, want = (
            ModelLayout({f"w{i}": TensorLayout(s, "bfloat16", mesh, p) for i, s in enumerate(shapes)})
            for mesh, p in zip(meshes, placements, strict=True)
        )
        labels = [("source", m // self.domain) for m in range(first)]
        labels += [("destination", m // self.domain) for m in range(members - first)]
        return Plan.between(have, want, Topology.of(labels), PlanOptions(landing=landing))


CASES = {
    "TP8xDP8 -> TP8xDP8, one 64-GPU domain": Case((8, 8), (8, 8), 64),
    "TP8xDP16 -> TP8xDP16, two 64-GPU domains": Case((16, 8), (16, 8), 64),
    "EDP4 -> TP8xDP8, domains of 8": Case((4,), (8, 8), 8, sharded=False),
    "EP16 -> TP32xDP8, domains of 64": Case((16,), (8, 32), 64),
    "TP4xDP3 -> TP2xDP8, domains of 8": Case((3, 4), (8, 2), 8),
}
MOE_LAYER = [
    (128, 768, 2048),
    (128, 768, 2048),
    (128, 2048, 768),
    (4096, 2048),
    (512, 2048),
    (512, 2048),
    (151936, 2048),
]


def _check(plan: Plan) -> None:
    found = cost(plan)
    wanting = [d for d, need in enumerate(found.need) if need]
    assert found.need[wanting].tolist() == [sum(t.nbytes for t in plan.targets)] * len(wanting)
    assert found.ingress.tolist() == found.need.tolist()
    assert found.ratio == 1.0
    assert (found.links[Kind.NET].sent[found.holders] > 0).all(), "every source works"
    assert found.source_balance <= 1.05
    assert found.receiver_balance <= 1.05


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("shape", [(4096, 4096), (151936, 1024), (32 * 37, 4099), (160, 16384)], ids=str)
def test_a_single_tensor_enters_each_domain_once_from_all_sources_alike(case: Case, shape: tuple[int, ...]) -> None:
    _check(case.plan([shape]))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_dense_model(case: Case) -> None:
    _check(case.plan([p.shape for p in model("Qwen3-0.6B").parameters if len(p.shape) > 1]))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_layers_with_stacked_experts(case: Case) -> None:
    _check(case.plan(MOE_LAYER))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_landing_enters_each_domain_once_too(case: Case) -> None:
    found = cost(case.plan(MOE_LAYER, landing=True))
    assert found.ingress.tolist() == found.need.tolist()
    assert found.ratio == 1.0
    assert (found.links[Kind.NET].sent[found.holders] > 0).all()


def test_many_tensors_too_small_to_cut_are_spread_over_all_replicas() -> None:
    """256 norms of 2 KiB, less than a stripe: labels turn from tensor to tensor."""
    plan = CASES["TP8xDP8 -> TP8xDP8, one 64-GPU domain"].plan([(1024,)] * 256)
    found = cost(plan)
    assert found.ratio == 1.0
    assert found.source_balance <= 1.05
    assert found.receiver_balance <= 1.05


@pytest.mark.parametrize("factor", [7, 13, 61])
def test_nothing_depends_on_divisibility(factor: int) -> None:
    """Peers fall back to one replica when dim 0 does not divide by the replicas."""
    plan = Case((7, 3), (5, 4), 8).plan([(factor * 31, 4099)])
    found = cost(plan)
    assert found.ratio == 1.0
    assert found.source_balance <= 1.05


def _rows_of(plan: Plan, member: int, kind: Kind = Kind.NET) -> list[tuple[int, int, int]]:
    """(peer, first row, row after the last) that a member sends, whole rows."""
    s, found = plan.slice(member), []
    for i in np.flatnonzero((s.legs.kind == kind) & s.legs.out).tolist():
        columns = int(s.legs.extent[i, 1])
        first, last = int(s.legs.first[i]), int(s.legs.last[i])
        assert first % columns == last % columns == 0
        row = int(s.legs.lo[i, 0])
        found.append((int(s.legs.peer[i]), row + first // columns, row + last // columns))
    return sorted(found)


def test_ten_rows_over_four_ranks_are_3_3_3_1() -> None:
    have = ModelLayout({"w": TensorLayout((10, 4), "float32", Mesh.arange((1,)), (R,))})
    want = ModelLayout({"w": TensorLayout((10, 4), "float32", Mesh.arange((4,), first=1), (S,))})
    plan = Plan.between(have, want, Topology.isolated(5))
    assert _rows_of(plan, 0) == [(1, 0, 3), (2, 3, 6), (3, 6, 9), (4, 9, 10)]
    World(plan).run().check()


def test_two_shards_to_two_replicas_of_two_shards_are_striped() -> None:
    have = ModelLayout({"w": TensorLayout((8, 4), "float32", Mesh.of([0, 1]), (S,))})
    want = ModelLayout({"w": TensorLayout((8, 4), "float32", Mesh.of([[2, 3], [4, 5]]), (R, S))})
    plan = Plan.between(have, want, Topology.of(["a", "b", "c", "c", "c", "c"]), PlanOptions(min_stripe=16))
    assert _rows_of(plan, 0) == [(2, 0, 2), (4, 2, 4)]
    assert _rows_of(plan, 1) == [(3, 4, 6), (5, 6, 8)]
    # Each receiver hands its stripe to the other member of its group, {2, 4} and {3, 5}.
    assert [_rows_of(plan, m, Kind.LANDED) for m in (2, 3, 4, 5)] == [
        [(4, 0, 2)],
        [(5, 4, 6)],
        [(2, 2, 4)],
        [(3, 6, 8)],
    ]
    World(plan).run().check()


def test_a_member_of_two_sources_counts_once_where_they_overlap() -> None:
    """Member 1 holds everything twice: it sends a third like 0 and 2, not a half."""
    whole = ModelLayout({"w": TensorLayout((768, 512), "float32", Mesh.arange((2,)), (R,))})
    want = Destination(ModelLayout({"w": TensorLayout((768, 512), "float32", Mesh.arange((1,)), (R,))}), (3,))
    plan = Plan((Source(whole, (0, 1)), Source(whole, (1, 2))), (want,), Topology.isolated(4))
    assert cost(plan).source_balance <= 1.05
    World(plan).run().check()


def test_a_source_in_the_domain_is_preferred_to_the_network() -> None:
    have = ModelLayout({"w": TensorLayout((64, 64), "float32", Mesh.of([[0, 1], [2, 3]]), (R, S))})
    want = ModelLayout({"w": TensorLayout((64, 64), "float32", Mesh.of([4, 5]), (S,))})
    plan = Plan.between(have, want, Topology.of(["a", "b", "c", "b", "a", "b"]))
    found = cost(plan)
    # Member 4 wants what 0 and 2 hold and shares a domain with 0; 5 wants what 1 and 3 hold and shares one with both.
    half = 64 * 64 * 4 // 2
    assert found.net == found.lower_bound == 0
    assert found.links[Kind.LOCAL].sent.tolist() == [half, half // 2, 0, half // 2, 0, 0]
    World(plan).run().check()


def test_holders_share_the_domains_that_have_none_of_their_own() -> None:
    """Two replicas in a domain that wants the tensor itself, and three more domains that want it: 1.5 copies each."""
    have = ModelLayout({"w": TensorLayout((512, 512), "float32", Mesh.of([2, 3]), (R,))})
    want = ModelLayout({"w": TensorLayout((512, 512), "float32", Mesh.arange((10,)), (R,))})
    for labels in ("bbaaccccdd", "bbaaddccdd", "ccaabbbbdd"):
        plan = Plan.between(have, want, Topology.of(labels))
        found = cost(plan)
        assert found.ratio == 1.0
        assert found.net == (len(set(labels)) - 1) * have.nbytes
        assert found.source_balance <= 1.05
        World(plan).run().check()


def test_members_of_a_domain_share_what_enters_beside_what_is_there() -> None:
    """The first half of the tensor is in the domain; the two receivers halve the other half."""
    have = ModelLayout({"w": TensorLayout((512, 512), "float32", Mesh.arange((4,)), (S,))})
    want = ModelLayout({"w": TensorLayout((512, 512), "float32", Mesh.of([4, 5]), (R,))})
    for labels in ("bbaabb", "abbabb", "baabbb", "baaabb"):
        plan = Plan.between(have, want, Topology.of(labels))
        received = cost(plan).links[Kind.NET].received[[4, 5]]
        assert received.sum() == labels.count("a") * have.nbytes // 4
        assert received.max() <= 1.05 * received.mean()
        World(plan).run().check()


def test_a_member_takes_its_own_bytes_from_itself() -> None:
    have = ModelLayout({"w": TensorLayout((64, 64), "float32", Mesh.arange((4,)), (S,))})
    want = ModelLayout({"w": TensorLayout((64, 64), "float32", Mesh.of([3, 2, 1, 0]), (S,))})
    for topology, kind in ((Topology.isolated(4), Kind.NET), (Topology.single(4), Kind.LOCAL)):
        found = cost(Plan.between(have, want, topology))
        assert found.links[kind].total == 64 * 64 * 4
    for topology in (Topology.isolated(4), Topology.single(4)):
        found = cost(Plan.between(have, have, topology))
        assert {kind: t.total for kind, t in found.links.items() if t.total} == {Kind.SELF: 64 * 64 * 4}
