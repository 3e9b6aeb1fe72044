"""Fragments: what one rank can say of a model, as plain data, and the whole that all ranks' fragments make. No torch.

A rank knows the tensors it holds; with pipeline stages or experts nobody knows all. So each tells its own, and they are
joined by one rule, wherever that is done. The body of a fragment is JSON:

    {"whole": bool, "tensors": {name: layout, or {"plain": [shape, dtype]} for one that the rank holds whole},
     "correspondences": [...] or left out}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import xxhash

from elastic_reshard.errors import LayoutError, LayoutMismatch, Violation
from elastic_reshard.layout.box import Box
from elastic_reshard.layout.codec import layout_from_data, layout_to_data
from elastic_reshard.layout.correspondence import Correspondence
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.layout.mesh import Mesh
from elastic_reshard.layout.model import ModelLayout
from elastic_reshard.layout.placements import Replicate
from elastic_reshard.layout.tensor import DeclaredBox, TensorLayout

__all__ = [
    "Plain",
    "canonical",
    "check_fragment",
    "correspondences_from_data",
    "correspondences_to_data",
    "fragment_id",
    "joined",
    "model_from_data",
    "model_to_data",
    "tensors_to_data",
]

# Shape and dtype of a tensor that a rank holds whole.
Plain = tuple[tuple[int, ...], str]


def canonical(body: Mapping[str, Any]) -> bytes:
    """The one spelling of a body as JSON: compact, ASCII, tensors in the order of the model (it is part of a layout)."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def fragment_id(body: Mapping[str, Any]) -> str:
    """The content id of a fragment's body: 32 hex digits."""
    return xxhash.xxh3_128(canonical(body)).hexdigest()


def tensors_to_data(tensors: Mapping[str, TensorLayout | Plain]) -> dict[str, Any]:
    """Layouts and plain tensors by name, JSON-ready."""
    return {
        name: layout_to_data(x) if isinstance(x, TensorLayout) else {"plain": [list(x[0]), x[1]]}
        for name, x in tensors.items()
    }


def model_to_data(model: ModelLayout) -> dict[str, Any]:
    """JSON-ready; `model_from_data` makes an equal model layout of it."""
    return tensors_to_data(model.tensors)


def model_from_data(data: Mapping[str, Any]) -> ModelLayout:
    """The model layout. LayoutError for anything that is not one."""
    return ModelLayout({str(name): layout_from_data(x) for name, x in data.items()})


def correspondences_to_data(correspondences: Sequence[Correspondence]) -> list[dict[str, Any]]:
    """JSON-ready; what is None is left out."""

    def plain(value: object) -> object:
        if isinstance(value, Box):
            return [list(value.lo), list(value.hi)]
        return list(value) if isinstance(value, tuple) else value

    return [
        {f.name: plain(value) for f in fields(c) if (value := getattr(c, f.name)) is not None} for c in correspondences
    ]


def correspondences_from_data(data: Iterable[Mapping[str, Any]]) -> tuple[Correspondence, ...]:
    """The correspondences. LayoutError for anything that is not a list of them."""
    known = {f.name for f in fields(Correspondence)}
    try:
        found = []
        for item in data:
            if unknown := set(item) - known:
                raise LayoutError(f"not a correspondence: unknown {sorted(unknown)}; known are {sorted(known)}")
            a, b = (None if item.get(k) is None else _box(item[k]) for k in ("source_box", "destination_box"))
            permute = None if item.get("permute") is None else tuple(int(d) for d in item["permute"])
            found.append(Correspondence(str(item["source"]), str(item["destination"]), a, b, permute))
        return tuple(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, LayoutError):
            raise
        raise LayoutError(f"not correspondences: {error!r}; they were made by another version or damaged") from error


def _box(bounds: Sequence[Sequence[int]]) -> Box:
    lo, hi = bounds
    return Box(tuple(int(n) for n in lo), tuple(int(n) for n in hi))


def check_fragment(body: object) -> None:
    """LayoutError, naming the tensor, for anything that is not a fragment's body."""
    if not isinstance(body, dict) or not isinstance(body.get("tensors"), dict) or type(body.get("whole")) is not bool:
        raise LayoutError('not a fragment: it must be an object with "whole": true or false and "tensors": {...}')
    if unknown := set(body) - {"whole", "tensors", "correspondences"}:
        raise LayoutError(f"not a fragment: unknown {sorted(unknown)}")
    for name, said in body["tensors"].items():
        try:
            one = _one(said)
        except LayoutError as error:
            raise LayoutError(f"tensor {name}: {error}") from error
        if body["whole"] and not isinstance(one, TensorLayout):
            raise LayoutError(f"tensor {name}: a whole fragment has a layout for every tensor, not a shape alone")
    if body.get("correspondences") is not None:
        correspondences_from_data(body["correspondences"])


def _one(said: Any) -> TensorLayout | Plain:
    if not isinstance(said, dict):
        raise LayoutError(f"not a layout: {type(said).__name__} instead of an object")
    if "plain" not in said:
        return layout_from_data(said)
    try:
        shape, dtype = said["plain"]
        plain = (tuple(int(n) for n in shape), str(dtype))
    except (TypeError, ValueError) as error:
        raise LayoutError(f"not a shape and a dtype: {said['plain']!r}") from error
    itemsize(plain[1])
    if any(n < 0 for n in plain[0]):
        raise LayoutError(f"shape {plain[0]} has a negative dim")
    return plain


def joined(side: str, said: Sequence[Mapping[str, Any]]) -> ModelLayout:
    """The side's model layout, from every rank's fragment (its body), in rank order. Pure: equal wherever it is made.

    A whole layout given by any rank stands, and all that are given must be equal; DTensors must agree on all ranks that
    name them; a plain tensor is replicated over the ranks that hold it. Raises LayoutMismatch with every violation.
    """
    # Ranks of one mesh say the same: a body that is given for several of them is parsed once.
    once: dict[int, dict[str, TensorLayout | Plain]] = {}
    for data in said:
        if id(data) not in once:
            once[id(data)] = _parsed(data)
    whole = {rank: once[id(data)] for rank, data in enumerate(said) if data["whole"]}
    faults: list[Violation] = []
    if whole:
        first = next(iter(whole))
        layout = ModelLayout({n: x for n, x in whole[first].items() if isinstance(x, TensorLayout)})
        for rank, other in whole.items():
            known = {n: x.content_id for n, x in other.items() if isinstance(x, TensorLayout)}
            if known != {n: x.content_id for n, x in layout.items()}:
                faults.append(Violation("*", "layout", f"ranks {first} and {rank} were given unlike {side} layouts"))
        if faults:
            raise LayoutMismatch(faults)
        return layout
    holders: dict[str, dict[int, TensorLayout | Plain]] = {}
    for rank, data in enumerate(said):
        for name, layout_or_plain in once[id(data)].items():
            holders.setdefault(name, {})[rank] = layout_or_plain
    found = {name: _agreed(side, name, by_rank, faults) for name, by_rank in holders.items()}
    if faults:
        raise LayoutMismatch(faults)
    return ModelLayout({name: x for name, x in found.items() if x is not None})


def _parsed(data: Mapping[str, Any]) -> dict[str, TensorLayout | Plain]:
    return {name: _one(x) for name, x in data["tensors"].items()}


def _agreed(
    side: str,
    name: str,
    by_rank: Mapping[int, TensorLayout | Plain],
    faults: list[Violation],
) -> TensorLayout | None:
    ranks = sorted(by_rank)
    first = by_rank[ranks[0]]
    if not isinstance(first, TensorLayout):
        unlike = [r for r in ranks if by_rank[r] != first]
        if unlike:
            faults.append(Violation(name, "layout", f"{side} ranks {ranks[0]} and {unlike} hold unlike tensors"))
            return None
        return TensorLayout(first[0], first[1], Mesh.of(ranks, ("member",)), (Replicate(),))
    layouts = {r: x for r in ranks if isinstance(x := by_rank[r], TensorLayout)}
    meshes = {x.mesh.ranks: x for x in layouts.values()}
    members = [r for mesh in meshes for r in mesh]
    unlike = [r for r in ranks if r not in layouts or layouts[r].content_id != meshes[layouts[r].mesh.ranks].content_id]
    unlike += [r for r, x in layouts.items() if (x.shape, x.dtype) != (first.shape, first.dtype)]
    silent = sorted(set(members) - set(ranks))
    if unlike or len(set(members)) < len(members):
        unlike = sorted(set(unlike)) or [r for r in layouts if layouts[r].mesh.ranks != first.mesh.ranks]
        faults.append(Violation(name, "layout", f"{side} ranks {ranks[0]} and {unlike} lay it out differently"))
    if silent:
        faults.append(Violation(name, "missing", f"ranks {silent} are in its {side} mesh, but did not give it"))
    if unlike or silent:
        return None
    return first if len(meshes) == 1 else _side_by_side(list(meshes.values()))


def _side_by_side(layouts: Sequence[TensorLayout]) -> TensorLayout:
    """One layout of several disjoint meshes that each hold the whole tensor: FSDP2 beside TP leaves parameters that TP does
    not touch on one submesh for each TP rank."""
    boxes = [
        DeclaredBox(rank, box, at) for layout in layouts for rank in layout.mesh.ranks for box, at in layout.boxes(rank)
    ]
    ranks = sorted(rank for layout in layouts for rank in layout.mesh.ranks)
    mesh = Mesh(tuple(ranks), (len(ranks),), ("member",))
    return TensorLayout(layouts[0].shape, layouts[0].dtype, mesh, (), tuple(boxes))
