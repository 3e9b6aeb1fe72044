"""Descriptor-owned memory and tensors on it (host: memfd; device: CUDA VMM), and the channel that passes it on in a domain.

Names are loaded when first used, so that services that need no torch can import `arena.channel`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_reshard.arena.boxes import CopyTable, array_at, host_strided, run_on_host
    from elastic_reshard.arena.channel import DomainChannel, Message
    from elastic_reshard.arena.copies import Copies, Elements, raw
    from elastic_reshard.arena.device import Device, DeviceMemory, Event, Registered, Stream
    from elastic_reshard.arena.devices import device_of, open_device, strided_of
    from elastic_reshard.arena.digests import digest_on_host
    from elastic_reshard.arena.elements import tensor_over
    from elastic_reshard.arena.host import HostArena, Located, MappedArena, empty, empty_like, locate
    from elastic_reshard.arena.landing import (
        LandingArena,
        LandingReader,
        LandingSlot,
        MappedWritable,
        landing_device_nbytes,
        landing_nbytes,
    )
    from elastic_reshard.arena.ledgers import LedgerReader
    from elastic_reshard.arena.mesh import Listener, connect_mesh
    from elastic_reshard.arena.strided import Strided
    from elastic_reshard.arena.tables import memory_of

_HOME = {
    "Copies": "copies",
    "CopyTable": "boxes",
    "Device": "device",
    "DeviceMemory": "device",
    "DomainChannel": "channel",
    "Elements": "copies",
    "Event": "device",
    "HostArena": "host",
    "LandingArena": "landing",
    "LandingReader": "landing",
    "LandingSlot": "landing",
    "LedgerReader": "ledgers",
    "Listener": "mesh",
    "Located": "host",
    "MappedArena": "host",
    "MappedWritable": "landing",
    "Message": "channel",
    "Registered": "device",
    "Stream": "device",
    "Strided": "strided",
    "array_at": "boxes",
    "connect_mesh": "mesh",
    "device_of": "devices",
    "digest_on_host": "digests",
    "empty": "host",
    "empty_like": "host",
    "host_strided": "boxes",
    "landing_device_nbytes": "landing",
    "landing_nbytes": "landing",
    "locate": "host",
    "memory_of": "tables",
    "open_device": "devices",
    "raw": "copies",
    "run_on_host": "boxes",
    "strided_of": "devices",
    "tensor_over": "elements",
}

__all__ = [
    "Copies",
    "CopyTable",
    "Device",
    "DeviceMemory",
    "DomainChannel",
    "Elements",
    "Event",
    "HostArena",
    "LandingArena",
    "LandingReader",
    "LandingSlot",
    "LedgerReader",
    "Listener",
    "Located",
    "MappedArena",
    "MappedWritable",
    "Message",
    "Registered",
    "Stream",
    "Strided",
    "array_at",
    "connect_mesh",
    "device_of",
    "digest_on_host",
    "empty",
    "empty_like",
    "host_strided",
    "landing_device_nbytes",
    "landing_nbytes",
    "locate",
    "memory_of",
    "open_device",
    "raw",
    "run_on_host",
    "strided_of",
    "tensor_over",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'elastic_reshard.arena' has no attribute {name!r}")
    return getattr(import_module(f"elastic_reshard.arena.{_HOME[name]}"), name)
