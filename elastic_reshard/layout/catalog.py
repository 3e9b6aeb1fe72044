"""Parameter lists of real models from their dimensions, and their layouts under a parallelism. No torch.

Names and shapes are Hugging Face's, with the experts of a layer stacked into three tensors. Another model of
a known family is one line in `_MODELS`; another family is one dataclass that is a `Dims`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Final, Protocol

from elastic_reshard.errors import CatalogError
from elastic_reshard.layout.mesh import Mesh
from elastic_reshard.layout.model import ModelLayout
from elastic_reshard.layout.placements import Placement, Replicate, Shard, StridedShard
from elastic_reshard.layout.tensor import TensorLayout

__all__ = [
    "DenseDims",
    "Dims",
    "Kind",
    "ModelSpec",
    "MoeDims",
    "Parallelism",
    "Parameter",
    "known_models",
    "layout",
    "model",
]

# Beyond this a rank count is a slip of the pen, and a mesh of it would fill the memory.
_MOST_RANKS: Final = 1_000_000


class Kind(StrEnum):
    """How a parameter is parallelised."""

    REPLICATED = "replicated"  # norms and routers: whole on every tp and ep rank
    COLUMN = "column"  # dim 0 over tp
    ROW = "row"  # dim 1 over tp
    VOCAB = "vocab"  # dim 0, the vocabulary, over tp
    EXPERT_COLUMN = "expert column"  # stacked [experts, out, in]: dim 0 over ep, dim 1 over tp
    EXPERT_ROW = "expert row"  # stacked [experts, out, in]: dim 0 over ep, dim 2 over tp


_TP_DIM: Final = {Kind.COLUMN: 0, Kind.ROW: 1, Kind.VOCAB: 0, Kind.EXPERT_COLUMN: 1, Kind.EXPERT_ROW: 2}
_EXPERT: Final = frozenset({Kind.EXPERT_COLUMN, Kind.EXPERT_ROW})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a model; `layer` is None for those before and after the layers."""

    name: str
    shape: tuple[int, ...]
    layer: int | None
    kind: Kind

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Ranks per kind of parallelism, as mesh axes (pp, dp, fsdp, ep, tp) from the outermost to the innermost.

    Raises CatalogError for a size below 1 or more than a million ranks.
    """

    fsdp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise CatalogError(f"{field.name} must be at least 1, got {getattr(self, field.name)}.")
        if self.world > _MOST_RANKS:
            raise CatalogError(f"{self} needs {self.world} ranks; at most {_MOST_RANKS} are planned for.")

    @classmethod
    def parse(cls, text: str) -> Parallelism:
        """From text such as "fsdp4", "TP2xDP2" or "tp2 pp2", in any case and order. CatalogError
        otherwise."""
        token = re.compile(r"(fsdp|dp|pp|ep|tp)=?([0-9]{1,9})", re.IGNORECASE)
        found = [(axis.lower(), int(size)) for axis, size in token.findall(text)]
        if not found or not re.fullmatch(r"[\s,x*]*", token.sub("", text), re.IGNORECASE):
            raise CatalogError(
                f"cannot read the parallelism {text!r}; write axes and sizes such as fsdp4 or tp2xdp2, with "
                f"axes fsdp, dp, pp, ep and tp."
            )
        if len({axis for axis, _ in found}) < len(found):
            raise CatalogError(f"the parallelism {text!r} names an axis twice.")
        return cls(**dict(found))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.fsdp * self.dp * self.pp * self.ep * self.tp

    @property
    def axes(self) -> dict[str, int]:
        """The axes inside one pipeline stage that have more than one rank; `dp` of 1 where there is none."""
        sizes = {"dp": self.dp, "fsdp": self.fsdp, "ep": self.ep, "tp": self.tp}
        return {axis: n for axis, n in sizes.items() if n > 1} or {"dp": 1}

    def __str__(self) -> str:
        sizes = [(axis, getattr(self, axis)) for axis in ("pp", "dp", "fsdp", "ep", "tp")]
        return "x".join(f"{axis}{n}" for axis, n in sizes if n > 1) or "dp1"


class Dims(Protocol):
    """What a family of models has to state."""

    @property
    def layers(self) -> int:
        """Number of layers, which pipeline stages split among them."""

    def parameters(self) -> Iterator[Parameter]:
        """In the order of the model: what stands before the layers, the layers, what stands after."""

    def refusal(self, p: Parallelism) -> str | None:
        """Why these dimensions do not allow that parallelism, as the end of "<model> ...", or None."""


@dataclass(frozen=True, kw_only=True)
class _Qwen3Dims:
    """What all Qwen3 models share: grouped-query attention with normed heads, four norms a layer, one FFN."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 151936
    tied: bool

    def parameters(self) -> Iterator[Parameter]:
        """See Dims."""
        h = self.hidden
        yield Parameter("model.embed_tokens.weight", (self.vocab, h), None, Kind.VOCAB)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            attention = f"{at}.self_attn"
            for name, heads in (("q_proj", self.heads), ("k_proj", self.kv_heads), ("v_proj", self.kv_heads)):
                yield Parameter(f"{attention}.{name}.weight", (heads * self.head_dim, h), layer, Kind.COLUMN)
            yield Parameter(f"{attention}.o_proj.weight", (h, self.heads * self.head_dim), layer, Kind.ROW)
            for name in ("q_norm", "k_norm"):
                yield Parameter(f"{attention}.{name}.weight", (self.head_dim,), layer, Kind.REPLICATED)
            yield from self._ffn(f"{at}.mlp", layer)
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield Parameter(f"{at}.{name}.weight", (h,), layer, Kind.REPLICATED)
        yield Parameter("model.norm.weight", (h,), None, Kind.REPLICATED)
        if not self.tied:
            yield Parameter("lm_head.weight", (self.vocab, h), None, Kind.VOCAB)

    def _ffn(self, at: str, layer: int) -> Iterator[Parameter]:
        raise NotImplementedError

    def _tp_refusal(self, tp: int, inner: int) -> str | None:
        """vLLM's rules: each tp rank has whole heads and the same number of FFN rows."""
        if self.heads % tp:
            return f"has {self.heads} attention heads, which tp{tp} does not divide."
        if self.kv_heads < tp:
            return f"has {self.kv_heads} key/value heads, fewer than tp{tp}; copied heads are not laid out."
        if self.kv_heads % tp:
            return f"has {self.kv_heads} key/value heads, which tp{tp} does not divide."
        if inner % tp:
            return f"has an FFN of {inner} rows, which tp{tp} does not divide."
        return None


@dataclass(frozen=True, kw_only=True)
class DenseDims(_Qwen3Dims):
    """Dimensions of a dense Qwen3."""

    ffn: int

    def _ffn(self, at: str, layer: int) -> Iterator[Parameter]:
        yield Parameter(f"{at}.gate_proj.weight", (self.ffn, self.hidden), layer, Kind.COLUMN)
        yield Parameter(f"{at}.up_proj.weight", (self.ffn, self.hidden), layer, Kind.COLUMN)
        yield Parameter(f"{at}.down_proj.weight", (self.hidden, self.ffn), layer, Kind.ROW)

    def refusal(self, p: Parallelism) -> str | None:
        """See Dims."""
        if p.ep > 1:
            return f"is dense and has no experts to spread over ep{p.ep}."
        return self._tp_refusal(p.tp, self.ffn)


@dataclass(frozen=True, kw_only=True)
class MoeDims(_Qwen3Dims):
    """Dimensions of a Qwen3 with experts in every layer."""

    experts: int
    expert_ffn: int

    def _ffn(self, at: str, layer: int) -> Iterator[Parameter]:
        e, inner, h = self.experts, self.expert_ffn, self.hidden
        yield Parameter(f"{at}.gate.weight", (e, h), layer, Kind.REPLICATED)
        yield Parameter(f"{at}.experts.gate_proj", (e, inner, h), layer, Kind.EXPERT_COLUMN)
        yield Parameter(f"{at}.experts.up_proj", (e, inner, h), layer, Kind.EXPERT_COLUMN)
        yield Parameter(f"{at}.experts.down_proj", (e, h, inner), layer, Kind.EXPERT_ROW)

    def refusal(self, p: Parallelism) -> str | None:
        """See Dims. Experts need not divide evenly over ep."""
        if p.ep > self.experts:
            return f"has {self.experts} experts a layer, fewer than ep{p.ep}."
        return self._tp_refusal(p.tp, self.expert_ffn)


@dataclass(frozen=True)
class ModelSpec:
    """A model of the catalog."""

    name: str
    dims: Dims

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters in the order of the model. A tied head is the embedding and stands there only."""
        return tuple(self.dims.parameters())

    @property
    def numel(self) -> int:
        """Number of elements of all parameters together."""
        return sum(p.numel for p in self.parameters)


_MODELS: Final[dict[str, Dims]] = {
    "tiny": DenseDims(layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=128, vocab=256, tied=True),
    "tiny-moe": MoeDims(
        layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, experts=6, expert_ffn=32, vocab=256, tied=False
    ),
    "Qwen3-0.6B": DenseDims(layers=28, hidden=1024, heads=16, kv_heads=8, ffn=3072, tied=True),
    "Qwen3-1.7B": DenseDims(layers=28, hidden=2048, heads=16, kv_heads=8, ffn=6144, tied=True),
    "Qwen3-4B": DenseDims(layers=36, hidden=2560, heads=32, kv_heads=8, ffn=9728, tied=True),
    "Qwen3-8B": DenseDims(layers=36, hidden=4096, heads=32, kv_heads=8, ffn=12288, tied=False),
    "Qwen3-14B": DenseDims(layers=40, hidden=5120, heads=40, kv_heads=8, ffn=17408, tied=False),
    "Qwen3-32B": DenseDims(layers=64, hidden=5120, heads=64, kv_heads=8, ffn=25600, tied=False),
    "Qwen3-30B-A3B": MoeDims(layers=48, hidden=2048, heads=32, kv_heads=4, experts=128, expert_ffn=768, tied=False),
}


def known_models() -> tuple[str, ...]:
    """Names of the catalog's models."""
    return tuple(_MODELS)


def model(name: str) -> ModelSpec:
    """The model of that name, in any case, with or without "organisation/". CatalogError for an unknown
    one."""
    by_lower = {known.lower(): known for known in _MODELS}
    wanted = name.strip().rsplit("/", 1)[-1].lower()
    if wanted in by_lower:
        return ModelSpec(by_lower[wanted], _MODELS[by_lower[wanted]])
    near = difflib.get_close_matches(wanted, by_lower, n=1, cutoff=0.5)
    hint = f" Did you mean {by_lower[near[0]]}?" if near else ""
    raise CatalogError(f"unknown model {name!r}; known are {', '.join(_MODELS)}.{hint}")


def layout(spec: ModelSpec, parallelism: Parallelism, dtype: str = "bfloat16", first_rank: int = 0) -> ModelLayout:
    """The model over `parallelism.world` ranks from `first_rank` on, as FSDP2, vLLM and their like lay it
    out.

    Pipeline stages are contiguous ranks with contiguous layers, as even as they come; what stands before the
    layers is in the first stage and what stands after them in the last. Raises CatalogError, in one
    sentence, for a parallelism that the model does not allow, and LayoutError for an unknown dtype.
    """
    p, layers = parallelism, spec.dims.layers
    refusal = spec.dims.refusal(p)
    if refusal is None and p.pp > layers:
        refusal = f"has {layers} layers, fewer than pp{p.pp}."
    if refusal is not None:
        raise CatalogError(f"{spec.name} {refusal}")
    axes = p.axes
    per_stage = p.world // p.pp
    stages = [Mesh.arange(tuple(axes.values()), tuple(axes), first_rank + s * per_stage) for s in range(p.pp)]
    tensors: dict[str, TensorLayout] = {}
    stage = 0
    for parameter in spec.parameters:
        if parameter.layer is not None:
            stage = parameter.layer * p.pp // layers
        placements = tuple(_placement(parameter, axis, axes) for axis in axes)
        tensors[parameter.name] = TensorLayout(parameter.shape, dtype, stages[stage], placements)
    return ModelLayout(tensors)


def _placement(parameter: Parameter, axis: str, axes: dict[str, int]) -> Placement:
    """What one mesh axis does to a parameter."""
    cut = _cuts(parameter)
    if axis == "fsdp":
        inside = math.prod(n for other, n in axes.items() if cut.get(other) == 0)
        return StridedShard(0, inside) if inside > 1 else Shard(0)
    return Shard(cut[axis]) if axis in cut else Replicate()


def _cuts(parameter: Parameter) -> dict[str, int]:
    """The dim that ep and tp cut, where they do."""
    cut = {"tp": _TP_DIM[parameter.kind]} if parameter.kind in _TP_DIM else {}
    return cut | ({"ep": 0} if parameter.kind in _EXPERT else {})
