"""The descriptors that a member keeps of its host's arenas: its own read-write, everybody else's read-only."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["HeldArena", "Kept", "Shelf"]


class HeldArena(NamedTuple):
    """An arena of this host: its table, and an O_RDONLY descriptor that the caller closes."""

    arena: str
    table: bytes
    fd: int


class Kept(NamedTuple):
    """An arena on the shelf; the descriptor is the shelf's."""

    owner: str
    table: bytes
    fd: int


class Shelf:
    """Owns the descriptors that are put on it. Not for several threads at once."""

    def __init__(self) -> None:
        self.arenas: dict[str, Kept] = {}

    def put(self, arena: str, owner: str, table: bytes, fd: int) -> None:
        """Keep an arena and take its descriptor over; it takes the place of what was known of it."""
        self.drop(arena)
        self.arenas[arena] = Kept(owner, table, fd)

    def owner(self, arena: str) -> str:
        """Whose it is; "" if it is not here."""
        kept = self.arenas.get(arena)
        return kept.owner if kept is not None else ""

    def drop(self, arena: str) -> None:
        """Let go of an arena, if it is here."""
        kept = self.arenas.pop(arena, None)
        if kept is not None:
            os.close(kept.fd)

    def lend(self, arena: str) -> HeldArena:
        """An arena that is here, with a descriptor of the taker's own."""
        kept = self.arenas[arena]
        # Opened anew, not duplicated: a copy of a read-write descriptor could write.
        return HeldArena(arena, kept.table, os.open(f"/proc/self/fd/{kept.fd}", os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Let go of everything. May be called again."""
        while self.arenas:
            os.close(self.arenas.popitem()[1].fd)
