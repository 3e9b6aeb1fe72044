"""The leak check sees what it is there to see."""

from __future__ import annotations

import gc
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

from tests.leaks import left_behind, traces

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def test_sees_nothing_where_nothing_is() -> None:
    before = traces()
    os.close(os.open("/dev/null", os.O_RDONLY))
    assert left_behind(before, 0.0) == []


def test_sees_descriptors_even_if_their_number_was_open_before() -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    before = traces()
    os.close(fd)
    memory = os.memfd_create("leaked")
    assert memory == fd
    found = left_behind(before, 0.0)
    os.close(memory)
    assert found == ["1 descriptor(s): /memfd:leaked (deleted)"]
    assert left_behind(before, 0.0) == []


def test_names_listening_sockets() -> None:
    before = traces()
    with socket.socket(socket.AF_UNIX) as local, socket.socket() as tcp:
        local.bind(b"\0er-leak-test")
        local.listen()
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        found = left_behind(before, 0.0)
        assert len(found) == 2
        assert any("listening on unix @er-leak-test" in line for line in found)
        assert any(f"listening on tcp port {tcp.getsockname()[1]}" in line for line in found)


def test_sees_children_grandchildren_and_zombies() -> None:
    before = traces()
    script = f"import subprocess; p = subprocess.Popen({SLEEPER!r}); print(p.pid, flush=True); p.wait()"
    child = subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    found = left_behind(before, 0.0)
    assert any(line.startswith(f"process {child.pid}:") for line in found)
    assert any(line.startswith(f"process {grandchild}:") for line in found)
    os.kill(grandchild, 9)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.stdout.close()
    assert [line for line in left_behind(before, 0.0) if line.endswith("state Z")]
    child.wait()
    assert left_behind(before, 0.0) == []


def test_sees_segments_but_not_those_that_other_programs_hold() -> None:
    before = traces()
    path = Path("/dev/shm") / f"er-leak-test-{os.getpid()}"
    path.write_bytes(b"x")
    # The middle process ends, so the one that holds the file is no descendant of this one any more.
    script = f"import subprocess; print(subprocess.Popen({SLEEPER!r}, stdin=open({str(path)!r}), stdout=-3).pid)"
    try:
        assert left_behind(before, 0.0) == [f"shared memory: {path}"]
        middle = subprocess.run(
            [sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, check=True, text=True, timeout=20
        )
        stranger = int(middle.stdout)
        assert left_behind(before, 0.0) == []
        handle = os.pidfd_open(stranger)
        os.kill(stranger, 9)
        select.select([handle], [], [], 5)
        os.close(handle)
        assert left_behind(before, 0.0) == [f"shared memory: {path}"]
    finally:
        path.unlink()
    assert left_behind(before, 0.0) == []


def test_waits_for_what_is_about_to_go() -> None:
    before = traces()
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(0.3)"])
    assert left_behind(before, 0.0)
    reaper = threading.Thread(target=child.wait)
    reaper.start()
    assert left_behind(before, 10.0) == []
    reaper.join()


def test_collects_garbage_before_it_complains() -> None:
    class Holder:
        def __init__(self) -> None:
            self.file, self.me = Path("/dev/null").open("rb", buffering=0), self  # noqa: SIM115

        def __del__(self) -> None:
            self.file.close()

    before = traces()
    gc.disable()
    try:
        Holder()
        assert traces().descriptors - before.descriptors
        assert left_behind(before, 0.2) == []
    finally:
        gc.enable()
