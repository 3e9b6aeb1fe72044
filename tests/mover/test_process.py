"""A mover's process and its connection to a watchdog: forked by a real nursery, with a stand-in for the watchdog."""

from __future__ import annotations

import json
import os
import resource
import secrets
import select
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_reshard.arena.channel import Message
from elastic_reshard.errors import PeerLost
from elastic_reshard.mover.core import Given, Task
from elastic_reshard.mover.nursery import Born
from elastic_reshard.mover.status import State, StatusReader
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.docs import PartyDoc, PublicationDoc, PublicationState, TransferDoc, TransferState
from elastic_reshard.protocol.ids import PROTOCOL
from elastic_reshard.protocol.messages import MoverSaid
from elastic_reshard.protocol.processes import started
from elastic_reshard.protocol.wire import Tag, Wire, proof
from tests.mover.place import MEMBER, TOKEN, Place
from tests.watchdog.world import until

OTHER = "other@" + "f" * 16


class Watch:
    """The watchdog's side of one mover's connections, one after the other."""

    def __init__(self, place: Place) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        path = place.folder / "a.sock"
        self.listener.bind(str(path))
        self.listener.listen(8)
        self.listener.settimeout(5.0)
        self.path = path
        self.wire: Wire | None = None
        self.got: list[Message] = []
        self.page: StatusReader | None = None
        self.who: dict[str, Any] = {}

    def accept(self, token: str = TOKEN) -> Watch:
        """Take the next connection, through its proof; and through MOVER if the token is right."""
        self.hang_up()
        sock, _ = self.listener.accept()
        self.wire = Wire(sock)
        nonce = secrets.token_hex(16)
        self.wire.send(Tag.HELLO, json.dumps({"protocol": PROTOCOL, "nonce": nonce}).encode())
        said = json.loads(self.take(Tag.AUTH).payload)
        assert said["proof"] == proof(TOKEN, "member", nonce, said["nonce"])
        mine = proof(token, "watchdog", said["nonce"], nonce)
        self.wire.send(Tag.PROVED, json.dumps({"proof": mine}).encode())
        if token == TOKEN:
            message = self.take(Tag.MOVER)
            self.who = json.loads(message.payload)
            self.page = StatusReader(message.fds[0])
        return self

    def take(self, tag: Tag, within: float = 5.0) -> Message:
        """The next frame, which must be this."""
        message = until(self._next, within, tag.name)
        assert message.tag == tag, message
        return message

    def _next(self) -> Message | None:
        assert self.wire is not None
        if not self.got and select.select([self.wire], [], [], 0.01)[0]:
            self.got = self.wire.receive()
        return self.got.pop(0) if self.got else None

    def report(self, state: str) -> MoverSaid:
        """Reports up to one of this state."""
        while True:
            said = MoverSaid.model_validate_json(self.take(Tag.REPORT).payload)
            if said.state == state:
                return said

    def task(self, how: str, arenas: int = 0, number: int = 1) -> TransferDoc:
        """Send a TASK, with that many arenas and a payload longer than a packet."""
        assert self.wire is not None
        doc = transfer(how, number)
        fds = [os.memfd_create("given", os.MFD_CLOEXEC) for _ in range(arenas)]
        given = tuple(Given(f"{i:032x}", OTHER, "{}", False, fd) for i, fd in enumerate(fds))
        publication = PublicationDoc(id="p1.1", weight_version=1, label=None, extras={}, group="g", seq=1, layout="aa",
                                     state=PublicationState.MOVING, sources=())  # fmt: skip
        task = Task(doc, publication, {"aa": "x" * 500_000}, given)
        assert self.wire.send(Tag.TASK, task.payload(), tuple(fds))
        for fd in fds:
            os.close(fd)
        until(self.wire.flush)
        return doc

    def order(self, doc: TransferDoc | None, **changes: Any) -> None:
        assert self.wire is not None
        doc = doc.model_copy(update=changes) if doc is not None else None
        self.wire.send(Tag.ORDER, doc.model_dump_json().encode() if doc is not None else b"")

    def run(self, doc: TransferDoc) -> MoverSaid:
        """Tell all values."""
        values = {OTHER: {"address": "00"}, MEMBER: self.report("ready").values}
        self.order(doc, state=TransferState.RUNNING, values=values)
        return self.report("running")

    def hang_up(self) -> None:
        if self.wire is not None:
            self.wire.close()
        if self.page is not None:
            self.page.close()
        self.wire = self.page = None
        self.got = []


def transfer(how: str, number: int = 1) -> TransferDoc:
    party = PartyDoc(group="g", layout="aa", members=(0,))
    return TransferDoc(
        id=f"p1.1:1.{number}", publication="p1.1", epoch=number, state=TransferState.FORMING, members=(OTHER, MEMBER),
        hosts=("z", "a"), source=party, destinations=(party,), landings=(), cell=1, message=1, staging=1, plan=how,
    )  # fmt: skip


@pytest.fixture
def watch(place: Place) -> Iterator[Watch]:
    made = Watch(place)
    yield made
    made.hang_up()
    made.listener.close()
    made.path.unlink()


def forked(place: Place, **deadlines: float) -> Born:
    return place.fork(place.client(), deadlines=Deadlines(**deadlines))


def test_from_task_to_task_with_words_in_order_and_beats(place: Place, watch: Watch) -> None:
    born = forked(place)
    watch.accept()
    assert watch.who == {"mover": "a" * 32, "member": MEMBER, "transfer": ""}
    assert watch.page is not None
    beats = watch.page.glance().beats
    until(lambda: watch.page.glance().beats >= beats + 4, 2.0)
    doc = watch.task("quick", arenas=40)
    assert watch.report("starting").transfer == doc.id
    until(
        lambda: (
            sum("given" in os.readlink(f"/proc/{born.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{born.pid}/fd")) == 40
        )
    )
    watch.run(doc)
    out = watch.report("out")
    assert (out.outcome, out.began, out.mover, out.member) == ("done", 3, "a" * 32, MEMBER)
    glance = watch.page.glance()
    assert (glance.state, glance.began, glance.received) == (State.OUT, 3, 21)
    watch.order(None)
    until(lambda: watch.page.glance().state == State.IDLE)
    left = [os.readlink(f"/proc/{born.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{born.pid}/fd")]
    assert not [f for f in left if "given" in f], "the task is over"
    second = watch.task("plain", number=2)
    watch.run(second)
    watch.order(second, state=TransferState.BREAKING)
    assert watch.report("out").outcome == "stopped"


def test_another_watchdog_finds_it_as_it_is_and_the_work_goes_on(place: Place, watch: Watch) -> None:
    forked(place)
    doc = watch.accept().task("plain")
    watch.run(doc)
    watch.accept()
    assert watch.who["transfer"] == doc.id
    assert watch.report("running").transfer == doc.id
    assert watch.page is not None
    began = watch.page.glance().began
    until(lambda: watch.page.glance().began > began + 5)
    watch.order(doc, state=TransferState.STOPPING)
    held = watch.report("running")
    assert held.held
    watch.order(doc, state=TransferState.STOPPING, until=held.began)
    out = watch.report("out")
    assert (out.outcome, out.began) == ("stopped", held.began + 1)


def test_at_its_limit_on_open_files_it_goes_on_and_comes_back_later(place: Place, watch: Watch) -> None:
    born = forked(place)
    watch.accept()
    assert watch.page is not None
    page, watch.page = watch.page, None
    soft, hard = resource.prlimit(born.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(born.pid, resource.RLIMIT_NOFILE, (3, hard))
    watch.hang_up()
    beats = page.glance().beats
    until(lambda: page.glance().beats >= beats + 4, why="it lives without a connection")
    page.close()
    assert not select.select([watch.listener], [], [], 0.0)[0], "it could not connect"
    resource.prlimit(born.pid, resource.RLIMIT_NOFILE, (soft, hard))
    watch.accept()
    assert started(born.pid) == born.start


def test_one_that_does_not_hold_the_token_is_not_obeyed(place: Place, watch: Watch) -> None:
    born = forked(place)
    watch.accept(token="another")
    assert watch.wire is not None
    wire = watch.wire
    with pytest.raises(PeerLost):
        until(lambda: select.select([wire], [], [], 0.01)[0] and wire.receive())
    watch.accept()
    assert started(born.pid) == born.start


@pytest.mark.parametrize("garbage", [(Tag.ORDER, b"{"), (Tag.TASK, b"{}"), (Tag.SUPERVISOR, b""), (Tag.ATTACH, b"x")])
def test_garbage_is_a_lost_connection(place: Place, watch: Watch, garbage: tuple[Tag, bytes]) -> None:
    born = forked(place)
    doc = watch.accept().task("plain")
    watch.run(doc)
    assert watch.wire is not None
    watch.wire.send(*garbage)
    watch.accept()
    assert watch.report("running").transfer == doc.id
    assert started(born.pid) == born.start


def test_it_goes_when_it_is_refused(place: Place, watch: Watch) -> None:
    born = forked(place)
    watch.accept()
    assert watch.wire is not None
    watch.wire.send(Tag.REFUSE, json.dumps({"kind": "NotAMember", "reason": "another has its place"}).encode())
    until(lambda: started(born.pid) == 0)


def test_without_a_word_of_a_watchdog_it_goes_and_not_sooner(place: Place, watch: Watch) -> None:
    born = forked(place, orphan_hold=0.8)
    watch.accept()
    assert watch.wire is not None
    for _ in range(8):
        watch.wire.send(Tag.BEAT)
        time.sleep(0.2)
    assert started(born.pid) == born.start
    silent = time.monotonic()
    until(lambda: started(born.pid) == 0, 3.0)
    assert 0.4 < time.monotonic() - silent < 2.0, "a frozen watchdog that nobody replaces is none"


def test_time_that_it_was_frozen_is_not_time_without_a_watchdog(place: Place, watch: Watch) -> None:
    born = forked(place, orphan_hold=1.0)
    watch.accept()
    assert watch.wire is not None
    os.kill(born.pid, signal.SIGSTOP)
    time.sleep(1.3)
    beats = watch.page.glance().beats if watch.page is not None else 0
    os.kill(born.pid, signal.SIGCONT)
    until(lambda: watch.page is not None and watch.page.glance().beats >= beats + 3)
    watch.wire.send(Tag.BEAT)
    assert started(born.pid) == born.start
