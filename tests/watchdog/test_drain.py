"""SIGTERM to a watchdog drains its host: members are asked to leave, it goes when they have, and in time if they have not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_reshard.errors import JoinRefused, NotAMember
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.messages import Drain, read_up
from elastic_reshard.watchdog.drain import asked_until, drain, guarded, write_down
from tests.watchdog.test_core import D, M, N, attach, connect, house, said
from tests.watchdog.world import HOST, JOB, World, until

# -- what it decides


def drains(found: list[Any]) -> list[float]:
    return [one.within for one in found if isinstance(one, Drain)]


def test_a_drain_is_said_once_a_connection_with_what_is_left_of_its_time() -> None:
    made = house(M)
    made.drain(20.0, 100.0)
    assert made.unsaid
    assert drains(connect(made)) == [120.0]  # `said` passes time 0
    assert drains([read_up(raw) for raw in made.outgoing(105.0)]) == []
    made.cut()
    made.hello()
    assert drains([read_up(raw) for raw in made.outgoing(113.0)]) == [7.0]
    made.cut()
    made.hello()
    assert drains([read_up(raw) for raw in made.outgoing(300.0)]) == [0.0]


def test_of_two_drains_the_shorter_counts() -> None:
    made = house(M)
    connect(made)
    made.drain(20.0, 0.0)
    said(made)
    made.drain(60.0, 0.0)
    assert not made.unsaid
    made.drain(5.0, 0.0)
    assert drains(said(made)) == [5.0]


def test_it_takes_nobody_new_but_those_it_knows() -> None:
    made = house(M)
    made.drain(20.0, 0.0)
    assert "drained" in attach(made, N)
    made.detach(M, 1.0)
    assert attach(made, M, 2, 2.0) == ""


def test_it_goes_when_nobody_is_left_and_a_beat_after_its_time_in_any_case() -> None:
    made = house(M)
    connect(made)
    assert made.departure(5.0) == ""
    made.drain(20.0, 10.0)
    assert made.departure(29.9) == ""
    assert made.departure(30.0 + D.beat - 0.01) == ""
    assert "over" in made.departure(30.0 + D.beat)
    made.end(M, "left", 15.0)
    assert "nobody is left" in made.departure(15.0)


def test_it_waits_for_who_started_it() -> None:
    """Gone by then, it would be replaced by one that nobody told to drain the host."""
    made = house()
    made.drain(20.0, 0.0)
    assert made.departure(2 * D.connect - 0.1) == ""
    assert "drained" in attach(made, N)
    assert "nobody is left" in made.departure(2 * D.connect - 0.1)
    made = house()
    made.drain(20.0, 0.0)
    assert "nobody is left" in made.departure(2 * D.connect)


# -- as it happens


def test_it_asks_and_goes_when_the_last_has_left(here: World) -> None:
    one, two = here.local("one").open(), here.local("two").open()
    record = here.watchdog()
    os.kill(record.pid, signal.SIGTERM)
    asked = until(lambda: here.supervisor.said(Drain), why="the supervisor is asked")
    assert asked[0].within == pytest.approx(Deadlines().drain, abs=0.5)
    with pytest.raises(JoinRefused, match=f"host {HOST} is being drained"):
        here.local("late").open()
    one.link.close()
    assert record.alive
    two.link.close()
    until(lambda: not record.alive, 2.0, "it goes by itself")
    assert one.link.failure is None
    assert here.running() is None


def test_who_does_not_leave_is_turned_out_in_time_and_starts_no_other(here: World) -> None:
    here.deadlines = Deadlines(drain=0.3, beat=0.5)
    stays = here.local("stays").open()
    record = here.watchdog()
    began = time.monotonic()
    os.kill(record.pid, signal.SIGTERM)
    until(lambda: stays.link.failure is not None, 5.0, "it is told")
    assert time.monotonic() - began >= 0.75
    assert isinstance(stays.link.failure, NotAMember)
    assert "was drained" in str(stays.link.failure)
    until(lambda: not record.alive)
    assert here.running() is None
    assert here.log() == "", "its files are gone"


def test_without_a_supervisor_it_goes_in_time_too(here: World) -> None:
    here.deadlines = Deadlines(drain=0.2, beat=0.5)
    here.local().open()
    record = here.watchdog()
    here.supervisor.down()
    os.kill(record.pid, signal.SIGTERM)
    until(lambda: not record.alive, 5.0)
    here.supervisor.up()


def test_a_lost_word_is_said_again(here: World) -> None:
    local = here.local().open()
    here.supervisor.down()
    os.kill(here.watchdog().pid, signal.SIGTERM)
    until(lambda: "watchdog.drains" in here.log())
    here.supervisor.up()
    until(lambda: here.supervisor.said(Drain), 5.0)
    local.link.close()
    until(lambda: here.running() is None)


# -- `drain --here`


def test_it_finds_the_watchdogs_of_this_machine_whatever_their_names(here: World) -> None:
    long = "h" * 90
    here.local("one").open()
    here.local("two", host=long).open()
    found = {(one.job, one.host): one for one in guarded(None, here.folder)}
    assert set(found) == {(JOB, HOST), (JOB, long)}
    assert found[JOB, HOST].record.pid == here.watchdog().pid
    assert guarded("another", here.folder) == []


def test_it_waits_until_they_have_gone(here: World) -> None:
    agent = here.agent().attached()
    here.deadlines = Deadlines()
    record = here.watchdog()
    environment = {**os.environ, "ELASTIC_RESHARD_RUNTIME": str(here.folder)}
    command = [sys.executable, "-m", "elastic_reshard", "drain", "--here", "--within", "60"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[2]
    )
    try:
        asked = until(lambda: here.supervisor.said(Drain), 15.0)
        assert 55 < asked[0].within <= 60
        assert process.poll() is None
        agent.end()
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read().startswith(f"host {HOST} of job {JOB} (1 members) is empty after ")
    finally:
        process.kill()
        process.communicate()
    assert not record.alive
    assert guarded(None, here.folder) == []


def test_it_says_who_is_still_there(here: World) -> None:
    """Nobody can replace a frozen watchdog while its members are frozen too."""
    agent = here.agent().attached()
    os.kill(agent.pid, signal.SIGSTOP)
    record = here.freeze()
    try:
        found = drain(guarded(JOB, here.folder), 0.1)
        assert [(d.host, d.empty, d.members) for d in found] == [(HOST, False, (agent.member,))]
        assert found[0].waited >= 2.0
    finally:
        os.kill(record.pid, signal.SIGCONT)
        agent.kill()
    until(lambda: here.running() is None, 5.0, "woken, it drains in the time that was left for it")


def test_a_watchdog_that_is_replaced_meanwhile_drains_too(here: World) -> None:
    stays = here.local("stays").open()
    record = here.freeze()
    asked: list[Any] = []
    thread = threading.Thread(target=lambda: asked.extend(drain(guarded(JOB, here.folder), 60.0)))
    thread.start()
    until(lambda: not record.alive, 10.0, "the member replaces its frozen watchdog")
    told = until(lambda: here.supervisor.said(Drain), 10.0, "the next one says that the host is drained")
    assert 50.0 < told[0].within < 60.0
    stays.link.close()
    thread.join(10.0)
    assert [(d.host, d.empty) for d in asked] == [(HOST, True)]
    assert here.running() is None


def test_a_watchdog_that_has_just_begun_to_listen_drains_too(
    here: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    monkeypatch.setenv("ELASTIC_RESHARD_TEST_HOOKS", f'{{"watchdog.listening": {{"wait": "{go}"}}}}')

    def ask() -> None:
        until(Path(f"{go}.reached").exists, 20.0)
        os.kill(here.watchdog().pid, signal.SIGTERM)
        go.touch()

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(JoinRefused, match="being drained"):
        here.local().open()
    asking.join()


def test_what_is_written_down_holds_until_its_time_is_over(here: World) -> None:
    paths = here.paths()
    paths.folder.mkdir(exist_ok=True)
    assert asked_until(paths, 50.0) is None
    write_down(paths, 100.0)
    assert [asked_until(paths, now) for now in (50.0, 101.9, 102.1)] == [100.0, 100.0, None]
    for text in ('["another boot", 100.0]', "soon", "[1]", '{"a": 1}', "7"):
        paths.drain.write_text(text)
        assert asked_until(paths, 50.0) is None, text
    paths.drain.unlink()
    paths.folder.rmdir()
    write_down(paths, 1.0)
    assert not paths.folder.exists()
