"""What tests of backends with groups share: rank processes over a pretend device, or over NCCL with ranks on the GPUs there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from elastic_reshard.arena.devices import open_device
from elastic_reshard.arena.strided import Strided
from elastic_reshard.communicator import Communicator, Name, Registry
from elastic_reshard.communicator.grouped import StreamNetwork
from elastic_reshard.transport import GroupedNetwork, Pending
from tests.communicator.world import Plane, numbered, soon
from tests.processes import Rank

KINDS = [
    "pretend",
    pytest.param(
        "nccl",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]


def device_for(kind: str, rank: int) -> Any:
    if kind == "pretend":
        return open_device("pretend", "pretend:0")
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return open_device("cuda", str(torch.cuda.get_device_properties(index).uuid))


def backend_for(kind: str, device: Any, **options: Any) -> Any:
    if kind == "pretend":
        from elastic_reshard.communicator.pretend import PretendBackend

        return PretendBackend(device, **options)
    from elastic_reshard.communicator.nccl import NcclBackend

    return NcclBackend(device, "lo")


def patience(kind: str) -> float:
    """Seconds for all ranks of a test: NCCL's have contexts to make, and may share one GPU."""
    return 60.0 if kind == "pretend" else 100.0


class World:
    """One rank process."""

    def __init__(self, me: Rank, kind: str, **options: Any) -> None:
        self.me, self.device = me, device_for(kind, me.rank)
        self.plane, self.registry = Plane(me), Registry()
        self.board = self.plane.board
        self.backend = backend_for(kind, self.device, **options)
        self.held: list[Strided] = []  # what groups that are never done reach: the driver would wait for them

    def form(self, name: Name, ranks: list[int], seconds: float = 40.0) -> Communicator:
        rank = ranks.index(self.me.rank)
        store = self.plane.store(name, rank, len(ranks))
        return self.registry.form(self.backend, store, rank, len(ranks), soon(seconds), tuple)

    def meet(self, what: str, ranks: list[int]) -> None:
        self.board.set(f"{what}/{self.me.rank}")
        for rank in ranks:
            self.board.get(f"{what}/{rank}")

    def close(self) -> None:
        assert self.registry.abort_all(soon(20), "end").out
        self.plane.close()

    def bytes(self, count: int) -> Strided:
        return self.device.scratch(count).strided(0, (count,), (1,), 1)

    def put(self, into: Strided, data: torch.Tensor, network: GroupedNetwork) -> None:
        """Bytes to the device, before what the network launches next."""
        self.device.tensor(into, torch.uint8).copy_(data)
        network.stream.wait(self.device.current().record())

    def look(self, piece: Strided) -> np.ndarray:
        """Bytes that are there; only of work that is done."""
        return np.asarray(self.device.read(piece, self.device.stream()))


def grouped(communicator: Communicator) -> StreamNetwork:
    network = communicator.network
    assert isinstance(network, GroupedNetwork)
    assert isinstance(network, StreamNetwork)
    return network


def everybody(world: World, communicator: Communicator, value: int, size: int = 70_000, pieces: int = 2) -> bool:
    """Every member sends `pieces` buffers to every other in one group; whether all that came is what must have come."""
    network, rank = grouped(communicator), communicator.rank
    peers = [peer for peer in range(communicator.size) if peer != rank]
    sends, receives = [], []
    for peer in peers:
        for piece in range(pieces):
            out, into = world.bytes(size + piece), world.bytes(size + piece)
            world.put(out, numbered(rank * 100 + peer * 10 + piece, value, size + piece), network)
            sends.append((peer, out))
            receives.append((peer, into))
    network.exchange(sends, receives, soon()).wait(soon())
    good = True
    for i, (peer, into) in enumerate(receives):
        want = numbered(peer * 100 + rank * 10 + i % pieces, value, size + i % pieces).numpy()
        good &= bool(np.array_equal(world.look(into), want))
    return good


def stuck(world: World, communicator: Communicator, peer: int, size: int = 1000) -> Pending:
    """A group that waits for `peer`."""
    network = grouped(communicator)
    world.held.append(world.bytes(size))
    return network.exchange([], [(peer, world.held[-1])], soon())
