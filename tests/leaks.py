"""What a test left behind: processes, descriptors (listening sockets named as such), /dev/shm entries."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

__all__ = ["Traces", "left_behind", "traces"]

_SHM = Path("/dev/shm")


def _kept_processes() -> set[int]:
    """Processes that multiprocessing keeps for this process's life."""
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid} - {None}


def _kept_descriptors() -> set[int]:
    """Descriptors that multiprocessing keeps for this process's life: its pipes to those processes."""
    return {forkserver._forkserver._forkserver_alive_fd, resource_tracker._resource_tracker._fd} - {None}


@dataclass(frozen=True)
class Traces:
    """What this process holds at one moment, without what multiprocessing keeps."""

    processes: dict[tuple[int, str], str]  # (pid, start time) of descendants -> command
    descriptors: Counter[str]
    segments: frozenset[str]


def traces() -> Traces:
    """What this process holds now."""
    return Traces(_descendants(), _descriptors(), frozenset(os.listdir(_SHM)))


def left_behind(before: Traces, patience: float) -> list[str]:
    """What is there now and was not there before, waiting up to `patience` seconds for it to go."""
    found = _difference(before)
    if found:
        gc.collect()
    deadline = time.monotonic() + patience
    while found and time.monotonic() < deadline:
        time.sleep(0.01)
        found = _difference(before)
    return found


def _difference(before: Traces) -> list[str]:
    now = traces()
    found = [
        f"process {pid}: {now.processes[pid, start]}" for pid, start in now.processes.keys() - before.processes.keys()
    ]
    for target, count in (now.descriptors - before.descriptors).items():
        found.append(f"{count} descriptor(s): {target}{_listening(target)}")
    segments = now.segments - before.segments
    found += [f"shared memory: {_SHM / name}" for name in segments if not _held_by_others(str(_SHM / name))]
    return sorted(found)


def _descendants() -> dict[tuple[int, str], str]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}
    parents: dict[int, tuple[int, str, str]] = {}
    for pid in _pids():
        stat = _text(Path(f"/proc/{pid}/stat"))
        if stat:
            fields = stat.rpartition(")")[2].split()
            parents[pid] = (int(fields[1]), fields[19], fields[0])
    ours = {os.getpid()}
    # Parents mostly have smaller pids than their children, but pids wrap round.
    while more := {pid for pid, (parent, _, _) in parents.items() if parent in ours} - ours:
        ours |= more
    found = {}
    for pid in ours - _kept_processes() - {os.getpid()}:
        _, start, state = parents[pid]
        command = _text(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
        found[pid, start] = f"{command[:200] or '(no command)'}, state {state}"
    return found


def _descriptors() -> Counter[str]:
    targets: Counter[str] = Counter()
    kept = _kept_descriptors()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the listing's own
        if int(name) not in kept:
            targets[target] += 1
    return targets


def _listening(target: str) -> str:
    inode = target.removeprefix("socket:[").removesuffix("]")
    for kind in ("tcp", "tcp6"):
        for line in _text(Path(f"/proc/net/{kind}")).splitlines()[1:]:
            fields = line.split()
            if fields[9] == inode and fields[3] == "0A":
                return f", listening on {kind} port {int(fields[1].rpartition(':')[2], 16)}"
    for line in _text(Path("/proc/net/unix")).splitlines()[1:]:
        fields = line.split()
        if fields[6] == inode and int(fields[3], 16) & 0x10000:
            return f", listening on unix {' '.join(fields[7:])}"
    return ""


def _held_by_others(path: str) -> bool:
    """Whether a living process that is not ours has the file mapped or open: then it is not our test's."""
    ours = {os.getpid()} | {pid for pid, _ in _descendants()}
    for pid in set(_pids()) - ours:
        if path in _text(Path(f"/proc/{pid}/maps")):
            return True
        try:
            links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        if path in links:
            return True
    return False


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _text(path: Path) -> str:
    """The file's text; empty if the process it tells of is gone or another user's."""
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
