"""The descriptors that a watchdog keeps for its host: of arenas, and of members' windows."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

from elastic_reshard.arena.channel import close_all
from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.window import check_window
from elastic_reshard.watchdog.shelf import lent

__all__ = ["Held", "Stock"]


class Held(NamedTuple):
    """An arena that is kept. fds: O_RDONLY where that can be; they stay the stock's."""

    fds: tuple[int, ...]
    table: bytes


class Stock:
    """Owns the descriptors in it. Not for several threads at once."""

    def __init__(self) -> None:
        self.arenas: dict[str, Held] = {}
        self._windows: dict[str, int] = {}

    def put(self, arena: str, fds: Sequence[int], table: bytes) -> bool:
        """Keep an arena, if it is not here already; whether it is new. Takes `fds` over, also when it raises.

        ProtocolError for descriptors that are no memory, or can't be kept."""
        mine: list[int] = []
        try:
            if not stat.S_ISREG(os.fstat(fds[0]).st_mode):
                raise ProtocolError(f"an offer of arena {arena} with a descriptor that is no memory")
            if arena in self.arenas:
                return False
            mine.extend(map(lent, fds))  # nobody whom we pass them to can write by mistake
        except OSError as error:
            close_all(mine)
            raise ProtocolError(f"the descriptor of arena {arena} cannot be kept: {error}") from error
        finally:
            close_all(fds)
        self.arenas[arena] = Held(tuple(mine), table)
        return True

    def drop(self, arena: str) -> None:
        """Let go of an arena that is here."""
        close_all(self.arenas.pop(arena).fds)

    def put_window(self, member: str, fd: int) -> None:
        """Keep a member's window; the descriptor is the stock's from now on. ProtocolError, and closed, if it is no window."""
        try:
            check_window(fd)
        except ProtocolError:
            os.close(fd)
            raise
        self.drop_window(member)
        self._windows[member] = fd

    def window(self, member: str) -> int:
        """The descriptor of a member's window, which stays the stock's; -1 if it has none, or has ended."""
        return self._windows.get(member, -1)

    def drop_window(self, member: str) -> None:
        """Let go of a member's window, if it is here."""
        fd = self._windows.pop(member, -1)
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Let go of everything. May be called again."""
        for arena in list(self.arenas):
            self.drop(arena)
        for member in list(self._windows):
            self.drop_window(member)
