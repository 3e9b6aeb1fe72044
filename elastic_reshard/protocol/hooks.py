"""Points of the protocol at which tests place faults. Unarmed they cost one look at a variable.

Armed by the environment variable ELASTIC_RESHARD_TEST_HOOKS, JSON {point: what}, what being one of
"kill" (SIGKILL to itself), "stop" (SIGSTOP), "raise" (ProtocolError), {"wait": path} (until the file `path` exists;
`path`.reached and `path`.PID are made first), or {"do": one of these, "nth": 2, "once": path}: at the second passing in its
process, and only in the process that is the first to make the file `path`.

"@FILE" instead of JSON: what the file says, read anew whenever another one has taken its place; passings count from then.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from elastic_reshard.errors import ProtocolError

__all__ = ["POINTS", "VARIABLE", "arm", "hook"]

VARIABLE: Final = "ELASTIC_RESHARD_TEST_HOOKS"
# Every point of the package, in order of passing: what is not here is refused, so that no fault is ever placed nowhere.
# "stated", "offered", "attached", "ended" and "told": taken in, not yet passed on to anybody.
_ROOMS: Final = {
    "link": ("replacing", "missing", "locked"),
    "watchdog": (
        "left",
        "forked",
        "listening",
        "attached",
        "offered",
        "stated",
        "told",
        "ended",
        "forking",
        "condemning",
        "exiting",
    ),
    "mover": ("started", "planned", "formed", "round", "out"),
    "supervisor": ("journaled", "told"),
    "member.publish": ("claimed", "copied", "offered"),
    "member.install": ("granted", "pulling", "pulled", "reported"),
}
POINTS: Final = frozenset(f"{room}.{step}" for room, steps in _ROOMS.items() for step in steps)
_passed: Counter[str] = Counter()
_text = os.environ.get(VARIABLE)
_file: Final = Path(_text[1:]) if _text is not None and _text.startswith("@") else None
_version = 0  # of the file, by its time


def arm(text: str | None) -> dict[str, Any]:
    """What to do at which point, from JSON. Raises ProtocolError for unknown points or actions."""
    plan = json.loads(text) if text else {}
    actions = {at: what if isinstance(what, dict) and "do" in what else {"do": what} for at, what in plan.items()}
    unknown = sorted(set(actions) - POINTS)
    wrong = sorted(point for point, what in actions.items() if not _known(what))
    if unknown or wrong:
        raise ProtocolError(f"{VARIABLE} names unknown points {unknown}, or no known action at {wrong}; see hooks.py")
    return actions


def _known(what: dict[str, Any]) -> bool:
    do = what["do"]
    waits = isinstance(do, dict) and set(do) == {"wait"}
    return (waits or do in ("kill", "stop", "raise")) and set(what) <= {"do", "nth", "once"}


def _look(file: Path) -> None:
    """Take over what the file says now, if it is another one."""
    global _armed, _version
    version = file.stat().st_mtime_ns
    if version != _version:
        _armed, _version = arm(file.read_text()), version
        _passed.clear()


_armed = arm(None if _file is not None else _text)


def hook(point: str) -> None:
    """A point that tests can place a fault at. Returns at once unless hooks are armed."""
    if _file is not None:
        _look(_file)
    if not _armed:
        return
    if point not in POINTS:
        raise ProtocolError(f"{point!r} is not among the points of protocol/hooks.py; add it there")
    _passed[point] += 1
    what = _armed.get(point)
    if what is None or _passed[point] != what.get("nth", 1) or ("once" in what and not _first(what["once"])):
        return
    match what["do"]:
        case "kill" | "stop" as do:
            os.kill(os.getpid(), signal.SIGKILL if do == "kill" else signal.SIGSTOP)
        case "raise":
            raise ProtocolError(f"raised by a test at {point}")
        case {"wait": path}:
            Path(f"{path}.{os.getpid()}").touch()
            Path(f"{path}.reached").touch()
            while not Path(path).exists():
                time.sleep(0.005)


def _first(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
    except FileExistsError:
        return False
    return True
