"""Models of any size for measuring: the shapes of a transformer, trainers' FSDP, engines' tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout

__all__ = ["Layouts", "transformer", "uniform"]

_DTYPE, _ITEM = "bfloat16", 2


@dataclass(frozen=True)
class Layouts:
    """One model, held by a trainer gang and by engines. source, destination: in their groups' ranks. together: the engines'
    layout in the ranks of one group of all, trainers first."""

    source: ModelLayout
    destination: ModelLayout
    together: ModelLayout

    @property
    def nbytes(self) -> int:
        """Of the whole model: what a host with a whole engine needs."""
        return self.destination.nbytes


def transformer(nbytes: int, trainers: int, engines: int, ranks: int) -> Layouts:
    """About `nbytes` in bf16: layers of column- and row-parallel matrices and replicated norms, and an embedding for what is
    left."""
    hidden = 2048 if nbytes >= 512 << 20 else 512 if nbytes >= 32 << 20 else 128
    dims: dict[str, tuple[tuple[int, ...], int | None]] = {}
    left, layer = nbytes, (12 * hidden * hidden + 2 * hidden) * _ITEM
    for n in range(max(1, int(0.8 * nbytes / layer))):
        dims |= {
            f"layers.{n}.norm": ((hidden,), None), f"layers.{n}.qkv": ((3 * hidden, hidden), 0),
            f"layers.{n}.o": ((hidden, hidden), 1), f"layers.{n}.up": ((4 * hidden, hidden), 0),
            f"layers.{n}.down": ((hidden, 4 * hidden), 1), f"layers.{n}.norm2": ((hidden,), None),
        }  # fmt: skip
        left -= layer
    dims["embed"] = ((max(ranks, left // (hidden * _ITEM)), hidden), 0)
    return _laid_out(dims, trainers, engines, ranks)


def uniform(nbytes: int, trainers: int, engines: int, ranks: int) -> Layouts:
    """`nbytes` in few tensors, all cut along their rows on both sides: messages as large as the cells allow."""
    width, count = 1024, 2
    rows = max(trainers * ranks, nbytes // (count * width * _ITEM))
    return _laid_out({f"large.{n}": ((rows, width), 0) for n in range(count)}, trainers, engines, ranks)


def _laid_out(dims: dict[str, tuple[tuple[int, ...], int | None]], trainers: int, engines: int, ranks: int) -> Layouts:
    fsdp, tp = Mesh.arange((trainers,)), Mesh.arange((ranks,))
    both = Mesh.arange((engines, ranks), ("dp", "tp"), first=trainers)
    made: tuple[dict[str, TensorLayout], ...] = ({}, {}, {})
    for name, (shape, dim) in dims.items():
        cut = Replicate() if dim is None else Shard(dim)
        made[0][name] = TensorLayout(shape, _DTYPE, fsdp, (Shard(0),))
        made[1][name] = TensorLayout(shape, _DTYPE, tp, (cut,))
        made[2][name] = TensorLayout(shape, _DTYPE, both, (Replicate(), cut))
    return Layouts(*map(ModelLayout, made))
