"""Sweeping sorted boundaries finds exactly the pairs that comparing every box with every other finds."""

from __future__ import annotations

import itertools
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.layout.table import Int
from elastic_reshard.plan.overlap import intersecting, ragged
from tests.plan.strategies import examples


def _pairwise(lo_a: Int, hi_a: Int, lo_b: Int, hi_b: Int) -> list[tuple[int, int]]:
    return [
        (i, j)
        for j in range(len(lo_b))
        for i in range(len(lo_a))
        if all(lo_a[i, d] < hi_b[j, d] and lo_b[j, d] < hi_a[i, d] for d in range(lo_a.shape[1]))
    ]


@st.composite
def _boxes(draw: st.DrawFn, dims: int, scale: int) -> tuple[Int, Int]:
    n = draw(st.integers(0, 12))
    lo = [[draw(st.integers(0, 9)) for _ in range(dims)] for _ in range(n)]
    extent = [[draw(st.integers(1, 6)) for _ in range(dims)] for _ in range(n)]
    a = np.array(lo, dtype=np.int64).reshape(n, dims)
    return a * scale, (a + np.array(extent, dtype=np.int64).reshape(n, dims)) * scale


@given(data=st.data(), dims=st.integers(0, 4), scale=st.sampled_from([1, 1 << 33]))
@examples(300)
def test_any_boxes_also_overlapping_and_repeated_ones(data: st.DataObject, dims: int, scale: int) -> None:
    a, b = data.draw(_boxes(dims, scale)), data.draw(_boxes(dims, scale))
    i, j = intersecting(*a, *b)
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == _pairwise(*a, *b)


def test_all_intervals_of_a_short_line() -> None:
    intervals = np.array([(a, b) for a, b in itertools.combinations(range(7), 2)], dtype=np.int64)
    lo, hi = intervals[:, :1], intervals[:, 1:]
    i, j = intersecting(lo, hi, lo, hi)
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == _pairwise(lo, hi, lo, hi)


def test_touching_boxes_do_not_overlap() -> None:
    lo = np.array([[0, 0], [0, 4], [4, 0], [4, 4]], dtype=np.int64)
    i, j = intersecting(lo, lo + 4, lo, lo + 4)
    assert i.tolist() == j.tolist() == [0, 1, 2, 3]


def test_a_grid_of_ten_thousand_rows_and_as_many_columns_is_not_compared_pairwise() -> None:
    """Each column meets each of 4 rows; each thin row meets 1 thick one. Pairwise would be 10**8 comparisons."""
    n = 10_000
    thin = np.stack([np.arange(n), np.zeros(n, dtype=np.int64)], axis=1)
    thick = np.stack([np.arange(4) * (n // 4), np.zeros(4, dtype=np.int64)], axis=1)
    begun = time.monotonic()
    i, j = intersecting(thin, thin + np.array([1, n]), thick, thick + np.array([n // 4, n]))
    assert (j == i // (n // 4)).all()
    assert len(i) == n
    square = np.stack([np.repeat(np.arange(100), 100), np.tile(np.arange(100), 100)], axis=1) * 10
    i, j = intersecting(square, square + 10, square, square + 10)
    assert (i == j).all()
    assert len(i) == n
    assert time.monotonic() - begun < 30


@given(counts=st.lists(st.integers(0, 5), max_size=8), offset=st.integers(0, 100))
@examples(100)
def test_ragged_lists_every_index_of_every_row(counts: list[int], offset: int) -> None:
    starts = [offset * (k + 1) for k in range(len(counts))]
    row, index = ragged(np.array(counts, dtype=np.int64), np.array(starts, dtype=np.int64))
    expected = [(k, starts[k] + n) for k, count in enumerate(counts) for n in range(count)]
    assert list(zip(row.tolist(), index.tolist(), strict=True)) == expected
