"""Several domains: each rank a host of its own (a label), weights carried by movers over the devices' network; refits without a
fault, and how long it takes to go on after a loss."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from elastic_reshard.bench import gpu_rank as at_device
from elastic_reshard.bench import rank as on
from elastic_reshard.bench import recovery_faults as faults
from elastic_reshard.bench.gpu_setup import GpuSetup, model_layouts
from elastic_reshard.bench.gpu_stage import DeviceStage
from elastic_reshard.bench.play import Play, distinct
from elastic_reshard.bench.synthetic import Layouts, transformer
from elastic_reshard.errors import ReshardError

__all__ = ["measure", "recover"]

_SHARED = 1 << 30  # bytes, where ranks share a GPU and NCCL goes through the host at 1-2 GB/s


def _layouts(setup: GpuSetup) -> tuple[Layouts, dict[str, Any]]:
    if setup.gpus > 1:
        return model_layouts(setup)
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
    """Refits without a fault, over the devices' network and, from the same arenas, over gloo."""
    layouts, told = _layouts(setup)
    found: dict[str, Any] = {"model": told}
    networks = (setup.network, "gloo")
    for network in networks:
        try:
            found[network] = _refits(setup, layouts, network)
        except ReshardError as error:
            found[network] = {"error": str(error)[-1500:]}
    return found


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
    """Movers, and a host, killed in mid-transfer; the rows of `bench recovery`."""
    layouts, told = _layouts(setup)
    found: dict[str, Any] = {"model": told, "rows": []}
    with DeviceStage(setup.kit(window="anytime", network=setup.network)) as stage:
        play = _play(setup, stage, layouts)
        moving = []
        for _ in range(4):
            play.refit()
            moving.append(play.stretches()["moving"])
        found["went over"] = network_of(stage)
        whole = statistics.median(moving[2:])
        found["a transfer without a fault s"] = round(whole, 3)
        steps: list[Callable[[], Any]] = [
            lambda: faults.mover_killed(play, "sending", play.trainer, whole, 2),
            lambda: faults.mover_killed(play, "receiving", play.engines[0], whole, 2),
            lambda: faults.supervisor_killed(stage, play),
        ]
        for step in steps:
            try:
                found["rows"].append(step().to_data())
            except ReshardError as error:
                found["rows"].append({"error": str(error)[-1500:]})
        found["untouched"] = [
            gang.name for gang in (play.trainer, *play.engines) if all(gang.do(at_device.kernel_runs))
        ]
        found["wrong"] = list(play.wrong)
    return found | {"left": stage.left}
