"""Staging plans and programs: what goes straight, what is staged and where, and running a program made by hand."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import PrefixStore

from elastic_reshard.arena import Copies, HostArena, MappedArena, empty
from elastic_reshard.errors import PeerLost, PlanError, TransferTimeout
from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.plan import Kind, Plan, PlanOptions, Topology
from elastic_reshard.transport import Endpoint, Program, StagingPlan, Views, bind, run
from elastic_reshard.transport.program import Message, Pull, Round
from tests.collective import worlds
from tests.processes import Rank, run_ranks

KIB = 1 << 10


def one(shape: tuple[int, ...], dim: int | None, first: int, ranks: int = 1, dtype: str = "uint8") -> ModelLayout:
    mesh = Mesh.arange((ranks,), first=first)
    return ModelLayout({"w": TensorLayout(shape, dtype, mesh, (Replicate() if dim is None else Shard(dim),))})


def planned(
    source: ModelLayout,
    destination: ModelLayout,
    domains: list[int],
    member: int,
    tensors: Mapping[str, torch.Tensor],
    options: PlanOptions | None = None,
) -> StagingPlan:
    plan = Plan.between(source, destination, Topology(tuple(domains)), options or PlanOptions())
    held = {(0, name): t for name, t in tensors.items()}
    is_source = source["w"].local_shape(member) is not None
    views = Views(held if is_source else {}, {} if is_source else held)
    return StagingPlan(plan.slice(member), views, plan.options.staging)


LARGE = (512, 1024)  # 512 KiB
STRAIGHT: dict[str, tuple[Any, bool]] = {
    "contiguous rows": (lambda: torch.zeros(LARGE, dtype=torch.uint8), True),
    "in an arena": (lambda: empty(LARGE, torch.uint8), True),
    "every other row": (lambda: torch.zeros(1024, 1024, dtype=torch.uint8)[::2], False),
    "transposed": (lambda: torch.zeros(1024, 512, dtype=torch.uint8).t(), False),
}


@pytest.mark.parametrize("how", STRAIGHT)
@pytest.mark.parametrize("member", [0, 1])
def test_a_long_leg_uses_the_tensors_own_memory_where_it_is_one_run(how: str, member: int) -> None:
    make, straight = STRAIGHT[how]
    tensor = make()
    staged = planned(one(LARGE, None, 0), one(LARGE, None, 1), [0, 1], member, {"w": tensor})
    assert len(staged.messages) >= 1
    assert (staged.place == {}) == straight
    assert (staged.nbytes == 0) == straight
    if straight:
        program = bind(staged, None, {}, staged.legs.slice.rounds)
        messages = [m for r in program.rounds for m in (r.sends if member == 0 else r.receives)]
        assert all(m.copies is None for m in messages)
        assert sum(m.buffer.numel() for m in messages) == tensor.numel()
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel()
        assert all(begin <= m.buffer.data_ptr() and m.buffer.data_ptr() + m.buffer.numel() <= end for m in messages)


def test_columns_are_staged_and_a_cast_is_staged() -> None:
    by_columns = planned(
        one(LARGE, None, 0), one(LARGE, 1, 1, 2), [0, 1, 2], 0, {"w": torch.zeros(LARGE, dtype=torch.uint8)}
    )
    assert set(by_columns.place) == set(by_columns.messages)
    source, destination = one(LARGE, None, 0, dtype="float32"), one(LARGE, None, 1, dtype="bfloat16")
    plan = Plan.between(source, destination, Topology((0, 1)), wire_dtype="bfloat16")
    cast = StagingPlan(plan.slice(0), Views({(0, "w"): torch.zeros(LARGE)}, {}), plan.options.staging)
    assert set(cast.place) == set(cast.messages)


def test_places_are_aligned_and_apart_in_the_half_of_their_round() -> None:
    options = PlanOptions(message=2 * KIB, staging=32 * KIB)
    case = worlds.catalog_case("tiny", "fsdp2", "tp2xdp2")
    plan = Plan.between(case.source, case.destination, Topology((0, 1, 0, 0, 1, 1)), options)
    seen: set[int] = set()
    for member in range(6):
        held = [worlds.tensors(side, member, "ordinary") or {} for side in (case.source, case.destination)]
        source, destination = ({(0, n): t for n, t in side.items()} for side in held)
        staged = StagingPlan(plan.slice(member), Views(source, destination), options.staging)
        assert 0 < staged.nbytes <= options.staging
        spans: dict[int, list[tuple[int, int]]] = {}
        for number, place in staged.place.items():
            rows = staged.messages[number]
            spans.setdefault(staged.legs.round[rows[0]], []).append((place, sum(map(staged.legs.nbytes, rows))))
        for i in staged.rows:
            name = staged.legs.staged_name(i)
            if name in staged.local and staged.legs.out[i]:
                spans.setdefault(staged.legs.round[i], []).append((staged.local[name], staged.legs.nbytes(i)))
        seen |= spans.keys()
        for round_, held_ in spans.items():
            ordered = sorted(set(held_))
            assert all(place % 64 == 0 for place, _ in ordered)
            assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ordered))
            assert all(place + n <= staged.half for place, n in ordered)
            assert staged.at(round_, 0) == (0 if round_ % 2 == 0 else staged.half)
        # What peers are told lies in a half, at a place of its element size.
        assert all(0 <= at < staged.nbytes for at in staged.offsets.values())
        for name, at in staged.offsets.items():
            assert at % staged.legs.item[name[1]] == 0
    assert len(seen) > 8
    assert {r % 2 for r in seen} == {0, 1}


def test_more_than_the_limit_is_refused_with_advice() -> None:
    tensor = torch.zeros(1024, 1024, dtype=torch.uint8)[::2]
    plan = Plan.between(one(LARGE, None, 0), one(LARGE, None, 1), Topology((0, 1)))
    with pytest.raises(PlanError, match=r"member 0 needs \d+ bytes of staging, the limit is 1000; raise staging"):
        StagingPlan(plan.slice(0), Views({(0, "w"): tensor}, {}), 1000)


def test_an_install_takes_only_the_legs_of_the_install() -> None:
    plan = Plan.between(one(LARGE, 0, 0, 2), one(LARGE, None, 2, 2), Topology((0, 0, 1, 1)), PlanOptions(landing=True))
    part = plan.slice(3)
    views = Views({}, {(0, "w"): empty(LARGE, torch.uint8)})
    chosen = [set(StagingPlan(part, views, 64 << 20, install=install).rows) for install in (False, True)]
    assert chosen[0].isdisjoint(chosen[1])
    assert chosen[0] | chosen[1] == set(range(len(part.legs)))
    assert chosen[1]
    assert {int(part.legs.kind[i]) for i in chosen[0]} <= {int(Kind.NET)}


def by_hand(me: Rank) -> list[Any]:
    """Member 0 sends a message to member 1 in each of three rounds; 1 stages something for 0, which pulls it."""
    endpoint = Endpoint.form(PrefixStore("by hand", me.store()), me.rank, 2, domains=[0, 0])
    bits = np.arange(96, dtype=np.uint8)
    rounds = [Round() for _ in range(3)]
    landed, staging = np.zeros(96, dtype=np.uint8), HostArena(96)
    pulled = np.zeros(32, dtype=np.uint8)
    for number, r in enumerate(rounds):
        part = slice(32 * number, 32 * number + 32)
        place = staging.bytes[:32] if number % 2 == 0 else staging.bytes[32:64]
        copies = Copies()
        if me.rank == 0:
            copies.add(place, bits[part])
            r.sends.append(Message(1, number, torch.from_numpy(place), copies))
        else:
            copies.add(landed[part], place)
            r.receives.append(Message(0, number, torch.from_numpy(place), copies))
    mine = HostArena(32)
    if me.rank == 1:
        rounds[1].stage.add(mine.bytes, bits[:32] + 100)
        rounds[1].stage_readers.add(0)
        rounds[1].readers.add(0)
    # The descriptor of member 1's memory, as declarations carry it.
    deadline = time.monotonic() + 20
    if me.rank == 1:
        fd = mine.readonly_fd()
        endpoint.channel.send(0, 99, b"", [fd], deadline=deadline)
        os.close(fd)
    else:
        theirs = MappedArena(endpoint.channel.take(1, 99, deadline=deadline).fds[0])
        copies = Copies()
        copies.add(pulled, theirs.bytes)
        rounds[1].pulls.append(Pull(1, copies, staged=True))
        rounds[1].owners.add(1)
    program = Program(rounds, {0} if me.rank else set(), set() if me.rank else {1}, 96)
    tallies = []
    for _ in range(2):  # a program runs as often as one likes
        landed[:], pulled[:] = 0, 0
        tally = run(program, endpoint, deadline)
        tallies.append((tally.sent, tally.received, tally.pulled, tally.staged))
        assert np.array_equal(landed, bits) or me.rank == 0
        assert np.array_equal(pulled, bits[:32] + 100) or me.rank == 1
    # Nobody sends now: the run ends at its deadline, and the endpoint with it.
    if me.rank == 1:
        begun = time.monotonic()
        error = worlds.error_of(lambda: run(program, endpoint, time.monotonic() + 0.5))
        me.store().set("over", "")
        assert isinstance(error, TransferTimeout), repr(error)
        assert error.members == (0,)
        assert time.monotonic() - begun < 5.0
    else:
        me.store().wait(["over"])
        error = worlds.error_of(lambda: run(program, endpoint, time.monotonic() + 20.0))
        assert isinstance(error, PeerLost)
    assert endpoint.closed
    return tallies


def test_a_program_made_by_hand() -> None:
    assert run_ranks(by_hand, 2, group=False) == [[(96, 0, 32, 96)] * 2, [(0, 96, 0, 96 + 32)] * 2]


def late(me: Rank) -> str:
    endpoint = Endpoint.form(PrefixStore("late", me.store()), me.rank, 1)
    return str(worlds.error_of(lambda: run(Program([Round()], set(), set(), 0), endpoint, time.monotonic() - 1.0)))


def test_a_deadline_that_has_passed_starts_nothing() -> None:
    assert "before round 0 of 1" in run_ranks(late, 1, group=False)[0]
