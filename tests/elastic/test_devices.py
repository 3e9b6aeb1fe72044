"""Members whose tensors are on a device (a pretended one), on labelled hosts: arenas on it, networks from it, and turns with
the mover."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from elastic_reshard.arena import device_of
from elastic_reshard.arena.pretend import empty
from elastic_reshard.protocol.deadlines import Policies
from tests.elastic import rank as on
from tests.elastic.stage import kill
from tests.elastic.test_between_hosts import MODEL, network
from tests.elastic.world import Actor, Died, Gang, World, results, until

# -- in the members


def on_device(state: on.State, **more: Any) -> dict[str, Any]:
    """The rank's tensors, on the pretended device of its rank's number."""
    (role,) = state.at.roles
    state.tensors[role] = {n: empty(t.shape, t.dtype, state.at.rank) for n, t in state.tensors[role].items()}
    return {**more, "tensors": state.tensors[role]}


def paused(state: on.State) -> dict[str, Any]:
    return on_device(state, window="paused")


def anytime(state: on.State) -> dict[str, Any]:
    return on_device(state, window="anytime")


def in_host_memory(state: on.State) -> dict[str, Any]:
    return on_device(state, stage="host")


def memory(state: on.State) -> Any:
    """What the member says of memory; its live tensors are where they were."""
    assert all(device_of(t) is not None for t in state.tensors[state.at.roles[0]].values() if t.numel())
    return state.m.memory


def wait_until_committed(state: on.State, label: str, timeout: float = 20.0) -> int:
    """Waiting for it lets the mover work; then it is outside."""
    version = on.committed(state, label, timeout)
    assert not _inside(state)
    return version


def idle_until_installable(state: on.State) -> None:
    """Let the mover work until there is something to install; then it is outside."""
    with state.m.idle(20.0):
        assert on.events(state, "installable", 20.0)[-1][0] == "installable"
    assert not _inside(state)


def in_and_out(state: on.State) -> float:
    """Idle until its mover is at work, then not any more; how long the mover took to be outside."""
    with state.m.idle(20.0):
        deadline = time.monotonic() + 20.0
        while not _inside(state):
            assert time.monotonic() < deadline, "its mover comes in"
            time.sleep(0.002)
        time.sleep(0.05)  # what it would launch is launched
        begun = time.monotonic()
    assert not _inside(state)
    return time.monotonic() - begun


def _inside(state: on.State) -> bool:
    window = state.m._desk.turns.window
    assert window is not None
    return window.inside


# -- in the test


def joined(*gangs: tuple[Gang, Callable[..., Any] | None]) -> None:
    """All join at the same time, each gang in its way."""
    seats = [(actor, gang.seat(rank), extra) for gang, extra in gangs for rank, actor in enumerate(gang)]
    calls = [actor.begin(on.join, seat, extra=extra) for actor, seat, extra in seats]
    for (actor, _, _), told in zip(seats, results(calls), strict=True):
        actor.id = told["id"]


def waits_for_its_member(world: World, *actors: Actor) -> None:
    """Wait until the movers of these say that they wait for their own members, and have moved nothing."""

    def all_wait() -> bool | None:
        with world.client() as client:
            movers = {m: said for host in client.hosts().values() for m, said in host.movers.items()}
        mine = [movers[actor.id] for actor in actors if actor.id in movers]
        waiting = [said for said in mine if said.waits is not None and said.waits[0] == said.member]
        assert all(said.cells == said.sent == said.received == 0 for said in waiting)
        return len(waiting) == len(actors) or None

    until(all_wait, "movers wait for the windows of their members")


def waits_for_window(world: World, busy: Gang, *actors: Actor) -> None:
    """Wait until the movers of these say that they wait for windows of that gang."""
    shut = {actor.id for actor in busy}

    def all_wait() -> bool | None:
        with world.client() as client:
            movers = {m: said for host in client.hosts().values() for m, said in host.movers.items()}
        mine = [movers[actor.id] for actor in actors if actor.id in movers]
        waiting = [said for said in mine if said.window and said.waits is not None and said.waits[0] in shut]
        return len(waiting) == len(actors) or None

    until(all_wait, "movers wait for the windows of those who compute")


def carried(world: World) -> list[str]:
    """The networks of all transfers."""
    return [e.fields["network"] for e in world.events("transfer.forming")]


def test_devices_a_closed_window_and_a_gang_killed_after_publish(world: World) -> None:
    trainer, engine = world.trainer(hosts=["a"]), world.engine(hosts=["b"])
    world.join(trainer, engine, extra=on_device)
    trainer.publish("s1")
    receiving = engine.begin(on.receive)  # with its window open
    waits_for_its_member(world, *trainer)
    assert trainer.do(wait_until_committed, "s1") == [1, 1]
    assert results(receiving) == [1, 1]
    engine.holds("s1")
    assert network(world) == MODEL, "what the host needs, once"
    own, landing = trainer.do(memory)[1], engine.do(memory)[1]
    assert own["device"]["device"] == landing["device"]["device"] == "pretend:1"
    assert min(own["device"]["needed"], landing["device"]["needed"]) > 0
    assert own["needed"] == 2 * 4096, "in host memory are the words of two slots"
    assert landing["device"]["mover"] > 0, "its mover has staged on the device, and says how much that takes"
    # Its windows are closed for ever; what it had on its devices is its watchdog's.
    dead = [call.outcome() for call in trainer.begin(on.publish_and_die, "s2")]
    assert all(isinstance(d, Died) for d in dead)
    assert engine.receive("s2") == 2
    assert carried(world) == ["pretend", "pretend"]
    assert world.events("transfer.breaking") == world.events("network.fallback") == []


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_movers_stay_off_their_devices_while_a_peer_computes(make_world: Callable[..., World], seconds: float) -> None:
    """One engine computes, for longer than a stall at last: the other members get their devices back at once, nothing is
    launched that waits for it, and nobody is blamed. Then a mover is killed when all were told to go, before they launch."""
    world = make_world(hooks={}, stall=3.0, form=60.0, late_after=120.0)
    trainer, busy, other = world.trainer(hosts=["a"]), world.engine(0, hosts=["b"]), world.engine(1, hosts=["c"])
    joined((trainer, on_device), (busy, on_device), (other, on_device))
    trainer.publish("s0")  # after which all have their landing arenas, and one transfer is for both engines
    received = [*trainer.begin(on.committed, "s0", 60.0), *busy.begin(on.receive, 60.0), *other.begin(on.receive, 60.0)]
    assert results(received) == [1] * 6
    trainer.publish("s1")
    receiving = other.begin(on.receive, 60.0)
    assert max(trainer.do(in_and_out)) < 2.0, "who waits for a peer's window has nothing on the device"
    waiting = trainer.begin(wait_until_committed, "s1", 60.0)
    waits_for_window(world, busy, *trainer, *other)
    time.sleep(seconds)
    waits_for_window(world, busy, *trainer, *other)
    assert (busy.receive("s1"), results(receiving), results(waiting)) == (2, [2, 2], [2, 2])
    other.holds("s1")
    assert world.events("transfer.breaking") == world.events("group.left_behind") == []
    hold = world.hold("mover.round")
    trainer.publish("s2")
    waiting = [*trainer.begin(on.committed, "s2", 60.0), *busy.begin(on.receive, 60.0), *other.begin(on.receive, 60.0)]
    kill(*hold.has(busy[1].id).values())
    hold.release()
    assert results(waiting) == [3] * 6
    busy.holds("s2")
    other.holds("s2")
    assert len(world.events("transfer.breaking")) == 1, "one loss is one rebuild"
    assert set(carried(world)) == {"pretend"}
    assert world.evicted() == []


def test_nobody_waits_long_for_a_window(make_world: Callable[..., World]) -> None:
    """Device arenas over gloo. One engine computes for longer than others wait: it is left behind, and not a byte moves to it
    before it is idle."""
    world = make_world(network="gloo")
    trainer, busy, other = world.trainer(hosts=["a"]), world.engine(0, hosts=["b"]), world.engine(1, hosts=["c"])
    joined((trainer, on_device), (busy, paused), (other, on_device))
    trainer.publish("s1")
    receiving = busy.begin(on.receive)
    assert other.receive("s1") == 1
    assert results(receiving) == [1, 1]
    with world.client() as client:
        client.set_policies(Policies(network="gloo", late_after=1.0))
    trainer.publish("s2")
    waits_for_its_member(world, *busy)
    assert other.receive("s2") == 2
    doc = next(p for p in world.view().publications.values() if p is not None and p.weight_version == 2)
    assert {entry.host for entry in doc.landed} == {"c"}, "nothing has come where the window is closed"
    broken = [e.fields["reason"] for e in world.events("transfer.breaking")]
    assert any("the window of engine0" in why for why in broken), "it was left behind for its window"
    assert not any("no cell" in why for why in broken), "which is no stall"
    busy.do(idle_until_installable)
    assert busy.install()["label"] == "s2"
    assert set(carried(world)) == {"gloo"}
    assert world.evicted() == []


def test_host_arenas_of_devices_and_members_without_one(world: World) -> None:
    trainer, engine = world.trainer(hosts=["a"]), world.engine(hosts=["b"])
    joined((trainer, in_host_memory), (engine, on_device))
    trainer.publish("s1")
    assert engine.receive("s1") == 1
    assert carried(world) == ["pretend"], "through staging on the device"
    world.engine(1, hosts=["c"]).join()  # of the CPU
    other = world.engine(2, hosts=["d"]).join()
    trainer.publish("s2")
    assert (engine.receive("s2"), other.receive("s2")) == (2, 2)
    assert carried(world)[-1] == "gloo"
    assert "cannot" in world.events("network.fallback")[-1].fields["why"]
