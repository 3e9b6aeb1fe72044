"""The descriptors that a member keeps of its host's arenas: its own read-write, everybody else's read-only.

An arena has one descriptor, or two: of its words and names in host memory, and of the device memory in which its tensors lie.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

__all__ = ["HeldArena", "Kept", "Shelf", "lent"]


class HeldArena(NamedTuple):
    """An arena of this host: its table, and descriptors that the caller closes, O_RDONLY where that can be. memory: of its
    device memory, -1 for none."""

    arena: str
    table: bytes
    fd: int
    memory: int = -1


class Kept(NamedTuple):
    """An arena on the shelf; the descriptors are the shelf's."""

    owner: str
    table: bytes
    fd: int
    memory: int = -1

    @property
    def fds(self) -> tuple[int, ...]:
        """All that there are."""
        return (self.fd,) if self.memory < 0 else (self.fd, self.memory)


def lent(fd: int, mode: int = os.O_RDONLY) -> int:
    """A new descriptor of the same memory, with this mode; -1 for -1. The caller closes it.

    Opened anew, not duplicated: a copy of a read-write descriptor could write. What a device's driver made can only be
    duplicated; whoever maps it says how. OSError if the system can't."""
    if fd < 0:
        return -1
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC)
    return os.dup(fd)


class Shelf:
    """Owns the descriptors that are put on it. Not for several threads at once."""

    def __init__(self) -> None:
        self.arenas: dict[str, Kept] = {}
        self.window = -1  # of the member itself

    def put(self, arena: str, owner: str, table: bytes, fd: int, memory: int = -1) -> None:
        """Keep an arena and take its descriptors over; it takes the place of what was known of it."""
        self.drop(arena)
        self.arenas[arena] = Kept(owner, table, fd, memory)

    def owner(self, arena: str) -> str:
        """Whose it is; "" if it is not here."""
        kept = self.arenas.get(arena)
        return kept.owner if kept is not None else ""

    def drop(self, arena: str) -> None:
        """Let go of an arena, if it is here."""
        kept = self.arenas.pop(arena, None)
        for fd in kept.fds if kept is not None else ():
            os.close(fd)

    def lend(self, arena: str) -> HeldArena:
        """An arena that is here, with descriptors of the taker's own."""
        kept = self.arenas[arena]
        fd = lent(kept.fd)
        try:
            return HeldArena(arena, kept.table, fd, lent(kept.memory))
        except OSError:
            os.close(fd)
            raise

    def close(self) -> None:
        """Let go of everything. May be called again."""
        while self.arenas:
            self.drop(next(iter(self.arenas)))
        if self.window >= 0:
            os.close(self.window)
            self.window = -1
