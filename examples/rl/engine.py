"""The actor of an engine rank: it starts the rank's loop in a process of its own and passes on what is said, both ways.

The loop is the member; the actor is what Ray knows and kills. Whoever drives calls `news`, `pause`, `install`, `resume`, on
all ranks of a group alike.
"""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray

import elastic_reshard as er
from elastic_reshard import on_ray
from elastic_reshard.errors import RefitTimeout
from rl.calls import get
from rl.settings import RunFailed, Settings, World

__all__ = ["EngineRank", "attempt"]

_ASK = 0.5  # seconds that one question for work waits
_EASY = 5.0  # seconds that a loop has for its own end after it has left


def attempt(settings: Settings, world: World | None) -> str:
    """What all ranks of one start of a group have in common, and no other start has."""
    if world is not None:
        return world.name
    room = ray.util.get_current_placement_group()
    if room is None:
        raise RunFailed(f"{settings.job}: this worker was not started in a placement group")
    return str(room.id.hex())[:12]


class EngineRank:
    """One rank. hub: the actor on the head. world: of the baseline."""

    def __init__(self, group: er.Group, settings: Settings, hub: Any, world: World | None = None) -> None:
        self.group, self.settings, self.hub = group, settings, hub
        self.attempt, self.world = attempt(settings, world), world
        self.owner = f"{group.name}/{self.attempt}"
        self._ready = 0
        self._news = threading.Condition()
        self._left = self._over = False
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[tuple[str, Any]]] = {}
        self._work = ThreadPoolExecutor(1, "work")
        self._pipe: Connection | None = None
        self._sending = threading.Lock()

    # -- for whoever drives

    def who(self) -> str:
        """The group and its attempt: no two starts have the same."""
        return self.owner

    def news(self, after: int, wait: float) -> int:
        """The newest version that can be installed, once it is newer than `after`; blocks `wait` seconds at most."""
        if self.world is not None:
            return int(get(self.hub.told_after.remote(f"{self.world.name}/version", after, wait), wait) or 0)
        with self._news:
            self._news.wait_for(lambda: self._ready > after, wait)
            return self._ready

    def pause(self, within: float) -> tuple[str, Any]:
        """Returns when no sampling runs any more."""
        return self._command("pause", within)

    def install(self, within: float) -> tuple[str, Any]:
        """While paused: ("installed", result) or ("refused", why)."""
        return self._command("install", within + 5.0, within)

    def resume(self, within: float) -> tuple[str, Any]:
        """Go on sampling."""
        return self._command("resume", within)

    def _command(self, what: str, within: float, *words: Any) -> tuple[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = queue.Queue()
        self._say(what, number, *words)
        try:
            return answer.get(timeout=within)
        except queue.Empty:
            raise RefitTimeout(f"the loop of {self.owner} did not {what} within {within} s", [self.owner]) from None
        finally:
            del self._answers[number]

    # -- the loop's process

    def run(self) -> None:
        """Until the loop has left; raises if it ends otherwise."""
        key = f"{self.group.name}/{self.attempt}/store"
        begin: dict[str, Any] = {"settings": self.settings, "group": self.group, "owner": self.owner, "store": None}
        if self.world is not None:
            begin["world"] = self.world
        else:
            begin["seat"] = on_ray.seat(self.settings.job, runtime=self.settings.runtime, timeout=self.settings.start)
        if self.group.rank > 0:
            begin["store"] = self._told(key)
        self._pipe, theirs = multiprocessing.Pipe()
        logs = Path(self.settings.folder) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"{self.group.name}-{self.group.rank}-{self.attempt}.log").open("w") as log:
            command = [sys.executable, "-m", "rl.loop", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=log, stderr=log)
        theirs.close()
        self._say_raw(begin)
        self._read(key)
        try:
            code: int | None = process.wait(_EASY)
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        if not self._left:
            raise RunFailed(
                f"the loop of rank {self.group.rank} of {self.owner} ended by itself with {code}: see {log.name}"
            )

    def _told(self, key: str) -> Any:
        found = get(self.hub.told.remote(key, self.settings.start), self.settings.start)
        if found is None:
            raise RunFailed(f"nobody said {key} to rank {self.group.rank} within {self.settings.start} s")
        return found

    def _say(self, *words: Any) -> None:
        self._say_raw(words)

    def _say_raw(self, words: Any) -> None:
        if self._pipe is None:
            raise RunFailed(f"the loop of {self.owner} has not begun")
        try:
            with self._sending:
                self._pipe.send(words)
        except OSError as error:
            raise RunFailed(f"the loop of {self.owner} is gone: {error}") from None

    def _read(self, key: str) -> None:
        """What the loop says, until it ends."""
        assert self._pipe is not None
        while True:
            try:
                what, *words = self._pipe.recv()
            except (EOFError, OSError):
                self._over = True
                return
            if what == "answer":
                number, *answer = words
                if number in self._answers:
                    self._answers[number].put((answer[0], answer[1]))
            elif what == "ask":
                self._work.submit(self._ask)
            elif what == "serves":
                get(self.hub.serve.remote(self.owner, words[0]))
            elif what == "samples":
                self._work.submit(lambda chunk: get(self.hub.put.remote(chunk)), words[0])
            elif what == "event" and words[0] == "installable":
                with self._news:
                    self._ready = max(self._ready, words[1])
                    self._news.notify_all()
            elif what == "store":
                get(self.hub.tell.remote(key, words[0]))
            elif what == "joined":
                on_ray.vouch(self.settings.job, words[0])
            elif what == "left":
                self._left = True

    def _ask(self) -> None:
        """Work for the loop, as soon as there is some."""
        while not self._over:
            ticket = get(self.hub.ask.remote(self.owner, _ASK), _ASK)
            if ticket is not None:
                self._say("ticket", ticket)
                return
