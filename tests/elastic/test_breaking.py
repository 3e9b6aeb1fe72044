"""Each promise is broken once on purpose, by a switch inside a process: the test that guards it must see it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import pytest

from tests.elastic import rank as on
from tests.elastic import test_members_die as members_die
from tests.elastic import test_supervisor_dies as supervisor_dies
from tests.elastic.world import Failed, World, until
from tests.leaks import left_behind, traces

# -- switches: functions that run in a process and break it


def _blind_to_generations(_: on.State) -> None:
    from elastic_reshard.member.puller import Prepared

    Prepared.changed = lambda self: []  # type: ignore[method-assign]


def _reports_before_it_pulls(_: on.State) -> None:
    from elastic_reshard.member.installer import Installer

    pull = Installer._pull

    def early(self: Installer, ticket: object, deadline: float, look: object) -> float:
        self._report("", 0.0, 0)
        return pull(self, ticket, deadline, look)  # type: ignore[arg-type]

    Installer._pull = early  # type: ignore[method-assign, assignment]


def _drops_what_the_dead_left(_: on.State) -> None:
    from elastic_reshard.supervisor import publishing

    publishing.nobody_has = lambda draft, doc: (  # type: ignore[assignment]
        "it is gone" if any(draft.members[s.member].gone for s in doc.sources if s.member in draft.members) else ""
    )


def _writes_no_journal(_: on.State) -> None:
    from elastic_reshard.supervisor.journal import Journal

    Journal.write = lambda *_, **__: None  # type: ignore[method-assign]


def _waits_for_ever(_: on.State) -> None:
    from elastic_reshard.member.desk import Desk

    wait = Desk.wait
    Desk.wait = lambda self, ready, deadline, late: wait(self, ready, deadline + 60.0, late)  # type: ignore[method-assign]


def _is_not_fenced(_: on.State) -> None:
    from elastic_reshard.errors import Fenced
    from elastic_reshard.supervisor.journal import Journal

    write = Journal.write

    def wild(self: Journal, *args: object, **kwargs: object) -> None:
        with contextlib.suppress(Fenced):
            write(self, *args, **kwargs)  # type: ignore[arg-type]

    Journal.write = wild  # type: ignore[method-assign, assignment]


def _leaves_memory_with_a_name(_: on.State) -> None:
    def named(name: str, flags: int = 0) -> int:
        return os.open(f"/dev/shm/{name}-{os.getpid()}-{id(object())}", os.O_RDWR | os.O_CREAT)

    os.memfd_create = named
    import fcntl

    control = fcntl.fcntl
    fcntl.fcntl = lambda fd, what, *rest: 0 if what == fcntl.F_ADD_SEALS else control(fd, what, *rest)  # type: ignore


def _stops_serving_with_its_supervisor(_: on.State) -> None:
    from elastic_reshard.member.desk import Desk

    wake = Desk.wake

    def lost(self: Desk) -> None:
        with self.changed:
            if self.link is not None and not self.link.connected:
                self.core.holding = None
        wake(self)

    Desk.wake = lost  # type: ignore[method-assign]


def _lets_everybody_in(_: on.State) -> None:
    import hmac

    hmac.compare_digest = lambda a, b: True  # type: ignore[assignment]


def _fits_everything(_: on.State) -> None:
    from elastic_reshard.supervisor import layouts

    layouts.fault_between = lambda source, destination: ""  # type: ignore[assignment]


# -- what the tests of a promise do


def _torn(world: World, switch: Callable[[on.State], None] | None) -> None:
    trainer, engine = world.trainer(), world.engine()
    if switch is not None:
        engine.do(switch)
    members_die.torn_pull(world, trainer.join(), engine.join())


def _reported_early(world: World, switch: Callable[[on.State], None] | None) -> None:
    """Rank 0 hangs before it has pulled anything: nobody may be told CURRENT."""
    trainer, engine = world.both()
    if switch is not None:
        engine[0].do(switch)
    trainer.publish("s1")
    trainer.committed("s1")
    engine[0].arm(member_install_pulling="stop")
    _, other = engine.begin(on.install, 3.0)
    engine[0].stopped()
    told = other.outcome()
    assert not isinstance(told, dict), "CURRENT although one rank has not pulled"


def _dead_gang(world: World, switch: Callable[[on.State], None] | None) -> None:
    trainer, engine = world.both()
    trainer.do(on.publish, "s1")
    trainer.committed("s1")
    trainer.kill()
    assert engine.install(5.0)["weight_version"] == 1


def _restarted(world: World, switch: Callable[[on.State], None] | None) -> None:
    trainer, engine = world.both()
    trainer.publish("s1")
    engine.receive("s1")
    world.kill_supervisor()
    world.start_supervisor()
    trainer.publish("s2")
    assert engine.do(on.receive, 5.0) == [2, 2]


def _deadlines(world: World, switch: Callable[[on.State], None] | None) -> None:
    engine = world.engine().join()
    if switch is not None:
        engine[0].do(switch)
    assert engine[0].begin(on.install, 1.0).outcome(limit=4.0).kind == "RefitTimeout"


def _older_term(world: World, switch: Callable[[on.State], None] | None) -> None:
    """Of two supervisors on one journal the older one cannot go on."""
    trainer, older = world.trainer().join(), world.supervisor
    assert older is not None
    older.stop()
    world.start_supervisor(port=0)
    older.cont()
    trainer.publish("s1")
    try:
        until(lambda: older.do(supervisor_dies._fenced), "the older one has ended by itself", 3.0)
    finally:
        older.kill()


def _left(world: World, switch: Callable[[on.State], None] | None) -> None:
    before = traces()
    trainer = world.trainer(size=1)
    if switch is not None:
        trainer.do(switch)
    trainer.join()
    trainer.kill()
    segments = [f for f in left_behind(before, 0.5) if f.startswith("shared memory")]
    for found in segments:
        os.unlink(found.removeprefix("shared memory: "))
    assert not segments


def _alone(world: World, switch: Callable[[on.State], None] | None) -> None:
    trainer, engine = world.trainer().join(), world.engine()
    if switch is not None:
        engine.do(switch)
    engine.join()
    supervisor_dies.without_supervisor(world, trainer, engine)


def _token(world: World, switch: Callable[[on.State], None] | None) -> None:
    engine = world.engine(size=1)
    told = engine[0].begin(on.join, engine.seat(0, token="some-other-token"), deadline=5.0).outcome()
    assert isinstance(told, Failed), "a wrong token was let in"
    assert told.kind == "Unauthorized"


def _unlike(world: World, switch: Callable[[on.State], None] | None) -> None:
    world.trainer().join()
    engine = world.engine()
    wrong = on.SHAPES | {"wide": ((48, 41), "float32", 0)}
    calls = [actor.begin(on.join, engine.seat(rank), shapes=wrong) for rank, actor in enumerate(engine)]
    for call in calls:
        told = call.outcome()
        assert isinstance(told, Failed), "layouts that do not fit were let in"


# promise, where the switch is, the switch, what its test does, what the test says
BROKEN = [
    ("1: torn bytes", "member", _blind_to_generations, _torn, "with wrong bytes in"),
    ("1: a word before the deed", "member", _reports_before_it_pulls, _reported_early, "has not pulled"),
    (
        "2: the dead one's version",
        "supervisor",
        _drops_what_the_dead_left,
        _dead_gang,
        "NothingInstallable|void|abandoned",
    ),
    ("2: the journal", "supervisor", _writes_no_journal, _restarted, "RefitTimeout|not the same|NotAMember|== "),
    ("3: deadlines", "member", _waits_for_ever, _deadlines, "did not end install in 4.0 s"),
    ("4: older terms", "supervisor", _is_not_fenced, _older_term, "waited 3.0 s for: the older one"),
    ("5: nothing is left", "member", _leaves_memory_with_a_name, _left, "shared memory"),
    ("7: serving on its own", "member", _stops_serving_with_its_supervisor, _alone, "it serves what it has"),
    ("8: the token", "supervisor", _lets_everybody_in, _token, "was let in"),
    ("9: layouts", "supervisor", _fits_everything, _unlike, "were let in"),
]


@pytest.mark.long
@pytest.mark.parametrize(("place", "switch", "scenario", "says"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_breaking_a_promise_is_seen(
    make_world: Callable[..., World],
    place: str,
    switch: Callable[[on.State], None],
    scenario: Callable[[World, Callable[[on.State], None] | None], None],
    says: str,
) -> None:
    world = make_world(start=False, token="the-right-token")
    world.start_supervisor(switch if place == "supervisor" else None)
    with pytest.raises(AssertionError, match=says):
        scenario(world, switch if place == "member" else None)
    world.abandoned = True


@pytest.mark.long
@pytest.mark.parametrize("scenario", dict.fromkeys(b[3] for b in BROKEN), ids=lambda s: s.__name__)
def test_unbroken_it_holds(
    make_world: Callable[..., World], scenario: Callable[[World, Callable[[on.State], None] | None], None]
) -> None:
    """The same scenarios without a switch, so that none of them fails for another reason."""
    scenario(make_world(token="the-right-token"), None)
