"""Two devices of one host (pretended ones), which can map each other's memory or can't."""

from __future__ import annotations

from typing import Any

from elastic_reshard.arena.pretend import APART_VARIABLE, FABRIC_VARIABLE, empty
from tests.elastic import rank as on
from tests.elastic.test_between_hosts import MODEL, network
from tests.elastic.test_devices import carried, joined
from tests.elastic.world import Gang, Site, World


def on_its_groups_device(state: on.State) -> dict[str, Any]:
    """The trainers' tensors are on device 0, the engines' on device 1."""
    (role,) = state.at.roles
    number = int(role == "destination")
    state.tensors[role] = {n: empty(t.shape, t.dtype, number) for n, t in state.tensors[role].items()}
    return {"tensors": state.tensors[role], "window": "anytime"}


def labelled(state: on.State) -> dict[str, Any]:
    return {**on_its_groups_device(state), "domain": "nvlink"}


def domains(world: World, gang: Gang) -> set[str]:
    return {doc.where for doc in world.view().members.values() if doc is not None and doc.group == gang.name}


def test_without_peer_access_weights_go_by_movers(world: World) -> None:
    """Mapping the other device's memory is refused to the engines, as the driver would: nothing is pulled."""
    world.sites["a"] = Site(environ={APART_VARIABLE: "0-1", FABRIC_VARIABLE: "cafe/3"})
    trainer, engine = world.trainer(hosts=["a"]), world.engine(hosts=["a"])
    joined((trainer, on_its_groups_device), (engine, on_its_groups_device))
    assert (domains(world, trainer), domains(world, engine)) == ({"a..pretend-0"}, {"a..pretend-1"})
    for step in (1, 2):
        trainer.publish(f"s{step}")
        assert engine.receive(f"s{step}") == step
        engine.holds(f"s{step}")
        assert network(world) == MODEL, "what the other domain needs, once"
    assert set(carried(world)) == {"pretend"}
    late = world.engine(1, hosts=["a"])
    joined((late, on_its_groups_device))
    assert late.receive("s2") == 2
    assert network(world) == MODEL, "a joiner pulls what has landed in its domain"
    with world.client() as client:
        shown = client.hosts()["a"]
    assert (sorted(shown.domains), shown.fabric) == (["a..pretend-0", "a..pretend-1"], {"cafe/3": ["a"]})
    assert world.evicted() == []


def test_with_peer_access_they_are_pulled(world: World) -> None:
    world.sites["a"] = Site(environ={APART_VARIABLE: "0-2 1-2"})  # another device is apart
    trainer, engine = world.trainer(hosts=["a"]), world.engine(hosts=["a"])
    joined((trainer, on_its_groups_device), (engine, on_its_groups_device))
    assert domains(world, trainer) == domains(world, engine) == {"a..pretend-0"}
    trainer.publish("s1")
    assert engine.receive("s1") == 1
    engine.holds("s1")
    assert carried(world) == [], "nothing went by movers"


def test_a_domain_that_the_user_labelled_is_one(world: World) -> None:
    trainer, engine = world.trainer(hosts=["a"]), world.engine(hosts=["a"])
    world.sites["a"] = Site(environ={APART_VARIABLE: "0-2"})
    joined((trainer, labelled), (engine, labelled))
    assert domains(world, trainer) == domains(world, engine) == {"a..nvlink"}
    trainer.publish("s1")
    assert engine.receive("s1") == 1
    assert carried(world) == []
