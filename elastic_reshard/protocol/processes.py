"""Processes of one machine: named for ever by (pid, start), ended with proof, and locks between those that start them."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Final

__all__ = ["DUMP", "Lock", "condemn", "end_process", "leave", "serviceable", "spent", "started"]

DUMP: Final = signal.SIGUSR2  # writes the stacks of all threads to standard error, whatever they are doing


class Lock:
    """The lock file of a host, held by an open description: also by a process that was started with the descriptor. A forked
    child's copy is closed: a data loader's worker would hold the lock for as long as it lives.

    take() never waits. Whoever holds it may remove the file; a taker looks whether its file is still the one there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fd = -1
        _locks.add(self)

    @classmethod
    def inherited(cls, path: Path, fd: int) -> Lock:
        """The lock that our starter took for us, signed before anything else is done: whoever hangs from here on is ended."""
        lock = cls(path)
        lock.fd = fd
        os.set_inheritable(fd, False)
        lock.sign()
        return lock

    def take(self) -> bool:
        """Whether it is ours now."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # its folder has just been removed
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.stat(self._path)
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            return False
        if (there.st_ino, there.st_dev) != (os.fstat(fd).st_ino, os.fstat(fd).st_dev):
            os.close(fd)
            return False
        self.fd = fd
        return True

    def sign(self) -> None:
        """Write into the file who holds it: this process."""
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, json.dumps([os.getpid(), started(os.getpid())]).encode(), 0)

    def clear(self) -> None:
        """Write that nobody in particular holds it."""
        os.ftruncate(self.fd, 0)

    def holder(self) -> tuple[int, int] | None:
        """The (pid, start) that is written in the file, whoever holds the lock now."""
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            pid, start = json.loads(self._path.read_text())
            return int(pid), int(start)
        return None

    def remove(self) -> None:
        """Remove the file, while it is held."""
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Give it back, whoever has copies of the descriptor (from a fork that nobody told us of). May be called again."""
        if self.fd >= 0:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Leave it to the process that was started with it. May be called again."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


def started(pid: int) -> int:
    """When a process started, in clock ticks since boot: with its pid this names it for ever. 0 if it has ended."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def spent(pid: int) -> int:
    """CPU time that a process has used, in clock ticks; 0 if it has ended."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from its state on; none if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A zombie is its first thread; another that hangs in the kernel still has the memory, and may write to it.
        ended = fields[0] == "X" or (fields[0] == "Z" and len(os.listdir(f"/proc/{pid}/task")) <= 1)
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if ended else fields


def end_process(pid: int, start: int, within: float) -> bool:
    """SIGKILL the process that started at `start`, and wait for its end, up to `within` seconds; whether it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return started(pid) != start or condemn(pidfd, within)
    finally:
        os.close(pidfd)


def condemn(pidfd: int, within: float) -> bool:
    """SIGKILL by pidfd and proof of death, waiting up to `within` seconds for it; whether it came."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    deadline = time.monotonic() + within
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    while not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        if time.monotonic() >= deadline:
            return False
    return True


def leave(log: str) -> None:
    """A session of its own, whose leader goes at once; the starter's descriptors are gone, output goes to the log."""
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(fd, target)
    os.close(null)
    os.close(out)


def serviceable() -> None:
    """For processes that serve many: as many open files as they may have, and stacks on request (DUMP)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft >= 0 else soft, hard))
    faulthandler.register(DUMP, file=sys.stderr, all_threads=True)
