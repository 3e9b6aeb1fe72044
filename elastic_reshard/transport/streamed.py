"""Rounds of a landing program over a network of groups: everything is launched on one stream, and the host follows it.

All members launch groups in one order, so that none waits for another's later one: the data of round r + 1, then the seals of
round r; or, where no round begins before the one before has landed, data and seals in turn. Who has nothing in a round launches
no group for it; who is told to end before a round launches none from there on. A seal is a word (whether the sender's memory
is still what it was) and a digest of each message, made on the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_reshard.arena import Copies
from elastic_reshard.arena.boxes import CopyTable
from elastic_reshard.arena.device import Event
from elastic_reshard.arena.strided import Strided
from elastic_reshard.errors import ArenaError, DigestMismatch, TransferError, TransferTimeout
from elastic_reshard.transport.blocks import WordBlock
from elastic_reshard.transport.network import GroupedNetwork, Pending
from elastic_reshard.transport.polling import poll
from elastic_reshard.transport.program import Message, Program, Round
from elastic_reshard.transport.rounds import Carriage, Tally
from elastic_reshard.transport.watched import Watch

__all__ = ["StreamedRounds"]

# Rounds that are begun and have not landed, at most: their words lie in places of their own.
_UNDER_WAY: Final = 3
_INTACT: Final = 1


@dataclass(eq=False)
class _Seals:
    """A round's messages, by peer, and the places of its words: its own word, digests of sends and receives that are made here,
    digests that senders tell, a word of each sender."""

    sends: list[Message]
    receives: list[Message]
    data: Pending | None = None  # and the digests
    told: Pending | None = None

    @property
    def made(self) -> int:
        return 1

    @property
    def heard(self) -> int:
        return self.made + len(self.sends) + len(self.receives)

    @property
    def words(self) -> int:
        return self.heard + len(self.receives)

    @property
    def size(self) -> int:
        return self.words + len({m.peer for m in self.receives})


def _by_peer(messages: Sequence[Message]) -> list[Message]:
    return sorted(messages, key=lambda m: m.peer)  # stable: within a pair both ends have the same order


def _spans(messages: Sequence[Message]) -> dict[int, slice]:
    """By peer, its messages' places in a list by peer."""
    found: dict[int, slice] = {}
    for at, message in enumerate(messages):
        found[message.peer] = slice(found[message.peer].start if message.peer in found else at, at + 1)
    return found


class _Words:
    """The words of the rounds under way, on both sides."""

    def __init__(self, network: GroupedNetwork, size: int) -> None:
        self._size = max(1, size)
        self._stream = network.stream
        self._block = WordBlock(network.device, _UNDER_WAY * self._size)
        starts = [place * self._size for place in range(_UNDER_WAY)]
        self._up: list[CopyTable] = [self._block.up(at, 1) for at in starts]
        self._down: list[CopyTable] = [self._block.down(at, self._size) for at in starts]
        # A kernel is loaded at its first launch, which may wait for all that runs: so not beside a group that waits for a peer.
        word = self._block.on_device(0, 1)
        network.device.digest([word.as_bytes()], 0, True, word, network.stream)

    def at(self, number: int, place: int, count: int) -> Strided:
        """Words of a round, on the device."""
        return self._block.on_device(number % _UNDER_WAY * self._size + place, count)

    def say(self, number: int, word: int) -> None:
        """Launch: the round's own word goes to the device."""
        self._block.host[number % _UNDER_WAY * self._size] = word
        self._block.copy(self._up[number % _UNDER_WAY], self._stream)

    def ask(self, number: int) -> None:
        """Launch: the round's words come to the host."""
        self._block.copy(self._down[number % _UNDER_WAY], self._stream)

    def read(self, number: int, place: int, count: int) -> list[int]:
        """What came with `ask`, once that is done."""
        at = number % _UNDER_WAY * self._size + place
        found: list[int] = self._block.host[at : at + count].tolist()
        return found

    def close(self) -> None:
        """As WordBlock's."""
        self._block.close()


class StreamedRounds:
    """One run of a landing program over a network of groups. For one thread, once. Three rounds are under way at a time."""

    def __init__(
        self, program: Program, carriage: Carriage, network: GroupedNetwork, deadline: float, watch: Watch
    ) -> None:
        self.program, self.carriage, self.network = program, carriage, network
        self.deadline, self.watch = deadline, watch
        self.count = len(program.rounds)  # rounds before the end
        self.tally = Tally()
        self._seals = [_Seals(_by_peer(r.sends), _by_peer(r.receives)) for r in program.rounds]
        # What moves inside the domain waits for no peer, so it has a stream of its own.
        self._side = network.device.stream()
        self._near: dict[int, Event] = {}

    def run(self) -> Tally:
        """Carry out all rounds; whatever is raised, the carriage has failed by then, and the device has ended its work."""
        try:
            self._prepare()
        except BaseException as error:
            self.carriage.fail(error)
            raise
        try:
            found = self._run()
        except BaseException as error:
            self.carriage.fail(error)
            # However long that takes: whoever says that this member is out says that none of its writes is under way. Waits for
            # others were ended by the carriage.
            for stream in (self._side, self.network.stream):
                poll(stream.record().done, math.inf)
            self._words.close()
            raise
        self._words.close()
        return found

    def _prepare(self) -> None:
        """Refuse what such a network cannot carry, and upload tables ahead."""
        device = self.network.device
        for r in self.program.rounds:
            if (
                r.stage_readers
                or r.landed_readers
                or r.readers
                or r.owners
                or r.landed
                or any(p.staged for p in r.pulls)
            ):
                raise TransferError(
                    f"the program of member {self.carriage.rank} exchanges words inside its domain, which a network of groups "
                    "does not carry; run it over an Endpoint"
                )
            for message in (*r.sends, *r.receives):
                if not isinstance(message.buffer, Strided) or message.buffer.device is not device:
                    raise ArenaError(
                        f"a message between members {self.carriage.rank} and {message.peer} is not in memory of {device.id}, "
                        "whose network is to carry it; bind the program with wire='device'"
                    )
            for copies in (*_copies(r.sends), *_copies(r.receives), r.own, *(pull.copies for pull in r.pulls)):
                copies.prepare()
        self._words = _Words(self.network, max((seals.size for seals in self._seals), default=0))

    def _run(self) -> Tally:
        begun = time.monotonic()
        # How many rounds later a round is sealed, and lands: the device has always something to do.
        seal, land = (1, 2) if self.watch.ahead else (0, 0)
        number = 0
        while number < self.count + land:
            if time.monotonic() >= self.deadline:
                raise TransferTimeout(
                    f"the deadline passed before round {number} of {len(self.program.rounds)} at member {self.carriage.rank}; "
                    "nobody in particular is late: give a longer deadline"
                )
            if number < self.count:
                self._begin(number, self.program.rounds[number])
            if 0 <= number - seal < self.count:
                self._seal(number - seal)
            if 0 <= number - land < self.count:
                self._land(number - land)
            number += 1
        self.network.point().wait(self.deadline)  # this member's last seals are out
        self.tally.seconds = time.monotonic() - begun
        return self.tally

    def _begin(self, number: int, r: Round) -> None:
        """Launch the data of a round, with what goes before and after it on the stream."""
        # Who has no messages in a round hinders nobody, and would otherwise be rounds ahead of all others.
        if r.talks:
            may = self.watch.may_begin(number)
        else:
            may = not r.copies or self.watch.may_copy(number)
        if not may:
            self.count = number
            return
        if r.talks:
            self._exchange(number, r)
        for copies in (r.own, *(pull.copies for pull in r.pulls)):
            copies.run(self._side)
        self._near[number] = self._side.record()
        self.tally.copied += r.own.nbytes
        self.tally.pulled += sum(pull.copies.nbytes for pull in r.pulls)

    def _exchange(self, number: int, r: Round) -> None:
        seals, network = self._seals[number], self.network
        self._stage(r.sends)
        network.exchange(_group(r.sends), _group(r.receives), self.deadline)
        self.tally.sent += sum(m.nbytes for m in r.sends)
        self.tally.received += sum(m.nbytes for m in r.receives)
        self._stage(r.receives)
        digested = [*seals.sends, *seals.receives]
        network.device.digest(
            [piece for _, piece in _group(digested)],
            self.watch.salt,
            self.watch.full,
            self._words.at(number, seals.made, len(digested)),
            network.stream,
            [m.number for m in digested],
        )
        seals.data = network.point()

    def _stage(self, messages: Sequence[Message]) -> None:
        for copies in _copies(messages):
            copies.run(self.network.stream)
            self.tally.staged += copies.nbytes

    def _seal(self, number: int) -> None:
        """Say what became of the memory that was sent from, once it was sent and digested, and ask the senders the same."""
        seals, words = self._seals[number], self._words
        if seals.data is None:
            return
        self._wait(seals.data, seals)
        intact = self.watch.intact()
        words.say(number, _INTACT if intact else 0)
        own = words.at(number, 0, 1).as_bytes()
        sends, receives = [], []
        for peer, span in _spans(seals.sends).items():
            sends += [(peer, own), (peer, words.at(number, seals.made + span.start, span.stop - span.start).as_bytes())]
        for at, (peer, span) in enumerate(_spans(seals.receives).items()):
            receives += [
                (peer, words.at(number, seals.words + at, 1).as_bytes()),
                (peer, words.at(number, seals.heard + span.start, span.stop - span.start).as_bytes()),
            ]
        self.network.exchange(sends, receives, self.deadline)
        words.ask(number)
        seals.told = self.network.point()
        if not intact:
            seals.told.wait(self.deadline)  # so that receivers hear it from its seal
            raise TransferError(
                f"memory that member {self.carriage.rank} sends from was rewritten during round {number}; nobody has taken "
                "that round. Publish again"
            )

    def _land(self, number: int) -> None:
        """Compare what arrived with what its senders said of it; then the round counts."""
        seals = self._seals[number]
        if seals.told is not None:
            self._wait(seals.told, seals)
            self._check(number, seals)
            seals.data = seals.told = None
        if not poll(self._near.pop(number).done, self.deadline):
            raise TransferTimeout(
                f"the deadline passed while the device copied what round {number} takes from this host"
            )
        self.watch.landed(number)

    def _check(self, number: int, seals: _Seals) -> None:
        spans, count = _spans(seals.receives), len(seals.receives)
        for peer, word in zip(spans, self._words.read(number, seals.words, len(spans)), strict=True):
            if word != _INTACT:
                raise TransferError(
                    f"memory that member {peer} sends from was rewritten during round {number}; member "
                    f"{self.carriage.rank} has not taken that round. Publish again"
                )
        mine = self._words.read(number, seals.made + len(seals.sends), count)
        told = self._words.read(number, seals.heard, count)
        wrong = []
        for peer, span in spans.items():
            if mine[span] != told[span]:
                received = seals.receives[span]
                wrong.append((f"cells {received[0].cell} to {received[-1].cell}", f"(round {number})", peer))
        if wrong:
            raise DigestMismatch(wrong)

    def _wait(self, pending: Pending, seals: _Seals) -> None:
        """Wait for a group. It ends as a whole, so the word names the first of those whom it may wait for."""
        first = (*seals.receives, *seals.sends)[0]
        self.watch.waiting(first.peer, first.cell)
        pending.wait(self.deadline)
        self.watch.waiting(None, -1)


def _group(messages: Iterable[Message]) -> list[tuple[int, Strided]]:
    return [(m.peer, m.buffer) for m in messages if isinstance(m.buffer, Strided)]


def _copies(messages: Iterable[Message]) -> list[Copies]:
    """Those of messages, each once: messages of a round may share theirs."""
    return list({id(m.copies): m.copies for m in messages if m.copies is not None}.values())
