"""What processes are doing: /proc, and the stacks that watchdogs, movers and supervisors write to their logs when asked."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from elastic_reshard.protocol.processes import DUMP, started

__all__ = ["look", "supervisors"]

_WRITING: Final = 2.0  # most seconds for stacks to be written; they are when every log has grown, and none for:
_QUIET: Final = 0.3
_SHOWN: Final = (
    "State",
    "Threads",
    "VmRSS",
    "VmHWM",
    "FDSize",
    "voluntary_ctxt_switches",
    "nonvoluntary_ctxt_switches",
)


def look(pids: Mapping[str, int], ours: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """What each process is, by the name it is given here. ours: those that run this package's own programs, with when they
    started (0: not known). These are asked to write their stacks, if they answer DUMP, and have had 2 s for it when this
    returns, or have all written; the signal may mean anything to others. `log`: the file of its standard error, "" if that
    is none."""
    found = {who: _of(pid) for who, pid in pids.items()}
    asked: dict[str, int] = {}  # logs, and how long they were
    for who, start in ours.items():
        pid = pids[who]
        if start not in (0, started(pid)):
            continue  # it has ended, and another process has its number
        # To whoever does not catch it, it would be the end; one that is stopped would write when nobody reads.
        if found[who].get("answers") and not str(found[who].get("State", "")).startswith("T"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                log = str(found[who].get("log", ""))
                asked.setdefault(log, _size(log))
                os.kill(pid, DUMP)
                found[who]["stacks"] = "asked for; see its log (of movers: the nursery's)"
    if asked:
        _written(asked)
    return found


def _size(log: str) -> int:
    try:
        return os.stat(log).st_size
    except OSError:
        return 0


def _written(before: Mapping[str, int]) -> None:
    """Wait until all logs have grown and have stopped growing."""
    now = time.monotonic()
    end, last, since = now + _WRITING, dict(before), now
    while (now := time.monotonic()) < end:
        sizes = {log: _size(log) for log in before}
        if sizes != last:
            last, since = sizes, now
        grown = all(sizes[log] > n for log, n in before.items() if log)
        if grown and now - since >= _QUIET:
            return
        time.sleep(0.02)


def _of(pid: int) -> dict[str, Any]:
    found: dict[str, Any] = {"pid": pid}
    place = Path("/proc", str(pid))
    try:
        lines = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
    except (FileNotFoundError, ProcessLookupError):
        return found | {"State": "ended"}
    found |= {key: lines[key].strip() for key in _SHOWN if key in lines}
    found["answers"] = bool(int(lines.get("SigCgt", "0"), 16) >> (DUMP - 1) & 1)
    with contextlib.suppress(OSError):
        found["waits_in"] = (place / "wchan").read_text().strip()
    with contextlib.suppress(OSError):
        found["descriptors"] = len(os.listdir(place / "fd"))
        log = os.readlink(place / "fd/2")
        found["log"] = log if os.path.isfile(log) else ""
    return found


def supervisors(job: str) -> list[int]:
    """Processes of this user that look like `elastic-reshard supervisor` of a job."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            words = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace").split("\0")
            mine = os.stat(f"/proc/{name}").st_uid == os.getuid()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        ours = any("elastic-reshard" in word or "elastic_reshard" in word for word in words[:4])
        named = words[words.index("--job") + 1] if "--job" in words[:-1] else "job"
        if mine and ours and "supervisor" in words and named == job:
            found.append(int(name))
    return sorted(found)
