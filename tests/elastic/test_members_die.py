"""Members that are killed or frozen at each step, and what takes their place."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.elastic import rank as on
from tests.elastic.actors import Failed
from tests.elastic.world import Died, Gang, World, results, until


@pytest.fixture
def pair(world: World) -> tuple[World, Gang, Gang]:
    """A trainer gang and an engine that have joined."""
    return (world, *world.both())


# -- trainers


def test_a_gang_killed_right_after_publish_is_committed_and_installed(pair: tuple[World, Gang, Gang]) -> None:
    world, trainer, engine = pair
    trainer.publish("s1")
    engine.receive("s1")
    dead = [call.outcome() for call in trainer.begin(on.publish_and_die, "s2")]
    assert all(isinstance(d, Died) for d in dead)
    assert engine.receive("s2") == 2
    late = world.engine(1).join()
    assert late.install()["label"] == "s2", "a joiner is served by the dead gang's slots"
    trainer.replace()
    trainer.publish("s3")
    assert (engine.receive("s3"), late.receive("s3")) == (3, 3)


def test_one_rank_killed_right_after_publish(pair: tuple[World, Gang, Gang]) -> None:
    _, trainer, engine = pair
    trainer[0].do(on.publish, "s1")
    assert isinstance(trainer[1].begin(on.publish_and_die, "s1").outcome(), Died)
    assert engine.receive("s1") == 1
    assert trainer[0].do(on.committed, "s1") == 1
    trainer.replace(1)
    trainer.publish("s2")
    assert engine.receive("s2") == 2


def _deaf(state: on.State) -> None:
    """What the supervisor tells is kept back from now on, as by a slow socket."""
    core = state.m._desk.core
    state.kept["hear"], state.kept["said"] = core.hear, []

    def later(said: object) -> bool:
        state.kept["said"].append(said)
        return True

    core.hear = later  # type: ignore[method-assign, assignment]


def _hears(state: on.State) -> None:
    """All that was kept back comes now."""
    desk = state.m._desk
    with desk.changed:
        desk.core.hear = state.kept["hear"]  # type: ignore[method-assign]
        for said in state.kept["said"]:
            desk.hear(said)


def _decided(state: on.State, label: str) -> None:
    """Wait until this rank has heard what became of a publish."""
    desk, publication = state.m._desk, state.publications[label]
    with desk.changed:
        assert desk.changed.wait_for(lambda: publication.state != "offered", 10.0), "nothing was decided"


def test_without_labels_a_gang_with_a_replaced_rank_is_told_to_give_some(pair: tuple[World, Gang, Gang]) -> None:
    """By counting alone a survivor's step and a newcomer's could be taken for one."""
    world, trainer, engine = pair
    trainer.publish("s1")
    engine.receive("s1")
    trainer[1].kill()
    trainer.replace(1)
    with pytest.raises(Failed, match=r"ProtocolError.*label of its step"):
        trainer[0].do(on.publish, "s2", named=False)
    trainer.publish("s2")
    assert engine.receive("s2") == 2
    assert world.view().publications


def test_a_survivor_that_publishes_before_it_hears_of_the_new_rank(pair: tuple[World, Gang, Gang]) -> None:
    """One of them published s2 for nothing, so they count unlike. That shows by the labels of the next step, which is given up;
    from the step after it, which begins when they have heard, publishes get through. None is ever of two steps."""
    world, trainer, engine = pair
    trainer.publish("s1")
    engine.receive("s1")
    trainer[0].do(_deaf)
    trainer[1].kill()
    joining = trainer.begin_replacement(1)
    joining.done(within=1.0)  # whether it waits for the others to hear of it or not
    trainer[0].do(on.publish, "s2")
    trainer[0].do(_hears)
    joining.result()
    trainer[1].do(on.publish, "s2")
    for step in (3, 4):
        trainer.publish(f"s{step}")
        trainer.do(_decided, f"s{step}")
    world.until(lambda v: any(p.weight_version > 1 for p in v.publications.values()), "a publish gets through", 5.0)
    assert engine.install()["label"] == "s4"


@pytest.mark.parametrize("point", ["claimed", "copied"])
def test_b75_a_trainer_killed_in_the_middle_of_publish(pair: tuple[World, Gang, Gang], point: str) -> None:
    """Engines go on serving the former version whole; what was half published never shows."""
    _, trainer, engine = pair
    trainer.publish("s1")
    engine.receive("s1")
    trainer[1].arm(**{f"member_publish_{point}": "kill"})
    calls = trainer.begin(on.publish, "s2")
    assert isinstance(calls[1].outcome(), Died)
    calls[0].result()
    assert engine.version() == 1
    engine.holds("s1")
    assert engine.install()["changed"] is False
    trainer.replace(1)
    with pytest.raises(AssertionError, match=r"void|abandoned"):
        trainer[0].do(on.committed, "s2")
    trainer.publish("s3")
    assert engine.receive("s3") == 2, "a version that was never minted leaves no hole"


def test_a_gang_restarted_from_an_older_label_while_its_first_publication_moves(world: World) -> None:
    trainer = world.trainer().join()
    trainer.publish("s9")
    world.until(lambda v: [p for p in v.publications.values() if p.state == "moving"], "s9 moves: no engine is there")
    trainer.kill()
    trainer.replace()
    trainer.publish("s5")
    engine = world.engine().join()
    until(lambda: {p.label for p in world.view().publications.values() if p and p.state == "committed"} == {"s5"},
          "both were committed in turn")  # fmt: skip
    assert engine.receive("s5") == 2
    docs = {p.label: p for p in world.view().publications.values() if p}
    assert (docs["s9"].weight_version, docs["s5"].weight_version) == (1, 2)
    assert {s.member for s in docs["s9"].sources}.isdisjoint({s.member for s in docs["s5"].sources})


def test_the_older_gangs_version_is_installed_whole_before_the_newer(world: World) -> None:
    """The first gang's slots are right although both ranks were replaced and publish into slots of the same names."""
    with world.client() as client:
        client.set_policies(replace(client.policies(), min_groups=2))
    trainer, engine = world.trainer().join(), world.engine(0).join()
    trainer.publish("s9")
    world.until(lambda v: [p for p in v.publications.values() if p.state == "moving"], "s9 moves")
    trainer.kill()
    trainer.replace()
    trainer.publish("s5")
    second = world.engine(1)
    with world.client() as client:
        client.set_policies(replace(client.policies(), min_groups=1, max_lag=0))
    assert engine.receive("s9") == 1, "s5 waits: nobody may be more than 0 behind"
    assert engine.receive("s5") == 2
    second.join()
    assert second.receive("s5") == 2


# -- engine ranks


def _lost(world: World, engine: Gang, trainer: Gang, rank: int, version: int) -> None:
    """What holds after a rank was lost, and after its replacement."""
    gone = engine[rank].id
    survivor = engine[1 - rank]
    assert survivor.do(on.version) == 0, "a group without one of its ranks serves nothing"
    assert engine.doc().state in ("stale", "partial")
    engine.replace(rank)
    assert engine[rank].id != gone
    assert engine.doc().serving == 0, "nothing becomes CURRENT by joining"
    assert engine.version() == 0
    result = engine.install()
    assert (result["weight_version"], result["changed"]) == (version, True)
    assert engine.doc().state == "current"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_before_install(pair: tuple[World, Gang, Gang], rank: int) -> None:
    world, trainer, engine = pair
    trainer.publish("s1")
    trainer.committed("s1")
    gone = engine[rank].id
    asked = engine[1 - rank].begin(on.install, 1.5)
    engine[rank].kill()
    told = asked.outcome()
    assert told.kind == "RefitTimeout"
    assert gone in told.text
    _lost(world, engine, trainer, rank, 1)


@pytest.mark.parametrize(("point", "state"), [("granted", "partial"), ("pulling", "partial"), ("pulled", "partial")])
def test_a_rank_killed_in_install(pair: tuple[World, Gang, Gang], point: str, state: str) -> None:
    world, trainer, engine = pair
    trainer.publish("s1")
    engine.receive("s1")
    trainer.publish("s2")
    trainer.committed("s2")
    engine[1].arm(**{f"member_install_{point}": "kill"})
    survivor, dead = (call.outcome() for call in engine.begin(on.install))
    assert isinstance(dead, Died)
    assert survivor.kind == "GroupBroken"
    assert engine[1].id in survivor.text
    assert engine[1].id in survivor.more["members"]
    assert engine.doc().state == state
    _lost(world, engine, trainer, 1, 2)


def test_a_rank_killed_after_its_report(pair: tuple[World, Gang, Gang]) -> None:
    """Its word counts or it does not, but it is one verdict, and never a group that serves without it."""
    world, trainer, engine = pair
    trainer.publish("s1")
    trainer.committed("s1")
    engine[1].arm(member_install_reported="kill")
    survivor, dead = (call.outcome() for call in engine.begin(on.install))
    assert isinstance(dead, Died)
    if isinstance(survivor, dict):
        assert survivor["wrong"] == []
    else:
        assert survivor.kind == "GroupBroken"
        assert engine[1].id in survivor.text
    world.until(lambda v: v.groups["engine0"].serving == 0, "the group serves nothing")
    until(lambda: engine[0].do(on.version) == 0 or None, "the survivor knows")
    _lost(world, engine, trainer, 1, 1)


def test_a_rank_killed_after_the_verdict(pair: tuple[World, Gang, Gang]) -> None:
    world, trainer, engine = pair
    trainer.publish("s1")
    engine.receive("s1")
    engine[0].kill()
    until(lambda: engine[1].do(on.version) == 0 or None, "the survivor knows")
    _lost(world, engine, trainer, 0, 1)


def test_b20_a_dead_rank_does_not_block_the_others(pair: tuple[World, Gang, Gang]) -> None:
    world, trainer, first = pair
    second = world.engine(1).join()
    trainer.publish("s1")
    first.receive("s1")
    second.receive("s1")
    asked = first[1].begin(on.install, 3.0)
    first[0].kill()
    for step in (2, 3):
        trainer.publish(f"s{step}")
        assert trainer.committed(f"s{step}") == step
        assert second.receive(f"s{step}") == step
    assert not asked.done() or asked.outcome().kind in ("RefitTimeout", "GroupBroken")
    told = asked.outcome()
    assert first[0].id in told.text, "who is left hears the name of the dead"
    _lost(world, first, trainer, 0, 3)


def test_b21_one_loss_is_one_change(pair: tuple[World, Gang, Gang]) -> None:
    world, trainer, engine = pair
    other = world.engine(1).join()
    epochs = []
    for step in range(1, 6):
        trainer.publish(f"s{step}")
        other.receive(f"s{step}")
        if step == 2:
            engine[0].kill()
            world.until(lambda v: not v.groups["engine0"].whole, "the loss is known")
        epochs.append(world.view().membership_epoch)
    assert epochs == [epochs[0]] + [epochs[0] + 1] * 4
    engine.replace(0)
    assert world.view().membership_epoch == epochs[0] + 2
    engine.install()
    assert world.view().membership_epoch == epochs[0] + 2


# -- frozen


def frozen_installer(world: World) -> None:
    """A rank freezes between its looks at the slots; its ticket runs out, its slot is written twice; it wakes up."""
    trainer, engine = world.both()
    trainer.publish("s1")
    engine.receive("s1")
    trainer.publish("s2")
    trainer.committed("s2")
    engine[0].arm(member_install_pulling="stop")
    frozen, other = engine.begin(on.install)
    engine[0].stopped()
    told = other.outcome()
    assert told.kind == "GroupBroken"
    assert engine[0].id in told.text
    assert engine.doc().state == "partial"
    for step in (3, 4):
        trainer.publish(f"s{step}")
        trainer.committed(f"s{step}")
    assert engine.doc().state == "partial", "nothing but an install makes it CURRENT"
    engine[0].cont()
    woken = frozen.outcome()
    assert not isinstance(woken, dict), f"a woken rank was told CURRENT of {woken['label']}, wrong: {woken['wrong']}"
    assert woken.kind == "GroupBroken"
    assert engine.version() == 0
    assert engine.doc().state == "partial"
    assert engine.install()["label"] == "s4"
    assert engine.doc().state == "current"
    assert engine.doc().serving == 4
    assert world.evicted() == []


def test_a_frozen_installer_that_wakes_after_its_slot_was_written_again(make_world: Callable[..., World]) -> None:
    frozen_installer(make_world(install=1.5))


def test_a_survivor_hears_who_was_late_before_its_own_call_ends(pair: tuple[World, Gang, Gang]) -> None:
    _, trainer, engine = pair
    trainer.publish("s1")
    trainer.committed("s1")
    engine[0].arm(member_install_pulling="stop")
    frozen, other = engine.begin(on.install, 3.0)
    told = other.outcome()
    assert told.kind == "GroupBroken"
    assert engine[0].id in told.text
    engine[0].cont()
    assert frozen.outcome().kind in ("GroupBroken", "RefitTimeout")
    assert engine.version() == 0
    assert engine.install()["weight_version"] == 1


def test_torn_bytes_are_seen_by_the_generation(pair: tuple[World, Gang, Gang]) -> None:
    """The ticket is still out when the sleeper wakes: only the generation tells that its slot was written again."""
    torn_pull(*pair)


def torn_pull(world: World, trainer: Gang, engine: Gang) -> None:
    trainer.publish("s1")
    trainer.committed("s1")
    path = world.folder / "go"
    engine[0].arm(member_install_pulling={"wait": str(path)})
    engine[1].arm(member_install_pulling={"wait": str(path)})
    calls = engine.begin(on.install, 20.0)
    until(lambda: Path(f"{path}.reached").exists() or None, "both are about to pull")
    # A trainer that obeys nobody writes into the slot that is being read.
    trainer.do(_overwrite, "s2")
    path.touch()
    for told in [call.outcome() for call in calls]:
        assert not isinstance(told, dict), f"CURRENT for {told['label']!r} with wrong bytes in {told['wrong']}"
        assert told.kind == "GroupBroken"
        assert "written again" in told.text
    assert engine.doc().state == "partial"


def _overwrite(state: on.State, label: str) -> None:
    """Write the slot that was published, as a trainer would that takes it for free."""
    publisher = state.m._publisher
    assert publisher is not None
    assert publisher._arena is not None
    on.values.fill(state.layouts["source"], state.tensors["source"], state.at.rank, on.content(label))
    for slot in range(2):
        publisher._filler.describe()
        publisher._filler.fill(publisher._arena, slot)


# -- others


def _fork(state: on.State) -> int:
    """A child as a data loader forks it: it works a little and goes."""
    child = os.fork()
    if child == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _fork_that_ends_as_python_does(state: on.State) -> int:
    child = os.fork()
    if child == 0:
        state.m._detach(graceful=True)  # what a child that closes what it inherited does
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("fork", [_fork, _fork_that_ends_as_python_does])
def test_a_forked_childs_end_is_not_the_members(
    pair: tuple[World, Gang, Gang], fork: Callable[[on.State], int]
) -> None:
    world, trainer, engine = pair
    watchdog = world.watchdog()
    assert trainer.do(fork) == [7, 7]
    assert engine.do(fork) == [7, 7]
    trainer.publish("s1")
    assert engine.receive("s1") == 1
    assert world.evicted() == []
    assert world.watchdog().pid == watchdog.pid


def _spawn_heir(_: on.State) -> int:
    """A child that holds all that was inherited, and sleeps."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


def test_b55_a_dead_members_child_does_not_hide_its_end(pair: tuple[World, Gang, Gang]) -> None:
    world, trainer, engine = pair
    heir = engine[0].do(_spawn_heir)
    try:
        trainer.publish("s1")
        engine.receive("s1")
        gone = engine[0].id
        engine[0].kill()
        world.until(lambda v: v.members[gone].state == "lost", "its end is seen", 5.0)
        assert Path(f"/proc/{heir}").exists(), "although its child holds every descriptor"
        engine.replace(0)
        assert engine.install()["label"] == "s1"
    finally:
        os.kill(heir, signal.SIGKILL)


def test_b33_each_install_waits_for_the_slow_rank_each_time(pair: tuple[World, Gang, Gang]) -> None:
    world, trainer, engine = pair
    for step in (1, 2, 3):
        trainer.publish(f"s{step}")
        trainer.committed(f"s{step}")
        path = world.folder / f"go{step}"
        engine[1].arm(member_install_pulling={"wait": str(path)})
        fast, slow = engine.begin(on.install)
        until(lambda at=path: Path(f"{at}.reached").exists() or None, "the slow rank pulls")
        assert not fast.done(within=1.0), "the fast rank is told nothing while the slow one pulls"
        path.touch()
        engine.check(results([fast, slow]))


def test_b57_a_held_interpreter_lock_is_not_a_death(make_world: Callable[..., World]) -> None:
    world = make_world(beat=0.3, evict=1.5, reregister=1.5, watchdog_silent=1.0)
    trainer, engine = world.both()
    trainer.publish("s1")
    engine.receive("s1")
    watchdog = world.watchdog()
    held = [gang[0].begin(on.hold_the_interpreter, 3.0) for gang in (trainer, engine)]
    assert min(results(held)) >= 2.9
    assert world.evicted() == []
    assert world.watchdog().pid == watchdog.pid, "nor does it take the watchdog for dead when it wakes"
    assert engine.version() == 1
    trainer.publish("s2")
    assert engine.receive("s2") == 2
