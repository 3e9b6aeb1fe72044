"""Whether one model's layout can be moved into another: every violation at once, and what is filled in."""

from __future__ import annotations

import pytest

from elastic_reshard.errors import LayoutMismatch, Violation
from elastic_reshard.layout import (
    Box,
    Correspondence,
    Mesh,
    ModelLayout,
    Replicate,
    Shard,
    TensorLayout,
    WireDtype,
    match,
)

SOURCE, DESTINATION = Mesh.arange((4,), ("fsdp",)), Mesh.arange((2, 2), ("dp", "tp"))


def of(shape: tuple[int, ...], dtype: str = "bfloat16", mesh: Mesh = SOURCE) -> TensorLayout:
    cut = Shard(0) if shape else Replicate()
    return TensorLayout(shape, dtype, mesh, (*(Replicate() for _ in mesh.shape[1:]), cut))


def model(mesh: Mesh = SOURCE, **tensors: tuple[tuple[int, ...], str] | TensorLayout) -> ModelLayout:
    return ModelLayout({n: t if isinstance(t, TensorLayout) else of(*t, mesh) for n, t in tensors.items()})


def violations(
    source: ModelLayout,
    destination: ModelLayout,
    correspondences: list[Correspondence] | None = None,
    wire: WireDtype = None,
) -> list[tuple[str, str]]:
    with pytest.raises(LayoutMismatch) as refused:
        match(source, destination, correspondences, wire)
    error = refused.value
    assert f"{len(error.violations)} violation(s)" in str(error)
    assert all(str(v) in str(error) for v in error.violations)
    return [(v.tensor, v.kind) for v in error.violations]


def test_same_names_fill_in_everything_in_the_order_of_the_destination() -> None:
    source = model(a=((4, 2), "float32"), b=((), "int64"), c=((0, 3), "bool"))
    destination = model(DESTINATION, c=((0, 3), "bool"), a=((4, 2), "float32"), b=((), "int64"))
    assert match(source, destination) == (
        Correspondence("c", "c", Box((0, 0), (0, 3)), Box((0, 0), (0, 3)), (0, 1)),
        Correspondence("a", "a", Box((0, 0), (4, 2)), Box((0, 0), (4, 2)), (0, 1)),
        Correspondence("b", "b", Box((), ()), Box((), ()), ()),
    )


def test_every_violation_is_in_one_error() -> None:
    half = TensorLayout.declare((4,), "int8", {0: Box((0,), (2,))})
    twice = TensorLayout.declare((4,), "int8", {0: Box((0,), (3,)), 1: Box((2,), (4,))})
    source = model(
        extra=((2,), "int8"),
        shape=((4, 2), "int8"),
        dims=((4,), "int8"),
        dtype=((4,), "float32"),
        hole=half,
        overlap=twice,
        good=((4,), "int8"),
    )
    destination = model(
        DESTINATION,
        missing=((2,), "int8"),
        shape=((2, 4), "int8"),
        dims=((4, 1), "int8"),
        dtype=((4,), "bfloat16"),
        hole=((4,), "int8"),
        overlap=((4,), "int8"),
        good=((4,), "int8"),
    )
    found = violations(source, destination)
    assert found == [(v, "shape" if v == "dims" else v) for v in sorted([*{*source, *destination} - {"good"}])]


def test_a_hole_or_overlap_is_counted() -> None:
    source = model(w=TensorLayout.declare((6, 2), "int8", {0: Box((0, 0), (2, 2)), 3: Box((3, 0), (6, 2))}))
    with pytest.raises(LayoutMismatch, match="2 of 12 elements are held by no source member"):
        match(source, model(w=((6, 2), "int8")))
    declared = TensorLayout.declare((6,), "int8", {0: Box((0,), (3,)), 1: Box((0,), (3,)), 2: Box((2,), (6,))})
    with pytest.raises(LayoutMismatch, match=r"source members declare \[0:3\] and \[2:6\], which overlap"):
        match(model(w=declared), model(w=((6,), "int8")))


def test_destinations_may_leave_elements_out_but_not_overlap() -> None:
    part = TensorLayout.declare((6,), "int8", {0: Box((0,), (2,)), 1: []})
    assert match(model(w=((6,), "int8")), model(w=part))
    twice = TensorLayout.declare((6,), "int8", {0: Box((0,), (4,)), 1: Box((2,), (6,))})
    with pytest.raises(LayoutMismatch, match="destination members declare"):
        match(model(w=((6,), "int8")), model(w=twice))


def test_equal_boxes_are_replicas() -> None:
    same = TensorLayout.declare((6,), "int8", {0: Box((0,), (6,)), 1: Box((0,), (6,))})
    assert match(model(w=same), model(w=same))


@pytest.mark.parametrize(
    ("have", "want", "wire", "allowed"),
    [
        ("float32", "bfloat16", None, False),  # never silent
        ("float32", "bfloat16", "bfloat16", True),
        ("float32", "bfloat16", {"w": "bfloat16"}, True),
        ("float32", "bfloat16", {"other": "bfloat16"}, False),
        ("float32", "bfloat16", "float16", False),  # not what the destination is
        ("bfloat16", "float32", "float32", True),
        ("bfloat16", "float8_e4m3fn", "float8_e4m3fn", True),
        ("bfloat16", "bfloat16", "bfloat16", True),
        ("bfloat16", "bfloat16", None, True),
        ("int64", "int64", "bfloat16", True),  # one dtype for all floating-point tensors that differ
        ("int64", "int64", {"w": "bfloat16"}, False),
        ("int64", "int32", "int32", False),
        ("int8", "bfloat16", "bfloat16", False),
        ("bool", "uint8", "uint8", False),
        ("bfloat16", "int8", "int8", False),
        ("complex64", "float32", "float32", False),
        ("float32", "float8_e8m0fnu", "float8_e8m0fnu", False),  # scales are no values
    ],
)
def test_casts_are_asked_for_and_between_floating_point_only(
    have: str, want: str, wire: WireDtype, allowed: bool
) -> None:
    source, destination = model(w=((4,), have)), model(DESTINATION, w=((4,), want))
    if allowed:
        assert match(source, destination, wire_dtype=wire)
    else:
        assert violations(source, destination, wire=wire) == [("w", "dtype")]


def test_a_concatenation_tiles_its_destination() -> None:
    source = model(q=((4, 2), "int8"), k=((2, 2), "int8"), v=((2, 2), "int8"))
    destination = model(DESTINATION, qkv=((8, 2), "int8"))
    given = [
        Correspondence("v", "qkv", destination_box=Box((6, 0), (8, 2))),
        Correspondence("q", "qkv", destination_box=Box((0, 0), (4, 2))),
        Correspondence("k", "qkv", destination_box=Box((4, 0), (6, 2))),
    ]
    filled = match(source, destination, given)
    assert [c.source for c in filled] == ["q", "k", "v"]
    assert [c.source_box for c in filled] == [Box.whole((4, 2)), Box.whole((2, 2)), Box.whole((2, 2))]
    assert violations(source, destination, given[:2]) == [("qkv", "hole")]
    both = [*given, Correspondence("k", "qkv", destination_box=Box((5, 0), (7, 2)))]
    assert violations(source, destination, both) == [("qkv", "overlap")] * 2


def test_a_source_tensor_may_be_split_or_used_in_part() -> None:
    source = model(gate_up=((8, 2), "int8"))
    destination = model(DESTINATION, gate=((4, 2), "int8"), up=((2, 2), "int8"))
    filled = match(
        source,
        destination,
        [
            Correspondence("gate_up", "up", Box((4, 0), (6, 2))),
            Correspondence("gate_up", "gate", Box((0, 0), (4, 2))),
        ],
    )
    assert [(c.destination, c.destination_box) for c in filled] == [
        ("gate", Box.whole((4, 2))),
        ("up", Box.whole((2, 2))),
    ]


def test_a_transpose_permutes_dims() -> None:
    source, destination = model(w=((2, 3, 4), "int8")), model(DESTINATION, w=((4, 2, 3), "int8"))
    assert match(source, destination, [Correspondence("w", "w", permute=(2, 0, 1))])[0].permute == (2, 0, 1)
    for wrong in [None, (1, 2, 0), (0, 0, 1), (0, 1), (0, 1, 3)]:
        assert violations(source, destination, [Correspondence("w", "w", permute=wrong)]) == [("w", "shape")]


def test_faulty_correspondences_are_all_named() -> None:
    source, destination = model(a=((4,), "int8")), model(DESTINATION, b=((4,), "int8"), c=((4,), "int8"))
    given = [
        Correspondence("nobody", "b"),
        Correspondence("a", "nobody"),
        Correspondence("a", "b", Box((0,), (5,))),
        Correspondence("a", "c", Box((0,), (2,))),
    ]
    assert violations(source, destination, given) == [
        ("b", "missing"),
        ("b", "shape"),
        ("c", "shape"),
        ("nobody", "missing"),
    ]


def test_content_ids_follow_names_order_and_layouts() -> None:
    a, b = ((4,), "int8"), ((2,), "int8")
    ids = {
        m.content_id
        for m in (model(a=a, b=b), model(b=b, a=a), model(a=a, c=b), model(a=a), model(DESTINATION, a=a, b=b))
    }
    assert len(ids) == 5
    assert model(a=a, b=b).content_id == model(a=a, b=b).content_id


def test_bytes_of_a_model_and_of_each_rank() -> None:
    layout = model(DESTINATION, a=((5, 2), "float32"), b=((), "int64"))
    assert layout.nbytes == 48
    assert [layout.local_nbytes(r) for r in range(4)] == [32, 24, 32, 24]


def test_violations_sort_by_tensor() -> None:
    given = [Violation("b", "shape", "x"), Violation("a", "shape", "x")]
    assert [v.tensor for v in LayoutMismatch(given).violations] == ["a", "b"]
