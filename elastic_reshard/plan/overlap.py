"""Exact intersections of two sets of boxes, by sweeping sorted boundaries: never pairwise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastic_reshard.layout.table import Int

__all__ = ["intersecting", "ragged"]


def ragged(counts: Int, starts: Int | None = None) -> tuple[Int, Int]:
    """For row i, counts[i] indices starts[i], starts[i]+1, ...: (row of each, index of each)."""
    counts = np.asarray(counts, dtype=np.int64)
    row = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    index = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    if starts is not None:
        index += np.repeat(starts, counts)
    return row, index


def _count(lo_a: Int, hi_a: Int, lo_b: Int, hi_b: Int) -> int:
    """Number of overlapping pairs of 1-D intervals, without listing them."""
    begun = np.searchsorted(np.sort(lo_b), hi_a, side="left")
    ended = np.searchsorted(np.sort(hi_b), lo_a, side="right")
    return int((begun - ended).sum())


def _starts_within(lo_a: Int, hi_a: Int, lo_b: Int, side: str) -> tuple[Int, Int]:
    """Pairs (i, j) where lo_b[j] lies in [lo_a[i], hi_a[i]) (side "left") or in (lo_a[i], hi_a[i]) ("right")."""
    order = np.argsort(lo_b, kind="stable")
    ordered = lo_b[order]
    first = np.searchsorted(ordered, lo_a, side="left" if side == "left" else "right")
    last = np.searchsorted(ordered, hi_a, side="left")
    i, at = ragged(np.maximum(last - first, 0), first)
    return i, order[at]


def intersecting(lo_a: Int, hi_a: Int, lo_b: Int, hi_b: Int) -> tuple[Int, Int]:
    """All (i, j) for which box a[i] and box b[j] have a common element, sorted by (j, i). No box may be empty.

    Bounds are int64 [boxes, dims]. Sweeps the dim with the fewest overlapping pairs and filters by the others: two
    intervals overlap when one starts inside the other, so each pair is found exactly once. O(n log n + candidates).
    """
    dims = lo_a.shape[1]
    if dims == 0 or not len(lo_a) or not len(lo_b):
        i, j = np.indices((len(lo_a), len(lo_b)), dtype=np.int64).reshape(2, -1)
    else:
        candidates = [_count(lo_a[:, d], hi_a[:, d], lo_b[:, d], hi_b[:, d]) for d in range(dims)]
        d = int(np.argmin(candidates))
        i1, j1 = _starts_within(lo_a[:, d], hi_a[:, d], lo_b[:, d], "left")
        j2, i2 = _starts_within(lo_b[:, d], hi_b[:, d], lo_a[:, d], "right")
        i, j = np.concatenate([i1, i2]), np.concatenate([j1, j2])
        kept: npt.NDArray[np.bool_] = np.ones(len(i), dtype=bool)
        for other in range(dims):
            if other != d:
                kept &= (lo_a[i, other] < hi_b[j, other]) & (lo_b[j, other] < hi_a[i, other])
        i, j = i[kept], j[kept]
    order = np.lexsort((i, j))
    return i[order], j[order]
