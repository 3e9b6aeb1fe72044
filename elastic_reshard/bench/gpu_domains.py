"""Several domains: each rank a host of its own (a label), weights carried by movers over the devices' network; refits without a
fault, and how long it takes to go on after a loss."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from elastic_reshard.bench import gpu_rank as at_device
from elastic_reshard.bench import rank as on
from elastic_reshard.bench import recovery_faults as faults
from elastic_reshard.bench.gpu_setup import GpuSetup, model_layouts
from elastic_reshard.bench.gpu_stage import DeviceStage
from elastic_reshard.bench.gpu_ways import run_ways
from elastic_reshard.bench.guarded import print_result
from elastic_reshard.bench.play import Play, distinct
from elastic_reshard.bench.stage import within
from elastic_reshard.bench.synthetic import Layouts, transformer

__all__ = ["measure", "recover"]

_SHARED = 1 << 30  # bytes, where ranks share a GPU and NCCL goes through the host at 1-2 GB/s


def _small(setup: GpuSetup) -> tuple[Layouts, dict[str, Any]]:
    layouts = transformer(setup.nbytes(_SHARED), setup.half, 1, setup.half)
    return layouts, {
        "model": "a transformer's shapes",
        "GB": round(layouts.nbytes / 1e9, 3),
        "tensors": len(layouts.source),
    }


def _play(setup: GpuSetup, stage: DeviceStage, layouts: Layouts) -> Play:
    hosts = [chr(ord("a") + n) for n in range(2 * setup.half)]
    return Play(stage, layouts, hosts[: setup.half], [hosts[setup.half :]])


def network_of(stage: DeviceStage) -> str:
    """What the last transfer went over."""
    forming = [e for e in stage.events() if e.event == "transfer.forming"]
    return str(forming[-1].fields.get("network", "gloo")) if forming else "none"


def measure(setup: GpuSetup) -> dict[str, Any]:
    """Refits without a fault: a model over the devices' network, where each rank has a device of its own; and some of it, over
    that network and, from the same arenas, over gloo."""
    small, told = _small(setup)
    found: dict[str, Any] = {"small": told}
    ways = {network: partial(_refits, setup, small, network) for network in (setup.network, "gloo")}
    if setup.gpus > 1:
        model, found["model"] = model_layouts(setup)
        ways = {f"the model over {setup.network}": partial(_refits, setup, model, setup.network), **ways}
    return run_ways(setup.seconds, ways, found)


def _refits(setup: GpuSetup, layouts: Layouts, network: str) -> dict[str, Any]:
    with DeviceStage(setup.kit(window="anytime", network=network)) as stage:
        play = _play(setup, stage, layouts)
        for _ in range(2):
            play.refit()
        rows = []
        for _ in range(setup.repeats(4)):
            for engine in play.engines:
                engine.do(on.poison)
            played = play.refit()
            rows.append({"everywhere": played.everywhere, "publish": played.returned - played.begun,
                         "install": played.pause, **play.stretches()})  # fmt: skip
        play.idle()
        publication = play.publication().id
        landed = {
            host: sum(said.received for said in doc.movers.values() if said.transfer.startswith(f"{publication}:"))
            for host, doc in stage.client.hosts().items()
        }
        needed = {host: distinct(play.engines[0].layout, [n]) for n, host in enumerate(play.engines[0].hosts)}
        memory = play.engines[0][0].do(at_device.device_memory)
        used = network_of(stage)
        moving = statistics.median(r["transfer"] for r in rows)
        found: dict[str, Any] = {
            "went over": used, **{f"{key} s": round(statistics.median(r[key] for r in rows), 4) for key in rows[0]},
            "GB/s into all hosts": round(sum(needed.values()) / moving / 1e9, 2), "landed": landed, "needed": needed,
            "memory of an engine rank": memory, "wrong": list(play.wrong),
        }  # fmt: skip
    return found | {"left": stage.left}


def recover(setup: GpuSetup) -> dict[str, Any]:
    """Movers and the supervisor killed in mid-transfer; the rows of `bench recovery`."""
    # Two ranks a side at least, for one's mover is killed: on two devices two members share each.
    pair = setup if setup.half > 1 else replace(setup, gpus=1)
    layouts, told = _small(pair) if setup.gpus <= 2 else model_layouts(setup)
    found: dict[str, Any] = {"model": told}
    begun = time.monotonic()
    with DeviceStage(setup.kit(window="anytime", network=setup.network)) as stage:
        with within(0.6 * setup.seconds):
            play = _play(pair, stage, layouts)
            whole = _whole(play)
        found |= {"went over": network_of(stage), "a transfer without a fault s": round(whole, 3)}
        print_result(found)
        ways: dict[str, Callable[[], Any]] = {
            "a sending mover": lambda: faults.mover_killed(play, "sending", play.trainer, whole, 2).to_data(),
            "a receiving mover": lambda: faults.mover_killed(play, "receiving", play.engines[0], whole, 2).to_data(),
            "the supervisor": lambda: faults.supervisor_killed(stage, play).to_data(),
        }
        run_ways(setup.seconds - (time.monotonic() - begun), ways, found)
        with within(10.0):
            gangs = (play.trainer, *play.engines)
            found["untouched"] = [gang.name for gang in gangs if all(gang.do(at_device.kernel_runs))]
        found["wrong"] = list(play.wrong)
        print_result(found)
    return found | {"left": stage.left}


def _whole(play: Play) -> float:
    """Seconds of a transfer without a fault, warm."""
    moving = []
    for _ in range(4):
        play.refit()
        moving.append(play.stretches()["moving"])
    return statistics.median(moving[2:])
