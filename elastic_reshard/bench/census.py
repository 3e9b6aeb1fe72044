"""What processes hold, read from /proc: descriptors, threads, private memory, and memory that memfds own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_reshard.protocol.processes import started

__all__ = ["Census", "count", "nccl_segments", "started_with"]

_MEMFD = "/memfd:"
_STAGING = "mover staging"
_KINDS = (("elastic_reshard.watchdog", "watchdogs"), ("", "nursery and movers"))


def started_with(variable: str) -> Iterator[tuple[int, int, str]]:
    """(pid, start, kind) of every process of this user that was started by exec with an environment's "NAME=value", and of
    what was forked from it."""
    wanted = variable.encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        if wanted not in _bytes(Path("/proc", name, "environ")).split(b"\0"):
            continue
        command = _bytes(Path("/proc", name, "cmdline")).replace(b"\0", b" ").decode(errors="replace")
        if at := started(int(name)):
            yield int(name), at, next(kind for part, kind in _KINDS if part in command)


def nccl_segments() -> list[str]:
    """NCCL's named shared memory on this machine: what a process that was killed leaves of it stays."""
    return sorted(path.name for path in Path("/dev/shm").glob("nccl-*"))


def _bytes(path: Path) -> bytes:
    """The file; empty if its process is gone or another user's."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


@dataclass(frozen=True)
class Census:
    """Of several processes together. anonymous: bytes of memory that is theirs alone; memfd: bytes of all memfds that any of
    them holds or maps, each once. staging: of these, what movers keep for the plans that they keep (eight each at most); it is
    in none of the other numbers, for it depends on which plans came last."""

    processes: int
    descriptors: int
    threads: int
    anonymous: int
    memfd: int
    memfds: int
    staging: int

    def to_data(self) -> dict[str, int]:
        """JSON-ready."""
        return asdict(self)


def count(pids: Iterable[int]) -> Census:
    """Of those that live now."""
    processes = descriptors = threads = anonymous = 0
    files: dict[tuple[int, int], int] = {}
    staging: dict[tuple[int, int], int] = {}
    for pid in pids:
        status = _status(pid)
        if not status:
            continue
        processes += 1
        threads += int(status["Threads"])
        anonymous += int(status["RssAnon"].split()[0]) << 10
        held = list(_descriptors(pid))
        staging |= {key: nbytes for key, nbytes, target in held if _STAGING in target}
        descriptors += sum(key not in staging for key, _, _ in held)
        files |= {key: nbytes for key, nbytes, target in held if target.startswith(_MEMFD)}
        for key, nbytes in _mapped(pid).items():
            files.setdefault(key, nbytes)
    for key in staging:
        del files[key]
    return Census(processes, descriptors, threads, anonymous, sum(files.values()), len(files), sum(staging.values()))


def _status(pid: int) -> Mapping[str, str]:
    lines = _bytes(Path(f"/proc/{pid}/status")).decode(errors="replace").splitlines()
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return found if "RssAnon" in found else {}


def _descriptors(pid: int) -> Iterator[tuple[tuple[int, int], int, str]]:
    """(file, bytes that it has, what it is) of each descriptor."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return
    for name in names:
        try:
            target, at = os.readlink(f"/proc/{pid}/fd/{name}"), os.stat(f"/proc/{pid}/fd/{name}")
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield (at.st_dev, at.st_ino), at.st_blocks * 512, target


def _mapped(pid: int) -> dict[tuple[int, int], int]:
    """Memfds that are mapped, perhaps without a descriptor: the bytes of the map."""
    found: dict[tuple[int, int], int] = {}
    for line in _bytes(Path(f"/proc/{pid}/maps")).decode(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith(_MEMFD):
            continue
        begin, end = (int(part, 16) for part in fields[0].split("-"))
        major, minor = (int(part, 16) for part in fields[3].split(":"))
        key = (os.makedev(major, minor), int(fields[4]))
        found[key] = max(found.get(key, 0), end - begin)
    return found
