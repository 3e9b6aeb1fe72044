"""The landing arena of one member: made by a thread of the library when the view says that weights may come from other hosts.

The thread lives only while there is something to make. It touches no live tensor: what lands there is the layout's matter.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from elastic_reshard.arena.device import Device
from elastic_reshard.arena.landing import LandingArena, landing_device_nbytes, landing_nbytes
from elastic_reshard.arena.slots import Specs
from elastic_reshard.errors import MembershipError, ReshardError, SupervisorUnreachable
from elastic_reshard.layout import ModelLayout
from elastic_reshard.layout.dtensor import torch_dtype
from elastic_reshard.log import logger
from elastic_reshard.member.desk import Desk
from elastic_reshard.member.memory import MemoryReport, memory_for, refuse_unfit
from elastic_reshard.member.remote import Remote
from elastic_reshard.plan import CellGrid
from elastic_reshard.protocol.messages import Landing

__all__ = ["Lander", "Telling"]

_log = logger("member")
_ASK: Final = 10.0  # seconds for the supervisor to tell a layout
_AGAIN: Final = 1.0  # seconds from a failure to the next try, twice as long each time, at most:
_MOST: Final = 60.0
_LEAVING: Final = 5.0  # most seconds to wait for pages that are just being taken


class Lander:
    """Makes, offers and withdraws a destination member's landing arenas. Not to be used in forked children."""

    def __init__(self, desk: Desk, remote: Remote, cell: int, device: Device | None = None) -> None:
        """cell: bytes of a cell, the job's. device: where arenas are to lie; None: in host memory."""
        self._desk, self._remote, self._cell, self._device = desk, remote, cell, device
        self._thread: threading.Thread | None = None
        self._arenas: dict[str, LandingArena] = {}
        self._closed = False
        self._failed_for = ""  # the layout of the last failure
        self._pause, self._again = _AGAIN, 0.0
        self.failure: ReshardError | None = None  # why there is none now, though one is wanted
        self.episode = 0  # how often it failed for another layout or reason
        self.memory: MemoryReport | None = None

    def attend(self) -> None:
        """Look at the view, and begin what it asks for. The caller holds the desk's lock; never waits."""
        core = self._desk.core
        wanted = core.landing_due() is not None or core.has_unused_landings()
        if self._closed or self._thread is not None or self._desk.link is None or not wanted:
            return
        # Daemonic, as the link's: a user's process may just end.
        self._thread = threading.Thread(target=self._run, name=f"elastic_reshard landing {core.member}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; what was offered stays with the watchdog. Waits at most 5 s for a thread that takes memory just now."""
        with self._desk.changed:
            self._closed = True
            thread = self._thread
            self._desk.changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LEAVING)
        with self._desk.changed:
            while self._arenas:
                self._arenas.popitem()[1].close()

    # -- the thread

    def _run(self) -> None:
        layout: str | None = ""
        try:
            while (layout := self._next()) is not None:
                try:
                    self._make(layout)
                except ReshardError as error:
                    self._failed(layout, error)
        finally:
            if layout is not None:
                with self._desk.changed:
                    self._thread = None  # the next change of the view begins another
                self._failed(layout, MembershipError(
                    f"the landing thread of {self._desk.core.member} ended by an error of its own, which it wrote to stderr; "
                    "without a landing arena this member gets nothing from other hosts. Join again"
                ))  # fmt: skip

    def _next(self) -> str | None:
        """Withdraw what is not needed; the layout to make an arena for, when its time has come. None: this thread ends."""
        core = self._desk.core
        with self._desk.changed:
            while not self._closed and self._desk.link is not None:
                for arena in core.unused_landings():
                    self._desk.link.withdraw(arena)
                    self._arenas.pop(arena).close()
                    _log.info("landing.withdrawn", member=core.member, arena=arena)
                layout = core.landing_due()
                if layout is None:
                    break
                left = self._again - time.monotonic()
                if layout != self._failed_for or left <= 0:
                    return layout
                self._desk.changed.wait(left)
            if core.landing_due() is None:
                self.failure = None  # not wanted any more
            self._thread = None
            return None

    def _make(self, layout: str) -> None:
        core, begun = self._desk.core, time.monotonic()
        model, _ = self._remote.layout(layout, begun + _ASK)
        specs, cells = _local(model, core.group.rank), self._cells(model)
        there = self._device is not None
        self.memory = memory_for(
            landing_nbytes(specs, cells, device=there), f"the landing arena of {core.member} (2 slots)",
            device=self._device, on_device=landing_device_nbytes(specs) if there else 0,
        )  # fmt: skip
        refuse_unfit(self.memory)
        arena = LandingArena(specs, cells, self._cell, label=core.member, device=self._device)
        with self._desk.changed:
            link = self._desk.link
            if self._closed or link is None or core.landing_due() != layout:
                arena.close()
                return
            fd, *memory = arena.fds
            link.offer_landing(arena.arena_id, fd, arena.table(), *memory)
            self._arenas[arena.arena_id] = arena
            said = Landing(arena=arena.arena_id, cells=cells, cell=self._cell, nbytes=arena.nbytes)
            core.new_landing(said, layout)
            self.failure, self._failed_for, self._pause = None, "", _AGAIN
            self._desk.say()
            self._desk.changed.notify_all()
        _log.info("landing.made", member=core.member, arena=said.arena, layout=layout, cells=cells, nbytes=said.nbytes,
                  seconds=round(time.monotonic() - begun, 3))  # fmt: skip

    def _cells(self, model: ModelLayout) -> int:
        return len(CellGrid.of(model, self._cell).cells_of_rank(self._desk.core.group.rank))

    def _failed(self, layout: str, error: ReshardError) -> None:
        core = self._desk.core
        with self._desk.changed:
            if self._closed or self._desk.link is None:
                return
            again = layout == self._failed_for and type(error) is type(self.failure)
            self._pause = min(2 * self._pause, _MOST) if again else _AGAIN
            self._failed_for, self._again = layout, time.monotonic() + self._pause
            self.failure = error
            self.episode += not again
            self._desk.changed.notify_all()
        _log.error("landing.failed", member=core.member, layout=layout, why=str(error), again_in=self._pause)


class Telling:
    """For one listener: tells each failure once."""

    def __init__(self, lander: Lander) -> None:
        self._lander, self._told = lander, 0

    def check(self, idle: bool = False) -> None:
        """Raise why there is no landing arena, if this listener was not told yet; with `idle` (nothing else can be done)
        also if it was. A supervisor that is silent is no failure: it is asked again. The caller holds the desk's lock."""
        lander = self._lander
        if lander.failure is None or isinstance(lander.failure, SupervisorUnreachable):
            return
        if lander.episode != self._told or idle:
            self._told = lander.episode
            raise lander.failure


def _local(model: ModelLayout, rank: int) -> Specs:
    """Shape and dtype of each destination tensor of which the rank has a part."""
    shapes = ((name, layout.local_shape(rank), layout.dtype) for name, layout in model.items())
    return {name: (shape, torch_dtype(dtype)) for name, shape, dtype in shapes if shape is not None}
