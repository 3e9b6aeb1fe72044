"""Arrays by address: what is known of elements that lie in memory which numpy can't look into.

Strides are bytes and never negative. Nothing here touches a byte; `arena.boxes` makes copies of pairs of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from elastic_reshard.errors import ArenaError

__all__ = ["Place", "Strided", "contiguous_strides", "within"]

_SIZES = (1, 2, 4, 8, 16)


class Place(Protocol):
    """Where bytes lie that are not host memory: a device, as far as an array has to know it (`device.device_at`)."""

    @property
    def kind(self) -> str:
        """ "cuda" or "pretend"."""

    @property
    def id(self) -> str:
        """What tables name: a GPU's UUID, or "pretend:N"."""


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes from one index to the next of each dim, of a C-contiguous array."""
    strides, step = [0] * len(shape), itemsize
    for d in range(len(shape) - 1, -1, -1):
        strides[d] = step
        step *= max(1, shape[d])
    return tuple(strides)


def within(nbytes: int, offset: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
    """ArenaError unless that is an array whose elements all lie in `nbytes` bytes of memory, from `offset` on."""
    if len(shape) != len(strides) or itemsize not in _SIZES or min((0, *shape, *strides)) < 0:
        raise ArenaError(
            f"shape {tuple(shape)}, strides {tuple(strides)} and elements of {itemsize} bytes are no array"
        )
    high = offset
    if all(shape):
        high += sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + itemsize
    if offset < 0 or high > nbytes:
        raise ArenaError(
            f"bytes {offset} to {high} of {nbytes} bytes of device memory were asked for (shape {tuple(shape)}, strides "
            f"{tuple(strides)}); what the memory's owner declared is wrong"
        )


@dataclass(frozen=True, slots=True)
class Strided:
    """`shape` elements of `itemsize` bytes from `address` on. device: None for host memory.

    owner: whatever keeps the memory mapped; held as long as this, and all that was cut from it.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: Place | None
    owner: object = field(compare=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if (
            len(self.shape) != len(self.strides)
            or self.itemsize not in _SIZES
            or min((0, *self.shape, *self.strides)) < 0
        ):
            raise ArenaError(
                f"shape {self.shape}, strides {self.strides} and elements of {self.itemsize} bytes are no array; nothing was "
                "touched"
            )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of its elements, gaps not counted."""
        return self.size * self.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie together, in C order; dims of one element may have any stride."""
        if not self.size:
            return True
        want = contiguous_strides(self.shape, self.itemsize)
        return all(n == 1 or has == step for n, has, step in zip(self.shape, self.strides, want, strict=True))

    def __getitem__(self, index: tuple[Any, ...] | slice) -> Strided:
        """A box of it: slices with step 1, one for each of the last dims; an Ellipsis may stand before them."""
        index = index if isinstance(index, tuple) else (index,)
        parts = [part for part in index if part is not Ellipsis]
        if len(parts) > len(self.shape) or (len(parts) < len(self.shape) and Ellipsis not in index):
            raise ArenaError(f"an index of {len(parts)} slices does not fit an array of {len(self.shape)} dims")
        kept = len(self.shape) - len(parts)
        address, shape = self.address, list(self.shape[:kept])
        for part, n, step in zip(parts, self.shape[kept:], self.strides[kept:], strict=True):
            start, stop, by = part.indices(n)
            if by != 1:
                raise ArenaError(f"a slice with step {by} is no box")
            address += start * step
            shape.append(max(0, stop - start))
        return replace(self, address=address, shape=tuple(shape))

    def transpose(self, axes: Sequence[int]) -> Strided:
        """With its dims in another order."""
        return replace(self, shape=tuple(self.shape[d] for d in axes), strides=tuple(self.strides[d] for d in axes))

    def reshape(self, shape: Sequence[int]) -> Strided:
        """The same elements in another shape; only of a contiguous one. One size may be -1."""
        self._whole("reshaped")
        known = math.prod(n for n in shape if n != -1)
        want = tuple(self.size // known if n == -1 and known else n for n in shape)
        if math.prod(want) != self.size or min((0, *want)) < 0:
            raise ArenaError(f"{self.size} elements have no shape {tuple(shape)}")
        return replace(self, shape=want, strides=contiguous_strides(want, self.itemsize))

    def flat(self) -> Strided:
        """In one dim; only of a contiguous one."""
        return self.reshape((self.size,))

    def as_bytes(self) -> Strided:
        """Its bytes, in one dim; only of a contiguous one."""
        self._whole("taken as bytes")
        return replace(self, shape=(self.nbytes,), strides=(1,), itemsize=1)

    def view(self, itemsize: int) -> Strided:
        """Its bytes as elements of another size, in one dim; only of a contiguous one."""
        self._whole("viewed")
        if self.nbytes % itemsize:
            raise ArenaError(f"{self.nbytes} bytes are no elements of {itemsize} bytes")
        return replace(self, shape=(self.nbytes // itemsize,), strides=(itemsize,), itemsize=itemsize)

    def _whole(self, how: str) -> None:
        if not self.contiguous:
            raise ArenaError(f"an array of shape {self.shape} and strides {self.strides} can't be {how} without a copy")
