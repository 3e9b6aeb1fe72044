"""What ranks say of a model, joined: pure, in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from elastic_reshard.collective.agree import Header
from elastic_reshard.collective.fragments import Fragment, describe, fingerprint, joined
from elastic_reshard.errors import LayoutMismatch, PlanMismatch
from elastic_reshard.layout import Box, Mesh, ModelLayout, Replicate, Shard, TensorLayout

S0, R = Shard(0), Replicate()


def layout(ranks: Sequence[int], rows: int = 6) -> TensorLayout:
    return TensorLayout((rows, 4), "bfloat16", Mesh.of(ranks), (S0,))


def join(*fragments: Fragment) -> ModelLayout:
    return joined("source", [json.loads(json.dumps(f.to_data())) for f in fragments])


def said(**tensors: TensorLayout | tuple[tuple[int, ...], str]) -> Fragment:
    return Fragment(tensors, None)


def faults(*fragments: Fragment) -> list[str]:
    with pytest.raises(LayoutMismatch) as caught:
        join(*fragments)
    return [str(v) for v in caught.value.violations]


def test_each_rank_tells_its_own_pipeline_stage() -> None:
    """CASES B69: stages under the same tensor-parallel rank are kept apart."""
    a, b = layout([0, 1]), layout([2, 3])
    model = join(said(a=a), said(a=a), said(b=b), said(b=b))
    assert {n: t.content_id for n, t in model.items()} == {"a": a.content_id, "b": b.content_id}


def test_disjoint_meshes_that_each_hold_the_whole_are_replicas() -> None:
    a, b = layout([0, 2]), layout([3, 1])
    model = join(said(norm=a), said(norm=b), said(norm=a), said(norm=b))
    assert {r: model["norm"].boxes(r) for r in range(4)} == {
        0: [(Box((0, 0), (3, 4)), (0, 0))],
        1: [(Box((3, 0), (6, 4)), (0, 0))],
        2: [(Box((3, 0), (6, 4)), (0, 0))],
        3: [(Box((0, 0), (3, 4)), (0, 0))],
    }


def test_plain_tensors_are_whole_wherever_they_are() -> None:
    model = join(said(w=((2, 3), "int8")), said(), said(w=((2, 3), "int8")))
    assert model["w"] == TensorLayout((2, 3), "int8", Mesh.of([0, 2], ("member",)), (R,))


def test_a_given_layout_stands_for_those_who_gave_none() -> None:
    whole = ModelLayout({"a": layout([0, 1])})
    model = join(Fragment({}, whole), said(), Fragment({}, ModelLayout({"a": layout([0, 1])})))
    assert model.content_id == whole.content_id
    assert Fragment({}, whole).content_id == Fragment({}, ModelLayout(dict(whole))).content_id
    assert Fragment({}, whole).content_id != said().content_id


def test_everything_that_disagrees_is_listed() -> None:
    assert faults(Fragment({}, ModelLayout({"a": layout([0])})), Fragment({}, ModelLayout({"a": layout([1])})))[
        0
    ].startswith("*: layout: ranks 0 and 1 were given unlike source layouts")
    found = faults(
        said(a=layout([0, 1]), b=((3,), "int8"), c=layout([0, 1, 2])),
        said(a=layout([0, 1], rows=8), b=((4,), "int8"), c=layout([0, 1, 2])),
    )
    assert [f.split(":")[0] for f in found] == ["a", "b", "c"]
    assert "lay it out differently" in found[0]
    assert "unlike tensors" in found[1]
    assert "ranks [2] are in its source mesh, but did not give it" in found[2]
    # A DTensor here, a plain tensor there; meshes that share a rank.
    assert "differently" in faults(said(a=layout([0, 1])), said(a=((6, 4), "bfloat16")))[0]
    assert "differently" in faults(said(a=layout([0, 1])), said(a=layout([1, 2])), said(a=layout([1, 2])))[0]


def test_local_tensors_are_checked_against_a_given_layout() -> None:
    given = ModelLayout({"a": layout([0, 1]), "b": layout([1]), "empty": layout([1, 0], rows=1), "far": layout([5])})
    fits = {"a": torch.zeros(3, 4, dtype=torch.bfloat16)}
    assert describe(fits, given, 0).given is given  # rank 0's part of `empty` has no elements
    with pytest.raises(LayoutMismatch) as caught:
        describe({"a": torch.zeros(2, 4), "z": torch.zeros(1)}, given, 1)
    assert [(v.tensor, v.kind) for v in caught.value.violations] == [
        ("a", "dtype"), ("a", "shape"), ("b", "missing"), ("empty", "missing"), ("z", "extra")
    ]  # fmt: skip


def test_a_fingerprint_sees_other_memory_shape_strides_and_dtype() -> None:
    base = torch.zeros(4, 4)
    views = [base, base[:2], base[::2], base.t(), base.view(torch.int32), base.clone(), base[1:3]]
    assert len({fingerprint({"w": v}) for v in views}) == len(views)
    assert fingerprint({"w": base}) == fingerprint({"w": base.view(4, 4)})
    assert fingerprint({"w": base}) != fingerprint({"v": base})


def test_a_header_travels_whole() -> None:
    ids = {name: bytes([i]) * 16 for i, name in enumerate(("source", "destination", "options", "plan", "key"))}
    header = Header(1 << 40, **ids, body=77, rebind=True)
    assert Header.unpack(header.pack(), 0) == header
    refused = Header(1, refused="ü" * 300)
    again = Header.unpack(refused.pack(), 0)
    assert len(refused.pack()) == len(header.pack())
    assert again.refused.startswith("ü" * 80)
    with pytest.raises(PlanMismatch, match="member 3 speaks another version"):
        Header.unpack(b"ERs0" + header.pack()[4:], 3)
