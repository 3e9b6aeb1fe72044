"""What the tests of arenas and channels share."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_reshard.arena import DomainChannel, HostArena, Listener, MappedArena, connect_mesh
from elastic_reshard.arena.boxes import CopyTable, host_strided
from elastic_reshard.arena.device import Device, How
from elastic_reshard.arena.devices import open_device
from elastic_reshard.arena.strided import Strided, contiguous_strides
from elastic_reshard.errors import TransferError
from tests.processes import Rank

SECRET = b"of this test"


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def meet(me: Rank, secret: bytes = SECRET, seconds: float = 20.0) -> DomainChannel:
    """The mesh of all ranks; addresses travel through the ranks' common store."""
    store = me.store()
    with Listener() as listener:
        store.set(f"address{me.rank}", listener.address.hex())
        addresses = {rank: bytes.fromhex(store.get(f"address{rank}").decode()) for rank in range(me.size)}
        return connect_mesh(me.rank, addresses, listener, secret, soon(seconds))


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """Run all jobs in threads of their own; results, or what they raised, in order."""
    results: list[Any] = [None] * len(jobs)

    def work(at: int) -> None:
        try:
            results[at] = jobs[at]()
        except TransferError as error:
            results[at] = error

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def memfds() -> int:
    """How many descriptors of arenas this process has."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            count += "memfd:elastic_reshard" in os.readlink(f"/proc/self/fd/{name}")
    return count


def peer_of(arena: HostArena) -> MappedArena:
    """The arena as another process would see it."""
    return MappedArena(arena.readonly_fd())


def first_device(kind: str) -> Device:
    """The first device of a kind in this process."""
    if kind == "pretend":
        return open_device("pretend", "pretend:0")
    from elastic_reshard.arena.cuda import open_index

    return open_index(0)


def warm(device: Device) -> None:
    """Use everything once, so that what is opened late is open."""
    memory = device.create(1 << 20, "warm")
    one, two = (memory.strided(at, (1 << 10,), (4,), 4) for at in (0, 1 << 19))
    device.tensor(one, torch.float32).fill_(1.0)
    device.copy(CopyTable.of([(two, one)]), device.current())
    device.cast([device.tensor(one, torch.int32)], [device.tensor(two, torch.float32)], device.current())
    device.digest([one], 0, True, memory.strided(1 << 13, (1,), (8,), 8), device.current())
    arena = HostArena(1 << 20)
    registered = device.host(arena.bytes)
    stream = device.stream()
    near = host_strided(arena.bytes[:4096].view(np.uint32))
    ways: tuple[How, ...] = ("kernel", "engine")
    for how in ways:
        device.copy(
            CopyTable.of([(near, one), (two[0:8].reshape((2, 4))[:, 0:2], near[0:8].reshape((2, 4))[:, 0:2])]),
            stream,
            how,
        )
    device.map(os.dup(memory.fd), memory.nbytes, writable=False).close()
    device.read(one, stream)
    device.read(one, device.current())
    registered.close()


def on_device(device: Device, array: npt.NDArray[Any]) -> Strided:
    """A copy of a contiguous array, in memory of a device."""
    item = array.itemsize
    memory = device.scratch(max(1, array.nbytes))
    found = memory.strided(0, array.shape, contiguous_strides(array.shape, item), item)
    if array.size:
        bits = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        device.tensor(found.as_bytes(), torch.uint8).copy_(bits)
        device.current().synchronize()
    return found


def numbers(count: int, item: int) -> npt.NDArray[Any]:
    """Elements whose bits are their index, repeated where it does not fit."""
    types = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
    if item == 16:
        return (np.arange(2 * count, dtype=np.uint64)).view(np.complex128)
    return np.arange(count, dtype=np.uint64).astype(types[item])
