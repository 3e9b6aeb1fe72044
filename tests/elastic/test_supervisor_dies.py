"""The supervisor is killed, frozen and replaced at each step: it goes on within two seconds of being back, and no version is
lost, given twice or skipped. Without it groups serve what they have."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic import rank as on
from tests.elastic.proxy import Switch
from tests.elastic.world import Call, Gang, World, results, until

BACK = 2.0  # seconds from being back to going on


@pytest.fixture
def pair(world: World) -> tuple[World, Gang, Gang]:
    """A trainer gang and an engine that serve version 1."""
    trainer, engine = world.both()
    trainer.publish("s1")
    engine.receive("s1")
    return world, trainer, engine


class Versions:
    """That versions go up by one, each for one label."""

    def __init__(self, pair: tuple[World, Gang, Gang]) -> None:
        self.world, self.trainer, self.engine = pair
        self.last = 1
        self.terms = self.world.term

    def step(self, label: str) -> None:
        """One more publish comes whole to the engine."""
        self.trainer.publish(label)
        self.arrived(label)

    def arrived(self, label: str) -> None:
        """What was published is committed as the next version, and installed."""
        self.last += 1
        assert self.trainer.committed(label) == self.last
        assert self.engine.receive(label) == self.last

    def restarted(self, port: int | None = None) -> float:
        """The supervisor is back, on its journal, in the next term; the time from which it must go on. port: 0: another."""
        self.world.start_supervisor(port=port)
        assert self.world.term == self.terms + 1
        self.terms += 1
        return time.monotonic()

    def ended(self) -> None:
        """What the supervisor and the journal know in the end."""
        world = self.world
        known = sorted(p.weight_version for p in world.view().publications.values() if p)
        assert known == list(range(1, self.last + 1))
        assert world.journaled()["weight_version"] == self.last
        assert world.evicted() == []


def in_time(back: float) -> None:
    """It went on in time."""
    assert time.monotonic() - back <= BACK


def test_killed_before_anything_is_minted(pair: tuple[World, Gang, Gang]) -> None:
    versions = Versions(pair)
    world, trainer, _ = pair
    trainer[0].do(on.publish, "s2")
    world.kill_supervisor()
    trainer[1].do(on.publish, "s2")
    back = versions.restarted()
    versions.arrived("s2")
    in_time(back)
    versions.step("s3")
    versions.ended()


@pytest.mark.parametrize("point", ["journaled", "told"])
def test_killed_when_it_has_written_or_told_a_commit(pair: tuple[World, Gang, Gang], point: str) -> None:
    """Minted and committed in one step here; whether on disk only, or queued for its hosts too."""
    versions = Versions(pair)
    world, trainer, _ = pair
    supervisor = world.supervisor
    assert supervisor is not None
    supervisor.arm(**{f"supervisor_{point}": "kill"})
    trainer.publish("s2")
    supervisor.ended()
    world.supervisor = None
    assert world.journaled()["weight_version"] == (2 if point == "journaled" else world.journaled()["weight_version"])
    back = versions.restarted()
    versions.arrived("s2")
    in_time(back)
    versions.step("s3")
    versions.ended()


def test_killed_between_mint_and_commit(world: World) -> None:
    trainer = world.trainer().join()
    trainer.publish("s1")
    world.until(lambda v: [p for p in v.publications.values() if p.state == "moving"], "it moves: no engine is there")
    world.kill_supervisor()
    engine = world.engine()
    joining = [actor.begin(on.join, engine.seat(rank)) for rank, actor in enumerate(engine)]
    world.start_supervisor()
    back = time.monotonic()
    results(joining)
    assert engine.receive("s1") == 1
    in_time(back)
    assert world.journaled()["weight_version"] == 1


def test_killed_when_everybody_knows(pair: tuple[World, Gang, Gang]) -> None:
    versions = Versions(pair)
    world, trainer, engine = pair
    trainer.publish("s2")
    trainer.committed("s2")
    world.kill_supervisor()
    asked = engine.begin(on.install)
    assert not asked[0].done(within=0.2)
    back = versions.restarted()
    assert engine.check(results(asked))["weight_version"] == 2
    in_time(back)
    versions.last = 2
    versions.step("s3")
    versions.ended()


def _held(world: World, engine: Gang, point: str, ranks: tuple[int, ...]) -> tuple[Path, list[Call]]:
    """An install in which some ranks wait at a point."""
    path = world.folder / "go"
    for rank in ranks:
        engine[rank].arm(**{f"member_install_{point}": {"wait": str(path)}})
    calls = engine.begin(on.install)
    until(lambda: Path(f"{path}.reached").exists() or None, f"somebody is at {point}")
    return path, calls


@pytest.mark.parametrize("ranks", [(0, 1), (0,)], ids=["the ticket is out", "one rank has pulled"])
def test_killed_in_an_install(pair: tuple[World, Gang, Gang], ranks: tuple[int, ...]) -> None:
    versions = Versions(pair)
    world, trainer, engine = pair
    trainer.publish("s2")
    trainer.committed("s2")
    path, calls = _held(world, engine, "granted", ranks)
    world.kill_supervisor()
    back = versions.restarted()
    path.touch()
    assert engine.check(results(calls))["weight_version"] == 2
    in_time(back)
    versions.last = 2
    versions.step("s3")
    versions.ended()


def test_killed_when_one_rank_was_told_its_verdict(pair: tuple[World, Gang, Gang]) -> None:
    """The other's process is stopped with the verdict in its socket, or not even there."""
    versions = Versions(pair)
    world, trainer, engine = pair
    trainer.publish("s2")
    trainer.committed("s2")
    engine[0].arm(member_install_reported="stop")
    stopped, told = engine.begin(on.install)
    engine[0].stopped()
    assert told.result()["weight_version"] == 2
    world.kill_supervisor()
    back = versions.restarted()
    engine[0].cont()
    assert stopped.result()["weight_version"] == 2
    in_time(back)
    assert engine.version() == 2
    world.until(lambda v: v.groups["engine0"].state == "current", "the supervisor knows what is served")
    versions.last = 2
    versions.step("s3")
    versions.ended()


def without_supervisor(world: World, trainer: Gang, engine: Gang) -> None:
    """Groups serve on; calls end within their deadlines, with errors that say why."""
    trainer.publish("s1")
    engine.receive("s1")
    world.kill_supervisor()
    trainer.publish("s2")  # a local copy; it is kept
    begun = time.monotonic()
    waiting = trainer.begin(on.committed, "s2", 1.0)
    asking = engine.begin(on.install, 1.0)
    for call in [*waiting, *asking]:
        told = call.outcome(limit=4.0)
        assert told.kind == "RefitTimeout"
        assert "the supervisor cannot be reached now (groups go on serving what they have)" in told.text
    assert time.monotonic() - begun < 3.0
    told = engine[0].begin(on.receive, 0.5).outcome(limit=4.0)
    assert "the supervisor cannot be reached" in told.text
    assert engine.version() == 1, "without a supervisor it serves what it has"
    engine.holds("s1")


def test_without_a_supervisor_groups_serve_on(world: World) -> None:
    trainer, engine = world.both()
    without_supervisor(world, trainer, engine)
    world.start_supervisor()
    assert engine.receive("s2") == 2


def _frozen(world: World, seconds: float) -> None:
    trainer, engine = world.both()
    trainer.publish("s1")
    engine.receive("s1")
    epoch = world.view().membership_epoch
    supervisor = world.supervisor
    assert supervisor is not None
    supervisor.stop()
    trainer.publish("s2")
    asked = engine.begin(on.install, seconds + 20.0)
    assert not asked[0].done(within=seconds), "it is frozen"
    supervisor.cont()
    for result in results(asked):
        assert result["weight_version"] in (1, 2)
    assert engine.install()["weight_version"] == 2
    assert world.evicted() == []
    assert world.view().membership_epoch == epoch
    assert world.events("member.forfeit") + world.events("host.silent") == []


def test_frozen_and_continued_evicts_nobody(make_world: Callable[..., World]) -> None:
    _frozen(make_world(beat=0.3, evict=1.5, reregister=1.5), 3.0)


@pytest.mark.long
def test_frozen_for_ten_seconds_and_continued_evicts_nobody(world: World) -> None:
    _frozen(world, 10.0)


@pytest.mark.long
def test_killed_ten_times_in_a_row(pair: tuple[World, Gang, Gang]) -> None:
    versions = Versions(pair)
    world, trainer, _ = pair
    for step in range(2, 12):
        trainer.publish(f"s{step}")
        world.kill_supervisor()
        versions.restarted()
        versions.arrived(f"s{step}")
    versions.ended()
    assert world.term == 11


def test_two_supervisors_of_one_job_are_not_both_obeyed(pair: tuple[World, Gang, Gang]) -> None:
    """The older one freezes; another takes over on its journal; the older wakes up and finds itself fenced."""
    world, trainer, engine = pair
    older = world.supervisor
    assert older is not None
    older.stop()
    world.start_supervisor(port=0)  # elsewhere: the older one's port is still taken
    newer = world.supervisor
    older.cont()
    trainer.publish("s2")
    until(lambda: older.do(_fenced), "the older one has ended by itself")
    older.kill()
    assert newer is not None
    newer.kill()
    world.start_supervisor()
    assert engine.receive("s2") == 2
    assert world.evicted() == []


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_one_of_an_older_term_is_not_obeyed_when_the_network_leads_to_it_again(
    make_world: Callable[..., World],
) -> None:
    world = make_world(token="the-right-token")
    older, home = world.supervisor, world.url
    assert older is not None
    with Switch(_port(home)) as network:
        world.url = network.url
        trainer, engine = world.both()
        trainer.publish("s1")
        engine.receive("s1")
        older.stop()
        newer = world.start_supervisor(port=0)
        network.to(_port(newer))
        trainer.publish("s2")
        assert engine.receive("s2") == 2
        older.cont()
        network.to(_port(home))
        reason = until(lambda: older.do(_fenced), "the older one steps down when it hears what was obeyed")
        assert "term" in reason
        assert engine.version() == 2
        network.to(_port(newer))
        trainer.publish("s3")
        assert engine.receive("s3") == 3
        assert trainer.do(_term) == engine.do(_term) == [2, 2]
        older.kill()
        for gang in (engine, trainer):
            gang.do(on.leave)


def _term(state: on.State) -> int:
    return state.m._desk.core.view.term


def _fenced(state: on.State) -> str | None:
    """How this process's supervisor has ended; None while it runs."""
    from elastic_reshard.errors import Fenced

    assert state.supervisor is not None
    try:
        return "ended" if state.supervisor.wait(0) else None
    except Fenced as error:
        return str(error)


def test_it_comes_back_at_another_address(pair: tuple[World, Gang, Gang]) -> None:
    """Its place in the runtime folder tells watchdogs and members; a member may still name the old address."""
    versions = Versions(pair)
    world, _, _ = pair
    was, world.url = world.url, ""
    world.kill_supervisor()
    back = versions.restarted(port=0)
    assert world.url != was
    versions.step("s2")
    in_time(back)
    versions.ended()
