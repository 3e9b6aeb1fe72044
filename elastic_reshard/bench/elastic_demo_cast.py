"""Who takes part in the elastic demo, with how much: a real model's shapes, cut down to what two cores move in time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from elastic_reshard.errors import LayoutError
from elastic_reshard.layout import ModelLayout, catalog

__all__ = ["CELL", "ENGINES", "JOINER", "LEAST_VERSIONS", "RANKS", "TRAINERS", "DemoSetup", "scaled"]

TRAINERS: Final = ("trainers-1", "trainers-2")  # the host of each rank
ENGINES: Final = {"engine-0": "engines-1", "engine-1": "engines-2"}
JOINER: Final = ("engine-2", "engines-3")
CELL: Final = 1 << 18  # bytes
RANKS: Final = 2  # of an engine: tensor parallel
LEAST_VERSIONS: Final = 8
_LAYERS, _SHARE = 4, 0.7  # a few layers, and what they may take of all: the rest is the vocabulary's


@dataclass(frozen=True)
class DemoSetup:
    """model: of the catalog; nbytes: about what its parameters, scaled down, take in bf16; versions: refits; seed: who is
    hit, when, in which order.

    Raises CatalogError for an unknown model, LayoutError for too few versions."""

    model: str = "Qwen3-0.6B"
    nbytes: int = 48 << 20
    versions: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        catalog.model(self.model)
        if self.versions < LEAST_VERSIONS:
            raise LayoutError(
                f"{self.versions} versions leave no room for all that the demo inflicts; take at least {LEAST_VERSIONS}."
            )

    def layouts(self) -> tuple[ModelLayout, ModelLayout]:
        """Of the trainers and of an engine, each in its group's ranks."""
        spec = scaled(catalog.model(self.model), self.nbytes)
        return (catalog.layout(spec, catalog.Parallelism(fsdp=len(TRAINERS))),
                catalog.layout(spec, catalog.Parallelism(tp=RANKS)))  # fmt: skip

    @property
    def memory(self) -> int:
        """Bytes that it needs: trainers' tensors and two slots, twice while they are started again; three engines' tensors
        and two landing slots; processes."""
        return self.nbytes * (2 * 3 + 3 * 3) + (2 << 30)


def scaled(spec: catalog.ModelSpec, nbytes: int) -> catalog.ModelSpec:
    """The model with fewer and narrower layers and a smaller vocabulary: about `nbytes` in bf16, kinds and proportions kept.
    The model itself where it is small enough."""
    whole = spec.dims
    if spec.numel * 2 <= nbytes or not isinstance(whole, catalog.DenseDims | catalog.MoeDims):
        return spec
    for cut in (1, 2, 4, 8, 16):
        dims = _narrowed(whole, cut)
        layer = sum(2 * p.numel for p in dims.parameters() if p.layer == 0)
        if _LAYERS * layer <= _SHARE * nbytes:
            break
    layers = max(1, min(whole.layers, int(_SHARE * nbytes / layer)))
    row = 2 * dims.hidden * (1 if dims.tied else 2)
    vocab = max(RANKS, min(whole.vocab, (nbytes - layers * layer) // row - 1))
    return catalog.ModelSpec(spec.name, replace(dims, layers=layers, vocab=vocab))


def _narrowed(dims: catalog.DenseDims | catalog.MoeDims, cut: int) -> catalog.DenseDims | catalog.MoeDims:
    kv_heads = max(RANKS, dims.kv_heads // cut)
    heads = kv_heads * (dims.heads // dims.kv_heads)
    if isinstance(dims, catalog.MoeDims):
        experts, inner = max(4, dims.experts // cut), max(RANKS, dims.expert_ffn // cut)
        return replace(
            dims, hidden=dims.hidden // cut, heads=heads, kv_heads=kv_heads, experts=experts, expert_ffn=inner
        )
    return replace(dims, hidden=dims.hidden // cut, heads=heads, kv_heads=kv_heads, ffn=dims.ffn // cut)
