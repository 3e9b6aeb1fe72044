"""What the doctor sees of this machine, held against what is put there to be seen."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_reshard.doctor.gather import gather
from elastic_reshard.doctor.gpu import gather_gpus
from tests.watchdog.world import until

ROOT = Path(__file__).parents[2]
NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"nvidia-cuda-mps-control", 0, 0, 0)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen(1)
        yield int(held.getsockname()[1])


def test_it_sees_what_this_machine_does(tmp_path: Path, taken: int) -> None:
    folder = tmp_path / "run"
    before = sorted(os.listdir("/proc/self/fd"))
    facts = gather(folder, taken)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert (facts.memory.memfd, facts.memory.seals, facts.processes.pidfd, facts.processes.pass_fds) == ("", "", "", "")
    assert 0 < facts.memory.available < 1 << 50
    assert facts.network.port_taken == "another process listens there"
    assert gather(folder, 1).network.port != facts.network.port
    assert facts.descriptors.hard == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert (facts.runtime.path, facts.runtime.fault) == (str(folder), "")
    assert not folder.exists(), "looking makes nothing"
    assert facts.packages["numpy"]
    json.dumps(facts.to_data())


def test_a_runtime_folder_that_is_open_to_others_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    assert "mode 777" in gather(folder).runtime.fault
    file = tmp_path / "file"
    file.touch()
    assert "is no folder" in gather(file).runtime.fault
    deep = tmp_path / ("d" * 100)
    assert gather(deep).runtime.longest > 107


def test_a_memory_that_may_not_be_read_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_reshard.doctor import gather as room

    assert "errno" in room._read_memory(2**22 - 3, ctypes.addressof(ctypes.create_string_buffer(8)))


def test_an_mps_daemon_is_seen_by_its_name() -> None:
    process = subprocess.Popen([sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        assert process.pid in gather_gpus().mps
    finally:
        process.communicate()
    until(lambda: process.pid not in gather_gpus().mps)


def doctor(*arguments: str, preexec: object = None, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "elastic_reshard", "doctor", *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, **environment}, preexec_fn=preexec, check=False,  # type: ignore[call-overload]
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.returncode, str(done.stdout)


def test_the_command_fails_when_something_is_bad(tmp_path: Path, taken: int) -> None:
    code, out = doctor("--json", "--port", str(taken), ELASTIC_RESHARD_RUNTIME=str(tmp_path))
    said = json.loads(out)
    assert (code, said["ok"]) == (0, True), out
    assert [f["name"] for f in said["findings"] if f["said"].startswith(f"{taken}: another process")] == [
        "supervisor's port"
    ]

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    code, out = doctor(preexec=few, ELASTIC_RESHARD_RUNTIME=str(tmp_path))
    assert code == 1
    assert "at most 256 a process" in out
    assert "65536" in out
