"""What a user writes, end to end, without faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic_reshard.bench import values
from elastic_reshard.layout import ModelLayout
from tests.elastic import rank as on
from tests.elastic.rank import State
from tests.elastic.world import Failed, Gang, World, results, until


def test_publish_commit_install_bit_exact_on_every_rank(world: World) -> None:
    trainer, engine = world.both()
    for step in range(1, 6):
        trainer.publish(f"s{step}")
        assert trainer.committed(f"s{step}") == step
        result = engine.install()
        assert (result["weight_version"], result["label"], result["changed"]) == (step, f"s{step}", True)
    again = engine.install()
    assert (again["weight_version"], again["changed"], again["nbytes"]) == (5, False, 0)
    assert world.evicted() == []


def test_a_joiner_installs_from_the_slots_while_the_others_go_on(world: World) -> None:
    trainer, first = world.trainer().join(), world.engine(0).join()
    trainer.publish("s1")
    first.receive("s1")
    before = first.doc()
    second = world.engine(1).join()
    assert second.install()["weight_version"] == 1
    assert first.doc() == before, "nobody else's install, verdict or state is touched by a joiner"
    first.holds("s1")
    assert first.version() == 1
    trainer.publish("s2")
    assert (first.receive("s2"), second.receive("s2")) == (2, 2)


def test_engines_of_other_sizes_and_a_joiner_before_anything_was_published(world: World) -> None:
    one = world.engine(0, size=1).join()
    with pytest.raises(Failed, match="nothing was committed yet") as nothing:
        one.install()
    assert nothing.value.kind == "NothingInstallable"
    trainer = world.trainer().join()
    trainer.publish("s1")
    assert one.receive("s1") == 1


def _publish_then_install(state: State, label: str) -> dict[str, Any]:
    on.publish(state, label)
    on.committed(state, label)
    return on.install(state)


def test_processes_of_both_roles(world: World) -> None:
    both = Gang(world, "both", 2, ("source", "destination")).join()
    engine = world.engine().join()
    for step in (1, 2, 3):
        result = both.check(both.do(_publish_then_install, f"s{step}"))
        assert result["weight_version"] == step
        assert engine.receive(f"s{step}") == step


def _installing(state: State) -> dict[str, Any]:
    def fill(named: Iterator[tuple[str, torch.Tensor]]) -> None:
        names = []
        for name, tensor in named:
            state.tensors["destination"][name].copy_(tensor)
            names.append(name)
        state.kept["names"] = names

    return {"tensors": None, "install": fill}


def _names(state: State) -> list[str]:
    return list(state.kept["names"])


def test_a_function_is_handed_named_tensors(world: World) -> None:
    trainer, engine = world.trainer().join(), world.engine().join(extra=_installing)
    for step in (1, 2):
        trainer.publish(f"s{step}")
        trainer.committed(f"s{step}")
        assert engine.install()["weight_version"] == step
        assert engine.do(_names) == [list(on.SHAPES)] * 2


def _failing(state: State) -> dict[str, Any]:
    given = _installing(state)

    def fill(named: Iterator[tuple[str, torch.Tensor]]) -> None:
        if state.at.rank == 1 and not state.kept.setdefault("failed", False):
            state.kept["failed"] = True
            next(named)
            raise RuntimeError("a user's fault")
        given["install"](named)

    return given | {"install": fill}


def test_a_function_that_raises_makes_its_group_partial(world: World) -> None:
    trainer, engine = world.trainer().join(), world.engine().join(extra=_failing)
    trainer.publish("s1")
    trainer.committed("s1")
    other, own = (call.outcome() for call in engine.begin(on.install))
    assert own.kind == "RuntimeError"
    assert own.text == "a user's fault"
    assert other.kind == "GroupBroken"
    assert engine[1].id in other.text
    assert "a user's fault" in other.text
    assert engine.doc().state == "partial"
    assert engine.version() == 0
    assert engine.install()["weight_version"] == 1
    assert engine.doc().state == "current"


def test_extras_and_labels_travel_and_labels_may_repeat_or_lack(world: World) -> None:
    trainer, engine = world.both()
    trainer.publish("s7", extras={"kv_scale": [1.5, 2], "note": "calibrated"})
    trainer.committed("s7")
    assert engine.install()["extras"] == {"kv_scale": [1.5, 2], "note": "calibrated"}
    trainer.publish("s7")
    assert trainer.committed("s7") == 2
    result = engine.install()
    assert (result["weight_version"], result["label"], result["extras"], result["changed"]) == (2, "s7", {}, True)


def test_events_come_in_order_to_every_listener(world: World) -> None:
    trainer, engine = world.both()
    watching = engine[0].begin(on.events, "installable")
    trainer.publish("s1")
    assert watching.result() == [("pending", 1, "s1"), ("installable", 1, "s1")]
    assert engine[1].do(on.events, "installable") == [("pending", 1, "s1"), ("installable", 1, "s1")]
    engine.install()
    watching = engine[0].begin(on.events, "partial")
    engine[1].kill()
    assert watching.result() == [("partial", 0, None)], "also for a listener that came when it served already"
    with world.client() as client:
        client.set_policies(replace(client.policies(), min_groups=2))
    watching = engine[0].begin(on.events, "abandoned")
    trainer.publish("s2")
    moving = world.until(lambda v: [p for p in v.publications.values() if p.state == "moving"], "a publication moves")
    with world.client() as client:
        client.abandon(next(k for k, p in moving.publications.items() if p.state == "moving"))
    kinds = [(kind, label) for kind, _, label in watching.result()]
    assert kinds[-2:] == [("pending", "s2"), ("abandoned", "s2")]
    with pytest.raises(Failed, match="abandoned by request") as never:
        trainer.committed("s2")
    assert never.value.kind == "PublicationAbandoned"


def test_a_broken_group_hears_partial(world: World) -> None:
    trainer, engine = world.both()
    trainer.publish("s1")
    trainer.committed("s1")
    told = world.folder / "told"
    watching = engine[0].begin(on.events, "partial", mark={"installable": str(told)})
    until(told.exists, "the engine has heard that it may install")
    engine[1].kill()
    assert [kind for kind, *_ in watching.result()] == ["pending", "installable", "partial"]


def test_slots_busy_names_who_holds_them(world: World) -> None:
    trainer, engine = world.both()
    trainer.publish("s1")
    engine.receive("s1")
    with world.client() as client:
        client.set_policies(replace(client.policies(), min_groups=2))
    trainer.publish("s2")
    world.until(lambda v: any(p.state == "moving" for p in v.publications.values()), "version 2 moves")
    refused = [call.outcome() for call in trainer.begin(on.publish, "s3", 0.5)]
    assert {r.kind for r in refused} == {"SlotsBusy"}
    for one in refused:
        assert "version 1 (committed" in " ".join(one.more["holders"])
        assert "version 2 (moving" in " ".join(one.more["holders"])
    late = trainer.begin(on.publish, "s4")
    with world.client() as client:
        client.set_policies(replace(client.policies(), min_groups=1))
    results(late)
    assert trainer.committed("s4") == 3
    assert engine.receive("s4") == 3


# -- layouts that change


def _distributed(state: State) -> dict[str, Any]:
    """Tensors as DTensors that are made anew at each publish, as a trainer's state_dict is."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Replicate as Whole
    from torch.distributed.tensor import Shard as Part

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{state.folder}/store", state.at.size)
    dist.init_process_group("gloo", store=store, rank=state.at.rank, world_size=state.at.size)
    mesh = DeviceMesh("cpu", list(range(state.at.size)))

    def tensors() -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        layout = state.layouts["source"]
        for name, local in state.tensors["source"].items():
            placement = layout[name].placements[0]
            dim = getattr(placement, "dim", None)
            found[name] = DTensor.from_local(
                local, mesh, [Whole() if dim is None else Part(dim)], run_check=False, shape=torch.Size(layout[name].shape),
                stride=torch.empty(layout[name].shape, device="meta").stride(),
            )  # fmt: skip
        return found

    return {"tensors": tensors, "layout": None}


def _relayout(state: State, layout: ModelLayout) -> None:
    state.layouts["source"] = layout
    state.tensors["source"] = on.tensors_of(layout, state.at.rank)


def test_a_changed_layout_is_examined_before_anything_is_copied(world: World) -> None:
    trainer, engine = world.trainer().join(extra=_distributed), world.engine().join()
    trainer.publish("s1")
    assert engine.receive("s1") == 1
    trainer.do(_relayout, on.model(2, turn=1))
    trainer.publish("s2")
    assert engine.receive("s2") == 2, "sharded along another dim: accepted"

    wrong = {name: shape for name, shape in on.SHAPES.items() if name != "odd"} | {"bias": ((34,), "float32", None)}
    trainer.do(_relayout, on.model(2, shapes=wrong))
    refused = [call.outcome() for call in trainer.begin(on.publish, "s3")]
    for one in refused:
        assert "LayoutError" in one.kinds
        assert "odd" in one.text
        assert "bias" in one.text
    assert engine.install() | {"seconds": 0, "install_pause": 0} == engine.install() | {
        "seconds": 0,
        "install_pause": 0,
    }
    engine.holds("s2")
    assert [p.weight_version for p in world.view().publications.values() if p] == [1, 2]

    trainer.do(_relayout, on.model(2))
    trainer.publish("s4")
    assert engine.receive("s4") == 3


# -- casts


def _half(_: State) -> dict[str, Any]:
    return {"wire_dtype": torch.bfloat16}


def _wrong_cast(state: State, label: str) -> list[str]:
    """Names of live tensors that are not the cast of the label's values."""
    found = []
    for name, layout in state.layouts["destination"].items():
        whole = on.model(1, shapes=on.SHAPES)
        full = on.tensors_of(whole, 0)
        values.fill(whole, full, 0, on.content(label))
        (box, at), *rest = layout.boxes(state.at.rank)
        assert not rest
        assert not any(at)
        wanted = full[name][tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))].to(torch.bfloat16)
        if not torch.equal(state.tensors["destination"][name].view(torch.int16), wanted.view(torch.int16)):
            found.append(name)
    return found


def test_casts_on_the_way(world: World) -> None:
    trainer = world.trainer().join(extra=_half)
    halves = {name: (shape, "bfloat16", dim) for name, (shape, _, dim) in on.SHAPES.items()}
    engine = world.engine().join(shapes=halves)
    for step in (1, 2):
        trainer.publish(f"s{step}")
        assert engine.do(on.receive) == [step, step]
        assert engine.do(_wrong_cast, f"s{step}") == [[], []]
    assert engine.do(_wrong_cast, "s1") != [[], []], "the look itself can tell versions apart"


# -- going


def test_leaving_in_good_order_leaves_what_was_published(world: World) -> None:
    trainer, engine = world.both()
    trainer.publish("s1")
    trainer.do(on.leave)
    assert engine.receive("s1") == 1
    assert engine.version() == 1
    engine.do(on.leave)
    until(lambda: world.watchdog() is None or None, "the watchdog goes when the last member has left", 5.0)


@pytest.fixture
def by_hand(make_world: Callable[..., World]) -> Iterator[World]:
    """A world whose supervisor is the command."""
    world = make_world(start=False)
    command = [sys.executable, "-c", "from elastic_reshard.cli import main; main()", "supervisor"]
    process = subprocess.Popen(
        [*command, "--job", world.job, "--port", "0", "--journal", str(world.journal), "--json"],
        env=os.environ | {"ELASTIC_RESHARD_RUNTIME": str(world.runtime)}, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            world.url = json.loads(process.stdout.readline())["url"]
            yield world
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()


def test_the_command_serves_and_the_token_is_found_in_the_runtime_folder(by_hand: World) -> None:
    trainer, engine = by_hand.trainer().join(), by_hand.engine().join()
    trainer.publish("s1")
    assert engine.receive("s1") == 1
    for gang in (trainer, engine):
        gang.do(on.leave)
