"""Boxes and meshes against plain sets and lists."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from elastic_reshard.errors import LayoutError
from elastic_reshard.layout import Box, Mesh

SMALL = [Box((a, c), (b, d)) for a, b in ((0, 0), (0, 2), (1, 3)) for c, d in ((0, 1), (1, 4), (2, 2))]


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.lo, box.hi, strict=True))))


@pytest.mark.parametrize("a", SMALL, ids=str)
@pytest.mark.parametrize("b", SMALL, ids=str)
def test_boxes_are_the_sets_of_their_elements(a: Box, b: Box) -> None:
    common = a.intersect(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    assert common is None or common.numel
    assert a.numel == len(elements(a))
    if a.contains(b):
        assert elements(b) <= elements(a)
    elif b.numel:
        assert not elements(b) <= elements(a)


def test_a_0d_box_holds_one_element() -> None:
    whole = Box.whole(())
    assert whole.numel == 1
    assert whole.intersect(whole) == whole
    assert whole.contains(whole)
    assert np.zeros(())[whole.slices()].shape == ()


def test_slices_cut_from_the_whole_tensor_or_from_an_origin() -> None:
    full = np.arange(30).reshape(5, 6)
    box = Box((2, 1), (4, 5))
    assert (full[box.slices()] == full[2:4, 1:5]).all()
    local = full[1:5, 1:6]
    assert (local[box.slices((1, 1))] == full[2:4, 1:5]).all()


def test_sizes_beyond_64_bits_do_not_overflow() -> None:
    assert Box.whole((2**40, 2**40)).numel == 2**80


@pytest.mark.parametrize(("lo", "hi"), [((0,), (1, 1)), ((2,), (1,)), ((-1,), (1,))])
def test_what_is_no_box_is_refused(lo: tuple[int, ...], hi: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not a box"):
        Box(lo, hi)


def test_boxes_print_as_ranges() -> None:
    assert str(Box((0, 2), (1, 5))) == "[0:1, 2:5]"


def test_coordinates_follow_the_order_of_ranks() -> None:
    mesh = Mesh.of([[5, 3, 1], [4, 2, 0]], ("dp", "tp"))
    assert mesh.size == 6
    for rank, at in zip(mesh.ranks, mesh.coordinates().tolist(), strict=True):
        assert mesh.grid[tuple(at)] == rank
    assert str(mesh) == "dp=2xtp=3"
    assert Mesh.arange((2, 2), first=4).ranks == (4, 5, 6, 7)


def test_the_grid_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Mesh.arange((2,)).grid[0] = 1


@pytest.mark.parametrize(
    ("ranks", "shape", "axes", "message"),
    [
        ((0, 1, 2), (2, 2), ("a", "b"), "does not hold 3 ranks"),
        ((0, 1), (2,), ("a", "b"), "does not hold 2 ranks"),
        ((0, 0), (2,), ("a",), "distinct"),
        ((0, -1), (2,), ("a",), "not negative"),
        ((0, 1), (2, 1), ("a", "a"), "distinct names"),
    ],
)
def test_what_is_no_mesh_is_refused(
    ranks: tuple[int, ...], shape: tuple[int, ...], axes: tuple[str, ...], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        Mesh(ranks, shape, axes)
