"""Who holds what: every small layout against an oracle of plain lists."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from elastic_reshard.errors import LayoutError, UnsupportedPlacement
from elastic_reshard.layout import (
    Box,
    Declared,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
)
from tests.layout.oracle import elements_of, held, rows_of

SIZES = range(18)
ONE_AXIS = [(n,) for n in range(1, 13)]
TWO_AXES = [(a, b) for a in range(1, 13) for b in range(1, 13) if a * b <= 12]


def choices(axes: tuple[int, ...]) -> list[tuple[Placement, ...]]:
    """Every combination; strided shards with each factor that another axis could have, and one that fits
    none."""
    strided = [StridedShard(0, n) for n in sorted({*axes, 2, 3})]
    return list(itertools.product([Replicate(), Shard(0), *strided], repeat=len(axes)))


def check_1d(layout: TensorLayout) -> None:
    for row, coordinate in enumerate(layout.mesh.coordinates().tolist()):
        rank = layout.mesh.ranks[row]
        want = held(layout.shape[0], 0, layout.mesh, layout.placements, coordinate)
        boxes = layout.boxes(rank)
        assert [i for box, _ in boxes for i in range(box.lo[0], box.hi[0])] == want, (layout, rank)
        ends = np.cumsum([0, *(box.numel for box, _ in boxes)]).tolist()
        assert [at for _, at in boxes] == [(e,) for e in ends[:-1]], (layout, rank)
        assert layout.local_shape(rank) == (len(want),), (layout, rank)


@pytest.mark.parametrize("axes", [*ONE_AXIS, *TWO_AXES], ids=str)
def test_every_small_layout_of_one_dim(axes: tuple[int, ...]) -> None:
    mesh = Mesh.arange(axes)
    for placements in choices(axes):
        for size in SIZES:
            layout = TensorLayout((size,), "int8", mesh, placements)
            check_1d(layout)
            assert layout.missing() == 0, layout
            assert layout.overlapping() == [], layout


@pytest.mark.parametrize("axes", [(2, 2, 2), (2, 3, 2), (1, 2, 3)], ids=str)
def test_three_axes_on_one_dim(axes: tuple[int, ...]) -> None:
    mesh = Mesh.arange(axes)
    for placements in itertools.product([Replicate(), Shard(0), StridedShard(0, 2)], repeat=3):
        for size in (0, 1, 5, 7, 12, 17):
            check_1d(TensorLayout((size,), "int8", mesh, placements))


@pytest.mark.parametrize(
    "shape",
    [(), (5,), (0,), (3, 5), (5, 0), (0, 4), (1, 7), (5, 3, 4), (2, 1, 0), (2, 3, 2, 3), (2, 1, 2, 1, 3)],
)
@pytest.mark.parametrize("axes", [(1,), (4,), (2, 3), (2, 2, 2)], ids=str)
def test_several_dims_and_axes(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    kinds: list[Placement] = [Replicate()]
    kinds += [p for d in range(min(3, len(shape))) for p in (Shard(d), StridedShard(d, 2))]
    for placements in itertools.product(kinds, repeat=len(axes)):
        layout = TensorLayout(shape, "int8", Mesh.arange(axes), placements)
        assert rows_of(layout) == elements_of(layout), layout


@pytest.mark.parametrize("ranks", [[3, 1, 2, 0], [9, 4, 7, 100], [[5, 0], [3, 8]]], ids=str)
def test_ranks_in_any_order(ranks: list[int]) -> None:
    mesh = Mesh.of(ranks)
    for placements in choices(mesh.shape):
        layout = TensorLayout((7,), "int8", mesh, placements)
        check_1d(layout)
        assert layout.local_shape(1000) is None
        assert layout.boxes(1000) == []


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**32, 2**33 + 3])
def test_sizes_beyond_32_bits(n: int) -> None:
    layout = TensorLayout((n, 3), "bfloat16", Mesh.arange((2, 4)), (StridedShard(0, 4), Shard(0)))
    boxes = [box for r in range(8) for box, _ in layout.boxes(r)]
    assert sum(b.numel for b in boxes) == layout.numel == 3 * n
    assert layout.nbytes == 6 * n
    assert max(b.hi[0] for b in boxes) == n
    assert layout.missing() == 0
    plain = TensorLayout((n,), "bool", Mesh.arange((5,)), (Shard(0),))
    step = -(-n // 5)
    want = [[(Box((i * step,), (min(n, i * step + step),)), (0,))] for i in range(5)]
    assert [plain.boxes(r) for r in range(5)] == want


def test_a_strided_shard_of_uneven_rows_has_gaps() -> None:
    layout = TensorLayout((5,), "int8", Mesh.arange((2,)), (StridedShard(0, 2),))
    assert layout.boxes(0) == [(Box((0,), (2,)), (0,)), (Box((3,), (4,)), (2,))]
    assert layout.boxes(1) == [(Box((2,), (3,)), (0,)), (Box((4,), (5,)), (1,))]


def test_replicas_share_a_region() -> None:
    table = TensorLayout((6,), "int8", Mesh.arange((2, 3)), (Replicate(), Shard(0))).table
    assert table.regions == 3
    assert table.replicas.tolist() == [2, 2, 2]
    assert [table.ranks[a:b].tolist() for a, b in itertools.pairwise(table.ptr)] == [[0, 3], [1, 4], [2, 5]]


def test_more_ranks_than_rows_leaves_some_empty() -> None:
    """CASES B63."""
    layout = TensorLayout((3, 2), "int8", Mesh.arange((4,)), (Shard(0),))
    assert layout.boxes(3) == []
    assert layout.local_shape(3) == (0, 2)
    assert TensorLayout((4, 0), "int8", Mesh.arange((2,)), (Shard(0),)).local_shape(1) == (2, 0)


def test_uneven_shards_are_what_members_declare() -> None:
    """CASES B59: 2 + 3 rows of 5, where the rule would say 3 + 2."""
    by_axis = TensorLayout((5, 4), "int8", Mesh.arange((2,), ("member",)), (Declared(0, (0, 2, 5)),))
    by_box = TensorLayout.declare((5, 4), "int8", {0: Box((0, 0), (2, 4)), 1: Box((2, 0), (5, 4))})
    assert rows_of(by_axis) == elements_of(by_axis) == rows_of(by_box)
    assert by_axis.content_id == by_box.content_id
    assert by_axis.local_shape(0) == (2, 4)


def test_a_declared_axis_beside_another() -> None:
    mesh = Mesh.arange((3, 2))
    beside: list[Placement] = [Replicate(), Shard(1), StridedShard(1, 2)]
    for other in beside:
        layout = TensorLayout((5, 3), "int8", mesh, (Declared(0, (0, 0, 4, 5)), other))
        assert rows_of(layout) == elements_of(layout), layout


def test_declared_members_may_hold_several_boxes_or_nothing() -> None:
    layout = TensorLayout.declare(
        (6, 2),
        "int8",
        {4: [Box((0, 0), (1, 2)), Box((3, 0), (5, 2))], 1: [Box((1, 0), (3, 2)), Box((5, 0), (6, 2))], 2: []},
    )
    assert layout.boxes(4) == [(Box((0, 0), (1, 2)), (0, 0)), (Box((3, 0), (5, 2)), (1, 0))]
    assert layout.local_shape(4) == (3, 2)
    assert layout.local_shape(1) == (3, 2)
    assert layout.boxes(2) == []
    assert layout.missing() == 0
    assert layout.overlapping() == []


def test_a_declared_member_may_hold_nothing_of_a_0d_tensor() -> None:
    layout = TensorLayout.declare((), "int8", {0: Box((), ()), 1: []})
    assert layout.boxes(0) == [(Box((), ()), ())]
    assert layout.boxes(1) == []
    assert layout.missing() == 0


def test_holes_and_overlaps_of_declared_members() -> None:
    layout = TensorLayout.declare((6,), "int8", {0: Box((0,), (3,)), 1: Box((2,), (4,)), 2: Box((0,), (3,))})
    assert layout.overlapping() == [(Box((0,), (3,)), Box((2,), (4,)))]
    holed = TensorLayout.declare((6,), "int8", {0: Box((0,), (2,)), 1: Box((3,), (6,))})
    assert holed.missing() == 1
    assert holed.overlapping() == []


def test_equal_tables_have_one_content_id_however_they_are_spelled() -> None:
    mesh = Mesh.arange((2, 2), ("dp", "tp"))
    a = TensorLayout((8,), "int8", mesh, (StridedShard(0, 2), Shard(0)))
    b = TensorLayout((8,), "int8", Mesh.of([[0, 2], [1, 3]]), (Shard(0), Shard(0)))
    assert a.content_id == b.content_id
    others = [
        TensorLayout((8,), "int8", mesh, (Shard(0), Shard(0))),
        TensorLayout((8,), "uint8", mesh, (StridedShard(0, 2), Shard(0))),
        TensorLayout((8, 1), "int8", mesh, (StridedShard(0, 2), Shard(0))),
        TensorLayout((8,), "int8", Mesh.arange((2, 2), first=1), (StridedShard(0, 2), Shard(0))),
    ]
    assert len({a.content_id, *(o.content_id for o in others)}) == 5


@pytest.mark.parametrize(
    ("shape", "placements", "faults"),
    [
        ((4,), (Shard(0),), ["1 placements for 2 mesh axes"]),
        ((4,), (Shard(1), Shard(-1)), ["S(1) cuts a dim", "S(-1) cuts a dim"]),
        ((), (Shard(0), Replicate()), ["0-d tensor"]),
        ((5,), (Declared(0, (0, 2, 4)), Replicate()), ["from 0 to 5"]),
        ((5,), (Declared(0, (0, 2, 2, 5)), Replicate()), ["3 offsets"]),
        ((5,), (Declared(0, (0, 2, 5)), Shard(0)), ["by a declared axis and by another"]),
        ((-1,), (Replicate(), Replicate()), ["negative"]),
    ],
)
def test_faulty_layouts_name_every_fault(
    shape: tuple[int, ...], placements: tuple[Placement, ...], faults: list[str]
) -> None:
    with pytest.raises(LayoutError) as refused:
        TensorLayout(shape, "int8", Mesh.arange((2, 2)), placements)
    assert all(fault in str(refused.value) for fault in faults)


@pytest.mark.parametrize("unknown", [Partial(), "S(0)"], ids=str)
def test_placements_that_cannot_be_moved_are_refused(unknown: Placement) -> None:
    with pytest.raises(UnsupportedPlacement, match="known kinds"):
        TensorLayout((4,), "int8", Mesh.arange((2,)), (unknown,))


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(LayoutError, match="unknown dtype 'int4'"):
        TensorLayout((4,), "int4", Mesh.arange((2,)), (Shard(0),))


def test_declarations_that_are_none_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"rank 1 declares .* outside"):
        TensorLayout.declare((4,), "int8", {1: Box((0,), (5,))})
    with pytest.raises(LayoutError, match="rank 0 declares 2 boxes that differ in dims"):
        TensorLayout.declare((4, 4), "int8", {0: [Box((0, 0), (1, 1)), Box((1, 1), (2, 2))]})
    with pytest.raises(LayoutError, match="rising offsets"):
        Declared(0, (0, 3, 2))
    with pytest.raises(LayoutError, match="split_factor"):
        StridedShard(0, 0)


def test_ten_thousand_ranks_are_one_table() -> None:
    layout = TensorLayout((151936, 64), "bfloat16", Mesh.arange((1250, 8)), (Replicate(), Shard(0)))
    assert layout.table.regions == 8
    assert layout.table.replicas.tolist() == [1250] * 8
