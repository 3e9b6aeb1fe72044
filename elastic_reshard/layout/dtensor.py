"""From DTensor to TensorLayout. The only file of `layout` that imports torch; import it by name.

Placements are read by their exact type: a kind this project does not know is refused, never taken for a plain
Shard. What DTensor says is checked against what this rank holds and against DTensor's own rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, placement_types

from elastic_reshard.errors import LayoutError, UnsupportedPlacement
from elastic_reshard.layout.dtypes import ITEMSIZE, itemsize
from elastic_reshard.layout.mesh import Mesh
from elastic_reshard.layout.placements import Placement, Replicate, Shard, StridedShard
from elastic_reshard.layout.tensor import TensorLayout

__all__ = ["dtype_name", "from_dtensor", "layout_of", "local_of", "torch_dtype"]

_DECLARE = "State what each rank holds with TensorLayout.declare"


def dtype_name(dtype: torch.dtype) -> str:
    """Name without "torch.". LayoutError for a dtype without whole bytes per element."""
    name = str(dtype).removeprefix("torch.")
    itemsize(name)
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name. LayoutError for an unknown name, or one that this torch does not have."""
    itemsize(name)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        have = ", ".join(n for n in ITEMSIZE if hasattr(torch, n))
        raise LayoutError(f"torch {torch.__version__} has no dtype {name!r}; use one of {have}")
    return dtype


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds: a DTensor's local tensor, or the tensor itself. Detached, shares memory, no copy.

    Waits for a collective that still writes the local tensor; otherwise returns at once.
    """
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # with gradients on, to_local would record itself
            tensor = tensor.to_local()
    return tensor.detach()


def layout_of(tensor: DTensor, name: str = "tensor", over: DeviceMesh | None = None) -> TensorLayout:
    """The layout that a DTensor states, checked; `name` is for error messages. No communication, no autograd.

    The mesh is the DTensor's own. A tensor on a submesh (FSDP2 beside TP leaves a norm on `mesh["dp"]`) so
    describes only this rank's part of the group, and ranks differ. `over`, the mesh of the whole group, is the
    caller's word that the tensor is the same along the axes which its own mesh lacks: they become Replicate.
    A global shape that `DTensor.from_local` guessed from uneven shards differs between ranks too: only a
    comparison of the ranks' layouts shows it.

    Raises UnsupportedPlacement for Partial and unknown kinds. Raises LayoutError where this rank does not hold
    what the placements say, where the mesh is no part of `over`, and, on all ranks alike, where FSDP2 over an
    uneven TP split would misstate what ranks hold.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutError(f"{name} is a {type(tensor).__name__}, not a DTensor; state its layout with TensorLayout")
    shape = tuple(int(n) for n in tensor.shape)
    placements = tuple(_translated(p, len(shape), name) for p in tensor.placements)
    device_mesh, mesh = tensor.device_mesh, _mesh_of(tensor.device_mesh)
    if over is not None:
        mesh, placements = _widened(mesh, placements, over, name)
        device_mesh = over
    _refuse_unsorted(mesh, placements, name)
    layout = TensorLayout(shape, dtype_name(tensor.dtype), mesh, placements)
    coordinate = device_mesh.get_coordinate()
    rank = None if coordinate is None else int(mesh.grid[tuple(coordinate)])
    _refuse_two_readings(layout, rank, name)
    _check_local_shape(layout, rank, tuple(local_of(tensor).shape), name)
    if coordinate is not None and rank is not None:
        _check_offset(layout, rank, coordinate, name)
    return layout


from_dtensor = layout_of


def _refuse_unsorted(mesh: Mesh, placements: tuple[Placement, ...], name: str) -> None:
    """torch has two readings of a shard over ranks that do not rise along its axis: `get_coordinate` follows the mesh,
    `distribute_tensor` and `full_tensor` the sorted ranks (measured). Nobody can tell which a tensor was made by."""
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Replicate) and (np.diff(mesh.grid, axis=axis) < 0).any():
            raise UnsupportedPlacement(
                f"{name} is {placement} over mesh axis {mesh.axes[axis]}, along which the ranks {mesh.ranks} do not rise; "
                "torch itself reads such shards in two ways. Build the DeviceMesh with rising ranks along it"
            )


def _mesh_of(mesh: DeviceMesh) -> Mesh:
    return Mesh.of(mesh.mesh.numpy(), mesh.mesh_dim_names)


def _widened(
    mesh: Mesh, placements: tuple[Placement, ...], over: DeviceMesh, name: str
) -> tuple[Mesh, tuple[Placement, ...]]:
    """The mesh `over`, with Replicate along the axes that the tensor's own mesh lacks."""
    whole, coordinate = _mesh_of(over), over.get_coordinate()
    own = dict(zip(mesh.axes, placements, strict=True))
    if coordinate is not None:
        here = tuple(slice(None) if a in own else at for a, at in zip(whole.axes, coordinate, strict=True))
        kept = tuple(a for a in whole.axes if a in own)
        if kept == mesh.axes and np.array_equal(whole.grid[here], mesh.grid):
            return whole, tuple(own.get(a, Replicate()) for a in whole.axes)
    raise LayoutError(
        f"{name} lies on the mesh {mesh} of ranks {mesh.ranks[:16]}, which is not this rank's part of the mesh "
        f"{whole} given as `over`: pass the mesh from which the tensor's was sliced, or: {_DECLARE}"
    )


def _translated(placement: object, dims: int, name: str) -> Placement:
    """One placement in our words. `type(...) is`: a subclass may mean anything."""
    kind = type(placement)
    if kind is placement_types.Replicate:
        return Replicate()
    dim = int(getattr(placement, "dim", 0))
    dim += dims if dim < 0 else 0
    if kind is placement_types.Shard:
        return Shard(dim)
    if kind is placement_types._StridedShard:
        return StridedShard(dim, int(getattr(placement, "split_factor")))  # noqa: B009
    if isinstance(placement, placement_types.Partial):
        raise UnsupportedPlacement(
            f"{name} has the placement {placement!r}, summands that must be reduced: redistribute it to "
            f"Replicate or Shard before a refit"
        )
    raise UnsupportedPlacement(
        f"{name} has the placement {placement!r} of the unknown kind {kind.__module__}.{kind.__qualname__}; "
        f"known are Replicate, Shard and _StridedShard. Redistribute it, or: {_DECLARE}"
    )


def _check_local_shape(layout: TensorLayout, rank: int | None, has: tuple[int, ...], name: str) -> None:
    expected = None if rank is None else layout.local_shape(rank)
    # Without elements the shape is free: FSDP2 and ranks outside the mesh write 0 where the rule does not.
    if has == expected or (math.prod(has) == 0 and (expected is None or math.prod(expected) == 0)):
        return
    who = "a rank outside its mesh" if rank is None else f"rank {rank}"
    raise LayoutError(
        f"{name}: {who} has a local tensor of shape {has}, expected {expected} by {layout}. The placements "
        f"do not describe what ranks hold. {_DECLARE}"
    )


def _check_offset(layout: TensorLayout, rank: int, coordinate: Sequence[int], name: str) -> None:
    """Our first element against torch's, for dims without strided shards: elsewhere its offset says too
    little.

    Chained here, since torch's compute_local_shape_and_global_offset builds an index as long as the dim.
    """
    boxes = layout.boxes(rank)
    if not boxes:
        return
    strided = {p.dim for p in layout.placements if isinstance(p, StridedShard)}
    offset, extent = [0] * len(layout.shape), list(layout.shape)
    for axis, p in enumerate(layout.placements):
        if isinstance(p, Shard) and p.dim not in strided:
            size, start = placement_types.Shard.local_shard_size_and_offset(
                extent[p.dim], layout.mesh.shape[axis], coordinate[axis]
            )
            offset[p.dim] += int(start)
            extent[p.dim] = int(size)
    first = boxes[0][0].lo
    if any(offset[d] != first[d] for d in range(len(offset)) if d not in strided):
        raise LayoutError(
            f"{name}: rank {rank} begins at {tuple(offset)} by torch {torch.__version__}, expected {first} "
            f"by {layout}. This torch shards by another rule than the one known here. {_DECLARE}"
        )


def _refuse_two_readings(layout: TensorLayout, rank: int | None, name: str) -> None:
    """FSDP2 chunks what TP has left on a rank and states _StridedShard, which torch reads in another order.

    Both say the same unless the dim splits unevenly. Which one made the tensor cannot be seen on every rank,
    so where they differ all ranks refuse, from shape, mesh and placements alone.
    """
    cuts = [
        (p.dim, n)
        for n, p in zip(layout.mesh.shape, layout.placements, strict=True)
        if isinstance(p, Shard | StridedShard)
    ]
    strided = {p.dim for p in layout.placements if isinstance(p, StridedShard)}
    if all(layout.shape[d] % math.prod(n for dim, n in cuts if dim == d) == 0 for d in strided):
        return
    made = _as_fsdp_makes_it(layout)
    if made.content_id == layout.content_id:
        return
    wrong = [r for r in layout.mesh.ranks if made.boxes(r) != layout.boxes(r)]
    shown = wrong[0] if rank not in wrong else rank

    def held(of: TensorLayout) -> str:
        return ", ".join(str(box) for box, _ in of.boxes(shown)) or "nothing"

    raise LayoutError(
        f"{name}: FSDP over an uneven tensor-parallel split misstates what ranks {wrong[:16]} hold: rank "
        f"{shown} has {held(made)}, expected {held(layout)} by {layout}. Choose sizes that divide evenly, "
        f"or: {_DECLARE}"
    )


def _as_fsdp_makes_it(layout: TensorLayout) -> TensorLayout:
    """The same axes in the order in which FSDP2 applies them: a strided axis after those to its right."""
    order: list[int] = []
    placements = list(layout.placements)
    for axis in reversed(range(len(placements))):
        p = placements[axis]
        if isinstance(p, StridedShard) and p.split_factor == _shards_to_the_right(layout, axis, p.dim):
            placements[axis] = Shard(p.dim)
            order.append(axis)
        else:
            order.insert(0, axis)
    mesh = Mesh.of(layout.mesh.grid.transpose(order), [layout.mesh.axes[a] for a in order])
    return TensorLayout(layout.shape, layout.dtype, mesh, tuple(placements[a] for a in order))


def _shards_to_the_right(layout: TensorLayout, axis: int, dim: int) -> int:
    right = list(zip(layout.mesh.shape, layout.placements, strict=True))[axis + 1 :]
    return math.prod(n for n, p in right if isinstance(p, Shard | StridedShard) and p.dim == dim)
