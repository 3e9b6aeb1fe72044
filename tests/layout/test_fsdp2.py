"""FSDP2, tensor parallelism and both composed, in real processes: the layout says exactly which elements a rank holds.

Each parameter is filled with its global indices before it is sharded, so what a rank holds tells where it is from.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastic_reshard import layout as er
from elastic_reshard.errors import LayoutError
from elastic_reshard.layout import TensorLayout
from elastic_reshard.layout.dtensor import layout_of, local_of
from tests.processes import Rank, run_ranks

SHAPES = {
    "up.weight": (12, 6),
    "up.bias": (12,),
    "down.weight": (6, 12),
    "down.bias": (6,),
    "norm.weight": (3,),  # fewer rows than 4 ranks
    "table": (7, 5, 2),  # uneven over any mesh here
    "empty": (4, 0),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(3, bias=False)
        self.table = nn.Parameter(torch.empty(7, 5, 2))
        self.empty = nn.Parameter(torch.empty(4, 0))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(indexed(parameter.shape))


def indexed(shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """A tensor whose values are its global indices."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(tuple(shape))


def sharded_by_tp(mesh: DeviceMesh) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Net(), mesh, plan)


def fsdp(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(Net(), mesh=mesh)


def fsdp_over_tp(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(sharded_by_tp(mesh["tp"]), mesh=mesh["dp"])


def hsdp(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(Net(), mesh=mesh)


def layouts_and_faults(
    me: Rank, axes: dict[str, int], build: Callable[[DeviceMesh], nn.Module], widen: bool = False
) -> dict[str, TensorLayout]:
    """Each DTensor's layout, after comparing every element that this rank holds with what the layout says."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    state = build(mesh).state_dict()
    assert set(state) == set(SHAPES)
    found = {}
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            found[name] = layout = layout_of(tensor, name, mesh if widen else None)
            assert layout.shape == SHAPES[name]
            check_elements(layout, me.rank, local_of(tensor), indexed(layout.shape))
    return found


def check_elements(layout: TensorLayout, rank: int, local: torch.Tensor, full: torch.Tensor) -> None:
    seen = torch.zeros(local.shape, dtype=torch.int64)
    for box, at in layout.boxes(rank):
        here = tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))
        assert torch.equal(local[here], full[box.slices()]), (layout, rank, box)
        seen[here] += 1
    assert (seen == 1).all(), (layout, rank)


def same_on_all(results: list[dict[str, TensorLayout]]) -> dict[str, TensorLayout]:
    assert all(r == results[0] for r in results)
    return results[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_fully_shard(size: int) -> None:
    found = same_on_all(run_ranks(layouts_and_faults, size, {"dp": size}, fsdp))
    assert {n: t.placements for n, t in found.items()} == dict.fromkeys(SHAPES, (er.Shard(0),))
    assert all(t.mesh.axes == ("dp",) and t.mesh.ranks == tuple(range(size)) for t in found.values())


def test_hybrid_sharding() -> None:
    found = same_on_all(run_ranks(layouts_and_faults, 4, {"replicas": 2, "shards": 2}, hsdp))
    assert {n: t.placements for n, t in found.items()} == dict.fromkeys(SHAPES, (er.Replicate(), er.Shard(0)))


def test_parallelize_module() -> None:
    found = same_on_all(run_ranks(layouts_and_faults, 3, {"tp": 3}, sharded_by_tp))
    assert {n: t.placements for n, t in found.items()} == {
        "up.weight": (er.Shard(0),),
        "up.bias": (er.Shard(0),),
        "down.weight": (er.Shard(1),),
        "down.bias": (er.Replicate(),),
    }


def test_both_composed() -> None:
    found = same_on_all(run_ranks(layouts_and_faults, 4, {"dp": 2, "tp": 2}, fsdp_over_tp, True))
    strided: tuple[er.Placement, ...] = (er.StridedShard(0, 2), er.Shard(0))
    assert {n: t.placements for n, t in found.items()} == {
        "up.weight": strided,
        "up.bias": strided,
        "down.weight": (er.Shard(0), er.Shard(1)),
        **dict.fromkeys(["down.bias", "norm.weight", "table", "empty"], (er.Shard(0), er.Replicate())),
    }
    assert {t.mesh for t in found.values()} == {er.Mesh.arange((2, 2), ("dp", "tp"))}


def test_what_tp_leaves_alone_is_stated_on_a_submesh_only() -> None:
    results = run_ranks(layouts_and_faults, 4, {"dp": 2, "tp": 2}, fsdp_over_tp)
    assert [r["norm.weight"].mesh.ranks for r in results] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert all(r["up.weight"] == results[0]["up.weight"] for r in results)


def uneven_fsdp_over_tp(me: Rank, dp: int, tp: int, sizes: list[int]) -> dict[int, tuple[list[int], str]]:
    """For each row count: the rows that this rank truly holds, and the refusal, empty if there is none."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    found = {}
    for n in sizes:
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(indexed((n, 2)), mesh["tp"], [Shard(0)]))
        weight = fully_shard(module, mesh=mesh["dp"]).weight
        local = local_of(weight)
        rows = (local[:, 0].long() // 2).tolist()
        try:
            check_elements(layout_of(weight, "weight"), me.rank, local, indexed((n, 2)))
            found[n] = (rows, "")
        except LayoutError as refused:
            found[n] = (rows, str(refused))
    return found


def test_fsdp_over_an_uneven_tp_split_is_refused_by_every_rank_alike() -> None:
    """3 x 2 ranks and 7 rows: FSDP2 gives ranks 4 and 5 [] and [6], its placements say [6] and []."""
    results = run_ranks(uneven_fsdp_over_tp, 6, 3, 2, list(range(1, 16)))
    refused = [{n for n, (_, refusal) in r.items() if refusal} for r in results]
    assert refused == [{7, 13}] * 6
    assert [r[7][0] for r in results] == [[0, 1], [4], [2, 3], [5], [], [6]]
    for rank, r in enumerate(results):
        shown = rank if rank in (4, 5) else 4
        assert "weight: FSDP over an uneven tensor-parallel split misstates what ranks [4, 5]" in r[7][1]
        assert f"rank {shown} has" in r[7][1]


def test_fsdp_over_2_by_2_is_right_for_every_size() -> None:
    """CASES B61: 5 rows on dp 2 x tp 2, cut by tp first."""
    results = run_ranks(uneven_fsdp_over_tp, 4, 2, 2, list(range(1, 16)))
    assert not any(refusal for r in results for _, refusal in r.values())
    assert [r[5][0] for r in results] == [[0, 1], [3], [2], [4]]


def by_distribute_tensor(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for n in (1, 3, 5, 8):
        full = indexed((n, 3, n))
        for placements in ([Shard(0), Shard(0)], [Shard(2), Replicate()], [Shard(1), Shard(0)], [Shard(-1), Shard(-1)]):
            tensor = distribute_tensor(full, mesh, placements)
            check_elements(layout_of(tensor), me.rank, local_of(tensor), full)


def test_distribute_tensor() -> None:
    run_ranks(by_distribute_tensor, 4)
