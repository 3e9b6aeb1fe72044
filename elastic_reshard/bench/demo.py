"""The demo: two FSDP2 trainers, four inference members of TP2 DP2, several versions, checked bit by bit.

Trainers hold a real model's parameters as DTensors of torch's `fully_shard`; a "step" writes new random bits into the local
shards. Inference members hold plain tensors in arenas, as an engine would. Beside it, the same refit by
gather-and-broadcast.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard

from elastic_reshard.arena import empty_like
from elastic_reshard.bench.spawn import Worker
from elastic_reshard.bench.spawn import run as spawn
from elastic_reshard.bench.values import fill, poison, wrong
from elastic_reshard.collective import Report, reshard
from elastic_reshard.collective.agree import exchange
from elastic_reshard.collective.baseline import Baseline, BaselineOptions
from elastic_reshard.collective.baseline_groups import BaselineGroups
from elastic_reshard.errors import DigestMismatch, ReshardError
from elastic_reshard.layout import ModelLayout, catalog
from elastic_reshard.layout.dtensor import layout_of, local_of, torch_dtype
from elastic_reshard.transport import Endpoint

__all__ = ["TRAINERS", "DemoRow", "parameter_tree", "play"]

TRAINERS, ENGINES, TENSOR_PARALLEL = 2, 2, 2
_SIZE = TRAINERS + ENGINES * TENSOR_PARALLEL
_DEADLINE = 120.0


@dataclass(frozen=True)
class DemoRow:
    """One way to refit: seconds of the slowest member, the first time and the median of the others; bytes that all
    members received over the network or pulled from mapped memory."""

    method: str
    cold: float
    warm: float
    received: int
    pulled: int


def play(model: str, versions: int, on_event: Callable[[int, dict[str, Any]], None] | None = None) -> list[DemoRow]:
    """Run the demo; blocks for a minute or so. Events of rank 0: {"version": v, "method": name, "seconds": s}.

    Raises CatalogError for an unknown model, DigestMismatch when a single bit differs."""
    spec = catalog.model(model)
    destination = catalog.layout(spec, catalog.Parallelism(dp=ENGINES, tp=TENSOR_PARALLEL), first_rank=TRAINERS)
    results = spawn(_member, _SIZE, model, destination, versions, timeout=600, on_event=on_event)
    bad = sorted({name for r in results for name in r["wrong"]})
    if bad:
        raise DigestMismatch([(name, "whole", -1) for name in bad])
    rows = []
    for method in results[0]["seconds"]:
        slowest = [max(r["seconds"][method][i] for r in results) for i in range(len(results[0]["seconds"][method]))]
        rows.append(
            DemoRow(
                method,
                slowest[0],
                statistics.median(slowest[1:] or slowest),
                sum(r["bytes"][method][0] for r in results),
                sum(r["bytes"][method][1] for r in results),
            )
        )
    return rows


def parameter_tree(spec: catalog.ModelSpec, dtype: torch.dtype) -> nn.Module:
    """A module with a model's parameters under their own names, one submodule per layer; not initialised."""
    root = nn.Module()
    for p in spec.parameters:
        *path, leaf = p.name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.empty(p.shape, dtype=dtype), requires_grad=False))
    return root


def _trainer(worker: Worker, spec: catalog.ModelSpec) -> dict[str, torch.Tensor]:
    """An FSDP2 model over the trainers; its parameters as DTensors."""
    dist.init_process_group("gloo", store=PrefixStore("trainers", worker.store), rank=worker.rank, world_size=TRAINERS)
    mesh = init_device_mesh("cpu", (TRAINERS,), mesh_dim_names=("fsdp",))
    model = parameter_tree(spec, torch.bfloat16)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return dict(model.state_dict())


def _engine(layout: ModelLayout, rank: int) -> dict[str, torch.Tensor]:
    """An engine rank's parameters, in memory that peers of this host can map."""
    return empty_like(
        {
            name: torch.empty(shape, dtype=torch_dtype(t.dtype), device="meta")
            for name, t in layout.items()
            if (shape := t.local_shape(rank)) is not None
        }
    )


def _member(worker: Worker, model: str, destination: ModelLayout, versions: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    spec, rank = catalog.model(model), worker.rank
    trainer = rank < TRAINERS
    state = _trainer(worker, spec) if trainer else _engine(destination, rank)
    local = {name: local_of(t) for name, t in state.items()}
    source = catalog.layout(spec, catalog.Parallelism(fsdp=TRAINERS))
    mine = ModelLayout({name: layout_of(t, name) for name, t in state.items()}) if trainer else destination  # type: ignore[arg-type]
    told: dict[str, Any] = {"seconds": {}, "bytes": {}, "wrong": []}
    with Endpoint.form(PrefixStore("refit", worker.store), rank, _SIZE) as endpoint:
        groups = BaselineGroups.form(
            PrefixStore("baseline", worker.store),
            rank,
            _SIZE,
            range(TRAINERS),
            range(TRAINERS, _SIZE),
            _DEADLINE,
            "lo",
        )
        options = BaselineOptions(gather="all", pack=64 << 20, wire="collectives")
        baseline = Baseline(source, destination, groups, options)

        def ours() -> tuple[int, int]:
            report = reshard(
                state if trainer else None,
                None if trainer else state,
                group=endpoint,
                destination_layout=None if trainer else destination,
                deadline=_DEADLINE,
            )
            if not isinstance(report, Report):
                raise ReshardError("a synchronous call returned a handle")
            return report.received, report.pulled

        def theirs() -> tuple[int, int]:
            return baseline.run(local if trainer else None, None if trainer else local).bytes_received, 0

        version = 0
        for method, refit in (("reshard", ours), ("gather + broadcast", theirs)):
            for _ in range(versions):
                version += 1
                _step(worker, trainer, mine, local, version)
                _meet(endpoint)
                begun = time.monotonic()
                moved = refit()
                seconds = time.monotonic() - begun
                told["seconds"].setdefault(method, []).append(seconds)
                told["bytes"][method] = moved
                if not trainer:
                    told["wrong"] += wrong(destination, local, rank, version)
                worker.report({"version": version, "method": method, "seconds": seconds})
    if trainer:
        dist.destroy_process_group()
    return told


def _step(worker: Worker, trainer: bool, layout: ModelLayout, local: Mapping[str, torch.Tensor], version: int) -> None:
    """A training step writes new bits; an engine's old ones are wiped, so that a byte that does not move shows."""
    if trainer:
        fill(layout, local, worker.rank, version)
    else:
        poison(local)


def _meet(endpoint: Endpoint) -> None:
    exchange(endpoint, b"m", [1] * endpoint.size, time.monotonic() + _DEADLINE)
