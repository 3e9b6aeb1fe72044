"""The rounds of a program, carried out over a network and a domain's memory.

Two rounds are under way at a time: while the network carries one, the domain exchanges the one before. Messages that go
straight from tensor to tensor need no staging, so they are started before the round's half of it is free.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from elastic_reshard.arena import Copies, DomainChannel
from elastic_reshard.errors import TransferError, TransferTimeout
from elastic_reshard.transport.network import GroupedNetwork, Network, Pending
from elastic_reshard.transport.polling import poll
from elastic_reshard.transport.program import Message, Program, Pull, Round

__all__ = ["Carriage", "Rounds", "Tally", "in_host_memory"]

# Tags on the domain channel. Rounds need none of their own: messages of one tag stay in order.
_STAGED, _LANDED, _READ, _FINISHED = 1, 2, 3, 4
# Rounds under way. More keep gloo busier, but the more messages a peer's death meets, the more often gloo loses sight of it
# (measured: with 16 rounds nearly always, with 2 rarely).
_AHEAD = 2


class Carriage(Protocol):
    """What a run goes over: a network between domains, and a channel inside one's own (None: nothing of it needs tokens).

    `Endpoint` is one; so is a mover's communicator."""

    @property
    def rank(self) -> int:
        """This member's."""

    @property
    def network(self) -> Network | GroupedNetwork:
        """To the members that messages name."""

    @property
    def channel(self) -> DomainChannel | None:
        """To the domain's other members."""

    def fail(self, error: BaseException) -> None:
        """The run broke: let go of everything, so that nobody waits for this member."""


@dataclass
class Tally:
    """What one run moved through this member, in bytes, and how long it took, in seconds."""

    sent: int = 0
    received: int = 0
    pulled: int = 0
    copied: int = 0
    staged: int = 0
    seconds: float = 0.0


def in_host_memory(message: Message) -> torch.Tensor:
    """The buffer of a message that goes by itself. TransferError if it is a device's memory."""
    if not isinstance(message.buffer, torch.Tensor):
        raise TransferError(f"a message to or from member {message.peer} lies in device memory, which this network does not "
                            "move; bind the program with wire='host'")  # fmt: skip
    return message.buffer


class Rounds:
    """One run of a program. For one thread, once. `watched` has a kind with a gate, seals and words."""

    def __init__(self, program: Program, carriage: Carriage, deadline: float) -> None:
        self.program, self.carriage, self.deadline = program, carriage, deadline
        self.count = len(program.rounds)  # rounds before the end
        self.sends: list[dict[int, Pending]] = [{} for _ in program.rounds]
        self.receives: list[dict[int, Pending]] = [{} for _ in program.rounds]
        self.first: dict[int, tuple[int, int]] = {}
        self.ahead = 0
        self.overlaps = True  # a round may begin before the one before is finished
        self.tally = Tally()

    def run(self) -> Tally:
        """Carry out all rounds; whatever is raised, the carriage has failed by then."""
        try:
            return self._run()
        except BaseException as error:
            self.carriage.fail(error)
            raise

    def _run(self) -> Tally:
        begun = time.monotonic()
        rounds = self.program.rounds
        self._reserve()
        number = 0
        while number <= self.count:
            if time.monotonic() >= self.deadline:
                raise self._late(number)
            if number and not self.overlaps:
                self._finish(number - 1, rounds[number - 1])
            self._start_straight(number + (_AHEAD if self.overlaps else 1))
            if number < self.count:
                self._begin(number, rounds[number])
            if number and self.overlaps:
                self._finish(number - 1, rounds[number - 1])
            number += 1
        for pending in self.sends:
            for one in pending.values():
                one.wait(self.deadline)
        # The others' words were heard before their half was used again.
        for r in rounds[max(0, self.count - _AHEAD) : self.count]:
            for reader in sorted(r.readers):
                self._hear(reader, _READ)
        for owner in sorted(self.program.owners):
            self._tell(owner, _FINISHED)
        for reader in sorted(self.program.readers):
            self._hear(reader, _FINISHED)
        self.tally.seconds = time.monotonic() - begun
        return self.tally

    def _reserve(self) -> None:
        """Numbers for all messages of the run, pair by pair."""
        self.first = {peer: self._network.reserve(peer, *n) for peer, n in self._numbers().items()}

    def _numbers(self) -> dict[int, list[int]]:
        """Of each peer, how many messages go to it and come from it."""
        count: dict[int, list[int]] = {}
        for r in self.program.rounds:
            for side, messages in enumerate((r.sends, r.receives)):
                for message in messages:
                    count.setdefault(message.peer, [0, 0])[side] += 1
        return count

    def _start_straight(self, until: int) -> None:
        """Start messages between tensors of all rounds before `until`."""
        rounds = self.program.rounds
        while self.ahead < min(until, self.count):
            r, number = rounds[self.ahead], self.ahead
            for i, message in enumerate(r.receives):
                if message.copies is None:
                    self._receive(number, i, message)
            for i, message in enumerate(r.sends):
                if message.copies is None:
                    self._send(number, i, message)
            self.ahead += 1

    def _receive(self, number: int, i: int, message: Message) -> None:
        place = self.first[message.peer][1] + message.number
        self.receives[number][i] = self._network.receive(message.peer, in_host_memory(message), place)
        self.tally.received += message.nbytes

    def _send(self, number: int, i: int, message: Message) -> None:
        place = self.first[message.peer][0] + message.number
        self.sends[number][i] = self._network.send(message.peer, in_host_memory(message), place)
        self.tally.sent += message.nbytes

    def _begin(self, number: int, r: Round) -> None:
        """Everything of a round that needs its half of the staging, once that is free; it waits for nobody else."""
        if number >= 2:
            self._free(number - 2)
        for i, message in enumerate(r.receives):
            if message.copies is not None:
                self._receive(number, i, message)
        if r.stage_readers:
            self._copy(r.stage)
            self.tally.staged += r.stage.nbytes
            for reader in sorted(r.stage_readers):
                self._tell(reader, _STAGED)
        for i, message in enumerate(r.sends):
            if message.copies is not None:
                self._copy(message.copies)
                self.tally.staged += message.copies.nbytes
                self._send(number, i, message)
        self._copy(r.own)
        self.tally.copied += r.own.nbytes

    def _free(self, number: int) -> None:
        """Wait until nobody uses a round's half of the staging any more."""
        for i, message in enumerate(self.program.rounds[number].sends):
            if message.copies is not None:
                self.sends[number].pop(i).wait(self.deadline)
        for reader in sorted(self.program.rounds[number].readers):
            self._hear(reader, _READ)

    def _finish(self, number: int, r: Round) -> None:
        """Pull from sources of the domain, take what the network brought, exchange it inside the domain."""
        for pull in r.pulls:
            self._pull(pull, _STAGED)
        for i, message in enumerate(r.receives):
            self.receives[number][i].wait(self.deadline)
            if message.copies is not None:
                self._copy(message.copies)
                self.tally.staged += message.copies.nbytes
        self.receives[number].clear()
        for reader in sorted(r.landed_readers):
            self._tell(reader, _LANDED)
        for pull in r.landed:
            self._pull(pull, _LANDED)
        for owner in sorted(r.owners):
            self._tell(owner, _READ)

    def _pull(self, pull: Pull, tag: int) -> None:
        if pull.staged:
            self._hear(pull.owner, tag)
        self._copy(pull.copies)
        self.tally.pulled += pull.copies.nbytes

    def _copy(self, copies: Copies) -> None:
        """Run copies to their end. What a device has begun it also ends, within milliseconds, so nothing is left behind."""
        copies.run()
        if copies.device is not None:
            poll(copies.device.current().record().done, math.inf)

    @property
    def _network(self) -> Network:
        found = self.carriage.network
        if isinstance(found, GroupedNetwork):
            raise TransferError(
                f"member {self.carriage.rank} has a network of groups, which carries landing programs only; run it over gloo"
            )
        return found

    @property
    def _channel(self) -> DomainChannel:
        found = self.carriage.channel
        if found is None:
            raise TransferError(f"a program of member {self.carriage.rank} needs its domain's channel, and there is none; "
                                "run it over an Endpoint")  # fmt: skip
        return found

    def _tell(self, peer: int, tag: int) -> None:
        self._channel.send(peer, tag, deadline=self.deadline)

    def _hear(self, peer: int, tag: int) -> None:
        self._channel.take(peer, tag, deadline=self.deadline, strict=False)

    def _late(self, number: int) -> TransferTimeout:
        return TransferTimeout(
            f"the deadline passed before round {number} of {len(self.program.rounds)} at member {self.carriage.rank}; "
            "nobody in particular is late: give a longer deadline"
        )
