"""Memory for what cannot go straight from slot to slot, of the kind that the network sends; what a mover takes of a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from elastic_reshard.arena import HostArena
from elastic_reshard.arena.device import Device, DeviceMemory, Registered
from elastic_reshard.errors import PlanError
from elastic_reshard.transport.program import Wire

__all__ = ["Staging", "taken"]


class Staging:
    """Kept, and made anew only to grow. limit: bytes that a plan may have; checked by who binds. growing: called before, to let
    go of whatever is bound to the memory: the old one goes first."""

    def __init__(self, limit: int = 64 << 20, growing: Callable[[], None] = lambda: None) -> None:
        self.limit, self._growing = limit, growing
        self.wire: Wire = "host"
        self.device: Device | None = None
        self._arena: HostArena | None = None
        self._registered: Registered | None = None
        self._memory: DeviceMemory | None = None

    @property
    def registered(self) -> Registered | None:
        """What lets the device reach the last host memory; whoever is bound to that memory keeps it."""
        return self._registered

    def of(self, nbytes: int) -> HostArena | DeviceMemory | None:
        """At least so many bytes for the wire; None for none. Host memory that the device can reach, where there is one."""
        if not nbytes:
            return None
        return self._on_device(nbytes) if self.wire == "device" else self._on_host(nbytes)

    def _on_host(self, nbytes: int) -> HostArena:
        if self._arena is None or self._arena.nbytes < nbytes:
            self._growing()
            self._arena = self._registered = None
            self._arena = HostArena(nbytes, "mover staging")
        if self.device is not None and self._registered is None:
            self._registered = self.device.host(self._arena.bytes)
        return self._arena

    def _on_device(self, nbytes: int) -> DeviceMemory:
        if self.device is None:
            raise PlanError("a network that sends from a device needs one, and this mover's member stated none")
        if self._memory is None or self._memory.nbytes < nbytes:
            self._growing()
            self._memory = None
            self._memory = self.device.scratch(nbytes)
        return self._memory


def taken(device: Device) -> int:
    """Bytes of the device that this process takes, its context included; 0 where that cannot be told (no pynvml, or another
    pid namespace than the driver's)."""
    if device.kind != "cuda":
        free, total = device.free()
        return total - free
    if find_spec("pynvml") is None:
        return 0
    nvml: Any = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return 0
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{device.id}".encode())
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # a driver that does not say
        return 0
    finally:
        nvml.nvmlShutdown()
    return next((int(p.usedGpuMemory or 0) for p in found if p.pid == os.getpid()), 0)
