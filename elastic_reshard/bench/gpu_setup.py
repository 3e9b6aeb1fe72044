"""What a run of `bench gpu` measures: the model, its two sides, and on how many devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastic_reshard.bench.gpu_stage import Kit
from elastic_reshard.bench.synthetic import Layouts
from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout, catalog

__all__ = ["GpuSetup", "layers_of", "many_small", "model_layouts"]


@dataclass(frozen=True)
class GpuSetup:
    """model: of the catalog. device: "cuda", or "pretend" to try the program out. gpus: 0 with a pretended one. total: bytes of
    a device's memory. seconds: of the whole run, or of a section in its own process. scale: of sizes that are not the model's,
    for trying it out."""

    model: str = "Qwen3-4B"
    device: str = "cuda"
    gpus: int = 1
    total: int = 139 << 30
    seconds: float = 300.0
    scale: float = 1.0

    @property
    def half(self) -> int:
        """Ranks of each side: two on one device, else one a device."""
        return 2 if self.gpus <= 1 else self.gpus // 2

    @property
    def network(self) -> str:
        """That uses the devices."""
        return "nccl" if self.device == "cuda" else "pretend"

    def kit(self, **changes: Any) -> Kit:
        """Members' tensors and arenas on the devices."""
        return replace(Kit(self.device, max(1, self.gpus), "device", None, "auto"), **changes)

    def nbytes(self, full: int, least: int = 1 << 20) -> int:
        """A size, scaled."""
        return max(least, int(full * self.scale))

    def repeats(self, full: int) -> int:
        """A number of repeats, scaled; two at least."""
        return max(2, int(full * min(1.0, self.scale * 4)))


def model_layouts(setup: GpuSetup, *, fits: float = 0.85) -> tuple[Layouts, dict[str, Any]]:
    """The model's full parameter list in bf16: trainers FSDP (EP for a model with experts), engines TP (x DP), and how it is
    cut down: fewer layers where a trainer's tensors and its two slots would take more than `fits` of its device."""
    spec, half = catalog.model(setup.model), setup.half
    experts = isinstance(spec.dims, catalog.MoeDims)
    source = f"ep{half}" if experts and half > 1 else f"fsdp{half}"
    tp = min(half, 4)
    destination = f"tp{tp}" + (f"xdp{half // tp}" if half > tp else "")
    a, b = catalog.Parallelism.parse(source), catalog.Parallelism.parse(destination)
    on_one = half * 2 if setup.gpus <= 1 else 1
    # On one device: trainers with two slots (3 models), engines (1), and what both sides' bare copies take, were torch to keep
    # it (4); else a trainer's alone.
    held = spec.numel * 2 * (8 if setup.gpus <= 1 else 5 / half)
    layers = spec.dims.layers
    if held > fits * setup.total:
        layers = max(1, int(layers * fits * setup.total / held))
        spec = catalog.ModelSpec(spec.name, replace(spec.dims, layers=layers))  # type: ignore[type-var]
    have, want = catalog.layout(spec, a), catalog.layout(spec, b)
    told = {
        "model": spec.name, "layers": layers, "of layers": catalog.model(setup.model).dims.layers, "tensors": len(want),
        "GB": round(want.nbytes / 1e9, 3), "source": source, "destination": destination, "members on one device": on_one,
    }  # fmt: skip
    return Layouts(have, want, catalog.layout(spec, b, first_rank=half)), told


def layers_of(told: Mapping[str, Any]) -> str:
    """Of what a figure is, beside it: the whole model, or as many of its layers as fit."""
    return f"{told['layers']} of {told['of layers']} layers of {told['model']}"


def many_small(setup: GpuSetup, count: int = 4000) -> Layouts:
    """Tensors of 2 to 64 KiB, cut as FSDP and TP cut them: what launches and metadata cost."""
    count = max(20, int(count * setup.scale))
    fsdp, tp = Mesh.arange((setup.half,)), Mesh.arange((setup.half,))
    both = Mesh.arange((setup.half,), first=setup.half)
    made: tuple[dict[str, TensorLayout], ...] = ({}, {}, {})
    for n in range(count):
        shape = (64, 32 << (n % 5)) if n % 3 else (1024 << (n % 4),)
        cut = (Shard(1) if n % 2 else Shard(0)) if len(shape) == 2 else Replicate()
        for side, mesh, how in ((0, fsdp, Shard(0)), (1, tp, cut), (2, both, cut)):
            made[side][f"small.{n}"] = TensorLayout(shape, "bfloat16", mesh, (how,))
    return Layouts(*map(ModelLayout, made))
