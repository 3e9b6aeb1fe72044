"""The publish copy: bits and casts, tensors that move or change between publishes, DTensors, and what is refused."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from elastic_reshard.arena.copies import raw
from elastic_reshard.arena.host import HostArena, MappedArena, locate
from elastic_reshard.arena.slots import SlotArena, SlotReader
from elastic_reshard.errors import ArenaError, LayoutMismatch
from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.layout.dtensor import local_of
from elastic_reshard.layout.fragments import check_fragment, fragment_id, joined
from elastic_reshard.member.filler import Filler
from tests.layout.test_dtensor_rule import mesh_of, stated
from tests.member.world import strided


def made(filler: Filler) -> SlotArena:
    return SlotArena(filler.describe().specs, touch=False)


def bits(tensor: torch.Tensor) -> bytes:
    return np.ascontiguousarray(raw(tensor)).tobytes()


def published(filler: Filler, arena: SlotArena, slot: int) -> dict[str, bytes]:
    """Publish, and read it as a peer does."""
    filler.describe()
    generation = filler.fill(arena, slot).generation
    reader = SlotReader(MappedArena(arena.readonly_fd()), arena.table(), arena.arena_id)
    assert reader.generation(slot) == generation
    return {name: reader.array(slot, name).tobytes() for name in reader.names(slot)}


def random_bits(tensor: torch.Tensor, seed: int) -> None:
    found = np.random.default_rng(seed).integers(0, 256, tensor.numel() * tensor.element_size(), dtype=np.uint8)
    raw(tensor)[...] = found.view(raw(tensor).dtype).reshape(tensor.shape)


DTYPES = ("bool", "uint8", "float8_e4m3fn", "bfloat16", "int32", "float32", "float64", "complex64", "complex128")
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (7,), (5, 3), (2, 3, 4)]


def test_every_dtype_shape_and_stride_arrives_bit_for_bit_in_each_slot() -> None:
    live = {f"{d} {s} {k}": strided(s, d, k) for d in DTYPES for s in SHAPES for k in range(3)}
    live["tied"] = live["bfloat16 (5, 3) 1"]  # under two names: stored twice
    live["expanded"] = torch.zeros(1, 3).expand(4, 3)
    filler = Filler(live, None, None, 0)
    arena = made(filler)
    for version in range(4):
        for number, name in enumerate(sorted(live.keys() - {"tied", "expanded"})):
            random_bits(live[name], 1000 * version + number)
        live["expanded"][0, :] = version
        found = published(filler, arena, version % 2)
        assert found == {name: bits(t) for name, t in live.items()}


def test_a_wire_dtype_casts_what_can_be_cast_and_nothing_else() -> None:
    live = {
        "w": torch.randn(6, 4) * 1e3,
        "t": torch.randn(4, 6).t(),
        "half": torch.randn(5).half(),
        "same": torch.randn(5).bfloat16(),
        "scalar": torch.randn(()),
        "steps": torch.arange(9),
        "mask": torch.tensor([True, False]),
        "z": torch.randn(3, dtype=torch.complex64),
    }
    filler = Filler(live, None, torch.bfloat16, 0)
    said = joined("source", [filler.describe().body])
    wire = {n: torch.bfloat16 if t.is_floating_point() else t.dtype for n, t in live.items()}
    assert {n: t.dtype for n, t in said.items()} == {n: str(d).removeprefix("torch.") for n, d in wire.items()}
    assert published(filler, made(filler), 0) == {n: bits(t.to(wire[n])) for n, t in live.items()}

    named = Filler(live, None, {"w": torch.float16, "elsewhere": torch.float16}, 0)
    assert {n: d for n, (_, d) in named.describe().specs.items()} == {
        n: torch.float16 if n == "w" else t.dtype for n, t in live.items()
    }
    assert published(named, made(named), 1)["w"] == bits(live["w"].half())


def test_a_cast_asked_by_name_that_is_never_made_is_refused() -> None:
    live = {"steps": torch.arange(9), "w": torch.randn(3), "mask": torch.tensor([True])}
    with pytest.raises(LayoutMismatch) as caught:
        Filler(live, None, {"steps": torch.bfloat16, "mask": torch.float32, "w": torch.bfloat16}, 0).describe()
    assert [(v.tensor, v.kind) for v in caught.value.violations] == [("mask", "dtype"), ("steps", "dtype")]


def test_a_given_layout_is_told_whole_with_wire_dtypes() -> None:
    mesh = Mesh.arange((2,))
    layout = ModelLayout(
        {
            "b": TensorLayout((5, 4), "float32", mesh, (Shard(0),)),
            "a": TensorLayout((3,), "int64", mesh, (Replicate(),)),
            "stage1": TensorLayout((3,), "float32", Mesh.of([1], ("pp",)), (Replicate(),)),
        }
    )
    live = {"b": torch.randn(3, 4), "a": torch.arange(3)}
    described = Filler(live, layout, torch.bfloat16, 0).describe()
    check_fragment(described.body)
    assert described.body["whole"] is True
    assert described.fragment == fragment_id(described.body)
    said = joined("source", [described.body])
    assert list(said) == ["b", "a", "stage1"]
    assert [t.dtype for t in said.values()] == ["bfloat16", "int64", "bfloat16"]
    other = Filler(live | {"stage1": torch.randn(3), "b": torch.randn(2, 4)}, layout, torch.bfloat16, 1).describe()
    assert other.fragment == described.fragment
    assert other.specs["b"] == ((2, 4), torch.bfloat16)
    with pytest.raises(LayoutMismatch) as caught:
        Filler({"b": torch.randn(4, 4), "more": torch.zeros(1)}, layout, None, 0).describe()
    assert {(v.tensor, v.kind) for v in caught.value.violations} == {
        ("b", "shape"),
        ("a", "missing"),
        ("more", "extra"),
    }


def test_an_unchanged_model_is_described_once_and_prepared_once() -> None:
    live = {f"w{i}": torch.randn(4, 4) for i in range(5)}
    filler = Filler(lambda: {name: t.detach() for name, t in live.items()}, None, torch.bfloat16, 0)  # new objects
    first = filler.describe()
    arena = made(filler)
    assert filler.describe() is first
    published(filler, arena, 0)
    prepared = filler._prepared[arena][0]
    live["w3"].add_(1)
    assert published(filler, arena, 0)["w3"] == bits(live["w3"].bfloat16())
    assert filler._prepared[arena][0] is prepared
    assert filler.describe() is first


def test_tensors_that_moved_or_were_made_anew_are_found() -> None:
    live = {"a": torch.randn(8, 4), "b": torch.nn.Parameter(torch.randn(6)), "c": torch.randn(3)}
    filler = Filler(lambda: live, None, None, 0)
    first, arena = filler.describe(), made(filler)
    assert published(filler, arena, 0) == {n: bits(t) for n, t in live.items()}
    old = live["a"]
    live["a"] = torch.randn(8, 4)
    live["b"].data = torch.randn(6)
    live["c"] = torch.randn(6)[::2]
    assert filler.describe().fragment == first.fragment
    assert published(filler, arena, 0) == {n: bits(t) for n, t in live.items()}
    assert bits(old) != bits(live["a"])
    live["a"] = live["a"].t().contiguous().t()  # other strides
    assert published(filler, arena, 0) == {n: bits(t) for n, t in live.items()}


def test_another_layout_has_another_fragment_and_needs_another_arena() -> None:
    live = {"a": torch.randn(8, 4), "b": torch.randn(2)}
    filler = Filler(lambda: live, None, None, 0)
    first, arena = filler.describe(), made(filler)
    before = published(filler, arena, 0)
    live["a"] = torch.randn(4, 8)
    second = filler.describe()
    assert second.fragment != first.fragment
    with pytest.raises(ArenaError, match=r"\['a'\]"):
        filler.fill(arena, 0)
    assert arena.generation(0) == 2  # not touched
    assert arena.tensor(0, "a").numpy().tobytes() == before["a"]
    assert published(filler, made(filler), 0)["a"] == bits(live["a"])


def test_dtensors_are_told_by_their_placements_and_copied_by_their_local_part() -> None:
    fragments = []
    for rank in range(3):
        mesh = mesh_of((3,), rank)
        part = torch.randn(3 if rank < 2 else 1, 4)
        live = {
            "w": stated(part, (7, 4), mesh, [TorchShard(0)]),
            "norm": stated(torch.randn(4), (4,), mesh, [TorchReplicate()]),
            "rows": stated(torch.randn(1 if rank < 2 else 0, 2), (2, 2), mesh, [TorchShard(0)]),
            "plain": torch.randn(2),
        }
        filler = Filler(live, None, torch.bfloat16, rank)
        described = filler.describe()
        fragments.append(described.body)
        found = published(filler, made(filler), 1)
        assert found["w"] == bits(part.bfloat16())
        assert filler.describe() is described
        live["w"] = stated(torch.randn(part.shape), (7, 4), mesh, [TorchShard(0)])  # optimizers may replace parameters
        assert filler.describe().fragment == described.fragment
        assert published(filler, made(filler), 1)["w"] == bits(local_of(live["w"]).bfloat16())
    whole = joined("source", fragments)
    assert whole["w"].content_id == TensorLayout((7, 4), "bfloat16", Mesh.arange((3,)), (Shard(0),)).content_id


def is_open(fd: int, file: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == file
    except OSError:
        return False


def test_tensors_made_for_one_publish_are_not_kept() -> None:
    """The memory of a callable's tensors, told by the descriptor that owns it."""
    made_in: list[tuple[int, str]] = []

    def build() -> dict[str, torch.Tensor]:
        tensor = HostArena(4096, f"built {len(made_in)}").empty((1024,), torch.float32)
        tensor.fill_(len(made_in))
        at = locate(tensor)
        assert at is not None
        made_in.append((at.fd, os.readlink(f"/proc/self/fd/{at.fd}")))
        return {"w": tensor}

    filler = Filler(build, None, None, 0)
    filler.describe()
    assert is_open(*made_in[0])  # until it is filled
    arena = SlotArena({"w": ((1024,), torch.float32)})
    filler.fill(arena, 0)
    gc.collect()
    assert not is_open(*made_in[0])
    for version in range(1, 4):
        filler.describe()
        filler.fill(arena, version % 2)
        assert float(arena.tensor(version % 2, "w")[5]) == version
    filler.fill(arena, 0)  # asks by itself
    assert float(arena.tensor(0, "w")[5]) == 4
    filler.describe()
    filler.release()
    gc.collect()
    assert [is_open(*one) for one in made_in] == [False] * 6


def test_tensors_that_cannot_be_copied_are_refused_before_the_slot_is_touched() -> None:
    with pytest.raises(ArenaError, match="w is on meta"):
        Filler({"w": torch.empty(3, device="meta")}, None, None, 0).describe()
    lazy = Filler({"w": torch.randn(3, dtype=torch.complex64).conj()}, None, None, 0)
    arena = SlotArena({"w": ((3,), torch.complex64)})
    with pytest.raises(ArenaError, match="conj"):
        lazy.fill(arena, 0)
    assert arena.generation(0) == 0


def test_nothing_at_all_can_be_published() -> None:
    filler = Filler({}, None, torch.bfloat16, 0)
    arena = made(filler)
    assert filler.fill(arena, 1).nbytes == 0
    assert arena.generation(1) == 2
