"""Copies of strided boxes as one table: what a kernel, a copy engine or numpy needs to carry out a whole plan at once.

Each pair of arrays becomes entries of at most four dims whose elements are as wide as addresses, steps and rows allow (16
bytes at best), and entries are cut into tiles of at most 32 KiB, one for each block of a device's launch. numpy only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from elastic_reshard.arena.strided import Strided
from elastic_reshard.errors import ArenaError

__all__ = ["DIMS", "ENTRY", "TILE", "TILE_BYTES", "CopyTable", "array_at", "extent_of", "host_strided", "run_on_host"]

DIMS: Final = 4
# Measured on an H200, one block a tile: 1,903 GB/s with 16 KiB, 2,030 with 32, 2,005 with 64, of 2,092 by the driver's copy.
TILE_BYTES: Final = 32 << 10
_WIDEST: Final = 16
# Elements of one entry: indices and their magic division stay below 2**31.
_ELEMENTS: Final = 1 << 30
# Rows shorter than this are not worth being cut into an aligned middle and two ends.
_WORTH_PEELING: Final = 128

# The kernel's struct (arena/kernels.py): sizes and steps from the outermost dim to the innermost, steps in bytes; unused
# dims come last. mul and shift divide an index by a size.
ENTRY: Final = np.dtype(
    [
        ("target", "<u8"),
        ("source", "<u8"),
        ("target_step", "<u8", DIMS),
        ("source_step", "<u8", DIMS),
        ("size", "<u4", DIMS),
        ("mul", "<u4", DIMS),
        ("shift", "<u4", DIMS),
        ("width", "<u4"),
        ("dims", "<u4"),
    ]
)
TILE: Final = np.dtype([("entry", "<u4"), ("first", "<u4"), ("count", "<u4"), ("unused", "<u4")])

_TYPES: Final = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
_Dim = tuple[int, int, int]  # size, step in the target, step in the source


class _Form(NamedTuple):
    """A box apart from its addresses, which lie `target` and `source` bytes further on."""

    target: int
    source: int
    width: int
    dims: tuple[_Dim, ...]


def _merged(shape: tuple[int, ...], target: tuple[int, ...], source: tuple[int, ...], item: int) -> list[_Dim]:
    """Dims of a box of bytes, outermost first, the last one the run of bytes that lie together in both."""
    dims = [d for d in zip(shape, target, source, strict=True) if d[0] > 1]
    if any(step < item for _, step, _ in dims):
        raise ArenaError(
            f"a target of shape {shape} and strides {target} has elements that overlap; nothing was copied"
        )
    dims.sort(key=lambda d: (-d[1], -d[2]))
    found: list[_Dim] = []
    for n, t, s in (*dims, (item, 1, 1)):
        if found and found[-1][1] == n * t and found[-1][2] == n * s:
            found[-1] = (found[-1][0] * n, t, s)
        else:
            found.append((n, t, s))
    return found


def _rows(dims: list[_Dim], target: int, source: int) -> Iterator[tuple[int, int, int]]:
    """(begin, bytes, width) of the parts of a row: its aligned middle, where that is worth it, and what is before and after."""
    run = dims[-1][0]
    steps = [step for _, t, s in dims[:-1] for step in (t, s)]
    phase = math.gcd(_WIDEST, target - source, *steps)
    width = math.gcd(phase, run, target)
    head = -target % phase
    body = (run - head) // phase * phase
    if width == phase or body < _WORTH_PEELING:
        yield 0, run, width
        return
    for begin, end in ((0, head), (head, head + body), (head + body, run)):
        if end > begin:
            yield begin, end - begin, math.gcd(phase, end - begin, target + begin)


def _small(dims: tuple[_Dim, ...]) -> Iterator[tuple[int, int, tuple[_Dim, ...]]]:
    """(offset in the target, in the source, dims) of boxes of at most DIMS dims and _ELEMENTS elements."""
    if len(dims) <= DIMS and math.prod(n for n, _, _ in dims) <= _ELEMENTS:
        yield 0, 0, dims
        return
    (n, t, s), rest = dims[0], dims[1:]
    inner = math.prod(m for m, _, _ in rest)
    step = 1 if len(dims) > DIMS else max(1, _ELEMENTS // inner)
    for at in range(0, n, step):
        part = min(step, n - at)
        box = rest if part == 1 else ((part, t, s), *rest)
        for to, frm, small in _small(box):
            yield at * t + to, at * s + frm, small


@lru_cache(maxsize=8192)
def _forms(
    shape: tuple[int, ...], target: tuple[int, ...], source: tuple[int, ...], item: int, aligned: tuple[int, int]
) -> tuple[_Form, ...]:
    """All boxes of a pair. Cells of one tensor differ by their addresses alone, so most of a plan is found here."""
    dims = _merged(shape, target, source, item)
    found = []
    for begin, nbytes, width in _rows(dims, *aligned):
        row = ((nbytes // width, width, width),) if nbytes > width or len(dims) == 1 else ()
        for to, frm, small in _small((*dims[:-1], *row)):
            found.append(_Form(begin + to, begin + frm, width, small or ((1, width, width),)))
    return tuple(found)


def _divisor(size: int) -> tuple[int, int]:
    """(mul, shift): for any n < 2**31, n // size == (n * mul // 2**32 + n) >> shift."""
    shift = (size - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - size)) // size + 1, shift


@lru_cache(maxsize=8192)
def _record(form: _Form) -> tuple[Any, ...]:
    """An entry's fields after its addresses."""
    unused = DIMS - len(form.dims)
    sizes = [n for n, _, _ in form.dims] + [1] * unused
    divisors = [_divisor(n) for n in sizes]
    return (
        [t for _, t, _ in form.dims] + [0] * unused,
        [s for _, _, s in form.dims] + [0] * unused,
        sizes,
        [mul & 0xFFFFFFFF for mul, _ in divisors],
        [shift for _, shift in divisors],
        form.width,
        len(form.dims),
    )


class CopyTable:
    """Copies that are launched together; none may read what another one writes. Made once, launched as often as wanted.

    entries, tiles: arrays of ENTRY and TILE. nbytes: copied in all. hosts: (address, end) of all host memory in it, which a
    device has to reach. uploaded: what devices keep of it, by their id. The table keeps all its memory mapped.
    """

    __slots__ = ("__weakref__", "entries", "hosts", "nbytes", "owners", "targets", "tiles", "uploaded")

    def __init__(self, entries: npt.NDArray[Any], nbytes: int, arrays: Sequence[tuple[Strided, Strided]]) -> None:
        self.entries: Final = entries
        self.tiles: Final = _tiles(entries)
        self.nbytes: Final = nbytes
        self.hosts: Final = _hosts(arrays)
        self.targets: Final = tuple({id(t.owner): t.owner for t, _ in arrays}.values())
        self.owners: Final = (*self.targets, *{id(s.owner): s.owner for _, s in arrays}.values())
        self.uploaded: dict[str, Any] = {}

    @classmethod
    def of(cls, pairs: Sequence[tuple[Strided, Strided]]) -> CopyTable:
        """Of pairs (target, source) of equal shapes and element sizes. Some 10 us a pair. ArenaError if a pair is unlike."""
        records: list[tuple[Any, ...]] = []
        nbytes = 0
        for target, source in pairs:
            if target.shape != source.shape or target.itemsize != source.itemsize:
                raise ArenaError(
                    f"cannot copy {source.shape} of {source.itemsize} bytes to {target.shape} of {target.itemsize} bytes"
                )
            if not target.size:
                continue
            nbytes += target.nbytes
            aligned = target.address % _WIDEST, source.address % _WIDEST
            records.extend(
                (target.address + form.target, source.address + form.source, *_record(form))
                for form in _forms(target.shape, target.strides, source.strides, target.itemsize, aligned)
            )
        return cls(np.array(records, dtype=ENTRY), nbytes, pairs)

    def __len__(self) -> int:
        """Number of entries."""
        return len(self.entries)


def _tiles(entries: npt.NDArray[Any]) -> npt.NDArray[Any]:
    sizes = entries["size"].astype(np.int64).prod(axis=1)
    each = TILE_BYTES // np.maximum(entries["width"].astype(np.int64), 1)
    counts = -(-sizes // each)
    found = np.zeros(int(counts.sum()), dtype=TILE)
    entry = np.repeat(np.arange(len(entries)), counts)
    place = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
    found["entry"] = entry
    found["first"] = place * each[entry]
    found["count"] = np.minimum(each[entry], sizes[entry] - place * each[entry])
    return found


def extent_of(array: Strided) -> tuple[int, int]:
    """(first byte, end) of the memory that an array reaches over, gaps included."""
    if not array.size:
        return array.address, array.address
    steps = ((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
    return array.address, array.address + sum(steps) + array.itemsize


def _hosts(pairs: Sequence[tuple[Strided, Strided]]) -> list[tuple[int, int]]:
    """Ranges of host memory, those that touch or overlap taken together."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(extent_of(a) for a in itertools.chain.from_iterable(pairs) if a.device is None and a.size):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


class _At:
    """Memory by its address, as numpy takes it."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, owner: object):
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": _TYPES[itemsize],
        }
        self.owner = owner


def array_at(strided: Strided) -> npt.NDArray[Any]:
    """Memory that this process can reach as an array, which keeps it mapped: unsigned integers; 16 bytes: complex128."""
    if not strided.size:
        return np.zeros(strided.shape, dtype=_TYPES[strided.itemsize])
    return np.asarray(_At(strided.address, strided.shape, strided.strides, strided.itemsize, strided.owner))


def host_strided(array: npt.NDArray[Any]) -> Strided:
    """A numpy array by its address; keeps it. ArenaError for steps below zero."""
    return Strided(array.ctypes.data, array.shape, array.strides, array.dtype.itemsize, None, array)


def run_on_host(table: CopyTable) -> None:
    """Carry a table out now, by numpy; all its memory must be mapped in this process."""
    for e in table.entries.tolist():
        target, source, target_step, source_step, size, _, _, width, dims = e
        n = int(dims)
        shape = tuple(int(k) for k in size[:n])
        to = _At(target, shape, tuple(int(k) for k in target_step[:n]), width, None)
        frm = _At(source, shape, tuple(int(k) for k in source_step[:n]), width, None)
        np.copyto(np.asarray(to), np.asarray(frm))
