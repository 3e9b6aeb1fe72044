"""One loss at a chosen moment of a transfer, and nothing else: what it costs (`tests/supervisor/sim/scenes.py`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic_reshard.protocol.docs import PublicationState
from tests.supervisor.sim.movers import Mover
from tests.supervisor.sim.scenes import Scene

SEEDS = range(5)  # by which survivors fail or hang, get out or have to be condemned


def _kill_mover(scene: Scene) -> None:
    scene.world.rng.choice(scene.movers()).die()


def _freeze_mover(scene: Scene) -> None:
    scene.world.rng.choice(scene.movers()).freeze()


def _kill_source_mover(scene: Scene) -> None:
    scene.world.rng.choice(scene.movers("t-")).die()


def _kill_mover_and_member(scene: Scene) -> None:
    mover = scene.world.rng.choice(scene.movers("t-"))
    mover.die()
    scene.world.members[mover.member].die()


LOSSES = [_kill_mover, _freeze_mover, _kill_source_mover, _kill_mover_and_member]


@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_fault_each_cell_enters_a_domain_once(seed: int) -> None:
    scene = Scene(seed, sharded=seed % 2 == 0, engines=(1, 3) if seed % 3 else (2, 2, 1))
    epoch = scene.job.membership_epoch
    for _ in range(3):
        publication = scene.publish()
        scene.until(lambda publication=publication: scene.current(publication), 10.0)  # type: ignore[misc]
        assert scene.formed(publication) == 1
    assert scene.most_arrivals() == 1
    assert scene.job.membership_epoch == epoch


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_one_loss_causes_one_rebuild(seed: int, loss: Callable[[Scene], None]) -> None:
    scene = Scene(seed)
    first = scene.publish()
    scene.until(lambda: scene.current(first), 10.0)
    second = scene.publish()
    scene.in_the_middle()
    epoch = scene.job.membership_epoch
    loss(scene)
    took = scene.until(lambda: scene.current(second), 20.0)
    assert scene.formed(second) == 2
    assert scene.most_arrivals() == 1  # what had landed is not sent again
    assert scene.job.membership_epoch == epoch + (2 if loss is _kill_mover_and_member else 1)
    deadlines = scene.world.deadlines
    # Nobody waits for a stall: an end is told, a frozen one is condemned.
    assert (
        took
        <= (deadlines.mover_silent if loss is _freeze_mover else 0.0) + deadlines.abort + 3.5
        < deadlines.stall + 1.5
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_members_death_alone_breaks_no_transfer(seed: int) -> None:
    scene = Scene(seed)
    publication = scene.publish()
    scene.in_the_middle()
    scene.world.members[scene.movers("t-")[0].member].die()
    scene.until(lambda: scene.current(publication), 10.0)
    assert scene.formed(publication) == 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("slowness", [60.0, 300.0])
def test_a_straggler_is_left_behind_and_the_others_commit(seed: int, slowness: float) -> None:
    scene = Scene(seed, engines=(2, 1), late_after=2.0)
    scene.world.slow["e1"] = slowness
    publication = scene.publish()
    deadlines = scene.world.deadlines
    took = scene.until(lambda: scene.state(publication) is PublicationState.COMMITTED, 20.0)
    assert took <= 2.0 + 2 * deadlines.stall + deadlines.abort + 3.0  # what does not stop by then is broken off
    scene.until(lambda: scene.current(publication, ["e0"]), 5.0)
    scene.world.quicken()
    scene.until(lambda: scene.current(publication), 60.0)
    assert [m.name for m in scene.world.members.values() if not m.alive] == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_shard_that_nobody_holds_is_waited_for_then_given_up_and_everyone_goes_on_serving(seed: int) -> None:
    scene = Scene(seed)
    first = scene.publish()
    scene.until(lambda: scene.current(first), 10.0)
    second = scene.publish()
    scene.in_the_middle()
    for proc in scene.world.network.processes("h1"):
        proc.die("with its host")
    deadlines = scene.world.deadlines
    took = scene.until(lambda: scene.state(second) is PublicationState.ABANDONED, 60.0)
    assert "ShardLost" in scene.job.publications[second.id].doc.reason
    assert deadlines.orphan_hold <= took <= deadlines.orphan_hold + deadlines.evict + deadlines.abort + 5.0
    assert scene.current(first)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_joiner_elsewhere_is_served_by_its_peers(seed: int) -> None:
    scene = Scene(seed, engines=(2, 1, 1))
    joiner = scene.world.installers.pop()
    publication = scene.publish()
    scene.until(lambda: scene.current(publication), 20.0)
    scene.world.gangs.remove(joiner)
    for host in ("h0", "h1"):
        for proc in scene.world.network.processes(host):
            proc.die("with its host")
    scene.join("late", scene.world.engines[0], "h1")
    scene.until(lambda: scene.current(publication, ["late"]), 30.0)
    assert scene.state(publication) is PublicationState.COMMITTED


@pytest.mark.parametrize("seed", SEEDS)
def test_who_is_slow_to_plan_is_not_waited_for(seed: int) -> None:
    scene = Scene(seed, engines=(2, 1), late_after=2.0)
    scene.world.dull.add("e1")
    publication = scene.publish()
    took = scene.until(lambda: scene.state(publication) is PublicationState.COMMITTED, 10.0)
    assert took <= 2.0 + scene.world.deadlines.abort + 2.0
    scene.world.dull.clear()
    scene.until(lambda: scene.current(publication), 30.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_may_have_met_is_waited_for_by_the_next_term_too(seed: int) -> None:
    scene = Scene(seed)
    publication = scene.publish()
    scene.in_the_middle()
    scene.world.network.cut(["h0"], control=True, data=False)
    scene.movers("e0-")[0].die()
    scene.world.supervisors[-1].die()
    scene.world.start_supervisor()
    scene.world.clock.after(3.0, scene.world.network.heal)
    scene.until(lambda: scene.current(publication), 60.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_trainers_published_lives_on_without_them_and_through_a_restart(seed: int) -> None:
    scene = Scene(seed)
    publication = scene.publish()
    scene.in_the_middle()
    for member in scene.world.trainer.ranks:
        member.die()
    scene.world.supervisors[-1].die()
    scene.world.start_supervisor()
    scene.until(lambda: scene.current(publication), 20.0)


def _shut(scene: Scene, group: str) -> bool:
    """Whether every mover of a group waits for its member's window."""
    movers = scene.movers(f"{group}-")
    return bool(movers) and all(m.work is not None and m.work.shut for m in movers)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_closed_window_is_no_stall(seed: int) -> None:
    """The trainers compute for longer than a stall, and than anybody waits for a straggler."""
    scene = Scene(seed, late_after=2.0)
    scene.world.closed.add("t")
    publication = scene.publish()
    scene.until(lambda: _shut(scene, "t"), 10.0)
    since, deadlines = scene.world.clock.now, scene.world.deadlines
    scene.until(lambda: scene.world.clock.now - since > 3 * deadlines.stall, 4 * deadlines.stall)
    assert _shut(scene, "t")
    assert not any(work.cells for m in scene.movers() if (work := m.work) is not None)
    scene.world.closed.clear()
    scene.until(lambda: scene.current(publication), 10.0)
    assert scene.formed(publication) == 1
    assert scene.most_arrivals() == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_who_computes_is_left_behind_and_caught_up_when_it_is_idle(seed: int) -> None:
    scene = Scene(seed, engines=(2, 1), late_after=6.0)
    first = scene.publish()
    scene.until(lambda: scene.current(first), 10.0)
    scene.world.closed.add("e1")
    publication = scene.publish()
    took = scene.until(lambda: scene.state(publication) is PublicationState.COMMITTED, 20.0)
    assert took <= 6.0 + scene.world.deadlines.abort + 3.0
    scene.until(lambda: scene.current(publication, ["e0"]), 5.0)
    # It is tried again when nobody else waits; the next version does not wait for that.
    scene.until(lambda: _shut(scene, "e1"), 10.0)
    third = scene.publish()
    took = scene.until(lambda: scene.current(third, ["e0"]), 10.0)
    assert took <= scene.world.deadlines.abort + 3.0 < 6.0
    assert not scene.job.publications[third.id].doc.reason
    scene.world.closed.clear()
    scene.until(lambda: scene.current(third), 30.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_was_late_is_served_before_one_who_computes(seed: int) -> None:
    """One engine is slow to plan, and left behind; then the only other one is found to compute for long."""
    scene = Scene(seed, engines=(2, 1), late_after=1.0)
    scene.world.dull.add("e0")
    scene.world.closed.add("e1")
    publication = scene.publish()
    scene.until(lambda: _shut(scene, "e1"), 10.0)
    scene.world.dull.clear()
    scene.until(lambda: scene.state(publication) is PublicationState.COMMITTED, 20.0)
    assert _shut(scene, "e1") or not scene.current(publication, ["e1"])
    scene.world.closed.clear()
    scene.until(lambda: scene.current(publication), 60.0)


def _hang(scene: Scene, group: str) -> Mover:
    """One mover of a group hangs in the kernel, in the middle of a transfer."""
    scene.in_the_middle()
    mover = scene.movers(f"{group}-")[0]
    mover.hang()
    return mover


def _patience(scene: Scene) -> float:
    """What a mover that is never proved dead may cost the others."""
    d = scene.world.deadlines
    noticed = d.mover_silent + d.stall  # by its watchdog; or by peers, if it is none that beats
    return noticed + d.mover_silent + d.abort + d.proof_of_death + 2 * d.beat + 4.0


@pytest.mark.parametrize("seed", SEEDS)
def test_others_go_on_without_a_mover_that_is_never_proved_dead(seed: int) -> None:
    scene = Scene(seed, engines=(2, 2, 1))
    first = scene.publish()
    scene.until(lambda: scene.current(first), 10.0)
    second = scene.publish()
    mover = _hang(scene, "e1")
    scene.until(lambda: scene.current(second, ["e0", "e2"]), _patience(scene))
    third = scene.publish()
    took = scene.until(lambda: scene.current(third, ["e0", "e2"]), 10.0)  # nobody waits for it any more
    assert took < 5.0
    assert mover.alive
    assert scene.job.groups["e1"].doc.serving_publication == first.id
    mover.come_back()
    scene.until(lambda: scene.current(third), 30.0)
    assert not mover.alive


def _planning(scene: Scene, group: str) -> Mover:
    """A mover of a group has a task and is not ready."""

    def found() -> list[Mover]:
        return [m for m in scene.movers(f"{group}-") if m.work is not None and m.work.progress.state == "starting"]

    scene.until(found, 10.0)
    return found()[0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("group", ["e1", "t"])
def test_others_go_on_without_one_that_hangs_before_it_is_ready(seed: int, group: str) -> None:
    scene = Scene(seed, sharded=False, engines=(2, 2, 1))
    first = scene.publish()
    mover = _planning(scene, group)
    mover.hang()
    others = ["e0", "e2"] if group == "e1" else ["e0", "e1", "e2"]
    d = scene.world.deadlines
    scene.until(lambda: scene.current(first, others), d.mover_silent + d.proof_of_death + 4.0)
    scene.world.supervisors[-1].die()
    scene.world.start_supervisor()
    second = scene.publish()
    scene.until(lambda: scene.current(second, others), d.reregister + 5.0)
    assert mover.alive
    mover.come_back()
    scene.until(lambda: scene.current(second), 30.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_restarted_supervisor_goes_on_without_it_too(seed: int) -> None:
    scene = Scene(seed, engines=(2, 1), late_after=20.0)  # a new term does not know yet who is late
    publication = scene.publish()
    mover = _hang(scene, "e0")
    scene.until(lambda: scene.current(publication, ["e1"]), _patience(scene))
    scene.world.supervisors[-1].die()
    scene.world.start_supervisor()
    second = scene.publish()
    scene.until(lambda: scene.current(second, ["e1"]), 25.0)
    mover.come_back()
    scene.until(lambda: scene.current(second), 30.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_source_whose_mover_is_never_proved_dead_is_replaced_by_its_replica_or_given_up(seed: int) -> None:
    scene = Scene(seed, sharded=seed % 2 == 0)
    first = scene.publish()
    scene.until(lambda: scene.current(first), 10.0)
    second = scene.publish()
    mover = _hang(scene, "t")
    if seed % 2:
        scene.until(lambda: scene.current(second), _patience(scene))
    else:
        scene.until(
            lambda: scene.state(second) is PublicationState.ABANDONED,
            scene.world.deadlines.orphan_hold + _patience(scene),
        )
        assert "ShardLost" in scene.job.publications[second.id].doc.reason
    mover.come_back()
    third = scene.publish()
    scene.until(lambda: scene.current(third), 30.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_end_that_only_a_dead_watchdog_saw_is_known_from_the_next_one(seed: int) -> None:
    scene = Scene(seed, late_after=8.0)
    publication = scene.publish()
    scene.in_the_middle()
    scene.world.network.cut(["h2"], control=True, data=False)
    mover = scene.movers("e0-")[0]
    mover.die()
    scene.until(lambda: mover.mover not in scene.world.watchdogs["h2"].deck.crew.hands, 5.0)
    scene.world.watchdogs["h2"].die()
    scene.until(lambda: scene.current(publication, ["e1"]), 20.0)
    scene.world.network.heal()
    scene.until(lambda: scene.current(publication), 30.0)
