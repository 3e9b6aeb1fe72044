"""Copies by table: any pair of boxes comes out as numpy copies it, by numpy, by what engines do, by the kernels' own source.

The CUDA source is compiled as C++ for the host, a block being one thread: its arithmetic is tested where there is no GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_reshard.arena import boxes, engine
from elastic_reshard.arena.boxes import CopyTable, array_at, host_strided, run_on_host
from elastic_reshard.arena.digests import WINDOW, digest_on_host, pieces_of
from elastic_reshard.arena.engine import EngineOps, engine_ops, engine_part
from elastic_reshard.arena.kernels import SOURCE
from elastic_reshard.arena.strided import Strided
from elastic_reshard.errors import ArenaError
from tests.arena.helpers import numbers

Run = Callable[[CopyTable], None]

SHIM = r"""
#include <cstdint>
#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(n)
struct Three { unsigned x, y, z; };
static Three threadIdx, blockIdx, blockDim{1, 1, 1}, gridDim;
struct uint4 { unsigned x, y, z, w; };
static void __syncthreads() {}
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
static unsigned long long __shfl_down_sync(unsigned, unsigned long long, int) { return 0; }
template <typename T> T __ldcs(const T* at) { return *at; }
template <typename T> void __stcs(T* at, T held) { *at = held; }
static void atomicAdd(unsigned long long* at, unsigned long long more) { *at += more; }
"""
LAUNCH = r"""
extern "C" void run_copy(const Entry* e, const Tile* t, u32 count) {
  for (blockIdx.x = 0; blockIdx.x < count; ++blockIdx.x) copy_table(e, t);
}
extern "C" void run_digest(const Piece* p, u32 count, u64* out, u32 share) {
  gridDim = {count, share, 1};
  for (blockIdx.x = 0; blockIdx.x < count; ++blockIdx.x) {
    digest_begin(p, count, out);
    for (blockIdx.y = 0; blockIdx.y < share; ++blockIdx.y) digest_add(p, out);
  }
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(SHIM + SOURCE + LAUNCH)
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O1",
            "-w",
            "-fno-strict-aliasing",
            "-shared",
            "-fPIC",
            str(source),
            "-o",
            str(library),
        ],
        check=True,
        timeout=100,
    )
    return ctypes.CDLL(str(Path(library)))


def by_kernel(kernels: ctypes.CDLL) -> Run:
    def run(table: CopyTable) -> None:
        at = [ctypes.c_void_p(a.ctypes.data) for a in (table.entries, table.tiles)]
        kernels.run_copy(*at, ctypes.c_uint32(len(table.tiles)))

    return run


def by_engine(table: CopyTable) -> None:
    carry_out(engine_ops(table))


def carry_out(ops: EngineOps) -> None:
    for target, source, nbytes in ops.runs:
        ctypes.memmove(target, source, nbytes)
    for op in ops.pitched:
        assert min(op.target_pitch, op.source_pitch) >= op.nbytes  # as CUDA wants it
        for row in range(op.rows):
            ctypes.memmove(op.target + row * op.target_pitch, op.source + row * op.source_pitch, op.nbytes)


@pytest.fixture(scope="module", params=["numpy", "engine", "kernel"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "kernel":
        return by_kernel(request.getfixturevalue("kernels"))
    return {"numpy": run_on_host, "engine": by_engine}[request.param]


class Side:
    """A box of an array of any dim order, off its alignment by some elements, in memory of its own."""

    def __init__(self, draw: st.DrawFn, extent: list[int], item: int) -> None:
        dims = range(len(extent))
        order = draw(st.permutations(list(dims)))
        before = [draw(st.integers(0, 3)) for _ in dims]
        after = [draw(st.integers(0, 3)) for _ in dims]
        whole = [n + b + a for n, b, a in zip(extent, before, after, strict=True)]
        off = draw(st.integers(0, 5)) * item
        count = int(np.prod(whole, dtype=np.int64))
        self.memory = np.zeros(count * item + 64, dtype=np.uint8)
        begin = -self.memory.ctypes.data % 16 + off % 48
        flat = self.memory[begin : begin + count * item].view(numbers(0, item).dtype)
        array: Any = flat.reshape([whole[d] for d in order]).transpose(np.argsort(order) if extent else ())
        self.box = array[(..., *(slice(b, b + n) for b, n in zip(before, extent, strict=True)))]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Side, Side]:
    dims = draw(st.integers(0, 6))
    extent = [draw(st.integers(0 if dims == 1 else 1, 40 if dims < 3 else 5)) for _ in range(dims)]
    if dims in {1, 2} and draw(st.booleans()):
        extent[-1] = draw(st.integers(100, 400))  # rows that are worth being cut
    item = draw(st.sampled_from([1, 2, 4, 8, 16]))
    target, source = Side(draw, extent, item), Side(draw, extent, item)
    source.box[...] = numbers(source.box.size, item).reshape(source.box.shape)
    return target, source


@settings(max_examples=120, deadline=None)
@given(sides=pairs())
def test_a_box_arrives_and_nothing_beside_it_is_written(run: Run, sides: tuple[Side, Side]) -> None:
    target, source = sides
    wanted = target.memory.copy()
    at = target.box.ctypes.data - target.memory.ctypes.data
    np.ndarray(target.box.shape, target.box.dtype, wanted, at, target.box.strides)[...] = source.box
    table = CopyTable.of([(host_strided(target.box), host_strided(source.box))])
    run(table)
    assert np.array_equal(target.memory, wanted)
    assert table.nbytes == target.box.nbytes


def test_a_whole_plan_is_one_table(run: Run) -> None:
    source = numbers(300 * 1000, 2).reshape(300, 1000)
    target = np.zeros_like(source)
    frm, to = host_strided(source), host_strided(target)
    cuts = [(r, c) for r in range(0, 300, 50) for c in range(0, 1000, 125)]
    table = CopyTable.of([(to[r : r + 50, c : c + 125], frm[r : r + 50, c : c + 125]) for r, c in cuts])
    run(table)
    assert np.array_equal(target, source)


def test_tiles_cover_each_entry_once_and_are_small() -> None:
    source, target = np.zeros((2, 3 << 20), np.uint8), np.zeros((2, 3 << 20), np.uint8)
    to, frm = host_strided(target), host_strided(source)
    table = CopyTable.of([(to, frm), (to[:, 0:99], frm[:, 0:99])])
    for number, entry in enumerate(table.entries):
        mine = table.tiles[table.tiles["entry"] == number]
        ends = mine["first"].astype(int) + mine["count"]
        assert mine["first"].tolist() == [0, *ends[:-1].tolist()]
        assert ends[-1] == int(entry["size"].astype(np.int64).prod())
        assert (mine["count"].astype(int) * int(entry["width"])).max() <= boxes.TILE_BYTES


def test_engines_take_the_large_boxes_of_far_memory_and_a_kernel_the_rest() -> None:
    near, far = numbers(1 << 16, 2).reshape(256, 256), numbers(1 << 16, 2).reshape(256, 256)[::-1].copy()
    targets = [np.zeros((256, 256), np.uint16) for _ in range(4)]
    frm = {"near": host_strided(near), "far": host_strided(far)}
    cuts = [
        (slice(0, 256), slice(0, 256)),
        (slice(0, 256), slice(0, 64)),
        (slice(0, 9), slice(0, 9)),
        (slice(0, 256), slice(0, 1)),
    ]
    pairs = [(host_strided(t)[cut], frm[side][cut]) for side in frm for t, cut in zip(targets, cuts, strict=True)]
    table = CopyTable.of(pairs[4:])
    ranges = [(far.ctypes.data, far.ctypes.data + far.nbytes)]
    ops, rest = engine_part(table, ranges, 20_000)
    assert [n for _, _, n in ops.runs] == [1 << 17]
    assert [(op.nbytes, op.rows) for op in ops.pitched] == [(128, 256)]
    assert rest is not None
    assert table.nbytes - rest.nbytes == (1 << 17) + 256 * 128
    for target in targets:
        target[:] = 0
    carry_out(ops)
    run_on_host(rest)
    for target, cut in zip(targets, cuts, strict=True):
        wanted = np.zeros_like(target)
        wanted[cut] = far[cut]
        assert np.array_equal(target, wanted)
    nothing, everything = engine_part(CopyTable.of(pairs[:4]), ranges, 20_000)
    assert not nothing
    assert everything is not None
    assert everything.nbytes == sum(t.nbytes for t, _ in pairs[:4])
    assert engine_part(CopyTable.of([pairs[4]]), ranges, 20_000)[1] is None


def test_operations_that_would_be_too_many_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed experts: as many operations as elements."""
    frm, to = (Strided(at << 40, (128, 2048, 768), (2048 * 768 * 2, 1536, 2), 2, None) for at in (1, 2))
    scattered = CopyTable.of([(to.reshape((128, 768, 2048)), frm.transpose((0, 2, 1)))])
    monkeypatch.setattr(engine, "_add", lambda *_: pytest.fail("made"))
    ops, rest = engine_part(scattered, [(1 << 40, 3 << 40)], 32 << 20)
    assert not ops
    assert rest is not None
    assert (len(rest), rest.nbytes) == (len(scattered), scattered.nbytes)


@pytest.mark.parametrize(
    ("make", "width"),
    [
        (lambda a: a[:64, :64], 16),
        (lambda a: a[:64, 8:72], 16),
        (lambda a: a[:64, 4:68], 8),
        (lambda a: a[:64, 1:65], 2),
        (lambda a: a.T[:64, :64], 16),
    ],
)
def test_elements_are_as_wide_as_they_may_be(make: Callable[[Any], Any], width: int) -> None:
    memory = np.zeros((256 * 256 * 2 + 16,), np.uint8)
    whole = memory[-memory.ctypes.data % 16 :][: 256 * 256 * 2].view(np.uint16).reshape(256, 256)
    box = make(whole)
    entry = CopyTable.of([(host_strided(box), host_strided(box))]).entries
    assert entry["width"].tolist() == [width]


def test_long_rows_off_their_alignment_have_an_aligned_middle() -> None:
    memory = np.zeros(1 << 16, np.uint8)
    odd = host_strided(memory[-memory.ctypes.data % 16 + 2 :][:8200].view(np.uint16))
    table = CopyTable.of([(odd, odd)])
    assert sorted(set(table.entries["width"].tolist())) == [2, 16]
    middle = table.entries[table.entries["width"] == 16]
    assert int(middle["size"][0].astype(int).prod()) * 16 >= 8200 - 30


def test_boxes_of_more_elements_than_an_index_has_are_split() -> None:
    many = Strided(1 << 20, (3, 1 << 30, 2), (1 << 32, 4, 1), 1, None)
    table = CopyTable.of([(many, many)])
    sizes = table.entries["size"].astype(np.int64).prod(axis=1)
    assert sizes.max() <= 1 << 30
    assert int((sizes * table.entries["width"]).sum()) == many.nbytes
    assert int(table.tiles["first"].max()) < 1 << 31


@given(size=st.integers(1, 1 << 30), n=st.integers(0, (1 << 31) - 1))
def test_division_without_a_division(size: int, n: int) -> None:
    mul, shift = boxes._divisor(size)
    for k in (n, n // size * size, max(0, n // size * size - 1)):
        assert mul < 1 << 32
        assert ((k * mul >> 32) + k) >> shift == k // size


def test_a_source_may_be_read_more_than_once(run: Run) -> None:
    """As expand() makes them; and rows that overlap, as unfold() does."""
    memory = numbers(64, 2)
    for strides in ((0, 2), (4, 2), (2, 2), (0, 0)):
        target = np.zeros((6, 5), np.uint16)
        source = Strided(memory.ctypes.data, (6, 5), strides, 2, None, memory)
        run(CopyTable.of([(host_strided(target), source)]))
        assert np.array_equal(target, np.lib.stride_tricks.as_strided(memory, (6, 5), strides))


def test_unlike_pairs_and_overlapping_targets_are_refused() -> None:
    a, b = host_strided(np.zeros((4, 4), np.uint16)), host_strided(np.zeros((4, 4), np.uint32))
    for target, source in ((a, b), (a, a[0:3, 0:4])):
        with pytest.raises(ArenaError, match="cannot copy"):
            CopyTable.of([(target, source)])
    spread = Strided(a.address, (4, 4), (0, 2), 2, None, a)
    with pytest.raises(ArenaError, match="overlap"):
        CopyTable.of([(spread, a)])


def test_host_memory_of_a_table_is_known() -> None:
    a, b = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    on = Strided(1 << 40, (64,), (1,), 1, object(), None)  # type: ignore[arg-type]
    at, bt = host_strided(a), host_strided(b)
    table = CopyTable.of([(on, at), (bt[0:8], at[0:8]), (bt[8:64], at[8:64])])
    assert sorted(table.hosts) == sorted([(a.ctypes.data, a.ctypes.data + 64), (b.ctypes.data, b.ctypes.data + 64)])


def _pieces(lengths: list[int], off: int) -> tuple[list[Strided], npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(5)
    memory = rng.integers(0, 256, sum(lengths) + off + 8, dtype=np.uint8)
    whole, found, at = host_strided(memory), [], off
    for n in lengths:
        found.append(whole[at : at + n])
        at += n
    return found, memory


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9000), min_size=1, max_size=5),
    off=st.integers(0, 9),
    salt=st.integers(0, 1 << 40),
    full=st.booleans(),
    share=st.integers(1, 3),
)
def test_digests_of_numpy_and_of_the_kernel_are_alike(
    kernels: ctypes.CDLL, lengths: list[int], off: int, salt: int, full: bool, share: int
) -> None:
    pieces, _ = _pieces(lengths, off)
    table = pieces_of(pieces, salt, full)
    out = np.zeros(len(pieces), np.uint64)
    addresses = ctypes.c_void_p(table.ctypes.data), ctypes.c_void_p(out.ctypes.data)
    kernels.run_digest(addresses[0], ctypes.c_uint32(len(table)), addresses[1], ctypes.c_uint32(share))
    assert np.array_equal(out, digest_on_host(pieces, salt, full))


def test_digests_tell_changes_apart() -> None:
    pieces, memory = _pieces([70_000], 0)
    seen = {int(digest_on_host(pieces, 0, True)[0])}
    for at in (0, 7, 8, 35_001, 69_999):
        memory[at] ^= 1
        seen.add(int(digest_on_host(pieces, 0, True)[0]))
        memory[at] ^= 1
    memory[:16] = np.roll(memory[:16], 8)  # words that changed places
    seen.add(int(digest_on_host(pieces, 0, True)[0]))
    assert len(seen) == 7
    zero = host_strided(np.zeros(64, np.uint8))
    zeros = [zero[0:n] for n in (8, 9, 16)]
    assert len(set(digest_on_host(zeros, 0, True).tolist())) == 3


def test_samples_look_at_another_place_for_another_number_and_salt() -> None:
    pieces, _ = _pieces([1 << 20] * 8, 0)
    first = pieces_of(pieces, 0, False)
    places = {int(row["address"]) - piece.address for row, piece in zip(first, pieces, strict=True)}
    assert len(places) == 8
    assert set(first["nbytes"].tolist()) == {WINDOW}
    assert all(int(r["address"]) + WINDOW <= p.address + p.nbytes for r, p in zip(first, pieces, strict=True))
    assert not np.array_equal(first, pieces_of(pieces, 1000, False))
    alike = pieces_of([pieces[0]] * 2, 3, False, numbers=[4, 4])
    assert alike[0] == alike[1]
    with pytest.raises(ArenaError, match="contiguous"):
        digest_on_host([pieces[0].reshape((1 << 10, 1 << 10)).transpose((1, 0))], 0, True)
    assert array_at(pieces[0]).size == 1 << 20
