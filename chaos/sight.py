"""What can be read of a job while it runs: files that grow, log lines, and the supervisor's answers."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chaos.cast import TOKEN
from elastic_reshard.errors import ReshardError
from elastic_reshard.supervisor.client import SupervisorClient

__all__ = ["Sight", "Tail", "fields_of", "journaled"]

_FIELD = re.compile(r"(\w+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\S+)")


class Tail:
    """New whole lines of a file that grows, and may be replaced by another."""

    def __init__(self, path: Path) -> None:
        self.path, self._file, self._rest = path, None, b""

    def lines(self) -> Iterator[str]:
        """Those since the last call."""
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:
                return
        data = self._rest + self._file.read()
        *whole, self._rest = data.split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino != _inode(self._file):
                self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""


def _inode(file: Any) -> int:
    return os.fstat(file.fileno()).st_ino


def fields_of(line: str) -> dict[str, Any]:
    """The key=value pairs of a log line."""
    found: dict[str, Any] = {}
    for key, text in _FIELD.findall(line):
        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text
    return found


def journaled(path: Path) -> list[dict[str, Any]]:
    """Publications of the journal."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return [json.loads(body) for (body,) in db.execute("SELECT body FROM docs WHERE kind = 'publications'")]


class Sight:
    """Asks the supervisor now and then, in a thread of its own: what movers have carried, whether a transfer is under way."""

    def __init__(self, port: Callable[[], int]) -> None:
        self._port, self._end = port, threading.Event()
        self.transfer = ""  # state of the one under way, as heard last
        self.carried: dict[tuple[str, str], tuple[int, int]] = {}  # (member, transfer) -> received, sent again
        self._thread = threading.Thread(target=self._run, name="sight", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.15):
            port = self._port()
            if port:
                try:
                    with SupervisorClient(f"http://127.0.0.1:{port}", TOKEN, timeout=1.0) as client:
                        while not self._end.wait(0.15) and self._port() == port:
                            self._look(client)
                except ReshardError:
                    self.transfer = ""

    def _look(self, client: SupervisorClient) -> None:
        transfers = client.transfers()
        self.transfer = next((str(t.state) for t in transfers.values()), "")
        for host in client.hosts().values():
            for member, said in host.movers.items():
                before = self.carried.get((member, said.transfer), (0, 0))
                self.carried[member, said.transfer] = (max(before[0], said.received), max(before[1], said.resent))

    def close(self) -> None:
        """End it."""
        self._end.set()
        self._thread.join()
