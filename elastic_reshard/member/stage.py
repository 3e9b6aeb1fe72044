"""Where a member's arenas lie, and when its mover may work: what `join`'s `stage` and `window` come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Literal

import torch

from elastic_reshard.arena.device import Device
from elastic_reshard.arena.devices import device_of
from elastic_reshard.errors import ArenaError, JoinRefused
from elastic_reshard.log import logger
from elastic_reshard.protocol.messages import Reach
from elastic_reshard.protocol.mps import WHY, mps_running
from elastic_reshard.protocol.window import Window

__all__ = ["STAGES", "WINDOWS", "Stage", "StageName", "Turns", "WindowName", "callers_device", "stated"]

_log = logger("member")
StageName = Literal["auto", "device", "host"]
WindowName = Literal["paused", "anytime"]
STAGES: Final = ("auto", "device", "host")
WINDOWS: Final = (None, "paused", "anytime")


class Stage:
    """Decides once for each side of a member. device: the one that its tensors are on, None for the CPU."""

    def __init__(self, member: str, wanted: StageName) -> None:
        self._member, self.wanted = member, wanted
        self.device: Device | None = None
        self.on_device = False  # whether arenas lie there

    def take(self, device: Device | None) -> None:
        """A side's tensors are on this device. ArenaError if two sides are on two, or if the wanted stage can't be; JoinRefused
        under CUDA MPS."""
        if device is None and self.wanted == "device":
            raise ArenaError(f'{self._member} has its tensors on the CPU; stage="device" is for tensors on a GPU')
        if device is None:
            return
        if self.device is not None and self.device is not device:
            raise ArenaError(
                f"{self._member} has its two sides on {self.device.id} and {device.id}; join once for each"
            )
        if device.kind == "cuda":
            found = mps_running(device.id)
            if found:
                raise JoinRefused(f"{self._member} cannot join on GPU {device.id} under CUDA MPS ({found}): {WHY}")
        self.device, self.on_device = device, self.wanted != "host"

    def reach(self) -> Reach | None:
        """What is stated of the device that arenas lie on; None if they lie in host memory. Some ms a device."""
        if self.device is None or not self.on_device:
            return None
        near = self.device.neighbours()
        return Reach(
            device=self.device.id, peers=near.peers, apart=near.apart, cluster=near.cluster, clique=near.clique
        )

    def of(self, device: Device | None) -> Device | None:
        """Where arenas of a side lie whose tensors are on `device`; None: in host memory."""
        return device if self.wanted != "host" else None


def callers_device(wanted: StageName) -> Device | None:
    """The GPU that the calling thread uses, if its process uses one already or `wanted` says so; None: no GPU."""
    used = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    if wanted == "host" or not (used or (wanted == "device" and torch.cuda.is_available())):
        return None
    return device_of(torch.empty(1, device="cuda"))


def stated(wanted: WindowName | None, stage: Stage) -> Literal["anytime", "paused", "network"]:
    """What a member says of its window. By default arenas on a device have one where the network uses the device too."""
    if wanted is not None:
        return wanted
    return "network" if stage.on_device else "anytime"


class Turns:
    """A member's window, if it has one; without one nothing here does anything."""

    def __init__(self, member: str, window: Window | None) -> None:
        self._member, self.window = member, window

    def open(self, deadline: float) -> AbstractContextManager[None]:
        """Let the mover work meanwhile. The end waits until it is outside, at most until `deadline` (time.monotonic); a mover
        that is not is a log event: it is slow, or waits for a peer, and what this member computes is slowed by it."""
        return self._opened(lambda: deadline)

    def idle(self, timeout: float) -> AbstractContextManager[None]:
        """The same; the end waits `timeout` seconds at most."""
        return self._opened(lambda: time.monotonic() + timeout)

    @contextmanager
    def _opened(self, deadline: Callable[[], float]) -> Iterator[None]:
        if self.window is None:
            yield
            return
        self.window.open()
        try:
            yield
        except BaseException:
            self.window.close(time.monotonic())
            raise
        if not self.window.close(deadline()):
            _log.warning("window.mover_inside", member=self._member)

    def close(self) -> None:
        """Leave it open for good. May be called again."""
        if self.window is not None:
            self.window.give_up()
