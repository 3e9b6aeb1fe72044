"""One section of `bench gpu`, in a process of its own: `python -m elastic_reshard.bench.gpu_part NAME SETUP END`; END: of
time.monotonic, which is one clock for all processes of a machine."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import replace
from importlib import metadata
from typing import Any, Final, NamedTuple

from elastic_reshard.bench.gpu_setup import GpuSetup
from elastic_reshard.bench.guarded import print_result, until_told
from elastic_reshard.errors import ProtocolError, ReshardError
from elastic_reshard.protocol.mps import mps_running

__all__ = ["OWN", "SECTIONS", "Time", "run"]


class Time(NamedTuple):
    """Seconds of a section. most: that it may take on one GPU, and twice as many on several; one, several: that are left for it
    by those before it."""

    most: float
    one: float
    several: float


# By importance. What is left for each is what it needs, by its measured time or, where there is none, by estimate, and some.
SECTIONS: Final = {
    "environment": Time(25.0, 11.0, 11.0),
    "limits": Time(40.0, 30.0, 30.0),
    "pulls": Time(50.0, 24.0, 24.0),
    "model": Time(80.0, 68.0, 68.0),
    "share": Time(150.0, 88.0, 88.0),
    "domains": Time(120.0, 66.0, 80.0),
    "recover": Time(100.0, 66.0, 76.0),
    "survive": Time(60.0, 50.0, 60.0),
    "m2n": Time(110.0, 80.0, 50.0),
}
OWN: Final = 0.93  # of its time, after which what it measures ends by itself, before it is ended
_PACKAGES: Final = ("torch", "cuda-bindings", "nccl4py", "nccl-extensions", "nvidia-nccl-cu13", "numpy")


def run(name: str, setup: GpuSetup) -> dict[str, Any]:
    """A section's figures. Imports what it needs only here."""
    if name == "environment":
        return _environment(setup)
    if name == "limits":
        return _limits(setup)
    if name == "pulls":
        from elastic_reshard.bench import gpu_pulls

        return gpu_pulls.measure(setup)
    if name in ("model", "survive"):
        from elastic_reshard.bench import gpu_model

        return gpu_model.measure(setup) if name == "model" else gpu_model.survive(setup)
    if name == "m2n":
        from elastic_reshard.bench import gpu_m2n

        return gpu_m2n.measure(setup)
    if name == "share":
        from elastic_reshard.bench import gpu_share

        return gpu_share.measure(setup)
    if name in ("domains", "recover"):
        from elastic_reshard.bench import gpu_domains

        return gpu_domains.measure(setup) if name == "domains" else gpu_domains.recover(setup)
    raise ProtocolError(f"bench gpu has no section {name!r}; known are {', '.join(SECTIONS)}")


def _environment(setup: GpuSetup) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "mps": mps_running(),
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    if setup.device == "cuda":
        count = torch.cuda.device_count()
        found["gpus"] = [torch.cuda.get_device_name(n) for n in range(count)]
        found["peer access"] = [
            [a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)
        ]
        free, total = torch.cuda.mem_get_info()
        found |= {"free": free, "total": total, "cuda": torch.version.cuda}
        found["driver"] = _driver()
        found["registers host memory read-only"] = _registers_readonly()
    return found


def _driver() -> str:
    try:
        import pynvml
    except ImportError:
        return "unknown: no pynvml"
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except (pynvml.NVMLError, RuntimeError, OSError) as error:
        return f"unknown: {error}"


def _registers_readonly() -> Any:
    from elastic_reshard.bench.gpu_pulls import device_at
    from elastic_reshard.bench.gpu_rank import Place

    try:
        device = device_at(Place("cuda", 0))
    except (ReshardError, RuntimeError) as error:
        return f"unknown: {error}"
    return getattr(device, "registers_readonly", None)


def _limits(setup: GpuSetup) -> dict[str, Any]:
    from elastic_reshard.bench import gpu_copies, gpu_pulls
    from elastic_reshard.bench.gpu_rank import Place

    device = gpu_pulls.device_at(Place(setup.device, 0))
    return gpu_copies.measure_copies(device, max(0.2, 2.0 * setup.scale), print_result)


def main() -> None:
    """The process."""
    until_told()
    setup = GpuSetup(**json.loads(sys.argv[2]))
    left = float(sys.argv[3]) - time.monotonic()
    print_result(run(sys.argv[1], replace(setup, seconds=max(1.0, left))))


if __name__ == "__main__":
    main()
