"""A member that computes beside others' work on its device: the rate of its matrix products and the latency of its steps,
against alone."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from elastic_reshard.bench import gpu_rank as at_device
from elastic_reshard.bench import rank as on
from elastic_reshard.bench.gpu_compute import Rates
from elastic_reshard.bench.gpu_domains import network_of
from elastic_reshard.bench.gpu_setup import GpuSetup
from elastic_reshard.bench.gpu_stage import DeviceStage, Kit
from elastic_reshard.bench.gpu_ways import Tell, Way, run_ways
from elastic_reshard.bench.play import Play
from elastic_reshard.bench.stage import Call, patience
from elastic_reshard.bench.synthetic import transformer
from elastic_reshard.errors import TransferTimeout

__all__ = ["measure"]

_INSTALLED, _CARRIED = 1 << 30, 256 << 20  # bytes of the models
_HOST_RATE = 0.95  # of alone, wanted with host arenas


def measure(setup: GpuSetup) -> dict[str, Any]:
    """Alone; beside another member's installs; and while its own versions are carried, in each kind of window."""
    found: dict[str, Any] = {}
    kinds: dict[str, Way] = {
        "beside another member's installs": lambda tell: _installs(setup, tell),
        "movers, window anytime":
        lambda tell: _carried(setup, setup.kit(window="anytime", network=setup.network), "", tell),
        "movers, window paused":
        lambda tell: _carried(setup, setup.kit(window="paused", network=setup.network), "idle", tell),
        "host arenas over gloo": lambda tell: _carried(setup, setup.kit(stage="host", network="gloo"), "", tell),
    }  # fmt: skip
    run_ways(setup.seconds, kinds, found)
    host = found["host arenas over gloo"].get("rate of alone")
    found["host arenas kept"] = None if host is None else host >= _HOST_RATE
    return found


def _against(alone: Rates, beside: Rates) -> dict[str, Any]:
    rate = beside.tflops / alone.tflops if alone.tflops else 0.0
    return {"alone": alone.to_data(), "beside": beside.to_data(), "rate of alone": round(rate, 3)}


def _seconds(setup: GpuSetup) -> float:
    return max(0.2, 2.0 * min(1.0, setup.scale * 4))


def _installs(setup: GpuSetup, tell: Tell) -> dict[str, Any]:
    """A process of its own computes while an engine's ranks pull again and again; and an idle context beside them first."""
    layouts = transformer(setup.nbytes(_INSTALLED), setup.half, 1, setup.half)
    seconds = _seconds(setup)
    place = at_device.Place(setup.device, max(1, setup.gpus) - 1)
    with DeviceStage(setup.kit()) as stage:
        bystander = stage.actor("bystander")
        alone = bystander.do(at_device.compute, place, seconds)
        tell({"alone": alone.to_data()})
        play = Play(stage, layouts, ["a"] * setup.half, [["a"] * setup.half])
        for _ in range(2):
            play.refit()
        idle = bystander.do(at_device.compute, place, seconds)
        tell({"alone": alone.to_data(), "beside idle contexts": idle.to_data(), "wrong": play.wrong})
        one = play.engines[0].do(at_device.pull_again, 3)
        each = max(1e-4, *(p["seconds"][-1] for p in one))
        calls = play.engines[0].begin(at_device.pull_again, max(3, int(1.5 * seconds / each)))
        beside = bystander.do(at_device.compute, place, seconds)
        tell(_against(alone, beside) | {"beside idle contexts": idle.to_data(), "wrong": play.wrong})
        pulled = [call.result() for call in calls]
        for engine in play.engines:
            play.look(engine)
    spent = max(sum(p["seconds"]) for p in pulled)
    return _against(alone, beside) | {
        "beside idle contexts": idle.to_data(), "pulled GB/s meanwhile":
        round(sum(p["nbytes"] * len(p["seconds"]) for p in pulled) / spent / 1e9, 1), "a pull alone ms": round(1e3 * each, 2),
        "wrong": play.wrong,
    }  # fmt: skip


def _carried(setup: GpuSetup, kit: Kit, window: str, tell: Tell) -> dict[str, Any]:
    """An engine rank computes while movers carry its versions from another host; it installs each. Rates are of the time in
    which it computes."""
    layouts = transformer(setup.nbytes(_CARRIED), 1, 1, 1)
    versions = setup.repeats(4)
    # The trainer computes nothing here; what is asked is what the engine notices.
    with DeviceStage(kit, kits={"trainer": replace(kit, window="anytime")}, late_after=60.0) as stage:
        play = Play(stage, layouts, ["a"], [["b"]])
        for _ in range(2):
            play.refit()
        engine = play.engines[0]
        place = stage.place(engine, 0)
        alone = engine[0].do(at_device.compute, place, _seconds(setup))
        found: dict[str, Any] = {
            "alone": alone.to_data(),
            "GB each": round(layouts.nbytes / 1e9, 3),
            "wrong": play.wrong,
        }
        call = engine[0].begin(at_device.compute_and_receive, place, patience(90.0), versions, window)
        for published in range(versions):
            _one_more(play, call)
            found |= {"went over": network_of(stage), "published": published + 1}
            tell(found)
            if call.done():  # after the last; before it, it failed
                break
        told = call.result()
        found |= _against(alone, told["rates"]) | {
            "installed": told["installed"], "install pause ms": [round(1e3 * p, 2) for p in told["pauses"]],
            "window open s": round(told["waited"], 2),
        }  # fmt: skip
        tell(found)
        play.refit()  # every byte is looked at
    return found


def _one_more(play: Play, call: Call) -> None:
    """Publish a version and wait until the engine serves it, or its call has ended. So none is superseded, and the engine's
    last is the last there is: one more would find its window closed, and nobody who installs it."""
    play.version += 1
    play.trainer.do(on.fill, play.version)
    version = play.trainer.do(on.publish, play.version)[0]["version"]
    name, revision, deadline = play.engines[0].name, 0, time.monotonic() + patience()
    while time.monotonic() < deadline:
        view = play.stage.client.view(revision, 0.0 if not revision else 1.0)
        revision, group = view.revision, view.groups.get(name)
        if call.done() or (group is not None and group.serving >= version):
            return
    raise TransferTimeout(f"{name} does not serve version {version:g}, which is committed")
