"""Watched rounds between real processes: the gate before everything that is started, seals, words, and an end in between."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import PrefixStore

from elastic_reshard.arena import Copies
from elastic_reshard.arena.pretend import open_pretend
from elastic_reshard.errors import DigestMismatch, ReshardError, TransferError
from elastic_reshard.transport import GlooNetwork, Program, run
from elastic_reshard.transport.program import Message, Round
from elastic_reshard.transport.streamed import StreamedRounds
from tests.collective.worlds import error_of
from tests.communicator.world import soon
from tests.processes import Rank, run_ranks

ROUNDS, SIZE = 6, 9000
BITS = (np.arange(ROUNDS * SIZE) % 251).astype(np.uint8)


class Carriage:
    """A network that writes down what is started, and nothing else."""

    channel = None

    def __init__(self, me: Rank, name: str, log: list[Any]) -> None:
        self.rank, self.log = me.rank, log
        self.inner = GlooNetwork(PrefixStore(name, me.store()), me.rank, 2, 30.0, "lo", tuple)
        self.network = self
        self.failed: BaseException | None = None
        self.waiting_since = None

    def reserve(self, *numbers: int) -> tuple[int, int]:
        return self.inner.reserve(*numbers)

    def send(self, peer: int, buffer: torch.Tensor, number: int) -> Any:
        self.log.append(("send", buffer.numel()))
        return self.inner.send(peer, buffer, number)

    def receive(self, peer: int, buffer: torch.Tensor, number: int) -> Any:
        self.log.append(("receive", buffer.numel()))
        return self.inner.receive(peer, buffer, number)

    def fail(self, error: BaseException) -> None:
        self.failed = error
        self.inner.close()

    def close(self) -> None:
        self.inner.close()


class Watch:
    """Ends before round `end`; writes down all that it is asked and told."""

    ahead = True

    def __init__(self, log: list[Any], end: int, full: bool = True, broken: int = -1) -> None:
        self.log, self.end, self.full, self.salt, self.broken = log, end, full, 7, broken
        self.done = 0

    def may_begin(self, number: int) -> bool:
        self.log.append(("may", number))
        return number < self.end

    def may_copy(self, number: int) -> bool:
        return number < self.end

    def intact(self) -> bool:
        self.done += 1
        return self.done != self.broken + 1

    def landed(self, number: int) -> None:
        self.log.append(("landed", number))

    def waiting(self, peer: int | None, cell: int) -> None:
        self.log.append(("waits", peer, cell))


def program(me: Rank, memory: np.ndarray) -> Program:
    """Member 0 sends a message to member 1 in each round but the third, memory to memory."""
    rounds = [Round() for _ in range(ROUNDS)]
    count = 0
    for number, r in enumerate(rounds):
        if number != 2:
            buffer = torch.from_numpy(memory[number * SIZE : (number + 1) * SIZE])
            (r.receives if me.rank else r.sends).append(Message(1 - me.rank, count, buffer, None, 10 + number))
            count += 1
    return Program(rounds, set(), set(), 0)


def watched(me: Rank, end: int, options: dict[str, Any], spoil: int) -> tuple[list[Any], str, list[int], bool]:
    """(log, error, rounds that are right, whether the carriage has failed)"""
    log: list[Any] = []
    memory = BITS.copy() if me.rank == 0 else np.zeros_like(BITS)
    carriage = Carriage(me, "watched", log)
    if me.rank == 0 and spoil >= 0:
        # The sender's digest is then not of the bytes that went out.
        seal = carriage.send

        def send(peer: int, buffer: torch.Tensor, number: int) -> Any:
            if buffer.numel() == 16 and sum(1 for what in log if what == ("send", 16)) == spoil:
                buffer[8] ^= 1
            return seal(peer, buffer, number)

        carriage.send = send  # type: ignore[method-assign]
    watch = Watch(log, end, **options) if me.rank == 0 else Watch(log, end, full=options.get("full", True))
    made, error = program(me, memory), ""
    try:
        run(made, carriage, time.monotonic() + 20, watch)
    except ReshardError as raised:
        error = type(raised).__name__
    right = [
        n for n in range(ROUNDS) if np.array_equal(memory[n * SIZE : (n + 1) * SIZE], BITS[n * SIZE : (n + 1) * SIZE])
    ]
    me.store().set(f"over{me.rank}", "")
    me.store().wait(["over0", "over1"])
    carriage.close()
    return log, error, right, carriage.failed is not None


def in_turn(me: Rank, end: int) -> list[Any]:
    """No round begins before the one before has landed."""
    log: list[Any] = []
    memory = BITS.copy() if me.rank == 0 else np.zeros_like(BITS)
    carriage, watch = Carriage(me, "in turn", log), Watch(log, end)
    watch.ahead = False
    run(program(me, memory), carriage, time.monotonic() + 20, watch)
    me.store().set(f"over{me.rank}", "")
    me.store().wait(["over0", "over1"])
    carriage.close()
    got = [n for n in range(ROUNDS) if memory[n * SIZE : (n + 1) * SIZE].tobytes() == BITS[n * SIZE :][:SIZE].tobytes()]
    return [log, got == [n for n in range(end) if n != 2] or me.rank == 0]


def test_rounds_in_turn_leave_nothing_under_way_at_the_gate() -> None:
    for end in (4, ROUNDS):
        for log, right in run_ranks(in_turn, 2, end, group=False):
            steps = [what for what in log if what[0] in ("may", "landed")]
            order = [("may", 0), ("landed", 0), ("may", 1), ("landed", 1), ("landed", 2), ("may", 3), ("landed", 3)]
            rest = [("may", 4)] if end == 4 else [("may", 4), ("landed", 4), ("may", 5), ("landed", 5)]
            assert steps == order + rest
            assert right


def landed(log: list[Any]) -> list[int]:
    return [what[1] for what in log if what[0] == "landed"]


def test_nothing_of_a_round_is_started_before_the_gate_and_all_landed_rounds_are_there() -> None:
    sent, received = run_ranks(watched, 2, ROUNDS, {}, -1, group=False)
    for log, error, right, failed in (sent, received):
        assert (error, failed) == ("", False)
        assert right == list(range(ROUNDS)) or (right == [0, 1, 3, 4, 5] and log is received[0])
        assert landed(log) == list(range(ROUNDS))
        # A round without messages is nobody's business; each other is asked about once, before its own messages.
        assert [what[1] for what in log if what[0] == "may"] == [0, 1, 3, 4, 5]
        started = 0
        asked = 0
        for what in log:
            asked += what[0] == "may"
            started += what[0] in ("send", "receive") and what[1] == SIZE
            assert started <= asked
        assert started == 5
    words = [what for what in received[0] if what[0] == "waits"]
    assert words[0::2] == [
        ("waits", 0, 10 + n) for n in (0, 0, 1, 1, 3, 3, 4, 4, 5, 5)
    ]  # for bytes, then for their seal
    assert all(what == ("waits", None, -1) for what in words[1::2])


def test_an_end_in_between_leaves_nothing_half() -> None:
    for end in (0, 2, 4):
        sent, received = run_ranks(watched, 2, end, {"full": False}, -1, group=False)
        assert (sent[1], received[1], sent[3], received[3]) == ("", "", False, False)
        rounds = list(range(max(end, 3) if end > 2 else end))
        assert landed(sent[0])[: len(rounds)] == rounds == landed(received[0])[: len(rounds)]
        assert received[2] == [n for n in rounds if n != 2]
        assert all(n < max(end, 3) for n in landed(received[0]))


def test_a_sender_whose_memory_changed_says_so_and_nobody_takes_the_round() -> None:
    sent, received = run_ranks(watched, 2, ROUNDS, {"broken": 1}, -1, group=False)
    assert sent[1] == TransferError.__name__
    assert landed(sent[0]) == landed(received[0]) == [0]
    assert received[1] in (TransferError.__name__, "PeerLost")
    assert sent[3]
    assert received[3]


def test_a_digest_that_differs_stops_the_receiver_in_that_round() -> None:
    _, received = run_ranks(watched, 2, ROUNDS, {"full": False}, 3, group=False)
    assert received[1] == DigestMismatch.__name__
    assert landed(received[0]) == [0, 1, 2, 3]
    assert received[3]


def bare(me: Rank) -> str:
    """A program that needs its domain's channel does not run without one."""
    carriage = Carriage(me, "bare", [])
    rounds = [Round(readers={1 - me.rank})]
    error = error_of(lambda: run(Program(rounds, set(), set(), 0), carriage, time.monotonic() + 5))
    return type(error).__name__


def test_a_program_with_tokens_needs_a_channel() -> None:
    assert run_ranks(bare, 2, group=False) == ["TransferError"] * 2


class Ajar(Watch):
    """Its window opens when it is asked for the third round."""

    def __init__(self, target: np.ndarray) -> None:
        super().__init__([], 3)
        self.target, self.asked = target, []  # type: ignore[var-annotated]

    def may_copy(self, number: int) -> bool:
        self.asked.append((number, self.target.tolist()))
        return super().may_copy(number)


@pytest.mark.parametrize("streamed", [False, True])
def test_rounds_of_copies_only_ask_before_each_and_end_where_they_are_told(streamed: bool) -> None:
    target, rounds = np.zeros(5, dtype=np.uint8), []
    for number in range(5):
        own = Copies()
        if number != 1:  # nothing at all: nobody is asked
            own.add(target[number : number + 1], np.full(1, number + 1, dtype=np.uint8))
        rounds.append(Round(own=own))
    made, watch = Program(rounds, set(), set(), 0), Ajar(target)
    watch.ahead = False
    carriage = SimpleNamespace(rank=0, channel=None, fail=lambda error: None)
    if streamed:
        device = open_pretend(0)
        done = SimpleNamespace(wait=lambda deadline: None)
        network: Any = SimpleNamespace(device=device, stream=device.stream(), point=lambda: done)
        StreamedRounds(made, carriage, network, soon(5), watch).run()
    else:
        run(made, carriage, soon(5), watch)
    assert watch.asked == [(0, [0] * 5), (2, [1, 0, 0, 0, 0]), (3, [1, 0, 3, 0, 0])]
    assert target.tolist() == [1, 0, 3, 0, 0]
