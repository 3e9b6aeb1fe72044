"""Gather-and-broadcast between real processes, bit by bit against an oracle of plain index lists."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from elastic_reshard.collective.baseline import (
    Baseline,
    BaselineGroups,
    BaselineOptions,
    BaselineReport,
    gather_and_broadcast,
)
from elastic_reshard.errors import LayoutError, LayoutMismatch, PeerLost, PlanMismatch, ReshardError, TransferTimeout
from elastic_reshard.layout import (
    Box,
    Declared,
    Mesh,
    ModelLayout,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
)
from elastic_reshard.layout.dtypes import ITEMSIZE, itemsize
from tests.layout.oracle import held
from tests.processes import Rank, run_ranks

OPTIONS = [
    BaselineOptions(gather, pack, wire, depth)  # type: ignore[arg-type]
    for gather, wire in itertools.product(("all", "root"), ("collectives", "p2p"))
    for pack, depth in ((None, 2), (96, 3), (64 << 20, 1))
]


@dataclass(frozen=True)
class Case:
    """A refit of a small model."""

    source: ModelLayout
    destination: ModelLayout
    size: int

    def ranks(self, side: ModelLayout) -> list[int]:
        return sorted({r for t in side.values() for r in t.mesh.ranks})


def tensors(mesh: Mesh | Sequence[Mesh], how: Sequence[Placement], other: Sequence[Placement]) -> ModelLayout:
    """A model of every kind of tensor; 2-D ones alternate between two ways to be cut; several meshes are stages."""
    shapes = [(16, 6), (5, 7), (10, 4), (1, 3), (31, 2), (0, 5), (3, 0), (12, 16), (64, 8)]
    stages = [mesh] if isinstance(mesh, Mesh) else list(mesh)
    found = {}
    for i, (shape, dtype) in enumerate(zip(shapes, itertools.cycle(("bfloat16", "float32", "int8")), strict=False)):
        at = stages[i * len(stages) // len(shapes)]
        found[f"w{i}"] = TensorLayout(shape, dtype, at, tuple(other if i % 2 else how))
    whole = tuple(Replicate() for _ in stages[-1].shape)
    found["norm"] = TensorLayout((7,), "float32", stages[0], whole)
    found["step"] = TensorLayout((), "int64", stages[-1], whole)
    return ModelLayout(found)


def of_dtypes(mesh: Mesh, placement: Placement) -> ModelLayout:
    return ModelLayout({d: TensorLayout((9, 4), d, mesh, (placement,)) for d in ITEMSIZE if hasattr(torch, d)})


def declared(first: int, parts: int) -> ModelLayout:
    """Uneven blocks of rows, in falling order of ranks; the last member but one has none."""
    cuts = np.array([0, 4, 4, 5, 11])[: parts + 1]
    cuts[-1] = 11
    boxes = {first + parts - 1 - i: Box((int(cuts[i]), 0), (int(cuts[i + 1]), 3)) for i in range(parts)}
    return ModelLayout({"w": TensorLayout.declare((11, 3), "bfloat16", boxes)})


S0, S1, R = Shard(0), Shard(1), Replicate()
FOUR, TWO = Mesh.arange((4,)), Mesh.arange((2,), first=4)
CASES: dict[str, Callable[[], Case]] = {
    "fsdp4 to tp2": lambda: Case(tensors(FOUR, [S0], [S0]), tensors(TWO, [S0], [S1]), 6),
    "tp2 pp2 to tp4": lambda: Case(
        tensors([Mesh.arange((2,)), Mesh.arange((2,), first=2)], [S0], [S1]),
        tensors(Mesh.arange((4,), first=4), [S0], [S1]),
        8,
    ),
    "replicas to tp3": lambda: Case(
        tensors(Mesh.of([[2, 1], [0, 3]]), [R, S0], [S1, R]), tensors(Mesh.of([5, 4, 6]), [S1], [S0]), 7
    ),
    "fsdp2 over tp2 to dp2": lambda: Case(
        tensors(Mesh.arange((2, 2)), [StridedShard(0, 2), S0], [S0, S1]), tensors(TWO, [R], [R]), 6
    ),
    "colocated": lambda: Case(tensors(FOUR, [S0], [S1]), tensors(Mesh.of([3, 2, 1, 0]), [S1], [S0]), 4),
    "partly colocated": lambda: Case(tensors(FOUR, [S0], [S1]), tensors(Mesh.of([4, 2, 0]), [S0], [S1]), 5),
    "one to one": lambda: Case(
        tensors(Mesh.arange((1,)), [S0], [S0]), tensors(Mesh.arange((1,), first=1), [S0], [S1]), 2
    ),
    "every dtype": lambda: Case(of_dtypes(Mesh.arange((2,)), S0), of_dtypes(Mesh.arange((2,), first=2), S1), 4),
    # Above the size at which a point-to-point broadcast is cut into messages.
    "several messages": lambda: Case(
        ModelLayout({"w": TensorLayout((1301, 2000), "float32", Mesh.arange((2,)), (S0,))}),
        ModelLayout({"w": TensorLayout((1301, 2000), "float32", Mesh.arange((2,), first=2), (S1,))}),
        4,
    ),
    "declared": lambda: Case(declared(0, 4), declared(4, 2), 6),
    "uneven": lambda: Case(
        ModelLayout({"w": TensorLayout((9, 5), "int16", FOUR, (Declared(0, (0, 5, 5, 6, 9)),))}),
        ModelLayout({"w": TensorLayout((9, 5), "int16", TWO, (Declared(1, (0, 1, 5)),))}),
        6,
    ),
}


def whole(name: str, layout: TensorLayout, version: int) -> np.ndarray:
    """The global tensor as bytes [*shape, itemsize]: the element's own index, with name and version mixed in."""
    size = itemsize(layout.dtype)
    index = np.arange(layout.numel, dtype=np.uint64) + np.uint64(1009 * len(name) + 7919 * sum(name.encode()))
    mixed = (index * np.uint64(2 * version + 1)).reshape(-1, 1)
    if layout.dtype == "bool":
        return (
            ((mixed * np.uint64(2654435761) >> np.uint64(13)) & np.uint64(1)).astype(np.uint8).reshape(*layout.shape, 1)
        )
    words = np.concatenate([mixed, ~mixed], axis=1) if size == 16 else mixed
    return (
        np.ascontiguousarray(words)
        .view(np.uint8)
        .reshape(-1, 16 if size == 16 else 8)[:, :size]
        .reshape(*layout.shape, size)
    )


def part(name: str, layout: TensorLayout, rank: int, version: int) -> np.ndarray | None:
    """What a rank holds of it, by index lists; None outside of the mesh."""
    if rank not in layout.mesh.ranks:
        return None
    if layout.declared is not None:
        (box,) = [d.box for d in layout.declared if d.rank == rank]
        per_dim = [list(range(a, b)) for a, b in zip(box.lo, box.hi, strict=True)]
    else:
        coordinate = [int(c[0]) for c in np.nonzero(layout.mesh.grid == rank)]
        per_dim = [held(n, d, layout.mesh, layout.placements, coordinate) for d, n in enumerate(layout.shape)]
    data = whole(name, layout, version)
    return data[np.ix_(*per_dim)] if per_dim else data


def tensor(data: np.ndarray, dtype: str, *, strided: bool) -> Tensor:
    """Bytes as a tensor; strided: not contiguous, every other row (column if there is but one dim) of a larger one."""
    shape = data.shape[:-1]
    flat = torch.frombuffer(bytearray(data.tobytes()) or bytearray(16), dtype=torch.uint8)[: data.size]
    dense = flat.view(getattr(torch, dtype)).view(shape)
    if not strided or not shape:
        return dense
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[dense.element_size()]
    wide = torch.zeros(2 * shape[0], *shape[1:], dtype=words)[::2]
    wide.copy_(dense.view(words))
    return wide.view(dense.dtype)


def locals_of(side: ModelLayout, rank: int, version: int, *, strided: bool) -> dict[str, Tensor] | None:
    found = {
        name: tensor(data, layout.dtype, strided=strided)
        for name, layout in side.items()
        if (data := part(name, layout, rank, version)) is not None
    }
    return found or None


def as_bytes(t: Tensor) -> bytes:
    return bytes(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) if t.numel() else b""


def form(me: Rank, case: Case, timeout: float = 40.0) -> BaselineGroups:
    sides = case.ranks(case.source), case.ranks(case.destination)
    return BaselineGroups.form(me.store(), me.rank, me.size, *sides, timeout, "lo")


def refit(me: Rank, name: str, options: Sequence[BaselineOptions]) -> tuple[list[str], list[BaselineReport]]:
    """Two refits of a case in each variant; what was wrong, and the second refit's reports."""
    case = CASES[name]()
    groups = form(me, case)
    wrong, reports = [], []
    for i, chosen in enumerate(options):
        baseline = Baseline(case.source, case.destination, groups, chosen)
        for version in (1, 2):
            strided = (i + version) % 2 == 0
            source = locals_of(case.source, me.rank, version, strided=strided)
            destination = locals_of(case.destination, me.rank, 77, strided=strided)
            report = baseline.run(source, destination)
            assert report.cold == (version == 1)
            for held_name, t in (destination or {}).items():
                expected = part(held_name, case.destination[held_name], me.rank, version)
                assert expected is not None
                if as_bytes(t) != expected.tobytes():
                    wrong.append(f"{chosen} version {version}: {held_name} {case.destination[held_name]}")
            for held_name, t in (source or {}).items():
                kept = part(held_name, case.source[held_name], me.rank, version)
                assert kept is not None
                assert as_bytes(t) == kept.tobytes(), "a source tensor was changed"
        reports.append(report)
    return wrong, reports


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in ("partly colocated", "every dtype") else [pytest.mark.long]) for n in CASES],
)
def test_every_variant_is_right_bit_by_bit(name: str) -> None:
    case = CASES[name]()
    options = [o for o in OPTIONS if case.source.nbytes < 1 << 20 or o.pack != 96]
    results = run_ranks(refit, case.size, name, options, group=False)
    assert [wrong for wrong, _ in results] == [[]] * case.size
    pure = set(case.ranks(case.destination)) - set(case.ranks(case.source))
    for reports in zip(*(reports for _, reports in results), strict=True):
        assert sum(r.bytes_sent for r in reports) == sum(r.bytes_received for r in reports) > 0
        # Each inference member receives the whole model, whatever it needs of it.
        assert all(reports[rank].bytes_received >= case.source.nbytes for rank in pure)


def once(me: Rank, name: str) -> bool:
    case = CASES[name]()
    destination = locals_of(case.destination, me.rank, 77, strided=False)
    gather_and_broadcast(
        locals_of(case.source, me.rank, 1, strided=False),
        destination,
        case.source,
        case.destination,
        form(me, case),
        options=BaselineOptions(wire="p2p"),
    )
    expected = locals_of(case.destination, me.rank, 1, strided=False)
    return {n: as_bytes(t) for n, t in (destination or {}).items()} == {
        n: as_bytes(t) for n, t in (expected or {}).items()
    }


def test_one_call() -> None:
    assert run_ranks(once, 6, "fsdp4 to tp2", group=False) == [True] * 6


def error_of(call: Callable[[], object]) -> ReshardError | None:
    try:
        call()
    except ReshardError as error:
        return error
    return None


def disagree(me: Rank, name: str) -> list[str]:
    case = CASES[name]()
    groups = form(me, case)
    mine = BaselineOptions(pack=(1 << 20) if me.rank == 1 else (2 << 20))
    errors = [error_of(lambda: Baseline(case.source, case.destination, groups, mine))]
    # A layout that differs in a way that no other check sees: where a source's rows are cut.
    moved = replace(case.source["w"], placements=(Declared(0, (0, 4, 5, 6, 9)),))
    source = ModelLayout({"w": moved}) if me.rank == 2 else case.source
    errors.append(error_of(lambda: Baseline(source, case.destination, groups)))
    return [f"{type(e).__name__}: {e}" for e in errors]


def test_unlike_plans_are_refused_before_anything_moves() -> None:
    for rank, (options, layouts) in enumerate(run_ranks(disagree, 6, "uneven", group=False)):
        assert options.startswith(PlanMismatch.__name__)
        assert layouts.startswith(PlanMismatch.__name__)
        assert ("ranks [1]" in options) == (rank != 1)
        assert ("ranks [2]" in layouts) == (rank != 2)


def misuse(me: Rank) -> list[str]:
    case = CASES["one to one"]()
    groups = form(me, case)
    baseline = Baseline(case.source, case.destination, groups)
    good = locals_of(case.source if me.rank == 0 else case.destination, me.rank, 1, strided=False)
    assert good is not None
    bad = {n: t for n, t in good.items() if n != "w0"} | {"w1": good["w1"].double(), "w2": good["w2"][1:]}
    missing = ModelLayout({n: t for n, t in case.destination.items() if n != "w0"})
    retyped = ModelLayout({**case.destination, "w0": replace(case.destination["w0"], dtype="float16")})
    elsewhere = ModelLayout({n: replace(t, mesh=Mesh.of([0])) for n, t in case.destination.items()})
    calls: list[Callable[[], object]] = [
        lambda: baseline.run(bad if me.rank == 0 else None, bad if me.rank == 1 else None),
        lambda: baseline.run(None, None),
        lambda: Baseline(case.source, missing, groups),
        lambda: Baseline(case.source, retyped, groups),
        lambda: Baseline(case.source, elsewhere, groups),
        lambda: BaselineGroups.form(me.store(), me.rank, me.size, [0], [2], 1.0, "lo"),
        lambda: BaselineGroups.form(me.store(), me.rank, me.size, [0], [], 1.0, "lo"),
    ]
    errors = [error_of(call) for call in calls]
    # Nothing was broken by it.
    baseline.run(good if me.rank == 0 else None, good if me.rank == 1 else None)
    return [f"{type(e).__name__}: {e}" for e in errors]


def test_what_does_not_fit_is_refused_with_everything_that_is_wrong() -> None:
    for bad, none, missing, retyped, elsewhere, unknown, empty in run_ranks(misuse, 2, group=False):
        assert all(e.startswith(LayoutMismatch.__name__) for e in (bad, none, missing, retyped))
        assert all(name in bad for name in ("w0: missing", "w1: tensor", "w2: tensor"))
        assert none.count("missing") == len(CASES["one to one"]().source)
        assert "w0: extra" in missing
        assert "w0: dtype" in retyped
        assert all(e.startswith(LayoutError.__name__) for e in (elsewhere, unknown, empty))
        assert "ranks [0]" in elsewhere


def after_a_death(me: Rank, victim: int, options: BaselineOptions) -> tuple[str, list[int], float, str]:
    case = CASES["fsdp4 to tp2"]()
    groups = form(me, case, 6.0)
    baseline = Baseline(case.source, case.destination, groups, options)
    source = locals_of(case.source, me.rank, 1, strided=False)
    destination = locals_of(case.destination, me.rank, 1, strided=False)
    baseline.run(source, destination)
    if me.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    error: ReshardError | None = None
    while error is None:  # a rank that needs nobody may still get through a run or two
        error = error_of(lambda: baseline.run(source, destination))
    took = time.monotonic() - begin
    again = error_of(lambda: baseline.run(source, destination))
    return type(error).__name__, list(getattr(error, "members", ())), took, str(again)


@pytest.mark.parametrize("options", OPTIONS[::5], ids=str)
@pytest.mark.parametrize("victim", [0, pytest.param(5, marks=pytest.mark.long)])
def test_a_dead_rank_ends_the_call_with_an_error(victim: int, options: BaselineOptions) -> None:
    results = run_ranks(after_a_death, 6, victim, options, group=False, lost=[victim])
    met = [r for r in results if r is not None]
    assert len(met) == 5
    for kind, members, took, again in met:
        assert kind in {PeerLost.__name__, TransferTimeout.__name__}
        assert members
        assert took < 10.0
        assert "broke in an earlier run" in again
    assert any(victim in members for _, members, _, _ in met)


def form_alone(me: Rank) -> tuple[str, float]:
    begin = time.monotonic()
    error = error_of(lambda: BaselineGroups.form(me.store(), 0, 2, [0], [1], 1.0, "lo"))
    return type(error).__name__, time.monotonic() - begin


def test_forming_without_the_others_ends_at_its_timeout() -> None:
    ((kind, took),) = run_ranks(form_alone, 1, group=False)
    assert kind == TransferTimeout.__name__
    assert took < 10.0
