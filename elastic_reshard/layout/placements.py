"""Placements: how one mesh axis treats a tensor. DTensor's words, plus shards that members declare.

`Replicate`, `Shard` and `StridedShard` follow DTensor: axes apply from left to right, a shard of n elements over
s ranks gives each ceil(n / s) until nothing is left (torch.chunk's rule, so 10 over 4 is 3, 3, 3, 1 and 5 over 4 is
2, 2, 1, 0). `Declared` states cut positions instead of deriving them.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_reshard.errors import LayoutError

__all__ = ["Declared", "Partial", "Placement", "Replicate", "Shard", "StridedShard"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the same."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts tensor dim `dim` into contiguous chunks."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """FSDP over TP on one dim, as torch's `_StridedShard`: cut into `split_factor` chunks, and each of them over the
    axis; a rank holds its part of every chunk, in order. `split_factor` is the size of the axis to the right that
    cuts the same dim and was applied first."""

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise LayoutError(f"StridedShard needs a split_factor of at least 1, got {self.split_factor}")

    def __str__(self) -> str:
        return f"S({self.dim},sf={self.split_factor})"


@dataclass(frozen=True, slots=True)
class Declared:
    """Coordinate i of the axis holds offsets[i] <= index < offsets[i + 1] of dim `dim`, as the members state it.

    No other axis may cut the same dim."""

    dim: int
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) < 2 or any(a > b for a, b in zip(self.offsets, self.offsets[1:], strict=False)):
            raise LayoutError(f"Declared needs rising offsets, one more than ranks, got {self.offsets}")

    def __str__(self) -> str:
        return f"D({self.dim},{list(self.offsets)})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Ranks hold summands. Known only to be refused: reduce before a refit."""

    reduce_op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


Placement = Replicate | Shard | StridedShard | Declared | Partial
