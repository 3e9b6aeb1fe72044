"""Streamed rounds between real processes over a pretend device: bytes against brute force, ends in between, losses."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from elastic_reshard.arena import HostArena
from elastic_reshard.arena.boxes import array_at
from elastic_reshard.arena.pretend import empty, open_pretend
from elastic_reshard.arena.strided import Strided
from elastic_reshard.errors import ArenaError, DigestMismatch, PlanError, TransferError, TransferTimeout
from elastic_reshard.layout import Mesh, ModelLayout, Replicate, TensorLayout
from elastic_reshard.plan import Plan, Topology
from elastic_reshard.transport import Program, StagingPlan, Views, bind
from elastic_reshard.transport.program import Message, Round
from tests.communicator.world import soon
from tests.processes import Rank, run_ranks
from tests.transport.streams import SHAPES, SIZE, SOURCES, Member, Watch, kill, plan


def whole(me: Rank, source: str, destination: str, wire: str, full: bool) -> dict[str, Any]:
    """The whole plan twice over one communicator: rounds ahead of each other, and in turn."""
    member = Member(me, source if me.rank < SOURCES else destination, wire)
    program = member.bind()
    communicator = member.form()
    logs = []
    for number in range(2):
        if me.rank >= SOURCES:
            for tensor in member.tensors.values():
                tensor.zero_()
        member.meet(f"ready{number}")
        watch = Watch(full=full, ahead=number == 0)
        logs.append((member.carry(program, communicator, watch), watch.numbers("may"), watch.numbers("landed")))
        if number:  # at the gate nothing is under way
            steps = [entry for entry in watch.log if entry[0] in ("may", "landed")]
            assert all(("landed", n - 1) in steps[: steps.index(("may", n))] for n in watch.numbers("may") if n)
        assert member.right() == list(SHAPES), member.right()
        member.meet(f"done{number}")
    out = member.registry.close(communicator, soon()).out
    member.close()
    talks = [n for n, r in enumerate(program.rounds) if r.sends or r.receives]
    return {"logs": logs, "out": out, "staged": member.staged, "talks": talks, "rounds": len(program.rounds)}


@pytest.mark.parametrize(
    ("source", "destination", "wire", "full"),
    [
        ("device", "device", "device", True),
        ("host", "host", "device", False),
        ("device", "device", "host", True),
        pytest.param("host", "device", "device", True, marks=pytest.mark.long),
        pytest.param("device", "host", "device", True, marks=pytest.mark.long),
        pytest.param("host", "device", "host", False, marks=pytest.mark.long),
    ],
)
def test_every_byte_of_a_plan_arrives(source: str, destination: str, wire: str, full: bool) -> None:
    for said in run_ranks(whole, SIZE, source, destination, wire, full, group=False):
        assert said["out"]
        assert said["rounds"] > 6
        for error, asked, landed in said["logs"]:
            assert error == ""
            assert asked == said["talks"]
            assert landed == list(range(said["rounds"]))


@pytest.mark.parametrize("wire", ["host", "device"])
@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("member", [0, 1])
def test_a_message_goes_straight_only_from_memory_that_its_network_takes(place: str, wire: Any, member: int) -> None:
    shape = (512, 1024)
    sides = [
        ModelLayout({"w": TensorLayout(shape, "uint8", Mesh.arange((1,), first=n), (Replicate(),))}) for n in (0, 1)
    ]
    piece = Plan.between(sides[0], sides[1], Topology((0, 1))).slice(member)
    tensor = empty(shape, torch.uint8) if place == "device" else HostArena(1 << 19).empty(shape, torch.uint8)
    views = Views({(0, "w"): tensor}, {}) if member == 0 else Views({}, {(0, "w"): tensor})
    staged = StagingPlan(piece, views, 64 << 20, wire=wire)
    assert (staged.nbytes == 0) == (place == wire)
    staging: Any = None
    if staged.nbytes:
        staging = open_pretend(0).scratch(staged.nbytes) if wire == "device" else HostArena(staged.nbytes)
    program = bind(staged, staging, {}, piece.rounds)
    messages = [m for r in program.rounds for m in (*r.sends, *r.receives)]
    assert sum(m.nbytes for m in messages) == tensor.nbytes
    assert {m.copies is None for m in messages} == {place == wire}
    assert {type(m.buffer) for m in messages} == {torch.Tensor if wire == "host" else Strided}
    if staged.nbytes:
        wrong: Any = HostArena(staged.nbytes) if wire == "device" else open_pretend(0).scratch(staged.nbytes)
        with pytest.raises(PlanError, match=f"for a {wire} wire was given staging of another kind"):
            bind(staged, wrong, {}, piece.rounds)


def test_copies_of_a_round_are_one_launch() -> None:
    member = Member(Rank(0, SIZE, "/none/store", 1.0), "device", "device")
    for r in member.bind().rounds:
        assert len({id(m.copies) for m in r.sends if m.copies is not None}) <= 1
    member.close()


def ended(me: Rank, ends: list[int]) -> list[Any]:
    """The plan, ended before a round, for several ends; then to its end: all is there."""
    member = Member(me, "device", "device")
    program = member.bind()
    communicator = member.form()
    told = []
    for number, end in enumerate(ends):
        member.meet(f"ready{number}")
        watch = Watch(end=end)
        error = member.carry(program, communicator, watch)
        told.append((error, watch.numbers("may"), watch.numbers("landed")))
    right = member.right()
    out = member.registry.close(communicator, soon()).out
    member.close()
    return [told, right, out, [n for n, r in enumerate(program.rounds) if r.sends or r.receives]]


def test_an_end_in_between_is_at_the_same_round_for_all_and_the_communicator_goes_on() -> None:
    ends = [0, 1, 2, 3, 5, 1 << 20]
    results = run_ranks(ended, SIZE, ends, group=False)
    rounds = plan().rounds.count
    for told, right, out, talks in results:
        assert out
        assert right == list(SHAPES)
        for end, (error, asked, landed) in zip(ends, told, strict=True):
            first = min((n for n in talks if n >= end), default=rounds)
            assert error == ""
            assert landed == list(range(first))
            assert asked == [n for n in talks if n < end] + ([first] if first < rounds else [])


def gaps(me: Rank, ends: list[int]) -> list[list[Any]]:
    """Pairs that talk in unlike rounds, so that each member skips others; ended at several rounds, an epoch for each."""
    member = Member(me, "device", "device")
    told = [_gaps(member, end, epoch) for epoch, end in enumerate(ends)]
    member.close()
    return told


def _gaps(member: Member, end: int, epoch: int) -> list[Any]:
    me = member.me
    talks = [[(0, 1)], [(1, 2), (0, 3)], [(2, 0)], [], [(3, 1), (1, 3)], [(0, 2), (2, 3)], [(1, 0)]]
    memory = member.device.scratch(2 * len(talks) * SIZE * 64)
    rounds, count, at = [Round() for _ in talks], dict[tuple[int, bool], int](), 0
    expected = []
    for number, pairs in enumerate(talks):
        for sender, receiver in pairs:
            if me.rank not in (sender, receiver):
                continue
            peer, out = sender + receiver - me.rank, me.rank == sender
            piece = memory.strided(at, (40,), (1,), 1)
            at += 64
            place = count[peer, out] = count.get((peer, out), -1) + 1
            value = np.arange(40) + 10 * number + sender
            if out:
                array_at(piece)[:] = value
            else:
                expected.append((number, piece, value))
            r = rounds[number]
            (r.sends if out else r.receives).append(Message(peer, place, piece, None, number))
    communicator = member.form(epoch)
    watch = Watch(end=end)
    error = member.carry(Program(rounds, set(), set(), 0), communicator, watch, 10.0)
    good = [n for n, piece, value in expected if np.array_equal(array_at(piece), value)]
    missing = [n for n, piece, _ in expected if not array_at(piece).any()]
    return [error, watch.numbers("landed"), good, missing, [n for n, _, _ in expected]]


def test_members_that_skip_rounds_meet_in_one_order() -> None:
    ends = [1, 2, 4, 5, 9]
    for told in run_ranks(gaps, SIZE, ends, group=False):
        for end, (error, landed, good, missing, numbers) in zip(ends, told, strict=True):
            assert error == ""
            assert good == [n for n in numbers if n < end]
            assert missing == [n for n in numbers if n >= end]
            assert set(range(end)) & set(range(7)) <= set(landed)


def rewritten(me: Rank) -> list[Any]:
    member = Member(me, "device", "device", tells=True)
    watch = Watch(broken=2) if me.rank == 0 else Watch()
    program = member.bind()
    error = member.carry(program, member.form(), watch)
    member.close()
    heard = [n for n, r in enumerate(program.rounds) if any(m.peer == 0 for m in r.receives)]
    return [error, watch.numbers("landed"), member.failed is not None, heard]


def test_a_slot_that_is_rewritten_is_told_and_the_round_is_not_taken() -> None:
    results = run_ranks(rewritten, SIZE, group=False)
    assert "that member 0 sends from was rewritten during round 2" in results[0][0]
    assert len(results[0][1]) <= 2
    told = 0
    for error, landed, failed, heard in results[SOURCES:]:
        assert failed
        if 2 in heard:
            told += 1
            assert "memory that member 0 sends from was rewritten during round 2" in error
            assert 2 not in landed
    assert told


def corrupted(me: Rank, full: bool) -> list[Any]:
    """Member 2's first message of round 3 is changed between its arrival and the digest."""
    member = Member(me, "device", "device", tells=True)
    program, communicator = member.bind(), member.form()
    if me.rank == SOURCES:
        victim = next(m for m in program.rounds[3].receives if m.nbytes > 1000)
        digest = member.device.digest

        def spoil(pieces: Any, *rest: Any) -> None:
            if any(piece is victim.buffer for piece in pieces):

                def flip() -> bool:
                    array_at(victim.buffer)[:] ^= 1  # type: ignore[arg-type]
                    return True

                communicator.network.stream.submit(flip)  # type: ignore[union-attr]
            digest(pieces, *rest)

        member.device.digest = spoil  # type: ignore[method-assign]
    watch = Watch(full=full)
    error = member.carry(program, communicator, watch)
    member.close()
    return [error, watch.numbers("landed")]


@pytest.mark.parametrize("full", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_byte_that_changed_on_the_way_is_found_in_its_round(full: bool) -> None:
    results = run_ranks(corrupted, SIZE, full, group=False)
    error, landed = results[SOURCES]
    assert error.startswith(DigestMismatch.__name__)
    assert "(round 3) from member" in error
    assert landed == [0, 1, 2]


def lost(me: Rank, how: int, tells: bool) -> list[Any]:
    """Member 1 ends or freezes in round 4. What ends the others is an error where the network tells, else an abort."""
    member = Member(me, "device", "device", tells=tells)
    program, communicator = member.bind(), member.form()

    def before(number: int) -> None:
        if number == 4 and me.rank == 1:
            member.board.set("falls")
            kill(how)

    watch = Watch(before=before)
    aborted: list[float] = []

    def control() -> None:
        """As a mover's control thread: some time after the loss it is told to break off."""
        member.board.get("falls")
        time.sleep(0.3)
        aborted.append(time.monotonic())
        assert member.registry.abort_all(soon(5), "member 1 is lost").out

    thread = threading.Thread(target=control, daemon=True)
    if not tells:
        thread.start()
    error = member.carry(program, communicator, watch, 10.0)
    took = time.monotonic() - aborted[0] if aborted else 0.0
    member.meet("left", [r for r in range(SIZE) if r != 1])
    if not tells:
        thread.join()
    # The next epoch, without the lost one, on the same device.
    fresh = member.form(2, [r for r in range(SIZE) if r != 1])
    member.close()
    heard = [n for n, r in enumerate(program.rounds) if n >= 4 and any(m.peer == 1 for m in r.receives)]
    return [error, took, [n for n in watch.numbers("landed") if n in heard], fresh.busy, len(heard)]


@pytest.mark.parametrize(
    ("how", "tells"),
    [
        (signal.SIGKILL, False),
        pytest.param(signal.SIGSTOP, False, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, True, marks=pytest.mark.long),
    ],
    ids=["killed", "stopped", "told"],
)
def test_a_peer_that_is_lost_in_mid_exchange_holds_nobody(how: int, tells: bool) -> None:
    results = run_ranks(lost, SIZE, how, tells, group=False, lost=[1])
    # The other source may be through with its sends by then.
    for error, took, landed, busy, heard in results[SOURCES:]:
        assert ("PeerLost" in error) if tells else ("was aborted: member 1 is lost" in error), error
        assert took < 2.0
        assert landed == []
        assert heard
        assert busy == 0
    assert results[0][3] == 0


def late(me: Rank) -> list[Any]:
    """Member 1 never comes to round 2; nobody aborts: the deadline ends it, and says whom it waited for."""
    member = Member(me, "device", "device")
    program, communicator = member.bind(), member.form()

    def before(number: int) -> None:
        if number == 2 and me.rank == 1:
            member.board.get(f"late/{SOURCES}")

    begun = time.monotonic()
    error = member.carry(program, communicator, Watch(before=before), 3.0 if me.rank < SOURCES else 1.0)
    took = time.monotonic() - begun
    member.board.set(f"late/{me.rank}")
    member.meet("over")
    member.close()
    return [error, took]


def test_a_deadline_ends_a_wait_and_names_members() -> None:
    results = run_ranks(late, SIZE, group=False)
    for error, took in results[SOURCES:]:
        assert error.startswith(TransferTimeout.__name__), error
        assert " 1" in error
        assert 0.5 < took < 8.0


def refused(me: Rank) -> list[str]:
    """What a network of groups cannot carry is refused before anything is launched."""
    member = Member(me, "device", "device")
    communicator = member.form()
    found = []
    for r in (Round(readers={1 - me.rank}), Round(stage_readers={1 - me.rank})):
        r.sends = member.bind().rounds[0].sends or member.bind().rounds[1].sends
        found.append(member.carry(Program([r], set(), set(), 0), communicator, Watch()))
        communicator = member.form(2 + len(found))
    elsewhere = Member(me, "device", "host").bind()
    found.append(member.carry(elsewhere, communicator, Watch()))
    member.close()
    return found


def test_what_groups_cannot_carry_is_refused() -> None:
    for words, staged, elsewhere in run_ranks(refused, 2, group=False)[:1]:
        assert words.startswith(TransferError.__name__)
        assert "exchanges words inside its domain" in words
        assert "exchanges words inside its domain" in staged
        assert elsewhere.startswith(ArenaError.__name__)
        assert "bind the program with wire='device'" in elsewhere
