"""The call as programs make it: again and again, with other tensors, without waiting, by DTensors, in a subgroup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elastic_reshard as er
from elastic_reshard.bench.memory import PeakMemory
from elastic_reshard.bench.values import fill, poison, wrong
from elastic_reshard.errors import LayoutMismatch, TransferError, TransferTimeout
from tests.collective import worlds
from tests.collective.worlds import CASES
from tests.processes import Rank, run_ranks

TWO_BY_TWO = [0, 0, 1, 1]


def moved_tensors(me: Rank) -> dict[str, tuple[bool, bool]]:
    """Calls after one another on two endpoints: (planned, bound) of each; values are checked after each."""
    case, other = worlds.catalog_case("tiny", "fsdp2", "tp2"), worlds.catalog_case("tiny", "tp2", "fsdp2")
    source, destination = (worlds.tensors(side, me.rank, "mixed") for side in (case.source, case.destination))
    found: dict[str, tuple[bool, bool]] = {}

    def step(what: str, of: worlds.Case, endpoint: er.Endpoint) -> None:
        version = len(found)
        worlds.fill(of, source, me.rank, version)
        worlds.poison(destination)
        report = worlds.call(of, endpoint, source, destination)
        assert worlds.wrong(of, destination, me.rank, version) == [], what
        found[what] = report.planned, report.bound

    with worlds.form(me, TWO_BY_TWO) as endpoint:
        step("first", case, endpoint)
        step("again", case, endpoint)
        if me.rank == 3:  # one tensor of one member lies elsewhere now
            assert destination is not None
            destination["model.norm.weight"] = torch.empty_like(destination["model.norm.weight"])
        step("one tensor replaced", case, endpoint)
        source, destination = (worlds.tensors(side, me.rank, "ordinary") for side in (other.source, other.destination))
        step("another layout", other, endpoint)
        source, destination = (worlds.tensors(side, me.rank, "arena") for side in (case.source, case.destination))
        step("the first layout again", case, endpoint)
    with worlds.form(me, TWO_BY_TWO, "anew") as endpoint:
        step("a new endpoint", case, endpoint)
    with worlds.form(me, [0, 1, 2, 3], "apart") as endpoint:
        step("other domains", case, endpoint)
    return found


def test_plans_and_programs_are_kept_as_long_as_they_are_true() -> None:
    results = run_ranks(moved_tensors, 4, group=False)
    for rank, found in enumerate(results):
        assert found == {
            "first": (True, True),
            "again": (False, False),
            "one tensor replaced": (False, rank >= 2),  # the domain of the member binds anew
            "another layout": (True, True),
            "the first layout again": (False, True),
            "a new endpoint": (False, True),
            "other domains": (True, True),
        }


def without_waiting(me: Rank) -> dict[str, Any]:
    case = CASES["declared"]()
    store = me.store()
    source, destination = (worlds.tensors(side, me.rank, "ordinary") for side in (case.source, case.destination))
    worlds.fill(case, source, me.rank, 5)
    found: dict[str, Any] = {}
    with worlds.form(me, TWO_BY_TWO) as endpoint:
        arguments: dict[str, Any] = {
            "group": endpoint, "source_layout": case.source, "destination_layout": case.destination, "deadline": 40.0,
            "async_op": True,
        }  # fmt: skip
        if me.rank == 0:
            store.wait([f"waited{r}" for r in (1, 2, 3)])
        handle = er.reshard(source, destination, **arguments)
        assert isinstance(handle, er.Handle)
        if me.rank:
            early = worlds.error_of(lambda: handle.wait(0.01))
            assert isinstance(early, TransferTimeout)
            assert not handle.done()
            second = worlds.error_of(lambda: er.reshard(source, destination, **arguments).wait(20.0))  # type: ignore[union-attr]
            found["a second call"] = f"{type(second).__name__}: {second}"
            store.set(f"waited{me.rank}", "")
        report = handle.wait(30.0)
        assert handle.done()
        assert handle.wait() is report
        found["wrong"] = worlds.wrong(case, destination, me.rank, 5)
        arguments["destination_layout"] = er.ModelLayout({"v": case.destination["w"]})
        refused = er.reshard(source, {"v": destination["w"]} if destination else None, **arguments)
        assert isinstance(refused, er.Handle)
        found["errors"] = [type(worlds.error_of(refused.wait)) for _ in range(2)]
        worlds.fill(case, source, me.rank, 6)
        worlds.call(case, endpoint, source, destination)
        found["wrong after"] = worlds.wrong(case, destination, me.rank, 6)
    return found


def test_a_handle_ends_with_the_report_or_with_the_error() -> None:
    for rank, found in enumerate(run_ranks(without_waiting, 4, group=False)):
        assert found.pop("wrong") == found.pop("wrong after") == []
        assert found.pop("errors") == [LayoutMismatch] * 2
        if rank:
            assert found.pop("a second call").startswith(f"{TransferError.__name__}: another call of this group")
        assert not found


def indexed(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(tuple(shape))


class Net(nn.Module):
    """What an FSDP2 and TP model has: matrices that TP cuts, norms that it leaves on a submesh, uneven rows."""

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


SHAPES = {name: tuple(p.shape) for name, p in Net().named_parameters()}


def served(ranks: Sequence[int], cut: str) -> er.ModelLayout:
    """An engine's layout: one matrix cut by columns, the others whole on every rank."""
    mesh = er.Mesh.of(ranks, ("tp",))
    return er.ModelLayout(
        {
            name: er.TensorLayout(shape, "float32", mesh, (er.Shard(1) if name == cut else er.Replicate(),))
            for name, shape in SHAPES.items()
        }
    )


def held_wrong(tensors: Mapping[str, torch.Tensor], layout: er.ModelLayout, rank: int) -> list[str]:
    """Names whose elements are not the global indices that the layout's boxes say."""
    found = []
    for name, t in tensors.items():
        boxes = layout[name].boxes(rank)
        expected = indexed(layout[name].shape)
        if not torch.equal(t, expected[boxes[0][0].slices()] if boxes else expected):
            found.append(name)
    return found


def room_for(layout: er.ModelLayout, rank: int) -> dict[str, torch.Tensor]:
    shapes = {name: t.local_shape(rank) for name, t in layout.items()}
    return {name: torch.full(shape, -1.0) for name, shape in shapes.items() if shape is not None}


def from_a_framework(me: Rank, how: str) -> list[Any]:
    """Four trainers by torch's own words, two engines with plain tensors, over the default group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    layout = served([5, 4], "down.weight")
    state: Mapping[str, torch.Tensor] | None = None
    if me.rank < 4:
        net: nn.Module = Net()
        if how == "tp":
            net = parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        state = fully_shard(net, mesh=mesh["dp"] if how == "tp" else flat).state_dict()
    destination = room_for(layout, me.rank) if me.rank >= 4 else None
    found: list[Any] = []
    for topology in (None, [0, 0, 1, 1, 2, 2]):
        for _ in range(2):
            for t in (destination or {}).values():
                t.fill_(-1.0)
            report = er.reshard(
                state, destination, destination_layout=layout if destination else None, topology=topology, deadline=40.0,
                verify="full",
            )  # fmt: skip
            assert isinstance(report, er.Report)
            found.append((report.planned, held_wrong(destination or {}, layout, me.rank)))
    er.close_all()
    return found


@pytest.mark.parametrize("how", [pytest.param("fsdp", marks=pytest.mark.long), "tp"])
def test_fsdp2_with_and_without_tp_to_plain_tensors(how: str) -> None:
    """TP leaves norm and table alone, so FSDP2 keeps a copy of them on each of two disjoint submeshes."""
    for found in run_ranks(from_a_framework, 6, how):
        assert found == [(True, []), (False, []), (True, []), (False, [])]


def between_dtensors(me: Rank) -> list[str]:
    """Sources and destinations that are DTensors on the same ranks, and tensors that are whole everywhere."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    ways = [TorchShard(0), TorchShard(1), Replicate()]
    wrong_, number = [], 0
    for p in ways:
        for q in ways:
            source = {"w": distribute_tensor(indexed((7, 5)), mesh, [p, q]), "b": indexed((3,))}
            destination = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [q, p]), "b": torch.zeros(3)}
            er.reshard(source, destination, topology=[0, 1, 0, 1], verify="full", deadline=40.0)
            if not torch.equal(destination["w"].full_tensor(), indexed((7, 5))):
                wrong_.append(f"{p} {q}")
            if not torch.equal(destination["b"], indexed((3,))):
                wrong_.append(f"b {number}")
            number += 1
    er.close_all()
    return wrong_


def test_dtensors_to_dtensors_in_place() -> None:
    assert run_ranks(between_dtensors, 4) == [[]] * 4


def in_a_subgroup(me: Rank) -> list[str]:
    """Global ranks 1, 2, 4 and 5 refit, 0 and 3 do not know of it; DTensors speak of global ranks."""
    members = [1, 2, 4, 5]
    group = dist.new_group(members)
    mesh = DeviceMesh("cpu", [1, 2])
    if me.rank not in members:
        return []
    layout = served([2, 3], "up.weight")  # of group ranks
    source = (
        {n: distribute_tensor(indexed(s), mesh, [TorchShard(0)]) for n, s in SHAPES.items()} if me.rank < 3 else None
    )
    destination = room_for(layout, members.index(me.rank)) if me.rank > 3 else None
    er.reshard(
        source,
        destination,
        group=group,
        destination_layout=layout if destination else None,
        verify="full",
        deadline=40.0,
    )
    er.close_all()
    return held_wrong(destination or {}, layout, members.index(me.rank))


def test_a_subgroup_of_the_default_group() -> None:
    assert run_ranks(in_a_subgroup, 6) == [[]] * 6


STAGING, MODEL = 8 << 20, 100 << 20


def large(rows: int, first: int, dim: int) -> er.ModelLayout:
    """100 MiB in eight tensors over two ranks; bf16 rows of 4 KiB."""
    mesh = er.Mesh.arange((2,), first=first)
    return er.ModelLayout(
        {f"w{i}": er.TensorLayout((rows, 2048), "bfloat16", mesh, (er.Shard(dim),)) for i in range(8)}
    )


def memory_of(me: Rank, domains: list[int], arena: bool) -> tuple[int, int, list[str]]:
    source, destination = large(MODEL // 8 // 4096, 0, 0), large(MODEL // 8 // 4096, 2, 1)
    mine = source if me.rank < 2 else destination
    shapes = {
        name: torch.empty(t.local_shape(me.rank) or (), dtype=torch.bfloat16, device="meta") for name, t in mine.items()
    }
    held = er.empty_like(shapes) if arena else {n: torch.empty(t.shape, dtype=t.dtype) for n, t in shapes.items()}
    poison(held)
    with worlds.form(me, domains) as endpoint:
        with PeakMemory() as peak:
            for version in (1, 2):
                if me.rank < 2:
                    fill(source, held, me.rank, version)
                report = er.reshard(
                    held if me.rank < 2 else None, held if me.rank >= 2 else None, group=endpoint, source_layout=source,
                    destination_layout=destination, staging=STAGING, deadline=60.0,
                )  # fmt: skip
        assert isinstance(report, er.Report)
        return peak.extra, report.staging, [] if me.rank < 2 else wrong(destination, held, me.rank, 2)


@pytest.mark.parametrize(("domains", "arena"), [([0, 1, 2, 3], False), ([0, 0, 0, 0], False), ([0, 0, 0, 0], True)])
def test_memory_beyond_the_tensors_is_bounded_by_the_staging_setting(domains: list[int], arena: bool) -> None:
    slack = 12 << 20  # the plan, the program, gloo's own; an eighth of what is moved
    for extra, staging, wrong_ in run_ranks(memory_of, 4, domains, arena, group=False):
        assert staging <= (0 if arena else STAGING)
        assert extra + staging <= STAGING + slack
        assert wrong_ == []
