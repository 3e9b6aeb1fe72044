"""Fragments: what one rank can say of a model, and the whole that all ranks' fragments make.

A rank knows the tensors it holds; with pipeline stages or experts nobody knows all. So each tells its own, and every
rank joins them by the same rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import xxhash

from elastic_reshard.errors import ArenaError, LayoutMismatch, Violation
from elastic_reshard.layout import DeclaredBox, Mesh, ModelLayout, Replicate, TensorLayout
from elastic_reshard.layout.codec import layout_from_data, layout_to_data
from elastic_reshard.layout.dtensor import dtype_name, layout_of, local_of

__all__ = ["Fragment", "describe", "fingerprint", "joined", "local_tensors"]


class Fragment:
    """One side of one rank: layouts by name; a plain tensor is `None` with its shape and dtype, held whole.

    `given` is the model layout that the caller passed for this side: then nothing has to be joined."""

    def __init__(
        self,
        layouts: Mapping[str, TensorLayout | tuple[tuple[int, ...], str]],
        given: ModelLayout | None,
    ) -> None:
        self.layouts, self.given = layouts, given
        h = xxhash.xxh3_128(given.content_id.encode() if given is not None else b"fragment")
        if given is None:
            for name, layout in layouts.items():
                said = layout.content_id if isinstance(layout, TensorLayout) else repr(layout)
                h.update(f"{name}\0{said}\0".encode())
        self.content_id = h.digest()

    def to_data(self) -> dict[str, Any]:
        """JSON-ready."""
        layouts = self.given.tensors if self.given is not None else self.layouts
        return {
            "whole": self.given is not None,
            "tensors": {
                name: layout_to_data(x) if isinstance(x, TensorLayout) else {"plain": [list(x[0]), x[1]]}
                for name, x in layouts.items()
            },
        }


_known: dict[object, TensorLayout] = {}


def _layout_of(
    name: str, tensor: torch.Tensor, renumber: Mapping[int, int] | None
) -> TensorLayout | tuple[tuple[int, ...], str]:
    """The layout of a DTensor, remembered by all that it depends on; shape and dtype of a plain tensor."""
    spec = getattr(tensor, "_spec", None)
    if spec is None:
        return (tuple(tensor.shape), dtype_name(tensor.dtype))
    local = local_of(tensor)
    order = tuple(renumber.items()) if renumber is not None else None
    key = (tensor.shape, tensor.dtype, spec.mesh, spec.placements, local.shape, order)
    if key not in _known:
        if len(_known) > 4096:
            _known.clear()
        layout = layout_of(tensor, name)  # type: ignore[arg-type]
        _known[key] = _renumbered(layout, renumber, name) if renumber is not None else layout
    return _known[key]


def _renumbered(layout: TensorLayout, number_of: Mapping[int, int], name: str) -> TensorLayout:
    """A mesh of global ranks, in the numbers of a group."""
    outside = [r for r in layout.mesh.ranks if r not in number_of]
    if outside:
        raise LayoutMismatch([Violation(name, "layout", f"its mesh has global ranks {outside}, outside of the group")])
    mesh = Mesh(tuple(number_of[r] for r in layout.mesh.ranks), layout.mesh.shape, layout.mesh.axes)
    return replace(layout, mesh=mesh)


def describe(
    tensors: Mapping[str, torch.Tensor] | None,
    given: ModelLayout | None,
    rank: int,
    renumber: Mapping[int, int] | None = None,
) -> Fragment:
    """What this rank says of one side. With a given layout, checks that every local tensor fits it.

    renumber: group rank of each global rank, where they differ (DTensors know global ranks).

    Raises LayoutMismatch (every violation) or a LayoutError of `layout_of`.
    """
    held = tensors or {}
    if given is None:
        return Fragment({name: _layout_of(name, tensor, renumber) for name, tensor in held.items()}, None)
    faults = []
    for name, layout in given.items():
        want = layout.local_shape(rank)
        has = local_of(held[name]) if name in held else None
        if has is None and want is not None and all(want):
            faults.append(Violation(name, "missing", f"rank {rank} is in the layout's mesh, but gave no tensor"))
        if has is not None and want is not None and tuple(has.shape) != want:
            faults.append(Violation(name, "shape", f"rank {rank} has {tuple(has.shape)}, the layout expects {want}"))
        if has is not None and dtype_name(has.dtype) != layout.dtype:
            faults.append(Violation(name, "dtype", f"rank {rank} has {has.dtype}, the layout says {layout.dtype}"))
    faults += [
        Violation(n, "extra", f"rank {rank} gave it, the layout has no such tensor") for n in held if n not in given
    ]
    if faults:
        raise LayoutMismatch(faults)
    return Fragment({}, given)


def joined(side: str, said: Sequence[Mapping[str, Any]]) -> ModelLayout:
    """The side's model layout, from every rank's fragment (`to_data`), in rank order. Pure: equal on all ranks.

    A whole layout given by any rank stands, and all that are given must be equal; DTensors must agree on all ranks that
    name them; a plain tensor is replicated over the ranks that hold it. Raises LayoutMismatch with every violation.
    """
    whole = {rank: _parsed(data) for rank, data in enumerate(said) if data["whole"]}
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
    holders: dict[str, dict[int, TensorLayout | tuple[tuple[int, ...], str]]] = {}
    for rank, data in enumerate(said):
        for name, layout_or_plain in _parsed(data).items():
            holders.setdefault(name, {})[rank] = layout_or_plain
    found = {name: _agreed(side, name, by_rank, faults) for name, by_rank in holders.items()}
    if faults:
        raise LayoutMismatch(faults)
    return ModelLayout({name: x for name, x in found.items() if x is not None})


def _parsed(data: Mapping[str, Any]) -> dict[str, TensorLayout | tuple[tuple[int, ...], str]]:
    return {
        name: (tuple(x["plain"][0]), str(x["plain"][1])) if "plain" in x else layout_from_data(x)
        for name, x in data["tensors"].items()
    }


def _agreed(
    side: str,
    name: str,
    by_rank: Mapping[int, TensorLayout | tuple[tuple[int, ...], str]],
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


def fingerprint(tensors: Mapping[str, torch.Tensor] | None) -> tuple[object, ...]:
    """Changes when any tensor's layout, memory, shape, strides or dtype do. Cheap: computed at every call."""
    found: list[object] = []
    for name, tensor in (tensors or {}).items():
        spec = getattr(tensor, "_spec", None)
        if spec is None:
            found.append((name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype))
        else:
            local = local_of(tensor)
            found.append(
                (
                    name,
                    spec.mesh,
                    spec.placements,
                    tensor.shape,
                    local.data_ptr(),
                    local.shape,
                    local.stride(),
                    local.dtype,
                )
            )
    return tuple(found)


def local_tensors(tensors: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Local tensors by name, without autograd. ArenaError, naming it, for one that is not on the CPU."""
    found = {}
    for name, tensor in (tensors or {}).items():
        local = local_of(tensor)
        if local.device.type != "cpu":
            raise ArenaError(f"{name} is on {local.device}; this call moves CPU tensors")
        found[name] = local
    return found
