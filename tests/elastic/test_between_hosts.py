"""Weights between hosts (labels of one machine): what goes over the network, what arrives, who need not send."""

from __future__ import annotations

from collections.abc import Callable

from tests.elastic.world import World, until


def distinct(world: World) -> float:
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
    assert world.evicted() == []
    assert world.view().transfers == {}


def test_hosts_of_unequal_members(world: World) -> None:
    """A gang and an engine over two hosts each, one shared; another engine beside the trainers, and one apart."""
    trainer = world.trainer(3, hosts=["a", "a", "b"])
    engines = [world.engine(0, 3, hosts=["b", "c", "c"]), world.engine(1, 2, hosts=["a"]), world.engine(2, 1, hosts=["d"])]
    world.join(trainer, *engines)
    for step in (1, 2):
        trainer.publish(f"s{step}")
        for engine in engines:
            assert engine.receive(f"s{step}") == step


def test_a_joiner_is_caught_up_by_peers(make_world: Callable[..., World]) -> None:
    world = make_world()
    trainer, engine = world.trainer(hosts=["a"]), world.engine(hosts=["b"])
    world.join(trainer, engine)
    trainer.publish("s1")
    engine.receive("s1")
    before = distinct(world)
    late = world.engine(1, hosts=["c"]).join()
    assert late.receive("s1") == 1
    over = [e for e in world.events("transfer.forming")]
    senders = set(over[-1].fields["members"])
    assert not senders & {actor.id for actor in trainer}, "the trainers send nothing"
    assert distinct(world) == 2 * before, "what the joiner needs, once"
    trainer.publish("s2")
    assert engine.receive("s2") == late.receive("s2") == 2


def test_a_leave_in_between_breaks_nothing(world: World) -> None:
    trainer, engine, other = world.trainer(hosts=["a"]), world.engine(hosts=["b"]), world.engine(1, hosts=["c"])
    world.join(trainer, engine, other)
    trainer.publish("s1")
    engine.receive("s1")
    with world.client() as client:
        client.drain("c", within=10.0, wait=False)
    until(lambda: any(kind == "leave" for kind, *_ in other[0].do(__import__("tests.elastic.rank", fromlist=["x"]).events, "leave")), "told")
    trainer.publish("s2")
    assert engine.receive("s2") == 2
    assert world.events("transfer.breaking") == []
