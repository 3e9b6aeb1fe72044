"""The pairwise planner of the benchmark, as an oracle for the planner and for itself."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.bench import plan as bench
from elastic_reshard.bench.pairwise import pairwise
from elastic_reshard.errors import PlanError
from elastic_reshard.layout import Box, Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.plan import Destination, Kind, Plan, Source, Topology
from tests.plan.strategies import examples, layouts


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[TensorLayout, TensorLayout]:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 3, 8, 17]), max_size=3)))
    return draw(layouts(shape, "float32", 5)), draw(layouts(shape, "float32", 5))


@given(pair=_pairs())
@examples(100)
def test_pairwise_gives_each_rank_each_of_its_elements_once(pair: tuple[TensorLayout, TensorLayout]) -> None:
    have, want = pair
    for rank in want.mesh.ranks:
        times = np.zeros(have.shape, dtype=np.int64)
        for piece in pairwise(have, want):
            assert any(box.contains(piece.box) for box, _ in have.boxes(piece.source))
            if piece.destination == rank:
                times[piece.box.slices()] += 1
        wanted = np.zeros(have.shape, dtype=np.int64)
        for box, _ in want.boxes(rank):
            wanted[box.slices()] += 1
        np.testing.assert_array_equal(times, wanted)


@given(pair=_pairs())
@examples(100)
def test_without_domains_and_replicas_the_planner_moves_what_the_pairwise_one_moves(
    pair: tuple[TensorLayout, TensorLayout],
) -> None:
    have, want = pair
    if (have.table.replicas > 1).any():
        have = _without_replicas(have)
    holders = max(have.mesh.ranks) + 1
    plan = Plan(
        (Source(ModelLayout({"w": have})),),
        (Destination(ModelLayout({"w": want}), tuple(range(holders, holders + 5))),),
        Topology.isolated(holders + 5),
    )
    expected: Counter[tuple[int, int]] = Counter()
    for piece in pairwise(have, want):
        expected[piece.source, holders + piece.destination] += piece.box.numel * itemsize(have.dtype)
    moved: Counter[tuple[int, int]] = Counter()
    for member in range(holders):
        s = plan.slice(member)
        for peer, nbytes in zip(s.legs.peer.tolist(), s.nbytes.tolist(), strict=True):
            moved[member, peer] += nbytes
    assert moved == expected


def _without_replicas(have: TensorLayout) -> TensorLayout:
    """The same regions, each with a rank of its own."""
    t = have.table
    boxes = [Box(tuple(lo), tuple(hi)) for lo, hi in zip(t.lo.tolist(), t.hi.tolist(), strict=True)]
    return TensorLayout.declare(have.shape, have.dtype, dict(enumerate(boxes)))


def test_the_benchmark_has_a_row_for_each_size_and_leaves_out_what_would_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = bench.run((16, 32, 64), repeats=1)
    assert [r.members for r in found] == [16, 32, 64]
    assert found[2].refit == "FSDP32 -> TP8 DP4"
    assert all(r.pairwise is not None for r in found)
    assert found[0].growth_cold is None
    assert found[1].growth_cold is not None
    assert all(t > 0 for r in found for t in (r.source_cold, r.source_warm, r.destination_cold, r.destination_warm))
    monkeypatch.setattr(bench, "_PAIRWISE_LIMIT", 0.0)
    short = bench.run((16, 32, 64), repeats=1)
    assert [r.pairwise is None for r in short] == [False, True, True]
    assert short[1].note.startswith("skipped: about")
    rows = bench.table(short)
    assert len({len(row) for row in rows}) == 1
    assert rows[2][7] == short[1].note
    with pytest.raises(PlanError, match="multiples of 16"):
        bench.run((40,))


def test_its_cases_are_right() -> None:
    have = TensorLayout((10, 4), "float32", Mesh.arange((2, 2)), (Replicate(), Shard(0)))
    want = TensorLayout((10, 4), "float32", Mesh.arange((4,)), (Shard(0),))
    found = [(p.source, p.destination, p.box.lo[0], p.box.hi[0]) for p in pairwise(have, want)]
    assert found == [(0, 0, 0, 3), (2, 1, 3, 5), (3, 1, 5, 6), (1, 2, 6, 9), (3, 3, 9, 10)]
    s = Plan.between(ModelLayout({"w": have}), ModelLayout({"w": want}), Topology.isolated(4)).slice(0)
    assert s.bytes_by(Kind.SELF, out=False) == 3 * 4 * 4
