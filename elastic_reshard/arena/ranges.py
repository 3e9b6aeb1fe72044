"""What lies at an address: ranges of memory and the objects that keep them, which are held weakly."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from typing import Generic, TypeVar

from elastic_reshard.errors import ArenaError

__all__ = ["Ranges"]

T = TypeVar("T")


class Ranges(Generic[T]):
    """Ranges that don't overlap. Any thread; reading takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Replaced as a whole; may name objects that are gone.
        self._all: tuple[tuple[int, ...], tuple[tuple[int, weakref.ref[T]], ...]] = ((), ())

    def add(self, low: int, high: int, keeper: T) -> None:
        """The bytes from `low` to `high` are kept by that object, until it is gone. ArenaError if another one keeps some."""
        with self._lock:
            bases, rest = self._all
            live = [(base, end, ref) for base, (end, ref) in zip(bases, rest, strict=True) if ref() is not None]
            for base, end, _ in live:
                if base < high and low < end:
                    raise ArenaError(
                        f"memory from {low:#x} to {high:#x} overlaps what is kept already, {base:#x} to {end:#x}"
                    )
            live.append((low, high, weakref.ref(keeper)))
            live.sort(key=lambda entry: entry[0])
            self._all = tuple(e[0] for e in live), tuple((e[1], e[2]) for e in live)

    def find(self, address: int) -> tuple[int, T] | None:
        """(end of the range, its keeper) of the range that an address lies in."""
        bases, rest = self._all
        at = bisect_right(bases, address) - 1
        if at < 0 or address >= rest[at][0]:
            return None
        keeper = rest[at][1]()
        return None if keeper is None else (rest[at][0], keeper)

    def keepers(self, wanted: Sequence[tuple[int, int]]) -> list[T]:
        """Who keeps the wanted ranges; ArenaError if a byte of them lies in none."""
        found = []
        for low, high in wanted:
            at = low
            while at < high:
                hit = self.find(at)
                if hit is None:
                    raise ArenaError(
                        f"host memory at {at:#x} (of {low:#x} to {high:#x}) is not registered with the device; register the "
                        "arena with device.host() and keep that open"
                    )
                at, keeper = hit
                found.append(keeper)
        return found
