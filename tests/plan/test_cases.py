"""Cases in which other systems failed, named as in the list of cases the project was built against."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from elastic_reshard.errors import LayoutMismatch, PlanError, UnsupportedPlacement
from elastic_reshard.layout import (
    Box,
    Declared,
    Mesh,
    ModelLayout,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
)
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.plan import Destination, Kind, Plan, PlanOptions, Slice, Source, Topology
from elastic_reshard.plan.cost import cost
from tests.plan.execute import World, least_ingress

R, S = Replicate(), Shard(0)
SMALL = PlanOptions(min_stripe=16, cell=64, message=64, staging=1 << 14)


def _one(layout: TensorLayout) -> ModelLayout:
    return ModelLayout({"w": layout})


def _run(have: TensorLayout, want: TensorLayout, topology: Topology | None = None) -> World:
    """Streaming and landing; the streaming world."""
    members = 1 + max(*have.mesh.ranks, *want.mesh.ranks)
    worlds = []
    for options in (SMALL, PlanOptions(min_stripe=16, cell=64, message=64, staging=1 << 14, landing=True)):
        plan = Plan.between(_one(have), _one(want), topology or Topology.isolated(members), options)
        worlds.append(World(plan).run().check())
        assert worlds[-1].ingress == least_ingress(plan)
    return worlds[0]


class TestB59:
    """Shards that are uneven in a way the library does not expect: offsets are what members declare."""

    @pytest.mark.parametrize("rows", [(2, 3), (3, 2), (0, 5), (5, 0)])
    @pytest.mark.parametrize("spelled", ["boxes", "offsets"])
    def test_rows_arrive_by_their_declared_offsets(self, rows: tuple[int, int], spelled: str) -> None:
        shape = (5, 3)
        if spelled == "boxes":
            boxes = {0: Box((0, 0), (rows[0], 3)), 1: Box((rows[0], 0), (5, 3))}
            have = TensorLayout.declare(shape, "float32", boxes)
        else:
            have = TensorLayout(shape, "float32", Mesh.arange((2,)), (Declared(0, (0, rows[0], 5)),))
        world = _run(have, TensorLayout(shape, "float32", Mesh.arange((2,), first=2), (S,)))
        np.testing.assert_array_equal(world.live[2, 0][:, 0] // 3, [0, 1, 2])
        np.testing.assert_array_equal(world.live[3, 0][:, 0] // 3, [3, 4])

    def test_holes_and_disagreeing_overlaps_are_refused(self) -> None:
        want = _one(TensorLayout((5, 3), "float32", Mesh.arange((2,), first=2), (S,)))
        for boxes, kind in (
            ({0: Box((0, 0), (2, 3)), 1: Box((3, 0), (5, 3))}, "hole"),
            ({0: Box((0, 0), (3, 3)), 1: Box((2, 0), (5, 3))}, "overlap"),
        ):
            have = _one(TensorLayout.declare((5, 3), "float32", boxes))
            with pytest.raises(LayoutMismatch, match=kind):
                Plan.between(have, want, Topology.isolated(4))


class TestB61:
    """FSDP over TP on one dim: shards are not in order from left to right, and uneven ones have gaps."""

    @pytest.mark.parametrize("rows", [5, 1, 7, 8, 16])
    def test_tensor_parallel_cut_first(self, rows: int) -> None:
        have = TensorLayout((rows, 2), "float32", Mesh.arange((2, 2)), (StridedShard(0, 2), S))
        want = TensorLayout((rows, 2), "float32", Mesh.arange((2,), first=4), (S,))
        _run(have, want)
        _run(TensorLayout((rows, 2), "float32", Mesh.arange((2,)), (S,)), _moved(have, 2))

    def test_left_to_right_is_another_layout(self) -> None:
        strided = TensorLayout((5, 2), "float32", Mesh.arange((2, 2)), (StridedShard(0, 2), S))
        plain = TensorLayout((5, 2), "float32", Mesh.arange((2, 2)), (S, S))
        assert strided.content_id != plain.content_id
        _run(strided, _moved(plain, 4))

    def test_unknown_kinds_are_refused(self) -> None:
        for kind in (Partial(), "S(0)"):
            with pytest.raises(UnsupportedPlacement):
                TensorLayout((5, 2), "float32", Mesh.arange((2,)), (kind,))  # type: ignore[arg-type]


def _moved(layout: TensorLayout, first: int) -> TensorLayout:
    mesh = Mesh.arange(layout.mesh.shape, first=first)
    return TensorLayout(layout.shape, layout.dtype, mesh, layout.placements)


class TestB62:
    """The natural spelling of every placement works, for any number of dims and axes."""

    @pytest.mark.parametrize(("a", "b"), [(S, R), (R, R), (R, S)], ids=str)
    @pytest.mark.parametrize("shape", [(6,), (5, 2), (3, 2, 2, 2), (2, 3, 1, 2, 2)], ids=str)
    def test_one_axis(self, a: Placement, b: Placement, shape: tuple[int, ...]) -> None:
        have = TensorLayout(shape, "float32", Mesh.arange((2,)), (a,))
        want = TensorLayout(shape, "float32", Mesh.arange((3,), first=2), (b,))
        _run(have, want)
        _run(have, want, Topology.of([0, 0, 1, 1, 1]))

    def test_scalars(self) -> None:
        have = TensorLayout((), "float32", Mesh.arange((2,)), (R,))
        world = _run(have, TensorLayout((), "float32", Mesh.arange((3,), first=2), (R,)), Topology.of([0, 0, 1, 1, 1]))
        assert world.ingress == {1: 4}
        _run(have, TensorLayout((), "float32", Mesh.of(3, ()), ()))

    @pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (S, S)], ids=str)
    def test_two_axes_that_shard(self, placements: tuple[Placement, ...]) -> None:
        have = TensorLayout((5, 7), "float32", Mesh.arange((2, 3)), placements)
        _run(have, TensorLayout((5, 7), "float32", Mesh.arange((2, 2), first=6), (R, S)))


class TestB63:
    """Members with nothing: they have a slice like all others, through the same rounds."""

    @pytest.mark.parametrize("shape", [(3,), (3, 4), (0,), (4, 0), (0, 0, 2)], ids=str)
    def test_fewer_rows_than_members(self, shape: tuple[int, ...]) -> None:
        have = TensorLayout(shape, "float32", Mesh.arange((4,)), (S,))
        want = TensorLayout(shape, "float32", Mesh.arange((4,), first=4), (S,))
        world = _run(have, want)
        assert len({s.rounds for s in world.slices}) == 1
        assert len(world.slices[7].legs) == 0
        assert world.live[7, 0].shape == want.local_shape(7)
        assert all((s.nbytes > 0).all() for s in world.slices), "no leg of zero bytes"

    def test_a_member_of_the_topology_that_is_in_no_layout(self) -> None:
        have = _one(TensorLayout((8,), "float32", Mesh.arange((2,)), (S,)))
        want = _one(TensorLayout((8,), "float32", Mesh.of([2, 4]), (S,)))
        plan = Plan.between(have, want, Topology.isolated(6))
        for member in (3, 5):
            s = plan.slice(member)
            assert len(s.legs) == len(s.message) == 0
            assert s.rounds == plan.rounds.count == 1
            assert s.peers(Kind.NET) == []
        World(plan).run().check()

    def test_a_model_without_a_tensor(self) -> None:
        plan = Plan.between(ModelLayout({}), ModelLayout({}), Topology.isolated(2))
        assert plan.rounds.count == 0
        assert len(plan.slice(0).legs) == 0


HUGE = [(1 << 31) - 1, 1 << 31, 1 << 32, (1 << 33) + 3]


class TestB64:
    """Sizes around 2**31 and 2**32: planned without memory, counted in 64 bits."""

    @pytest.mark.parametrize("numel", HUGE)
    @pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
    @pytest.mark.parametrize("landing", [False, True])
    def test_chunks_cover_the_tensor_exactly(self, numel: int, dtype: str, landing: bool) -> None:
        """FSDP3 -> one engine of two and one of one, a domain each: every range in every domain once, none above 64 MiB."""
        options = PlanOptions(message=1 << 26, staging=1 << 30, cell=1 << 26, landing=landing)
        have = _one(TensorLayout((numel,), dtype, Mesh.arange((3,)), (S,)))
        half = -(-numel // 2)
        boxes = {3: Box((0,), (half,)), 4: Box((half,), (numel,)), 5: Box((0,), (numel,))}
        tracemalloc.start()
        plans = [
            Plan.between(
                have, _one(TensorLayout.declare((numel,), dtype, {m: boxes[m] for m in engine})), topology, options
            )
            for engine, topology in (((3, 4), Topology.of("abcddd")), ((5,), Topology.of("abcddd")))
        ]
        for plan, receivers in zip(plans, ((3, 4), (5,)), strict=True):
            sent = _ranges([plan.slice(m) for m in range(3)], out=True)
            received = _ranges([plan.slice(m) for m in receivers], out=False)
            assert (sent == received).all()
            assert sent[0, 0] == 0
            assert sent[-1, 1] == numel
            assert (sent[1:, 0] == sent[:-1, 1]).all(), "no gap and no overlap"
            assert (sent[:, 1] - sent[:, 0]).max() * itemsize(dtype) <= options.message
            assert cost(plan).net == numel * itemsize(dtype)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
        tracemalloc.stop()

    @pytest.mark.parametrize("shape", [((1 << 17) + 1, 1 << 15), (3, (1 << 31) + 5), (2, 2, (1 << 31) + 1)], ids=str)
    def test_places_in_large_tensors(self, shape: tuple[int, ...]) -> None:
        """Every element that a member receives lies inside its local tensor, and there are as many as it has."""
        have = _one(TensorLayout(shape, "uint8", Mesh.arange((3,)), (Shard(len(shape) - 1),)))
        want = _one(TensorLayout(shape, "uint8", Mesh.arange((2,), first=3), (S,)))
        plan = Plan.between(have, want, Topology.isolated(5), PlanOptions(message=1 << 26, staging=1 << 30))
        for member in (3, 4):
            s, local = plan.slice(member), want["w"].local_shape(member)
            assert local is not None
            assert s.bytes_by(Kind.NET, out=False) == int(np.prod(local, dtype=np.int64))
            assert ((s.legs.target_at >= 0) & (s.legs.target_at + s.legs.extent <= np.array(local))).all()
            assert (s.legs.last <= np.prod(s.legs.extent, axis=1, dtype=np.int64)).all()

    @pytest.mark.parametrize("numel", [(1 << 20) - 1, 1 << 20, (1 << 20) + 3])
    @pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "complex128"])
    def test_messages_of_one_kib_are_cut_by_the_same_code(self, numel: int, dtype: str) -> None:
        have = _one(TensorLayout((numel,), dtype, Mesh.arange((3,)), (S,)))
        want = _one(TensorLayout((numel,), dtype, Mesh.arange((2,), first=3), (S,)))
        plan = Plan.between(
            have, want, Topology.isolated(5), PlanOptions(message=1 << 10, staging=1 << 16, min_stripe=16)
        )
        slices = [plan.slice(m) for m in range(5)]
        sent = _ranges(slices[:3], out=True)
        assert (sent == _ranges(slices[3:], out=False)).all()
        assert sent[0, 0] == 0
        assert sent[-1, 1] == numel
        assert (sent[1:, 0] == sent[:-1, 1]).all()
        for s in slices:
            assert np.bincount(s.message, s.nbytes).max() <= 1 << 10
            # Cutting finer than asked for would cost messages: on average they are at least half full.
            assert len(np.unique(s.message)) <= 2 * (-(-int(s.nbytes.sum()) // (1 << 10)))


def _ranges(slices: list[Slice], *, out: bool) -> np.ndarray:
    """[begin, end) in the one-dimensional tensor of all network legs of these members, sorted."""
    found = []
    for s in slices:
        chosen = s.legs.take((s.legs.kind == Kind.NET) & (s.legs.out == out))
        found.append(np.stack([chosen.lo[:, 0] + chosen.first, chosen.lo[:, 0] + chosen.last], axis=1))
    ranges = np.concatenate(found)
    return ranges[np.argsort(ranges[:, 0])]


MIXED = [("bfloat16", 3), ("float32", 2), ("uint8", 1), ("int64", 1), ("float8_e4m3fn", 5), ("complex128", 1)]


class TestB66:
    """Small tensors of mixed dtypes in one message: every leg is aligned to its elements, by one rule at both ends."""

    @pytest.mark.parametrize("order", list(itertools.permutations(range(6)))[::7], ids=str)
    @pytest.mark.parametrize("landing", [False, True])
    def test_every_order(self, order: tuple[int, ...], landing: bool) -> None:
        have, want = (
            ModelLayout({f"t{i}": TensorLayout((MIXED[i][1],), MIXED[i][0], Mesh.of([rank]), (R,)) for i in order})
            for rank in (0, 1)
        )
        plan = Plan.between(have, want, Topology.isolated(2), PlanOptions(landing=landing))
        ends = [plan.slice(0), plan.slice(1)]
        for s in ends:
            net = s.legs.kind == Kind.NET
            assert len(np.unique(s.message[net])) == 1, "they share a message"
            item = np.array([itemsize(s.tensors[t].dtype) for t in s.legs.tensor[net]])
            begin = np.cumsum(s.nbytes[net]) - s.nbytes[net]
            assert (begin % item == 0).all()
        assert ends[0].legs.tensor.tolist() == ends[1].legs.tensor[ends[1].legs.kind == Kind.NET].tolist()
        World(plan).run().check()

    def test_many_small_tensors_between_many_members(self) -> None:
        """No separate path for "misc" tensors: 60 of them between FSDP3 and TP2, in a few messages per pair."""
        shapes = {f"{i}": (MIXED[i % 6][1] * (1 + i % 4), 1 + i % 3) for i in range(60)}
        have, want = (
            ModelLayout({n: TensorLayout(s, MIXED[int(n) % 6][0], mesh, (S,)) for n, s in shapes.items()})
            for mesh in (Mesh.arange((3,)), Mesh.arange((2,), first=3))
        )
        plan = Plan.between(have, want, Topology.isolated(5))
        World(plan).run().check()
        for member in range(5):
            s = plan.slice(member)
            assert len(np.unique(s.message)) == len(s.peers(Kind.NET))
            item = np.array([itemsize(s.tensors[t].dtype) for t in s.legs.tensor])
            for number in np.unique(s.message):
                here = s.message == number
                begin = np.cumsum(s.nbytes[here]) - s.nbytes[here]
                assert (begin % item[here] == 0).all()


def _stages(first: int, stages: int, tp: int, layers: int) -> ModelLayout:
    """Pipeline stages of `tp` members each, with whole layers each."""
    return ModelLayout(
        {
            f"layer{i}": TensorLayout(
                (12, 8), "float32", Mesh.arange((tp,), first=first + tp * (i * stages // layers)), (S,)
            )
            for i in range(layers)
        }
    )


class TestB69:
    """Pipeline stages with the same tensor-parallel rank are different members."""

    def test_each_stage_sends_its_own_layers(self) -> None:
        plan = Plan.between(_stages(0, 2, 1, 4), _stages(2, 1, 1, 4), Topology.isolated(3))
        World(plan).run().check()
        for stage, own in ((0, {"layer0", "layer1"}), (1, {"layer2", "layer3"})):
            s = plan.slice(stage)
            assert {s.tensors[t].name for t in s.legs.tensor} == own

    def test_a_member_is_named_once(self) -> None:
        with pytest.raises(PlanError, match="repeat"):
            Plan(
                (Source(_stages(0, 2, 1, 4), (0, 0)),), (Destination(_stages(0, 1, 1, 4), (1,)),), Topology.isolated(2)
            )


class TestB70:
    """Two stages, two engines: one order of rounds and messages for all, and both stages send from the first round on."""

    @pytest.mark.parametrize("landing", [False, True])
    def test_several_senders_to_each_receiver_are_kept_apart(self, landing: bool) -> None:
        have = _stages(0, 2, 2, 8)
        want = ModelLayout({n: TensorLayout(t.shape, t.dtype, Mesh.arange((2, 2)), (R, S)) for n, t in have.items()})
        options = PlanOptions(min_stripe=16, message=64, staging=1024, cell=64, landing=landing)
        for topology in (Topology.isolated(8), Topology.of("aabbccdd")):
            plan = Plan((Source(have, (3, 2, 1, 0)),), (Destination(want, (4, 5, 6, 7)),), topology, options)
            world = World(plan).run().check()
            assert plan.rounds.count > 2
            for receiver in (4, 5, 6, 7):
                s = world.slices[receiver]
                net = (s.legs.kind == Kind.NET) & ~s.legs.out
                begun = {int(s.legs.round[net & (s.legs.peer == p)].min()) for p in s.peers(Kind.NET)}
                assert max(begun) <= plan.rounds.parts.max(), "a stage waits for one tensor of the other, not for all"

    def test_rounds_of_stages_side_by_side_take_as_long_as_those_of_one(self) -> None:
        """Different receivers: four stages to four others need the rounds of one pair, not four times as many."""
        options = PlanOptions(min_stripe=16, message=64, staging=1024)
        alone = Plan.between(_stages(0, 1, 1, 4), _stages(1, 1, 1, 4), Topology.isolated(2), options)
        four = Plan.between(_stages(0, 4, 1, 16), _stages(4, 4, 1, 16), Topology.isolated(8), options)
        assert four.rounds.count == alone.rounds.count
