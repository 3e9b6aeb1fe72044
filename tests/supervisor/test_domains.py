"""Domains of members by what they state of their devices: who can map whose memory, both ways, is together."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import combinations, permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.protocol.docs import MemberDoc, MemberState
from elastic_reshard.protocol.messages import GroupSpec, Reach, Statement
from elastic_reshard.supervisor.core import begin, step
from elastic_reshard.supervisor.domains import cliques, domain_of, host_of, mutual
from elastic_reshard.supervisor.events import Spoken
from elastic_reshard.supervisor.state import Job


def reaches(devices: Iterable[str], can: Collection[tuple[str, str]]) -> dict[str, Reach]:
    """What each device's member states: `can` has (reader, other), all others are told to be apart."""
    known = sorted(devices)
    return {
        d: Reach(
            device=d, peers=tuple(o for o in known if o != d and (d, o) in can),
            apart=tuple(o for o in known if o != d and (d, o) not in can),
        )
        for d in known
    }  # fmt: skip


def placed(told: dict[str, Reach], order: Iterable[str]) -> dict[str, str]:
    """The domain of each device's member, coming in this order."""
    found: dict[str, str] = {}
    for device in order:
        others: dict[str, list[Reach]] = {}
        for known, domain in found.items():
            others.setdefault(domain, []).append(told[known])
        found[device] = domain_of("h", told[device], others)
    return found


def islands(*sets: str) -> set[tuple[str, str]]:
    return {(a, b) for island in sets for a in island for b in island if a != b}


def test_devices_that_all_reach_each_other_and_host_memory_are_the_hosts_own_domain() -> None:
    told = reaches("abcd", islands("abcd"))
    assert set(placed(told, "dbca").values()) == {"h"}
    assert domain_of("h", None, {"h": list(told.values())}) == "h"
    assert domain_of("h", Reach(device="a"), {}) == "h", "of others nothing is known: as if they could"


def test_islands_are_domains_whoever_comes_first() -> None:
    told = reaches("abcde", islands("ac", "bde"))
    for order in permutations("abcde"):
        found = placed(told, order)
        assert found == {"a": "h..a", "c": "h..a", "b": "h..b", "d": "h..b", "e": "h..b"}
    assert domain_of("h", None, {"h..a": [told["a"]], "h..b": [told["b"]]}) == "h", "host memory as ever"


def test_reaching_one_way_is_not_enough() -> None:
    told = reaches("ab", {("b", "a")})
    assert not mutual(told["a"], told["b"])
    assert not mutual(told["b"], told["a"])
    for order in ("ab", "ba"):
        found = placed(told, order)
        assert found["a"] != found["b"]
    both_ways = reaches("ab", islands("ab"))
    assert mutual(both_ways["a"], both_ways["b"])


def test_a_device_between_two_islands_joins_one_of_them() -> None:
    told = reaches("abc", islands("ab", "bc"))  # a and c do not reach each other
    for order in permutations("abc"):
        found = placed(told, order)
        assert found["a"] != found["c"]


_DEVICES = "abcde"
_PAIRS = sorted(permutations(_DEVICES, 2))


@given(can=st.sets(st.sampled_from(_PAIRS)), order=st.permutations(_DEVICES))
def test_whoever_is_together_reaches_each_other_both_ways(can: set[tuple[str, str]], order: list[str]) -> None:
    told = reaches(_DEVICES, can)
    found = placed(told, order)
    for a, b in combinations(_DEVICES, 2):
        if found[a] == found[b]:
            assert (a, b) in can
            assert (b, a) in can


@given(island=st.lists(st.integers(0, 3), min_size=5, max_size=5), order=st.permutations(_DEVICES))
def test_where_reaching_is_mutual_and_transitive_domains_are_its_classes(island: list[int], order: list[str]) -> None:
    number = dict(zip(_DEVICES, island, strict=True))
    told = reaches(_DEVICES, {(a, b) for a, b in _PAIRS if number[a] == number[b]})
    found = placed(told, order)
    assert all((found[a] == found[b]) == (number[a] == number[b]) for a, b in _PAIRS)
    assert found == placed(told, sorted(_DEVICES)), "names do not depend on who came first"


@pytest.mark.parametrize("host", ["h", "x" * 128])
def test_names_are_names(host: str) -> None:
    told = reaches(["pretend:0", "3f8a6d2e-5b4c-4e1d-9a7b-0c1d2e3f4a5b"], set())
    found = {domain_of(host, reach, {}) for reach in told.values()}
    assert len(found) == 2
    assert len(host) > 1 or found == {"h..pretend-0", "h..3f8a6d2e-5b4c-4e1d-9a7b-0c1d2e3f4a5b"}
    for name in found:
        doc = MemberDoc(id="m", group="g", rank=0, roles=frozenset(), host=name, state=MemberState.LIVE)
        assert doc.where == name
        assert host.startswith(host_of(name))


# -- in the state machine


def spoken(job: Job, name: str, reach: Reach | None, host: str = "h", **more: Any) -> Job:
    said = Statement(
        member=f"{name}@{'0' * 16}", group=GroupSpec(name=name, size=1, rank=0), roles=frozenset({"source"}), host=host,
        pid=1, number=1, reach=reach, **more,
    )  # fmt: skip
    return step(job, [Spoken(host, said)], 1.0, lambda layout, ranks: True)[0]


def where(job: Job) -> dict[str, str]:
    return {m.doc.group: m.doc.where for m in job.members.values()}


def test_members_are_told_their_domains_and_a_label_of_the_user_wins() -> None:
    told = reaches("ab", set())
    job = begin("job", 1, "i", 0.0)
    job = spoken(job, "a", told["a"])
    job = spoken(job, "b", told["b"])
    job = spoken(job, "beside-b", told["b"])
    job = spoken(job, "cpu", None)
    job = spoken(job, "labelled", told["b"], domain="mine")
    job = spoken(job, "labelled-too", told["a"], domain="mine")
    job = spoken(job, "the-hosts", told["a"], domain="h")
    job = spoken(job, "elsewhere", told["b"], host="other")
    assert where(job) == {
        "a": "h..a", "b": "h..b", "beside-b": "h..b", "cpu": "h", "labelled": "h..mine", "labelled-too": "h..mine",
        "the-hosts": "h", "elsewhere": "other..b",
    }  # fmt: skip
    assert {m.doc.host for m in job.members.values()} == {"h", "other"}


def test_a_clique_across_hosts_is_shown_and_no_domain() -> None:
    job = begin("job", 1, "i", 0.0)
    for host in ("x", "y"):
        job = spoken(job, host, Reach(device=host, cluster="cafe", clique=3), host=host)
    job = spoken(job, "none", Reach(device="z"), host="z")
    assert cliques(m.doc for m in job.members.values()) == {"cafe/3": ("x", "y")}
    assert where(job) == {"x": "x", "y": "y", "none": "z"}
