"""Weights between hosts (labels of one machine): what goes over the network, what arrives, who need not send."""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.elastic import rank as on
from tests.elastic.stage import SETTINGS
from tests.elastic.world import World, until

# Bytes of the model: what a host needs whose engine holds all of it.
MODEL = sum(math.prod(shape) * (2 if dtype == "bfloat16" else 4) for shape, dtype, _ in on.SHAPES.values())


def network(world: World) -> float:
    """Bytes that went over the network for the newest publication."""
    view = world.view()
    newest = max((p for p in view.publications.values() if p is not None), key=lambda p: p.weight_version)
    return newest.metrics["bytes_network"]


def test_weights_reach_another_host(world: World) -> None:
    trainer, engine = world.trainer(hosts=["a"]), world.engine(hosts=["b"])
    world.join(trainer, engine)
    for step in (1, 2, 3):
        trainer.publish(f"s{step}")
        assert engine.receive(f"s{step}") == step
        assert network(world) == MODEL, "what the host needs, once, although one tensor is on both of its ranks"
    assert world.evicted() == []
    assert world.view().transfers == {}


def test_hosts_of_unequal_members(world: World) -> None:
    """A gang and an engine over two hosts each, one shared; another engine beside the trainers, and one apart."""
    trainer = world.trainer(3, hosts=["a", "a", "b"])
    engines = [
        world.engine(0, 3, hosts=["b", "c", "c"]),
        world.engine(1, 2, hosts=["a"]),
        world.engine(2, 1, hosts=["d"]),
    ]
    world.join(trainer, *engines)
    for step in (1, 2):
        trainer.publish(f"s{step}")
        for engine in engines:
            assert engine.receive(f"s{step}") == step


def test_a_joiner_is_caught_up_by_peers(world: World) -> None:
    trainer, engine = world.trainer(hosts=["a"]), world.engine(hosts=["b"])
    world.join(trainer, engine)
    trainer.publish("s1")
    engine.receive("s1")
    before = network(world)
    late = world.engine(1, hosts=["c"]).join()
    assert late.receive("s1") == 1
    senders = set(world.events("transfer.forming")[-1].fields["members"])
    assert not senders & {actor.id for actor in trainer}, "the trainers send nothing"
    assert network(world) == 2 * before, "what the joiner needs, once"
    trainer.publish("s2")
    assert engine.receive("s2") == late.receive("s2") == 2


def test_a_drain_between_two_refits_breaks_nothing(make_world: Callable[..., World]) -> None:
    """Its members are told, leave, and nothing of their host is left."""
    world = make_world(**SETTINGS)
    trainer, engine, other = world.trainer(hosts=["a"]), world.engine(hosts=["b"]), world.engine(1, hosts=["c"])
    world.join(trainer, engine, other)
    trainer.publish("s1")
    assert (engine.receive("s1"), other.receive("s1")) == (1, 1)
    leaving = other.begin(on.leave_when_asked)
    with world.client() as client:
        assert client.drain("c", within=20.0).done
    assert [call.outcome() for call in leaving] == [1, 1], "they served until they left"
    trainer.publish("s2")
    assert engine.receive("s2") == 2
    assert world.events("transfer.breaking") == []
    until(lambda: world.watchdog("c") is None or None, "the drained host's watchdog has gone")
