"""Several domains: each rank a host of its own (a label), weights carried by movers over the devices' network; refits without a
fault, and how long it takes to go on after a loss."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from elastic_reshard.bench import gpu_rank as at_device
from elastic_reshard.bench import rank as on
from elastic_reshard.bench import recovery_faults as faults
from elastic_reshard.bench.census import nccl_segments
from elastic_reshard.bench.gpu_setup import GpuSetup, layers_of, model_layouts
from elastic_reshard.bench.gpu_stage import DeviceStage
from elastic_reshard.bench.gpu_ways import Tell, Way, run_ways
from elastic_reshard.bench.guarded import print_result
from elastic_reshard.bench.play import Play, distinct
from elastic_reshard.bench.stage import Gang, within
from elastic_reshard.bench.synthetic import Layouts, transformer
from elastic_reshard.protocol.deadlines import Deadlines

__all__ = ["measure", "recover"]

# Cells of the usual size, and wide ones for models of so many bytes: each costs time where it is bound.
_CELL, _WIDE_CELL, _MANY = 1 << 20, 64 << 20, 12 << 30
# From a loss being noticed, which takes a tick, to the commit: a mover's CUDA context and NCCL alone are 0.8 s of it.
_RECOVERS = 2.0
_SHARED = 1 << 30  # bytes, where ranks share a GPU and NCCL goes through the host at 1-2 GB/s


def _small(setup: GpuSetup, engines: int = 1) -> tuple[Layouts, dict[str, Any]]:
    layouts = transformer(setup.nbytes(_SHARED if engines == 1 else _SHARED // 2), setup.half, engines, setup.half)
    return layouts, {
        "model": "a transformer's shapes",
        "GB": round(layouts.nbytes / 1e9, 3),
        "tensors": len(layouts.source),
    }


def _play(setup: GpuSetup, stage: DeviceStage, layouts: Layouts, engines: int = 1) -> Play:
    gangs = [[f"{chr(ord('a') + n)}{rank}" for rank in range(setup.half)] for n in range(1 + engines)]
    return Play(stage, layouts, gangs[0], gangs[1:])


def network_of(stage: DeviceStage) -> str:
    """What the last transfer went over."""
    forming = [e for e in stage.events() if e.event == "transfer.forming"]
    return str(forming[-1].fields.get("network", "gloo")) if forming else "none"


def measure(setup: GpuSetup) -> dict[str, Any]:
    """Refits without a fault: some of a model over the devices' network and, from the same arenas, over gloo; and, where each
    rank has a device of its own, a whole one over the devices' network, which takes longest."""
    small, told = _small(setup)
    found: dict[str, Any] = {"small": told}
    warm, counted = 2, setup.repeats(4)
    ways: dict[str, Way] = {
        network: partial(_refits, setup, small, _CELL, {}, network, warm, counted)
        for network in (setup.network, "gloo")
    }
    if setup.gpus > 1:
        model, found["model"] = model_layouts(setup)
        cell = _CELL if model.nbytes < _MANY else _WIDE_CELL
        of = {"of": layers_of(found["model"]), "cell MiB": cell >> 20}
        ways[f"the model over {setup.network}"] = partial(
            _refits, setup, model, cell, of, setup.network, 1, setup.repeats(2)
        )
    return run_ways(setup.seconds, ways, found)


def _refits(
    setup: GpuSetup,
    layouts: Layouts,
    cell: int,
    of: Mapping[str, Any],
    network: str,
    warm: int,
    counted: int,
    tell: Tell,
) -> dict[str, Any]:
    with DeviceStage(setup.kit(window="anytime", network=network), cell) as stage:
        play = _play(setup, stage, layouts)
        cold = [round(play.refit().everywhere, 3) for _ in range(warm)]
        needed = {host: distinct(play.engines[0].layout, [n]) for n, host in enumerate(play.engines[0].hosts)}
        found: dict[str, Any] = {
            **of, "went over": network_of(stage), "needed": needed, "cold everywhere s": cold, "wrong": play.wrong,
        }  # fmt: skip
        tell(found)
        rows = []
        for _ in range(counted):
            for engine in play.engines:
                engine.do(on.poison)
            played = play.refit()
            rows.append({"everywhere": played.everywhere, "publish": played.returned - played.begun,
                         "install": played.pause, **play.stretches()})  # fmt: skip
            moving = statistics.median(r["transfer"] for r in rows)
            found |= {f"{key} s": round(statistics.median(r[key] for r in rows), 4) for key in rows[0]}
            found |= {"GB/s into all hosts": round(sum(needed.values()) / moving / 1e9, 2), "repeats": len(rows)}
            tell(found)
        play.idle()
        publication = play.publication().id
        found["landed"] = {
            host: sum(said.received for said in doc.movers.values() if said.transfer.startswith(f"{publication}:"))
            for host, doc in stage.client.hosts().items()
        }
        found["memory of an engine rank"] = play.engines[0][0].do(at_device.device_memory)
        found["went over"] = network_of(stage)
    return found | {"left": stage.left}


def recover(setup: GpuSetup) -> dict[str, Any]:
    """Movers, the supervisor and, on two devices, an engine's member and another one's host killed in mid-transfer; the rows of
    `bench recovery`."""
    # Two ranks a side at least, for one's mover is killed: on two devices a rank of each of four gangs shares each, which
    # also leaves time to hit a transfer in.
    pair = setup if setup.half > 1 else replace(setup, gpus=1)
    engines = 3 if setup.gpus == 2 else 1
    layouts, told = _small(pair, engines) if setup.gpus <= 2 else model_layouts(setup)
    found: dict[str, Any] = {"model": told}
    begun, segments = time.monotonic(), set(nccl_segments())
    with DeviceStage(setup.kit(window="anytime", network=setup.network)) as stage:
        with within(0.6 * setup.seconds):
            play = _play(pair, stage, layouts, engines)
            whole = _whole(play)
        found |= {"went over": network_of(stage), "a transfer without a fault s": round(whole, 3)}
        print_result(found)

        def killed(name: str, gang: Gang) -> dict[str, Any]:
            return faults.mover_killed(play, name, gang, whole, 2, limit=_RECOVERS + Deadlines().mover_beat).to_data()

        ways: dict[str, Way] = {
            "a sending mover": lambda _: killed("sending", play.trainer),
            "a receiving mover": lambda _: killed("receiving", play.engines[0]),
            "the supervisor": lambda _: faults.supervisor_killed(stage, play).to_data(),
        }
        if engines > 1:  # each fault takes an engine out of the play, and those that stay take less time
            ways["an engine's member"] = lambda _: faults.member_killed(play, play.engines[-1], whole).to_data()
            ways["a host"] = lambda _: faults.host_vanishes(stage, play, _whole(play), play.engines[-1]).to_data()
        run_ways(setup.seconds - (time.monotonic() - begun), ways, found)
        with within(10.0):
            gangs = (play.trainer, *play.engines)
            found["untouched"] = [gang.name for gang in gangs if all(gang.do(at_device.kernel_runs))]
        found["wrong"] = list(play.wrong)
        print_result(found)
    return found | {"left": stage.left, "shared memory of NCCL left": sorted(set(nccl_segments()) - segments)}


def _whole(play: Play) -> float:
    """Seconds of a transfer without a fault, warm."""
    moving = []
    for _ in range(4):
        play.refit()
        moving.append(play.stretches()["moving"])
    return statistics.median(moving[2:])
