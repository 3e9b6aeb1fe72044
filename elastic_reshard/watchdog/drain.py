"""Draining a host from within: SIGTERM to its watchdog. Needs neither the supervisor's address nor the job's token.

The watchdog passes it on; the supervisor asks the members to leave (they see `leave` in `watch`), and leaves out who has not
in time. The watchdog goes when nobody is left, at the latest a beat after that time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from elastic_reshard.log import logger
from elastic_reshard.protocol.places import write_private
from elastic_reshard.protocol.processes import started
from elastic_reshard.watchdog.runtime import Paths, Record, read_record, runtime_folder

__all__ = ["Drained", "Guarded", "asked_until", "drain", "guarded", "write_down"]

_log = logger("watchdog")
_MODULE: Final = "elastic_reshard.watchdog"
_LOOK: Final = 0.05  # seconds between looks
_MARGIN: Final = 2.0  # seconds beside the time given: a beat, and the last words


@dataclass(frozen=True, slots=True)
class Guarded:
    """A watchdog of this machine and user that runs (a frozen one too): of which host of which job."""

    job: str
    host: str
    paths: Paths
    record: Record


@dataclass(frozen=True, slots=True)
class Drained:
    """How a host's drain ended. empty: its watchdog has gone. waited: seconds."""

    job: str
    host: str
    members: tuple[str, ...]
    empty: bool
    waited: float


def guarded(job: str | None = None, runtime: Path | None = None) -> list[Guarded]:
    """The watchdogs of this machine and runtime folder that run, of one job or of all, by job and host. Returns at once."""
    base = runtime_folder(runtime).absolute()
    found = []
    for path in sorted({*base.glob("*.json"), *base.glob("*/*.json")}):
        record = read_record(path)
        if record is None or not record.alive:
            continue
        whose = _whose(record.pid)
        if whose is not None and job in (None, whose[0]):
            found.append(Guarded(*whose, Paths(base, path.parent, path.name.removesuffix(".json")), record))
    return sorted(found, key=lambda one: (one.job, one.host))


def _whose(pid: int) -> tuple[str, str] | None:
    """(job, host) of a watchdog, from its command line: names in file names may be shortened."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    if _MODULE.encode() not in words:
        return None
    at = words.index(_MODULE.encode())
    return (words[at + 1].decode(), words[at + 2].decode()) if len(words) > at + 2 else None


def asked_until(paths: Paths, now: float) -> float | None:
    """Until when (time.monotonic) the host is to be empty, as whoever sent SIGTERM, or a watchdog before this one, has written
    down; None if nothing holds. What is over holds no more: it is an earlier drain's."""
    try:
        boot, until = json.loads(paths.drain.read_text())
        return float(until) if boot == _boot() and now < float(until) + _MARGIN else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _log.warning("drain.unreadable", path=str(paths.drain), error=str(error))
        return None


def write_down(paths: Paths, until: float) -> None:
    """For whichever watchdog the host has: it may be replaced meanwhile. Without a folder there is nobody to read it."""
    with contextlib.suppress(FileNotFoundError):
        write_private(paths.drain, json.dumps([_boot(), until]))


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def drain(hosts: Sequence[Guarded], within: float, wait: bool = True) -> list[Drained]:
    """Send SIGTERM to these watchdogs and wait until they have gone, and whoever took their places: `within` seconds for all,
    and 2 s more; not at all without `wait`.

    May be repeated, by several at once: the shortest time counts. Nothing is killed."""
    began = time.monotonic()
    until = began + within
    left = {(host.job, host.host): host for host in hosts}
    gone: dict[tuple[str, str], float] = {}
    told: set[tuple[int, int]] = set()
    while left:
        for host in left.values():
            if (host.record.pid, host.record.start) not in told:
                told.add((host.record.pid, host.record.start))
                write_down(host.paths, until)
                _signal(host.record)
        if not wait or time.monotonic() >= until + _MARGIN:
            break
        time.sleep(_LOOK)
        for key, host in list(left.items()):
            found = _now(host)
            if found is None:
                gone[key] = time.monotonic() - began
                del left[key]
            else:
                left[key] = found
    waited = time.monotonic() - began
    return [_drained(host, gone.get((host.job, host.host)), waited) for host in hosts]


def _drained(host: Guarded, gone: float | None, waited: float) -> Drained:
    members = tuple(name for name, member in host.record.members.items() if member.ended is None)
    return Drained(host.job, host.host, members, gone is not None, round(waited if gone is None else gone, 3))


def _now(host: Guarded) -> Guarded | None:
    """The host's watchdog now, perhaps another one; None if it has gone in order, or nobody is there who would start one."""
    record = read_record(host.paths.record)
    if record is None:
        return host if host.record.alive else None  # who goes in order removes its record
    lives = any(m.ended is None and m.start and started(m.pid) == m.start for m in record.members.values())
    return replace(host, record=record) if record.alive or lives else None


def _signal(record: Record) -> None:
    try:
        pidfd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if started(record.pid) == record.start:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)
