"""Whose device memory (a pretended device's) a member has mapped, by the kernel's word."""

from __future__ import annotations

from pathlib import Path

from tests.elastic import rank as on
from tests.elastic.test_devices import joined, on_device
from tests.elastic.world import Died, World


def mapped(state: on.State) -> list[str]:
    """Members whose arenas' device memory is mapped in this process, by the kernel's word."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, label = line.partition("/memfd:elastic_reshard:pretend:")
        found |= {label.partition(":")[2].partition(" ")[0]} if "@" in label else set()
    return sorted(found)


def watch_until_quiet(state: on.State) -> list[str]:
    """Listen until nothing was said for a while."""
    return [event.kind for event in state.m.watch(timeout=1.0)]


def test_memory_of_dropped_arenas_is_unmapped_by_who_watches(world: World) -> None:
    """An engine that listens and installs nothing keeps no dead trainer's memory mapped."""
    trainer, engine = world.trainer(hosts=["a"]), world.engine(hosts=["a"])
    joined((trainer, on_device), (engine, on_device))
    first = {actor.id for actor in trainer}
    for call in trainer.begin(on.publish_and_die, "s1"):
        assert isinstance(call.outcome(), Died)
    assert engine.receive("s1") == 1
    assert all(first <= set(names) for names in engine.do(mapped))
    trainer.replace(0, 1, extra=on_device)
    second = {actor.id for actor in trainer}
    assert all(first <= set(names) for names in engine.do(mapped)), "s1 may still be installed"
    trainer.publish("s2")
    assert all("installable" in kinds for kinds in engine.do(watch_until_quiet))
    assert all(not first & set(names) for names in engine.do(mapped)), "s1 is released: nobody needs its memory"
    assert engine.receive("s2") == 2
    assert all(second <= set(names) for names in engine.do(mapped))
