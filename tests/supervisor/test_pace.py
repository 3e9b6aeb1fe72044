"""How often a supervisor steps, and what it may leave out: by tables, and against steps that leave nothing out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from elastic_reshard.bench.control_cast import TRAINER, Cast
from elastic_reshard.bench.control_core import _covers, _Machine, _refit, measure_core
from elastic_reshard.protocol.docs import MemberState
from elastic_reshard.supervisor import core
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.events import Beaten, Event, Greeted, Leave, Tick
from elastic_reshard.supervisor.journal import MEMORY, Journal
from elastic_reshard.supervisor.pace import Pace


def test_cheap_steps_are_never_waited_for() -> None:
    pace = Pace(1.0)
    assert (pace.idle, pace.gather, pace.pause) == (0.1, 0.0, 0.0)
    for _ in range(100):
        pace.took(0.0015)
    assert (pace.idle, pace.gather) == (0.1, 0.0)


def test_dear_steps_are_fewer_and_hold_up_nothing_for_long() -> None:
    pace = Pace(1.0)
    for _ in range(100):
        pace.took(0.02)
    assert pace.idle == pytest.approx(0.2)
    assert pace.gather == pytest.approx(0.08)
    for _ in range(100):
        pace.took(3.0)
    assert (pace.idle, pace.gather) == (0.25, 0.08)
    assert Pace(0.1).idle == 0.1
    for _ in range(100):
        pace.took(0.0)
    assert (pace.idle, pace.gather) == (0.1, 0.0)


def settled(members: int = 32) -> _Machine:
    """A job in which nothing is pending."""
    machine = _Machine(Cast(members))
    cast = machine.cast
    machine.take(Greeted(cast.hello(host)) for host in range(cast.hosts))
    machine.take(machine.spoken(cast.count(machine.view.groups[TRAINER])))
    _refit(machine)
    for _ in range(4):
        machine.now += 0.9
        machine.step([*(Beaten(cast.label(host)) for host in range(cast.hosts)), Tick()])
    machine.job = replace(machine.job, settled=None)
    machine.step([Tick()])
    return machine


def step(machine: _Machine, now: float, *events: Event) -> tuple[core.Job, Any]:
    machine.now = now
    job, effects = core.step(machine.job, events, now, _covers)
    machine.job = job
    return job, effects


def test_signs_of_life_settle_nothing_for_a_beat_and_are_heard_all_the_same() -> None:
    machine = settled()
    began = machine.now
    assert machine.job.settled == began
    label = machine.cast.label(0)
    job, effects = step(machine, began + 0.5, Beaten(label), Tick())
    assert (job.settled, job.hosts[label].heard) == (began, began + 0.5)
    assert effects.told is None
    job, _ = step(machine, began + 1.0, Tick())
    assert job.settled == began + 1.0, "once a beat everything is looked at"


def test_a_silent_host_is_given_up_in_time_though_nothing_else_happens() -> None:
    machine = settled()
    gone, hosts = machine.cast.label(3), [machine.cast.label(h) for h in range(3)]
    began, now = machine.now, machine.now
    step(machine, now, *(Beaten(machine.cast.label(h)) for h in range(4)))
    while machine.now < began + 4.9:
        now += 0.1
        job, _ = step(machine, now, *map(Beaten, hosts), Tick())
    assert gone in job.hosts
    job, effects = step(machine, began + 5.01, *map(Beaten, hosts), Tick())
    assert gone not in job.hosts
    assert effects.silent == (gone,)
    assert not job.groups[machine.cast.by_host[3][0].said.group.name].doc.whole, "and settled in the same step"
    states = {m.doc.state for m in job.members.values() if m.doc.host == gone}
    assert states <= {MemberState.FORFEIT, MemberState.LOST}
    assert effects.told is not None


def test_what_is_pending_is_never_left_out() -> None:
    machine = settled()
    member = machine.cast.trainers[0].id
    _, effects = step(machine, machine.now + 0.1, Leave(members=(member,), within=0.3))
    assert effects.told is not None
    now = machine.now
    for at in (0.1, 0.2, 0.3):
        job, _ = step(machine, now + at, Tick())
    assert job.members[member].doc.state is not MemberState.LIVE, "its time was over between two beats"
    offered = settled()
    offered.take(offered.spoken(list(offered.cast.publish(2))[:-1]))
    assert offered.job.settled is None, "a publish waits for its last rank"


def test_steps_that_leave_out_and_steps_that_do_not_come_to_the_same() -> None:
    lazy, eager = settled(), settled()
    now = lazy.now
    labels = [lazy.cast.label(h) for h in range(lazy.cast.hosts)]
    for number in range(1, 120):
        now += 0.1
        events: list[Event] = [Beaten(label) for i, label in enumerate(labels) if i or number < 40]
        if number == 90:
            events += lazy.spoken(list(lazy.cast.publish(7))[8:])
        step(lazy, now, *events, Tick())
        eager.job = replace(eager.job, settled=None)
        step(eager, now, *events, Tick())
        assert core.snapshot(lazy.job) == core.snapshot(eager.job), number
    assert lazy.job.members != settled().job.members, "something had happened"


def test_it_comes_out_right_alone() -> None:
    found = measure_core(Cast(64))
    assert min(found.beats, found.statements, found.batched) > 0
    assert found.refit_events > 64


def test_a_burst_is_one_step_when_steps_are_dear() -> None:
    """The loop takes what comes meanwhile with it; alone, an event is stepped soon."""

    async def play(cost: float) -> int:
        steps = 0
        shell = Shell(core.begin("job", 1, "i", 0.0), Journal.open(MEMORY, "job"))
        shell.journal.begin("i")
        real = shell._step

        def counted() -> None:
            nonlocal steps
            steps += 1
            real()

        shell._step = counted  # type: ignore[method-assign]
        for _ in range(50):
            shell._pace.took(cost)
        running = asyncio.create_task(shell.run())
        for _ in range(40):
            shell.submit(Leave(members=("nobody@0",)))
            await asyncio.sleep(0)
        await shell.settle(Leave(members=("nobody@0",)))
        shell.stop()
        await running
        shell.close(flush=False)
        return steps

    assert asyncio.run(play(0.0)) >= 8
    assert asyncio.run(play(0.02)) <= 2
