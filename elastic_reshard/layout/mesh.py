"""A mesh: an n-d grid of ranks with named axes, as in torch's DeviceMesh, without processes behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from elastic_reshard.errors import LayoutError

__all__ = ["Mesh"]


@dataclass(frozen=True)
class Mesh:
    """`ranks` in C order over `shape`; `axes` names each axis. Ranks are those of one group, in any order.

    Raises LayoutError for a repeated rank, a negative rank, or counts that do not fit.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes) or math.prod(self.shape) != len(self.ranks):
            raise LayoutError(f"mesh of shape {self.shape} with axes {self.axes} does not hold {len(self.ranks)} ranks")
        if len(set(self.axes)) != len(self.axes):
            raise LayoutError(f"mesh axes must have distinct names, got {self.axes}")
        if len(set(self.ranks)) != len(self.ranks) or (self.ranks and min(self.ranks) < 0):
            raise LayoutError(f"mesh ranks must be distinct and not negative, got {self.ranks[:16]}")

    @classmethod
    def of(cls, ranks: npt.ArrayLike | Sequence[int], axes: Sequence[str] | None = None) -> Mesh:
        """From a nested list or array of ranks; axes are named `axis0`, `axis1`, ... unless given."""
        grid = np.asarray(ranks, dtype=np.int64)
        names = tuple(axes) if axes is not None else tuple(f"axis{i}" for i in range(grid.ndim))
        return cls(tuple(grid.ravel().tolist()), grid.shape, names)

    @classmethod
    def arange(cls, shape: Sequence[int], axes: Sequence[str] | None = None, first: int = 0) -> Mesh:
        """Ranks first, first+1, ... in C order."""
        return cls.of(np.arange(first, first + math.prod(shape)).reshape(tuple(shape)), axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def grid(self) -> npt.NDArray[np.int64]:
        """The ranks as a read-only array of `shape`."""
        grid = np.array(self.ranks, dtype=np.int64).reshape(self.shape)
        grid.flags.writeable = False
        return grid

    def coordinates(self) -> npt.NDArray[np.int64]:
        """Coordinate of each rank in C order: int64 [size, axes]."""
        return np.indices(self.shape, dtype=np.int64).reshape(len(self.shape), self.size).T

    def __str__(self) -> str:
        return "x".join(f"{a}={n}" for a, n in zip(self.axes, self.shape, strict=True)) or "scalar"
