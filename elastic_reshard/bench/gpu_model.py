"""publish and install of a model's full parameter list inside one domain, through the members' own calls."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Sequence
from typing import Any

from elastic_reshard.bench import gpu_rank as at_device
from elastic_reshard.bench import rank as on
from elastic_reshard.bench.gpu_setup import GpuSetup, layers_of, many_small, model_layouts
from elastic_reshard.bench.gpu_stage import DeviceStage
from elastic_reshard.bench.gpu_ways import Tell, Way, run_ways
from elastic_reshard.bench.guarded import print_result
from elastic_reshard.bench.play import Play
from elastic_reshard.bench.stage import within
from elastic_reshard.bench.synthetic import Layouts
from elastic_reshard.watchdog.runtime import running

__all__ = ["measure", "survive"]

_HOST = "a"


def measure(setup: GpuSetup) -> dict[str, Any]:
    """The full list, and many small tensors apart."""
    layouts, told = model_layouts(setup)
    ways: dict[str, Way] = {
        "full list": lambda tell: {"of": layers_of(told)} | _refits(setup, layouts, setup.repeats(5), tell),
        "many small": lambda tell: _refits(setup, many_small(setup), setup.repeats(5), tell),
    }
    return run_ways(setup.seconds, ways, {"model": told})


def _one_domain(setup: GpuSetup, stage: DeviceStage, layouts: Layouts) -> Play:
    return Play(stage, layouts, [_HOST] * setup.half, [[_HOST] * setup.half])


def _refits(setup: GpuSetup, layouts: Layouts, repeats: int, tell: Tell) -> dict[str, Any]:
    with DeviceStage(setup.kit()) as stage:
        begun = time.monotonic()
        play = _one_domain(setup, stage, layouts)
        found: dict[str, Any] = {
            "GB": round(layouts.nbytes / 1e9, 3), "join s": round(time.monotonic() - begun, 2), "wrong": play.wrong,
        }  # fmt: skip
        cold = [play.refit() for _ in range(2)]  # both slots
        found["cold publish ms"] = round(1e3 * (cold[0].returned - cold[0].begun), 1)
        found["cold install ms"] = round(1e3 * cold[0].pause, 1)
        tell(found)
        engine = play.engines[0]
        # Of the slowest rank, warm.
        bare = max(b["seconds"] for b in [engine.do(at_device.bare_flat) for _ in range(3)][-1])
        filled = max(f["seconds"] for f in [play.trainer.do(at_device.bare_flat) for _ in range(3)][-1])
        found["bare copy of an engine rank's bytes ms"] = round(1e3 * bare, 2)
        found["bare copy of a trainer rank's bytes ms"] = round(1e3 * filled, 2)
        rows: list[tuple[float, float, float]] = []
        for _ in range(repeats):
            engine.do(on.poison)
            played = play.refit()
            rows.append((played.returned - played.begun, played.pause, played.everywhere))
            found |= _medians(rows, bare, filled)
            tell(found)
        pulls = engine.do(at_device.pull_again, max(3, repeats))
        pull = statistics.median(max(p["seconds"][n] for p in pulls) for n in range(len(pulls[0]["seconds"])))
        found |= {"pulls alone ms": round(1e3 * pull, 2), "pulls share of copy": round(bare / pull, 3)}
        found["memory"] = {
            "trainer": play.trainer[0].do(at_device.device_memory),
            "engine": engine[0].do(at_device.device_memory),
        }
    return found | {"left": stage.left}


def _medians(rows: Sequence[tuple[float, float, float]], bare: float, filled: float) -> dict[str, Any]:
    publish, pause, everywhere = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "publish ms": round(1e3 * publish, 2), "publish share of copy": round(filled / publish, 3),
        "install ms": round(1e3 * pause, 2), "install share of copy": round(bare / pause, 3),
        "everywhere ms": round(1e3 * everywhere, 2), "repeats": len(rows),
    }  # fmt: skip


def survive(setup: GpuSetup) -> dict[str, Any]:
    """Engines pull while the arena's owner, then the watchdog, is killed; every byte is looked at afterwards. Within a domain
    there are no movers: `recover` and `chaos.nccl_hang` kill those."""
    layouts, told = model_layouts(setup)
    found: dict[str, Any] = {"model": told}
    with within(setup.seconds), DeviceStage(setup.kit()) as stage:
        play = _one_domain(setup, stage, layouts)
        for _ in range(2):
            play.refit()
        engine = play.engines[0]
        for what in ("the trainers", "the watchdog"):
            engine.do(on.poison)
            calls = engine.begin(at_device.pull_again, setup.repeats(200))
            if what == "the trainers":
                stage.dismiss(play.trainer)
            else:
                record = running("bench", _HOST, stage.folder)
                if record is not None:
                    os.kill(record.pid, signal.SIGKILL)
            pulled = [call.result(60) for call in calls]
            play.look(engine)
            found[f"{what} killed"] = {
                "pulled GB": round(sum(p["nbytes"] * len(p["seconds"]) for p in pulled) / 1e9, 1),
                "computes": all(engine.do(at_device.kernel_runs)),
            }  # fmt: skip
            found["wrong"] = list(play.wrong)
            print_result(found)
    return found
