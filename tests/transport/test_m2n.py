"""The M2N path above the library: what is checked, marked and raised. The library itself is played by copies; see
`test_m2n_gpu` for the real one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.arena.boxes import CopyTable, array_at
from elastic_reshard.arena.pretend import PretendDevice, open_pretend
from elastic_reshard.arena.strided import Strided
from elastic_reshard.communicator import Name, Registry
from elastic_reshard.communicator.pretend import PretendBackend
from elastic_reshard.errors import ArenaError, DigestMismatch, TransferError
from elastic_reshard.layout import Box, Mesh, ModelLayout, Shard, TensorLayout
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.plan import Destination, Plan, PlanOptions, Source, Topology
from elastic_reshard.plan.m2n import Fast, fast_part
from elastic_reshard.transport import m2n
from elastic_reshard.transport.m2n import FastRun, Memory, windows
from tests.communicator.world import formed, together
from tests.plan.strategies import examples

SHAPES = {"rows": (32, 48), "columns": (16, 64), "flat": (4096,), "cube": (4, 6, 8), "large": (64, 2048)}
CUTS = {"rows": Shard(0), "columns": Shard(1), "flat": Shard(0), "cube": Shard(2), "large": Shard(1)}
SOURCES, SIZE = 2, 4


def _plan() -> Plan:
    fsdp, tp = Mesh.arange((2,)), Mesh.arange((2,))
    have = ModelLayout({n: TensorLayout(s, "float32", fsdp, (Shard(0),)) for n, s in SHAPES.items()})
    want = ModelLayout({n: TensorLayout(s, "float32", tp, (CUTS[n],)) for n, s in SHAPES.items()})
    return Plan(
        (Source(have, (0, 1)),), (Destination(want, (2, 3)),), Topology((0, 1, 2, 2)), PlanOptions(landing=True)
    )


class World:
    """All ranks' memory on one pretend device; elements' values are their global index."""

    def __init__(self, plan: Plan) -> None:
        self.device: PretendDevice = open_pretend(7)
        self.part = fast_part(plan)
        assert not self.part.reasons, "every tensor here is meant to fit"
        self.memory: dict[tuple[int, str], Strided] = {}
        for call in self.part.calls:
            for side in (call.source, call.destination):
                for rank in side.ranks:
                    shape = side.local_shape(call.shape)
                    held = self.device.scratch(math.prod(shape) * itemsize(call.dtype))
                    strided = held.strided(0, (math.prod(shape),), (4,), 4).reshape(shape)
                    self.memory[rank, call.name] = strided
                    array_at(strided)[...] = self.right(call, rank) if side is call.source else 0xFFFFFFFF

    @staticmethod
    def right(call: Fast, rank: int) -> Any:
        side = call.source if rank in call.source.ranks else call.destination
        whole = np.arange(math.prod(call.shape), dtype=np.uint32).reshape(call.shape)
        return whole[side.box(rank, call.shape).slices()]

    def of(self, rank: int) -> Memory:
        return Memory(lambda _, name: self.memory[rank, name], lambda _, name: self.memory[rank, name])

    def exact(self, rank: int, call: Fast) -> bool:
        return np.array_equal(array_at(self.memory[rank, call.name]), self.right(call, rank))


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(box.lo, box.hi, outer.lo, strict=True))


class Copied:
    """As M2N moves: each destination's whole region, in the stream's order. spoil: done after a call of that name."""

    def __init__(
        self, world: World, rank: int, stream: Any, said: list[str], spoil: Mapping[str, Callable[[], None]]
    ) -> None:
        self._world, self._rank, self._stream, self._said, self._spoil = world, rank, stream, said, spoil

    def enter(self, call: Fast, source: Strided | None, target: Strided | None) -> None:
        self._said.append(call.name)
        assert (source is not None) == (self._rank in call.source.ranks)
        if target is not None:
            mine = call.destination.box(self._rank, call.shape)
            pairs = []
            for rank in call.source.ranks:
                box = call.source.box(rank, call.shape)
                shared = box.intersect(mine)
                if shared is None:
                    continue
                held = self._world.memory[rank, call.name]
                pairs.append((target[_within(shared, mine)], held[_within(shared, box)]))
            self._world.device.copy(CopyTable.of(pairs), self._stream)
        if call.name in self._spoil:
            self._stream.synchronize()
            self._spoil[call.name]()

    def finalize(self) -> None:
        self._said.append("finalize")


class Watch:
    def __init__(self, full: bool = False, intact: bool = True) -> None:
        self.full, self.salt, self._intact = full, 12345, intact
        self.begun = self.ended = 0
        self.landed_: dict[str, tuple[int, int]] = {}

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> None:
        self.ended += 1

    def intact(self) -> bool:
        return self._intact

    def landed(self, call: Fast, cells: tuple[int, int]) -> None:
        assert call.name not in self.landed_
        self.landed_[call.name] = cells


def _itself(made: Copied) -> Copied:
    return made


class Played:
    """One run by all ranks: what each raised, and what was seen."""

    def __init__(
        self, world: World, watches: list[Watch], batch: int = 1 << 30, **spoil: tuple[int, Callable[[Played], None]]
    ) -> None:
        self.world, self.watches = world, watches
        self.said: list[list[str]] = [[] for _ in range(SIZE)]
        registries = [Registry() for _ in range(SIZE)]
        self.ends = formed([PretendBackend(world.device) for _ in range(SIZE)], registries, Name(1, "m2n"))
        for end in self.ends:
            assert not isinstance(end, BaseException), end
        self.runs = []
        for rank, end in enumerate(self.ends):
            mine = {name: partial(do, self) for name, (who, do) in spoil.items() if who == rank}
            made = Copied(world, rank, end.network.stream, self.said[rank], mine)
            self.runs.append(
                FastRun(world.part, rank, partial(_itself, made), end.network, world.of(rank), watches[rank], batch)
            )
        deadline = time.monotonic() + 10
        self.errors = together([lambda r=r: self._one(r, deadline) for r in range(SIZE)])  # type: ignore[misc]
        for registry in registries:
            registry.abort_all(time.monotonic() + 5, "over")

    def _one(self, rank: int, deadline: float) -> None:
        try:
            self.runs[rank].run(deadline)
        except BaseException as error:
            self.ends[rank].mark(str(error))
            raise


@pytest.mark.parametrize("full", [False, True])
def test_everything_lands_bit_exact_and_its_cells_are_marked(full: bool) -> None:
    plan = _plan()
    world, watches = World(plan), [Watch(full) for _ in range(SIZE)]
    played = Played(world, watches)
    assert played.errors == [None] * SIZE
    names = [call.name for call in world.part.calls]
    assert played.said == [[*names, "finalize"]] * SIZE, "the same calls in the same order, then finalized"
    assert not any(run.broken for run in played.runs)
    for rank in (2, 3):
        assert all(world.exact(rank, call) for call in world.part.calls)
        marked = np.concatenate([np.arange(*cells) for cells in watches[rank].landed_.values()])
        assert sorted(marked.tolist()) == plan.cells[0].cells_of_rank(rank - 2).tolist()
    assert not watches[0].landed_
    whole = sum(math.prod(s) * 4 for s in SHAPES.values())
    assert sum(run.received for run in played.runs) == sum(run.sent for run in played.runs) == whole


def test_batches_are_cut_alike_and_each_waits_for_the_window() -> None:
    world, watches = World(_plan()), [Watch() for _ in range(SIZE)]
    played = Played(world, watches, batch=20_000)
    assert played.errors == [None] * SIZE
    assert {(watch.begun, watch.ended) for watch in watches} == {(3, 3)}, "6 and 4 KiB, 16 and 0.75 KiB, 512 KiB"


def test_a_byte_that_differs_is_named_and_nothing_of_its_batch_is_marked() -> None:
    world, watches = World(_plan()), [Watch(full=True) for _ in range(SIZE)]

    def spoil(_: Played) -> None:
        array_at(world.memory[3, "large"])[40, 1000] ^= 1

    played = Played(world, watches, batch=20_000, large=(3, spoil))
    assert isinstance(played.errors[3], DigestMismatch), played.errors
    assert [(name, peer) for name, _, peer in played.errors[3].ranges] == [("large", 1)]
    assert played.runs[3].broken
    assert "large" not in watches[3].landed_
    assert "cube" in watches[3].landed_, "of an earlier batch"
    assert "large" in watches[2].landed_, "its own bytes were right"
    assert "finalize" not in played.said[3]


def test_what_was_rewritten_meanwhile_is_taken_by_nobody() -> None:
    world, watches = World(_plan()), [Watch(intact=rank != 1) for rank in range(SIZE)]
    played = Played(world, watches)
    assert "rewritten" in str(played.errors[1])
    assert all(isinstance(played.errors[rank], DigestMismatch) for rank in (2, 3)), played.errors
    assert {peer for _, _, peer in played.errors[2].ranges} == {1}
    assert not watches[2].landed_
    assert not watches[3].landed_


def test_a_failed_call_leaves_a_process_that_must_end() -> None:
    world, watches = World(_plan()), [Watch() for _ in range(SIZE)]

    def fail(played: Played) -> None:
        for end in played.ends:
            end.mark("a peer failed")
        raise TransferError("the library failed")

    played = Played(world, watches, cube=(0, fail))
    assert str(played.errors[0]) == "the library failed"
    assert all(isinstance(error, TransferError) for error in played.errors)
    assert all(run.broken for run in played.runs)
    assert not any("finalize" in said for said in played.said)


def test_memory_that_is_not_what_the_plan_says_is_refused_before_a_call() -> None:
    world = World(_plan())
    whole = world.memory[2, "cube"]
    gaps = (whole.strides[0] * 2, *whole.strides[1:])
    world.memory[2, "cube"] = Strided(whole.address, whole.shape, gaps, whole.itemsize, whole.device, whole.owner)
    run = FastRun(world.part, 2, pytest.fail, _Nothing(), world.of(2), Watch())  # type: ignore[arg-type]
    with pytest.raises(ArenaError, match="cube"):
        run.run(time.monotonic() + 5)
    assert not run.broken


class _Nothing:
    """A network that is not used."""


def test_without_the_library_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(m2n, "import_module", missing)
    with pytest.raises(TransferError, match="nccl-extensions"):
        m2n.NcclM2n(1, open_pretend(7).stream())


@st.composite
def _boxes(draw: st.DrawFn) -> Box:
    lo = draw(st.lists(st.integers(0, 50), min_size=1, max_size=3))
    return Box(tuple(lo), tuple(a + draw(st.integers(1, 200 if len(lo) < 3 else 30)) for a in lo))


@given(box=_boxes(), item=st.sampled_from([1, 2, 4, 8]), salt=st.integers(0, 2**64 - 1))
@examples(60)
def test_windows_lie_inside_and_all_of_them_tile_the_box(box: Box, item: int, salt: int) -> None:
    (one,) = windows(box, item, full=False, salt=salt)
    assert box.contains(one)
    assert 0 < one.numel * item <= 4096
    if box.numel * item <= 4096:
        assert one == box
    times = np.zeros(box.shape, dtype=np.int64)
    for part in windows(box, item, full=True, salt=salt, most=512):
        assert part.numel * item <= 512
        times[_within(part, box)] += 1
    assert (times == 1).all()


def test_windows_wander_with_the_salt() -> None:
    box = Box((0, 0), (1000, 1000))
    places = {next(windows(box, 2, full=False, salt=n)).lo for n in range(100)}
    assert len(places) > 90
