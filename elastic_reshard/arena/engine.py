"""A table's copies as copy engines take them: runs of bytes, and rows at even distances. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from elastic_reshard.arena.boxes import CopyTable

__all__ = ["EngineOps", "Pitched", "engine_ops", "engine_part"]

_PITCH = 1 << 31  # CUDA takes no larger one
_Dim = tuple[int, int, int]  # size, step in the target, step in the source


class Pitched(NamedTuple):
    """`rows` rows of `nbytes` bytes, so many bytes apart."""

    target: int
    source: int
    nbytes: int
    rows: int
    target_pitch: int
    source_pitch: int


class EngineOps(NamedTuple):
    """All copies of a table. runs: (target, source, bytes)."""

    runs: list[tuple[int, int, int]]
    pitched: list[Pitched]

    def __len__(self) -> int:
        return len(self.runs) + len(self.pitched)


def engine_ops(table: CopyTable) -> EngineOps:
    """What engines have to do. Boxes whose elements lie apart one by one give an operation a row of a few bytes: slow."""
    ops = EngineOps([], [])
    for entry in table.entries.tolist():
        _add(ops, entry)
    return ops


def engine_part(table: CopyTable, ranges: Sequence[tuple[int, int]], least: int) -> tuple[EngineOps, CopyTable | None]:
    """(what engines do, what is left of the table for a kernel, None if nothing is): engines take the boxes whose source begins
    in one of the ranges of addresses, where that makes operations of `least` bytes on average. The table keeps the memory of
    both."""
    ops, rest, nbytes = EngineOps([], []), [], table.nbytes
    for number, entry in enumerate(table.entries.tolist()):
        moved = math.prod(map(int, entry[4])) * int(entry[7])
        far = moved >= least and any(low <= entry[1] < high for low, high in ranges)
        if far and moved >= least * _count(entry):
            _add(ops, entry)
            nbytes -= moved
        else:
            rest.append(number)
    return ops, CopyTable(table.entries[rest], nbytes, ()) if rest else None


def _cut(entry: tuple[Any, ...]) -> tuple[int, _Dim | None, list[_Dim]]:
    """(bytes of a row, the dim of its rows if they are one operation, the dims of which each index is one)."""
    _, _, target_step, source_step, size, _, _, width, count = entry
    dims = [(int(size[d]), int(target_step[d]), int(source_step[d])) for d in range(count)]
    nbytes = int(width)
    if dims[-1][1:] == (width, width):
        nbytes *= dims.pop()[0]
    rows = None
    if dims and nbytes <= min(dims[-1][1:]) and max(dims[-1][1:]) < _PITCH:
        rows = dims.pop()
    return nbytes, rows, dims


def _count(entry: tuple[Any, ...]) -> int:
    """Operations of an entry; its thousands are not made to be counted."""
    return math.prod(n for n, _, _ in _cut(entry)[2])


def _add(ops: EngineOps, entry: tuple[Any, ...]) -> None:
    target, source = entry[0], entry[1]
    nbytes, rows, dims = _cut(entry)
    for at in itertools.product(*(range(n) for n, _, _ in dims)):
        to = target + sum(k * t for k, (_, t, _) in zip(at, dims, strict=True))
        frm = source + sum(k * s for k, (_, _, s) in zip(at, dims, strict=True))
        if rows is None:
            ops.runs.append((to, frm, nbytes))
        else:
            ops.pitched.append(Pitched(to, frm, nbytes, *rows))
