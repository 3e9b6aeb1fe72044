"""A runtime folder with a nursery in it, for tests that fork movers without a watchdog."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_reshard.mover.nursery import Birth, Born, Nursery, NurseryConfig
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.processes import condemn
from elastic_reshard.protocol.wire import credentials
from tests.watchdog.world import until

TOKEN = "secret-of-the-job"
MEMBER = "m@" + "1" * 16


class Place:
    """A runtime folder, and whatever is started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.born: list[Born] = []
        self._clients: list[Nursery] = []

    def config(self, **changes: object) -> NurseryConfig:
        names = {name: self.folder / f"~nursery.{name}" for name in ("sock", "lock", "log")}
        usual = {"work": "tests.mover.standin:StandIn", "preload": (), "linger": 10.0, "token": TOKEN}
        return NurseryConfig("job", **{**names, **usual, **changes})  # type: ignore[arg-type]

    def client(self, **changes: object) -> Nursery:
        self._clients.append(Nursery(self.config(**changes)))
        return self._clients[-1]

    def fork(self, client: Nursery, within: float = 20.0, deadlines: Deadlines | None = None) -> Born:
        said = (deadlines or Deadlines()).to_data()
        birth = Birth("a" * 32, MEMBER, "a", str(self.folder / "a.sock"), "http://127.0.0.1:1", said)
        self.born.append(client.fork(birth, time.monotonic() + within))
        return self.born[-1]

    def pid(self) -> int:
        """Whoever listens."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(self.config().sock))
            return credentials(sock).pid

    def end(self) -> None:
        while self._clients:
            self._clients.pop().close(goodbye=True)
        while self.born:
            pidfd = self.born.pop().pidfd
            assert condemn(pidfd, 2.0)
            os.close(pidfd)


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="er-") as name:
        # The nursery removes the folder when it is the last to use it.
        folder = Path(name) / "job"
        folder.mkdir(mode=0o700)
        made = Place(folder)
        try:
            yield made
        finally:
            log = made.config().log
            said = log.read_text() if log.exists() else ""
            made.end()
        until(lambda: not folder.exists(), why=f"the nursery goes when all have said goodbye, and its files: {said}")
