"""Linear ranges of a box, as boxes. A plan cuts boxes at element counts; copies need boxes again."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["boxes_of_range"]


def boxes_of_range(shape: Sequence[int], first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements first <= e < last of a box, in C order, as (origin, extent) boxes in that order.

    At most 2 * dims - 1 of them: a tail of the first row, whole rows, a head of the last, dim by dim.
    """
    if first >= last:
        return []
    if not shape:
        return [((), ())]
    inner = 1
    for n in shape[1:]:
        inner *= n
    a, b = first // inner, (last - 1) // inner
    if first % inner == 0 and last % inner == 0:
        return [((a, *(0 for _ in shape[1:])), (last // inner - a, *shape[1:]))]
    if a == b:
        return [
            ((a, *at), (1, *extent)) for at, extent in boxes_of_range(shape[1:], first - a * inner, last - a * inner)
        ]
    middle = -(-first // inner) * inner
    end = last // inner * inner
    return (
        boxes_of_range(shape, first, middle)
        + (boxes_of_range(shape, middle, end) if end > middle else [])
        + boxes_of_range(shape, end, last)
    )
