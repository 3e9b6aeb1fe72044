"""Movers of a host: real processes from a real nursery, with a stand-in for what they carry."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_reshard.arena.ledgers import LedgerReader
from elastic_reshard.mover.nursery import Nursery, NurseryConfig
from elastic_reshard.protocol.bits import pack, unpack
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.docs import (
    LandingDoc,
    MemberState,
    PartyDoc,
    PublicationDoc,
    PublicationState,
    SourceDoc,
    TransferDoc,
    TransferState,
)
from elastic_reshard.protocol.messages import Hello, LedgerSaid, MoverSaid
from elastic_reshard.protocol.processes import end_process, started
from elastic_reshard.protocol.wire import credentials
from elastic_reshard.watchdog.runtime import Paths
from tests.watchdog.world import TOKEN, Agent, Local, StandIn, World, landing, open_files, until, world

OTHER = "other@" + "f" * 16
CELLS = 3000


class Crewed:
    """A world with one member on this host that lands from one elsewhere; its transfers are told by hand."""

    def __init__(self, here: World, keeper: Local, lander: Agent) -> None:
        self.here, self.keeper, self.lander = here, keeper, lander
        self.arena: str = lander.ask("land", cells=CELLS)
        self.source = keeper.offer(1)
        self.epoch = 0

    @property
    def member(self) -> str:
        return self.lander.member

    def landing(self) -> LandingDoc:
        return LandingDoc(member=self.member, group="e", rank=0, host="a", layout="bb", arena=self.arena, slot=0)

    def doc(self, how: str = "plain", **more: Any) -> TransferDoc:
        self.epoch += 1
        return TransferDoc(
            id=f"p1.1:1.{self.epoch}", publication="p1.1", epoch=self.epoch, state=TransferState.FORMING,
            members=(OTHER, self.member), hosts=("z", "a"), source=PartyDoc(group="t", layout="aa", members=(0,)),
            destinations=(PartyDoc(group="e", layout="bb", members=(1,)),), landings=(self.landing(),), cell=1 << 20,
            message=1 << 20, staging=1 << 24, plan=how, **more,
        )  # fmt: skip

    def publication(self, state: PublicationState = PublicationState.MOVING) -> PublicationDoc:
        source = SourceDoc(member=OTHER, rank=0, host="z", arena="0" * 32, slot=0, generation=2)
        return PublicationDoc(id="p1.1", weight_version=1, label=None, extras={}, group="t", seq=1, layout="aa",
                              state=state, sources=(source,), landings=(self.landing(),))  # fmt: skip

    def tell(self, doc: TransferDoc, **changes: Any) -> TransferDoc:
        doc = doc.model_copy(update=changes)
        self.here.supervisor.tell(transfers={doc.id: doc}, publications={"p1.1": self.publication()})
        return doc

    def over(self, doc: TransferDoc) -> None:
        self.here.supervisor.tell(transfers={doc.id: None})

    def said(self, doc: TransferDoc, state: str, within: float = 5.0, member: str = "") -> MoverSaid:
        """Wait until its watchdog says that the mover is in this state."""
        return until(lambda: self.now(doc, state, member), within, f"{state}: {self.words(doc)}")

    def now(self, doc: TransferDoc, state: str, member: str = "") -> MoverSaid | None:
        return next((m for m in self.words(doc, member) if m.state == state), None)

    def words(self, doc: TransferDoc, member: str = "") -> list[MoverSaid]:
        with self.here.supervisor.lock:
            ups = [up for _, up in self.here.supervisor.ups]
        said = [m for up in ups for m in (up.movers if isinstance(up, Hello) else [up]) if isinstance(m, MoverSaid)]
        return [m for m in said if m.transfer == doc.id and m.member == (member or self.member)]

    def running(self, how: str = "plain") -> TransferDoc:
        """A transfer that runs."""
        doc = self.tell(self.doc(how))
        ready = self.said(doc, "ready", 10.0)
        doc = self.tell(
            doc, state=TransferState.RUNNING, values={OTHER: {"address": "00"}, self.member: ready.values}
        )  # fmt: skip
        self.said(doc, "running")
        return doc

    def pid(self) -> int:
        """The mover's process, by the watchdog's record."""
        hands = until(lambda: [h for h in self.here.watchdog().movers.values() if h.member == self.member])
        assert len(hands) == 1
        return int(hands[0].pid)

    def nursery(self) -> int:
        """The nursery's process: whoever listens at its socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(Paths.of_nursery("job", self.here.folder).sock))
            return credentials(sock).pid

    def bits(self) -> bytes:
        """What the landing slot holds now, read from the member's own memory."""
        held = self.keeper.link.arena(self.arena, time.monotonic() + 5)
        reader = LedgerReader(held.fd, held.table)
        try:
            return reader.bits(0)
        finally:
            reader.close()


def _config(here: World) -> NurseryConfig:
    files = Paths.of_nursery("job", here.folder)
    return NurseryConfig("job", files.sock, files.lock, files.log, TOKEN)


def state_of(pid: int) -> str:
    """R, S, T, Z; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture
def deadlines() -> Deadlines:
    return Deadlines()


@pytest.fixture
def crew(runtime: Path, deadlines: Deadlines) -> Iterator[Crewed]:
    with world(runtime) as here:
        here.work, here.deadlines = "tests.mover.standin:StandIn", deadlines
        keeper = here.local("keeper").open()
        yield Crewed(here, keeper, here.agent("lander").attached())


def test_a_mover_is_forked_given_its_task_and_followed_to_the_end(crew: Crewed) -> None:
    doc = crew.running("quick")
    done = crew.said(doc, "out")
    assert (done.outcome, done.config, done.began, done.condemned) == ("done", "stand-in", 3, "")
    ups = [m for _, m in crew.here.supervisor.ups]
    first = next(i for i, m in enumerate(ups) if isinstance(m, MoverSaid) and m.state == "out")
    ledger = ups[first - 1]
    assert isinstance(ledger, LedgerSaid), "what it landed is said before"
    assert (ledger.member, ledger.arena, ledger.publication) == (crew.member, crew.arena, "p1.1")
    assert unpack(ledger.bits, CELLS)[0] == 0b11100000
    pid = crew.pid()
    crew.over(doc)
    again = crew.running("quick")
    assert crew.said(again, "out").mover == done.mover, "one mover, transfer after transfer"
    assert crew.pid() == pid


def test_one_mover_through_a_stop_a_broken_epoch_and_a_refusal(crew: Crewed) -> None:
    doc = crew.running()
    pid = crew.pid()
    far = until(lambda: next((m for m in crew.words(doc) if m.began > 20), None), why="the beat tells how far it is")
    assert far.received >= 7 * 20
    member, cell = far.waits
    assert member == OTHER
    assert abs(cell - far.began) <= 1
    doc = crew.tell(doc, state=TransferState.STOPPING)
    held = until(lambda: next((m for m in crew.words(doc) if m.held), None))
    crew.tell(doc, until=held.began + 2)
    out = crew.said(doc, "out")
    assert (out.outcome, out.began) == ("stopped", held.began + 3)
    crew.over(doc)
    doc = crew.running()
    crew.tell(doc, state=TransferState.BREAKING)
    out = crew.said(doc, "out")
    assert (out.outcome, out.condemned) == ("stopped", "")
    crew.over(doc)
    doc = crew.tell(crew.doc("refused"))
    out = crew.said(doc, "out")
    assert (out.outcome, out.error) == ("refused", "PlanMismatch")
    crew.over(doc)
    crew.said(crew.running("quick"), "out")
    assert crew.pid() == pid


def test_a_killed_mover_is_said_to_have_ended_and_replaced_for_a_new_transfer_only(crew: Crewed) -> None:
    doc = crew.running()
    pid = crew.pid()
    until(lambda: any(crew.bits()))
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    ended = crew.said(doc, "ended")
    assert time.monotonic() - killed < 0.5
    assert (ended.outcome, ended.condemned) == ("failed", "")
    assert state_of(pid) in ("Z", ""), "proved"
    bits = crew.bits()
    assert [m.bits for m in crew.here.supervisor.said(LedgerSaid)][-1:] == [pack(bits)]
    crew.tell(doc, state=TransferState.FORMING, reason="told again")
    told = time.monotonic()
    until(lambda: time.monotonic() - told > 0.5)  # several looks of its watchdog
    second = crew.running("quick")
    assert {m.mover for m in crew.words(doc)} == {ended.mover}, "no other was ever made for the first"
    assert crew.said(second, "out").mover != ended.mover
    assert crew.pid() != pid


def test_a_frozen_mover_is_condemned_and_never_wakes(crew: Crewed) -> None:
    doc = crew.running()
    pid = crew.pid()
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(pid) == "T")
    frozen, bits, states = time.monotonic(), crew.bits(), set[str]()
    until(lambda: states.add(state_of(pid)) or crew.now(doc, "ended"), 5.0)
    took = time.monotonic() - frozen
    deadlines = crew.here.deadlines
    assert deadlines.mover_silent - 2 * deadlines.mover_beat < took < deadlines.mover_silent + 1.0, took
    assert "no sign of life" in crew.now(doc, "ended").condemned
    assert states <= {"T", "Z", "", "R", "X"}, "SIGKILL itself lets it run, to its end"
    assert crew.bits() == bits, "nothing was written by a zombie"


@pytest.mark.parametrize("way", ["breaking", pytest.param("gone", marks=pytest.mark.long)])
def test_one_that_does_not_get_out_is_condemned_in_time(crew: Crewed, way: str) -> None:
    doc = crew.running("deaf")
    pid = crew.pid()
    told = time.monotonic()
    if way == "breaking":
        crew.tell(doc, state=TransferState.BREAKING)
    else:
        crew.over(doc)
    ended = crew.said(doc, "ended")
    took = time.monotonic() - told
    assert crew.here.deadlines.abort <= took < crew.here.deadlines.abort + 0.75, took
    assert ended.condemned.startswith("not out of all operations")
    assert state_of(pid) in ("Z", "")
    stacks = Paths.of_nursery("job", crew.here.folder).log.read_text()
    assert "standin.py" in stacks, "its stacks were written down"
    assert "in _rounds" in stacks


def test_one_whose_work_failed_is_replaced(crew: Crewed) -> None:
    doc = crew.tell(crew.doc("broken"))
    ready = crew.said(doc, "ready", 10.0)
    crew.tell(doc, state=TransferState.RUNNING, values={OTHER: {"a": "00"}, crew.member: ready.values})
    out, ended = crew.said(doc, "out"), crew.said(doc, "ended")
    assert (out.outcome, out.error, out.condemned) == ("failed", "DigestMismatch", "")
    assert (ended.outcome, ended.error) == ("failed", "DigestMismatch")
    assert "its work failed: DigestMismatch" in ended.condemned
    second = crew.running("quick")
    assert crew.said(second, "out").mover != ended.mover


def test_the_nursery_dies_and_movers_live_on(crew: Crewed) -> None:
    doc = crew.running()
    pid, nursery = crew.pid(), crew.nursery()
    assert end_process(nursery, started(nursery), 2.0)
    began = crew.words(doc)[-1].began
    until(lambda: crew.words(doc)[-1].began > began + 5, 5.0)
    os.kill(pid, signal.SIGKILL)
    crew.said(doc, "ended")
    crew.over(doc)
    second = crew.running("quick")
    assert crew.said(second, "out").outcome == "done"
    assert crew.nursery() != nursery


def test_where_no_nursery_can_be_started_the_watchdog_stays_and_tries_again(crew: Crewed) -> None:
    lock = Paths.of_nursery("job", crew.here.folder).lock
    lock.mkdir()  # as unwritable as on a full disk
    doc, before = crew.tell(crew.doc("quick")), crew.here.watchdog()
    until(lambda: "mover.not_forked" in crew.here.log() or crew.here.running() != before)
    lock.rmdir()
    crew.said(doc, "ready", 10.0)
    assert crew.here.watchdog().watchdog == before.watchdog


def test_a_replaced_watchdog_knows_the_mover_again_and_the_transfer_goes_on(crew: Crewed) -> None:
    doc = crew.running()
    pid, mover = crew.pid(), crew.now(doc, "running").mover
    before = crew.here.kill()
    hello = until(lambda: crew.here.supervisor.hellos()[1:], 5.0)[0]
    assert crew.here.watchdog().watchdog != before.watchdog
    [again] = hello.movers
    assert (again.mover, again.transfer, again.state) == (mover, doc.id, "running")
    assert [(x.member, x.arena, x.publication) for x in hello.ledgers] == [(crew.member, crew.arena, "p1.1")]
    began = again.began
    until(lambda: crew.words(doc)[-1].began > began + 5, 5.0)
    assert crew.pid() == pid
    crew.tell(doc, state=TransferState.BREAKING)
    assert crew.said(doc, "out").outcome == "stopped"
    crew.over(doc)
    second = crew.running("quick")
    assert crew.said(second, "out").mover == mover


def test_whoever_came_before_the_supervisor_moved_attaches_to_a_watchdog_started_after_it(crew: Crewed) -> None:
    """A member and a mover know the supervisor's old address; who replaces the watchdog knows the new one only."""
    here, old, doc = crew.here, crew.here.supervisor, crew.running()
    here.supervisor = StandIn()
    for kind in ("members", "publications", "transfers"):
        setattr(here.supervisor, kind, getattr(old, kind))
    place = here.paths().folder / "url"
    place.write_text(here.supervisor.url)
    old.down()
    until(here.supervisor.hellos, why="it is followed")
    crew.keeper.link.close()
    late = here.local("late").open()
    os.kill(crew.lander.pid, signal.SIGSTOP)
    before = here.kill()
    until(lambda: late.link.watchdog_instance not in ("", before.watchdog) and late.link.connected)
    began = crew.words(doc)[-1].began
    until(lambda: crew.words(doc)[-1].began > began + 5, 5.0, "its mover goes on")
    os.kill(crew.lander.pid, signal.SIGCONT)
    until(lambda: crew.lander.ask("instance") == late.link.watchdog_instance)
    crew.tell(doc, state=TransferState.BREAKING)
    assert crew.said(doc, "out").outcome == "stopped"
    place.unlink()


def test_a_mover_that_died_with_its_watchdog_is_said_to_have_ended(crew: Crewed) -> None:
    doc = crew.running()
    pid, mover = crew.pid(), crew.now(doc, "running").mover
    crew.here.kill()
    os.kill(pid, signal.SIGKILL)
    ended = crew.said(doc, "ended")
    assert (ended.outcome, ended.mover) == ("failed", mover), "its predecessor wrote it down"
    assert any(x.publication == "p1.1" for h in crew.here.supervisor.hellos()[1:] for x in h.ledgers)


@pytest.mark.long
def test_a_mover_that_was_frozen_with_its_watchdog_is_condemned_by_the_next(crew: Crewed) -> None:
    doc = crew.running()
    pid = crew.pid()
    os.kill(pid, signal.SIGSTOP)
    crew.here.kill()
    ended = crew.said(doc, "ended", 6.0)
    assert "since it was to attach" in ended.condemned
    assert state_of(pid) in ("Z", "")


def test_the_mover_of_a_dead_member_goes_on_and_one_is_made_for_it(crew: Crewed) -> None:
    doc = crew.running()
    crew.lander.kill()
    until(lambda: crew.here.supervisor.ended(crew.member))
    began = crew.words(doc)[-1].began
    until(lambda: crew.words(doc)[-1].began > began + 5)
    crew.here.supervisor.state_of(crew.member, MemberState.LOST)
    os.kill(crew.pid(), signal.SIGKILL)
    crew.said(doc, "ended")
    crew.over(doc)
    second = crew.running("quick")
    done = crew.said(second, "out")
    assert done.outcome == "done", "its landing arena was kept while a transfer may refer to it"
    pid = crew.pid()
    landed = crew.publication(PublicationState.COMMITTED)
    crew.here.supervisor.tell(publications={"p1.1": landed})
    crew.over(second)
    assert crew.bits(), "a committed publication needs it"
    released = landed.model_copy(update={"state": PublicationState.RELEASED})
    crew.here.supervisor.tell(publications={"p1.1": released})
    until(lambda: crew.arena not in crew.keeper.link._shelf.arenas)
    until(lambda: state_of(pid) in ("Z", ""), why="nobody needs it any more")


def test_a_mover_has_its_own_descriptors_and_no_others(crew: Crewed) -> None:
    other, fd, table = landing(8)
    crew.keeper.link.offer_landing(other, fd, table)
    theirs = crew.landing().model_copy(update={"member": crew.keeper.member, "rank": 1, "arena": other})
    members, hosts = (OTHER, crew.member, crew.keeper.member), ("z", "a", "a")
    doc = crew.tell(crew.doc(), members=members, hosts=hosts, absent=(2,), landings=(crew.landing(), theirs))
    crew.said(doc, "ready", 10.0)
    pid, nursery = crew.pid(), crew.nursery()
    own, its = os.stat(f"/proc/{crew.lander.pid}/fd/{_fd_of(crew.lander.pid, 'landing')}").st_ino, os.fstat(fd).st_ino
    os.close(fd)
    assert modes(pid, own) == {os.O_RDWR}
    assert modes(pid, its) == {os.O_RDONLY}, "another's is only for reading"
    watchdog = crew.here.watchdog().pid
    assert modes(watchdog, own) == modes(watchdog, its) == {os.O_RDONLY}
    files = open_files(pid)
    assert not [f for f in files if "memfd" in f and "landing" not in f and "status" not in f]
    assert len([f for f in files if "socket" in f]) == 1, "its watchdog's, none of the nursery's"
    assert len([f for f in open_files(nursery) if "socket" in f]) == 2, "it listens, and one watchdog is there"


def _fd_of(pid: int, what: str) -> str:
    return next(n for n in os.listdir(f"/proc/{pid}/fd") if what in os.readlink(f"/proc/{pid}/fd/{n}"))


def modes(pid: int, inode: int) -> set[int]:
    """How a process has a file open."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        if os.path.exists(f"/proc/{pid}/fd/{name}") and os.stat(f"/proc/{pid}/fd/{name}").st_ino == inode:
            lines = Path(f"/proc/{pid}/fdinfo/{name}").read_text().splitlines()
            found.add(int(next(x for x in lines if x.startswith("flags")).split()[1], 8) & os.O_ACCMODE)
    return found


def test_movers_end_with_an_orderly_departure(crew: Crewed) -> None:
    doc = crew.running()
    pid, nursery, watchdog = crew.pid(), crew.nursery(), crew.here.watchdog()
    crew.over(doc)
    crew.here.end()
    until(lambda: not watchdog.alive, 5.0)
    assert state_of(pid) in ("Z", "")
    assert "the watchdog goes" in crew.said(doc, "ended").condemned
    until(lambda: state_of(nursery) in ("Z", ""), 2.0)


@pytest.mark.parametrize("deadlines", [Deadlines(orphan_hold=1.0)])
def test_a_mover_without_a_watchdog_goes_by_itself(crew: Crewed) -> None:
    crew.running()
    pid = crew.pid()
    crew.lander.kill()
    crew.keeper.link.close(graceful=False)
    crew.here.kill()
    began = time.monotonic()
    until(lambda: state_of(pid) in ("Z", ""), 4.0)
    assert 0.8 < time.monotonic() - began < 3.0
    for path in crew.here.paths().folder.iterdir():
        if not path.name.startswith("~"):
            path.unlink()  # what a watchdog that was killed leaves, with nobody to replace it
    nursery = crew.nursery()
    assert end_process(nursery, started(nursery), 2.0)  # it would wait 10 s for another watchdog
    Nursery(_config(crew.here)).close(goodbye=True)


@pytest.mark.long
@pytest.mark.parametrize("deadlines", [Deadlines(watchdog_silent=4.0)])
def test_a_watchdog_that_was_late_itself_condemns_nobody(crew: Crewed) -> None:
    doc = crew.running()
    pid, watchdog = crew.pid(), crew.here.freeze()
    frozen = time.monotonic()
    until(lambda: time.monotonic() - frozen > crew.here.deadlines.mover_silent + 0.5)
    os.kill(watchdog.pid, signal.SIGCONT)
    began = crew.words(doc)[-1].began
    until(lambda: crew.words(doc)[-1].began > began + 100)
    assert state_of(pid) in ("R", "S")
    assert crew.now(doc, "ended") is None


def test_hosts_of_one_machine_share_a_nursery(crew: Crewed) -> None:
    crew.running()
    nursery = crew.nursery()
    there = crew.here.local("there", host="b").open()
    arena, fd, table = landing(8)
    there.link.offer_landing(arena, fd, table)
    os.close(fd)
    doc = crew.doc("quick").model_copy(
        update={"members": (OTHER, there.member), "hosts": ("z", "b"), "landings": (
            LandingDoc(member=there.member, group="e", rank=0, host="b", layout="bb", arena=arena, slot=0),)}
    )  # fmt: skip
    crew.tell(doc)
    ready = crew.said(doc, "ready", 10.0, there.member)
    crew.tell(doc, state=TransferState.RUNNING, values={OTHER: {"a": "0"}, there.member: ready.values})
    assert crew.said(doc, "out", member=there.member).outcome == "done"
    assert crew.nursery() == nursery


@pytest.mark.long
@pytest.mark.parametrize("point", ["forking", "condemning"])
def test_a_watchdog_killed_while_it_forks_or_condemns(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    once = runtime.parent / f"{runtime.name}.once"
    monkeypatch.setenv("ELASTIC_RESHARD_TEST_HOOKS", f'{{"watchdog.{point}": {{"do": "kill", "once": "{once}"}}}}')
    try:
        with world(runtime) as here:
            here.work = "tests.mover.standin:StandIn"
            keeper = here.local("keeper").open()
            crew = Crewed(here, keeper, here.agent("lander").attached())
            doc = crew.running("deaf")
            crew.tell(doc, state=TransferState.BREAKING)
            ended = crew.said(doc, "ended", 8.0)
            assert ended.outcome == "failed"
            assert once.exists(), "the fault was placed"
            assert crew.here.log().count("watchdog.listening") == 2
    finally:
        once.unlink(missing_ok=True)
