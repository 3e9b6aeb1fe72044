"""A supervisor's process for `bench control`, whose processor time and memory are read from /proc, apart from others'."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from elastic_reshard.bench.control_cast import JOB
from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.places import TOKEN_VARIABLE

__all__ = ["ServerProcess"]

_TICK: Final = os.sysconf("SC_CLK_TCK")
_END: Final = 10.0  # seconds


class ServerProcess:
    """`elastic-reshard supervisor` with a journal in `folder`. Ended when the block is left. Raises ProtocolError if it does
    not start. Blocks for about a second."""

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_urlsafe(16)
        self.folder, self._log = folder, folder / "supervisor.log"
        root = str(Path(__file__).resolve().parents[2])
        environment = {
            **os.environ, "ELASTIC_RESHARD_RUNTIME": str(folder / "run"), TOKEN_VARIABLE: self.token,
            "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }  # fmt: skip
        journal = str(folder / "journal.sqlite")
        command = [sys.executable, "-m", "elastic_reshard", "supervisor", "--job", JOB, "--port", "0", "--json"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--journal", journal], stdout=subprocess.PIPE, stderr=log, env=environment
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise ProtocolError(f"the supervisor did not start: {self._log.read_text()[-2000:]}")
        told: dict[str, Any] = json.loads(line)
        self.url, self.pid = str(told["url"]), int(told["pid"])

    def cpu(self) -> float:
        """Seconds of processor time that it has used, user's and system's."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    def memory(self) -> tuple[int, int]:
        """Bytes of memory that it has now, and the most it had."""
        found = {}
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in ("VmRSS", "VmHWM"):
                found[key] = int(value.split()[0]) << 10
        return found["VmRSS"], found["VmHWM"]

    def close(self) -> None:
        """End it. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.communicate(timeout=_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
