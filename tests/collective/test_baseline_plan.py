"""The buckets of gather-and-broadcast: everything once, within the size, in an order that is the same for all."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from elastic_reshard.collective.baseline_plan import VARIANTS, BaselineOptions, Bucket, copies, plan, traffic
from elastic_reshard.errors import LayoutError
from elastic_reshard.layout import Declared, Mesh, ModelLayout, Placement, Replicate, Shard, StridedShard, TensorLayout
from elastic_reshard.layout.dtypes import itemsize

FOUR = Mesh.arange((4,))
GRID = Mesh.of([[3, 1], [0, 2]])


def model(mesh: Mesh, *placements: Placement) -> ModelLayout:
    """Tensors that all those placements can cut."""
    shapes = {"even": (16, 6), "odd": (5, 7), "long": (31, 2), "cube": (4, 3, 5), "few": (2, 4), "none": (0, 3)}
    dtypes = {
        "even": "bfloat16",
        "odd": "int8",
        "long": "float32",
        "cube": "complex128",
        "few": "bool",
        "none": "int64",
    }
    return ModelLayout({n: TensorLayout(s, dtypes[n], mesh, placements) for n, s in shapes.items()})


SOURCES = {
    "fsdp": model(FOUR, Shard(0)),
    "columns": model(FOUR, Shard(1)),
    "replicated": model(FOUR, Replicate()),
    "hsdp": model(GRID, Replicate(), Shard(0)),
    "fsdp over tp": model(GRID, StridedShard(0, 2), Shard(0)),
    "uneven": ModelLayout({"w": TensorLayout((9, 3), "int16", FOUR, (Declared(0, (0, 5, 5, 6, 9)),))}),
}
PACKS = (None, 1, 16, 100, 1 << 20)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("name", SOURCES)
def test_every_element_is_carried_once_from_where_its_holder_has_it(name: str, pack: int | None) -> None:
    source = SOURCES[name]
    carried = {n: np.zeros(t.shape, dtype=np.int64) for n, t in source.items()}
    for bucket in plan(source, pack):
        for share in bucket.shares:
            for piece in share.pieces:
                carried[piece.tensor][piece.box.slices()] += 1
                # The piece lies in one of the holder's boxes, at the same distance from the box's corner.
                assert any(
                    box.contains(piece.box)
                    and all(
                        at - start == lo - b
                        for at, start, lo, b in zip(piece.local, local, piece.box.lo, box.lo, strict=True)
                    )
                    for box, local in source[piece.tensor].boxes(share.holder)
                )
    assert all((times == 1).all() for times in carried.values())


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("name", SOURCES)
def test_buckets_keep_to_their_size_and_shares_are_aligned_runs(name: str, pack: int | None) -> None:
    for i, bucket in enumerate(plan(SOURCES[name], pack)):
        assert bucket.index == i
        assert bucket.home == tuple(sorted(bucket.home)) == tuple(s.holder for s in bucket.shares)
        at = 0
        for share in bucket.shares:
            assert share.start == at
            for piece in share.pieces:
                assert piece.at == at
                assert piece.at % 16 == 0
                assert piece.nbytes == piece.box.numel * itemsize(SOURCES[name][piece.tensor].dtype)
                at += -(-piece.nbytes // 16) * 16
            assert share.stop == at
        assert bucket.nbytes == at > 0
        pieces = [p for s in bucket.shares for p in s.pieces]
        if pack is None:
            assert len({p.tensor for p in pieces}) == 1
        elif len({(p.tensor, p.box.lo) for p in pieces}) > len(bucket.home):
            # Only what cannot be cut further, one element or one row of padding a holder, is above the size.
            assert bucket.nbytes <= pack


def test_even_shards_give_even_shares_and_full_buckets() -> None:
    source = ModelLayout({"w": TensorLayout((4096, 64), "bfloat16", FOUR, (Shard(0),))})
    buckets = plan(source, 1 << 16)
    assert [b.nbytes for b in buckets] == [1 << 16] * 8
    assert all(len({s.nbytes for s in b.shares}) == 1 for b in buckets)
    assert all(len(s.pieces) == 1 for b in buckets for s in b.shares)


def test_replicas_send_nothing() -> None:
    assert {b.home for b in plan(SOURCES["replicated"], None)} == {(0,)}
    # GRID's rows are replicas of each other; the first holder of each half is the smaller rank of its column.
    assert {b.home for b in plan(SOURCES["hsdp"], None)} == {(0, 1)}


def test_stages_take_turns() -> None:
    mesh = [Mesh.arange((2,)), Mesh.arange((2,), first=2)]
    tensors = {f"l{i}": TensorLayout((4, 4), "int32", mesh[i // 3], (Shard(0),)) for i in range(6)}
    assert [b.home for b in plan(ModelLayout(tensors), None)] == [(0, 1), (2, 3)] * 3


@pytest.mark.parametrize("name", SOURCES)
def test_copies_fill_every_destination_once(name: str) -> None:
    destination = ModelLayout(
        {n: TensorLayout(t.shape, t.dtype, FOUR, (Shard(len(t.shape) - 1),)) for n, t in SOURCES[name].items()}
    )
    for rank in FOUR.ranks:
        filled = {n: np.zeros(t.local_shape(rank), dtype=np.int64) for n, t in destination.items()}
        for bucket in plan(SOURCES[name], 40):
            for copy in copies(bucket, destination, rank):
                filled[copy.piece.tensor][copy.into] += 1
        assert all((times == 1).all() for times in filled.values())
    assert not [c for b in plan(SOURCES[name], 40) for c in copies(b, destination, 9)]


def _binomial(size: int) -> Counter[tuple[int, int]]:
    """gloo's broadcast tree by its own loop: (sender, receiver)."""
    edges: Counter[tuple[int, int]] = Counter()
    dim = max(1, (size - 1).bit_length())
    for rank in range(size):
        mask = (1 << dim) - 1
        for i in range(dim):
            mask ^= 1 << i
            peer = rank ^ (1 << i)
            if rank & mask == 0 and peer < size and not rank & (1 << i):
                edges[rank, peer] += 1
    return edges


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("destinations", [(4,), (4, 5, 6), (0, 1, 2, 3), (2, 3, 4, 5, 6, 7, 8)], ids=str)
def test_traffic_is_what_the_algorithms_send(options: BaselineOptions, destinations: tuple[int, ...]) -> None:
    buckets = plan(SOURCES["fsdp"], options.pack)
    sent, received = Counter[int](), Counter[int]()
    for b in buckets:
        for a, z, nbytes in _edges(b, destinations, options):
            sent[a] += nbytes
            received[z] += nbytes
    for rank in range(9):
        assert traffic(buckets, destinations, options, rank) == (sent[rank], received[rank])


def _edges(b: Bucket, destinations: tuple[int, ...], options: BaselineOptions) -> list[tuple[int, int, int]]:
    """(sender, receiver, bytes) of one bucket."""
    n, found = len(b.home), []
    for i, share in enumerate(b.shares):
        if options.gather == "root":
            pairs = [(i, 0)] if i else []
        elif options.wire == "p2p":
            pairs = [(i, j) for j in range(n) if j != i]
        else:
            pairs = [((a + i) % n, (z + i) % n) for a, z in _binomial(n)]
        found += [(b.home[a], b.home[z], share.nbytes) for a, z in pairs]
    spread = [b.root, *(d for d in destinations if d != b.root)]
    tree = _binomial(len(spread)) if options.wire == "collectives" else [(0, j) for j in range(1, len(spread))]
    return found + [(spread[a], spread[z], b.nbytes) for a, z in tree]


@pytest.mark.parametrize("wrong", [{"gather": "some"}, {"wire": "rdma"}, {"pack": 0}, {"depth": 0}], ids=str)
def test_options_refuse_nonsense(wrong: dict[str, object]) -> None:
    with pytest.raises(LayoutError, match=str(next(iter(wrong.values())))):
        BaselineOptions(**wrong)  # type: ignore[arg-type]
