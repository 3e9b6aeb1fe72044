"""Movers over a network whose kernels wait for peers, each with a member's window: what is launched, and when. Real processes
on a pretend device."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_reshard.arena.pretend import open_pretend
from elastic_reshard.communicator.pretend import PretendBackend
from elastic_reshard.errors import PeerLost, ProtocolError, TransferError, TransferTimeout
from elastic_reshard.mover.core import Progress
from elastic_reshard.mover.fast import Lane
from elastic_reshard.mover.gate import Gate
from elastic_reshard.mover.part import Carried
from elastic_reshard.mover.starts import Line, Stand, Starts
from elastic_reshard.protocol.docs import PublicationDoc, TransferDoc
from elastic_reshard.protocol.starts import Kind, Word
from elastic_reshard.protocol.window import Window
from tests.mover import world as w
from tests.mover.world import KIB, Mover, Parcel, World
from tests.processes import Rank, run_ranks

SIZE, BUSY = 4, 3  # the last engine rank is the one that computes
Documents = tuple[TransferDoc, PublicationDoc]


def many_rounds() -> World:
    return w.small(cell=4 * KIB, message=8 * KIB, staging=64 * KIB)


def documents(world: World, epoch: int = 1, basis: Any = None, network: str = "pretend") -> Documents:
    """With everybody's window."""
    doc, publication = world.documents(epoch, basis)
    return doc.model_copy(update={"network": network, "paused": tuple(range(SIZE))}), publication


class Seat:
    """One rank: member and mover, and what it has said, heard and launched, by time.monotonic."""

    def __init__(self, me: Rank, parcels: list[Parcel], on_begin: Callable[[], None] = lambda: None) -> None:
        self.me, self.window = me, Window()
        self.said: list[tuple[float, int, int]] = []
        self._watch_lines()
        self.backend = PretendBackend(open_pretend(0))
        self.mover = Mover(me, parcels[me.rank].member, backend=self.backend)
        self.store, tell = self.mover.store, self.mover.worker._say

        def say(progress: Progress) -> None:
            if progress.began:
                on_begin()
            tell(progress)

        self.mover.worker._say = say
        self.parcel = parcels[me.rank]

    def _watch_lines(self) -> None:
        own, said = (Line.say, Line.hear), self.said
        self._own = own

        def say(line: Line, words: Sequence[Word]) -> None:
            said.extend((time.monotonic(), word.kind, word.number) for word in words)
            own[0](line, words)

        def hear(line: Line, patience: float) -> list[Word]:
            words = own[1](line, patience)
            said.extend((time.monotonic(), word.kind, word.number) for word in words)
            return words

        Line.say, Line.hear = say, hear  # type: ignore[method-assign, assignment]

    def begin(self) -> None:
        """Up to the moment in which it runs."""
        task = replace(self.parcel.open(), device="pretend:0", window=os.dup(self.window.fd))
        self.mover.task = task
        self.mover.worker.begin(task)
        self.mover.meet()
        assert self.mover.said[-1].state == "ready", self.mover.said
        assert self.mover.until(lambda p: p.state == "running").state == "running"

    def meet(self, what: str) -> None:
        self.store.set(f"{what}/{self.me.rank}", "")
        for rank in range(SIZE):
            self.store.get(f"{what}/{rank}")

    def until(self, right: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 20.0
        while not right():
            assert time.monotonic() < deadline, f"rank {self.me.rank}: {what}"
            time.sleep(0.002)

    def closes(self) -> float:
        """The member takes its device back; how long its mover took to be outside."""
        begun = time.monotonic()
        assert self.window.close(begun + 5.0), "the mover is not outside"
        return time.monotonic() - begun

    def out(self) -> dict[str, Any]:
        said = self.mover.until(lambda p: p.state == "out")
        launched = [(one.at, sorted(one.peers)) for one in self.backend.launched]
        return w.brief(said) | {"said": self.said, "launched": launched, "windows": self.mover.page.windows}

    def over(self, found: dict[str, Any]) -> dict[str, Any]:
        self.mover.over()
        self.window.give_up()
        Line.say, Line.hear = self._own  # type: ignore[method-assign]
        return found


def launched_only_with_all(told: list[dict[str, Any]]) -> int:
    """Every group after the first go of its rank: each peer had said that it is ready for that start, and stood by it; how many
    groups. Before that there is the greeting, and nothing else."""
    count = 0
    for rank, one in enumerate(told):
        gos = [(at, number) for at, kind, number in one["said"] if kind == Kind.GO]
        for at, peers in one["launched"][1:]:
            mine = [number for when, number in gos if when <= at]
            assert mine, f"rank {rank} launched a group before anybody said go"
            count += 1
            for peer in peers:
                words = [kind for when, kind, number in told[peer]["said"] if when <= at and number == mine[-1]]
                assert Kind.READY in words, f"rank {rank} launched start {mine[-1]} before rank {peer} was ready"
                last = len(words) - 1 - words[::-1].index(Kind.READY)
                assert Kind.OUT not in words[last:], f"rank {peer} had taken it back"
    return count


def closed_for_long(me: Rank, parcels: list[Parcel]) -> dict[str, Any]:
    seat = Seat(me, parcels)
    if me.rank != BUSY:
        seat.window.open()
    seat.begin()
    launched, held = seat.backend.launched, 0.0
    if me.rank == BUSY:
        for rank in range(BUSY):
            seat.store.get(f"waited/{rank}")
        seat.window.open()
    else:
        page = seat.mover.page
        seat.until(lambda: BUSY in page.windows and page.now == BUSY, f"waits for {BUSY}'s window, not for {page.now}")
        assert len(launched) == 1, "a group was launched, which waits for the one that computes"
        held = seat.closes()  # the others want their devices too, meanwhile
        assert not seat.window.inside
        time.sleep(0.3)
        seat.window.open()
        seat.until(lambda: page.now == BUSY and seat.window.inside, "is back, and waits")
        assert len(launched) == 1
        seat.store.set(f"waited/{me.rank}", "")
    found = seat.out() | {"held": held}
    return seat.over(found)


def flapping(me: Rank, parcels: list[Parcel], seed: int) -> dict[str, Any]:
    """Members that take their devices back again and again."""
    seat, times = Seat(me, parcels), random.Random(seed + me.rank)
    seat.begin()
    worker, computing = seat.mover.worker, []
    while worker._job is not None and worker._job.progress.state != "out":
        seat.window.open()
        time.sleep(times.uniform(0.005, 0.03))
        seat.closes()
        begun = time.monotonic()
        time.sleep(times.uniform(0.0, 0.004))
        computing.append((begun, time.monotonic()))
    found = seat.out()
    seat.window.open()
    mine = [at for at, _ in found["launched"][1:]]
    assert not any(a <= at < b for at in mine for a, b in computing), "launched while its own member computes"
    return seat.over(found)


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_windows_that_close_all_the_time_cost_only_time(seed: int) -> None:
    world = many_rounds()
    doc, publication = documents(world)
    assert world.plan(doc, publication).rounds.count > 8
    told = w.run(flapping, world.parcels(doc, publication), 100 * seed)
    assert {one["outcome"] for one in told} == {"done"}, told
    world.check_landed()
    assert launched_only_with_all(told) > 8
    world.close()


def killed(me: Rank, parcels: list[Parcel], victim: int) -> dict[str, Any]:
    """One mover is killed when it was told to go, before it launches. The others' kernels wait, until they are broken off."""
    seat = Seat(me, parcels, lambda: os.kill(os.getpid(), signal.SIGKILL) if me.rank == victim else None)
    seat.window.open()
    seat.store.set(f"pid/{me.rank}", str(os.getpid()))
    pid = int(seat.store.get(f"pid/{victim}"))
    ending = os.pidfd_open(pid)
    seat.begin()
    seat.until(lambda: _ended(ending), "the victim ends")
    os.close(ending)
    time.sleep(0.2)
    seat.mover.worker.abort()  # as its watchdog has it told
    stuck = [kind for _, kind, _ in seat.said][-1] == Kind.GO  # its kernel waits for the victim's
    found = seat.out() | {"held": seat.closes(), "stuck": stuck}
    seat.window.give_up()
    return found


def _ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0.0)[0])


@pytest.mark.parametrize("victim", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (0, BUSY))])
def test_a_mover_killed_between_go_and_launch_costs_one_epoch(victim: int) -> None:
    world = w.small()
    doc, publication = documents(world)
    told = w.run(killed, world.parcels(doc, publication), victim, lost=[victim])
    left = [one for rank, one in enumerate(told) if rank != victim]
    assert told[victim] is None
    assert all(one["outcome"] in ("stopped", "failed") and one["held"] < 1.0 for one in left), left
    # A source's bytes do not come; those for a destination may be on their way without it. With the starter (0) every line
    # ends, for some before they launch.
    assert victim in (0, BUSY) or any(one["stuck"] for one in left)
    assert all(world.wrong(m) == [] for m in world.landings)
    doc, publication = documents(world, 2, world.basis())
    again = w.run(at_once, world.parcels(doc, publication))
    assert {one["outcome"] for one in again} == {"done"}
    world.check_landed()
    world.close()


def at_once(me: Rank, parcels: list[Parcel]) -> dict[str, Any]:
    seat = Seat(me, parcels)
    seat.window.open()
    seat.begin()
    return seat.over(seat.out())


def without_starter(me: Rank, parcels: list[Parcel], how: str) -> dict[str, Any]:
    """Rank 0 is killed, or breaks off, while all wait for one that computes."""
    seat = Seat(me, parcels)
    if me.rank != BUSY:
        seat.window.open()
    seat.begin()
    if me.rank != BUSY:
        seat.until(lambda: seat.mover.page.now == BUSY, "waits for the one that computes")
    seat.meet("wait")
    if me.rank == 0 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if me.rank == 0:
        seat.mover.worker.abort()
    found = seat.out() | {"inside": seat.window.inside}
    seat.meet("left") if how != "killed" else None  # so that no end of a process tells anybody
    seat.window.give_up()
    return found


@pytest.mark.parametrize("how", ["broke off", pytest.param("killed", marks=pytest.mark.long)])
def test_with_the_starter_gone_nobody_waits_and_no_kernel_runs(how: str) -> None:
    world = w.small()
    doc, publication = documents(world)
    told = w.run(without_starter, world.parcels(doc, publication), how, lost=[0])
    for one in told[1:]:
        assert (one["outcome"], one["error"]) == ("failed", "PeerLost"), one
        assert one["blames"] == (doc.present[0],)
        assert len(one["launched"]) == 1
        assert not one["inside"]
    world.close()


def plain(me: Rank, parcels: list[Parcel]) -> list[Any]:
    """Nobody has a window that counts: nothing is agreed on."""
    seat = Seat(me, parcels)
    seat.begin()
    job = seat.mover.worker._job
    assert job is not None
    found = seat.out()
    return [seat.over(found)["outcome"], job.stand is None, job.line is None, found["said"]]


def three(me: Rank, stages: list[list[Parcel]]) -> tuple[Any, Any, Any]:
    """In the same processes one after the other."""
    return closed_for_long(me, stages[0]), flapping(me, stages[1], 1), plain(me, stages[2])


@pytest.fixture(scope="module")
def played() -> Iterator[tuple[World, list[list[Any]]]]:
    """A version whose transfer finds one engine rank computing for long; one in which all take their devices back at any time;
    one without windows. What each rank tells of each."""
    world, stages = many_rounds(), []
    for epoch in (1, 2, 3):
        if epoch == 2:  # there are two slots
            world.publish()
        doc, publication = documents(world, epoch)
        assert world.plan(doc, publication).rounds.count > 8
        if epoch == 3:
            doc = doc.model_copy(update={"paused": ()})
        stages.append(world.parcels(doc, publication))
    told = run_ranks(three, SIZE, stages, group=False)
    yield world, [list(one) for one in zip(*told, strict=True)]
    world.close()


def test_while_one_computes_its_peers_movers_launch_nothing(played: Any) -> None:
    world, (told, _, _) = played
    assert {one["outcome"] for one in told} == {"done"}, told
    world.version = 1
    world.check_landed()
    world.version = 2
    assert launched_only_with_all(told) > 2 * SIZE
    assert all(one["windows"] >= {BUSY} for one in told)
    assert max(one["held"] for one in told) < 1.0, "who only waited for a peer is out at once"


def test_members_that_take_their_devices_back_all_the_time_get_them(played: Any) -> None:
    world, (_, told, _) = played
    assert {one["outcome"] for one in told} == {"done"}, told
    assert launched_only_with_all(told) > 8
    world.check_landed()


def test_without_windows_nothing_is_agreed_on(played: Any) -> None:
    _, (_, _, told) = played
    assert told == [["done", True, True, []]] * SIZE


# -- the line by itself


@pytest.fixture
def stand() -> Any:
    made = Stand("127.0.0.1", 2)
    yield made
    made.close()


def soon() -> float:
    return time.monotonic() + 10.0


def test_two_lines_start_together_and_a_gate_that_is_aborted_ends_the_wait(stand: Stand) -> None:
    lines = [Line.call(stand.told, rank, soon(), Gate()) for rank in range(2)]
    lines[0].say([Word(Kind.READY, 4, peers=(1,))])
    assert lines[0].hear(0.05) == []
    lines[1].say([Word(Kind.READY, 4, peers=(0,))])
    assert [line.hear(5.0) for line in lines] == [[Word(Kind.GO, 4)]] * 2
    gate = Gate()
    shown: list[Any] = []
    starts = Starts(lines[0], gate, None, lambda *said: shown.append(said))
    gate.abort("broken off")
    with pytest.raises(TransferError, match="broken off"):
        starts.begin(5, [1], round_=5)
    gate = Gate()
    gate.hold()
    gate.until(3)
    assert not Starts(lines[0], gate, None, lambda *said: shown.append(said)).begin(5, [1], round_=5)
    assert shown == []
    for line in lines:
        line.close()


def test_batches_of_m2n_start_together_and_before_the_rounds(stand: Stand) -> None:
    lanes: list[Lane] = []
    for rank in range(2):
        part: Any = SimpleNamespace(position=rank, present=(0, 1))
        gate, page = Gate(), w.Page()
        starts = Starts(Line.call(stand.told, rank, soon(), gate), gate, None, lambda *said: None)
        lanes.append(Lane(part, {}, None, gate, page, Carried(), (), None, False, 0, starts))
    entered: list[int] = []

    def both() -> None:
        for batch in range(2):
            lanes[0].begin()
            entered.append(batch)
            lanes[0].end()

    thread = threading.Thread(target=both)
    thread.start()
    for batch in range(2):
        thread.join(0.1)
        assert entered == list(range(batch)), "no call is entered before the other rank is ready"
        lanes[1].begin()
        lanes[1].end()
    thread.join(10.0)
    assert entered == [0, 1]
    assert [lane._number for lane in lanes] == [2 - (1 << 40)] * 2
    for lane in lanes:
        lane._starts._line.close()  # type: ignore[union-attr]


def test_who_does_not_know_the_secret_or_comes_twice_is_sent_away(stand: Stand) -> None:
    first = Line.call(stand.told, 0, soon(), Gate())
    address, port, secret = stand.told.decode().split(" ")
    wrong = [f"{address} {port} {'00' * 32}", f"{address} {port} {secret}"]
    for told in wrong:
        line = Line.call(told.encode(), 0, soon(), Gate())
        with pytest.raises(PeerLost, match="has ended"):
            line.hear(5.0)
        line.close()
    with socket.create_connection((address, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(1) == b""
    other = Line.call(stand.told, 1, soon(), Gate())
    for rank, line in ((0, first), (1, other)):
        line.say([Word(Kind.READY, 0, peers=(1 - rank,))])
    assert first.hear(5.0) == [Word(Kind.GO, 0)]
    assert other.hear(5.0) == [Word(Kind.GO, 0)]
    stand.close()
    with pytest.raises(PeerLost, match="rank 0"):
        other.hear(5.0)
    for line in (first, other):
        line.close()


def test_a_stand_that_cannot_be_reached_is_said() -> None:
    with pytest.raises(ProtocolError, match="instead of where its starter listens"):
        Line.call(b"nowhere", 0, soon(), Gate())
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        told = f"127.0.0.1 {nobody.getsockname()[1]} {'00' * 32}".encode()
        with pytest.raises(PeerLost, match="cannot be reached"):
            Line.call(told, 0, soon(), Gate())
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        told = f"127.0.0.1 {full.getsockname()[1]} {'00' * 32}".encode()
        first = Line.call(told, 0, soon(), Gate())  # the backlog is full with it
        with pytest.raises(TransferTimeout, match="did not answer"):
            Line.call(told, 0, time.monotonic() + 0.2, Gate())
        first.close()
