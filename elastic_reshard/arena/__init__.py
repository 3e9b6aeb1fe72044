"""Descriptor-owned memory and tensors on it (host: memfd), and the channel that passes it on in a domain."""

from elastic_reshard.arena.channel import DomainChannel, Message
from elastic_reshard.arena.copies import Copies, raw, tensor_over
from elastic_reshard.arena.host import HostArena, Located, MappedArena, empty, empty_like, locate
from elastic_reshard.arena.mesh import Listener, connect_mesh

__all__ = [
    "Copies",
    "DomainChannel",
    "HostArena",
    "Listener",
    "Located",
    "MappedArena",
    "Message",
    "connect_mesh",
    "empty",
    "empty_like",
    "locate",
    "raw",
    "tensor_over",
]
