"""What tables of arenas say of a second memory, the one on a device. No torch.

A table of an arena on a device has "memory": {"kind": ..., "device": ..., "nbytes": ...}; its tensors' offsets are in there,
all else is in the arena's first descriptor.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from elastic_reshard.errors import ArenaError

if TYPE_CHECKING:
    from elastic_reshard.arena.device import DeviceMemory

__all__ = ["memory_of", "said_of"]


def said_of(memory: DeviceMemory | None) -> dict[str, Any]:
    """What a table has to say of an arena's device memory: nothing if it has none."""
    if memory is None:
        return {}
    return {"memory": {"kind": memory.device.kind, "device": memory.device.id, "nbytes": memory.nbytes}}


def memory_of(table: bytes) -> tuple[str, str, int] | None:
    """(kind, device, bytes) of the device memory that an arena's table tells of; None if all of it is in one descriptor.

    For `devices.open_device(kind, device).map(fd, nbytes)`. ArenaError if the table cannot be read.
    """
    try:
        said = json.loads(table)
        if type(said) is not dict:
            raise ValueError("it is no object")
        if "memory" not in said:
            return None
        kind, device, nbytes = said["memory"]["kind"], said["memory"]["device"], said["memory"]["nbytes"]
        if type(kind) is not str or type(device) is not str or type(nbytes) is not int or not 0 < nbytes < 1 << 48:
            raise ValueError(f"{nbytes!r} bytes of kind {kind!r} on {device!r}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, IndexError) as error:
        raise ArenaError(f"not the table of an arena: {error!r}; its owner must be of this version "
                         "(nothing was read from it)") from error  # fmt: skip
    return kind, device, nbytes
