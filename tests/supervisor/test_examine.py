"""Layouts as the supervisor sees them: joined, compared, and asked who holds all of one. Oracles by counting elements."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.errors import LayoutError
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
from elastic_reshard.layout.fragments import canonical, correspondences_to_data, fragment_id, tensors_to_data
from elastic_reshard.layout.side import Side
from elastic_reshard.supervisor.examine import covers, examine, fault_between

S0, R = Shard(0), Replicate()


def layout(ranks: Sequence[int], rows: int = 6, dtype: str = "bfloat16") -> TensorLayout:
    return TensorLayout((rows, 4), dtype, Mesh.of(ranks), (S0,))


def fragment(
    correspondences: Sequence[Correspondence] | None = None, whole: bool = False, **tensors: Any
) -> dict[str, Any]:
    said: dict[str, Any] = {"whole": whole, "tensors": tensors_to_data(tensors)}
    return said if correspondences is None else said | {"correspondences": correspondences_to_data(correspondences)}


def ask(*ranks: tuple[dict[str, Any] | None, dict[str, Any] | None]) -> tuple[Side | None, Side | None, str]:
    bodies = {fragment_id(b): canonical(b) for pair in ranks for b in pair if b is not None}
    ids = [tuple(None if b is None else fragment_id(b) for b in pair) for pair in ranks]
    return examine(ids, bodies)  # type: ignore[arg-type]


def test_a_group_has_the_layouts_that_its_ranks_make_together() -> None:
    w = layout([0, 1])
    source, destination, fault = ask((fragment(w=w), None), (fragment(w=w), None))
    assert fault == ""
    assert destination is None
    assert source is not None
    assert source.id == source.model.content_id == ModelLayout({"w": w}).content_id
    source, destination, fault = ask((fragment(w=w), fragment(v=w)), (fragment(w=w), fragment(v=w)))
    assert fault == ""
    assert source is not None
    assert destination is not None
    assert (list(source.model), list(destination.model)) == (["w"], ["v"])


def test_correspondences_are_part_of_a_layouts_id_and_body() -> None:
    w = layout([0])
    fused = [Correspondence("a", "w", None, Box((0, 0), (3, 4))), Correspondence("b", "w", None, Box((3, 0), (6, 4)))]
    _, bare, _ = ask((None, fragment(w=w)))
    _, side, fault = ask((None, fragment(fused, w=w)))
    assert fault == ""
    assert side is not None
    assert bare is not None
    assert side.id != bare.id
    again = Side.of_body(side.body)
    assert (again.id, again.body, again.correspondences) == (side.id, side.body, tuple(fused))
    assert json.loads(bare.body)["correspondences"] is None
    assert Side.of_body(bare.body).id == bare.id
    parts = Side(ModelLayout({"a": layout([0], 3), "b": layout([0], 3)}))
    assert fault_between(parts, side) == ""
    assert "a: extra" in fault_between(parts, bare)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"tensors": 5, "correspondences": null}', b"null"])
def test_what_is_no_layouts_body_is_refused(body: bytes) -> None:
    with pytest.raises(LayoutError):
        Side.of_body(body)


def test_every_fault_of_both_sides_is_listed() -> None:
    hole = TensorLayout.declare((4,), "int8", {0: Box((0,), (1,)), 1: Box((2,), (4,))})
    overlap = TensorLayout.declare((4,), "int8", {0: Box((0,), (3,)), 1: Box((2,), (4,))})
    one = [Correspondence("a", "w")]
    source, destination, fault = ask(
        (fragment(w=layout([0, 1]), h=hole, o=overlap, far=layout([0, 5])), fragment(one, w=layout([0, 1]))),
        (fragment(w=layout([0, 1], 8), h=hole, o=overlap), fragment([], w=layout([0, 1]))),
    )
    assert source is destination is None
    lines = fault.splitlines()
    assert lines[0].endswith("violation(s) in what its ranks say of their tensors:")
    assert int(lines[0].split()[0]) == len(lines) - 1
    for said in (
        "w: layout: source ranks 0 and",
        "far: missing: ranks [5]",
        "*: correspondence: ranks [0, 1] gave unlike",
    ):
        assert said in fault
    _, _, fault = ask((fragment(h=hole, o=overlap), None), (fragment(h=hole, o=overlap), None))
    assert "h: hole: 1 of 4 elements are held by no source rank" in fault
    assert "o: overlap: source ranks declare [0:3] and [2:4]" in fault


def test_a_layout_may_not_name_ranks_outside_of_its_group() -> None:
    _, _, fault = ask((fragment(whole=True, w=layout([0, 1, 2])), None), (None, fragment(w=layout([1]))))
    assert "w: layout: its source mesh has ranks [1, 2], who are no source of the group" in fault


def test_layouts_that_do_not_fit_are_told_with_every_violation() -> None:
    a = Side(ModelLayout({"w": layout([0]), "x": layout([0]), "only": layout([0])}))
    b = Side(ModelLayout({"w": layout([0], 7), "x": layout([0], dtype="float32"), "want": layout([0])}))
    fault = fault_between(a, b)
    assert fault.startswith("4 violation(s) between source and destination:\n")
    for said in ("w: shape", "x: dtype: source bfloat16, destination float32", "only: extra", "want: missing"):
        assert said in fault
    assert fault_between(a, a) == ""


def holders_by_counting(tensor: TensorLayout, ranks: frozenset[int]) -> bool:
    held = np.zeros(tensor.shape, dtype=bool)
    for rank in ranks & set(tensor.mesh.ranks):
        for box, _ in tensor.boxes(rank):
            held[box.slices()] = True
    return bool(held.all())


@st.composite
def layouts(draw: st.DrawFn) -> TensorLayout:
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=2)))
    grid = draw(st.sampled_from([(1,), (2,), (3,), (2, 2)]))
    kinds: list[Placement] = [R, *(Shard(d) for d in range(len(shape))), StridedShard(0, 2)]
    placements = [draw(st.sampled_from(kinds)) for _ in grid]
    if any(isinstance(p, StridedShard) for p in placements) and len({str(p) for p in placements}) < len(placements):
        placements = [R] * len(grid)
    return TensorLayout(shape, "int8", Mesh.arange(grid), tuple(placements))


@given(st.lists(layouts(), min_size=1, max_size=3))
def test_who_holds_everything_is_what_counting_elements_says(found: list[TensorLayout]) -> None:
    model = ModelLayout({str(i): x for i, x in enumerate(found)})
    for size in range(5):
        for chosen in itertools.combinations(range(4), size):
            ranks = frozenset(chosen)
            assert covers(model, ranks) == all(holders_by_counting(x, ranks) for x in found)
