"""CUDA MPS is seen by what its daemon leaves in its folder, and only while it lives."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_reshard.protocol.mps import mps_running

# A process of the daemon's name.
DAEMON = (
    "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'nvidia-cuda-mps', 0, 0, 0); print(flush=True); sys.stdin.read()"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def daemon(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    (folder / "nvidia-cuda-mps-control.pid").write_text(f"{process.pid}\n")
    yield process
    process.kill()
    process.communicate()


def test_none_where_there_is_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mps_running() == ""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(folder / "missing"))
    assert mps_running() == ""


def test_a_living_daemon_is_seen_and_a_dead_ones_file_is_not(daemon: subprocess.Popen[bytes]) -> None:
    assert str(daemon.pid) in mps_running()
    daemon.kill()
    daemon.wait()
    assert mps_running() == ""


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_somebody_who_listens_is_seen(folder: Path, kind: int) -> None:
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(str(folder / "control"))
        listener.listen()
        assert "control" in mps_running()
    assert mps_running() == "", "a socket that nobody listens at is left over"


def test_nvml_is_asked_by_the_name_that_it_knows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are called as the driver tells their UUIDs; NVML wants "GPU-" before them, and says no more than an error."""
    (folder / "pynvml.py").write_text(
        "class NVMLError(Exception): pass\n"
        "def nvmlInit(): pass\n"
        "nvmlShutdown = nvmlInit\n"
        "def nvmlDeviceGetHandleByUUID(uuid):\n"
        "    if uuid != b'GPU-1234-abcd': raise NVMLError(uuid)\n"
        "def nvmlDeviceGetMPSComputeRunningProcesses(handle): return [1, 2]\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert "2 process(es) use GPU 1234-abcd" in mps_running("1234-abcd")
    monkeypatch.delitem(sys.modules, "pynvml")
