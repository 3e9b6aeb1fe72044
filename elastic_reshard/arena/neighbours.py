"""Whose memory a GPU can map, and the NVLink fabric that it is in: by NVML, which also sees GPUs that this process may not use.

No CUDA context is made. pynvml is imported only where it is asked for.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["FABRIC_STATES", "Neighbours", "fabric_of", "joined", "near_by_nvml", "reads"]

# NVML's nvmlGpuFabricState: not supported, not started, in progress, completed.
FABRIC_STATES: Final = {0: "", 1: "not started", 2: "in progress", 3: "completed"}
_COMPLETED: Final = "completed"
_READ: Final = 0  # NVML_P2P_CAPS_INDEX_READ, which pynvml has as a tuple


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Ids of other devices of this machine, as tables name them: peers, whose memory this one can map, and apart, whose memory
    it can't. Who is in neither is not known. cluster, clique: of the NVLink fabric once it is completed; "" and 0 else."""

    peers: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    cluster: str = ""
    clique: int = 0


def joined(told: Iterable[Mapping[str, bool]], cluster: str = "", clique: int = 0) -> Neighbours:
    """Of what was told of other devices (whether their memory can be mapped); where that differs the last word counts."""
    known: dict[str, bool] = {}
    for said in told:
        known |= said
    return Neighbours(
        tuple(sorted(d for d, can in known.items() if can)), tuple(sorted(d for d, can in known.items() if not can)),
        cluster, clique,
    )  # fmt: skip


def near_by_nvml(identity: str) -> tuple[dict[str, bool], str, int]:
    """(whether it can map the memory of each other GPU of the machine, cluster, clique) of the GPU of that UUID (without
    "GPU-"); ({}, "", 0) where there is no NVML to ask. Some ms a GPU."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return {}, "", 0
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver here, or one that does not answer
        return {}, "", 0
    try:
        return _near(nvml, identity)
    except nvml.NVMLError:  # a slice of a GPU, or a driver that does not say
        return {}, "", 0
    finally:
        nvml.nvmlShutdown()


def _near(nvml: Any, identity: str) -> tuple[dict[str, bool], str, int]:
    handles = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        said = nvml.nvmlDeviceGetUUID(handle)
        uuid = said.decode() if isinstance(said, bytes) else said
        handles[uuid.lower().removeprefix("gpu-")] = handle
    mine = handles.pop(identity, None)
    if mine is None:
        return {}, "", 0
    state, cluster, clique = fabric_of(nvml, mine)
    found = {uuid: can for uuid, handle in handles.items() if (can := reads(nvml, mine, handle)) is not None}
    return (found, cluster, clique) if state == _COMPLETED else (found, "", 0)


def reads(nvml: Any, one: Any, other: Any) -> bool | None:
    """Whether the first can read the second's memory, by their handles; None if the driver does not say."""
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, _READ)
    except nvml.NVMLError:
        return None
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def fabric_of(nvml: Any, handle: Any) -> tuple[str, str, int]:
    """(state, cluster, clique) of a GPU, by its handle; ("", "", 0) outside a fabric that spans machines."""
    if not hasattr(nvml, "nvmlDeviceGetGpuFabricInfoV"):
        return "", "", 0
    info = nvml.c_nvmlGpuFabricInfoV_t()
    try:
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except nvml.NVMLError:  # a driver or GPU that has none
        return "", "", 0
    cluster = bytes(ctypes.cast(info.clusterUuid, ctypes.POINTER(ctypes.c_ubyte * 16)).contents)
    state = FABRIC_STATES.get(int(info.state), f"unknown ({int(info.state)})")
    # A single machine reports a completed fabric with no cluster.
    if state == _COMPLETED and not any(cluster):
        return "", "", 0
    return state, cluster.hex(), int(info.cliqueId)
