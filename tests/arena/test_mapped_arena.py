"""Arenas of other processes: what a peer sees, and what it is refused."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch

from elastic_reshard.arena import HostArena, MappedArena
from elastic_reshard.errors import ArenaError
from tests.arena.helpers import memfds, peer_of

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def test_mapped_arenas_see_writes_and_take_the_descriptor() -> None:
    before = memfds()
    arena = HostArena(4096)
    tensor = arena.empty((64, 8), torch.int32)
    fd = arena.readonly_fd()
    mapped = MappedArena(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert mapped.nbytes == 4096
    tensor.copy_(torch.arange(512).view(64, 8))
    rows = mapped.view(2 * 32 + 4, (3, 2), (5 * 32, 8), 4)
    assert rows.tolist() == [[17, 19], [57, 59], [97, 99]]
    backwards = mapped.view(511 * 4, (512,), (-4,), 4)
    assert backwards.tolist() == list(range(511, -1, -1))
    assert mapped.view(4, (2, 3), (0, 4), 4).tolist() == [[1, 2, 3], [1, 2, 3]]
    mapped.close()
    mapped.close()
    with pytest.raises(ArenaError, match="closed"):
        _ = mapped.bytes
    with pytest.raises(ArenaError, match="closed"):
        mapped.view(0, (1,), (1,), 1)
    tensor[0, 0] = 77
    assert backwards[-1] == 77, "arrays outlive the mapped arena"
    del rows, backwards, mapped, tensor, arena
    assert memfds() == before


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "itemsize"),
    [
        (0, (1025,), (4,), 4),
        (4, (1024,), (4,), 4),
        (4093, (1,), (4,), 4),
        (-4, (1,), (4,), 4),
        (4, (3,), (-4,), 4),
        (4088, (2, 2), (0, 8), 8),
        (4097, (0,), (4,), 4),
        (0, (2, 2), (4,), 4),
        (0, (-1,), (4,), 4),
        (0, (1,), (4,), 3),
        (0, (2,), (1 << 62,), 4),
        (0, (1 << 40, 1 << 40), (1, 1), 1),
    ],
)
def test_views_outside_the_arena_are_refused(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> None:
    mapped = peer_of(HostArena(4096))
    with pytest.raises(ArenaError):
        mapped.view(offset, shape, strides, itemsize)


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "itemsize"),
    [
        (4092, (1,), (4,), 4),
        (8, (3,), (-4,), 4),
        (4080, (2, 1), (0, 1 << 62), 16),
        (4096, (0, 5), (4, 4), 4),
        (4095, (), (), 1),
        (1, (511,), (8,), 8),
    ],
)
def test_views_up_to_the_edge_are_given(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> None:
    array = peer_of(HostArena(4096)).view(offset, shape, strides, itemsize)
    assert array.shape == shape
    assert array.itemsize == itemsize
    assert not array.any()


def test_unsealed_and_foreign_descriptors_are_refused_and_closed(tmp_path: Path) -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    fixed = os.memfd_create("no-sealing")
    os.ftruncate(fixed, 4096)
    hollow = os.memfd_create("hollow", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(hollow, fcntl.F_ADD_SEALS, SEALS)
    file = tmp_path / "file"
    file.write_bytes(b"x" * 4096)
    plain = os.open(file, os.O_RDONLY)
    reader, writer = os.pipe()
    for fd in (unsealed, fixed, hollow, plain, reader):
        with pytest.raises(ArenaError, match="from a peer"):
            MappedArena(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    os.close(writer)


def test_an_arena_mapped_for_a_device_is_the_same_memory_in_read_only_arrays() -> None:
    """The map itself is writable, as drivers want it; nothing here writes."""
    before, arena = memfds(), HostArena(4096)
    mapped = MappedArena(arena.readonly_fd(), for_device=True)
    arena.bytes[:] = 7
    cut = mapped.view(8, (4,), (8,), 8)
    assert (int(mapped.bytes[4095]), int(cut[0])) == (7, 0x0707070707070707)
    for array in (mapped.bytes, cut):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    del arena, mapped, cut, array
    assert memfds() == before


def test_an_arena_that_may_not_be_written_to_is_no_memory_for_a_device() -> None:
    fd = os.memfd_create("elastic_reshard:sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_WRITE)
    kept = os.dup(fd)
    assert MappedArena(os.open(f"/proc/self/fd/{kept}", os.O_RDONLY)).nbytes == 4096
    with pytest.raises(ArenaError, match="stage='device'"):
        MappedArena(fd, for_device=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    os.close(kept)
