"""Whether a process has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from elastic_reshard.protocol.processes import condemn, started
from tests.watchdog.world import until

HEADLESS = """
import ctypes, platform, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit of this thread alone
"""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_zombie_whose_other_threads_live_has_not_ended() -> None:
    """As a mover that was killed, with a thread that hangs in the GPU's driver."""
    with subprocess.Popen([sys.executable, "-c", HEADLESS], stdin=subprocess.PIPE) as process:
        since = until(lambda: started(process.pid))
        until(lambda: state(process.pid) == "Z")
        assert started(process.pid) == since
        pidfd = os.pidfd_open(process.pid)
        assert condemn(pidfd, 5.0)
        os.close(pidfd)
        until(lambda: started(process.pid) == 0, why="nobody has waited for it, and it has ended all the same")
