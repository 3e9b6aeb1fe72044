"""What the tests of arenas and channels share."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_reshard.arena import DomainChannel, HostArena, Listener, MappedArena, connect_mesh
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
