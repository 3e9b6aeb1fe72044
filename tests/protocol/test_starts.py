"""Starts of rounds: every interleaving of small worlds, random ones of larger worlds; nobody launches alone, nobody hangs."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.starts import PATIENCE, Asking, Kind, Starter, Way, Word

# Rounds, each the pairs that have messages in it.
CHAIN = ([(0, 1), (1, 2)],)
RING = ([(0, 1)], [(1, 2)], [(2, 0)])
APART = ([(0, 1), (2, 3)], [(1, 2)])
SECOND: Final = 1.0


def peers(pairs: list[tuple[int, int]], rank: int) -> tuple[int, ...]:
    return tuple(sorted({a + b - rank for a, b in pairs if rank in (a, b)}))


def circle(pairs: list[tuple[int, int]], rank: int) -> set[int]:
    """By brute force."""
    found = {rank}
    while True:
        more = {one for pair in pairs if found & set(pair) for one in pair}
        if more <= found:
            return found
        found |= more


@dataclass
class Turn:
    """A window, and whether its mover is inside. closing: times that its member will still close and open it."""

    open: bool = True
    inside: bool = False
    left: int = 0

    @property
    def wanted(self) -> bool:
        return not self.open

    def enter(self) -> bool:
        self.inside = self.open
        return self.open

    def leave(self) -> None:
        self.inside = False


@dataclass
class Runner:
    """A member in its rounds, as `mover.starts.Starts` steps it. begun: rounds that it has launched, still: not yet ended."""

    rank: int
    turn: Turn
    rounds: list[int]
    at: int = 0
    asking: Asking | None = None
    flying: bool = False
    begun: list[int] = field(default_factory=list)
    to: deque[Word] = field(default_factory=deque)  # to the starter, and from it
    back: deque[Word] = field(default_factory=deque)
    dead: bool = False


class World:
    """Members, their lines and the starter. A round that was launched by all of its circle may end; then its members leave."""

    def __init__(
        self, plan: tuple[list[tuple[int, int]], ...], closings: dict[int, int], shut: tuple[int, ...] = ()
    ) -> None:
        self.plan, self.starter = plan, Starter()
        size = 1 + max(rank for pairs in plan for pair in pairs for rank in pair)
        self.runners = [
            Runner(
                rank,
                Turn(rank not in shut, left=closings.get(rank, 0)),
                [n for n, p in enumerate(plan) if peers(p, rank)],
            )
            for rank in range(size)
        ]
        self.held: set[int] = set()  # whose gates are held
        self.until: int | None = None
        self.late: set[int] = set()  # those whom the starter has once not answered in time
        self.impatient = False

    # What may happen next, by name.

    def moves(self) -> Iterator[tuple[str, int]]:
        for runner in self.runners:
            r = runner.rank
            if runner.to:
                yield "serve", r
            if runner.dead:
                continue
            if runner.back:
                yield "hear", r
            if runner.flying:
                if self._may_end(runner):
                    yield "end", r
            elif self._acts(runner):
                yield "step", r
            if runner.turn.left:
                yield "turn", r
            if self.impatient and runner.asking is not None and runner.asking._back and runner.asking.inside:
                yield "lose patience", r

    def _way(self, runner: Runner, number: int) -> Way:
        if self.until is not None:
            return Way.ENDED if number > self.until else Way.OPEN
        return Way.HELD if runner.rank in self.held else Way.OPEN

    def _acts(self, runner: Runner) -> bool:
        """Whether a step would change anything."""
        if runner.at == len(runner.rounds):
            return False
        twin = copy.deepcopy(runner)
        before = repr_of(twin)
        self._step(twin)
        return repr_of(twin) != before

    def do(self, what: str, rank: int) -> None:
        runner = self.runners[rank]
        match what:
            case "serve":
                for to, word in self.starter.heard(rank, runner.to.popleft()):
                    self.runners[to].back.append(word)
            case "hear":
                word = runner.back.popleft()
                if runner.asking is not None:
                    runner.asking.heard(word)
            case "step":
                if self._step(runner):
                    self._check_launch(runner)
            case "end":
                runner.flying = False
                runner.turn.leave()
                runner.at += 1
            case "turn":
                runner.turn.open = not runner.turn.open
                runner.turn.left -= 1
            case "lose patience":
                assert runner.asking is not None
                runner.asking.step(Way.OPEN, 1e9)
                assert not runner.turn.inside

    def _step(self, runner: Runner) -> bool:
        number = runner.rounds[runner.at]
        way = self._way(runner, number)
        if runner.asking is None:
            runner.asking = Asking(number, peers(self.plan[number], runner.rank), runner.turn)
        if way is Way.ENDED:
            runner.to.extend(runner.asking.give_up())
            runner.asking, runner.at = None, len(runner.rounds)
            return False
        may, words = runner.asking.step(way, 0.0)
        runner.to.extend(words)
        if may:
            runner.asking, runner.flying = None, True
            runner.begun.append(number)
        return may

    def _may_end(self, runner: Runner) -> bool:
        number = runner.begun[-1]
        return all(number in self.runners[one].begun for one in circle(self.plan[number], runner.rank))

    def _check_launch(self, runner: Runner) -> None:
        """Promise: a kernel is launched only if all that it waits for, directly or not, were told to launch too, and are in
        their windows for it, unless a starter that did not answer made one leave."""
        number = runner.begun[-1]
        assert runner.turn.inside
        for one in circle(self.plan[number], runner.rank):
            other = self.runners[one]
            told = other.asking is not None and (
                other.asking.going or any(w.kind is Kind.GO and w.number == number for w in other.back)
            )
            assert number in other.begun or (told and other.asking is not None and other.asking.number == number), (
                f"{runner.rank} launches round {number}, but {one} was not told to"
            )
            if not self.impatient and not self.held:
                assert number in other.begun or other.turn.inside, f"{one} is outside its window"

    def finish(self, *, over: bool = True) -> None:
        """From here on windows stay open and all go on: everything ends."""
        for runner in self.runners:
            runner.turn.left, runner.turn.open = 0, True
        for _ in range(2000):
            moves = list(self.moves())
            if not moves:
                break
            self.do(*moves[0])
        if over:
            for runner in self.runners:
                want = [n for n in runner.rounds if self.until is None or n <= self.until]
                assert runner.begun == want, (runner.rank, runner.begun)
                assert not runner.turn.inside

    def shut_out(self, rank: int) -> None:
        """From here on this member computes: unless its round was launched it is outside after a few steps, whoever else
        moves; and then its kernels wait for nobody."""
        runner = self.runners[rank]
        if self.impatient:  # who has left without an answer is back for its go once its member lets it
            for other in self.runners:
                other.turn.left, other.turn.open = 0, True
        runner.turn.left, runner.turn.open = 0, False
        for _ in range(500):
            mine = [m for m in self.moves() if m[1] == rank or m[0] in ("end", "step", "hear")]
            if not mine:
                break
            self.do(*mine[0])
        assert not runner.turn.inside, f"{rank} is not let out of its window"

    def key(self) -> str:
        return "|".join(map(repr_of, self.runners)) + repr(
            (sorted(self.starter._ready.items()), sorted(self.starter._shut), self.until, sorted(self.held))
        )


def repr_of(runner: Runner) -> str:
    a = runner.asking
    asking = (a.number, a.going, a.inside, a._asked, a._back, a._told, a.shut) if a is not None else None
    return repr(
        (runner.turn, runner.at, asking, runner.flying, runner.begun, list(runner.to), list(runner.back), runner.dead)
    )


def explore(world: World, look: int = 1) -> int:
    """All interleavings; each state is looked at once. look: of every so many states it is tried whether all ends well."""
    seen, todo = {world.key()}, [world]
    while todo:
        here = todo.pop()
        for what, rank in list(here.moves()):
            there = copy.deepcopy(here)
            there.do(what, rank)
            key = there.key()
            if key in seen:
                continue
            seen.add(key)
            todo.append(there)
            if len(seen) % look == 0:
                copy.deepcopy(there).finish()
                copy.deepcopy(there).shut_out(len(seen) % len(there.runners))
    return len(seen)


@pytest.mark.parametrize(
    ("plan", "closings", "shut", "least"),
    [
        (CHAIN, {2: 2}, (), 300),
        (CHAIN, {0: 1, 2: 1}, (2,), 100),
        (RING[:2], {1: 1}, (), 100),
        pytest.param(RING, {0: 2, 1: 1}, (), 2_000, marks=pytest.mark.long),
        pytest.param(APART, {3: 2}, (), 2_000, marks=pytest.mark.long),
    ],
)
def test_every_interleaving(plan: tuple[list[tuple[int, int]], ...], closings: dict[int, int], shut: tuple[int, ...],
                            least: int) -> None:  # fmt: skip
    assert explore(World(plan, closings, shut), 7) >= least


@pytest.mark.parametrize("victim", [0, 1])
def test_a_starter_that_does_not_answer_holds_nobody(victim: int) -> None:
    world = World(([(0, 1)],), {victim: 2})
    world.impatient = True
    assert explore(world) > 50


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[tuple[int, int]], ...]:
    size = draw(st.integers(2, 6))
    pair = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(lambda p: p[0] != p[1])
    return tuple(draw(st.lists(st.lists(pair, min_size=1, max_size=6), min_size=1, max_size=5)))


@settings(max_examples=40, deadline=None)
@given(plans(), st.randoms(use_true_random=False), st.integers(0, 3), st.booleans())
def test_random_worlds(plan: tuple[list[tuple[int, int]], ...], random: object, closings: int, ends: bool) -> None:
    """Windows that close and open at any time, and a planned end: held one after the other, then until the last round that
    anybody had begun."""
    choose = random.choice  # type: ignore[attr-defined]
    size = 1 + max(rank for pairs in plan for pair in pairs for rank in pair)
    world = World(plan, dict.fromkeys(range(size), closings))
    began: dict[int, int] = {}
    for step in range(600):
        moves = list(world.moves())
        if not moves:
            break
        world.do(*choose(moves))
        if ends and step > 30 and len(world.held) < size and choose(range(3)) == 0:
            rank = len(world.held)
            world.held.add(rank)
            began[rank] = max(world.runners[rank].begun, default=-1)
            if len(world.held) == size:
                world.until = max(0, *began.values())
    if ends and world.held and world.until is None:  # all are held, at last
        for rank in range(size):
            world.held.add(rank)
            began.setdefault(rank, max(world.runners[rank].begun, default=-1))
        world.until = max(0, *began.values())
    copy.deepcopy(world).shut_out(choose(range(size)))
    world.finish()


def heard(starter: Starter, *said: tuple[int, Word]) -> list[tuple[int, Word]]:
    return [answer for rank, word in said for answer in starter.heard(rank, word)]


def test_a_chain_starts_whole_or_not_at_all() -> None:
    starter = Starter()
    ready = [Word(Kind.READY, 5, peers=p) for p in ((1,), (0, 2), (1,))]
    assert heard(starter, (0, ready[0]), (1, ready[1])) == []
    assert heard(starter, (2, ready[2])) == [(rank, Word(Kind.GO, 5)) for rank in range(3)]
    assert heard(starter, (1, Word(Kind.BACK, 5))) == [], "its go was under way"


def test_who_is_missing_is_told_and_closed_windows_first() -> None:
    starter = Starter()
    who = Word(Kind.WHO, 0)
    heard(starter, (0, Word(Kind.READY, 0, peers=(1, 2))))
    assert heard(starter, (0, who)) == [(0, Word(Kind.HELD, 0, 1))]
    heard(starter, (2, Word(Kind.SHUT, 0)))
    assert heard(starter, (0, who)) == [(0, Word(Kind.HELD, 0, 2, shut=True))]
    heard(starter, (2, Word(Kind.READY, 0, peers=(0,))))
    assert heard(starter, (0, who)) == [(0, Word(Kind.HELD, 0, 1))]
    assert heard(starter, (0, Word(Kind.BACK, 0))) == [(0, Word(Kind.OUT, 0))]
    assert heard(starter, (2, who)) == [(2, Word(Kind.HELD, 0, 0))], "who took it back is missing"


def test_nobody_starts_with_one_that_is_gone() -> None:
    starter = Starter()
    heard(starter, (0, Word(Kind.READY, 0, peers=(1,))))
    starter.gone(0)
    assert heard(starter, (1, Word(Kind.READY, 0, peers=(0,)))) == []
    assert heard(starter, (1, Word(Kind.WHO, 0))) == [(1, Word(Kind.HELD, 0, 0))]


def test_a_member_asks_who_is_missing_and_shows_it_until_it_goes() -> None:
    asking = Asking(3, (1,), None)
    assert asking.step(Way.OPEN, 0.0) == (False, [Word(Kind.READY, 3, peers=(1,))])
    assert asking.step(Way.OPEN, 0.01) == (False, []), "what goes quickly asks nobody"
    assert asking.step(Way.OPEN, SECOND) == (False, [Word(Kind.WHO, 3)])
    asking.heard(Word(Kind.HELD, 2, 7))
    assert asking.held is None, "of another round"
    asking.heard(Word(Kind.HELD, 3, 1, shut=True))
    assert asking.held == (1, True)
    asking.heard(Word(Kind.GO, 3))
    assert asking.held is None
    assert asking.step(Way.OPEN, 2 * SECOND) == (True, [])


def test_a_silent_starter_is_not_waited_for_and_its_late_go_counts() -> None:
    turn = Turn()
    asking = Asking(0, (1,), turn)
    asking.step(Way.OPEN, 0.0)
    turn.open = False
    assert asking.step(Way.OPEN, 0.0) == (False, [Word(Kind.BACK, 0)])
    asking.step(Way.OPEN, PATIENCE / 2)
    assert turn.inside
    asking.step(Way.OPEN, PATIENCE)
    assert not turn.inside
    asking.heard(Word(Kind.GO, 0))
    assert asking.step(Way.OPEN, PATIENCE)[0] is False
    turn.open = True
    assert asking.step(Way.OPEN, PATIENCE) == (True, [])


@pytest.mark.parametrize("word", [Word(Kind.READY, -(1 << 40), peers=(0, 3)), Word(Kind.HELD, 9, 2, shut=True)])
def test_words_travel(word: Word) -> None:
    assert Word.of(word.to_bytes(), 4) == word


@pytest.mark.parametrize(
    "data",
    [b"", b"\x01", b"\x63" + bytes(13), Word(Kind.READY, 0, peers=(4,)).to_bytes(), Word(Kind.GO, 0).to_bytes() + b"x"],
)
def test_what_is_no_word_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Word.of(data, 4)


def test_a_member_that_says_what_it_may_not_is_refused() -> None:
    starter = Starter()
    with pytest.raises(ProtocolError, match="the starter's to say"):
        starter.heard(0, Word(Kind.GO, 0))
    starter.heard(0, Word(Kind.READY, 0, peers=(1,)))
    with pytest.raises(ProtocolError, match="at once"):
        starter.heard(0, Word(Kind.READY, 1, peers=(1,)))
