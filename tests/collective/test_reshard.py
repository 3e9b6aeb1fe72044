"""The call between real processes: every layout, topology and kind of memory, bit by bit against plain index lists."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch

from elastic_reshard.collective import Report
from elastic_reshard.transport import Endpoint
from tests.collective import worlds
from tests.collective.worlds import CASES, TOPOLOGIES, WORLD, Case
from tests.processes import Rank, run_ranks

MEMORY = {
    "isolated": ("ordinary", "mixed"),
    "one domain": ("arena", "ordinary", "mixed"),
    "two domains": ("arena", "mixed"),
    "mixed": ("ordinary", "mixed"),
}


def sizes(name: str) -> dict[str, int]:
    """Tiny ones, so that even these models take many rounds. Bytes."""
    if name in worlds.CATALOG:
        return {"staging": 32 << 10, "message": 4 << 10}
    return {"staging": 4 << 10, "message": 1 << 10}


def refit(
    me: Rank, endpoint: Endpoint, case: Case, memory: str, limits: dict[str, int]
) -> tuple[list[str], list[Report]]:
    """Two versions into the same tensors: (what is wrong, the reports)."""
    source, destination = (worlds.tensors(side, me.rank, memory) for side in (case.source, case.destination))
    wrong, reports = [], []
    for version in (1, 2):
        worlds.fill(case, source, me.rank, version)
        worlds.poison(destination)
        reports.append(worlds.call(case, endpoint, source, destination, verify="full", **limits))
        wrong += [f"version {version}: {name}" for name in worlds.wrong(case, destination, me.rank, version)]
        kept = Case(case.source, case.source)
        wrong += [f"source {name} was changed" for name in worlds.wrong(kept, source, me.rank, version)]
    return wrong, reports


def refit_all(me: Rank, topology: str) -> dict[tuple[str, str], tuple[list[str], list[Report]]]:
    """All cases over one endpoint (CASES B18); some of its members have no part in some of them (B63)."""
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    with worlds.form(me, TOPOLOGIES[topology]) as endpoint:
        return {
            (name, memory): refit(me, endpoint, make(), memory, sizes(name))
            for name, make in CASES.items()
            for memory in MEMORY[topology]
        }


@pytest.mark.parametrize(
    "topology",
    [pytest.param(t, marks=[pytest.mark.long] if t != "two domains" else []) for t in TOPOLOGIES],
)
def test_every_byte_is_right_and_enters_a_domain_once(topology: str) -> None:
    results = run_ranks(refit_all, WORLD, topology, timeout=110, group=False)
    domains = TOPOLOGIES[topology]
    for name, make in CASES.items():
        case = make()
        entering = worlds.ingress(case, domains)
        for memory in MEMORY[topology]:
            told = [r[name, memory] for r in results]
            assert [wrong for wrong, _ in told] == [[]] * WORLD, f"{name}, {memory}"
            for number in (0, 1):
                reports = [r[number] for _, r in told]
                # Plans are kept by content, and serve other tensors of the same layouts.
                first = number == 0 and memory == MEMORY[topology][0]
                assert {r.planned for r in reports} == {first}, f"{name}, {memory}"
                for m, r in enumerate(reports):
                    if case.source.local_nbytes(m) + case.destination.local_nbytes(m):
                        assert r.bound == (number == 0), f"{name}, {memory}"
                check_bytes(f"{name}, {memory}", case, domains, entering, reports)
                assert max(r.staging for r in reports) <= sizes(name)["staging"]
    assert max(r.rounds for told in results for _, reports in told.values() for r in reports) > 8


def check_bytes(where: str, case: Case, domains: list[int], entering: dict[int, int], reports: list[Report]) -> None:
    received = dict.fromkeys(domains, 0)
    for m, r in enumerate(reports):
        received[domains[m]] += r.received
        assert r.received + r.pulled + r.copied == case.destination.local_nbytes(m), where
        assert r.verified == r.received + r.pulled, where
    assert received == entering, where
    assert sum(r.sent for r in reports) == sum(received.values()), where
    assert len({(r.plan, r.rounds) for r in reports}) == 1, where


def beside_each_other(me: Rank) -> list[Any]:
    """Two destinations are columns of one tensor: what an engine's fused parameter is."""
    names = {"q": 4, "k": 2}
    sides = [
        worlds.ModelLayout(
            {n: worlds.TensorLayout((3, w), "float32", worlds.Mesh.of([rank]), (worlds.R,)) for n, w in names.items()}
        )
        for rank in (0, 1)
    ]
    fused = torch.zeros(3, 6)
    with worlds.form(me, [0, 0]) as endpoint:
        source = {n: torch.full((3, w), float(w)) for n, w in names.items()} if me.rank == 0 else None
        destination = {"q": fused[:, :4], "k": fused[:, 4:]} if me.rank == 1 else None
        worlds.call(Case(*sides), endpoint, source, destination)
    return fused.tolist()


def test_destinations_may_lie_between_each_other() -> None:
    assert run_ranks(beside_each_other, 2, group=False)[1] == [[4.0] * 4 + [2.0] * 2] * 3


ODD = {"bfloat16": (3,), "float32": (2,), "uint8": (1,), "int64": (1,), "float8_e4m3fn": (5,), "int16": (2, 3)}


def packed(me: Rank) -> list[str]:
    """One small message of all dtypes, in orders of the model's tensors (CASES B66)."""
    wrong = []
    with worlds.form(me, [0, 1]) as endpoint:
        for order in list(itertools.permutations(ODD))[::37]:
            mesh = [worlds.Mesh.of([0]), worlds.Mesh.of([1])]
            sides = [
                worlds.ModelLayout({d: worlds.TensorLayout(ODD[d], d, m, (worlds.R,)) for d in order}) for m in mesh
            ]
            case = Case(*sides)
            source, destination = (worlds.tensors(side, me.rank, "mixed") for side in sides)
            if source is not None:
                worlds.fill(case, source, 0, 1)
                source["int64"] = source["int64"].expand(1)
            worlds.poison(destination)
            report = worlds.call(case, endpoint, source, destination, staging=4 << 10, message=1 << 10, verify="full")
            wrong += [f"{order}: {name}" for name in worlds.wrong(case, destination, me.rank, 1)]
            assert report.rounds == 1
    return wrong


def test_mixed_dtypes_share_a_message_in_any_order() -> None:
    assert run_ranks(packed, 2, group=False) == [[], []]


def expanded(me: Rank) -> list[Any]:
    """A source whose rows are one row of memory; a destination that is every other column of a larger tensor."""
    case = Case(
        worlds.ModelLayout({"w": worlds.TensorLayout((6, 4), "float32", worlds.Mesh.of([0]), (worlds.R,))}),
        worlds.ModelLayout({"w": worlds.TensorLayout((6, 4), "float32", worlds.Mesh.of([1]), (worlds.R,))}),
    )
    found = []
    for domains in ([0, 1], [0, 0]):
        with worlds.form(me, domains, f"domains {domains}") as endpoint:
            around = torch.full((6, 8), -1.0)
            source = {"w": torch.arange(4.0).expand(6, 4)} if me.rank == 0 else None
            destination = {"w": around[:, ::2]} if me.rank == 1 else None
            worlds.call(case, endpoint, source, destination, verify="full")
            found.append(around.tolist())
    return found


def test_strided_memory_is_read_and_written_where_it_is() -> None:
    _, found = run_ranks(expanded, 2, group=False)
    assert found == [[[0.0, -1.0, 1.0, -1.0, 2.0, -1.0, 3.0, -1.0]] * 6] * 2


def cast(me: Rank) -> tuple[list[str], list[str]]:
    """One wire dtype for all (integers and what is of that dtype stay), and values at the edges of bf16's rounding."""
    case = worlds.masters(torch.bfloat16)
    bits = torch.arange(0, 1 << 32, (1 << 32) // 2800 - 7, dtype=torch.int64)[: 70 * 40].to(torch.int32)
    edges = bits.view(torch.float32).reshape(70, 40)  # NaN, infinities, denormals, ties
    wrong, unlike = [], []
    for domains in ([0, 0, 1, 1, 0, 2, 0, 2], [0] * 8):
        with worlds.form(me, domains, f"{domains}") as endpoint:
            source, destination = (worlds.tensors(side, me.rank, "mixed") for side in (case.source, case.destination))
            worlds.fill(case, source, me.rank, 1)
            worlds.call(case, endpoint, source, destination, verify="full", staging=8 << 10, message=2 << 10)
            wrong += worlds.wrong(case, destination, me.rank, 1)
            if source is not None:
                source["d"].copy_(edges[me.rank * 18 :][:18])
            worlds.call(case, endpoint, source, destination, verify="full", staging=8 << 10, message=2 << 10)
            if destination is not None:
                half = edges.to(torch.bfloat16)[35 * (me.rank % 2) :][:35]
                same = destination["d"].view(torch.int16) == half.view(torch.int16)
                nan = half.isnan() & destination["d"].isnan()
                unlike += edges[35 * (me.rank % 2) :][:35][~(same | nan)].tolist()
    return wrong, unlike


def test_a_cast_is_torchs_cast_bit_for_bit() -> None:
    assert run_ranks(cast, WORLD, group=False) == [([], [])] * WORLD
