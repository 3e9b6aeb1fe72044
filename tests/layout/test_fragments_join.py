"""Fragments as plain data: their one spelling, their id, what is refused, and correspondences that come back equal."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from elastic_reshard.errors import LayoutError
from elastic_reshard.layout import Box, Correspondence, Mesh, ModelLayout, Shard, TensorLayout
from elastic_reshard.layout.fragments import (
    canonical,
    check_fragment,
    correspondences_from_data,
    correspondences_to_data,
    fragment_id,
    joined,
    model_from_data,
    model_to_data,
    tensors_to_data,
)

W = TensorLayout((6, 4), "bfloat16", Mesh.of([0, 1], ("tp",)), (Shard(0),))
PLAIN = ((3,), "int8")


def fragment(**tensors: Any) -> dict[str, Any]:
    return {"whole": False, "tensors": tensors_to_data(tensors)}


def test_an_id_is_of_the_bytes_and_survives_the_wire() -> None:
    said = fragment(w=W, ä=PLAIN)
    assert fragment_id(said) == fragment_id(json.loads(json.dumps(said, indent=3)))
    assert canonical(said).isascii()
    assert len(fragment_id(said)) == 32
    assert fragment_id(said) != fragment_id(fragment(w=W))
    assert fragment_id(fragment(a=PLAIN, b=PLAIN)) != fragment_id(
        fragment(b=PLAIN, a=PLAIN)
    )  # the model's order counts


def test_a_model_comes_back_equal() -> None:
    model = ModelLayout({"b": W, "a": TensorLayout.declare((4,), "int8", {0: Box((0,), (1,)), 1: Box((1,), (4,))})})
    again = model_from_data(json.loads(json.dumps(model_to_data(model))))
    assert again.content_id == model.content_id
    assert list(again) == ["b", "a"]


def test_correspondences_come_back_equal() -> None:
    given = (
        Correspondence("q", "qkv", None, Box((0, 0), (2, 4))),
        Correspondence("k", "qkv", Box((0, 0), (1, 4)), Box((2, 0), (3, 4)), (0, 1)),
        Correspondence("t", "u", permute=(1, 0)),
    )
    assert correspondences_from_data(json.loads(json.dumps(correspondences_to_data(given)))) == given
    assert correspondences_to_data(given)[2] == {"source": "t", "destination": "u", "permute": [1, 0]}


@pytest.mark.parametrize(
    "data",
    [None, 5, "text", [5], [{}], [{"source": "a"}], [{"source": "a", "destination": "b", "box": 1}],
     [{"source": "a", "destination": "b", "source_box": [[0]]}], [{"source": "a", "destination": "b", "permute": "x"}],
     [{"source": "a", "destination": "b", "source_box": [[3], [1]]}]],
)  # fmt: skip
def test_what_are_no_correspondences_is_refused(data: Any) -> None:
    with pytest.raises(LayoutError, match=r"not a? ?correspondence"):
        correspondences_from_data(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "not a fragment"),
        ([], "not a fragment"),
        ({}, "not a fragment"),
        ({"whole": 1, "tensors": {}}, "not a fragment"),
        ({"whole": False, "tensors": []}, "not a fragment"),
        ({"whole": False, "tensors": {}, "more": 1}, r"unknown \['more'\]"),
        ({"whole": False, "tensors": {"w": 5}}, "tensor w: not a layout: int"),
        ({"whole": False, "tensors": {"w": {}}}, "tensor w: not a layout"),
        ({"whole": False, "tensors": {"w": {"plain": 5}}}, "tensor w: not a shape and a dtype"),
        ({"whole": False, "tensors": {"w": {"plain": [[2], "float7"]}}}, "tensor w: unknown dtype 'float7'"),
        ({"whole": False, "tensors": {"w": {"plain": [[-2], "int8"]}}}, "has a negative dim"),
        ({"whole": True, "tensors": {"w": {"plain": [[2], "int8"]}}}, "a whole fragment has a layout for every tensor"),
        ({"whole": False, "tensors": {}, "correspondences": [1]}, "not correspondences"),
    ],
)
def test_what_is_no_fragment_is_refused(data: Any, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        check_fragment(data)


def test_good_fragments_pass_and_join() -> None:
    for said in (fragment(w=W, p=PLAIN), {"whole": True, "tensors": tensors_to_data({"w": W}), "correspondences": []}):
        check_fragment(said)
        assert joined("source", [said, said])["w"].content_id == W.content_id


def test_no_torch_is_needed() -> None:
    line = "import sys, elastic_reshard.layout.fragments; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", line], check=True, timeout=60)
