"""What a mover works with in tests of what is around it: no tensors, no communicator, one thread that does as the plan says.

A transfer's plan is words with "+" between them: "deaf" (does not hear an abort), "broken" (fails once it runs), "refused"
(before it is ready), "quick" (done as soon as it runs); without any it runs until it is told otherwise. Its rounds last 10 ms;
each marks one cell in the member's landing slot. Whoever has no landing slot only counts.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from elastic_reshard.mover.core import Progress, Task
from elastic_reshard.mover.status import StatusPage

ROUND = 0.01


class StandIn:
    """See `mover.process.Work`."""

    def __init__(self, member: str, page: StatusPage, say: Callable[[Progress], None]) -> None:
        self.member, self.page, self._say = member, page, say
        self._met, self._abort, self._change = threading.Event(), threading.Event(), threading.Event()
        self._held = False
        self._until: int | None = None
        self._thread: threading.Thread | None = None
        self._fds: list[int] = []

    def begin(self, task: Task) -> None:
        for event in (self._met, self._abort, self._change):
            event.clear()
        self._held, self._until = False, None
        self._fds = [given.fd for given in task.arenas]
        self._thread = threading.Thread(target=self._run, args=(task,), daemon=True)
        self._thread.start()

    def feed(self, values: Mapping[str, Mapping[str, str]]) -> None:
        self.fed = values
        self._met.set()

    def hold(self) -> None:
        self._held = True

    def until(self, number: int) -> None:
        self._until = number

    def abort(self) -> None:
        self._abort.set()
        self._met.set()

    def finish(self) -> None:
        assert self._thread is not None
        self._thread.join()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _run(self, task: Task) -> None:
        how = task.transfer.plan.split("+")
        now = Progress(task.transfer.id, "starting", config="stand-in")
        self._say(now)
        if "refused" in how:
            self._say(replace(now, state="out", outcome="refused", error="PlanMismatch", reason="another plan"))
            return
        now = replace(now, state="ready", values={"address": self.member.encode().hex()})
        self._say(now)
        self._met.wait()
        now = replace(now, state="running") if not self._abort.is_set() else now
        self._say(now)
        slot = _Slot(task, self.member)
        now = self._rounds(now, slot, task, how)
        slot.close()
        self._say(now)

    def _rounds(self, now: Progress, slot: _Slot, task: Task, how: list[str]) -> Progress:
        if "broken" in how:
            return replace(
                now, state="out", outcome="failed", error="DigestMismatch", reason="other bytes than were sent"
            )
        peer = next(i for i, m in enumerate(task.transfer.members) if m != self.member)
        while True:
            if self._abort.wait(ROUND):
                if "deaf" not in how:
                    return replace(now, state="out", outcome="stopped")
                # As one in gloo: a thread that runs Python while its stack is written may end the process by that.
                time.sleep(3600.0)
            if self._held and not now.held:
                now = replace(now, held=True)
                self._say(now)
            if now.held:
                if self._until is None:
                    continue
                if now.began > self._until:
                    return replace(now, state="out", outcome="stopped", cells=now.cells)
            now = replace(now, began=now.began + 1, cells=slot.mark(now.began))
            self.page.waiting(peer, now.began)
            self.page.progress(cells=now.cells, began=now.began, sent=0, received=7 * now.began)
            self._say(now)
            if "quick" in how and now.began == 3:
                return replace(now, state="out", outcome="done")


class _Slot:
    """A member's own landing slot, if it has one."""

    def __init__(self, task: Task, member: str) -> None:
        self._map: mmap.mmap | None = None
        self._count = 0
        for given in task.arenas:
            landing = next((d for d in task.transfer.landings if d.arena == given.arena and d.member == member), None)
            if landing is not None:
                assert given.writable
                self._cells: int = json.loads(given.table)["cells"]
                self._at: dict[str, Any] = json.loads(given.table)["slots"][landing.slot]
                self._map = mmap.mmap(given.fd, 0)
                self._begin(task.publication.id.encode())

    def _begin(self, publication: bytes) -> None:
        assert self._map is not None
        at = self._at["publication"]
        if self._map[at : at + 128].rstrip(b"\0") != publication:
            self._map[at : at + 128] = publication.ljust(128, b"\0")
            self._map[self._at["ledger"] : self._at["ledger"] + self._cells] = bytes(self._cells)
            self._map[self._at["word"] : self._at["word"] + 8] = (2).to_bytes(8, "little")

    def mark(self, cell: int) -> int:
        if self._map is not None and cell < self._cells:
            self._map[self._at["ledger"] + cell] = 1
            self._count = cell + 1
        return self._count

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
