"""A watchdog's life: who starts it, what it outlives, when it goes, what it leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elastic_reshard.errors import SupervisorUnreachable
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.docs import MemberState
from elastic_reshard.protocol.view import Farewell
from elastic_reshard.watchdog.runtime import Lock, end_process, started
from tests.watchdog.world import World, open_files, until


def test_the_first_member_starts_it_and_others_attach_to_the_same(here: World) -> None:
    began = time.monotonic()
    first = here.local("first").open()
    assert time.monotonic() - began < 1.5
    record = here.watchdog()
    second = here.local("second").open()
    far = here.agent().attached()
    assert first.link.connected
    assert first.link.watchdog_instance == second.link.watchdog_instance == record.watchdog == far.ask("instance")
    assert set(here.watchdog().members) == {first.member, second.member, far.member}
    until(lambda: set(here.supervisor.members) == {first.member, second.member, far.member})
    assert len(here.supervisor.hellos()) == 1


def test_it_is_nobodys_child_and_has_nothing_of_its_starter(here: World) -> None:
    here.local().open()
    pid = here.watchdog().pid
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    assert int(fields[1]) != os.getpid()
    assert int(fields[3]) not in (0, os.getsid(0))  # its session
    assert not [t for t in open_files(pid) if "pipe:" in t], "an inherited pipe would keep its other end waiting"
    with open(f"/proc/{pid}/cmdline") as line:
        assert "secret-of-the-job" not in line.read()
    with open(f"/proc/{pid}/maps") as maps:
        assert "torch" not in maps.read()


def test_racing_starters_make_one(here: World, tmp_path: Path) -> None:
    def gate(step: str, i: int) -> Path:
        return tmp_path / f"{step}{i}"

    def reached(step: str) -> int:
        return len(list(tmp_path.glob(f"{step}*.reached")))

    steps = ("missing", "locked")
    agents = [here.agent(f"r{i}", hooks={f"link.{s}": {"wait": str(gate(s, i))} for s in steps}) for i in range(4)]
    until(lambda: reached("missing") == 4, why="all have found none")
    for i in range(4):
        gate("missing", i).touch()
    until(lambda: reached("locked"))
    first = time.monotonic()
    until(lambda: time.monotonic() - first > 0.3, why="the others had time to get as far")
    assert reached("locked") == 1
    for i in range(4):
        gate("locked", i).touch()
    instances = {agent.attached().ask("instance") for agent in agents}
    assert len(instances) == 1
    assert len(here.supervisor.hellos()) == 1
    assert here.log().count("watchdog.listening") == 1


def test_a_starter_that_was_overtaken_starts_none(here: World, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = here.agent("slow", hooks={"link.missing": {"wait": str(gate)}})
    until(Path(f"{gate}.reached").exists, why="it has found none")
    quick = here.local("quick").open()
    gate.touch()
    assert slow.attached().ask("instance") == quick.link.watchdog_instance
    assert here.log().count("watchdog.listening") == 1


def test_it_starts_inside_a_daemonic_worker_and_outlives_it(here: World) -> None:
    worker = here.agent(mode="daemonic")
    said = worker.answer()
    assert said["daemon"] is True
    worker.process.wait()
    record = here.watchdog()
    until(lambda: here.supervisor.ended(said["member"]), why="the worker's end is told")
    joined = here.local().open()
    assert joined.link.watchdog_instance == record.watchdog


def test_it_outlives_the_thread_and_the_process_that_started_it(here: World) -> None:
    starter = here.agent(mode="thread").attached()
    record = here.watchdog()
    other = here.local().open()
    assert starter.ask("state") == 2  # the thread that started it has ended
    starter.kill()
    until(lambda: here.supervisor.ended(starter.member))
    assert here.watchdog().watchdog == record.watchdog == other.link.watchdog_instance


def test_it_goes_when_the_last_has_left_and_leaves_nothing(here: World) -> None:
    one, two = here.local("one").open(), here.local("two").open()
    record = here.watchdog()
    one.link.close()
    until(lambda: here.supervisor.ended(one.member))
    assert here.supervisor.ended(one.member)[0].how == "left"
    assert record.alive
    began = time.monotonic()
    two.link.close()
    until(lambda: not record.alive, 2.0)
    assert time.monotonic() - began < 2.0
    assert here.supervisor.ended(two.member), "the last words are said"
    assert not list(here.folder.rglob("*"))


def test_what_it_hears_after_it_has_cleared_its_place_is_not_written_down(here: World, tmp_path: Path) -> None:
    """It still says its last words then, and the next watchdog's record may lie there."""
    gate = tmp_path / "gate"
    agent = here.agent(hooks={"watchdog.exiting": {"wait": str(gate)}}).attached()
    record = here.watchdog()
    until(lambda: here.supervisor.latest(agent.member) >= 0)
    agent.ask("leave")
    until(Path(f"{gate}.reached").exists)
    here.paths().make()  # it goes with its last file
    here.supervisor.state_of(agent.member, MemberState.LOST)
    neighbour = here.paths().folder / "another-host.lock"
    neighbour.touch()
    gate.touch()
    until(lambda: not record.alive, 4.0)
    assert here.supervisor.ended(agent.member), "the last words are said"
    assert list(here.paths().folder.iterdir()) == [neighbour]
    shutil.rmtree(neighbour.parent)


def test_it_waits_for_members_that_were_killed_and_then_goes(here: World) -> None:
    here.deadlines = Deadlines(orphan_hold=1.0)
    agent = here.agent().attached()
    arena = agent.ask("offer")
    record = here.watchdog()
    killed = time.monotonic()
    agent.kill()
    late = here.local("late").open()
    assert len(late.values(arena)) == 512
    late.link.close(graceful=False)
    until(lambda: not record.alive, 4.0)
    assert time.monotonic() - killed >= 1.0


def test_it_goes_at_once_when_the_job_is_over(here: World) -> None:
    agent = here.agent().attached()
    record = here.watchdog()
    local = here.local().open()
    here.supervisor.send(Farewell(term=1, instance="i1", over=True))
    until(lambda: [m for m in local.heard if isinstance(m, Farewell)])
    assert record.alive, "members are still there"
    local.link.close(graceful=False)
    agent.kill()
    until(lambda: not record.alive, 2.0)


def test_nobody_answering_in_time_is_an_error_and_leaves_nothing(here: World) -> None:
    here.supervisor.down()
    began = time.monotonic()
    with pytest.raises(SupervisorUnreachable, match="Connect call failed"):
        here.local().open(4.0)
    assert time.monotonic() - began < 12.0
    until(lambda: here.running() is None)


def test_an_interrupt_while_the_supervisor_is_waited_for_leaves_no_member_behind(here: World) -> None:
    here.local("keeper").open()
    here.supervisor.down()
    local = here.local()
    main = threading.main_thread().ident
    assert main is not None
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it

    def interrupt() -> None:
        until(lambda: here.log().count("member.attached") == 2, 10.0)
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        local.open(60.0)
    interrupter.join()
    signal.signal(signal.SIGINT, former)
    assert not local.link._thread.is_alive()
    until(lambda: "how='left'" in here.log(), why="the watchdog was told")


def test_closing_is_not_waited_for_beyond_its_deadline(here: World) -> None:
    here.deadlines = Deadlines(orphan_hold=0.5)
    local = here.local().open()
    record = here.freeze()
    lock = Lock(here.paths().lock)
    assert lock.take(), "so that no other can be started"
    end_process(record.pid, record.start, 2.0)
    began = time.monotonic()
    until(lambda: not local.link.connected)
    local.link.close(deadline=time.monotonic())
    took = time.monotonic() - began
    lock.release()
    assert took < 8.0, took
    until(lambda: not local.link._thread.is_alive(), 10.0, "it ends by itself")


def test_it_answers_soon_and_without_torch(here: World) -> None:
    command = [sys.executable, "-c", "import elastic_reshard.watchdog.service, sys; assert 'torch' not in sys.modules"]
    subprocess.run(command, check=True, timeout=30)
    took = []
    for _ in range(3):
        began = time.monotonic()
        link = here.local().open().link
        took.append(time.monotonic() - began)
        link.close()
        until(lambda: here.running() is None)
    assert min(took) < 3.0, took


@pytest.mark.parametrize("point", ["left", "forked"])
def test_a_watchdog_that_hangs_while_it_starts_is_ended(here: World, point: str) -> None:
    here.deadlines = Deadlines(connect=1.0)
    once = str(here.folder.parent / f"{here.folder.name}.once")
    try:
        agent = here.agent(hooks={f"watchdog.{point}": {"do": "stop", "once": once}}).attached()
        assert agent.ask("instance") == here.watchdog().watchdog
    finally:
        os.unlink(once)


def test_descriptors_and_threads_are_flat_over_many_rounds(here: World) -> None:
    keeper = here.local("keeper").open()
    record = here.watchdog()

    def held() -> tuple[int, int, int]:
        pid = record.pid
        return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for turn in range(50):
        local = here.local(f"r{turn % 3}").open()
        arena = local.offer(turn)
        keeper.values(arena)
        local.link.withdraw(arena)
        local.link.close()
        until(lambda: here.supervisor.ended(local.member))  # noqa: B023 - asked at once
        here.supervisor.tell(members={local.member: None})
        here.supervisor.members.pop(local.member)
        if turn == 10:
            until(lambda: set(here.watchdog().members) == {keeper.member})
            before = held()
    until(lambda: set(here.watchdog().members) == {keeper.member}, why="those who left are forgotten")
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), why=f"{held()} {before}")
    assert started(record.pid) == record.start


def test_a_forked_child_owns_nothing_of_it(here: World) -> None:
    agent = here.agent().attached()
    other = here.local().open()
    other.offer()
    agent.ask("offer")
    assert agent.ask("fork") == 0
    assert agent.ask("state") == 2
    until(lambda: here.supervisor.latest(agent.member) == 2)
    assert not here.supervisor.ended(agent.member)


def test_a_runtime_folder_that_is_removed_harms_nobody(here: World) -> None:
    one, two = here.local("one").open(), here.local("two").open()
    first = here.watchdog()
    shutil.rmtree(here.paths().folder)
    arena = one.offer(4)
    assert two.values(arena)[0] == 4
    three = here.local("three").open()
    second = here.watchdog()
    assert second.pid != first.pid
    number = one.state()
    until(lambda: here.supervisor.latest(one.member) == number)
    shutil.rmtree(here.paths().folder)
    for local in (one, two, three):
        local.link.close()
    until(lambda: not first.alive and not second.alive, why="both go by themselves")


def test_a_process_that_just_exits_is_seen_to_end(here: World) -> None:
    agent = here.agent().attached()
    keeper = here.local().open()
    agent.ask("exit")
    assert agent.process.wait(5) == 0
    until(lambda: here.supervisor.ended(agent.member), 2.0)
    assert keeper.link.connected
