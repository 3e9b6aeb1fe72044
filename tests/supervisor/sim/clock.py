"""Virtual time, processes that can be frozen or die, and connections that keep the order of what is sent on them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

__all__ = ["Clock", "Link", "Proc"]


class Clock:
    """A heap of what is to happen. `log` keeps the last lines of the history."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.happened = 0
        self.calm = False  # no more faults
        self.still = False  # nor delays, from the beginning: what happens is what a test does
        self.log: deque[str] = deque(maxlen=250)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, do: Callable[..., None], *args: Any) -> None:
        """Do this then."""
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, do, args))

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        """Do this later."""
        self.at(self.now + seconds, do, *args)

    def note(self, *words: Any) -> None:
        """A line of the history."""
        self.log.append(f"{self.now:8.3f} " + " ".join(map(str, words)))

    def chance(self, p: float) -> bool:
        """Whether a fault happens here."""
        return not (self.calm or self.still) and self.rng.random() < p

    def delay(self) -> float:
        """How long a message is under way: mostly short, at times long."""
        u = self.rng.random()
        return 0.001 + 0.02 * u if u < 0.9 or self.calm or self.still else 0.02 + 20 * (u - 0.9)

    def next_event(self) -> bool:
        """Let one thing happen; False when nothing is left."""
        if not self._heap:
            return False
        self.now, _, do, args = heapq.heappop(self._heap)
        self.happened += 1
        do(*args)
        return True


class Proc:
    """A process. Frozen, what reaches it and its timers wait; awake, it goes on exactly where it was."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name
        self.alive, self.frozen = True, False
        self.links: list[Link] = []
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        """A timer, or the next step of this process."""
        self.clock.after(seconds, self.post, do, *args)

    def post(self, do: Callable[..., None], *args: Any) -> None:
        """Run in this process: now, when it wakes, or never."""
        if not self.alive:
            return
        if self.frozen:
            self._held.append((do, args))
            return
        do(*args)

    def freeze(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.frozen:
            self.clock.note(self.name, "FROZEN")
            self.frozen = True

    def wake(self) -> None:
        """SIGCONT."""
        if self.alive and self.frozen:
            self.clock.note(self.name, "AWAKE")
            self.frozen = False
            held, self._held = self._held, []
            for do, args in held:
                self.clock.after(0.0, self.post, do, *args)

    def die(self, how: str = "killed") -> None:
        """SIGKILL. What it had sent still arrives."""
        if not self.alive:
            return
        self.clock.note(self.name, "DEAD:", how)
        self.alive = False
        for link in list(self.links):
            link.close(self)

    def received(self, link: Link, said: Any) -> None:
        """A message; None is the end of the connection."""
        raise NotImplementedError


class Link:
    """A connection of two processes. Each way keeps its order; broken, what is under way may be lost or come late.

    local: a Unix socket. What is sent can be read at once, so it is late only as far as its reader is."""

    def __init__(self, clock: Clock, a: Proc, b: Proc, local: bool = False) -> None:
        self.clock, self.ends, self.local = clock, (a, b), local
        self.open = True
        self._last = [0.0, 0.0]
        self._sent, self._lost_from = [0, 0], [1 << 60, 1 << 60]
        self._not_before = [0.0, 0.0]
        self._kept: list[tuple[int, int, Any]] | None = None  # while the network holds everything back
        for end in self.ends:
            end.links.append(self)

    def send(self, by: Proc, said: Any) -> None:
        """Queue a message to the other end."""
        if self.open:
            self._push(1 - self.ends.index(by), said)

    def _push(self, to: int, said: Any) -> None:
        delay = 0.0005 + 0.002 * self.clock.rng.random() if self.local else self.clock.delay()
        when = max(self._last[to], self.clock.now + delay)
        self._last[to] = when
        self.clock.at(when, self._arrive, to, self._sent[to], said)
        self._sent[to] += 1

    def _arrive(self, to: int, number: int, said: Any) -> None:
        if number >= self._lost_from[to] and said is not None:
            return
        if self._kept is not None:
            self._kept.append((to, number, said))
            return
        if self.clock.now < self._not_before[to]:
            self.clock.at(self._not_before[to], self._arrive, to, number, said)
            return
        self.ends[to].post(self.ends[to].received, self, said)

    def close(self, by: Proc) -> None:
        """One end closes: the other finds the end after what was sent before it."""
        if self.open:
            self._push(1 - self.ends.index(by), None)
            self._forget()
            mine = self.ends.index(by)
            self._lost_from[mine] = 0

    def sever(self) -> None:
        """The network breaks."""
        if not self.open:
            return
        rng = self.clock.rng
        for to in (0, 1):
            self._lost_from[to] = rng.randint(max(0, self._sent[to] - 4), self._sent[to])
            if rng.random() < 0.4:
                self._not_before[to] = self.clock.now + 6 * rng.random()
            self._push(to, None)
        self._forget()

    def hold(self) -> None:
        """The network is cut; nobody is told. What is under way arrives when it heals."""
        if self._kept is None:
            self._kept = []

    def release(self) -> None:
        """It has healed."""
        kept, self._kept = self._kept or [], None
        for to, number, said in kept:
            when = self._last[to] = max(self._last[to], self.clock.now + 0.001)
            self.clock.at(when, self._arrive, to, number, said)

    def _forget(self) -> None:
        self.open = False
        for end in self.ends:
            if self in end.links:
                end.links.remove(self)
