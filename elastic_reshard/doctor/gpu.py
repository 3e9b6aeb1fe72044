"""What NVML and the NCCL library say of this machine's GPUs. No CUDA context is made, so nothing is disturbed."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any, Final

from elastic_reshard.arena.neighbours import fabric_of, reads
from elastic_reshard.doctor.facts import Gpu, Gpus

__all__ = ["gather_gpus", "nccl_version"]

_MPS: Final = "nvidia-cuda-mps"  # the kernel keeps 15 characters of a name


def gather_gpus() -> Gpus:
    """Count, identities, driver, MPS, who reads whose memory, fabric. Blocks for up to a second on machines with many GPUs."""
    mps = _mps()
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/dev/nvidiactl").exists():
        return Gpus(mps=mps)
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Gpus(
            absent="there is an NVIDIA driver, but no nvidia-ml-py to ask it (pip install nvidia-ml-py)", mps=mps
        )
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus(absent=f"NVML does not begin: {error}", mps=mps)
    try:
        return _ask(nvml, mps)
    except nvml.NVMLError as error:
        return Gpus(absent=f"NVML does not answer: {error}", mps=mps)
    finally:
        nvml.nvmlShutdown()


def _ask(nvml: Any, mps: tuple[int, ...]) -> Gpus:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return Gpus(
        "", _text(nvml.nvmlSystemGetDriverVersion()), f"{version // 1000}.{version % 1000 // 10}",
        tuple(_gpu(nvml, handle) for handle in handles), _apart(nvml, handles), mps,
    )  # fmt: skip


def _gpu(nvml: Any, handle: Any) -> Gpu:
    try:
        mig = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:  # a kind of GPU that has none
        mig = False
    fabric, cluster, clique = fabric_of(nvml, handle)
    return Gpu(
        _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)),
        int(nvml.nvmlDeviceGetMemoryInfo(handle).total), mig, fabric, cluster, clique,
    )  # fmt: skip


def _apart(nvml: Any, handles: list[Any]) -> tuple[tuple[int, int], ...]:
    """Pairs that can't read each other's memory, both ways, as far as the driver says."""
    pairs = [(a, b) for a in range(len(handles)) for b in range(a + 1, len(handles))]
    return tuple(
        (a, b)
        for a, b in pairs
        if reads(nvml, handles[a], handles[b]) is False or reads(nvml, handles[b], handles[a]) is False
    )


def _mps() -> tuple[int, ...]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                command = Path("/proc", name, "comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            found += [int(name)] if command.startswith(_MPS) else []
    return tuple(sorted(found))


def _text(said: str | bytes) -> str:
    return said.decode() if isinstance(said, bytes) else said


def nccl_version() -> str:
    """What the installed NCCL library says it is: 2.30.7; "" if there is none to ask."""
    for path in _libraries():
        try:
            library = ctypes.CDLL(path)
            number = ctypes.c_int()
            if library.ncclGetVersion(ctypes.byref(number)) == 0:
                return _version(number.value)
        except (OSError, AttributeError):  # not there, or no NCCL
            continue
    return ""


def _version(number: int) -> str:
    # 2.9 and later count 10000 a major version.
    if number >= 10_000:
        return f"{number // 10_000}.{number % 10_000 // 100}.{number % 100}"
    return f"{number // 1000}.{number % 1000 // 100}.{number % 100}"


def _libraries() -> list[str]:
    """Those of pip's packages first, which torch loads; then the system's."""
    found = []
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found += [str(file.locate()) for file in files if file.name == "libnccl.so.2"]
    return [*found, "libnccl.so.2"]
