"""Starting a watchdog, from any process: a notebook, a daemonic worker, a Ray actor, a thread that ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic_reshard.errors import MembershipError
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.places import Address
from elastic_reshard.watchdog.runtime import Lock, Paths

__all__ = ["HostConfig", "start"]


@dataclass(frozen=True)
class HostConfig:
    """Which watchdog a member wants: of which host of which job, and how it reaches the supervisor.

    url: http://HOST:PORT of the supervisor. token: the job's. runtime: the runtime folder, None for the usual one.
    seen: where the runtime folder said then that the supervisor is (`places.Address`). host: a name; two names on one
    machine are two hosts. work: what movers do their work with, and nothing loaded before (`mover.process.Work`, by dotted
    name): only this package's tests say it.
    """

    job: str
    host: str
    url: str
    token: str = field(repr=False)
    runtime: Path | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    work: str = ""
    seen: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seen", Address(self.url, self.job, self.runtime).seen)

    @property
    def paths(self) -> Paths:
        """Its files. Raises ProtocolError if the runtime folder's name is too long."""
        return Paths.of(self.job, self.host, self.runtime)

    def followed(self) -> HostConfig:
        """This, with where the supervisor is now if it has come back elsewhere. Reads one file."""
        address = Address(self.url, self.job, self.runtime, self.seen)
        address.look()
        if address.seen == self.seen:
            return self
        now = replace(self, url=address.url)
        object.__setattr__(now, "seen", address.seen)
        return now

    def settings(self, lock: int) -> dict[str, Any]:
        """What the watchdog reads on stdin. lock: the descriptor that it inherits."""
        return {
            "job": self.job,
            "host": self.host,
            "url": self.url,
            "seen": self.seen,
            "token": self.token,
            "runtime": str(self.paths.base),
            "log": str(self.paths.log),
            "deadlines": self.deadlines.to_data(),
            "lock": lock,
            "lock_path": str(self.paths.lock),
            **({"work": self.work, "preload": []} if self.work else {}),
        }


def start(config: HostConfig, lock: Lock) -> None:
    """Start the host's watchdog. The caller holds `lock`, which is the watchdog's from then on: it holds it until it listens.

    Returns when the new process has left this process's tree, after about 0.05 s; blocks `deadlines.connect` at most.
    Raises MembershipError if it cannot be started."""
    # By exec, so that nothing of this process (threads, locks, CUDA) is in it; the package is found wherever we found it.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "elastic_reshard.watchdog", config.job, config.host]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(lock.fd,),
            env={**os.environ, "PYTHONPATH": path},
            cwd="/",
        )
    except OSError as error:
        raise MembershipError(
            f"the watchdog of host {config.host} cannot be started ({command[0]}): {error}"
        ) from error
    with process:
        try:
            # Its standard error closes when it has left: the copies that it keeps are others.
            _, said = process.communicate(json.dumps(config.settings(lock.fd)).encode(), config.deadlines.connect)
        except subprocess.TimeoutExpired as error:
            process.kill()
            lock.close()  # it may have left before
            raise MembershipError(
                f"the watchdog of host {config.host} did not get going in {config.deadlines.connect} s; "
                "look at the load of this machine, or raise deadlines.connect"
            ) from error
    if process.returncode:
        raise MembershipError(
            f"the watchdog of host {config.host} could not start: {said.decode(errors='replace').strip()[-2000:]}"
        )
    lock.close()
