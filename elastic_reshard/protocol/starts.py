"""Who may start a round whose kernels wait for peers: all who wait for each other in it, or none. Pure: no I/O, no clock.

A *circle* is what a round's messages tie together: if A sends to B and B to C, then A's kernel ends only when C's has begun.
So an agreement of pairs is not enough. One starter, at rank 0, hears "ready" from each member, with its peers of that round,
and says "go" to a whole circle at once.

A member enters its window before it says ready, and launches only on go. Why nobody hangs, and nobody is kept out of its GPU:
- *Bounded*: a member that wants its device back is seen by its mover, which says "back" and leaves on the answer: "out", or a
  "go" that was under way; then the others launch too, and the round ends. A starter that does not answer is not waited for
  beyond `PATIENCE`; a go that comes later is taken up as soon as the window lets it in.
- *No cycle*: nobody waits for a go with anything launched, and all rounds are in one order. Of those who wait, let r be the
  smallest round: all of its circle are at r, or in a round that was started whole and so ends, or before their own windows.
- *Ends*: who dies after its go leaves kernels of its circle waiting, as any loss does, until the epoch breaks. Who dies before
  leaves nobody on a device. With the starter's end every line ends, and the run with it.
- *Held or ended* (a planned end): who has no go says back. Who has one keeps it: if one of its circle has begun, the round that
  all run to the end is this one or a later one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Final, NamedTuple, Protocol

from elastic_reshard.errors import ProtocolError

__all__ = ["PATIENCE", "Asking", "Device", "Kind", "Starter", "Way", "Word"]

PATIENCE: Final = 0.25  # seconds in which a starter answers "back"
_ASK_FIRST: Final = 0.05  # seconds until a member asks who is missing, and between two questions
_ASK: Final = 0.25
_HEAD: Final = struct.Struct("<Bqi?")
_PEER: Final = struct.Struct("<i")


class Kind(IntEnum):
    """What is said. To the starter: the first four; by it: the others."""

    READY = 1  # inside its window, and waits for go; peers: of this round
    SHUT = 2  # its window is closed
    BACK = 3  # it takes its ready back
    WHO = 4  # who is missing?
    GO = 5  # launch
    OUT = 6  # it was taken back
    HELD = 7  # who: one that is missing; shut: its window is closed


class Word(NamedTuple):
    """number: of the start; they rise along a run, alike on all members."""

    kind: Kind
    number: int
    who: int = -1
    shut: bool = False
    peers: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """As it travels."""
        return _HEAD.pack(self.kind, self.number, self.who, self.shut) + struct.pack(
            f"<{len(self.peers)}i", *self.peers
        )

    @classmethod
    def of(cls, data: bytes, size: int) -> Word:
        """From `to_bytes`, among `size` members. ProtocolError for anything else."""
        try:
            kind, number, who, shut = _HEAD.unpack_from(data)
            peers = tuple(peer for (peer,) in _PEER.iter_unpack(data[_HEAD.size :]))
            word = cls(Kind(kind), number, who, shut, peers)
        except (struct.error, ValueError) as error:
            raise ProtocolError(f"a word about a start that cannot be read: {error}") from error
        if not all(0 <= peer < size for peer in peers) or not -1 <= who < size:
            raise ProtocolError(f"a word about a start that names ranks which are not among {size}")
        return word


@dataclass(eq=False)
class _Circle:
    """Members that some round ties together, as far as they have said; those of them that are ready."""

    ranks: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)


class Starter:
    """Rank 0's. Told each member's words in the order in which that member said them; returns the answers, by rank."""

    def __init__(self) -> None:
        self._ready: dict[int, int] = {}  # the number that each is ready for
        self._shut: set[int] = set()
        self._gone: set[int] = set()
        self._circles: dict[tuple[int, int], _Circle] = {}  # by (number, rank)

    def heard(self, rank: int, word: Word) -> list[tuple[int, Word]]:
        """A member's word. ProtocolError for one that a member does not say."""
        number = word.number
        if word.kind is Kind.READY:
            return self._is_ready(rank, word)
        if word.kind is Kind.SHUT:
            self._shut.add(rank)
            return []
        if word.kind not in (Kind.BACK, Kind.WHO):
            raise ProtocolError(f"rank {rank} says {word.kind.name}, which is the starter's to say")
        if self._ready.get(rank) != number:
            return []  # its go is under way
        if word.kind is Kind.WHO:
            return [(rank, self._missing(number, rank))]
        self._take_back(rank)
        return [(rank, Word(Kind.OUT, number))]

    def gone(self, rank: int) -> None:
        """It says nothing any more. Nobody starts with it; that it has ended is others' to find."""
        self._gone.add(rank)
        self._take_back(rank)

    def _is_ready(self, rank: int, word: Word) -> list[tuple[int, Word]]:
        number = word.number
        if rank in self._ready:
            raise ProtocolError(f"rank {rank} is ready for start {number} and for {self._ready[rank]} at once")
        self._shut.discard(rank)
        circle = self._circle(number, (rank, *word.peers))
        circle.ready.add(rank)
        self._ready[rank] = number
        if len(circle.ready) < len(circle.ranks):
            return []
        for one in circle.ranks:
            del self._ready[one], self._circles[number, one]
        return [(one, Word(Kind.GO, number)) for one in sorted(circle.ranks)]

    def _circle(self, number: int, ranks: Sequence[int]) -> _Circle:
        """That of these: what they were known to be tied to is one from now on."""
        found = {id(c): c for rank in ranks if (c := self._circles.get((number, rank))) is not None}
        circle = max(found.values(), key=lambda c: len(c.ranks), default=_Circle())
        fresh = set(ranks) - circle.ranks
        for other in found.values():
            if other is not circle:
                fresh |= other.ranks
                circle.ready |= other.ready
        circle.ranks |= fresh
        for rank in fresh:
            self._circles[number, rank] = circle
        return circle

    def _take_back(self, rank: int) -> None:
        number = self._ready.pop(rank, None)
        if number is not None:
            self._circles[number, rank].ready.discard(rank)

    def _missing(self, number: int, rank: int) -> Word:
        """One for whom a circle waits: rather one whose window is closed than one that is only slow."""
        circle = self._circles[number, rank]
        who = min(circle.ranks - circle.ready, key=lambda one: (one not in self._shut, one in self._gone, one))
        return Word(Kind.HELD, number, who, who in self._shut)


class Way(Enum):
    """What a planned end says of a round."""

    OPEN = "open"
    HELD = "held"  # not decided yet
    ENDED = "ended"  # nobody runs it


class Device(Protocol):
    """Turns with the member on its device (`protocol.window.Turn`)."""

    @property
    def wanted(self) -> bool:
        """Whether the member wants it back."""

    def enter(self) -> bool:
        """Be inside, if the member lets it. Never waits."""

    def leave(self) -> None:
        """Be outside. May be called again."""


class Asking:
    """One member's way into one start. turn: None where nobody else uses the device. Stepped until it may launch, or given up.

    held: (rank, whether its window is closed) whom it waits for, as far as it was told. shut: its own window is closed."""

    def __init__(self, number: int, peers: Sequence[int], turn: Device | None) -> None:
        self.number, self.peers = number, tuple(peers)
        self.held: tuple[int, bool] | None = None
        self.shut = self.inside = self.going = False
        self._turn = turn
        self._asked = self._back = self._told = False
        self._since = self._who_at = 0.0

    def step(self, way: Way, now: float) -> tuple[bool, list[Word]]:
        """Whether it may launch now, and what is to be said. now: seconds, of any clock that only rises."""
        if self._back:
            if self.inside and now - self._since >= PATIENCE:
                self._leave()
            return False, []
        if self._asked:
            return False, self._wait(way, now)
        if way is not Way.OPEN:
            self._leave()
            return False, []
        self.inside = self.inside or self._turn is None or self._turn.enter()
        self.shut = not self.inside
        if self.going:
            return self.inside, []
        if self.inside:
            self._asked, self._told, self._who_at = True, False, now + _ASK_FIRST
            return False, [Word(Kind.READY, self.number, peers=self.peers)]
        words = [] if self._told else [Word(Kind.SHUT, self.number)]
        self._told = True
        return False, words

    def heard(self, word: Word) -> None:
        """The starter's word. One of another start is no concern of this one."""
        if word.number != self.number:
            return
        if word.kind is Kind.HELD:
            self.held = (word.who, word.shut) if self._asked else None
            return
        self._asked = self._back = False
        self.held = None
        self.going = self.going or word.kind is Kind.GO
        if word.kind is Kind.OUT:
            self._leave()

    def give_up(self) -> list[Word]:
        """It will not launch: be outside. What is to be said."""
        words = [Word(Kind.BACK, self.number)] if self._asked and not self._back else []
        self._leave()
        return words

    def _wait(self, way: Way, now: float) -> list[Word]:
        if way is not Way.OPEN or (self._turn is not None and self._turn.wanted):
            self._back, self._since, self.held = True, now, None
            return [Word(Kind.BACK, self.number)]
        if now < self._who_at:
            return []
        self._who_at = now + _ASK
        return [Word(Kind.WHO, self.number)]

    def _leave(self) -> None:
        self.inside = False
        if self._turn is not None:
            self._turn.leave()
