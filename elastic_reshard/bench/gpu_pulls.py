"""The bare copies, in one process and without any protocol: a rank's pulls by kernels, by copy engines and as a CUDA graph,
beside plain device-to-device copies of as many bytes; many small tensors; digests; registering host memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from elastic_reshard.arena.boxes import CopyTable
from elastic_reshard.arena.device import Device, DeviceMemory
from elastic_reshard.arena.devices import device_of, strided_of
from elastic_reshard.arena.strided import Strided, contiguous_strides
from elastic_reshard.bench import gpu_values
from elastic_reshard.bench.gpu_rank import Place, empty
from elastic_reshard.bench.gpu_setup import GpuSetup, layers_of, many_small, model_layouts
from elastic_reshard.bench.gpu_ways import FAILURES, Tell, Way, failure, run_ways
from elastic_reshard.bench.synthetic import Layouts
from elastic_reshard.errors import ReshardError
from elastic_reshard.layout import Box, ModelLayout
from elastic_reshard.layout.dtensor import torch_dtype

__all__ = ["device_at", "measure"]

_ALIGN = 256
_VERSION = 3


def measure(setup: GpuSetup) -> dict[str, Any]:
    """Everything of this section; blocks for some seconds."""
    torch.set_num_threads(1)
    place = Place(setup.device, 0)
    device = device_at(place)
    layouts, told = model_layouts(setup)
    found: dict[str, Any] = {"model": told, "of rank": 0}
    small = many_small(setup)
    ways: dict[str, Way] = {
        "full list": lambda tell: {"of": layers_of(told)} | _pulls(setup, device, place, layouts, tell),
        "many small": lambda tell: _pulls(setup, device, place, small, tell) | {"tensors": len(small.destination)},
        "register host": lambda _: _register(device, setup.nbytes(2 << 30)),
    }
    return run_ways(setup.seconds, ways, found)


def device_at(place: Place) -> Device:
    """The device of a place. ReshardError where there is none."""
    found = device_of(empty(place, (1024,), torch.uint8))
    if found is None:
        raise ReshardError(f"a {place.device} tensor is on no device; nothing was measured")
    return found


class _Sources:
    """What all source ranks hold, in one allocation of a device."""

    def __init__(self, device: Device, layout: ModelLayout) -> None:
        at, rows = 0, []
        ranks = sorted({rank for t in layout.values() for rank in t.mesh.ranks})
        for rank in ranks:
            for name, t in layout.items():
                shape = t.local_shape(rank)
                if shape is None:
                    continue
                item = torch_dtype(t.dtype).itemsize
                rows.append((rank, name, at, shape, item))
                at += -(-item * int(np.prod(shape, dtype=np.int64)) // _ALIGN) * _ALIGN
        self.memory: DeviceMemory = device.create(max(at, 1), "bench sources")
        self.arrays = {
            (rank, name): self.memory.strided(offset, shape, contiguous_strides(shape, item), item)
            for rank, name, offset, shape, item in rows
        }
        for rank in ranks:
            mine = {n: device.tensor(a, torch_dtype(layout[n].dtype)) for (r, n), a in self.arrays.items() if r == rank}
            gpu_values.fill(layout, mine, rank, _VERSION)


def _pairs(
    layouts: Layouts, sources: _Sources, targets: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Strided, Strided]]:
    """What destination rank 0 pulls: each box from the first rank that holds it."""
    for name, tensor in targets.items():
        have, want, target = layouts.source[name], layouts.destination[name], strided_of(tensor)
        held: dict[Box, tuple[int, tuple[int, ...]]] = {}
        for rank in have.mesh.ranks:
            for box, at in have.boxes(rank):
                held.setdefault(box, (rank, at))
        for mine, local in want.boxes(0):
            for box, (rank, at) in held.items():
                shared = box.intersect(mine)
                if shared is not None and shared.numel:
                    yield target[_at(shared, mine, local)], sources.arrays[rank, name][_at(shared, box, at)]


def _at(box: Box, outer: Box, local: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(
        slice(a - o + base, b - o + base) for a, b, o, base in zip(box.lo, box.hi, outer.lo, local, strict=True)
    )


def _pulls(setup: GpuSetup, device: Device, place: Place, layouts: Layouts, tell: Tell) -> dict[str, Any]:
    sources = _Sources(device, layouts.source)
    shapes = {n: (t.local_shape(0), t.dtype) for n, t in layouts.destination.items()}
    targets = {n: empty(place, s, torch_dtype(d)) for n, (s, d) in shapes.items() if s is not None}
    begun = time.monotonic()
    table = CopyTable.of(list(_pairs(layouts, sources, targets)))
    made = time.monotonic() - begun
    stream, repeats = device.stream(), setup.repeats(20)
    nbytes = sum(t.numel() * t.element_size() for t in targets.values())
    flat, other = (empty(place, (nbytes,), torch.uint8) for _ in range(2))
    limit = _best(lambda: flat.copy_(other), repeats, setup.device)
    found: dict[str, Any] = {
        "bytes": nbytes, "entries": len(table), "table made ms": round(1e3 * made, 1),
        "device to device GB/s": round(nbytes / limit / 1e9, 1), "wrong": [],
    }  # fmt: skip
    torch.cuda.synchronize() if setup.device == "cuda" else None

    def launched(how: Any) -> Callable[[], None]:
        def run() -> None:
            device.copy(table, stream, how)
            stream.synchronize()

        return run

    ways: dict[str, Callable[[], None]] = {how: launched(how) for how in ("kernel", "engine")}
    if setup.device == "cuda":
        with _reported(found, "graph"):
            ways["graph"] = _graph(device, table)
    else:
        found["graph"] = {"skipped": "CUDA graphs need a GPU"}
    for name, run in ways.items():
        gpu_values.poison(targets)
        _synchronize(setup.device)
        with _reported(found, name):
            run()
            wrong = gpu_values.wrong(layouts.destination, targets, 0, _VERSION)
            found["wrong"] += [f"{name}: {n}" for n in wrong[:5]]
            seconds = _best(run, repeats, setup.device)
            rate, share = round(nbytes / seconds / 1e9, 1), round(limit / seconds, 3)
            found[name] = {"ms": round(1e3 * seconds, 3), "GB/s": rate, "share": share}
        tell(found)
    with _reported(found, "digest"):
        found["digest of all"] = _digests(device, targets, repeats)
    sources.memory.close()
    return found


@contextlib.contextmanager
def _reported(found: dict[str, Any], name: str) -> Iterator[None]:
    """A way that fails is reported, and the others go on."""
    try:
        yield
    except FAILURES as error:
        found[name] = failure(error)


def _graph(device: Device, table: CopyTable) -> Callable[[], None]:
    device.prepare(table)  # uploads it, which a capture can't
    device.copy(table, device.current(), "kernel")  # a kernel's first launch loads it, which a capture may not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # What other threads of this process ask the driver meanwhile is none of the capture's business.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        device.copy(table, device.current(), "kernel")

    def run() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return run


def _synchronize(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def _best(run: Callable[[], object], repeats: int, kind: str) -> float:
    """Median seconds, warm."""
    run()
    _synchronize(kind)
    took = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        _synchronize(kind)
        took.append(time.perf_counter() - begun)
    return sorted(took)[len(took) // 2]


def _digests(device: Device, targets: Mapping[str, torch.Tensor], repeats: int) -> dict[str, Any]:
    pieces = [strided_of(t).flat() for t in targets.values()]
    words = device.scratch(8 * len(pieces))
    out, stream, found = words.strided(0, (len(pieces),), (8,), 8), device.stream(), {}
    for name, full in (("sampled", False), ("full", True)):
        took = []
        for _ in range(max(2, repeats // 4)):
            begun = time.perf_counter()
            device.digest(pieces, 1, full, out, stream)
            stream.synchronize()
            took.append(time.perf_counter() - begun)
        found[f"{name} ms"] = round(1e3 * sorted(took)[len(took) // 2], 3)
    words.close()
    return found


def _register(device: Device, nbytes: int) -> dict[str, Any]:
    """Page-locking of host memory whose pages are there already, as of an arena that was touched."""
    memory = np.ones(nbytes, dtype=np.uint8)
    begun = time.perf_counter()
    held = device.host(memory)
    locked = time.perf_counter()
    held.close()
    return {
        "GiB": round(nbytes / 2**30, 2), "s": round(locked - begun, 4), "ms a GiB":
        round(1e3 * (locked - begun) * 2**30 / nbytes, 1), "unregister s": round(time.perf_counter() - locked, 4),
    }  # fmt: skip
