"""Which network carries a transfer, and whose windows count in it: by what members have stated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.protocol.docs import MemberDoc, MemberState
from elastic_reshard.protocol.messages import GroupSpec, MoverSaid, Statement
from elastic_reshard.supervisor import api_examples, transfers
from elastic_reshard.supervisor.networks import choose, patience, paused
from elastic_reshard.supervisor.parties import _options
from elastic_reshard.supervisor.state import Draft, Job, Member, Transfer

A, B, C = (f"{name}@{'0' * 16}" for name in "abc")
NCCL = {"nccl": "nccl 2.30.7 max_ctas=4"}


def member(name: str, networks: Mapping[str, str] | None, gone: bool = False, **more: Any) -> Member:
    """networks None: it was not heard in this term."""
    doc = MemberDoc(id=name, group="g", rank=0, roles=frozenset({"source"}), host="h", state=MemberState.LIVE)
    said = None if networks is None else Statement(
        member=name, group=GroupSpec(name="g", size=1, rank=0), roles=frozenset({"source"}), host="h", pid=1, number=1,
        networks=dict(networks), **more,
    )  # fmt: skip
    return Member(doc, said, gone=gone)


def draft(*members: Member, network: str = "auto", tried: tuple[str, int, int] = ("", 0, 0)) -> Draft:
    job = Job("job", 1, "i", policies=Policies(network=network), members={m.doc.id: m for m in members}, tried=tried)
    return Draft(job, 0.0, lambda layout, ranks: True)


def test_members_without_a_device_move_over_gloo_and_nobody_is_told_why() -> None:
    assert choose(draft(member(A, {}), member(B, {})), "p1", [A, B]) == ("gloo", "")


def test_a_network_that_all_have_alike_is_taken() -> None:
    assert choose(draft(member(A, NCCL), member(B, NCCL)), "p1", [A, B]) == ("nccl", "")
    both = {**NCCL, "pretend": "pretend"}
    assert choose(draft(member(A, both), member(B, both)), "p1", [A, B])[0] == "nccl"


@pytest.mark.parametrize("other", [{}, None])
def test_one_that_cannot_takes_all_to_gloo(other: Mapping[str, str] | None) -> None:
    network, why = choose(draft(member(A, NCCL), member(B, other), member(C, NCCL)), "p1", [A, B, C])
    assert network == "gloo"
    assert B in why
    assert "cannot" in why
    assert choose(draft(member(A, NCCL), member(B, other)), "p1", [A])[0] == "nccl", "only those present count"


def test_unlike_configs_never_meet() -> None:
    network, why = choose(draft(member(A, NCCL), member(B, {"nccl": "nccl 2.27"})), "p1", [A, B])
    assert network == "gloo"
    assert "nccl 2.27" in why
    assert NCCL["nccl"] in why


def test_what_moved_nothing_twice_is_tried_over_gloo() -> None:
    members = (member(A, NCCL), member(B, NCCL))
    assert choose(draft(*members, tried=("p1", 0, 1)), "p1", [A, B])[0] == "nccl"
    network, why = choose(draft(*members, tried=("p1", 0, 2)), "p1", [A, B])
    assert network == "gloo"
    assert "no cell" in why
    assert choose(draft(*members, tried=("p1", 0, 2)), "p2", [A, B])[0] == "nccl", "another publication"


def test_a_person_may_say_which() -> None:
    members = (member(A, NCCL), member(B, NCCL))
    assert choose(draft(*members, network="gloo"), "p1", [A, B]) == ("gloo", "")
    network, why = choose(draft(*members, network="nccl_m2n"), "p1", [A, B])
    assert network == "gloo"
    assert "nccl_m2n" in why
    with pytest.raises(ProtocolError, match="network"):
        Policies(network="carrier pigeon")


def test_whose_windows_count() -> None:
    d = draft(
        member(A, NCCL, window="paused"), member(B, NCCL, window="network"), member(C, NCCL, window="anytime"),
        member("d@" + "0" * 16, NCCL, gone=True, window="paused"),
    )  # fmt: skip
    members = [C, B, A, "d@" + "0" * 16, "-.t.1.4"]
    assert paused(d, members, members[:4], "nccl") == (1, 2), "the dead one computes nothing"
    assert paused(d, members, members[:4], "gloo") == (2,)
    assert paused(d, members, [C, B], "nccl") == (1,)


def test_rounds_over_nccl_carry_more() -> None:
    gloo, wide = _options(1 << 20, "gloo"), _options(64 << 20, "gloo")
    assert (gloo.cell, gloo.message, gloo.staging) == (1 << 20, 1 << 20, 64 << 20)
    assert (wide.cell, wide.message, wide.staging) == (64 << 20, 64 << 20, 256 << 20)
    assert _options(1 << 20, "pretend") == gloo
    for network in ("nccl", "nccl_m2n"):
        assert _options(1 << 20, network).staging == 512 << 20


def test_what_is_under_way_before_the_first_cell_lands_has_its_time_too() -> None:
    doc = api_examples._transfer().model_copy(update={"cell": 1 << 20, "staging": 64 << 20})
    assert patience(doc, 5.0, Policies()) == 6.0
    assert patience(doc, 5.0, Policies(min_rate=1e5)) == 5.0 + (1 << 20) / 1e5
    over_nccl = doc.model_copy(update={"staging": 512 << 20})
    assert patience(over_nccl, 5.0, Policies()) == 5.0 + (128 << 20) / 30e6


@pytest.mark.parametrize(("network", "error", "left"), [
    ("nccl", "ArenaError", False), ("nccl", "PlanError", True), ("gloo", "ArenaError", True),
])  # fmt: skip
def test_who_has_no_room_on_its_device_is_tried_over_gloo_before_it_is_left_behind(
    network: str, error: str, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = api_examples._transfer()
    engine = example.members[1]
    doc = example.model_copy(update={"network": network, "publication": "p1", "values": {engine: {}}})
    refusal = MoverSaid(member=engine, mover="00" * 16, transfer=doc.id, state="out", outcome="refused", error=error)
    behind: list[set[str]] = []
    monkeypatch.setattr(transfers, "leave_out", lambda _, __, who: behind.append(set(who)))
    now = draft(member(A, NCCL), member(B, NCCL))
    for _ in range(2):
        transfers._count_fruitless(now, Transfer(doc, 0.0, 0.0, 0.0), {engine: refusal})
    assert behind == [{engine} if left else set()] * 2
    assert choose(now, "p1", [A, B])[0] == "gloo"
