"""A rank process of the NCCL probe: its device, its backend, words to the others by files, and what it is doing now."""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastic_reshard.arena.device import Device
from elastic_reshard.arena.devices import open_device
from elastic_reshard.arena.strided import Strided
from elastic_reshard.communicator.base import Backend, Communicator, Name
from elastic_reshard.communicator.registry import Registry
from elastic_reshard.communicator.store import ControlStore
from elastic_reshard.errors import TransferError, TransferTimeout
from elastic_reshard.transport.network import GroupedNetwork

__all__ = ["Rank", "World", "main", "network_of", "numbered"]


@dataclass(frozen=True)
class Rank:
    """What a rank is told. limit: seconds of its step."""

    rank: int
    size: int
    kind: str
    folder: str
    limit: float


def main(pipe: Any, me: Rank, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run one step's part and answer (whether it went well, what it found or its traceback)."""
    with (Path(me.folder) / f"{me.rank}.stacks").open("w") as stacks:
        # Before the deadline, so that the report of a hang shows where it hangs.
        faulthandler.dump_traceback_later(max(1.0, me.limit - 3.0), file=stacks)
        try:
            answer = (True, fn(World(me), *args))
        except BaseException:  # noqa: BLE001 - whatever it is, the probe reports it
            answer = (False, traceback.format_exc()[-6000:])
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
        pipe.close()
    os._exit(0)  # a library's threads may hang


class World:
    """One rank's."""

    def __init__(self, me: Rank) -> None:
        self.me, self._folder = me, Path(me.folder)
        self.deadline = time.monotonic() + me.limit - 4.0
        self.doing("taking its device")
        self.device: Device = self._device()
        self.doing("making its backend")
        self.backend: Backend = self._backend()
        self.registry = Registry()

    def _device(self) -> Device:
        if self.me.kind == "pretend":
            return open_device("pretend", "pretend:0")
        from elastic_reshard.arena.cuda import open_index

        index = self.me.rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return open_index(index)

    def _backend(self) -> Backend:
        if self.me.kind == "pretend":
            from elastic_reshard.communicator.pretend import PretendBackend

            return PretendBackend(self.device)
        from elastic_reshard.communicator.nccl import NcclBackend

        return NcclBackend(self.device)

    def doing(self, what: str) -> None:
        """What a report of a hang says."""
        (self._folder / f"{self.me.rank}.doing").write_text(what)

    def say(self, key: str, text: str = "") -> None:
        """A word to all."""
        part = self._folder / f"{key}.{self.me.rank}.part"
        part.write_text(text)
        part.rename(self._folder / key)

    def said(self, key: str) -> bool:
        """Whether somebody has said it."""
        return (self._folder / key).exists()

    def hear(self, key: str) -> str:
        """Wait for a word. TransferTimeout at the step's deadline."""
        while not self.said(key):
            if time.monotonic() > self.deadline:
                raise TransferTimeout(f"rank {self.me.rank} waited for {key} to the end of its step")
            time.sleep(0.002)
        return (self._folder / key).read_text()

    def meet(self, what: str, ranks: Sequence[int]) -> None:
        """Wait for all of them."""
        self.say(f"{what}.{self.me.rank}")
        for rank in ranks:
            self.hear(f"{what}.{rank}")

    def store(self, name: Name, rank: int, size: int) -> ControlStore:
        """Fed with what the others' stores were told, as by a control plane."""
        key = f"{name.epoch}.{name.transfer}"

        def told() -> None:
            self.say(f"{key}.store.{rank}", json.dumps({k: value.hex() for k, value in store.own.items()}))

        def feed() -> None:
            for other in (r for r in range(size) if r != rank):
                values = json.loads(self.hear(f"{key}.store.{other}"))
                store.feed({k: bytes.fromhex(value) for k, value in values.items()})

        store = ControlStore(name, on_blocked=told)
        threading.Thread(target=feed, name="feed", daemon=True).start()
        return store

    def form(self, epoch: int, ranks: Sequence[int]) -> Communicator:
        """A communicator of these ranks, under the step's deadline."""
        name, rank = Name(epoch, "probe"), list(ranks).index(self.me.rank)
        self.doing(f"forming communicator {name} of {len(ranks)}")
        return self.registry.form(
            self.backend, self.store(name, rank, len(ranks)), rank, len(ranks), self.deadline, tuple
        )

    def everybody(self, communicator: Communicator, value: int, size: int) -> float:
        """Every member sends two buffers of data that only it has to every other, in one group; seconds of the group.
        TransferError if what came is not what was sent."""
        network, rank = network_of(communicator), communicator.rank
        self.doing(f"exchanging {size} bytes with each of {communicator.size} over {communicator.name}")
        sends, receives = [], []
        for peer in (peer for peer in range(communicator.size) if peer != rank):
            for piece in range(2):
                out, into = (self.device.scratch(size).strided(0, (size,), (1,), 1) for _ in range(2))
                self.device.tensor(out, torch.uint8).copy_(numbered(rank * 64 + peer * 2 + piece, value, size))
                sends.append((peer, out))
                receives.append((peer, into))
        network.stream.wait(self.device.current().record())
        begun = time.monotonic()
        network.exchange(sends, receives, self.deadline).wait(self.deadline)
        took = time.monotonic() - begun
        for at, (peer, into) in enumerate(receives):
            if not np.array_equal(self.look(into), numbered(peer * 64 + rank * 2 + at % 2, value, size).numpy()):
                raise TransferError(f"what rank {peer} sent arrived wrong at rank {rank} of {communicator.name}")
        return took

    def look(self, piece: Strided) -> Any:
        """Bytes that are there."""
        return self.device.read(piece, self.device.stream())

    def close(self, communicator: Communicator) -> bool:
        """End it politely; whether everything is out."""
        self.doing(f"closing {communicator.name}")
        return self.registry.close(communicator, self.deadline).out


def network_of(communicator: Communicator) -> GroupedNetwork:
    """Its network of groups."""
    network = communicator.network
    if not isinstance(network, GroupedNetwork):
        raise TransferError(f"communicator {communicator.name} has no network of groups")
    return network


def numbered(sender: int, value: int, size: int) -> torch.Tensor:
    """Bytes that follow from their index."""
    return (torch.arange(size) * 7 + sender * 31 + value * 13).to(torch.uint8)
