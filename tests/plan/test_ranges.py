"""A range of a box's elements, in C order, is cut into few boxes that hold exactly these elements in that order."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.plan import boxes_of_range
from tests.plan.strategies import examples


def _elements(shape: tuple[int, ...], first: int, last: int) -> list[int]:
    full = np.arange(math.prod(shape)).reshape(shape)
    found: list[int] = []
    for at, extent in boxes_of_range(shape, first, last):
        assert all(n > 0 for n in extent)
        found += full[tuple(slice(a, a + n) for a, n in zip(at, extent, strict=True))].ravel().tolist()
    return found


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 2)])
def test_every_range_of_small_boxes(shape: tuple[int, ...]) -> None:
    n = math.prod(shape)
    for first, last in itertools.product(range(n + 1), repeat=2):
        assert _elements(shape, first, last) == list(range(first, last))
        assert len(boxes_of_range(shape, first, last)) <= max(1, 2 * len(shape) - 1)


@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=5))
@examples(150)
def test_any_range(data: st.DataObject, shape: list[int]) -> None:
    n = math.prod(shape)
    first = data.draw(st.integers(0, n))
    last = data.draw(st.integers(first, n))
    assert _elements(tuple(shape), first, last) == list(range(first, last))
    assert len(boxes_of_range(shape, first, last)) <= 2 * len(shape) - 1


def test_whole_rows_are_one_box_also_beyond_32_bits() -> None:
    assert boxes_of_range((1 << 20, 1 << 14), 3 << 14, 9 << 14) == [((3, 0), (6, 1 << 14))]
    assert boxes_of_range((1 << 33,), (1 << 32) - 1, (1 << 32) + 1) == [(((1 << 32) - 1,), (2,))]
