"""Peak memory of a piece of work, measured from outside of it."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

__all__ = ["PeakMemory", "private_bytes"]

_PAGE = 4096


def private_bytes() -> int:
    """Resident memory of this process that is not shared with others: no arenas, its own or mapped ones."""
    with open("/proc/self/statm") as f:
        fields = f.read().split()
    return (int(fields[1]) - int(fields[2])) * _PAGE


class PeakMemory:
    """Samples private memory every `interval` seconds inside `with`; `extra` is the most above the beginning, in bytes.

    Arenas are not in it: add the staging arena's size."""

    def __init__(self, interval: float = 0.002) -> None:
        self.interval, self.extra = interval, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._before = 0

    def __enter__(self) -> Self:
        self._before = private_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            self.extra = max(self.extra, private_bytes() - self._before)
