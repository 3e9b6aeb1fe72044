"""A box: the half-open hyper-rectangle [lo, hi) of a tensor's elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Box"]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Elements lo[d] <= index[d] < hi[d] for each dim d. A 0-d box holds one element. May be empty."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lo) != len(self.hi) or any(a < 0 or b < a for a, b in zip(self.lo, self.hi, strict=True)):
            raise ValueError(f"not a box: lo={self.lo} hi={self.hi}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor of that shape."""
        return cls((0,) * len(shape), tuple(int(n) for n in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dim."""
        return tuple(b - a for a, b in zip(self.lo, self.hi, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements; Python's unbounded integers, so no overflow."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when there is no common element."""
        lo = tuple(max(a, b) for a, b in zip(self.lo, other.lo, strict=True))
        hi = tuple(min(a, b) for a, b in zip(self.hi, other.hi, strict=True))
        return Box(lo, hi) if all(a < b for a, b in zip(lo, hi, strict=True)) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box."""
        return all(a <= c and d <= b for a, b, c, d in zip(self.lo, self.hi, other.lo, other.hi, strict=True))

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Index for a tensor whose first element is `origin` (default: the whole tensor's)."""
        start = origin if origin is not None else (0,) * len(self.lo)
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.lo, self.hi, start, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True)) + "]"
