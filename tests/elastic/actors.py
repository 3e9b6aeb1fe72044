"""Processes that a test calls functions in, and kills."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tests import processes
from tests.elastic import rank as on

__all__ = ["LIMIT", "Actor", "Call", "Died", "Failed", "Late", "until"]

T = TypeVar("T")
LIMIT = 30.0  # most seconds for anything that should be done at once

# All that the processes of a world import, so that each starts in some 10 ms.
processes._context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "tests.elastic.rank",
        "elastic_reshard.supervisor.api",
    ]
)


class Failed(AssertionError):
    """What was called in another process raised. kinds: the exception's classes by name, own first."""

    def __init__(self, who: str, told: Mapping[str, Any]) -> None:
        self.who, self.kind, self.kinds, self.text = who, told["kind"], told["kinds"], told["text"]
        self.more: Mapping[str, Any] = told["more"]
        super().__init__(f"{who}: {self.kind}: {self.text}")


class Died(AssertionError):
    """The process ended before it had answered."""


class Late(AssertionError):
    """No answer in time."""


def until(ready: Callable[[], T | None], what: str, limit: float = LIMIT) -> T:
    """Wait until `ready` returns something; AssertionError, saying what was waited for, after `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        found = ready()
        if found is not None and found is not False:
            return found
        assert time.monotonic() < deadline, f"waited {limit} s for: {what}"
        time.sleep(0.01)


class Call:
    """Something that another process is doing."""

    def __init__(self, actor: Actor, what: str) -> None:
        self._actor, self._what = actor, what

    def done(self, within: float = 0.0) -> bool:
        """Whether it ends within so many seconds."""
        return self._actor.pipe.poll(within)

    def outcome(self, limit: float = LIMIT) -> Any:
        """Its result, or Failed or Died as a value. Raises Late."""
        try:
            return self.result(limit)
        except (Failed, Died) as error:
            return error

    def result(self, limit: float = LIMIT) -> Any:
        """Its result. Raises Failed, Died, Late."""
        actor = self._actor
        if not actor.pipe.poll(limit):
            raise Late(f"{actor.name} did not end {self._what} in {limit} s\n{actor.stacks()}")
        try:
            ok, value = actor.pipe.recv()
        except (EOFError, ConnectionError):
            actor.process.join(5)
            raise Died(f"{actor.name} ended in {self._what}, exit code {actor.process.exitcode}") from None
        if not ok:
            raise Failed(actor.name, value)
        return value


class Actor:
    """One process. It does one thing at a time."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.pipe, theirs = processes._context.Pipe()
        self.process = processes._context.Process(target=on.main, args=(theirs, name, str(folder)))
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid: int = self.process.pid
        self.id = ""

    def begin(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        """Call a function there; do not wait."""
        self.pipe.send((fn, args, kwargs))
        return Call(self, fn.__name__)

    def do(self, fn: Callable[..., T], *args: Any, limit: float = LIMIT, **kwargs: Any) -> T:
        """Call a function there and wait."""
        found: T = self.begin(fn, *args, **kwargs).result(limit)
        return found

    def arm(self, **plan: Any) -> None:
        """Place a fault: member_install_pulling="stop"."""
        self.do(on.arm, {point.replace("_", "."): what for point, what in plan.items()})

    def kill(self) -> None:
        """SIGKILL, and its end."""
        os.kill(self.pid, signal.SIGKILL)
        self.ended()

    def ended(self) -> None:
        """Wait for its end."""
        self.process.join(LIMIT)
        assert self.process.exitcode is not None, f"{self.name} has not ended"

    def stop(self) -> None:
        """SIGSTOP, and see it stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped()

    def stopped(self) -> None:
        """Wait until it is stopped (by a hook, say)."""
        until(lambda: _state(self.pid) == "T" or None, f"{self.name} is stopped")

    def cont(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def stacks(self) -> str:
        """What its threads are doing; "" if it is stopped or gone."""
        if self.process.exitcode is not None or _state(self.pid) in "TZX":
            return f"({self.name} is stopped or has ended)"
        file = self.folder / f"{self.name}.stacks"
        before = file.stat().st_size
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while file.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        return file.read_text()[before:]

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
