"""Where rollouts wait for the trainers. Pure: no clock, no threads, no torch.

Work is given out as numbered tickets: a ticket says which prompts to draw and with which seed. A ticket is TODO, LEASED to
an engine, READY with its chunk of samples, TAKEN for the step in hand, or DONE by a step. It goes back to TODO when its
engine is lost, when its samples are too old or of a line that is no more, and when its step was lost with the trainers: so
every ticket ends in exactly one step of the line that counts, over any kills. One that is late may be leased to a second
engine too: the first that brings samples is taken, the other is refused.

A *line* is what one trainer gang has trained since it began, from its checkpoint on. Samples drawn under versions of another
line are never trained on.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Buffer", "Chunk", "Weights"]


@dataclass(frozen=True, slots=True)
class Weights:
    """Which weights: the line and step that made them, and the version under which they travelled."""

    line: str
    step: int
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Samples of one ticket, all drawn under one version. owner: the engine's incarnation. The arrays are NumPy's."""

    ticket: int
    owner: str
    weights: Weights
    prompts: Any = None
    answers: Any = None
    logprobs: Any = None
    rewards: Any = None


@dataclass(slots=True)
class Buffer:
    """chunks: in a step. max_lag: steps that a sample's weights may be behind those that it trains."""

    chunks: int
    max_lag: int
    line: str = ""
    step: int = 0  # of the line
    todo: list[int] = field(default_factory=list)  # a heap
    leased: dict[int, list[str]] = field(default_factory=dict)  # to whom
    ready: list[Chunk] = field(default_factory=list)
    taken: list[Chunk] = field(default_factory=list)
    done: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by step
    counts: Counter[str] = field(default_factory=Counter)
    fresh: int = 0  # the next ticket that was never given out

    def begin(self, line: str, step: int) -> None:
        """A gang begins, with the weights of a step. What was trained after that is undone."""
        lost = [number for number in self.done if number > step]
        again = [ticket for number in lost for ticket in self.done.pop(number)]
        again += [chunk.ticket for chunk in self.taken]
        self.counts["lost_steps"] += len(lost)
        self._back(again)
        self.line, self.step, self.taken = line, step, []
        self._sift()

    def ask(self, owner: str, weights: Weights, late: Collection[int] = ()) -> int | None:
        """A ticket for an engine that serves these weights; None: nothing to do now, or its samples would be too old.
        late: leased tickets that may be given to a second engine."""
        if weights.line != self.line or self._due - weights.step > self.max_lag:
            return None
        if len(self.ready) + len(self.leased) < self.chunks:
            if self.todo:
                ticket = heapq.heappop(self.todo)
            else:
                ticket, self.fresh = self.fresh, self.fresh + 1
            self.leased[ticket] = [owner]
            return ticket
        for ticket in sorted(late):
            if len(self.leased.get(ticket, (owner, owner))) == 1 and self.leased[ticket] != [owner]:
                self.leased[ticket].append(owner)
                self.counts["leased_twice"] += 1
                return ticket
        return None

    def put(self, chunk: Chunk) -> bool:
        """Samples of a ticket; False if that is not this engine's, or not any more."""
        if chunk.owner not in self.leased.get(chunk.ticket, ()):
            self.counts["refused"] += 1
            return False
        del self.leased[chunk.ticket]
        self.ready.append(chunk)
        self._sift()
        return True

    def forget(self, owner: str) -> None:
        """An engine is gone: what it had to do is to be done by others."""
        for ticket, holders in list(self.leased.items()):
            if owner in holders:
                holders.remove(owner)
                if not holders:
                    del self.leased[ticket]
                    self.counts["released"] += 1
                    self._back([ticket])

    def take(self, line: str) -> list[Chunk] | None:
        """What the next step trains on; None: not there yet, or asked by a gang that is no more."""
        if line != self.line:
            return None
        if not self.taken:
            if len(self.ready) < self.chunks:
                return None
            self.ready.sort(key=lambda chunk: chunk.ticket)
            self.taken, self.ready = self.ready[: self.chunks], self.ready[self.chunks :]
            self._sift()
        return self.taken

    def unusable(self, line: str, version: int) -> None:
        """The gang has no weights of this version: what was taken of it is dropped, the rest is ready again."""
        if line != self.line:
            return
        bad = [chunk for chunk in self.taken if chunk.weights.version == version]
        self.ready += [chunk for chunk in self.taken if chunk.weights.version != version]
        self.taken = []
        self._drop(bad, "dropped_unchecked")

    def trained(self, line: str, step: int) -> bool:
        """The step on what was taken is done; False if that gang is no more."""
        if line != self.line or step != self.step + 1 or not self.taken:
            return False
        self.done[step] = tuple(chunk.ticket for chunk in self.taken)
        self.step, self.taken = step, []
        self._sift()
        return True

    @property
    def _due(self) -> int:
        """Steps of the weights that the next chunk will train."""
        return self.step + (1 if self.taken else 0)

    def _sift(self) -> None:
        """Drop what will never be trained on."""
        other = [chunk for chunk in self.ready if chunk.weights.line != self.line]
        old = [c for c in self.ready if c.weights.line == self.line and self._due - c.weights.step > self.max_lag]
        gone = {chunk.ticket for chunk in (*other, *old)}
        self.ready = [chunk for chunk in self.ready if chunk.ticket not in gone]
        self._drop(other, "dropped_line")
        self._drop(old, "dropped_old")

    def _drop(self, chunks: list[Chunk], why: str) -> None:
        self.counts[why] += len(chunks)
        self._back([chunk.ticket for chunk in chunks])

    def _back(self, tickets: list[int]) -> None:
        self.counts["again"] += len(tickets)
        for ticket in tickets:
            heapq.heappush(self.todo, ticket)
