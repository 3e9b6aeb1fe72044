"""What one rank says of a model, from its tensors. Every rank joins all ranks' fragments by the same rule
(`layout.fragments.joined`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import xxhash

from elastic_reshard.errors import ArenaError, LayoutMismatch, Violation
from elastic_reshard.layout import Mesh, ModelLayout, TensorLayout
from elastic_reshard.layout.dtensor import dtype_name, layout_of, local_of
from elastic_reshard.layout.fragments import Plain, joined, tensors_to_data

__all__ = ["Fragment", "describe", "fingerprint", "joined", "local_tensors"]


class Fragment:
    """One side of one rank: layouts by name; a plain tensor is `None` with its shape and dtype, held whole.

    `given` is the model layout that the caller passed for this side: then nothing has to be joined."""

    def __init__(
        self,
        layouts: Mapping[str, TensorLayout | Plain],
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
            "tensors": tensors_to_data(layouts),
        }


_known: dict[object, TensorLayout] = {}


def _layout_of(name: str, tensor: torch.Tensor, renumber: Mapping[int, int] | None) -> TensorLayout | Plain:
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


def local_tensors(
    tensors: Mapping[str, torch.Tensor] | None, kinds: Collection[str] = ("cpu",)
) -> dict[str, torch.Tensor]:
    """Local tensors by name, without autograd. ArenaError, naming it, for one on another kind of device than those."""
    found = {}
    for name, tensor in (tensors or {}).items():
        local = local_of(tensor)
        if local.device.type not in kinds:
            raise ArenaError(
                f"{name} is on {local.device}; this call moves tensors of {' and '.join(kinds).upper()} only"
            )
        found[name] = local
    return found
