"""The install copy against brute force: layouts of every kind, in place and by a function, out of the slots of some ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard as TorchShard

from elastic_reshard.arena.copies import raw
from elastic_reshard.arena.host import MappedArena
from elastic_reshard.arena.slots import SlotArena, SlotReader
from elastic_reshard.errors import ArenaError, LayoutError, LayoutMismatch, RefitError, ShardLost
from elastic_reshard.layout import (
    Box,
    Correspondence,
    Declared,
    DeclaredBox,
    Mesh,
    ModelLayout,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
)
from elastic_reshard.layout.fragments import check_fragment, fragment_id, joined
from elastic_reshard.member.puller import Origin, Puller, Request
from elastic_reshard.plan import Plan
from tests.layout.test_dtensor_rule import mesh_of, stated
from tests.member.world import Array, SourceRank, expected, local_of, ranks_of, strided, truth, whole_of
from tests.plan.strategies import examples, refits

Items = Iterator[tuple[str, torch.Tensor]]


def live_of(model: ModelLayout, rank: int) -> dict[str, torch.Tensor]:
    shapes = {name: t.local_shape(rank) for name, t in model.items()}
    return {
        name: strided(shape, model[name].dtype, number + rank)
        for number, (name, shape) in enumerate(shapes.items())
        if shape is not None
    }


class Taking:
    """An install function that keeps a copy of the bits it was handed."""

    def __init__(self) -> None:
        self.got: dict[str, Array] = {}
        self.places: set[int] = set()

    def __call__(self, tensors: Items) -> None:
        self.got, self.places = {}, set()
        for name, tensor in tensors:
            assert name not in self.got
            self.got[name] = raw(tensor).copy()
            self.places.add(tensor.data_ptr() if tensor.numel() else 0)


def same(got: Mapping[str, Array], want: Mapping[str, Array]) -> bool:
    return got.keys() == want.keys() and all(
        got[n].shape == w.shape and np.ascontiguousarray(got[n]).tobytes() == w.tobytes() for n, w in want.items()
    )


def check_all(source: ModelLayout, destination: ModelLayout, ways: Any, present: list[int], version: int = 3) -> None:
    """Every destination rank installs twice, both ways, from either slot."""
    ranks = {rank: SourceRank(source, rank) for rank in present}
    pullers: list[tuple[int, dict[str, torch.Tensor], Puller, Taking | None]] = []
    for rank in ranks_of(destination):
        live, handed = live_of(destination, rank), Taking()
        pullers.append((rank, live, Puller(rank, tensors=live, given=destination), None))
        pullers.append((rank, {}, Puller(rank, install=handed, given=destination), handed))
    for again in range(2):
        origins = {rank: s.publish(version + again, slot=again) for rank, s in ranks.items()}
        wholes = whole_of(source, destination, ways, version + again)
        for rank, live, puller, taking in pullers:
            prepared = puller.check(Request(source, destination, origins, ways))
            assert prepared.changed() == []
            want = expected(destination, wholes, rank)
            assert prepared.run() == prepared.nbytes == sum(w.nbytes for w in want.values())
            assert prepared.changed() == []
            assert set(prepared.ranks) <= set(present)
            assert same(taking.got if taking is not None else {n: raw(t) for n, t in live.items()}, want), rank


def covered(source: ModelLayout, ways: tuple[Correspondence, ...], present: list[int]) -> bool:
    """By marking elements: whether the present ranks hold all that correspondences take."""
    for c in ways:
        layout = source[c.source]
        index, found = np.arange(layout.numel).reshape(layout.shape), np.zeros(layout.numel, dtype=bool)
        for rank in present:
            part = local_of(layout, index, rank)
            if part is not None:
                found[part.ravel()] = True
        box = c.source_box.slices() if c.source_box is not None else ...
        if not found[index[box].ravel()].all():
            return False
    return True


@examples(60)
@given(refits(most=4), st.data())
def test_any_layouts_any_correspondences_any_ranks_missing(plan: Plan, data: st.DataObject) -> None:
    source, destination = plan.sources[0].layout, plan.destinations[0].layout
    ways = plan.sources[0].correspondences
    assert ways is not None
    ranks = ranks_of(source)
    gone = data.draw(st.sets(st.sampled_from(ranks)) if data.draw(st.booleans()) else st.just(set()))
    present = [rank for rank in ranks if rank not in gone]
    if covered(source, ways, present):
        check_all(source, destination, ways, present)
        return
    origins = {rank: SourceRank(source, rank).publish(1) for rank in present}
    live = live_of(destination, ranks_of(destination)[0])
    with pytest.raises(ShardLost):
        Puller(ranks_of(destination)[0], tensors=live, given=destination).check(
            Request(source, destination, origins, ways)
        )
    assert not any(raw(t).any() for t in live.values())


def model(shape: tuple[int, ...], mesh: Mesh, *placements: Placement, dtype: str = "bfloat16") -> TensorLayout:
    return TensorLayout(shape, dtype, mesh, placements)


M2, M3, M4, M22 = Mesh.arange((2,)), Mesh.arange((3,)), Mesh.arange((4,)), Mesh.arange((2, 2))
R, S0, S1 = Replicate(), Shard(0), Shard(1)
QKV = (
    Correspondence("q", "qkv", None, Box((0, 0), (8, 6))),
    Correspondence("k", "qkv", None, Box((8, 0), (12, 6))),
    Correspondence("v", "qkv", None, Box((12, 0), (16, 6))),
    Correspondence("proj", "proj_t", None, None, (1, 0)),
)
CASES: dict[str, tuple[dict[str, TensorLayout], dict[str, TensorLayout], Any, list[int]]] = {
    "FSDP 4 to TP 2": (
        {"w": model((9, 8), M4, S0), "b": model((9,), M4, S0)},
        {"w": model((9, 8), M2, S1), "b": model((9,), M2, R)},
        None,
        [0, 1, 2, 3],
    ),
    "HSDP, a replica of each shard missing": (
        {"w": model((10, 7), M22, R, S0)},
        {"w": model((10, 7), M3, S1)},
        None,
        [0, 3],
    ),
    "FSDP over TP, strided": (
        {"w": model((16, 6), M22, StridedShard(0, 2), S0), "v": model((6, 9), M22, S0, S1)},
        {"w": model((16, 6), M2, S0), "v": model((6, 9), M2, S1)},
        None,
        [0, 1, 2, 3],
    ),
    "uneven, declared offsets": (
        {"w": model((17, 3), M3, Declared(0, (0, 2, 2, 17)), dtype="float32")},
        {"w": model((17, 3), M2, S0, dtype="float32")},
        None,
        [0, 2],  # rank 1 holds nothing
    ),
    "PP stages": (
        {"l0": model((4, 4), Mesh.of([0, 1], ("tp",)), S0), "l1": model((4, 4), Mesh.of([2, 3], ("tp",)), S1)},
        {"l0": model((4, 4), M2, S1), "l1": model((4, 4), M2, S0)},
        None,
        [0, 1, 2, 3],
    ),
    "EP 4 to EP 2 x TP 2": (
        {"experts": model((8, 6, 4), M4, S0)},
        {"experts": model((8, 6, 4), M22, S0, Shard(2))},
        None,
        [0, 1, 2, 3],
    ),
    "one rank to many replicas": (
        {"w": model((5, 5), Mesh.of([2], ("one",)), R)},
        {"w": model((5, 5), M3, R)},
        None,
        [2],
    ),
    "fused qkv and a transposed one": (
        {
            "q": model((8, 6), M2, S0),
            "k": model((4, 6), M2, S0),
            "v": model((4, 6), M2, S0),
            "proj": model((6, 10), M2, S1),
            "unused": model((3,), M2, R),
        },
        {"qkv": model((16, 6), M4, S0), "proj_t": model((10, 6), M4, S1)},
        QKV,
        [0, 1],
    ),
    "scalars, empty ones and flags": (
        {
            "s": model((), M2, R, dtype="float64"),
            "e": model((0, 3), M2, S0),
            "few": model((1, 2), M4, S0),
            "m": model((5,), M2, S0, dtype="bool"),
            "f8": model((6, 2), M2, S1, dtype="float8_e4m3fn"),
        },
        {
            "s": model((), M3, R, dtype="float64"),
            "e": model((0, 3), M3, S1),
            "few": model((1, 2), M3, S0),
            "m": model((5,), M3, S0, dtype="bool"),
            "f8": model((6, 2), M3, S0, dtype="float8_e4m3fn"),
        },
        None,
        [0, 1, 2, 3],
    ),
}


@pytest.mark.parametrize("how", CASES)
def test_the_usual_layouts(how: str) -> None:
    have, want, ways, present = CASES[how]
    check_all(ModelLayout(have), ModelLayout(want), ways, present)


def one(dtype: str = "float32", shape: tuple[int, ...] = (8, 4)) -> tuple[ModelLayout, ModelLayout]:
    return ModelLayout({"w": model(shape, M2, S0, dtype=dtype)}), ModelLayout({"w": model(shape, M2, S1, dtype=dtype)})


def test_what_was_cast_for_the_wire_is_installed_as_it_was_cast() -> None:
    own, _ = one("float32")
    wire = ModelLayout({"w": model((8, 4), M2, S0)})
    destination = ModelLayout({"w": model((8, 4), M2, S1)})
    sources = [SourceRank(own, rank, torch.bfloat16) for rank in range(2)]
    origins = {s.rank: s.publish(5) for s in sources}
    assert joined("source", [sources[0].filler.describe().body])["w"].content_id == wire["w"].content_id
    live = torch.zeros(8, 2, dtype=torch.bfloat16)
    Puller(1, tensors={"w": live}, given=destination).check(Request(wire, destination, origins)).run()
    whole = torch.from_numpy(truth("w", own["w"], 5).view(np.float32))
    assert raw(live).tobytes() == raw(whole.bfloat16()[:, 2:].contiguous()).tobytes()
    with pytest.raises(LayoutMismatch, match="source float32, destination bfloat16"):
        Puller(1, tensors={"w": live}, given=destination).check(Request(own, destination, origins))


def test_a_dtensor_is_filled_in_its_local_part() -> None:
    source = ModelLayout({"w": model((7, 4), M2, S1)})
    origins = {rank: SourceRank(source, rank).publish(9) for rank in range(2)}
    mesh = mesh_of((3,), 1)
    local = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    live = {"w": stated(local, (7, 4), mesh, [TorchShard(0)])}
    puller = Puller(1, tensors=lambda: live)
    body, fragment = puller.describe()
    check_fragment(body)
    assert fragment == fragment_id(body)
    destination = ModelLayout({"w": model((7, 4), M3, S0)})
    puller.check(Request(source, destination, origins)).run()
    assert raw(live["w"].to_local().detach()).tobytes() == truth("w", source["w"], 9)[3:6].tobytes()


def test_replicas_share_the_load() -> None:
    source = ModelLayout({f"w{i}": model((64, 8), M4, R) for i in range(32)})
    destination = ModelLayout({f"w{i}": model((64, 8), Mesh.arange((1,)), R) for i in range(32)})
    origins = {rank: SourceRank(source, rank).publish(1) for rank in range(4)}
    puller = Puller(0, tensors=live_of(destination, 0), given=destination)
    assert puller.check(Request(source, destination, origins)).ranks == (0, 1, 2, 3)
    piece = next(iter(puller._slices.values())).slice
    assert np.bincount(piece.legs.peer, piece.nbytes, minlength=4)[:4].tolist() == [piece.nbytes.sum() / 4] * 4
    fewer = {rank: origins[rank] for rank in (1, 3)}
    assert puller.check(Request(source, destination, fewer)).ranks == (1, 3)


def test_a_slot_rewritten_before_between_or_after_shows() -> None:
    source, destination = one()
    sources = [SourceRank(source, rank) for rank in range(2)]
    origins = {s.rank: s.publish(1) for s in sources}
    handed: list[str] = []

    def meddling(tensors: Items) -> None:
        for name, _ in tensors:
            handed.append(name)
            sources[1].publish(2)

    prepared = Puller(0, install=meddling, given=destination).check(Request(source, destination, origins))
    assert prepared.changed() == []
    prepared.run()
    assert handed == ["w"]
    assert prepared.changed() == [1]
    late = Puller(0, tensors=live_of(destination, 0), given=destination).check(Request(source, destination, origins))
    assert late.changed() == [1]
    sources[0].arena.begin_write(0)
    assert late.changed() == [0, 1]
    # Half written slots are none, even to a request that names their odd generation.
    odd = {0: Origin(sources[0].reader, 0, 3), 1: Origin(sources[1].reader, 0, 4)}
    half = Puller(0, tensors=live_of(destination, 0), given=destination).check(Request(source, destination, odd))
    assert sources[0].reader.generation(0) == 3
    assert half.changed() == [0]


def test_slots_that_are_not_read_do_not_matter() -> None:
    source = ModelLayout({"w": model((8, 4), M2, S0)})
    destination = ModelLayout({"w": model((8, 4), M2, S0)})
    sources = [SourceRank(source, rank) for rank in range(2)]
    origins = {s.rank: s.publish(1) for s in sources}
    prepared = Puller(0, tensors=live_of(destination, 0), given=destination).check(
        Request(source, destination, origins)
    )
    sources[1].publish(2)
    assert prepared.ranks == (0,)
    assert prepared.changed() == []


def test_programs_are_bound_once_for_each_slot_and_again_when_tensors_move() -> None:
    source, destination = one()
    sources = [SourceRank(source, rank) for rank in range(2)]
    live = live_of(destination, 0)
    puller = Puller(0, tensors=lambda: live, given=destination)
    seen = []
    for version in range(4):
        origins = {s.rank: s.publish(version, version % 2) for s in sources}
        prepared = puller.check(Request(source, destination, origins))
        seen.append(prepared._steps)
        prepared.run()
        assert same({"w": raw(live["w"])}, expected(destination, whole_of(source, destination, None, version), 0))
    assert seen[0] is seen[2]
    assert seen[1] is seen[3]
    old, live["w"] = live["w"], torch.zeros(8, 2)
    kept = raw(old).copy()
    origins = {s.rank: s.publish(7, 0) for s in sources}
    puller.check(Request(source, destination, origins)).run()
    assert same({"w": raw(live["w"])}, expected(destination, whole_of(source, destination, None, 7), 0))
    assert np.array_equal(raw(old), kept)


def maps_of(inode: int) -> int:
    return sum(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


def test_an_arena_that_is_forgotten_is_unmapped() -> None:
    source, destination = one()
    live = live_of(destination, 0)
    puller = Puller(0, tensors=live, given=destination)
    sources = [SourceRank(source, rank) for rank in range(2)]
    origins = {s.rank: s.publish(1) for s in sources}
    inode = os.stat(f"/proc/self/fd/{sources[0].arena.fd}").st_ino
    puller.check(Request(source, destination, origins)).run()
    assert maps_of(inode) == 2  # the owner's and the reader's
    puller.forget(sources[0].reader)
    sources[0].reader.close()
    assert maps_of(inode) == 1


def test_a_mismatch_is_refused_before_anything_moves() -> None:
    source, destination = one()
    origins = {rank: SourceRank(source, rank).publish(1) for rank in range(2)}
    live = {"w": torch.zeros(8, 2), "b": torch.zeros(3)}
    wanted = ModelLayout({**destination, "b": model((3,), M2, R, dtype="float32")})
    with pytest.raises(LayoutMismatch, match="b: missing"):
        Puller(0, tensors=live, given=wanted).check(Request(source, wanted, origins))
    # The layout that the group agreed on is not what this rank has by now.
    for now in ({"w": torch.zeros(8, 3)}, {"w": torch.zeros(8, 2, dtype=torch.int32)}, {}):
        with pytest.raises(LayoutMismatch, match="rank 0"):
            Puller(0, tensors=now).check(Request(source, destination, origins))
    with pytest.raises(ShardLost, match="w"):
        Puller(0, tensors={"w": live["w"]}, given=destination).check(Request(source, destination, {0: origins[0]}))
    assert not live["w"].any()


def test_a_slot_that_does_not_hold_what_the_layout_says_is_refused() -> None:
    source, destination = one()
    good = SourceRank(source, 0).publish(1)
    live = {"w": torch.zeros(8, 2)}
    for specs in (
        {"w": ((4, 4), torch.int32)},
        {"w": ((4, 5), torch.float32)},
        {"w": ((2, 8), torch.float32)},
        {"v": ((4, 4), torch.float32)},
    ):
        arena = SlotArena(specs, touch=False)
        arena.begin_write(0)
        generation = arena.end_write(0)
        bad = Origin(SlotReader(MappedArena(arena.readonly_fd()), arena.table(), "a1"), 0, generation)
        with pytest.raises(ArenaError, match="a1"):
            Puller(0, tensors=live, given=destination).check(Request(source, destination, {0: good, 1: bad}))
    with pytest.raises(ArenaError, match="slot 2"):
        Puller(0, tensors=live, given=destination).check(
            Request(source, destination, {0: good, 1: Origin(good.reader, 2, 2)})
        )
    assert not live["w"].any()


def three() -> tuple[ModelLayout, dict[int, Origin]]:
    source = ModelLayout({f"w{i}": model((2 + i, 4), M2, S1) for i in range(3)})
    return source, {rank: SourceRank(source, rank).publish(1) for rank in range(2)}


def test_a_function_gets_whole_tensors_in_the_models_order_out_of_one_buffer() -> None:
    source, origins = three()
    destination = ModelLayout({f"w{i}": model((2 + i, 4), Mesh.arange((1,)), R) for i in (2, 0, 1)})
    taking = Taking()
    puller = Puller(0, install=taking, given=destination)
    assert puller.buffer_nbytes(destination) == 4 * 4 * 2
    prepared = puller.check(Request(source, destination, origins))
    for _ in range(2):
        prepared.run()
        assert list(taking.got) == ["w2", "w0", "w1"]
        assert len(taking.places) == 1
        assert same(taking.got, expected(destination, whole_of(source, destination, None, 1), 0))

    shapes: list[tuple[int, ...]] = []

    def reshaping(tensors: Items) -> None:
        for _, tensor in tensors:
            shapes.append(tuple(tensor.shape))
            tensor.unsqueeze_(0).neg_()

    meddler = Puller(0, install=reshaping, given=destination)
    for _ in range(2):
        meddler.check(Request(source, destination, origins)).run()
    assert shapes == [(4, 4), (2, 4), (3, 4)] * 2
    with pytest.raises(ArenaError, match="takes 32 bytes, the install buffer may have 31"):
        Puller(0, install=taking, given=destination, limit=31).check(Request(source, destination, origins))
    Puller(0, install=taking, given=destination, limit=32).check(Request(source, destination, origins)).run()


def test_a_function_that_does_not_take_everything_has_failed() -> None:
    source, origins = three()
    destination = ModelLayout({name: model(t.shape, Mesh.arange((1,)), R) for name, t in source.items()})
    kept: list[Items] = []

    def none(tensors: Items) -> None:
        kept.append(tensors)

    def two(tensors: Items) -> None:
        next(tensors), next(tensors)

    def to_the_last(tensors: Items) -> None:
        for name, _ in tensors:
            if name == "w2":
                return

    def lazily(tensors: Items) -> object:
        return (name for name, _ in tensors)

    for function, count in ((none, 0), (two, 2), (to_the_last, 3), (lazily, 0)):
        prepared = Puller(0, install=function, given=destination).check(Request(source, destination, origins))
        with pytest.raises(RefitError, match=f"after {count} of 3 tensors"):
            prepared.run()
    with pytest.raises(RefitError, match="this install is over"):
        next(kept[0])

    def failing(tensors: Items) -> None:
        list(tensors)
        raise KeyError("the engine's own")

    with pytest.raises(KeyError, match="the engine's own"):
        Puller(0, install=failing, given=destination).check(Request(source, destination, origins)).run()
    Puller(0, install=dict, given=destination).check(Request(source, destination, origins)).run()


def test_a_function_needs_a_layout_and_excludes_tensors() -> None:
    _, destination = one()
    for arguments in ({}, {"install": dict}, {"install": dict, "given": destination, "tensors": {}}):
        with pytest.raises(LayoutError, match="either"):
            Puller(0, **arguments)
    ways = (Correspondence("w", "w", permute=(1, 0)),)
    for puller in (
        Puller(0, install=dict, given=destination, correspondences=ways),
        Puller(0, tensors={"w": torch.zeros(8, 2)}, given=destination, correspondences=ways),
    ):
        body, fragment = puller.describe()
        check_fragment(body)
        assert body["whole"] is True
        assert body["correspondences"] == [{"source": "w", "destination": "w", "permute": [1, 0]}]
        assert fragment == fragment_id(body)


def test_what_no_region_covers_stays_in_place_and_is_zero_for_a_function() -> None:
    source = ModelLayout({"v": model((8,), M2, S0), "w": model((6,), M2, S0)})
    boxes = tuple(DeclaredBox(0, Box((lo,), (lo + 2,)), (at,)) for lo, at in ((0, 0), (4, 3)))
    one_rank = Mesh.of([0], ("member",))
    destination = ModelLayout({"v": model((8,), one_rank, R), "w": TensorLayout((6,), "bfloat16", one_rank, (), boxes)})
    origins = {rank: SourceRank(source, rank).publish(1) for rank in range(2)}
    taking, live = Taking(), {"v": torch.zeros(8).bfloat16(), "w": torch.full((5,), 7.0).bfloat16()}
    for puller in (Puller(0, install=taking, given=destination), Puller(0, tensors=live, given=destination)):
        assert puller.check(Request(source, destination, origins)).run() == 24
    whole = truth("w", source["w"], 1)
    assert taking.got["w"].tobytes() == np.insert(whole[[0, 1, 4, 5]], 2, 0).tobytes()
    assert raw(live["w"]).tobytes() == np.insert(whole[[0, 1, 4, 5]], 2, raw(torch.tensor(7.0).bfloat16())).tobytes()


def test_a_rank_without_a_part_installs_nothing() -> None:
    source, _ = one()
    origins = {rank: SourceRank(source, rank).publish(1) for rank in range(2)}
    destination = ModelLayout({"w": model((8, 4), Mesh.of([0], ("one",)), R, dtype="float32")})
    for puller in (Puller(2, tensors={}), Puller(2, install=dict, given=destination)):
        prepared = puller.check(Request(source, destination, origins))
        assert (prepared.run(), prepared.ranks, prepared.changed()) == (0, (), [])
