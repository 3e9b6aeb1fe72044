"""A plan's content id is its name: equal on every member and after every restart, another for every other input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from elastic_reshard.errors import LayoutMismatch, PlanError
from elastic_reshard.layout import Box, Correspondence, Mesh, ModelLayout, Placement, Replicate, Shard, TensorLayout
from elastic_reshard.plan import Destination, Ledger, Legs, Plan, PlanOptions, Slice, Source, Topology

R, S = Replicate(), Shard(0)


def model(mesh: Mesh, *placements: Placement, dtype: str = "float32", shape: tuple[int, ...] = (16, 8)) -> ModelLayout:
    return ModelLayout({name: TensorLayout(shape, dtype, mesh, placements) for name in ("a", "b")})


def plan_of(world: int, *, landing: bool = False, wire: bool = False) -> Plan:
    """FSDP over the first half, TP over the other. Fresh processes call it too."""
    half = world // 2
    source = model(Mesh.arange((half,)), S, dtype="float32" if wire else "bfloat16")
    return Plan.between(
        source,
        model(Mesh.arange((half,), first=half), Shard(1), dtype="bfloat16"),
        Topology.blocks(world, 2),
        PlanOptions(landing=landing, min_stripe=16, cell=64, message=64, staging=1024),
        wire_dtype={"a": "bfloat16", "b": "bfloat16"} if wire else None,
    )


def content_of(s: Slice) -> str:
    """Digest of everything in a slice."""
    h = xxhash.xxh3_128(f"{s.member} {s.plan} {s.tensors} {s.rounds}".encode())
    for column in [*(getattr(s.legs, f.name) for f in fields(Legs)), s.message]:
        h.update(np.ascontiguousarray(column).tobytes())
    return h.hexdigest()


def names_of(plan: Plan) -> list[str]:
    return [plan.digest, *(content_of(plan.slice(m)) for m in range(plan.topology.size))]


_FRESH = """
import json
from tests.plan.test_plan_identity import names_of, plan_of
print(json.dumps([names_of(plan_of(w, landing=l, wire=c)) for w in (2, 4, 8) for l in (False, True) for c in (False, True)]))
"""


def _fresh_process(seed: str) -> list[list[str]]:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", _FRESH],
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout)
    return found


def test_b18_a_plan_after_growing_is_the_one_that_a_new_process_makes_from_nothing() -> None:
    """World 2, then 4, then 8 in this process; new processes, each with its own seed of hashes, plan from nothing."""
    here = [
        names_of(plan_of(world, landing=landing, wire=wire))
        for world in (2, 4, 8)
        for landing in (False, True)
        for wire in (False, True)
    ]
    assert len({names[0] for names in here}) == len(here)
    assert _fresh_process("1") == here
    assert _fresh_process("4242") == here
    again = [names_of(plan_of(world)) for world in (4, 2)]
    assert again == [here[4], here[0]]


def _base() -> Plan:
    return Plan(
        (Source(model(Mesh.arange((2,)), S), (0, 1)),),
        (Destination(model(Mesh.arange((2, 2)), R, S), (2, 3, 4, 5)),),
        Topology.of("aabbcc"),
        PlanOptions(landing=True),
    )


def _changes() -> dict[str, dict[str, object]]:
    base = _base()
    (source,), (destination,) = base.sources, base.destinations
    cells = (base.cells[0].count,)
    bits = np.zeros(cells[0], dtype=bool)
    bits[1] = True
    none = np.zeros(cells[0], dtype=bool)
    swapped = ModelLayout(dict(reversed(list(destination.layout.items()))))
    halves = tuple(
        Correspondence(n, n, Box((a, 0), (a + 8, 8)), Box((a, 0), (a + 8, 8))) for n in ("a", "b") for a in (0, 8)
    )

    def pair(**kind: object) -> dict[str, object]:
        have = model(Mesh.arange((2,)), S, **kind)  # type: ignore[arg-type]
        want = model(Mesh.arange((2, 2)), R, S, **kind)  # type: ignore[arg-type]
        return {"sources": (Source(have, (0, 1)),), "destinations": (Destination(want, (2, 3, 4, 5)),)}

    def options(**changed: int) -> dict[str, object]:
        return {"options": replace(base.options, **changed)}  # type: ignore[arg-type]

    return {
        "shape": pair(shape=(16, 9)),
        "dtype": pair(dtype="bfloat16"),
        "source placement": {"sources": (Source(model(Mesh.arange((2,)), Shard(1)), (0, 1)),)},
        "source mesh": {"sources": (Source(model(Mesh.of([1, 0]), S), (0, 1)),)},
        "source members": {"sources": (Source(source.layout, (1, 0)),)},
        "two sources": {"sources": (source, source)},
        "correspondences": {"sources": (Source(source.layout, (0, 1), halves),)},
        "destination placement": {
            "destinations": (Destination(model(Mesh.arange((2, 2)), R, Shard(1)), (2, 3, 4, 5)),)
        },
        "destination mesh": {"destinations": (Destination(model(Mesh.arange((2, 2)), S, R), (2, 3, 4, 5)),)},
        "destination members": {"destinations": (Destination(destination.layout, (2, 4, 3, 5)),)},
        "order of tensors": {"destinations": (Destination(swapped, (2, 3, 4, 5)),)},
        "domains": {"topology": Topology.of("aabbbb")},
        "members": {"topology": Topology.of("aabbccc")},
        "wire dtype": {"wire_dtype": "float32"},
        "absent": {"absent": frozenset({5})},
        "another absent": {"absent": frozenset({4})},
        "ledger": {"ledger": Ledger(cells, {(0, 2): bits})},
        "another holder": {"ledger": Ledger(cells, {(0, 4): bits})},
        "empty ledger": {"ledger": Ledger(cells, {(0, 4): none})},
        "message": options(message=1 << 19),
        "staging": options(staging=1 << 27),
        "stripe": options(min_stripe=1 << 13),
        "cell": options(cell=1 << 19),
        "landing": {"options": replace(base.options, landing=False)},
    }


def test_every_input_changes_the_digest() -> None:
    plans = {name: replace(_base(), **changed) for name, changed in _changes().items()}  # type: ignore[arg-type]
    plans["base"] = _base()
    named: dict[str, str] = {}
    for name, plan in plans.items():
        assert plan.digest not in named, f"{name} has the digest of {named[plan.digest]}"
        named[plan.digest] = name
        assert plan.slice(2).plan == plan.digest


def test_what_says_the_same_in_other_words_has_the_same_digest() -> None:
    base = _base()
    assert replace(base, topology=Topology.of([9, 9, "x", "x", None, None])).digest == base.digest
    axes = Destination(model(Mesh.arange((2, 2), ("dp", "tp")), R, S), (2, 3, 4, 5))
    assert replace(base, destinations=(axes,)).digest == base.digest
    assert replace(base, absent=frozenset([4, 5])).digest == replace(base, absent=frozenset([5, 4])).digest
    wire = [{"a": "float32", "b": "float32"}, {"b": "float32", "a": "float32"}]
    assert len({replace(base, wire_dtype=w).digest for w in wire}) == 1


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"sources": ()}, PlanError, "at least one source"),
        ({"sources": (Source(model(Mesh.arange((3,)), S), (0, 1)),)}, PlanError, "rank 2, but only 2 members"),
        ({"sources": (Source(model(Mesh.arange((2,)), S), (0, 6)),)}, PlanError, "member 6 is outside"),
        ({"sources": (Source(model(Mesh.arange((2,)), S), (1, 1)),)}, PlanError, "repeat"),
        ({"sources": (Source(model(Mesh.arange((2,)), S, dtype="int32"), (0, 1)),)}, LayoutMismatch, "2 violation"),
    ],
)
def test_plans_that_cannot_be_are_refused(changed: dict[str, object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        replace(_base(), **changed)  # type: ignore[arg-type]


def test_options_and_members_that_cannot_be_are_refused() -> None:
    for changed in ({"message": 8}, {"min_stripe": 1}, {"cell": 0}, {"staging": (4 << 20) - 1}):
        with pytest.raises(PlanError, match="at least"):
            PlanOptions(**changed)  # type: ignore[arg-type]
    for member in (-1, 6):
        with pytest.raises(PlanError, match="outside"):
            _base().slice(member)
