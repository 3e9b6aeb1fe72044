"""Whether memory that is about to be taken is there: asked at `join`, so that a publish can't fail for want of it.

Nothing is reserved: what others take afterwards is not seen. Linux only, like arenas.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from elastic_reshard.errors import ArenaError

if TYPE_CHECKING:
    from elastic_reshard.arena.device import Device

__all__ = ["DeviceReport", "MemoryReport", "check_fits", "free_memory", "memory_for", "refuse_unfit", "with_mover"]

_PAGE = resource.getpagesize()


class DeviceReport(TypedDict):
    """Bytes of one device. device: its id. mover: what this member's mover takes there, its context included; 0 before it used
    the device, or where that cannot be told."""

    device: str
    needed: int
    free: int
    total: int
    mover: NotRequired[int]


class MemoryReport(TypedDict):
    """Bytes. free: of the host, by each limit that there is ("MemAvailable", "cgroup", "RLIMIT_AS"); limit: the tightest one's
    name. landing: the same of the landing arena, beside a source's arena. device: of an arena on one."""

    what: str
    needed: int
    free: dict[str, int]
    limit: str
    landing: NotRequired[MemoryReport]
    device: NotRequired[DeviceReport]


def _number(path: Path) -> int | None:
    """A file's only number; None where there is no such file, or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """Lines of name and number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    split = (line.replace(":", " ").split() for line in lines)
    return {row[0]: int(row[1]) for row in split if len(row) >= 2 and row[1].isdecimal()}


def _cgroups(root: Path) -> Iterator[Path]:
    """Folders of this process's cgroup (v2) and its parents: each may have a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        if line.startswith("0::"):
            folder = mount / line.removeprefix("0::").lstrip("/")
            while folder != mount and mount in folder.parents:
                yield folder
                folder = folder.parent
            yield mount  # in a container its own limit shows here


def _cgroup_free(root: Path) -> int | None:
    """Bytes left below the tightest limit of cgroup v2; page cache that can be given back counts as free."""
    found = []
    for folder in _cgroups(root):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            cache = _fields(folder / "memory.stat").get("inactive_file", 0)
            found.append(max(0, limit - max(0, used - cache)))
    return min(found, default=None)


def _address_space_free(root: Path) -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    size = (root / "proc/self/statm").read_text().split()[0]
    return max(0, soft - int(size) * _PAGE)


def free_memory(root: Path = Path("/")) -> dict[str, int]:
    """Bytes that this process may still take, by each limit that there is. Takes a millisecond; `root` is for tests."""
    available = _fields(root / "proc/meminfo").get("MemAvailable")
    found = {
        "MemAvailable": available * 1024 if available is not None else None,
        "cgroup": _cgroup_free(root),
        "RLIMIT_AS": _address_space_free(root),
    }
    return {name: free for name, free in found.items() if free is not None}


def memory_for(
    needed: int, what: str, root: Path = Path("/"), *, device: Device | None = None, on_device: int = 0
) -> MemoryReport:
    """What is free now beside the `needed` bytes of `what`, and those of it on a device, whether they fit or not."""
    free = free_memory(root)
    limit = min(free, key=lambda name: free[name], default="")
    report: MemoryReport = {"what": what, "needed": needed, "free": free, "limit": limit}
    if device is not None:
        left, total = device.free()
        report["device"] = {"device": device.id, "needed": on_device, "free": left, "total": total}
    return report


def with_mover(report: MemoryReport | None, nbytes: int) -> MemoryReport | None:
    """The report with what a mover takes of its device."""
    if report is None or "device" not in report:
        return report
    return {**report, "device": {**report["device"], "mover": nbytes}}


def refuse_unfit(report: MemoryReport) -> None:
    """ArenaError, naming all figures, if a limit of the report leaves less than what is needed."""
    what, needed, free, limit = report["what"], report["needed"], report["free"], report["limit"]
    there = report.get("device")
    if there is not None and there["free"] < there["needed"]:
        raise ArenaError(
            f"{what} needs {there['needed']} bytes ({there['needed'] / 2**30:.2f} GiB) on {there['device']}, but "
            f"{there['free']} of its {there['total']} bytes are free ({there['free'] / 2**30:.2f} GiB); nothing was taken. "
            'Join with stage="host", free device memory, or publish in a smaller wire_dtype'
        )
    if limit and free[limit] < needed:
        figures = ", ".join(f"{name} leaves {n} bytes ({n / 2**30:.2f} GiB)" for name, n in free.items())
        raise ArenaError(
            f"{what} needs {needed} bytes ({needed / 2**30:.2f} GiB), but {figures}; nothing was taken. Give the process "
            "more memory, publish in a smaller wire_dtype, or spread the model over more members"
        )


def check_fits(
    needed: int, what: str, root: Path = Path("/"), *, device: Device | None = None, on_device: int = 0
) -> MemoryReport:
    """The report for `needed` bytes of `what`. ArenaError, naming all figures, if a limit leaves less than that."""
    report = memory_for(needed, what, root, device=device, on_device=on_device)
    refuse_unfit(report)
    return report
