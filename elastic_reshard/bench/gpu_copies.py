"""How fast a device copies, and by which way: `python -m elastic_reshard.bench.gpu_copies`.

Every figure is in GB/s (1e9 bytes, each byte counted once) unless its name says otherwise, and the bytes of every copy that is
timed are checked. Under a minute on a GPU. A step that fails says why in its own place; the others are measured all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from elastic_reshard.arena import Copies, HostArena
from elastic_reshard.arena.boxes import CopyTable, host_strided
from elastic_reshard.arena.copies import raw
from elastic_reshard.arena.device import Device, DeviceMemory, How, Stream
from elastic_reshard.arena.devices import open_device
from elastic_reshard.arena.digests import digest_on_host
from elastic_reshard.arena.strided import Strided
from elastic_reshard.bench.gpu_ways import FAILURES, failure
from elastic_reshard.errors import ArenaError

__all__ = ["measure_copies"]

_WAYS: Final[tuple[How, ...]] = ("kernel", "engine")
_ROWS: Final = (1 << 10, 4 << 10, 16 << 10)
_REPEATS: Final = 5
_ONE_TRY: Final = 0.03  # seconds: a launch is repeated until a try takes about that long
Figures = dict[str, Any]


def measure_copies(device: Device, gib: float = 2.0, tell: Callable[[Figures], None] = lambda _: None) -> Figures:
    """All figures of a device, JSON-ready. gib: GiB of device memory that are used, half of them source, half target. tell:
    called with what there is after each step. Blocks up to a minute; call it while nothing else uses the device."""
    bench = _Bench(device, int(gib * (1 << 29)) // (1 << 20) * (1 << 20))
    found: Figures = {"device": device.id, "kind": device.kind, "bytes": bench.nbytes}
    steps: dict[str, Callable[[], Figures]] = {
        "create_and_map": bench.create_and_map,
        "contiguous": bench.contiguous,
        "strided": bench.strided,
        "many_boxes": bench.many_boxes,
        "publish": bench.publish,
        "host": bench.host,
        "digest": bench.digest,
    }
    for name, step in steps.items():
        begun = time.monotonic()
        try:
            found[name] = step()
        except FAILURES as error:
            found[name] = failure(error)
        tell(found)
        print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    return found


class _Bench:
    """Two large pieces of device memory, the first one's elements told by their index."""

    def __init__(self, device: Device, nbytes: int) -> None:
        if nbytes < 64 << 20:
            raise ArenaError("less than 0.125 GiB of device memory tells nothing; give more")
        self.device, self.nbytes = device, nbytes
        self.stream: Stream = device.stream()
        self.memory: list[DeviceMemory] = [device.scratch(nbytes) for _ in range(2)]
        self.source, self.target = (m.strided(0, (nbytes,), (1,), 1) for m in self.memory)
        bits = self._int32(self.source)
        torch.arange(len(bits), dtype=torch.int32, out=bits)
        self._int32(self.target).zero_()
        self._sync()

    def _sync(self) -> None:
        self.device.current().synchronize()
        self.stream.synchronize()

    def _int32(self, strided: Strided) -> torch.Tensor:
        return self.device.tensor(strided.view(4), torch.int32)

    def seconds(self, launch: Callable[[], None], wait: Callable[[], None] | None = None) -> float:
        """Of a launch: the median of some tries after the first ones."""
        done = wait or self.stream.synchronize
        times = []
        count = 1
        for _ in range(_REPEATS + 2):
            begun = time.perf_counter()
            for _ in range(count):
                launch()
            done()
            times.append((time.perf_counter() - begun) / count)
            count = max(1, min(200, int(_ONE_TRY / max(times[-1], 1e-7))))
        return statistics.median(times[2:])

    def rate(self, launch: Callable[[], None], nbytes: int, wait: Callable[[], None] | None = None) -> float:
        """GB/s of a launch that moves so many bytes."""
        return round(nbytes / self.seconds(launch, wait) / 1e9, 2)

    def launches(self, table: CopyTable, how: How) -> float:
        """GB/s of a table, launched again and again."""
        return self.rate(lambda: self.device.copy(table, self.stream, how), table.nbytes)

    def copies(self, pairs: list[tuple[Strided, Strided]], how: How, wanted: Strided | None = None) -> float:
        """GB/s of a table; every element is compared afterwards, with `wanted` where the one source is not on the device."""
        table = CopyTable.of(pairs)
        self._int32(self.target).zero_()
        self._sync()
        found = self.launches(table, how)
        for target, source in pairs:
            self.same(target, source if wanted is None else wanted)
        return found

    def same(self, target: Strided, source: Strided) -> None:
        types = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        one, two = (self.device.tensor(s, types[s.itemsize]) for s in (target, source))
        if not torch.equal(one, two):
            raise ArenaError(f"a copy of {source.shape} came out wrong: do not use this device")

    def create_and_map(self) -> Figures:
        """Seconds for as much memory as one side has."""
        marks = [time.perf_counter()]
        memory = self.device.create(self.nbytes, "bench")
        marks.append(time.perf_counter())
        mapped = self.device.map(os.dup(memory.fd), memory.nbytes, writable=False)
        marks.append(time.perf_counter())
        mapped.close()
        memory.close()
        marks.append(time.perf_counter())
        names = ("create_s", "map_s", "unmap_both_s")
        found: Figures = {n: round(b - a, 5) for n, a, b in zip(names, marks[:-1], marks[1:], strict=True)}
        found["free_bytes"] = self.device.free()[0]
        return found | {name: getattr(self.device, name, None) for name in ("maps_readonly", "registers_readonly")}

    def contiguous(self) -> Figures:
        """One piece, by each way, and by the driver's and torch's own copies: the limit."""
        pair = [(self.target, self.source)]
        found: Figures = {how: self.copies(pair, how) for how in _WAYS}
        one, two = self._int32(self.target), self._int32(self.source)
        found["torch"] = self.rate(lambda: _quiet(one.copy_(two)), self.nbytes, self.device.current().synchronize)
        if self.device.kind == "cuda":
            found["driver"] = self.rate(self._driver_copy, self.nbytes)
        found["unaligned_kernel"] = self.copies([(self.target[2:-30], self.source[6:-26])], "kernel")
        return found

    def _driver_copy(self) -> None:
        from cuda.bindings import driver

        from elastic_reshard.arena.driver import call

        call(driver.cuMemcpyDtoDAsync, self.target.address, self.source.address, self.nbytes, self.stream.handle)

    def strided(self) -> Figures:
        """A box of half the columns of a matrix to a matrix of its own, by bytes of a row."""
        found: Figures = {}
        for row in _ROWS:
            frm, to = self.matrix(self.source, 2 * row), self.matrix(self.target, row)
            rows = frm.shape[0]
            pairs = [(to[0:rows, :], frm[:, row // 2 : row])]
            found[str(row)] = {how: self.copies(pairs, how) for how in _WAYS}
        frm = self.matrix(self.source, 8192)
        side = min(4096, frm.shape[0])
        square = [(self.matrix(self.target, 8192)[0:side, 0:side], frm[0:side, 0:side].transpose((1, 0)))]
        found["transposed_2_byte_elements"] = {"kernel": self.copies(square, "kernel")}
        return found

    def matrix(self, memory: Strided, row: int) -> Strided:
        """The memory as rows of so many bytes, in elements of 2 bytes."""
        rows = memory.nbytes // row
        return memory[0 : rows * row].view(2).reshape((rows, row // 2))

    def many_boxes(self) -> Figures:
        """Boxes of 64 KiB and of 4 KiB, in one launch."""
        found: Figures = {}
        for each in (64 << 10, 4 << 10):
            count = min(8192, self.nbytes // each // 2)
            places = [(i * 2 * each, (i * 7919 % count) * 2 * each) for i in range(count)]
            pairs = [(self.target[a : a + each], self.source[b : b + each]) for a, b in places]
            begun = time.perf_counter()
            CopyTable.of(pairs)
            build = (time.perf_counter() - begun) / count * 1e6
            found[str(each)] = {how: self.copies(pairs, how) for how in _WAYS}
            found[str(each)] |= {"boxes": count, "build_us_a_box": round(build, 2)}
        small = CopyTable.of([(self.target[0:1024], self.source[0:1024])])
        for how in _WAYS:
            found[f"launch_us_{how}"] = round(self.seconds(lambda: self.device.copy(small, self.stream, how)) * 1e6, 1)  # noqa: B023
        return found

    def publish(self) -> Figures:
        """256 tensors into a slot: bits as they are by the table and by torch, float32 to bfloat16 by torch."""
        each = self.nbytes // 256 // 4096 * 4096
        found: Figures = {}
        # Finite numbers: torch's conversions change what is in a NaN, also from bfloat16 to bfloat16.
        self._int32(self.source).bitwise_and_(0x3FFF3FFF)
        same = [self.piece(self.source, i * each, each, torch.bfloat16) for i in range(256)]
        found["bfloat16_foreach"], found["bfloat16_table"] = (
            self.published(same, each, cast=True),
            self.published(same, each),
        )
        masters = [self.piece(self.source, i * each, each, torch.float32) for i in range(256)]
        for i, tensor in enumerate(masters):
            torch.arange(i, i + tensor.numel(), dtype=torch.float32, out=tensor)
        # It reads twice what it writes: a byte counts once for both, so three halves of what is written.
        found["float32_foreach"] = round(1.5 * self.published(masters, each // 2, cast=True), 2)
        bits = self._int32(self.source)
        torch.arange(len(bits), dtype=torch.int32, out=bits)
        self._sync()
        return found

    def published(self, sources: list[torch.Tensor], each: int, *, cast: bool = False) -> float:
        """GB/s written of a publish of tensors to bfloat16; every element is compared afterwards."""
        self._int32(self.target).zero_()
        targets = [self.piece(self.target, i * each, each, torch.bfloat16) for i in range(len(sources))]
        copies = Copies()
        for target, source in zip(targets, sources, strict=True):
            if cast:
                copies.cast(target, source)
            else:
                copies.add(raw(target), raw(source))
        self._sync()
        found = self.rate(lambda: copies.run(self.stream), copies.nbytes)
        self.agree(targets, sources)
        return found

    def piece(self, memory: Strided, at: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self.device.tensor(memory[at : at + nbytes].view(dtype.itemsize), dtype)

    def agree(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            wanted = source.to(torch.bfloat16)
            if not torch.equal(target.view(torch.int16), wanted.view(torch.int16)):
                raise ArenaError(f"a tensor of {source.numel()} {source.dtype} was published wrong")

    def host(self) -> Figures:
        """To and from host memory that is registered."""
        nbytes = min(self.nbytes, 1 << 30)
        arena = HostArena(nbytes, "bench")
        arena.bytes[::4096] = 0
        begun = time.perf_counter()
        registered = self.device.host(arena.bytes)
        found: Figures = {"register_s_a_gib": round((time.perf_counter() - begun) * (1 << 30) / nbytes, 4)}
        try:
            found |= self._by_host(arena.bytes)
        finally:
            self._sync()
            begun = time.perf_counter()
            registered.close()
            found["unregister_s_a_gib"] = round((time.perf_counter() - begun) * (1 << 30) / nbytes, 4)
            arena.close()
        return found

    def _by_host(self, memory: npt.NDArray[np.uint8]) -> Figures:
        found: Figures = {}
        near, source, target = host_strided(memory), self.source[0 : len(memory)], self.target[0 : len(memory)]
        for how in _WAYS:
            memory[:] = 0
            table = CopyTable.of([(near, source)])
            found[f"to_host_{how}"] = self.launches(table, how)
            if not torch.equal(torch.from_numpy(memory), self.device.tensor(source, torch.uint8).cpu()):
                raise ArenaError(f"what came to host memory by {how} is wrong")
            found[f"from_host_{how}"] = self.copies([(target, near)], how, source)
            near_box, source_box, target_box = (self.matrix(m, 8192)[:, 0:2048] for m in (near, source, target))
            memory[:] = 0
            table = CopyTable.of([(near_box, source_box)])
            found[f"to_host_rows_4096_{how}"] = self.launches(table, how)
            found[f"from_host_rows_4096_{how}"] = self.copies([(target_box, near_box)], how, source_box)
        return found

    def digest(self) -> Figures:
        """Of pieces of 1 MiB: all bytes, and a window of each."""
        count = self.nbytes >> 20
        pieces = [self.source[i << 20 : (i + 1) << 20] for i in range(count)]
        held = self.device.scratch(8 * count)
        out = held.strided(0, (count,), (8,), 8)
        found: Figures = {"pieces": count}
        for full in (True, False):
            seconds = self.seconds(lambda: self.device.digest(pieces, 7, full, out, self.stream))  # noqa: B023
            said = self.device.read(out, self.stream)
            for i in (0, count // 2, count - 1):
                bits = torch.arange(i << 18, (i + 1) << 18, dtype=torch.int32).numpy()
                if int(digest_on_host([host_strided(bits)], 7, full, [i])[0]) != int(said[i]):
                    raise ArenaError(f"the digest of piece {i} (full: {full}) is not the host's")
            if full:
                found["full"] = round(self.nbytes / seconds / 1e9, 2)
            else:
                found["sampled_us_a_piece"] = round(seconds / count * 1e6, 3)
        return found


def _quiet(_: object) -> None:
    """A launch gives nothing."""


def main() -> None:
    """Print the figures of one device as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="device memory that is used")
    parser.add_argument(
        "--pretend", action="store_true", help="a device that is none: tests the program, its figures tell nothing"
    )
    chosen = parser.parse_args()
    if chosen.pretend:
        device = open_device("pretend", "pretend:0")
    else:
        from elastic_reshard.arena.cuda import open_index

        device = open_index(0)
    print(json.dumps(measure_copies(device, chosen.gib), indent=1))


if __name__ == "__main__":
    main()
