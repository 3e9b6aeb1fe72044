"""Small models for the call's tests, with an oracle that knows what every element must be: plain index lists and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic_reshard.arena import empty
from elastic_reshard.collective import Report, reshard
from elastic_reshard.errors import ReshardError
from elastic_reshard.layout import (
    Box,
    Correspondence,
    Declared,
    Mesh,
    ModelLayout,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
    catalog,
)
from elastic_reshard.layout.dtypes import ITEMSIZE, itemsize
from elastic_reshard.transport import Endpoint
from tests.layout.oracle import held
from tests.processes import Rank

WORLD = 8
TOPOLOGIES: dict[str, list[int]] = {
    "isolated": list(range(WORLD)),
    "one domain": [0] * WORLD,
    "two domains": [0, 0, 0, 0, 1, 1, 1, 1],
    "mixed": [0, 1, 0, 2, 1, 0, 2, 2],
}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_FLOATS = {"float32": np.uint32, "float64": np.uint64}


@dataclass(frozen=True)
class Case:
    """A refit of a small model; ranks of both sides are members."""

    source: ModelLayout
    destination: ModelLayout
    correspondences: tuple[Correspondence, ...] | None = None
    wire: torch.dtype | Mapping[str, torch.dtype] | None = None

    def carried(self, name: str, of: Callable[[str], np.ndarray]) -> np.ndarray:
        """The destination's global array [*shape, k], made from the sources' [*shape, k] that `of` gives."""
        if self.correspondences is None:
            return of(name)
        shape = self.destination[name].shape
        found: np.ndarray | None = None
        for c in self.correspondences:
            if c.destination != name:
                continue
            part = of(c.source)
            part = part[c.source_box.slices()] if c.source_box is not None else part
            if c.permute is not None:
                part = part.transpose(*c.permute, len(shape))
            if found is None:
                found = np.zeros((*shape, part.shape[-1]), part.dtype)
            found[c.destination_box.slices() if c.destination_box is not None else ...] = part
        assert found is not None
        return found

    def expected(self, name: str, version: int) -> np.ndarray:
        """The destination's global tensor as bytes [*shape, itemsize]."""
        data = self.carried(name, lambda n: whole(n, self.source[n], version))
        sources = [c.source for c in self.correspondences or () if c.destination == name] or [name]
        have, want = self.source[sources[0]].dtype, self.destination[name].dtype
        if have == want:
            return data
        cast = tensor_of(data, have).to(getattr(torch, want))
        return np.frombuffer(as_bytes(cast), dtype=np.uint8).reshape(*cast.shape, itemsize(want))


def whole(name: str, layout: TensorLayout, version: int) -> np.ndarray:
    """The global tensor as bytes [*shape, itemsize]: each element's index, mixed with name and version."""
    size = itemsize(layout.dtype)
    index = np.arange(layout.numel, dtype=np.uint64) + np.uint64(1009 * len(name) + 7919 * sum(name.encode()))
    mixed = index * np.uint64(0x9E3779B97F4A7C15) + np.uint64(version * 0x632BE59BD9B4E019 % 2**64)
    if layout.dtype == "bool":
        bits = mixed >> np.uint64(40) & np.uint64(1)
        return bits.astype(np.uint8).reshape(*layout.shape, 1)
    if layout.dtype in _FLOATS:  # finite ones, so that casts are exact to compare
        bits = (mixed >> np.uint64(64 - 8 * size)).astype(_FLOATS[layout.dtype])
        bits &= _FLOATS[layout.dtype](~(1 << (8 * size - 2)) & (1 << (8 * size)) - 1)
        return bits.view(np.uint8).reshape(*layout.shape, size)
    words = np.stack([mixed, ~mixed], axis=1)
    return (
        words.view(np.uint8).reshape(-1, 16)[:, 8 - size if size <= 8 else 0 :][:, :size].reshape(*layout.shape, size)
    )


def part(layout: TensorLayout, rank: int, data: np.ndarray) -> np.ndarray | None:
    """What a rank holds of a global array [*shape, k], by index lists; None outside of the mesh."""
    if rank not in layout.mesh.ranks:
        return None
    if layout.declared is not None:
        (box,) = [d.box for d in layout.declared if d.rank == rank]
        per_dim = [list(range(a, b)) for a, b in zip(box.lo, box.hi, strict=True)]
    else:
        coordinate = [int(c[0]) for c in np.nonzero(layout.mesh.grid == rank)]
        per_dim = [held(n, d, layout.mesh, layout.placements, coordinate) for d, n in enumerate(layout.shape)]
    return data[np.ix_(*per_dim)] if per_dim else data


def ingress(case: Case, domains: Sequence[int]) -> dict[int, int]:
    """By brute force: the distinct bytes that each domain needs and none of its members has."""
    found = dict.fromkeys(domains, 0)
    for domain in found:
        near = [m for m, d in enumerate(domains) if d == domain]
        has: dict[str, np.ndarray] = {}
        for name, layout in case.source.items():
            has[name] = np.zeros((*layout.shape, 1), bool)
            for m in near:
                has[name] |= _mask(layout, m)
        for name, layout in case.destination.items():
            wants = np.zeros((*layout.shape, 1), bool)
            for m in near:
                wants |= _mask(layout, m)
            there = case.carried(name, lambda n: has[n])  # noqa: B023 - called at once
            found[domain] += int((wants & ~there).sum()) * itemsize(layout.dtype)
    return found


def _mask(layout: TensorLayout, rank: int) -> np.ndarray:
    mask = np.zeros((layout.numel, 1), bool)
    mine = part(layout, rank, np.arange(layout.numel).reshape(*layout.shape, 1))
    if mine is not None:
        mask[mine.ravel()] = True
    return mask.reshape(*layout.shape, 1)


def tensor_of(data: np.ndarray, dtype: str) -> Tensor:
    """A contiguous tensor with these bytes [*shape, itemsize]."""
    flat = torch.frombuffer(bytearray(data.tobytes()) or bytearray(16), dtype=torch.uint8)[: data.size]
    return flat.view(getattr(torch, dtype)).view(data.shape[:-1])


def as_bytes(t: Tensor) -> bytes:
    word = _WORDS[t.element_size()]
    return torch.empty(t.shape, dtype=word).copy_(t.view(word)).numpy().tobytes()


def room(shape: Sequence[int], dtype: str, how: str) -> Tensor:
    """Memory of one of the kinds that callers bring."""
    d: torch.dtype = getattr(torch, dtype)
    shape = tuple(shape)
    if how == "arena":
        return empty(shape, d)
    if how == "ordinary" or not shape:
        return torch.empty(shape, dtype=d)
    if how == "transposed":
        return empty(shape[::-1], d).permute(*range(len(shape))[::-1])
    assert how == "every other"
    return torch.empty((2 * shape[0], *shape[1:]), dtype=d)[::2]


KINDS = ("arena", "ordinary", "transposed", "every other")
MEMORY = ("arena", "ordinary", "mixed")


def tensors(layout: ModelLayout, rank: int, memory: str) -> dict[str, Tensor] | None:
    """A rank's local tensors, not filled; None if it has none. memory: one of MEMORY."""
    found = {}
    for number, (name, t) in enumerate(layout.items()):
        shape = t.local_shape(rank)
        if shape is not None:
            how = KINDS[(number + rank) % len(KINDS)] if memory == "mixed" else memory
            found[name] = room(shape, t.dtype, how)
    return found or None


def put(t: Tensor, data: np.ndarray) -> None:
    """Write bytes [*shape, itemsize], whatever the strides."""
    word = _WORDS[t.element_size()]
    dtype = str(word).removeprefix("torch.")
    t.view(word).copy_(tensor_of(data, dtype))


def fill(case: Case, source: Mapping[str, Tensor] | None, rank: int, version: int) -> None:
    """Write a version into a rank's source tensors."""
    for name, t in (source or {}).items():
        data = part(case.source[name], rank, whole(name, case.source[name], version))
        assert data is not None
        put(t, data)


def poison(destination: Mapping[str, Tensor] | None) -> None:
    """Make every element one that no version has by chance in all its bytes."""
    for t in (destination or {}).values():
        put(t, np.full((*t.shape, t.element_size()), 0x01 if t.dtype == torch.bool else 0xA5, np.uint8))


def wrong(case: Case, destination: Mapping[str, Tensor] | None, rank: int, version: int) -> list[str]:
    """Names of tensors that are not bit for bit what they must be."""
    found = []
    for name, t in (destination or {}).items():
        data = part(case.destination[name], rank, case.expected(name, version))
        assert data is not None
        if as_bytes(t) != data.tobytes():
            found.append(name)
    return found


def form(me: Rank, domains: Sequence[int], name: str = "endpoint", **more: Any) -> Endpoint:
    """An endpoint of all ranks."""
    return Endpoint.form(torch.distributed.PrefixStore(name, me.store()), me.rank, me.size, domains=domains, **more)


def call(
    case: Case,
    endpoint: Endpoint,
    source: Mapping[str, Tensor] | None,
    destination: Mapping[str, Tensor] | None,
    **more: Any,
) -> Report:
    """One call; layouts are given by those who have tensors."""
    report = reshard(
        source,
        destination,
        group=endpoint,
        source_layout=case.source if source is not None else None,
        destination_layout=case.destination if destination is not None else None,
        correspondences=case.correspondences,
        wire_dtype=case.wire,
        **{"deadline": 40.0, **more},
    )
    assert isinstance(report, Report)
    return report


def error_of(work: Callable[[], object]) -> ReshardError | None:
    """What it raises, None if nothing."""
    try:
        work()
    except ReshardError as error:
        return error
    return None


def catalog_case(model: str, source: str, destination: str, first: int | None = None) -> Case:
    """A catalog model; the destination's ranks follow the source's, or begin at `first`."""
    spec = catalog.model(model)
    a, b = catalog.Parallelism.parse(source), catalog.Parallelism.parse(destination)
    return Case(catalog.layout(spec, a), catalog.layout(spec, b, first_rank=a.world if first is None else first))


S0, S1, R = Shard(0), Shard(1), Replicate()


def assorted(mesh: Mesh, how: Sequence[Placement], other: Sequence[Placement]) -> ModelLayout:
    """Tensors of many shapes and dtypes, uneven, empty and 0-d; 2-D ones alternate between two ways to be cut."""
    shapes = [(16, 6), (5, 7), (3, 4), (1, 3), (31, 2), (0, 5), (3, 0), (12, 40), (64, 33)]
    dtypes = itertools.cycle(("bfloat16", "float32", "int8", "complex128", "bool", "float8_e4m3fn", "int64"))
    found = {
        f"w{i}": TensorLayout(shape, dtype, mesh, tuple(other if i % 2 else how))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    whole_ = tuple(Replicate() for _ in mesh.shape)
    found["norm"] = TensorLayout((3,), "float32", mesh, tuple(p if p == S0 else R for p in how))
    found["step"] = TensorLayout((), "int64", mesh, whole_)
    return ModelLayout(found)


def of_dtypes(mesh: Mesh, placement: Placement) -> ModelLayout:
    return ModelLayout({d: TensorLayout((9, 4), d, mesh, (placement,)) for d in ITEMSIZE if hasattr(torch, d)})


def of_dims(mesh: Mesh, placements: Callable[[int], Sequence[Placement]]) -> ModelLayout:
    """0 to 5 dims."""
    shape = (4, 3, 5, 2, 3)
    return ModelLayout({f"d{n}": TensorLayout(shape[:n], "int32", mesh, tuple(placements(n))) for n in range(6)})


def declared() -> Case:
    """Two sources hold 2 and 3 of 5 rows, in falling order of ranks; destinations by the usual rule."""
    boxes = {1: Box((0, 0), (2, 40)), 0: Box((2, 0), (5, 40))}
    source = ModelLayout({"w": TensorLayout.declare((5, 40), "int32", boxes)})
    return Case(source, ModelLayout({"w": TensorLayout((5, 40), "int32", Mesh.arange((2,), first=2), (S0,))}))


def fused() -> Case:
    """q, k and v of several sizes into one tensor, and a transposed one."""
    four, two = Mesh.arange((4,)), Mesh.of([[4, 6], [5, 7]])
    rows = {"q": 24, "k": 8, "v": 8}
    source = ModelLayout(
        {name: TensorLayout((n, 10), "bfloat16", four, (S0 if name != "k" else S1,)) for name, n in rows.items()}
        | {"up": TensorLayout((13, 9), "float32", four, (S0,)), "unused": TensorLayout((4,), "int8", four, (S0,))}
    )
    destination = ModelLayout(
        {
            "qkv": TensorLayout((40, 10), "bfloat16", two, (S0, S1)),
            "down": TensorLayout((9, 13), "float32", two, (R, S0)),
        }
    )
    given, at = [], 0
    for name, n in rows.items():
        given.append(Correspondence(name, "qkv", None, Box((at, 0), (at + n, 10))))
        at += n
    return Case(source, destination, (*given, Correspondence("up", "down", permute=(1, 0))))


def masters(wire: Any) -> Case:
    """Mixed-precision training: fp32 masters become bf16, integers and what is bf16 already stay."""
    shapes = {"a": (33, 16), "b": (7,), "c": (), "d": (70, 40)}
    kept = {"step": ((), "int64"), "mask": ((9,), "bool"), "bf16": ((12, 5), "bfloat16")}
    four, two = Mesh.arange((4,)), Mesh.of([[4, 5], [6, 7]])

    def side(mesh: Mesh, dtype: str, how: Sequence[Placement]) -> ModelLayout:
        return ModelLayout(
            {
                name: TensorLayout(shape, d, mesh, tuple(how) if shape else (R,) * len(mesh.shape))
                for name, (shape, d) in ({n: (s, dtype) for n, s in shapes.items()} | kept).items()
            }
        )

    return Case(side(four, "float32", [S0]), side(two, "bfloat16", [R, S0]), None, wire)


CATALOG: dict[str, Callable[[], Case]] = {
    "fsdp4 to tp4": lambda: catalog_case("tiny", "fsdp4", "tp4"),
    "fsdp4 to tp2 dp2": lambda: catalog_case("tiny", "fsdp4", "tp2xdp2"),
    "tp2 pp2 to tp4": lambda: catalog_case("tiny", "tp2xpp2", "tp4"),
    "fsdp2 tp2 to dp3": lambda: catalog_case("tiny", "fsdp2xtp2", "dp3"),
    "experts: ep2 to tp2 dp2": lambda: catalog_case("tiny-moe", "ep2", "tp2xdp2"),
    "experts: fsdp2 ep2 to ep4": lambda: catalog_case("tiny-moe", "fsdp2xep2", "ep4"),
}
_FOUR, _NEXT = Mesh.arange((4,)), Mesh.arange((4,), first=4)
CASES: dict[str, Callable[[], Case]] = {
    **CATALOG,
    "colocated": lambda: Case(assorted(_FOUR, [S0], [S1]), assorted(Mesh.of([3, 2, 1, 0]), [S1], [S0])),
    "partly colocated": lambda: Case(assorted(_FOUR, [S0], [S1]), assorted(Mesh.of([6, 2, 0]), [S0], [S0])),
    "uneven, empty, 0-d": lambda: Case(assorted(_FOUR, [S0], [S1]), assorted(_NEXT, [S1], [S0])),
    "two axes on one dim": lambda: Case(
        assorted(Mesh.arange((2, 2)), [StridedShard(0, 2), S0], [S0, S0]), assorted(Mesh.of([5, 7, 4]), [R], [S0])
    ),
    "every dtype": lambda: Case(of_dtypes(Mesh.arange((2,)), S0), of_dtypes(Mesh.arange((2,), first=6), S1)),
    "0 to 5 dims": lambda: Case(
        of_dims(Mesh.arange((2,)), lambda n: [S0] if n else [R]), of_dims(Mesh.of([5, 3, 7]), lambda n: [R])
    ),
    "replicas to replicas": lambda: Case(
        of_dims(Mesh.arange((3,)), lambda n: [R]), of_dims(Mesh.arange((3,), first=4), lambda n: [R])
    ),
    "declared": declared,
    "uneven by statement": lambda: Case(
        ModelLayout({"w": TensorLayout((9, 50), "int16", _FOUR, (Declared(0, (0, 5, 5, 6, 9)),))}),
        ModelLayout({"w": TensorLayout((9, 50), "int16", Mesh.of([7, 4]), (Declared(1, (0, 1, 50)),))}),
    ),
    "fused and transposed": fused,
    "cast": lambda: masters(dict.fromkeys("abcd", torch.bfloat16)),
}
