"""What holds for every refit: random layouts, permutations, topologies, absent members, ledgers."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.errors import ShardLost
from elastic_reshard.plan import Kind, Ledger, Plan, Slice
from elastic_reshard.plan.slices import ALONE
from tests.plan.execute import World, cell_ingress, least_ingress, lost_tensors, name_of, staging_of
from tests.plan.strategies import examples, refits


@given(plan=refits())
@examples(120)
def test_streaming_delivers_each_wanted_element_once_and_each_domain_is_entered_by_its_least(plan: Plan) -> None:
    world = World(plan).run().check()
    assert world.ingress == least_ingress(plan)


@given(plan=refits(landing=True))
@examples(120)
def test_landing_then_installing_delivers_each_wanted_element_once(plan: Plan) -> None:
    world = World(plan).run().check()
    assert world.ingress == least_ingress(plan)


@given(plan=st.one_of(refits(most=6), refits(landing=True, most=6)))
@examples(120)
def test_messages_and_staging_stay_within_the_options(plan: Plan) -> None:
    for member in range(plan.topology.size):
        s = plan.slice(member)
        net = s.legs.kind == Kind.NET
        assert (s.message[net] >= 0).all()
        assert (s.message[~net] == -1).all()
        if net.any():
            assert np.bincount(s.message[net], s.nbytes[net]).max() <= plan.options.message
        assert staging_of(s) <= plan.options.staging


def _messages(s: Slice, *, out: bool) -> dict[int, list[list[tuple[int, ...]]]]:
    """By peer, in order: the messages, each by its legs' names."""
    found: dict[int, dict[int, list[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(list))
    for i in np.flatnonzero((s.legs.kind == Kind.NET) & (s.legs.out == out)).tolist():
        found[int(s.legs.peer[i])][int(s.message[i])].append((int(s.legs.round[i]), *name_of(s, i)))
    return {peer: list(by_number.values()) for peer, by_number in found.items()}


@given(plan=st.one_of(refits(), refits(landing=True)))
@examples(80)
def test_both_ends_of_a_pair_have_the_same_messages_in_the_same_order(plan: Plan) -> None:
    slices = [plan.slice(m) for m in range(plan.topology.size)]
    for s in slices:
        for peer, messages in _messages(s, out=True).items():
            assert _messages(slices[peer], out=False)[s.member] == messages
        for peer in _messages(s, out=False):
            assert s.member in _messages(slices[peer], out=True)


@given(plan=st.one_of(refits(), refits(landing=True)))
@examples(80)
def test_legs_of_a_message_follow_each_other_and_go_to_one_peer_in_one_round(plan: Plan) -> None:
    for member in range(plan.topology.size):
        s = plan.slice(member)
        net = np.flatnonzero(s.legs.kind == Kind.NET)
        numbers = s.message[net]
        assert (np.diff(numbers) >= 0).all()
        assert (np.diff(s.legs.round[net][~s.legs.install[net]]) >= 0).all()
        for number in np.unique(numbers).tolist():
            legs = s.legs.take(net[numbers == number])
            assert len(set(zip(legs.peer.tolist(), legs.out.tolist(), legs.round.tolist(), strict=True))) == 1
            assert len(legs) == 1 or (s.nbytes[net[numbers == number]] < ALONE).all()


@given(plan=refits())
@examples(80)
def test_what_a_member_serves_in_its_domain_is_what_the_others_pull(plan: Plan) -> None:
    """Streaming only: an install needs no one's help."""
    served: Counter[tuple[int, ...]] = Counter()
    pulled: Counter[tuple[int, ...]] = Counter()
    for member in range(plan.topology.size):
        s = plan.slice(member)
        for i in np.flatnonzero(np.isin(s.legs.kind, [Kind.LOCAL, Kind.LANDED])).tolist():
            legs, peer = s.legs, int(s.legs.peer[i])
            ends = (member, peer) if legs.out[i] else (peer, member)
            key = (*ends, int(legs.kind[i]), int(legs.round[i]), *name_of(s, i))
            (served if legs.out[i] else pulled)[key] += 1
    assert served == pulled
    assert all(count == 1 for count in served.values())


@given(plan=refits(landing=True), data=st.data())
@examples(120)
def test_a_plan_goes_on_from_any_ledger(plan: Plan, data: st.DataObject) -> None:
    """Cells that landed are not moved again, whoever holds them may send them, and absent members do nothing."""
    before = World(plan).run()
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    share = data.draw(st.sampled_from([0.3, 0.7, 1.0]))
    held = {key: bits & (rng.random(len(bits)) < share) for key, bits in before.landed().items()}
    ledger = Ledger(tuple(grid.count for grid in plan.cells), held)
    absent = frozenset(data.draw(st.sets(st.integers(0, plan.topology.size - 1), max_size=2)))
    gone = lost_tensors(plan, absent, ledger)
    if gone:
        with pytest.raises(ShardLost) as caught:
            replace(plan, absent=absent, ledger=ledger)
        assert {name for name, _ in caught.value.lost} == gone
        return
    after = replace(plan, absent=absent, ledger=ledger)
    world = World(after)
    world.carry(before, ledger)
    for (target, member), bits in world.landed().items():
        domain = plan.topology.domains[member]
        for (t, holder), there in held.items():
            if t == target and holder not in absent and plan.topology.domains[holder] == domain:
                assert not (bits & there).any(), "a landed cell was sent into its domain again"
    world.run().check()
    assert world.ingress == cell_ingress(after)
    assert all(staging_of(s) <= plan.options.staging for s in world.slices)
    assert all(not len(world.slices[m].legs) for m in absent)


@given(plan=refits(), data=st.data())
@examples(80)
def test_absent_members_are_left_out_or_the_loss_is_named(plan: Plan, data: st.DataObject) -> None:
    absent = frozenset(data.draw(st.sets(st.integers(0, plan.topology.size - 1), min_size=1, max_size=3)))
    gone = lost_tensors(plan, absent)
    if gone:
        with pytest.raises(ShardLost) as caught:
            replace(plan, absent=absent)
        assert {name for name, _ in caught.value.lost} == gone
        return
    without = replace(plan, absent=absent)
    world = World(without).run().check()
    assert world.ingress == least_ingress(without)
    assert not any(int(m) in absent for s in world.slices for m in s.legs.peer)
