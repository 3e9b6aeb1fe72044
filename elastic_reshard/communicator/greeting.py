"""What members say to each other over a communicator that has just been connected: proof that all are of the same one."""

from __future__ import annotations

import hashlib
from typing import Final

from elastic_reshard.communicator.names import Name
from elastic_reshard.errors import PeerRefused

__all__ = ["HELLO", "hello", "stranger"]

HELLO: Final = 32  # bytes


def hello(name: Name, rank: int, size: int, config: str) -> bytes:
    """HELLO bytes that only this rank of this communicator says."""
    return hashlib.blake2b(f"{name}|{rank}|{size}|{config}".encode(), digest_size=HELLO).digest()


def stranger(name: Name, rank: int, size: int, config: str) -> PeerRefused:
    """The error for a rank that has said something else."""
    return PeerRefused(rank, f"it formed another communicator than {name} as rank {rank} of {size} with {config!r}")
