"""What a plan says of itself is what it does."""

from __future__ import annotations

import json

import pytest

from elastic_reshard.errors import PlanError
from elastic_reshard.layout import ModelLayout
from elastic_reshard.layout.catalog import Parallelism, layout, model
from elastic_reshard.plan import Destination, Kind, Plan, PlanOptions, Source, Topology
from elastic_reshard.plan.explain import explain, in_bytes, to_json


def _plan(*, landing: bool = False, absent: frozenset[int] = frozenset()) -> Plan:
    tiny = model("tiny")
    have, want = layout(tiny, Parallelism(fsdp=2)), layout(tiny, Parallelism(tp=2, dp=2))
    topology = Topology.of(["trainer", "trainer", "a", "a", "b", "b", "b"])
    return Plan(
        (Source(have),), (Destination(want, (2, 3, 4, 5)),), topology, PlanOptions(landing=landing), None, absent
    )


@pytest.mark.parametrize("landing", [False, True])
def test_a_person_reads_what_moves_between_whom_and_why(landing: bool) -> None:
    plan = _plan(landing=landing)
    text = explain(plan)
    total = in_bytes(2 * plan.targets[0].nbytes)
    assert plan.digest in text
    assert ("landing" if landing else "streaming") in text.splitlines()[0]
    assert "2 members hold, 4 want; 7 members in 3 domains" in text
    assert "1.000x" in text
    assert f"must enter domains  {total:>10}" in text
    assert "2 domains want what they lack, and each gets its own copy" in text
    assert "model.embed_tokens.weight" in text
    assert "send: member 0" in text
    assert not text.endswith("\n")
    assert max(map(len, text.splitlines())) < 160


def test_a_member_reads_what_it_does() -> None:
    plan = _plan()
    sends = explain(plan, 0)
    s = plan.slice(0)
    assert f"sends{in_bytes(s.bytes_by(Kind.NET, out=True)):>26}" in sends
    assert all(f" {peer} (" in sends for peer in s.peers(Kind.NET))
    assert "receives" not in sends
    receives = explain(plan, 2)
    assert "receives" in receives
    assert "sends" not in receives
    assert "holds nothing that is wanted and wants nothing" in explain(plan, 6)
    with pytest.raises(PlanError, match="outside"):
        explain(plan, 7)
    assert "absent: 5" in explain(_plan(absent=frozenset({5})))
    assert "absent: neither" in explain(_plan(absent=frozenset({5})), 5)


def test_why_a_byte_moves_only_once_or_more() -> None:
    plan = _plan()
    (source,), (destination,) = plan.sources, plan.destinations
    embed = {"model.embed_tokens.weight": source.layout["model.embed_tokens.weight"]}
    moved = Plan((Source(ModelLayout(embed)),), (Destination(ModelLayout(embed), (2, 3)),), Topology.isolated(7))
    assert "  none does." in explain(moved)
    other = Destination(layout(model("tiny"), Parallelism(tp=4)), (2, 3, 4, 5))
    assert "2 destination layouts are carried one by one" in explain(
        Plan((source,), (destination, other), plan.topology)
    )
    near = Plan((source,), (destination,), Topology.single(7))
    assert "is read from sources of the same domain" in explain(near)


@pytest.mark.parametrize("landing", [False, True])
def test_a_program_reads_the_same(landing: bool) -> None:
    plan = _plan(landing=landing)
    data = to_json(plan)
    assert json.loads(json.dumps(data)) == data
    assert data["digest"] == plan.digest
    assert data["ratio"] == 1.0
    assert data["net_bytes"] == data["lower_bound_bytes"] == sum(data["domain_need"]) == 2 * plan.targets[0].nbytes
    assert data["bytes"]["net"]["total"] == sum(data["bytes"]["net"]["sent"]) == data["net_bytes"]
    assert [t["name"] for t in data["tensors"]] == list(plan.targets[0])
    assert sum(g["tensors"] for g in data["geometries"]) == len(plan.tensors)
    for tensor in data["tensors"]:
        assert 0 <= tensor["first_round"] < tensor["first_round"] + tensor["rounds"] <= data["rounds"]
        assert tensor["from"][0]["tensor"] == tensor["name"]


def test_nothing_to_move_is_said_too() -> None:
    empty = Plan.between(ModelLayout({}), ModelLayout({}), Topology.isolated(2))
    assert "send: nobody" in explain(empty)
    assert to_json(empty)["ratio"] == 1.0


def test_bytes_for_a_person() -> None:
    sizes = {
        0: "0 B",
        999: "999 B",
        1024: "1 KiB",
        1536: "1.5 KiB",
        3 << 20: "3 MiB",
        5 << 30: "5 GiB",
        7 << 40: "7 TiB",
    }
    assert {n: in_bytes(n) for n in sizes} == sizes
    assert in_bytes(12345 << 40) == "12.1 PiB"
