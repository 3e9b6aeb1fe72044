"""Tensors on a device (a pretended one): where arenas lie, publish and install there, and what is refused."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_reshard.arena import device_of
from elastic_reshard.arena.device import Device
from elastic_reshard.arena.host import MappedArena
from elastic_reshard.arena.pretend import TOTAL_VARIABLE, PretendDevice, PretendStream, empty, open_pretend
from elastic_reshard.arena.shared import map_memory
from elastic_reshard.arena.slots import SlotArena, SlotReader
from elastic_reshard.errors import ArenaError, JoinRefused, LayoutError
from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.member.filler import Filler
from elastic_reshard.member.memory import check_fits, with_mover
from elastic_reshard.member.puller import Origin, Puller, Request
from elastic_reshard.member.session import Group, join
from elastic_reshard.member.stage import Stage, Turns, stated
from elastic_reshard.protocol.window import Turn, Window
from tests.member.world import expected, local_of, truth, whole_of

TWO = Mesh.arange((2,))
SOURCE = ModelLayout(
    {
        "wide": TensorLayout((12, 10), "float32", TWO, (Shard(0),)),
        "odd": TensorLayout((7, 5), "bfloat16", TWO, (Shard(0),)),
        "bias": TensorLayout((9,), "float32", TWO, (Replicate(),)),
    }
)
TURNED = ModelLayout(
    {
        "wide": TensorLayout((12, 10), "float32", TWO, (Shard(1),)),
        "odd": TensorLayout((7, 5), "bfloat16", TWO, (Shard(1),)),
        "bias": TensorLayout((9,), "float32", TWO, (Replicate(),)),
    }
)


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor's elements, also of one on a pretended device."""
    found: np.ndarray[Any, Any] = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()
    return found


def on_device(model: ModelLayout, rank: int, number: int = 0) -> dict[str, torch.Tensor]:
    """A rank's tensors; one of them is a view with gaps between its rows."""
    found = {}
    for name, layout in model.items():
        shape = layout.local_shape(rank)
        assert shape is not None
        dtype = getattr(torch, layout.dtype)
        wide = (*shape[:-1], 2 * shape[-1]) if name == "wide" else shape
        found[name] = empty(wide, dtype, number)[..., : shape[-1]]
    return found


def set_to(live: Mapping[str, torch.Tensor], model: ModelLayout, rank: int, version: int) -> None:
    for name, tensor in live.items():
        part = local_of(model[name], truth(name, model[name], version), rank)
        assert part is not None
        bits(tensor)[...] = part.view(bits(tensor).dtype)


def mapped(arena: SlotArena, own: Device | None) -> SlotReader:
    """As another process would map it."""
    fd, *memory = (os.dup(fd) for fd in arena.fds)
    second = map_memory(arena.table(), memory[0] if memory else -1, own)
    return SlotReader(MappedArena(fd, for_device=second is None), arena.table(), arena.arena_id, second)


@pytest.mark.parametrize("there", [True, False], ids=["device arena", "host arena"])
@pytest.mark.parametrize("taking", [False, True], ids=["in place", "by a function"])
def test_publish_and_install_on_a_device(there: bool, taking: bool) -> None:
    device = open_pretend(0)
    origins, kept = {}, []
    for rank in range(2):
        live = on_device(SOURCE, rank)
        filler = Filler(live, SOURCE, None, rank)
        described = filler.describe()
        assert described.device is device
        arena = SlotArena(described.specs, device=device if there else None)
        kept.append((arena, device.host(arena._arena.bytes)))
        set_to(live, SOURCE, rank, 3)
        generation = filler.fill(arena, 1).generation
        set_to(live, SOURCE, rank, 9)  # what is in the slot is a copy
        reader = mapped(arena, open_pretend(1))
        if not there:
            kept.append((arena, device.host(reader._arena.bytes)))
        origins[rank] = Origin(reader, 1, generation)
    for rank in range(2):
        want = expected(TURNED, whole_of(SOURCE, TURNED, None, 3), rank)
        got: dict[str, np.ndarray[Any, Any]] = {}
        tensors = on_device(TURNED, rank)

        def take(items: Any, got: dict[str, Any] = got) -> None:
            for name, tensor in items:
                assert device_of(tensor) is device
                got[name] = bits(tensor).copy()

        puller = Puller(
            rank, tensors=None if taking else tensors, install=take if taking else None, given=TURNED,
            device=device if taking else None,
        )  # fmt: skip
        prepared = puller.check(Request(SOURCE, TURNED, origins))
        assert prepared.run() == sum(w.nbytes for w in want.values())
        assert prepared.changed() == []
        got = got or {name: bits(tensor) for name, tensor in tensors.items()}
        for name, part in want.items():
            assert got[name].tobytes() == part.tobytes(), name


@pytest.mark.parametrize("how", ["buffer in host memory", "another stream"])
def test_nothing_is_handed_out_or_ended_before_it_is_there(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that do nothing until they are waited for show a missing wait as old bytes."""
    device = open_pretend(0)
    origins = {}
    for rank in range(2):
        live = on_device(SOURCE, rank)
        set_to(live, SOURCE, rank, 3)
        filler = Filler(live, SOURCE, None, rank)
        arena = SlotArena(filler.describe().specs, device=device)
        origins[rank] = Origin(mapped(arena, device), 1, filler.fill(arena, 1).generation)
    want = expected(TURNED, whole_of(SOURCE, TURNED, None, 3), 0)
    side = PretendStream(99)
    in_host = how == "buffer in host memory"
    last: dict[str, torch.Tensor] = {}

    def take(items: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(device, "_current", side)
            for name, tensor in items:
                last.clear()
                last[name] = tensor
                if in_host:
                    assert bits(tensor).tobytes() == want[name].tobytes(), name

    puller = Puller(0, install=take, given=TURNED, device=None if in_host else device)
    puller.check(Request(SOURCE, TURNED, origins)).run()
    for name, tensor in last.items():
        assert bits(tensor).tobytes() == want[name].tobytes(), name


def test_a_cast_on_the_device() -> None:
    live = on_device(SOURCE, 0)
    bits(live["wide"])[...] = torch.full((6, 10), 1.5).view(torch.int32).numpy()
    filler = Filler(live, SOURCE, {"wide": torch.bfloat16}, 0)
    arena = SlotArena(filler.describe().specs, device=open_pretend(0))
    filler.fill(arena, 0)
    assert (arena.tensor(0, "wide") == torch.full((6, 10), 1.5, dtype=torch.bfloat16)).all()


def test_tensors_on_several_devices_are_refused() -> None:
    live = {"a": empty((3,), torch.float32, 0), "b": empty((3,), torch.float32, 1), "c": torch.zeros(3)}
    with pytest.raises(ArenaError, match=r"pretend:0: a; pretend:1: b; CPU: c"):
        Filler(live, None, None, 0).describe()


def test_cpu_tensors_beside_slots_on_a_device_are_refused_with_what_to_do() -> None:
    model = ModelLayout({"bias": TensorLayout((9,), "float32", Mesh.arange((1,)), (Replicate(),))})
    filler = Filler(on_device(model, 0), model, None, 0)
    arena = SlotArena(filler.describe().specs, device=open_pretend(0))
    origins = {0: Origin(mapped(arena, None), 0, filler.fill(arena, 0).generation)}
    with pytest.raises(ArenaError, match='stage="host"'):
        Puller(0, tensors={"bias": torch.zeros(9)}, given=model).check(Request(model, model, origins))


def test_where_arenas_lie() -> None:
    device = open_pretend(0)
    auto, host = Stage("m", "auto"), Stage("m", "host")
    assert auto.of(None) is None
    assert auto.of(device) is device
    assert host.of(device) is None
    for stage in (auto, host):
        stage.take(None)
        assert stated(None, stage) == "anytime"
        stage.take(device)
        assert stage.device is device
    assert (stated(None, auto), stated(None, host)) == ("network", "anytime")
    assert (stated("anytime", auto), stated("paused", host)) == ("anytime", "paused")
    with pytest.raises(ArenaError, match="CPU"):
        Stage("m", "device").take(None)
    with pytest.raises(ArenaError, match="pretend:0 and pretend:1"):
        auto.take(open_pretend(1))


def test_join_refuses_what_it_does_not_know() -> None:
    with pytest.raises(LayoutError, match=r"stage is one of .*not 'gpu'; window is .*not 'never'"):
        join("127.0.0.1:1", name="m", group=Group("g", 1, 0), role="source", tensors={}, stage="gpu", window="never")  # type: ignore[arg-type]


def test_a_gpu_under_mps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = PretendDevice(0)
    monkeypatch.setattr(PretendDevice, "kind", "cuda")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    Stage("m", "auto").take(gpu)
    monkeypatch.setattr("elastic_reshard.member.stage.mps_running", lambda gpu: f"somebody serves {gpu}")
    with pytest.raises(JoinRefused, match=r"somebody serves pretend:0.*killed"):
        Stage("m", "auto").take(gpu)


def test_what_does_not_fit_on_the_device_is_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOTAL_VARIABLE, str(1 << 20))
    device = PretendDevice(77)
    report = check_fits(4096, "the arena of m", device=device, on_device=1 << 19)
    assert report.get("device") == {"device": "pretend:77", "needed": 1 << 19, "free": 1 << 20, "total": 1 << 20}
    told = with_mover(report, 5)
    assert told is not None
    assert told["device"]["mover"] == 5
    with pytest.raises(ArenaError, match=r'2097152 bytes .* on pretend:77, but 1048576 of its 1048576.*stage="host"'):
        check_fits(4096, "the arena of m", device=device, on_device=2 << 20)


def test_turns_wait_for_the_mover_and_tell_when_it_is_not_outside(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "elastic_reshard")
    with Turns("m", None).idle(1.0):
        pass  # without a window nothing is to be waited for
    turns = Turns("m", Window())
    assert turns.window is not None
    mover = Turn(os.dup(turns.window.fd))
    with turns.open(time.monotonic() + 5.0):
        assert mover.enter()
        mover.leave()
    assert not mover.enter()
    assert "window.mover_inside" not in caplog.text
    with turns.idle(0.05):
        assert mover.enter()
    assert "window.mover_inside" in caplog.text
    mover.leave()
    begun = time.monotonic()
    with pytest.raises(KeyError), turns.idle(30.0):
        {}[mover.enter()]
    assert turns.window.inside, "it was open, and the mover is not waited for"
    assert time.monotonic() - begun < 5.0, "an error is not held back"
    turns.close()
    assert mover.enter()
    mover.close()
