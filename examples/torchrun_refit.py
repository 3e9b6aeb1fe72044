"""Two FSDP2 trainers hand their weights to two tensor-parallel inference ranks, over the default process group.

    torchrun --nproc-per-node 4 examples/torchrun_refit.py

Ranks 0 and 1 train a small model under torch's `fully_shard`; ranks 2 and 3 hold the same parameters cut for tensor
parallelism, as plain tensors. After every step one call moves the new weights; the result is compared element by element.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import elastic_reshard as er

TRAINERS = 2
HIDDEN, FFN = 256, 1000  # nothing has to divide evenly


def build() -> nn.Module:
    """The trainers' model; the seed is the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(HIDDEN, FFN), nn.SiLU(), nn.Linear(FFN, HIDDEN), nn.LayerNorm(HIDDEN))


def engine_layout() -> er.ModelLayout:
    """How the inference ranks hold it: the first matrix cut by rows, the second by columns, the norm whole."""
    mesh = er.Mesh.of([2, 3], ("tp",))
    cut = {"0.weight": er.Shard(0), "0.bias": er.Shard(0), "2.weight": er.Shard(1)}
    return er.ModelLayout(
        {
            name: er.TensorLayout(tuple(p.shape), "float32", mesh, (cut.get(name, er.Replicate()),))
            for name, p in build().named_parameters()
        }
    )


def step(parameters: dict[str, torch.Tensor], version: int) -> None:
    """Stands for a training step; elementwise, so that an inference rank can tell what must come out."""
    with torch.no_grad():
        for p in parameters.values():
            p.mul_(1.0 + 0.5**version).add_(version)


def main() -> None:
    """One rank's whole life."""
    dist.init_process_group("gloo")
    rank, layout = dist.get_rank(), engine_layout()
    if dist.get_world_size() != 2 + TRAINERS:
        raise SystemExit("start it with torchrun --nproc-per-node 4")
    mesh = init_device_mesh("cpu", (TRAINERS,))
    model = fully_shard(build(), mesh=mesh) if rank < TRAINERS else None
    expected = dict(build().named_parameters())
    # In memory that the trainers' ranks can map: on one host nothing goes through sockets then.
    served = er.empty_like({n: torch.empty(t.local_shape(rank) or (), device="meta") for n, t in layout.items()})

    for version in (1, 2, 3):
        step(expected, version)
        if model is not None:
            step(dict(model.named_parameters()), version)
            report = er.reshard(source=model.state_dict())
        else:
            report = er.reshard(destination=served, destination_layout=layout)
            for name, tensor in served.items():
                ((box, _),) = layout[name].boxes(rank)
                if not torch.equal(tensor, expected[name][box.slices()]):
                    raise SystemExit(f"rank {rank}: {name} is wrong in version {version}")
        if rank == TRAINERS:
            print(f"version {version}: right on rank {rank}; {report}", flush=True)

    er.close_all()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
