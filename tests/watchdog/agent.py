"""A member's process for tests: opens a link, then does what it is told on standard input, one answer a line."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.watchdog.link import HostConfig
from tests.watchdog.world import JOB, Local, landing


def say(what: Any) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def serve(said: dict[str, Any]) -> None:
    config = HostConfig(
        JOB,
        said["host"],
        said["url"],
        said["token"],
        Path(said["runtime"]),
        Deadlines(**said["deadlines"]),
        said["work"],
    )
    local = Local(config, said["name"])
    if said["mode"] == "thread":
        opener = threading.Thread(target=local.open)
        opener.start()
        opener.join()
    else:
        local.open()
    say({"member": local.member})
    for line in sys.stdin:
        told = json.loads(line)
        what = told.pop("do")
        say(DO[what](local, **told))
        if what == "exit":
            return


def hog(local: Local, seconds: float) -> str:
    """As native code that does not give the interpreter back: no other thread of this process runs."""
    deadline = time.monotonic() + seconds
    sys.setswitchinterval(1000.0)
    while time.monotonic() < deadline:
        pass
    sys.setswitchinterval(0.005)
    return local.member


def fork(local: Local) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(in_child(local))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(local: Local) -> int:
    """In a forked child: no socket, no arena, no eventfd of the parent's link is open."""
    mine = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name not in ("0", "1", "2")
            and os.path.exists(f"/proc/self/fd/{name}")]  # fmt: skip
    local.link.close()
    return sum("memfd" in target or "socket" in target or "eventfd" in target for target in mine)


def land(local: Local, cells: int = 8) -> str:
    """Offer a landing arena."""
    arena, fd, table = landing(cells)
    local.link.offer_landing(arena, fd, table)
    os.close(fd)
    return arena


DO: dict[str, Callable[..., Any]] = {
    "offer": Local.offer,
    "land": land,
    "values": lambda local, arena: len(local.values(arena)),
    "state": Local.state,
    "instance": lambda local: local.link.watchdog_instance,
    "hog": hog,
    "fork": fork,
    "leave": lambda local: local.link.close(),
    "exit": lambda _: "bye",
}


def main() -> None:
    said = json.loads(sys.argv[1])
    if said["mode"] == "daemonic":
        worker = multiprocessing.get_context("fork").Process(target=daemonic, args=(said,), daemon=True)
        worker.start()
        worker.join()
    else:
        serve(said)


def daemonic(said: dict[str, Any]) -> None:
    # multiprocessing closes a child's standard input.
    config = HostConfig(JOB, said["host"], said["url"], said["token"], Path(said["runtime"]))
    local = Local(config, said["name"]).open()
    say({"member": local.member, "daemon": multiprocessing.current_process().daemon})


if __name__ == "__main__":
    main()
