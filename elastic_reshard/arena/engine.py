"""A table's copies as copy engines take them: runs of bytes, and rows at even distances. Pure."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from elastic_reshard.arena.boxes import CopyTable

__all__ = ["EngineOps", "Pitched", "engine_ops"]

_PITCH = 1 << 31  # CUDA takes no larger one


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
    runs: list[tuple[int, int, int]] = []
    pitched: list[Pitched] = []
    for target, source, target_step, source_step, size, _, _, width, count in table.entries.tolist():
        dims = [(int(size[d]), int(target_step[d]), int(source_step[d])) for d in range(count)]
        nbytes = width
        if dims[-1][1:] == (width, width):
            nbytes *= dims.pop()[0]
        rows = None
        if dims and nbytes <= min(dims[-1][1:]) and max(dims[-1][1:]) < _PITCH:
            rows = dims.pop()
        for at in itertools.product(*(range(n) for n, _, _ in dims)):
            to = target + sum(k * t for k, (_, t, _) in zip(at, dims, strict=True))
            frm = source + sum(k * s for k, (_, _, s) in zip(at, dims, strict=True))
            if rows is None:
                runs.append((to, frm, nbytes))
            else:
                pitched.append(Pitched(to, frm, nbytes, *rows))
    return EngineOps(runs, pitched)
