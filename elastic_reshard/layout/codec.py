"""Layouts as plain data, to be told to other members. JSON only: nothing that arrives is ever executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_reshard.errors import LayoutError
from elastic_reshard.layout.box import Box
from elastic_reshard.layout.mesh import Mesh
from elastic_reshard.layout.placements import Declared, Placement, Replicate, Shard, StridedShard
from elastic_reshard.layout.tensor import DeclaredBox, TensorLayout

__all__ = ["layout_from_data", "layout_to_data"]


def layout_to_data(layout: TensorLayout) -> dict[str, Any]:
    """A JSON-ready description; `layout_from_data` makes an equal layout of it."""
    data: dict[str, Any] = {
        "shape": list(layout.shape),
        "dtype": layout.dtype,
        "mesh": {
            "ranks": list(layout.mesh.ranks),
            "shape": list(layout.mesh.shape),
            "axes": list(layout.mesh.axes),
        },
    }
    if layout.declared is None:
        data["placements"] = [_placement_to_data(p) for p in layout.placements]
    else:
        data["declared"] = [[d.rank, list(d.box.lo), list(d.box.hi), list(d.local)] for d in layout.declared]
    return data


def layout_from_data(data: Mapping[str, Any]) -> TensorLayout:
    """The layout. LayoutError for anything that is not one."""
    try:
        mesh = Mesh(_ints(data["mesh"]["ranks"]), _ints(data["mesh"]["shape"]), tuple(map(str, data["mesh"]["axes"])))
        declared = data.get("declared")
        return TensorLayout(
            _ints(data["shape"]),
            str(data["dtype"]),
            mesh,
            tuple(_placement_from_data(p) for p in data.get("placements", ())),
            None
            if declared is None
            else tuple(DeclaredBox(int(r), Box(_ints(a), _ints(b)), _ints(at)) for r, a, b, at in declared),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, LayoutError):
            raise
        raise LayoutError(f"not a layout: {error!r}; it was made by another version or damaged") from error


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _placement_to_data(p: Placement) -> list[Any]:
    if isinstance(p, Shard):
        return ["S", p.dim]
    if isinstance(p, StridedShard):
        return ["SS", p.dim, p.split_factor]
    if isinstance(p, Declared):
        return ["D", p.dim, list(p.offsets)]
    return ["R"]


def _placement_from_data(data: Sequence[Any]) -> Placement:
    match list(data):
        case ["R"]:
            return Replicate()
        case ["S", dim]:
            return Shard(int(dim))
        case ["SS", dim, factor]:
            return StridedShard(int(dim), int(factor))
        case ["D", dim, offsets]:
            return Declared(int(dim), _ints(offsets))
    raise LayoutError(f"not a placement: {data!r}")
