"""Rounds of a landing program: a gate before each, a seal after it, and words about what is waited for.

After a round's sends are complete, a sender seals them for each receiver: whether its memory is still what it was, and a
digest of the bytes. A receiver compares before the round counts as landed.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from elastic_reshard.errors import DigestMismatch, TransferError
from elastic_reshard.transport.network import Pending
from elastic_reshard.transport.program import Message, Program, Round
from elastic_reshard.transport.rounds import Carriage, Rounds, in_host_memory

__all__ = ["Watch", "WatchedRounds"]

# What is looked at of each message, unless all is; at another place in each.
_WINDOW: Final = 4 << 10
_STRIDE: Final = 0x9E3779B1  # odd and large: places are spread over any length
_INTACT: Final = 1
_Seal = npt.NDArray[np.uint64]


class Watch(Protocol):
    """Whoever is responsible for a landing run. Called in the run's thread.

    full: digests over all bytes, else over a window of each message. salt: where windows lie. ahead: whether a round may begin
    before the one before has landed; if not, members whose gates open by turns leave nothing under way meanwhile. All alike on
    all members.
    """

    full: bool
    salt: int
    ahead: bool

    def may_begin(self, number: int) -> bool:
        """Asked before anything of a round with messages is started; may block. False: end before it, on all members."""

    def may_copy(self, number: int) -> bool:
        """Asked before a round without messages copies anything of this host; may block. False: end before it."""

    def intact(self) -> bool:
        """Whether all memory that this member sends from is still what it was at the beginning."""

    def landed(self, number: int) -> None:
        """All bytes of a round are here and agree with what was sent; all that this member sends in it is sent."""

    def waiting(self, peer: int | None, cell: int) -> None:
        """For whom, and for which cell, the run waits from now on; None: for nobody."""


class WatchedRounds(Rounds):
    """One run of a landing program. Its messages' peers are those of the network."""

    def __init__(self, program: Program, carriage: Carriage, deadline: float, watch: Watch) -> None:
        super().__init__(program, carriage, deadline)
        self.watch = watch
        self.overlaps = watch.ahead
        self._numbers_of_seals()
        self.told: list[dict[int, tuple[Pending, _Seal]]] = [{} for _ in program.rounds]
        self.sealed: list[_Seal] = []  # kept until the end: gloo reads them

    def _numbers_of_seals(self) -> None:
        """Seals are numbered after all messages of their pair and direction, round by round."""
        counts = super()._numbers()
        self.out: list[dict[int, int]] = []
        self.into: list[dict[int, int]] = []
        for r in self.program.rounds:
            for side, messages, numbers in ((0, r.sends, self.out), (1, r.receives, self.into)):
                found = {}
                for peer in sorted({m.peer for m in messages}):
                    found[peer] = counts[peer][side]
                    counts[peer][side] += 1
                numbers.append(found)
        self.counts = counts

    def _numbers(self) -> dict[int, list[int]]:
        return self.counts

    def _start_straight(self, until: int) -> None:
        rounds = self.program.rounds
        while self.ahead < min(until, self.count):
            number = self.ahead
            r = rounds[number]
            # Who has no messages in a round hinders nobody, and would otherwise be rounds ahead of all others.
            if r.talks:
                may = self.watch.may_begin(number)
            else:
                may = not r.copies or self.watch.may_copy(number)
            if not may:
                self.count = number
                return
            for peer, place in self.into[number].items():
                seal = np.zeros(2, dtype=np.uint64)
                buffer = torch.from_numpy(seal.view(np.uint8))
                at = self.first[peer][1] + place
                self.told[number][peer] = (self._network.receive(peer, buffer, at), seal)
            super()._start_straight(number + 1)

    def _free(self, number: int) -> None:
        """A round's sends are complete when it is finished."""

    def _finish(self, number: int, r: Round) -> None:
        for pull in r.pulls:
            self._copy(pull.copies)
            self.tally.pulled += pull.copies.nbytes
        for i, message in enumerate(r.receives):
            self._wait(self.receives[number].pop(i), message.peer, message.cell)
            if message.copies is not None:
                self._copy(message.copies)
                self.tally.staged += message.copies.nbytes
        for i, message in enumerate(r.sends):
            self._wait(self.sends[number].pop(i), message.peer, message.cell)
        self._seal(number, r)
        self._check(number, r)
        self.watch.landed(number)

    def _wait(self, pending: Pending, peer: int, cell: int) -> None:
        self.watch.waiting(peer, cell)
        pending.wait(self.deadline)
        self.watch.waiting(None, -1)

    def _seal(self, number: int, r: Round) -> None:
        """Seal what this member sent in a round."""
        if not r.sends:
            return
        digests = {peer: self._digest([m for m in r.sends if m.peer == peer]) for peer in self.out[number]}
        intact = self.watch.intact()  # after the sends, and after the digests' reading
        for peer, place in self.out[number].items():
            seal = np.array([_INTACT if intact else 0, digests[peer]], dtype=np.uint64)
            self.sealed.append(seal)
            buffer = torch.from_numpy(seal.view(np.uint8))
            # Waited for at the end of the run, with all other sends.
            self.sends[number][-1 - peer] = self._network.send(peer, buffer, self.first[peer][0] + place)
        if not intact:
            for pending in self.sends[number].values():  # so that receivers hear it from its seal
                pending.wait(self.deadline)
            raise TransferError(
                f"memory that member {self.carriage.rank} sends from was rewritten during round {number}; nobody has taken "
                "that round. Publish again"
            )

    def _check(self, number: int, r: Round) -> None:
        """Compare what arrived with what its senders said of it."""
        wrong = []
        for peer, (pending, seal) in self.told[number].items():
            received = [m for m in r.receives if m.peer == peer]
            self._wait(pending, peer, received[-1].cell)
            if int(seal[0]) != _INTACT:
                raise TransferError(
                    f"memory that member {peer} sends from was rewritten during round {number}; member "
                    f"{self.carriage.rank} has not taken that round. Publish again"
                )
            if int(seal[1]) != self._digest(received):
                wrong.append((f"cells {received[0].cell} to {received[-1].cell}", f"(round {number})", peer))
        self.told[number].clear()
        if wrong:
            raise DigestMismatch(wrong)

    def _digest(self, messages: list[Message]) -> int:
        """Of all messages of a pair, direction and round, as they travelled."""
        h = xxhash.xxh3_64()
        for message in messages:
            data = in_host_memory(message).numpy()
            if not self.watch.full and len(data) > _WINDOW:
                at = (message.number * _STRIDE + self.watch.salt) % (len(data) - _WINDOW + 1)
                data = data[at : at + _WINDOW]
            h.update(data.data)
        return h.intdigest()
