"""Host arenas: memory behind a descriptor, tensors on it, and what a peer sees of them."""

from __future__ import annotations

import copy
import fcntl
import gc
import io
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic_reshard.arena import HostArena, MappedArena, empty, empty_like, locate
from elastic_reshard.errors import ArenaError, LayoutError
from elastic_reshard.layout.dtypes import ITEMSIZE
from tests.arena.helpers import memfds, peer_of

DTYPES = [getattr(torch, name) for name in ITEMSIZE]
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def resident_shared() -> int:
    """Bytes of shared memory in this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0]) * 1024


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    arena = HostArena(1 << 12)
    arena.empty((3,), torch.uint8)  # so that alignment has something to do
    tensor = arena.empty((5, 7), dtype)
    assert (tensor.dtype, tensor.shape, tensor.device.type) == (dtype, (5, 7), "cpu")
    assert tensor.is_contiguous()
    assert not tensor._is_view()
    pattern = torch.arange(35 * dtype.itemsize, dtype=torch.int64).remainder(251).to(torch.uint8)
    tensor.view(torch.uint8).copy_(pattern.view(5, -1))
    found = locate(tensor)
    assert found is not None
    assert (found.offset_bytes, found.nbytes) == (64, 35 * dtype.itemsize)
    assert arena.bytes[64 : 64 + found.nbytes].tolist() == pattern.tolist()
    size = dtype.itemsize
    seen = peer_of(arena).view(64, (5, 7), (7 * size, size), size)
    assert seen.tobytes() == pattern.numpy().tobytes()


def test_unknown_dtypes_and_shapes_are_refused() -> None:
    arena = HostArena(256)
    with pytest.raises(LayoutError, match="quint8"):
        arena.empty((4,), torch.quint8)
    with pytest.raises(ArenaError, match="negative"):
        arena.empty((4, -1), torch.float32)
    with pytest.raises(ArenaError, match="negative"):
        empty((-1, -1), torch.float32)
    assert arena.free_bytes == 256


def test_offsets_are_multiples_of_64_and_tensors_do_not_overlap() -> None:
    arena = HostArena(1 << 14)
    tensors = [arena.empty((n,), torch.int16) for n in (1, 31, 32, 33, 100, 1, 64)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    ends = 0
    for value, tensor in enumerate(tensors):
        found = locate(tensor)
        assert found is not None
        assert found.offset_bytes % 64 == 0
        assert tensor.data_ptr() % 64 == 0
        assert found.offset_bytes - ends < 64
        assert found.offset_bytes >= ends
        ends = found.offset_bytes + found.nbytes
        assert tensor.eq(value).all()


def test_full_arenas_say_what_is_needed_and_what_is_free() -> None:
    arena = HostArena(1000)
    arena.empty((100,), torch.uint8)
    assert arena.free_bytes == 1000 - 128
    with pytest.raises(ArenaError, match=r"needs 876 bytes, but only 872 of the arena's 1000 bytes are free"):
        arena.empty((219,), torch.float32)
    arena.empty((218,), torch.float32)
    assert arena.free_bytes == 0
    with pytest.raises(ArenaError, match="only 0 of"):
        arena.empty((1,), torch.uint8)


def test_zero_size_and_0d() -> None:
    arena = HostArena(64)
    for shape in ((0,), (3, 0, 2)):
        for tensor in (arena.empty(shape, torch.bfloat16), empty(shape, torch.bfloat16)):
            assert tensor.shape == shape
            assert tensor.dtype == torch.bfloat16
            assert locate(tensor) is None
    assert arena.free_bytes == 64
    scalar = arena.empty((), torch.float64)
    scalar.fill_(2.5)
    assert scalar.shape == ()
    found = locate(scalar)
    assert found is not None
    assert found.nbytes == 8
    assert peer_of(arena).view(0, (), (), 8).view(np.float64) == 2.5
    assert arena.free_bytes == 0


@pytest.mark.parametrize("nbytes", [0, -1])
def test_empty_arenas_are_refused(nbytes: int) -> None:
    with pytest.raises(ArenaError, match="at least one byte"):
        HostArena(nbytes)


def test_what_the_system_refuses_is_an_arena_error_and_leaves_no_descriptor() -> None:
    before = memfds()
    for nbytes in (1 << 62, 1 << 70):
        with pytest.raises(ArenaError, match="cannot make an arena"):
            HostArena(nbytes)
    with pytest.raises(ArenaError, match="cannot make an arena"):
        HostArena(64, "x" * 300)
    assert memfds() == before


def test_tensors_outlive_the_arena_object_and_close() -> None:
    arena = HostArena(1 << 16)
    fd = arena.fd
    tensor = arena.empty((1000,), torch.int64)
    tensor.copy_(torch.arange(1000))
    arena.close()
    arena.close()
    with pytest.raises(ArenaError, match="closed"):
        arena.empty((1,), torch.int64)
    with pytest.raises(ArenaError, match="closed"):
        _ = arena.bytes
    del arena
    gc.collect()
    found = locate(tensor)
    assert found is not None
    assert found.fd == fd
    assert os.fstat(fd).st_size == 1 << 16
    assert torch.equal(tensor, torch.arange(1000))
    part = tensor[10:20]
    del tensor
    assert os.fstat(fd).st_size == 1 << 16
    assert part.tolist() == list(range(10, 20))


def test_descriptors_close_with_the_last_view() -> None:
    before = memfds()
    arena = HostArena(1 << 16)
    tensor, array = arena.empty((4, 4), torch.float32), arena.bytes
    assert memfds() > before
    arena.close()
    del arena
    view = tensor.t()[1:]
    del tensor
    assert memfds() > before
    del view
    assert memfds() > before
    del array
    assert memfds() == before
    tensor = empty((4,), torch.float32)
    assert memfds() > before
    del tensor
    assert memfds() == before


def test_locate_views_slices_and_strided_tensors() -> None:
    arena, other = HostArena(1 << 16, "one"), HostArena(1 << 16, "other")
    arena.empty((100,), torch.uint8)
    base = arena.empty((8, 6), torch.float32)
    elsewhere = other.empty((8, 6), torch.float32)
    base.copy_(torch.arange(48).view(8, 6))
    cases = {
        "whole": base,
        "slice": base[2:5],
        "column": base[:, 1],
        "transposed": base.t(),
        "transposed slice": base.t()[2:4, 1:],
        "strided": base[1::3, ::2],
        "scalar": base[7, 5],
        "one row": base[1],
        "parameter": torch.nn.Parameter(base[3]),
        "expanded": base[:1].expand(5, 6),
    }
    for name, tensor in cases.items():
        first, last = int(tensor.min()), int(tensor.max())  # values are places
        where = (arena.arena_id, arena.fd, 128 + first * 4, (last - first + 1) * 4)
        assert locate(tensor) == where, name
    assert locate(base[1].view(torch.uint8)) == locate(base[1])
    found = locate(elsewhere)
    assert found is not None
    assert found.arena_id == other.arena_id != arena.arena_id
    assert locate(torch.zeros(4)) is None
    assert locate(base.clone()) is None
    assert locate(base[8:]) is None
    assert locate(torch.empty(4, device="meta")) is None


def test_locate_among_many_arenas_that_come_and_go() -> None:
    alive: dict[int, tuple[HostArena, torch.Tensor]] = {}
    for round_ in range(60):
        arena = HostArena(4096 * (1 + round_ % 3))
        alive[round_] = (arena, arena.empty((16,), torch.int32))
        alive.pop(round_ - 7, None)
        plain = [torch.empty(1 << 18) for _ in range(2)]  # large enough for maps of their own
        assert all(locate(tensor) is None for tensor in plain)
        for arena, tensor in alive.values():
            found = locate(tensor)
            assert found is not None
            assert found.arena_id == arena.arena_id


def test_locate_is_fast() -> None:
    tensors = [empty((16, 16), torch.bfloat16) for _ in range(600)]
    best = min(_timed(lambda: [locate(tensor) for tensor in tensors]) for _ in range(10))
    assert best / 600 < 10e-6  # about one microsecond; the rest is for a busy machine


def _timed(what: object) -> float:
    started = time.perf_counter()
    what()  # type: ignore[operator]
    return time.perf_counter() - started


def test_tensors_behave_as_tensors_of_their_own() -> None:
    first, second = empty((10,), torch.float32), empty((10,), torch.float32)
    first.zero_()
    version = second._version
    first.add_(1)
    assert second._version == version, "writing one tensor must not invalidate another for autograd"
    weight = torch.nn.Parameter(first)
    loss = (weight * weight).sum()
    second.fill_(3)
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.eq(2).all()
    saved = io.BytesIO()
    torch.save(first, saved)
    assert saved.tell() < 4096, "saving a small tensor must not save the arena"
    assert copy.deepcopy(second).untyped_storage().nbytes() == 40
    with torch.device("meta"):
        assert empty((3,), torch.float32).device.type == "cpu"
        assert empty((0,), torch.float32).device.type == "cpu"


def test_empty_like_puts_all_in_one_arena_of_just_their_size() -> None:
    like = {
        "w": torch.empty(33, 5, dtype=torch.bfloat16, device="meta"),
        "t": torch.zeros(7, 3).t(),
        "none": torch.empty(0, 4),
        "s": torch.tensor(True),
    }
    made = empty_like(like)
    assert list(made) == list(like)
    for name, tensor in made.items():
        assert (tensor.shape, tensor.dtype) == (like[name].shape, like[name].dtype)
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
    places = [locate(made[name]) for name in ("w", "t", "s")]
    assert len({place.arena_id for place in places if place is not None}) == 1
    assert places[0] is not None
    assert os.fstat(places[0].fd).st_size == 384 + 128 + 64
    assert locate(made["none"]) is None
    assert empty_like({}) == {}
    assert empty_like({"none": torch.empty(0)})["none"].shape == (0,)


def test_empty_like_refuses_dtensors() -> None:
    class Sharded(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return torch.zeros(1)

    with pytest.raises(ArenaError, match=r"w is a Sharded; pass its local tensor"):
        empty_like({"w": torch.zeros(2).as_subclass(Sharded)})


def test_small_tensors_share_an_arena_and_large_ones_do_not() -> None:
    small = [empty((1 << 20,), torch.uint8) for _ in range(3)]
    large = empty(((16 << 20) + 1,), torch.uint8)
    places = [locate(tensor) for tensor in (*small, large)]
    assert all(place is not None for place in places)
    ids = [place.arena_id for place in places if place is not None]
    assert len(set(ids)) == 2
    assert ids[0] == ids[1] == ids[2]
    more = [empty((16 << 20,), torch.uint8) for _ in range(4)]  # does not fit beside the small ones
    filled = {place.arena_id for tensor in more if (place := locate(tensor)) is not None}
    assert len(filled) == 2


def test_sealed_and_nothing_named() -> None:
    before = set(os.listdir("/dev/shm"))
    arena = HostArena(1 << 20)
    arena.empty((1 << 18,), torch.float32).fill_(1)
    kept = empty((4,), torch.float32)
    assert set(os.listdir("/dev/shm")) <= before
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    assert fcntl.fcntl(arena.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    for size in (0, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    assert kept.numel() == 4


def test_readonly_descriptors_cannot_write() -> None:
    arena = HostArena(4096)
    fd = arena.readonly_fd()
    try:
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
    finally:
        os.close(fd)
    mapped = peer_of(arena)
    with pytest.raises(ValueError, match="read-only"):
        mapped.bytes[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        mapped.view(0, (4,), (1,), 1)[0] = 1


OWNER = """
import array, os, socket, sys, time
import torch
from elastic_reshard.arena import HostArena
torch.set_num_threads(1)
arena = HostArena(8 << 20)
tensor = arena.empty((1 << 20,), torch.int64)
tensor.copy_(torch.arange(1 << 20))
sock = socket.socket(fileno=int(sys.argv[1]))
fd = arena.readonly_fd()
socket.send_fds(sock, [b"x"], [fd])
time.sleep(60)
"""


def test_memory_of_a_killed_process_stays_readable_and_right() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        owner = subprocess.Popen([sys.executable, "-c", OWNER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        try:
            ours.settimeout(60)
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
            mapped = MappedArena(fds[0])
        finally:
            os.kill(owner.pid, signal.SIGKILL)
            assert owner.wait(10) == -signal.SIGKILL
    seen = mapped.view(0, (1 << 20,), (8,), 8)
    assert np.array_equal(seen, np.arange(1 << 20, dtype=np.uint64))


def test_a_forked_child_reads_but_does_not_allocate_from_its_parents_arenas() -> None:
    arena = HostArena(1 << 16)
    inherited, pooled = arena.empty((4,), torch.int32), empty((4,), torch.int32)
    inherited.fill_(5)
    mine = locate(pooled)
    assert mine is not None
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert inherited.tolist() == [5, 5, 5, 5]
            with pytest.raises(ArenaError, match="before forking"):
                arena.empty((4,), torch.int32)
            own = locate(empty((4,), torch.int32))
            assert own is not None
            assert own.arena_id != mine.arena_id
            inherited.fill_(6)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert inherited.tolist() == [6, 6, 6, 6]
    assert arena.empty((4,), torch.int32).numel() == 4


def test_memory_and_descriptors_are_bounded_over_many_rounds() -> None:
    descriptors, shared = memfds(), resident_shared()
    peak = 0
    for round_ in range(200):
        arena = HostArena(4 << 20)
        tensor = arena.empty((1 << 20,), torch.float32)
        tensor.fill_(round_)
        pooled = empty((1 << 20,), torch.uint8)
        pooled.fill_(1)
        several = empty_like({"a": tensor[:1000], "b": pooled[:1000]})
        seen = peer_of(arena).view(0, (4,), (4,), 4)
        assert seen.view(np.float32).tolist() == [round_] * 4
        peak = max(peak, resident_shared() - shared)
        assert memfds() - descriptors <= 16
    gone = weakref.ref(tensor)
    del arena, tensor, pooled, several, seen
    assert gone() is None
    assert peak < 80 << 20  # one pool and a few arenas, of a thousand MiB in all
    assert memfds() == descriptors
    assert resident_shared() - shared < 1 << 20
