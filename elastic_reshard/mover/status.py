"""A mover's status page: words in shared memory by which its watchdog sees that it lives, and what it waits for. No torch.

The mover makes the page and is the only one to write it; each word is 8 bytes, aligned, written whole.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from enum import IntEnum
from typing import Final, NamedTuple

from elastic_reshard.errors import ProtocolError

__all__ = ["Glance", "State", "StatusPage", "StatusReader"]

_NBYTES: Final = 4096
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FIELDS: Final = (
    "beats", "state", "peer", "cell", "since", "cells", "began", "sent", "received", "resent", "window",
)  # fmt: skip
_AT: Final = {name: at for at, name in enumerate(_FIELDS)}


class State(IntEnum):
    """Where the mover is; for people who look, nothing is decided by it."""

    IDLE = 0
    STARTING = 1
    READY = 2
    RUNNING = 3
    OUT = 4


class Glance(NamedTuple):
    """The page at one moment. peer: position in the transfer's members, plus 1; 0: it waits for nobody. cell likewise.

    since: when it began to wait, in ns of time.monotonic. cells, began, sent, received, resent: as in MoverSaid. window: 1: it
    waits for that member's window."""

    beats: int
    state: int
    peer: int
    cell: int
    since: int
    cells: int
    began: int
    sent: int
    received: int
    resent: int
    window: int = 0


class StatusPage:
    """The mover's side. `beat` is the control thread's, everything else the worker's.

    fd: to be handed to the watchdog; stays the page's."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("mover status", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, _NBYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self.fd, _NBYTES)
        self._words = memoryview(self._map).cast("Q")

    def _set(self, name: str, value: int) -> None:
        self._words[_AT[name]] = value

    def beat(self) -> None:
        """A sign of life."""
        self._words[0] += 1

    def state(self, state: State) -> None:
        """Where the mover is now."""
        self._set("state", state)

    def fresh(self) -> None:
        """A transfer begins: nothing is carried yet."""
        for name in _FIELDS[2:]:
            self._set(name, 0)

    def waiting(self, peer: int | None, cell: int = 0, *, window: bool = False) -> None:
        """It waits for this cell of the member at this position, or for that to open its window; None: it waits no more."""
        if peer is None:
            self._set("peer", 0)
            return
        self._set("cell", cell + 1)
        self._set("window", window)
        self._set("since", time.monotonic_ns())
        self._set("peer", peer + 1)

    def progress(self, *, cells: int, began: int, sent: int, received: int, resent: int = 0) -> None:
        """Totals of the transfer: cells landed, rounds begun, bytes."""
        for name, value in (("cells", cells), ("began", began), ("sent", sent), ("received", received)):
            self._set(name, value)
        self._set("resent", resent)

    def close(self) -> None:
        """Unmap it and let go of the descriptor; once only. A mover need not: it just ends."""
        self._words.release()
        self._map.close()
        os.close(self.fd)


class StatusReader:
    """The watchdog's side, mapped read-only. Takes the descriptor over, and closes it. ProtocolError if it is no such page."""

    def __init__(self, fd: int) -> None:
        try:
            # Without the seals its maker could cut it short under us: SIGBUS.
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not sealed or os.fstat(fd).st_size != _NBYTES:
                raise ProtocolError("a mover's status page that is not sealed, or of another size")
            self._map = mmap.mmap(fd, _NBYTES, prot=mmap.PROT_READ)
        except OSError as error:
            raise ProtocolError(f"a mover's status page that cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")

    def glance(self) -> Glance:
        """All words; each is right, but they may be of different moments."""
        return Glance(*self._words[: len(_FIELDS)])

    def close(self) -> None:
        """Unmap. May be called again."""
        self._words.release()
        self._map.close()
