"""What every kind of device promises: memory behind descriptors, copies, digests and casts in the order of streams."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic_reshard.arena import HostArena, MappedArena
from elastic_reshard.arena.boxes import CopyTable, host_strided
from elastic_reshard.arena.device import Device, How
from elastic_reshard.arena.devices import device_of, open_device, strided_of
from elastic_reshard.arena.digests import digest_on_host
from elastic_reshard.arena.ranges import Ranges
from elastic_reshard.arena.strided import Strided
from elastic_reshard.errors import ArenaError
from tests.arena.helpers import first_device, numbers, on_device, soon
from tests.processes import Rank, run_ranks

BOXES = [(slice(3, 60), slice(5, 77)), (slice(0, 64), slice(0, 96)), (slice(8, 16), slice(16, 48))]


def test_memory_is_zero_at_first_and_everyone_sees_what_is_written(device: Device) -> None:
    memory = device.create(100_000, "test")
    assert memory.nbytes >= 100_000
    mine = memory.strided(64, (10, 30), (120, 4), 4)
    assert not device.read(mine, device.current()).any()
    other = device.map(os.dup(memory.fd), memory.nbytes, writable=False)
    theirs = other.strided(64, (10, 30), (120, 4), 4)
    tensor = device.tensor(mine, torch.int32)
    tensor.copy_(torch.arange(300).view(10, 30))
    seen = device.read(theirs, device.current())
    assert np.array_equal(seen, np.arange(300).reshape(10, 30))
    assert (other.fd, other.address != memory.address) == (-1, True)
    assert (device_of(tensor), device_of(tensor[2:, 1:].t())) == (device, device)
    assert open_device(device.kind, device.id) is device


def test_what_lies_outside_or_is_closed_is_refused(device: Device) -> None:
    memory = device.create(1000, "test")
    size = memory.nbytes
    for offset, shape, strides, item in (
        (size, (1,), (1,), 1),
        (size - 8, (3,), (4,), 4),
        (-1, (1,), (1,), 1),
        (0, (2, 2), (size, 1), 1),
        (0, (1,), (1,), 3),
        (0, (1, 1), (1,), 1),
        (0, (2,), (-1,), 1),
    ):
        with pytest.raises(ArenaError):
            memory.strided(offset, shape, strides, item)
    memory.strided(size - 8, (2,), (4,), 4)
    memory.close()
    memory.close()
    with pytest.raises(ArenaError, match="closed"):
        memory.strided(0, (1,), (1,), 1)
    with pytest.raises(ArenaError):
        device.create(0, "nothing")


def test_a_descriptor_that_is_none_is_refused_and_closed(device: Device) -> None:
    memory = device.create(1000, "test")
    wrong = [os.dup(memory.fd), os.open("/dev/null", os.O_RDONLY), os.memfd_create("not sealed")]
    sizes = [memory.nbytes * 2, 1 << 21, 1 << 21]
    for fd, nbytes in zip(wrong, sizes, strict=True):
        with pytest.raises(ArenaError):
            device.map(fd, nbytes, writable=True)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_memory_goes_with_the_last_array_over_it(device: Device) -> None:
    memory = device.create(4 << 20, "test")
    fd = memory.fd
    array = memory.strided(0, (1 << 20,), (4,), 4)
    tensor = device.tensor(array, torch.int32)
    tensor.fill_(7)
    assert int(tensor.sum()) == 7 << 20  # the sum takes memory of its own the first time
    free = device.free()[0]
    memory.close()
    assert memory.fd == -1
    del array
    gc.collect()
    assert int(tensor.sum()) == 7 << 20
    os.fstat(fd)
    del tensor
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert device.free()[0] >= free + (4 << 20)


def test_too_much_is_refused_with_figures(device: Device) -> None:
    free, total = device.free()
    assert 0 < free <= total
    with pytest.raises(ArenaError, match=rf"of {total} bytes are free"):
        device.create(total + (1 << 30), "too much")


@pytest.mark.parametrize("how", ["kernel", "engine", None])
@pytest.mark.parametrize("item", [1, 2, 4, 8, 16])
def test_boxes_are_copied(device: Device, item: int, how: How | None) -> None:
    source = numbers(64 * 96, item).reshape(64, 96)
    for transposed in (False, True):
        frm, to = on_device(device, source), on_device(device, np.zeros_like(source))
        wanted = np.zeros_like(source)
        pairs = []
        for box in BOXES:
            pairs.append((to[box], frm[box]))
            wanted[box] = source[box]
        if transposed:
            frm = on_device(device, np.ascontiguousarray(source.T)).transpose((1, 0))
            pairs = [(to[box], frm[box]) for box in BOXES]
        stream = device.stream()
        table = CopyTable.of(pairs)
        device.copy(table, stream, how)
        assert device.read(to, stream).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("how", ["kernel", "engine"])
def test_large_and_odd_runs_are_copied(device: Device, how: How) -> None:
    source = numbers((3 << 20) + 77, 2)
    frm, to = on_device(device, source), on_device(device, np.zeros_like(source))
    pairs = [(to[1:100], frm[1:100]), (to[101:2_000_000], frm[103:2_000_002]), (to[2_000_005:], frm[2_000_005:])]
    device.copy(CopyTable.of(pairs), device.current(), how)
    wanted = np.zeros_like(source)
    wanted[1:100], wanted[101:2_000_000], wanted[2_000_005:] = source[1:100], source[103:2_000_002], source[2_000_005:]
    assert np.array_equal(device.read(to, device.current()), wanted)


@pytest.mark.parametrize("how", ["kernel", "engine"])
def test_registered_host_memory_takes_part(device: Device, how: How) -> None:
    arena = HostArena(1 << 20)
    host = arena.bytes[: 64 * 96 * 2].view(np.uint16).reshape(64, 96)
    host[:] = numbers(host.size, 2).reshape(64, 96)
    there = on_device(device, np.zeros_like(host))
    back = arena.bytes[1 << 19 :][: host.nbytes].view(np.uint16).reshape(64, 96)
    tables = [
        CopyTable.of([(there[8:48, 0:64], host_strided(host)[8:48, 0:64])]),
        CopyTable.of([(host_strided(back), there)]),
    ]
    stream = device.stream()
    with pytest.raises(ArenaError, match="not registered"):
        device.copy(tables[0], stream, how)
    registered = device.host(arena.bytes)
    again = device.host(arena.bytes)
    for table in tables:
        device.copy(table, stream, how)
    registered.close()
    registered.close()
    stream.synchronize()
    wanted = np.zeros_like(host)
    wanted[8:48, 0:64] = host[8:48, 0:64]
    assert np.array_equal(back, wanted)
    device.copy(tables[0], stream, how)  # the second registration is one of its own
    stream.synchronize()
    again.close()
    gc.collect()
    with pytest.raises(ArenaError, match="not registered"):
        device.copy(tables[0], stream, how)


@pytest.mark.parametrize("how", ["kernel", "engine"])
def test_a_peers_host_arena_takes_part_and_what_the_peer_writes_later_too(device: Device, how: How) -> None:
    """What an engine or a mover on a device does with a trainer whose stage is "host"."""
    arena = HostArena(1 << 20)
    mine = arena.bytes[: 4 * 4096].view(np.uint32)
    theirs = MappedArena(arena.readonly_fd(), for_device=True)
    registered = device.host(theirs.bytes)
    there, stream = on_device(device, np.zeros_like(mine)), device.stream()
    table = CopyTable.of([(there, host_strided(theirs.view(0, (4096,), (4,), 4)))])
    for version in (1, 2):
        mine[:] = numbers(4096, 4) + version
        device.copy(table, stream, how)
        assert np.array_equal(device.read(there, stream), numbers(4096, 4) + version)
    with pytest.raises(ValueError, match="read-only"):
        theirs.bytes[0] = 1
    registered.close()


def test_streams_keep_their_order_and_wait_for_each_other(device: Device) -> None:
    a, b, c = (on_device(device, numbers(1 << 20, 4) if i == 0 else np.zeros(1 << 20, np.uint32)) for i in range(3))
    one, two = device.stream(), device.stream()
    assert one.handle != two.handle
    device.copy(CopyTable.of([(b, a)]), one)
    two.wait(one.record())
    device.copy(CopyTable.of([(c, b)]), two)
    event = two.record()
    deadline = soon()
    while not event.done():
        assert time.monotonic() < deadline
    event.synchronize()
    assert np.array_equal(device.read(c, device.current()), numbers(1 << 20, 4))
    assert one.record().done()


def test_a_table_serves_again_and_keeps_its_memory_until_it_is_done(device: Device) -> None:
    frm, to = on_device(device, numbers(1000, 4)), on_device(device, np.zeros(1000, np.uint32))
    table = CopyTable.of([(to, frm)])
    device.prepare(table)
    del frm
    for _ in range(3):
        device.tensor(to, torch.int32).zero_()
        device.current().synchronize()
        stream = device.stream()
        device.copy(table, stream)
        assert np.array_equal(device.read(to, stream), numbers(1000, 4))
    stream = device.stream()
    device.tensor(to, torch.int32).zero_()
    device.copy(table, stream)
    del table
    gc.collect()
    assert np.array_equal(device.read(to, stream), numbers(1000, 4))
    device.copy(CopyTable.of([]), stream)  # nothing to do is done


@pytest.mark.parametrize("full", [True, False])
def test_digests_are_those_of_the_host(device: Device, full: bool) -> None:
    rng = np.random.default_rng(3)
    lengths = [0, 1, 7, 8, 100, 4096, 4097, 100_001, 3_000_000]
    arrays = [rng.integers(0, 256, n, dtype=np.uint8) for n in lengths]
    pieces = [on_device(device, a) for a in arrays]
    pieces.append(pieces[-1][13:2_000_014])  # off any alignment
    arrays.append(arrays[-1][13:2_000_014])
    out = on_device(device, np.zeros(len(pieces), np.uint64))
    for salt, numbered in ((0, None), (12345, None), (7, [5] * len(pieces))):
        device.digest(pieces, salt, full, out, device.current(), numbered)
        found = device.read(out, device.current())
        # Digests depend on bytes, length and place, not on where in memory a piece lies.
        assert np.array_equal(found, digest_on_host([host_strided(a) for a in arrays], salt, full, numbered))
    with pytest.raises(ArenaError, match="fit"):
        device.digest(pieces, 0, full, out[1:], device.current())
    device.digest([], 0, full, out[0:0], device.current())


def test_casts_are_torchs(device: Device) -> None:
    shapes = [(100, 7), (5,), (64, 64)]
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    sources = [device.tensor(on_device(device, v.numpy()), torch.float32) for v in values]
    targets = [device.tensor(on_device(device, np.zeros(s, np.uint16)), torch.bfloat16) for s in shapes]
    strided = device.tensor(on_device(device, np.zeros((7, 100), np.uint16)), torch.bfloat16).t()
    stream = device.stream()
    device.cast([*targets, strided], [*sources, sources[0]], stream)
    stream.synchronize()
    for target, value in zip([*targets, strided], [*values, values[0]], strict=True):
        assert torch.equal(target.cpu(), value.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.complex128])
def test_tensors_of_any_dtype(device: Device, dtype: torch.dtype) -> None:
    memory = device.create(1 << 16, "test")
    item = dtype.itemsize
    array = memory.strided(256, (4, 6), (16 * item, 2 * item), item)
    tensor = device.tensor(array, dtype)
    assert (tensor.dtype, tensor.shape, tensor.stride()) == (dtype, (4, 6), (16, 2))
    assert tensor.data_ptr() == array.address
    again = strided_of(tensor)
    assert (again.address, again.shape, again.strides, again.itemsize) == (array.address, (4, 6), array.strides, item)
    assert again.device is device
    none = device.tensor(memory.strided(0, (0, 3), (3 * item, item), item), dtype)
    assert (none.shape, none.dtype) == ((0, 3), dtype)


def test_a_mapping_that_is_to_be_read_is_not_written(device: Device) -> None:
    """A GPU whose driver maps nothing read-only has only our own refusal."""
    memory = device.create(1000, "test")
    other = device.map(os.dup(memory.fd), memory.nbytes, writable=False)
    copy = CopyTable.of([(other.strided(0, (8,), (1,), 1), memory.strided(64, (8,), (1,), 1))])
    with pytest.raises(ArenaError, match="read-only"):
        device.copy(copy, device.current())


def test_host_memory_must_be_registered_whole() -> None:
    class Keeper:
        pass

    one, two = Keeper(), Keeper()
    ranges: Ranges[Keeper] = Ranges()
    ranges.add(100, 200, one)
    ranges.add(200, 300, two)
    assert ranges.keepers([(100, 200)]) == [one]
    assert ranges.keepers([(150, 250), (299, 300), (5, 5)]) == [one, two, two]
    for low, high in ((99, 101), (250, 301), (300, 301), (0, 1000)):
        with pytest.raises(ArenaError, match="not registered"):
            ranges.keepers([(low, high)])
        assert ranges.find(300) is None
    for low, high in ((150, 160), (50, 101), (299, 400), (50, 400)):
        with pytest.raises(ArenaError, match="overlaps"):
            ranges.add(low, high, Keeper())
    del one
    gc.collect()
    assert ranges.find(150) is None
    ranges.add(50, 200, two)
    assert ranges.find(60) == (200, two)


def test_devices_that_are_none_are_refused() -> None:
    for kind, identity in (("tpu", "0"), ("pretend", "pretend:x"), ("pretend", ""), ("cuda", "GPU-" + "0" * 32)):
        with pytest.raises(ArenaError):
            open_device(kind, identity)
    with pytest.raises(ArenaError, match="meta"):
        device_of(torch.empty(1, device="meta"))
    assert device_of(torch.zeros(3)) is None


COUNT = 1 << 20


def _wait_for_the_end(pid: int) -> None:
    fd = os.pidfd_open(pid)
    try:
        assert select.select([fd], [], [], 20)[0], f"process {pid} did not end"
    finally:
        os.close(fd)


def _make_and_die(me: Rank, kind: str) -> None:
    device = first_device(kind)
    memory = device.create(COUNT * 4, "test")
    tensor = device.tensor(memory.strided(0, (COUNT,), (4,), 4), torch.int32)
    tensor.copy_(torch.arange(COUNT, dtype=torch.int32))
    device.current().synchronize()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(Path(me.rendezvous).with_name("socket")))
        server.listen()
        me.store().set("maker", str(os.getpid()))
        server.settimeout(20)
        to, _ = server.accept()
        with to:
            socket.send_fds(to, [str(memory.nbytes).encode()], [memory.fd])
            to.settimeout(20)
            to.recv(1)  # it has the descriptor
    os.kill(os.getpid(), signal.SIGKILL)


def _take_over(me: Rank, kind: str) -> tuple[bool, int]:
    maker = int(me.store().get("maker"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to:
        to.settimeout(20)
        to.connect(str(Path(me.rendezvous).with_name("socket")))
        said, (fd,), _, _ = socket.recv_fds(to, 64, 1)
        to.send(b"!")
    _wait_for_the_end(maker)
    device = first_device(kind)
    memory = device.map(os.dup(fd), int(said), writable=False)
    array = memory.strided(0, (COUNT,), (4,), 4)
    alive = np.array_equal(device.read(array, device.current()), np.arange(COUNT, dtype=np.uint32))
    writer = device.map(fd, int(said), writable=True)  # as a successor would
    device.copy(CopyTable.of([(writer.strided(4, (1,), (4,), 4), array[7:8])]), device.current())
    return alive, int(device.read(array[1:2], device.current())[0])


def _play(me: Rank, kind: str) -> object:
    steps: list[Callable[[Rank, str], object]] = [_make_and_die, _take_over]
    return steps[me.rank](me, kind)


def test_memory_outlives_the_process_that_made_it(device: Device) -> None:
    _, found = run_ranks(_play, 2, device.kind, timeout=60, group=False, lost=[0])
    assert found == (True, 7)


def test_a_pretend_stream_puts_work_off_until_it_is_asked() -> None:
    """So a missing wait shows as old bytes, each time."""
    device = first_device("pretend")
    frm, to = on_device(device, numbers(8, 4)), on_device(device, np.zeros(8, np.uint32))
    stream = device.stream()
    device.copy(CopyTable.of([(to, frm)]), stream)
    tensor = device.tensor(to, torch.int32)
    assert not tensor.any()
    device.current().wait(stream.record())
    assert torch.equal(tensor, torch.arange(8, dtype=torch.int32))


def test_a_strided_array_is_cut_as_numpy_cuts() -> None:
    array = numbers(4 * 5 * 6, 4).reshape(4, 5, 6)
    s = host_strided(array)
    assert (s[..., 1:3, 2:5].shape, s[..., 1:3, 2:5].contiguous, s.flat().shape) == ((4, 2, 3), False, (120,))
    assert s[2:3, 1:2, :].flat().address == array[2, 1].ctypes.data
    assert (s.as_bytes().nbytes, s.as_bytes().view(8).size, s.reshape((-1, 6)).shape) == (480, 60, (20, 6))
    bad: list[Callable[[], Strided]] = [
        s[..., 1:3].flat,
        lambda: s[::2, :, :],
        lambda: s[0:1],
        lambda: s.reshape((7, 7)),
        lambda: s[0:1, 0:1, 0:3].view(8),
    ]
    for call in bad:
        with pytest.raises(ArenaError):
            call()
    assert isinstance(s.transpose((2, 0, 1)), Strided)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_copies_are_captured_into_a_graph_and_replayed(device: Device) -> None:
    source, target = (torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in ((64, 96), (40, 80)))
    table = CopyTable.of([(strided_of(target)[0:40, 0:80], strided_of(source)[3:43, 5:85])])
    with pytest.raises(ArenaError, match="prepare"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        device.copy(table, device.current())
    device.prepare(table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # in the strictest mode
        device.copy(table, device.current())
    assert not target.any(), "nothing runs while it is captured"
    for version in (1, 2):
        source.copy_(torch.arange(64 * 96, dtype=torch.int32).view(64, 96) + version)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(target, source[3:43, 5:85])
    device.copy(table, device.current())
    device.current().record().synchronize()  # looks through what was launched: no captured event is left among it
    assert torch.equal(target, source[3:43, 5:85])


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_gpu_knows_its_neighbours(device: Device) -> None:
    from elastic_reshard.arena.driver import uuid_of

    near = device.neighbours()
    assert device.id not in (*near.peers, *near.apart)
    for other in range(1, torch.cuda.device_count()):
        can = torch.cuda.can_device_access_peer(0, other)
        assert (uuid_of(other) in near.peers, uuid_of(other) in near.apart) == (can, not can)


def _pull_from_afar(me: Rank) -> None:
    """In a process of its own: a GPU once opened keeps its descriptors."""
    del me
    from elastic_reshard.arena.cuda import open_index

    owner, reader = open_index(0), open_index(1)
    count, half = 48 << 20, 24 << 20
    memory = owner.create(4 * count, "far")
    there = memory.strided(0, (count,), (4,), 4)
    owner.tensor(there, torch.int32).copy_(torch.arange(count, dtype=torch.int32))
    owner.current().synchronize()
    seen = reader.map(os.dup(memory.fd), memory.nbytes, writable=False)
    source, near = (m.strided(0, (count,), (4,), 4) for m in (seen, reader.scratch(4 * count)))
    parts = [slice(0, 16 << 20), slice(17 << 20, (17 << 20) + 1000), slice(20 << 20, half)]
    from_rows, to_rows = (
        array[half:count].reshape((12288, 2048)) for array in (source, near)
    )  # of which half is taken
    pairs = [(near[part], source[part]) for part in parts] + [(to_rows[:, 0:1024], from_rows[:, 0:1024])]
    table = CopyTable.of(pairs)
    wanted = np.zeros(count, np.uint32)
    for part in parts:
        wanted[part] = np.arange(part.start, part.stop, dtype=np.uint32)
    wanted[half:].reshape(12288, 2048)[:, :1024] = np.arange(half, count, dtype=np.uint32).reshape(12288, 2048)[
        :, :1024
    ]
    for stream in (reader.stream(), reader.current()):  # torch's default one takes no batches
        for _ in range(2):
            reader.tensor(near, torch.int32).zero_()
            reader.current().synchronize()
            reader.copy(table, stream)
            assert np.array_equal(reader.read(near, stream), wanted)
    prepared = reader._prepared(table)
    assert prepared.far is not None
    assert [n for _, _, n in prepared.far.runs] == [64 << 20]
    assert [(op.nbytes, op.rows) for op in prepared.far.pitched] == [(4096, 12288)]
    assert prepared.rest is not None
    assert prepared.rest.nbytes == 4000 + (16 << 20)
    own = CopyTable.of([(reader.scratch(64 << 20).strided(0, (64 << 20,), (1,), 1), near.as_bytes()[0 : 64 << 20])])
    assert reader._prepared(own).far is None


@pytest.mark.gpu
def test_what_lies_on_another_gpu_comes_by_engines_where_it_is_large() -> None:
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(1, 0):
        pytest.skip("fewer than two CUDA devices that reach each other's memory")
    run_ranks(_pull_from_afar, 1, timeout=60, group=False)
