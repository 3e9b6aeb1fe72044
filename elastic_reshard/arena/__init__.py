"""Descriptor-owned memory and tensors on it (host: memfd), and the channel that passes it on in a domain.

Names are loaded when first used, so that services that need no torch can import `arena.channel`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_reshard.arena.channel import DomainChannel, Message
    from elastic_reshard.arena.copies import Copies, raw, tensor_over
    from elastic_reshard.arena.host import HostArena, Located, MappedArena, empty, empty_like, locate
    from elastic_reshard.arena.landing import LandingArena, LandingReader, LandingSlot, MappedWritable, landing_nbytes
    from elastic_reshard.arena.ledgers import LedgerReader
    from elastic_reshard.arena.mesh import Listener, connect_mesh

_HOME = {
    "Copies": "copies",
    "DomainChannel": "channel",
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
    "connect_mesh": "mesh",
    "empty": "host",
    "empty_like": "host",
    "landing_nbytes": "landing",
    "locate": "host",
    "raw": "copies",
    "tensor_over": "copies",
}

__all__ = [
    "Copies",
    "DomainChannel",
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
    "connect_mesh",
    "empty",
    "empty_like",
    "landing_nbytes",
    "locate",
    "raw",
    "tensor_over",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'elastic_reshard.arena' has no attribute {name!r}")
    return getattr(import_module(f"elastic_reshard.arena.{_HOME[name]}"), name)
