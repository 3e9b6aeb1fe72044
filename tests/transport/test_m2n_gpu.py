"""`nccl.m2n` itself, under the same checks: four ranks on the GPUs that are there, over the NCCL backend."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

from elastic_reshard.arena.devices import device_of, strided_of
from elastic_reshard.bench import gpu_m2n
from elastic_reshard.bench.gpu_nccl import Ranks
from elastic_reshard.bench.gpu_setup import GpuSetup, model_layouts
from elastic_reshard.communicator import Name, Registry
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.mover import fast as joint
from elastic_reshard.plan.m2n import Fast, fast_part
from elastic_reshard.transport.m2n import FastRun, Memory
from elastic_reshard.transport.network import GroupedNetwork
from tests.communicator.world import Plane, soon
from tests.processes import Rank, run_ranks
from tests.transport.test_m2n import Watch, _plan

_GPUS = torch.cuda.device_count()  # asked once, here: it opens descriptors that stay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def _right(call: Fast, rank: int) -> torch.Tensor:
    side = call.source if rank in call.source.ranks else call.destination
    whole = torch.arange(math.prod(call.shape), dtype=torch.int32, device="cuda").reshape(call.shape)
    return whole[side.box(rank, call.shape).slices()].contiguous()


def _fast_run(me: Rank, full: bool) -> dict[str, Any]:
    """One rank: forms, runs, compares."""
    torch.cuda.set_device(me.rank % torch.cuda.device_count())
    from elastic_reshard.communicator.nccl import NcclBackend

    device = device_of(torch.zeros(1, device="cuda"))
    assert device is not None
    plane, registry, part = Plane(me), Registry(), fast_part(_plan())
    name = Name(1, "m2n")
    end = registry.form(NcclBackend(device), plane.store(name, me.rank, me.size), me.rank, me.size, soon(60), tuple)
    network = end.network
    assert isinstance(network, GroupedNetwork)
    held = {c.name: _right(c, me.rank) for c in part.calls if me.rank in (*c.source.ranks, *c.destination.ranks)}
    if me.rank >= 2:
        for tensor in held.values():
            tensor.fill_(-1)
    torch.cuda.synchronize()
    assert all(t.element_size() == itemsize("float32") for t in held.values())
    memory = Memory(lambda _, n: strided_of(held[n]), lambda _, n: strided_of(held[n]))
    watch = Watch(full)
    made = lambda: joint._reshard("nccl_m2n", end, network, soon(60))  # noqa: E731
    run = FastRun(part, me.rank, made, network, memory, watch)
    run.run(soon(60))
    torch.cuda.synchronize()
    wrong = [c.name for c in part.calls if c.name in held and not torch.equal(held[c.name], _right(c, me.rank))]
    end.close()
    plane.close()
    registry.abort_all(time.monotonic() + 5, "over")
    return {"wrong": wrong, "broken": run.broken, "landed": sorted(watch.landed_)}


@pytest.mark.parametrize("full", [False, True])
def test_a_fast_run_over_the_nccl_backend_is_bit_exact(full: bool) -> None:
    found = run_ranks(_fast_run, 4, full, timeout=120, group=False)
    names = sorted(call.name for call in fast_part(_plan()).calls)
    assert [f["wrong"] for f in found] == [[]] * 4
    assert not any(f["broken"] for f in found)
    assert [f["landed"] for f in found] == [[], [], names, names]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_model_of_the_catalog_call_by_call(blocking: bool) -> None:
    setup = GpuSetup("tiny", gpus=4 if _GPUS >= 4 else 1)
    layouts, _ = model_layouts(setup)
    with Ranks(2 * setup.half, setup.gpus) as ranks:
        found = gpu_m2n._m2n(ranks, setup, layouts, lambda _: None, grouped=False, blocking=blocking)
    assert found["wrong"] == []
