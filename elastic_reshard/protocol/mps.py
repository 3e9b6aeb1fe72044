"""Whether CUDA work of this process would go through CUDA MPS, under which a killed mover takes members with it (measured)."""

from __future__ import annotations

import os
import socket
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

__all__ = ["WHY", "mps_running"]

_FOLDER: Final = "/tmp/nvidia-mps"  # the driver's own default
_VARIABLE: Final = "CUDA_MPS_PIPE_DIRECTORY"
_DAEMON: Final = "nvidia-cuda-mps"
WHY: Final = (
    "a process that is killed under CUDA MPS takes others of its GPU with it, and movers are meant to be killed: end it (echo "
    "quit | nvidia-cuda-mps-control), or give this job a GPU, or a $CUDA_MPS_PIPE_DIRECTORY, without it"
)


def mps_running(gpu: str = "") -> str:
    """What was found of a running MPS, "" if nothing was. gpu: a UUID (without "GPU-") whose MPS clients are asked for too,
    where pynvml is there. Takes a millisecond; some more with pynvml."""
    folder = Path(os.environ.get(_VARIABLE) or _FOLDER)
    return _daemon(folder) or _control(folder) or (_clients(gpu) if gpu else "")


def _daemon(folder: Path) -> str:
    """A control daemon that wrote down its pid, and lives."""
    path = folder / f"{_DAEMON}-control.pid"
    try:
        pid = int(path.read_text().strip())
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, ValueError):
        return ""
    return f"{path} names process {pid}, which is {name}" if name.startswith(_DAEMON) else ""


def _control(folder: Path) -> str:
    """Somebody who listens where clients ask for a server."""
    path = folder / "control"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as packets, socket.socket(socket.AF_UNIX) as stream:
        for sock in (packets, stream):
            sock.settimeout(0.2)
            try:
                sock.connect(str(path))
            except OSError:  # nobody, or no such kind of socket
                continue
            return f"somebody listens at {path}"
    return ""


def _clients(gpu: str) -> str:
    """Processes of the GPU that are clients of a server, by NVML's word."""
    if find_spec("pynvml") is None:
        return ""
    nvml: Any = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver here: then there is no MPS either
        return ""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu}".encode())
        found = nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
    except nvml.NVMLError:  # a driver that does not say
        return ""
    finally:
        nvml.nvmlShutdown()
    return f"{len(found)} process(es) use GPU {gpu} through it" if found else ""
