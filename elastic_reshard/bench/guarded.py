"""Parts of a measuring program, each in a process of its own under a deadline: what hangs or crashes is ended and reported, and
the rest goes on.

A part is `python -m MODULE ...` whose last whole line of output is one JSON document: it may print what it has so far, and all
of it at the end. Everything that it started, whatever became of
its parents, is known by a variable of its environment and has ended when `run_part` returns.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elastic_reshard.bench.census import started_with
from elastic_reshard.protocol.processes import end_process

__all__ = ["Outcome", "keep_result", "print_result", "run_part", "until_told"]

_VARIABLE: Final = "ELASTIC_RESHARD_PART"
_GRACE: Final = 8.0
_GOES: Final = 6.0
_TAIL: Final = 3000
_LOOK: Final = 1.0  # seconds between two looks at what a part has said


@dataclass(frozen=True)
class Outcome:
    """Of one part. data: its document, None if it gave none; error: why, with the end of what it said."""

    data: Any
    error: str
    seconds: float
    left: tuple[str, ...] = ()

    def to_data(self) -> dict[str, Any]:
        """JSON-ready."""
        found: dict[str, Any] = {"seconds": round(self.seconds, 1)}
        if self.error:
            found["error"] = self.error
        if self.left:
            found["ended by force"] = list(self.left)
        return found | (
            self.data if isinstance(self.data, dict) else {"result": self.data} if self.data is not None else {}
        )


def print_result(data: Any) -> None:
    """Tell what there is, all of it: the last thing a part does, and whenever it has something more."""
    sys.stdout.flush()
    print(json.dumps(data), flush=True)


def keep_result(file: Path | None, data: Any) -> None:
    """Write it to a file, if there is to be one: at once or not at all, so that there is always a whole one."""
    if file is not None:
        part = file.with_name(f".{file.name}.part")
        part.write_text(json.dumps(data))
        part.replace(file)


def until_told() -> None:
    """Let SIGTERM end this process as an exception does, so that what it started is ended; a part calls it first."""

    def told(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, told)


def run_part(arguments: Sequence[str], deadline: float, so_far: Callable[[Any], None] = lambda data: None) -> Outcome:
    """Run `python -m *arguments`; at most `deadline` seconds, and some more to end what does not end itself. Never raises for
    what the part does. so_far: called with each document that it prints meanwhile."""
    mark, begun = secrets.token_hex(8), time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", *arguments],
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, _VARIABLE: mark},
        )  # fmt: skip
        late = _ended(process, deadline, out, so_far)
        left = _rest(f"{_VARIABLE}={mark}")
        seconds = time.monotonic() - begun
        text, said = _text(out), _text(err)
    data = _document(text)
    if late:
        return Outcome(data, f"not done in {deadline:g} s; it was ended. {_tail(said)}", seconds, left)
    if data is None or process.returncode:
        return Outcome(data, f"exit code {process.returncode}. {_tail(said)}", seconds, left)
    return Outcome(data, "", seconds, left)


def _document(text: str) -> Any:
    """The last line that is a document; None if none is. Who was killed may have left half a line."""
    for line in reversed(text.strip().splitlines()[-2:]):
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            continue
    return None


def _ended(process: subprocess.Popen[bytes], seconds: float, out: Any, so_far: Callable[[Any], None]) -> bool:
    """Wait for its end; True if it had to be ended."""
    deadline, seen = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        try:
            process.wait(min(_LOOK, max(0.0, deadline - time.monotonic())))
            return False
        except subprocess.TimeoutExpired:
            size = os.fstat(out.fileno()).st_size
        if size != seen:
            seen, data = size, _document(os.pread(out.fileno(), size, 0).decode(errors="replace"))
            if data is not None:
                so_far(data)
    process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return True


def _rest(variable: str) -> tuple[str, ...]:
    """End all that is left of it and does not go by itself, as helpers do whose parent has ended."""
    found = []
    deadline = time.monotonic() + _GOES
    while any(started_with(variable)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid, at, kind in list(started_with(variable)):
        if end_process(pid, at, _GRACE):
            found.append(f"{kind} {pid}")
    return tuple(found)


def _text(file: Any) -> str:
    file.seek(0)
    found: bytes = file.read()
    return found.decode(errors="replace")


def _tail(text: str) -> str:
    """What is worth reading of what a part said: the end, where a traceback is."""
    return f"It said: {text.strip()[-_TAIL:]}" if text.strip() else "It said nothing."
