"""Mapping the device memory of arenas as they come from others.

A reader maps with its own device where that is of the same kind, so that memory of another GPU of the host takes no context
there; else with the device that the table names.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elastic_reshard.arena.devices import open_device
from elastic_reshard.arena.tables import memory_of
from elastic_reshard.errors import ArenaError

if TYPE_CHECKING:
    from elastic_reshard.arena.device import Device, DeviceMemory

__all__ = ["device_named", "map_memory"]


def device_named(identity: str) -> Device:
    """The device of an id as members state it. ArenaError if it is not there."""
    return open_device("pretend" if identity.startswith("pretend:") else "cuda", identity)


def map_memory(
    table: bytes, fd: int, own: Device | None, *, writable: bool = False, arena_id: str = ""
) -> DeviceMemory | None:
    """The device memory of an arena, mapped; None for one without. Takes `fd` over (-1: none came), also when it raises.

    ArenaError for a table that is none, for a descriptor that did not come or is not wanted, and what `Device.map` raises."""
    try:
        said = memory_of(table)
        if (said is not None) != (fd >= 0):
            how = (
                "without the descriptor of its"
                if said is not None
                else "with a second descriptor, but its table has no"
            )
            raise ArenaError(f"arena {arena_id} came {how} device memory; its owner must be of this version")
        if said is None:
            return None
        kind, identity, nbytes = said
        device = own if own is not None and own.kind == kind else open_device(kind, identity)
        taken, fd = fd, -1
        return device.map(taken, nbytes, writable=writable)
    finally:
        if fd >= 0:
            os.close(fd)
