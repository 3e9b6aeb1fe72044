"""Memory in which mixed versions show: source slots and landing slots over one small grid of cells.

The model is CELLS cells, the same for every layout; a layout says who has which. A cell's content says from which publish
its bytes came.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastic_reshard.protocol.bits import pack, unpack
from tests.supervisor.sim.clock import Proc

__all__ = ["CELLS", "PIECES", "Arena", "LandingArena", "cells_of", "packed", "ranks_of", "unpacked"]

CELLS = 6
PIECES = 2  # a slot's cells are written and read in so many goes


def ranks_of(layout: str) -> int:
    """Of "Sa0x2": 2."""
    return int(layout.rpartition("x")[2])


def cells_of(layout: str, rank: int) -> tuple[int, ...]:
    """What a rank of a layout has: sources "a" are sharded, destinations whose fragment ends with "5"; others have all."""
    fragment, size = layout[1:].rpartition("x")[0], ranks_of(layout)
    sharded = fragment.startswith("a") if layout[0] == "S" else fragment.endswith("5")
    return tuple(c for c in range(CELLS) if not sharded or c * size // CELLS == rank)


def packed(own: tuple[int, ...], held: Iterable[int]) -> str:
    """Cells as they travel."""
    bits, set_ = bytearray(-(-len(own) // 8)), set(held)
    for at, cell in enumerate(own):
        if cell in set_:
            bits[at // 8] |= 128 >> at % 8
    return pack(bytes(bits))


def unpacked(own: tuple[int, ...], text: str) -> set[int]:
    """The cells that a bitmap says."""
    bits = unpack(text, len(own))
    return {cell for at, cell in enumerate(own) if bits[at // 8] & 128 >> at % 8}


class Memory:
    """Something that lives while any process holds its descriptor."""

    def __init__(self, arena: str, owner: str) -> None:
        self.arena, self.owner = arena, owner
        self.generations = [0, 0]
        self.holders: set[Proc] = set()

    @property
    def lives(self) -> bool:
        """Whether any process holds it."""
        return any(p.alive for p in self.holders)


class Arena(Memory):
    """Two source slots: a generation word and the owner's cells."""

    def __init__(self, arena: str, owner: str) -> None:
        super().__init__(arena, owner)
        self.cells: list[dict[int, Any]] = [{}, {}]


class LandingArena(Memory):
    """Two landing slots: whose bytes, which cells are there, and the bytes."""

    def __init__(self, arena: str, owner: str, layout: str, own: tuple[int, ...]) -> None:
        super().__init__(arena, owner)
        self.layout, self.own = layout, own
        self.publications = ["", ""]
        self.held: list[set[int]] = [set(), set()]
        self.cells: list[dict[int, Any]] = [{}, {}]

    def begin(self, slot: int, publication: str) -> None:
        """As the first mover that lands a publication does; a later one keeps what is there."""
        if self.publications[slot] != publication:
            self.generations[slot] += 2
            self.held[slot] = set()
            self.publications[slot] = publication
