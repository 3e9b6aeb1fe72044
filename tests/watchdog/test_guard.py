"""The watchdog's own guard: a lost one is replaced by a member, and nothing that it held is lost."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from elastic_reshard.errors import MembershipError
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.window import Window
from elastic_reshard.watchdog import find
from elastic_reshard.watchdog.find import Finder
from elastic_reshard.watchdog.link import HostLink
from elastic_reshard.watchdog.runtime import Lock
from tests.watchdog.world import Local, World, bystander, fork_behind_our_back, memory, read, table_of, until

REPLACED = 10.0  # seconds; wanted are 3, which a busy machine does not keep


def replaced(link: HostLink, before: str, within: float) -> float:
    """Wait until another watchdog serves this member and hears the supervisor; how long it took."""
    began = time.monotonic()
    until(lambda: link.watchdog_instance not in ("", before) and link.connected, within, "it is replaced")
    return time.monotonic() - began


def test_killed_it_is_replaced_with_all_that_it_held(here: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "elastic_reshard")
    one, two = here.local("one").open(), here.local("two").open()
    agent, doomed = here.agent("far").attached(), here.agent("doomed").attached()
    arenas = [one.offer(1), two.offer(10_000), agent.ask("offer", start=20_000), doomed.ask("offer", start=30_000)]
    for arena in arenas:
        one.values(arena)
        two.values(arena)
        agent.ask("values", arena=arena)
    number = one.state()
    doomed.kill()
    until(lambda: here.supervisor.ended(doomed.member))
    before = here.kill()
    took = replaced(one.link, before.watchdog, 3.0)
    assert took < 3.0
    record = here.watchdog()
    assert record.pid != before.pid
    until(lambda: agent.ask("instance") == record.watchdog == two.link.watchdog_instance)
    until(lambda: len(here.supervisor.hellos()) == 2)
    hello = here.supervisor.hellos()[1]
    said = {s.member: s.number for s in hello.statements}
    assert said == {one.member: number, two.member: 1, agent.member: 1, doomed.member: 1}, "the dead one's too"
    assert hello.ended == (doomed.member,)
    assert here.log().count("watchdog.listening") == 2
    late = here.local("late").open()
    for arena, start in zip(arenas, (1, 10_000, 20_000, 30_000), strict=True):
        assert late.values(arena)[0] == start
    assert here.supervisor.ended(doomed.member)[-1].arenas_kept
    assert "watchdog.lost" in caplog.text
    assert "watchdog.replaced" in caplog.text


def test_frozen_for_good_it_is_killed_and_replaced(here: World) -> None:
    one, two = here.local("one").open(), here.local("two").open()
    arena = one.offer(7)
    two.values(arena)
    before = here.freeze()
    frozen = time.monotonic()
    took = replaced(one.link, before.watchdog, REPLACED)
    assert took > 1.5, took
    assert not before.alive, "no zombie that could wake"
    number = two.state()
    until(lambda: here.supervisor.latest(two.member) == number)
    assert here.local("late").open().values(arena)[0] == 7
    assert time.monotonic() - frozen < 5.0


@pytest.mark.long
def test_a_frozen_one_that_nobody_is_attached_to_is_replaced_by_a_starter(here: World) -> None:
    here.deadlines = Deadlines(watchdog_silent=1.0, orphan_hold=1.0)
    here.local("gone").open().link.close(graceful=False)
    before = here.freeze()
    joined = here.local("new").open()
    assert joined.link.watchdog_instance != before.watchdog
    assert not before.alive


def test_a_frozen_one_that_takes_nobody_in_any_more_is_killed_and_replaced(here: World) -> None:
    """Its backlog is full, so that the kernel names nobody: its record does."""
    here.deadlines = Deadlines(watchdog_silent=1.0, orphan_hold=1.0)
    here.local("gone").open().link.close(graceful=False)
    before = here.freeze()
    with contextlib.ExitStack() as waiting:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                sock.connect(str(here.paths().sock))
        joined = here.local("new").open()
    assert joined.link.watchdog_instance != before.watchdog
    assert not before.alive, "no zombie that could wake"


@pytest.mark.parametrize("step", ["dial", "take"])
def test_short_of_files_a_member_tries_again(here: World, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """At its user's limit on open files, or with a full disk, while it replaces the watchdog."""
    one = here.local("one").open()
    owner, name = (Finder, "_dial") if step == "dial" else (Lock, "take")
    before, works, refused = here.watchdog(), getattr(owner, name), threading.Event()

    def fails(*args: Any) -> Any:
        if refused.is_set():
            return works(*args)
        refused.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(owner, name, fails)
    here.kill()
    replaced(one.link, before.watchdog, REPLACED)
    assert refused.is_set()
    assert one.link.failure is None


def test_short_of_files_before_it_has_attached_a_member_says_so(here: World) -> None:
    here.paths().make()
    here.paths().lock.mkdir()  # as unwritable as on a full disk
    with pytest.raises(MembershipError, match=r"cannot get to the watchdog of host a: .*Is a directory"):
        here.local().open()
    here.paths().lock.rmdir()
    here.paths().folder.rmdir()


@pytest.mark.long
def test_a_member_whose_own_thread_was_late_kills_nobody(here: World) -> None:
    here.deadlines = Deadlines(watchdog_silent=1.0)
    agent = here.agent().attached()
    healthy = here.watchdog()
    agent.ask("hog", seconds=1.6)
    number = agent.ask("state")
    until(lambda: here.supervisor.latest(agent.member) == number)
    assert agent.ask("instance") == healthy.watchdog
    os.kill(agent.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    until(lambda: time.monotonic() - stopped > 1.6)
    os.kill(agent.pid, signal.SIGCONT)
    number = agent.ask("state")
    until(lambda: here.supervisor.latest(agent.member) == number)
    assert here.watchdog().watchdog == healthy.watchdog
    assert here.log().count("watchdog.listening") == 1
    assert len(here.supervisor.hellos()) == 1


def test_a_member_that_dies_while_it_replaces_leaves_it_to_another(here: World) -> None:
    one = here.local("one").open()
    agent = here.agent(hooks={"link.replacing": "kill"}).attached()
    before = here.kill()
    replaced(one.link, before.watchdog, REPLACED)
    agent.process.wait(5)
    until(lambda: here.supervisor.ended(agent.member), why="the predecessor's record names who must still be there")


def test_a_member_frozen_meanwhile_is_not_taken_for_dead_until_it_is(here: World) -> None:
    one = here.local("one").open()
    agent = here.agent(hooks={"link.replacing": "stop"}).attached()
    before = here.kill()
    replaced(one.link, before.watchdog, REPLACED)
    until(lambda: len(here.supervisor.hellos()) == 2)
    number = one.state()
    until(lambda: here.supervisor.latest(one.member) == number)
    assert here.supervisor.hellos()[-1].ended == ()
    assert not here.supervisor.ended(agent.member)
    second = here.kill()  # its record names whom it still waits for
    replaced(one.link, second.watchdog, REPLACED)
    until(lambda: len(here.supervisor.hellos()) == 3)
    assert here.supervisor.hellos()[-1].ended == ()
    assert not here.supervisor.ended(agent.member)
    agent.kill()
    until(lambda: here.supervisor.ended(agent.member), 2.0)


@pytest.mark.parametrize("fork", [os.fork, fork_behind_our_back])
def test_a_process_forked_while_it_was_started_keeps_nobody_from_replacing_it(
    here: World, monkeypatch: pytest.MonkeyPatch, fork: Callable[[], int]
) -> None:
    with ExitStack() as bystanders:

        def forking(point: str) -> None:
            if point == "link.locked":
                bystanders.enter_context(bystander(fork))

        with monkeypatch.context() as patch:
            patch.setattr(find, "hook", forking)
            one = here.local("one").open()
        before = here.kill()
        assert replaced(one.link, before.watchdog, REPLACED) < REPLACED
        here.end()
        until(lambda: here.running() is None, why="it goes, too")


def test_a_starter_killed_with_the_lock_in_its_hands_leaves_it_to_another(here: World) -> None:
    agent = here.agent(hooks={"link.locked": "kill"})
    agent.process.wait(10)
    assert here.local().open(5.0).link.connected


@pytest.mark.parametrize("point", ["attached", "offered", "stated", "told"])
def test_killed_at_each_step_nothing_is_lost(here: World, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    once = here.folder.parent / f"{here.folder.name}.once"
    hooks = f'{{"watchdog.{point}": {{"do": "kill", "once": "{once}"}}}}'
    monkeypatch.setenv("ELASTIC_RESHARD_TEST_HOOKS", hooks)
    try:
        one = here.local("one").open()
        monkeypatch.delenv("ELASTIC_RESHARD_TEST_HOOKS")
        two = here.local("two").open()
        arena = one.offer(3)
        number = one.state()
        assert two.values(arena)[0] == 3
        until(lambda: here.supervisor.latest(one.member) == number)
        assert once.exists(), "the fault was placed"
    finally:
        once.unlink(missing_ok=True)


def test_an_arena_withdrawn_while_it_is_replaced_does_not_come_back(here: World) -> None:
    here.deadlines = Deadlines(watchdog_silent=1.0)
    one, two = here.local("one").open(), here.local("two").open()
    gone, kept = one.offer(1), one.offer(2)
    two.values(gone)
    two.values(kept)
    record = here.freeze()
    one.link.withdraw(gone)
    replaced(one.link, record.watchdog, 4.5)
    replaced(two.link, record.watchdog, 4.5)
    late = here.local("late").open()
    assert late.values(kept)[0] == 2
    until(lambda: gone not in two.link._shelf.arenas and gone not in late.link._shelf.arenas)


def test_a_second_loss_while_the_first_is_mended(here: World) -> None:
    one = here.local("one").open()
    arena = one.offer(5)
    for _ in range(2):
        before = here.kill()
        replaced(one.link, before.watchdog, 3.0)
    assert here.local("late").open().values(arena)[0] == 5


def test_offers_and_statements_made_without_a_watchdog_are_kept(here: World) -> None:
    one, two = here.local("one").open(), here.local("two").open()
    here.kill()
    began = time.monotonic()
    arena, number = one.offer(9), one.state()
    assert time.monotonic() - began < 0.1, "nobody waits for a watchdog"
    assert two.values(arena)[0] == 9
    until(lambda: here.supervisor.latest(one.member) == number)


def test_close_says_goodbye_to_the_replacement(here: World) -> None:
    one, two = here.local("one").open(), here.local("two").open()
    here.kill()
    one.link.close()
    until(lambda: [e for e in here.supervisor.ended(one.member) if e.how == "left"])
    assert isinstance(two, Local)


def test_arenas_of_two_descriptors_and_windows_outlive_a_watchdog(here: World) -> None:
    """One is offered again by its owner; one of a member that ended is collected from who has it. A window comes again too."""
    one, two, doomed = here.local("one").open(), here.local("two").open(), here.local("doomed").open()
    arenas = {owner: _offer_two(owner, start) for owner, start in ((one, 100), (doomed, 200))}
    window = Window()
    one.link.offer_window(window.fd)
    for arena in arenas.values():
        _values_of_two(two, arena)
    here.kill()
    doomed.link.close(graceful=False)
    late = here.local("late").open()
    for reader in (late, two):
        assert _values_of_two(reader, arenas[one]) == (100, 1100)
        assert _values_of_two(reader, arenas[doomed]) == (200, 1200)
    held = f"/proc/{here.watchdog().pid}/fd"
    until(lambda: any("member window" in os.readlink(f"{held}/{fd}") for fd in os.listdir(held)))
    window.give_up()
    Local(here.config(), member=doomed.member).open().link.close()  # so that its watchdog knows that it has gone


def _offer_two(owner: Local, start: int) -> str:
    """Offer an arena whose second descriptor holds numbers that are greater by 1000."""
    arena, fd = memory(start, 8)
    _, more = memory(start + 1000, 8)
    owner.link.offer(arena, fd, table_of(start, 8), more)
    os.close(fd)
    os.close(more)
    return arena


def _values_of_two(reader: Local, arena: str) -> tuple[int, int]:
    """The first number in each; both descriptors must be read-only."""
    held = reader.link.arena(arena, time.monotonic() + 5.0)
    start = json.loads(held.table)["start"]
    try:
        return read(held.fd, held.table)[0], read(held.memory, table_of(start + 1000, 8))[0]
    finally:
        os.close(held.fd)
        os.close(held.memory)
