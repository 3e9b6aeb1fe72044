"""Layouts against DTensor's own rule and splitting, for every rank; and which DTensors are refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from elastic_reshard import layout as er
from elastic_reshard.errors import LayoutError, UnsupportedPlacement
from elastic_reshard.layout.dtensor import dtype_name, from_dtensor, layout_of, local_of, torch_dtype
from elastic_reshard.layout.dtypes import ITEMSIZE
from tests.layout.oracle import chunk


def mesh_of(axes: Sequence[int], rank: int) -> DeviceMesh:
    """A mesh without processes, as one of its ranks sees it."""
    ranks = torch.arange(torch.Size(axes).numel()).reshape(tuple(axes))
    names = ("dp", "tp", "ep")[: len(axes)]
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def split(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """A rank's part by torch's own splitting of the data."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for at, size, p in zip(coordinate, mesh.shape, placements, strict=True):
        if isinstance(p, Shard | _StridedShard):
            parts, _ = p._split_tensor(full, size, with_padding=False, contiguous=True)
            full = parts[at]
    return full


def stated(local: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, list(placements), run_check=False, shape=torch.Size(shape), stride=stride)


def by_boxes(layout: er.TensorLayout, full: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's part by the layout's boxes."""
    shape = layout.local_shape(rank)
    assert shape is not None
    local = torch.full(shape, -1, dtype=full.dtype)
    for box, at in layout.boxes(rank):
        local[tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))] = full[box.slices()]
    return local


def ours(placements: Sequence[Placement]) -> tuple[er.Placement, ...]:
    def one(p: Placement) -> er.Placement:
        if isinstance(p, _StridedShard):
            return er.StridedShard(p.dim, int(p.split_factor))
        return er.Shard(p.dim) if isinstance(p, Shard) else er.Replicate()

    return tuple(one(p) for p in placements)


def small() -> Iterator[tuple[tuple[int, ...], list[Placement]]]:
    for axes in [(1,), (2,), (3,), (7,), (1, 3), (2, 2), (3, 2), (2, 3), (4, 3), (2, 2, 2)]:
        kinds = [Replicate(), Shard(0), _StridedShard(0, split_factor=axes[-1])]
        for placements in itertools.product(kinds, repeat=len(axes)):
            yield axes, list(placements)


def test_every_rank_holds_what_torch_splits_for_it() -> None:
    for axes, placements in small():
        meshes = [mesh_of(axes, r) for r in range(torch.Size(axes).numel())]
        for n in (0, 1, 2, 3, 5, 7, 8, 12, 13, 17):
            full = torch.arange(n)
            layout = er.TensorLayout((n,), "int64", er.Mesh.arange(axes), ours(placements))
            for rank, mesh in enumerate(meshes):
                mine = by_boxes(layout, full, rank)
                assert torch.equal(mine, split(full, mesh, placements)), (layout, rank)
                shape, offset = compute_local_shape_and_global_offset((n,), mesh, placements)
                assert shape == tuple(mine.shape), (layout, rank)
                assert not len(mine) or offset == (int(mine[0]),), (layout, rank)


def test_several_dims_by_torchs_splitting_and_its_offsets() -> None:
    shape = (5, 4, 3)
    full = torch.arange(60).reshape(shape)
    kinds = [Replicate(), *(Shard(d) for d in range(3)), _StridedShard(0, split_factor=2)]
    for axes in [(3,), (2, 3), (2, 2, 2)]:
        for placements in itertools.product(kinds, repeat=len(axes)):
            layout = er.TensorLayout(shape, "int64", er.Mesh.arange(axes), ours(placements))
            for rank in range(torch.Size(axes).numel()):
                mesh = mesh_of(axes, rank)
                mine = by_boxes(layout, full, rank)
                assert torch.equal(mine, split(full, mesh, placements)), (layout, rank)
                local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
                assert local_shape == tuple(mine.shape), (layout, rank)
                if mine.numel():
                    assert full[offset] == mine.flatten()[0], (layout, rank)


def test_layout_of_reads_shape_dtype_mesh_and_placements() -> None:
    mesh = DeviceMesh(
        "cpu", torch.tensor([[1, 3, 5], [0, 2, 4]]), mesh_dim_names=("a", "b"), _init_backend=False, _rank=2
    )
    placements = [Replicate(), Shard(1)]
    full = torch.arange(10, dtype=torch.float16).reshape(2, 5)
    tensor = stated(split(full, mesh, placements), (2, 5), mesh, placements)
    layout = layout_of(tensor)
    assert (layout.shape, layout.dtype) == ((2, 5), "float16")
    assert layout.mesh == er.Mesh((1, 3, 5, 0, 2, 4), (2, 3), ("a", "b"))
    assert layout.placements == (er.Replicate(), er.Shard(1))
    assert torch.equal(by_boxes(layout, full, 2), local_of(tensor))
    assert from_dtensor is layout_of


def test_shards_over_ranks_that_do_not_rise_are_refused() -> None:
    mesh = DeviceMesh("cpu", torch.tensor([2, 1]), _init_backend=False, _rank=1)
    with pytest.raises(UnsupportedPlacement, match="do not rise"):
        layout_of(stated(torch.zeros(2, 2), (4, 2), mesh, [Shard(0)]))
    assert layout_of(stated(torch.zeros(4, 2), (4, 2), mesh, [Replicate()])).mesh.ranks == (2, 1)


def test_negative_dims_and_unnamed_axes() -> None:
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=1)
    tensor = stated(torch.zeros(3, 2), (3, 4), mesh, [Shard(-1)])
    layout = layout_of(tensor)
    assert layout.placements == (er.Shard(1),)
    assert layout.mesh.axes == ("axis0",)


def test_local_of_shares_memory_and_records_no_gradient() -> None:
    mesh = mesh_of((2,), 0)
    local = torch.zeros(2, 3)
    tensor = stated(local, (4, 3), mesh, [Shard(0)]).requires_grad_()
    held = local_of(tensor)
    assert held.data_ptr() == local.data_ptr()
    assert not held.requires_grad
    assert held.grad_fn is None
    plain = torch.zeros(2, requires_grad=True)
    assert local_of(plain).data_ptr() == plain.data_ptr()
    assert not local_of(plain).requires_grad


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    tensor = stated(torch.zeros(0), (4,), mesh_of((2,), 7), [Shard(0)])
    layout = layout_of(tensor)
    assert layout.local_shape(7) is None
    tensor._local_tensor = torch.zeros(2)
    with pytest.raises(LayoutError, match="a rank outside its mesh has a local tensor"):
        layout_of(tensor)


def test_a_submesh_is_widened_to_the_mesh_it_is_a_part_of() -> None:
    full = torch.arange(5)
    for rank in range(6):
        whole = mesh_of((2, 3), rank)
        part = DeviceMesh(
            "cpu", whole.mesh[:, rank % 3].clone(), mesh_dim_names=("dp",), _init_backend=False, _rank=rank
        )
        tensor = stated(split(full, part, [Shard(0)]), (5,), part, [Shard(0)])
        layout = layout_of(tensor, over=whole)
        assert layout.placements == (er.Shard(0), er.Replicate())
        assert layout.mesh == er.Mesh.arange((2, 3), ("dp", "tp"))
        assert torch.equal(by_boxes(layout, full, rank), local_of(tensor))
        assert layout_of(tensor, over=part) == layout_of(tensor)


def test_a_mesh_that_is_no_part_of_the_other_is_refused() -> None:
    whole = mesh_of((2, 3), 0)
    swapped = whole.mesh.clone()
    parts = [([0, 1, 2], ("dp",)), ([0, 3], ("tp",)), ([0, 4], ("dp",)), ([0, 3], ("other",))]
    meshes = [(torch.tensor(ranks), axes) for ranks, axes in parts]
    for ranks, axes in [*meshes, (swapped, ("tp", "dp"))]:
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=axes, _init_backend=False, _rank=0)
        tensor = stated(torch.zeros(1), (len(ranks),), mesh, [Shard(0)] + [Replicate()] * (ranks.ndim - 1))
        with pytest.raises(LayoutError, match=r"^w lies on the mesh .* not this rank's part"):
            layout_of(tensor, "w", over=whole)
        with pytest.raises(LayoutError, match="not this rank's part"):
            layout_of(tensor, "w", over=mesh_of((2, 3), 9))


class OwnShard(Shard):
    """A user's subclass, which may mean anything."""


class OwnPlacement(Placement):
    """A kind that nobody knows."""


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Partial(), "must be reduced"),
        (OwnShard(0), "unknown kind .*OwnShard"),
        (OwnPlacement(), "unknown kind .*OwnPlacement"),
    ],
)
def test_partial_and_unknown_kinds_are_refused_by_name(placement: Placement, message: str) -> None:
    tensor = stated(torch.zeros(2), (4,), mesh_of((2,), 0), [Shard(0)])
    spec = tensor._spec
    object.__setattr__(spec, "placements", (placement,))
    with pytest.raises(UnsupportedPlacement, match=f"^w has .*{message}"):
        layout_of(tensor, "w")


def test_masked_partial_is_refused() -> None:
    from torch.distributed.tensor._ops import _embedding_ops

    kind = getattr(_embedding_ops, "_MaskPartial", None) or _embedding_ops.MaskPartial
    tensor = stated(torch.zeros(4), (4,), mesh_of((2,), 0), [Replicate()])
    object.__setattr__(tensor._spec, "placements", (kind(),))
    with pytest.raises(UnsupportedPlacement):
        layout_of(tensor)


def test_uneven_shards_that_the_placements_do_not_tell_are_refused() -> None:
    """CASES B59: 2 + 3 rows of 5."""
    for rank, (has, expected) in enumerate([(2, 3), (3, 2)]):
        tensor = stated(torch.zeros(has, 4), (5, 4), mesh_of((2,), rank), [Shard(0)])
        with pytest.raises(LayoutError, match=rf"w: rank {rank} .* \({has}, 4\), expected \({expected}, 4\)"):
            layout_of(tensor, "w")


def test_a_plain_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match="w is a Tensor, not a DTensor"):
        layout_of(torch.zeros(2), "w")  # type: ignore[arg-type]


def verdict(tensor: DTensor) -> tuple[er.TensorLayout | None, str]:
    try:
        return layout_of(tensor), ""
    except LayoutError as error:
        return None, str(error)


@pytest.mark.parametrize("axes", [(2, 2), (3, 2), (2, 3), (4, 2), (3, 3), (5, 2), (2, 2, 2), (3, 2, 2)], ids=str)
def test_fsdp_over_uneven_tp_is_refused_on_all_ranks_or_on_none(axes: tuple[int, ...]) -> None:
    """Every rank holds what FSDP2 gives it. Refused exactly where that is not what the placements say."""
    inside = torch.Size(axes[1:]).numel()
    placements = [_StridedShard(0, split_factor=inside), *(Shard(0) for _ in axes[1:])]
    refused = set()
    for n in range(1, 40):
        verdicts, right = set(), True
        for rank in range(torch.Size(axes).numel()):
            mesh = mesh_of(axes, rank)
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            rows = list(range(n))
            for at, size in list(zip(coordinate, axes, strict=True))[1:]:
                rows = chunk(rows, size, at)
            rows = chunk(rows, axes[0], coordinate[0])
            right &= torch.equal(torch.tensor(rows, dtype=torch.int64), split(torch.arange(n), mesh, placements))
            layout, refusal = verdict(stated(torch.tensor(rows), (n,), mesh, placements))
            assert layout is None or by_boxes(layout, torch.arange(n), rank).tolist() == rows
            assert layout is not None or "misstates" in refusal
            verdicts.add(layout is not None)
        assert verdicts == {right}, n
        refused |= set() if right else {n}
    assert (7 in refused) == (axes == (3, 2))
    assert not refused & {n for n in range(40) if n % inside == 0}


def test_the_refusal_names_the_rank_what_it_has_and_what_is_expected() -> None:
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    for rank, shown in [(4, 4), (5, 5), (0, 4)]:
        local = torch.zeros(len(split(torch.arange(7), mesh_of((3, 2), rank), placements)))
        with pytest.raises(LayoutError) as refused:
            layout_of(stated(local, (7,), mesh_of((3, 2), rank), placements), "w")
        has, expected = {4: ("nothing", "[6:7]"), 5: ("[6:7]", "nothing")}[shown]
        assert f"ranks [4, 5] hold: rank {shown} has {has}, expected {expected}" in str(refused.value)


def test_strided_shards_that_no_fsdp_made_are_read_by_the_rule() -> None:
    """As a flattened view states them: no axis to the right cuts the dim."""
    placements = [_StridedShard(0, split_factor=3)]
    for rank in range(2):
        mesh = mesh_of((2,), rank)
        local = split(torch.arange(7), mesh, placements)
        assert torch.equal(by_boxes(layout_of(stated(local, (7,), mesh, placements)), torch.arange(7), rank), local)


def test_dtype_names_go_both_ways() -> None:
    for name, size in ITEMSIZE.items():
        if hasattr(torch, name):
            assert dtype_name(torch_dtype(name)) == name
            assert torch_dtype(name).itemsize == size
    packed = re.compile(r"torch\.(q|bits|u?int[1-7]$)")
    every = {v for v in vars(torch).values() if isinstance(v, torch.dtype) and not packed.match(str(v))}
    assert {dtype_name(dtype) for dtype in every} <= set(ITEMSIZE)


@pytest.mark.parametrize("name", ["float31", "Tensor", "float"])
def test_unknown_dtype_names_are_refused(name: str) -> None:
    with pytest.raises(LayoutError, match="unknown dtype"):
        torch_dtype(name)


def test_a_dtype_that_this_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(LayoutError, match="has no dtype 'float8_e8m0fnu'"):
        torch_dtype("float8_e8m0fnu")
    with pytest.raises(LayoutError, match="unknown dtype 'quint8'"):
        dtype_name(torch.quint8)
