"""What the tests of this room share: members as threads that feed each other's stores, and as real processes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from elastic_reshard.communicator import Backend, Communicator, ControlStore, Name, Registry
from elastic_reshard.communicator.fake import FakeBackend, Faults
from elastic_reshard.errors import ReshardError
from tests.processes import Rank

PATIENCE = 20.0


def soon(seconds: float = PATIENCE) -> float:
    return time.monotonic() + seconds


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline = soon(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not in {seconds} s"
        time.sleep(0.002)


def error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except (ReshardError, RuntimeError) as error:
        return error
    return None


def stores(name: Name, size: int, absent: Sequence[int] = ()) -> list[ControlStore]:
    """Local stores that feed each other, as the control plane does; what `absent` ranks set reaches nobody."""
    made: list[ControlStore] = []

    def teller(rank: int) -> Callable[[str, bytes], None]:
        def tell(key: str, value: bytes) -> None:
            for other, store in enumerate(made):
                if other != rank and rank not in absent:
                    store.feed({key: value})

        return tell

    made.extend(ControlStore(name, teller(rank)) for rank in range(size))
    return made


def together(calls: Sequence[Callable[[], Any]], seconds: float = PATIENCE) -> list[Any]:
    """What each call returned or raised; each in a thread."""
    results: list[Any] = [None] * len(calls)

    def one(i: int) -> None:
        try:
            results[i] = calls[i]()
        except (ReshardError, RuntimeError) as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = soon(seconds)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"a member did not end in {seconds} s"
    return results


def formed(
    backends: Sequence[Backend], registries: Sequence[Registry], name: Name, seconds: float = PATIENCE
) -> list[Any]:
    """All members form, as threads: communicators or errors."""
    size, local = len(backends), stores(name, len(backends))
    return together(
        [
            lambda r=r: registries[r].form(backends[r], local[r], r, size, soon(seconds), tuple)  # type: ignore[misc]
            for r in range(size)
        ]
    )


@contextmanager
def fakes(size: int, faults: Sequence[Faults] | None = None, **kwargs: Any) -> Iterator[list[FakeBackend]]:
    """Fake backends whose hangs end with the test."""
    all_faults = list(faults) if faults is not None else [Faults() for _ in range(size)]
    try:
        yield [FakeBackend(f, **kwargs) for f in all_faults]
    finally:
        for f in all_faults:
            f.released.set()


def ring(communicators: Sequence[Communicator], value: int) -> None:
    """Every member sends to the next what only it can have, and checks what it hears."""

    def one(c: Communicator) -> bool:
        into = torch.zeros(1000, dtype=torch.uint8)
        hear = c.network.receive((c.rank - 1) % c.size, into)
        say = c.network.send((c.rank + 1) % c.size, numbered(c.rank, value))
        hear.wait(soon())
        say.wait(soon())
        return torch.equal(into, numbered((c.rank - 1) % c.size, value))

    assert together([lambda c=c: one(c) for c in communicators]) == [True] * len(communicators)  # type: ignore[misc]


def numbered(rank: int, value: int, size: int = 1000) -> torch.Tensor:
    return (torch.arange(size) * 7 + rank * 31 + value * 13).to(torch.uint8)


class Board:
    """Words between the processes of a test, as files: no lock that a process could take with it."""

    def __init__(self, me: Rank) -> None:
        self._folder = Path(me.rendezvous).parent

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    def set(self, key: str, text: str = "") -> None:
        part = self._path(f"{key}.{os.getpid()}.{threading.get_ident()}.part")
        part.write_text(text)
        part.rename(self._path(key))

    def has(self, key: str) -> bool:
        return self._path(key).exists()

    def get(self, key: str) -> str:
        until(lambda: self.has(key), f"nobody said {key}")
        return self._path(key).read_text()


class Plane:
    """A rank process's control plane: values go up when the store is blocked, as a mover tells them."""

    def __init__(self, me: Rank) -> None:
        self.board, self._threads, self._stop = Board(me), list[threading.Thread](), threading.Event()

    def store(self, name: Name, rank: int, size: int, then: Callable[[], None] = lambda: None) -> ControlStore:
        """Fed by the others'. then: called when this one's values were told."""

        def told() -> None:
            self.board.set(f"{name}/{rank}", json.dumps({key: value.hex() for key, value in store.own.items()}))
            then()

        store = ControlStore(name, on_blocked=told)
        thread = threading.Thread(target=self._feed, args=(store, [r for r in range(size) if r != rank]), daemon=True)
        thread.start()
        self._threads.append(thread)
        return store

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _feed(self, store: ControlStore, others: list[int]) -> None:
        while others and not self._stop.wait(0.005):
            for rank in [r for r in others if self.board.has(f"{store.name}/{r}")]:
                told = json.loads(self.board.get(f"{store.name}/{rank}"))
                store.feed({key: bytes.fromhex(value) for key, value in told.items()})
                others.remove(rank)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))
