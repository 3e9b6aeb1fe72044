"""`bench gpu`: all measurements on GPUs in one go, each section in a process of its own under a deadline.

What fails is reported in its place and the rest goes on; what a section had measured when it was ended is kept. The figures of
one run are compared with each other only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from elastic_reshard.bench.gpu_part import OWN, SECTIONS
from elastic_reshard.bench.gpu_setup import GpuSetup, layers_of
from elastic_reshard.bench.gpu_stage import devices_here
from elastic_reshard.bench.guarded import keep_result, run_part
from elastic_reshard.errors import LayoutError
from elastic_reshard.layout import catalog

__all__ = ["DEFAULT", "SECTIONS", "allotted", "failed", "figures", "measure_gpu", "right", "setup_here", "table"]

_LINK = 478.0  # GB/s each way between two H200s, NV18
DEFAULT = {False: 490.0, True: 505.0}  # seconds, by whether there are several GPUs: what all sections need
_LEAST = 4.0  # seconds: a section with less is not begun


def measure_gpu(
    setup: GpuSetup, say: Callable[[str], None], only: Sequence[str] = (), keep: Path | None = None
) -> dict[str, Any]:
    """Run the sections, `setup.seconds` in all at most (and some for what must be ended). Blocks for minutes.

    keep: a file for what is known so far, written anew whenever a section has told something: a lent machine may go before the
    end. "right": nothing was wrong; "failed": where something could not be measured."""
    end = time.monotonic() + setup.seconds
    found: dict[str, Any] = {"setup": asdict(setup)}
    chosen = [name for name in SECTIONS if not only or name in only]
    for number, name in enumerate(chosen):
        left = end - time.monotonic()
        mine = allotted(chosen[number:], left, several=setup.gpus > 1)
        if left < _LEAST:
            found[name] = {"error": f"not begun: {setup.seconds:g} s were over"}
            continue
        say(f"{name} (at most {mine:.0f} s)")
        own = str(time.monotonic() + OWN * mine)
        part = ["elastic_reshard.bench.gpu_part", name, json.dumps(asdict(setup)), own]
        found[name] = {"error": "it had told nothing yet when this was written"}
        keep_result(keep, found)
        found[name] = run_part(part, mine, lambda data, name=name: keep_result(keep, {**found, name: data})).to_data()  # type: ignore[misc]
        keep_result(keep, found)
    found["figures"] = figures(found, setup)
    found["right"] = right(found)
    found["failed"] = failed(found)
    keep_result(keep, found)
    return found


def allotted(sections: Sequence[str], left: float, *, several: bool) -> float:
    """Seconds for the first of the sections, of those that are left for all of them."""
    first, *others = (SECTIONS[name] for name in sections)
    for_others = sum(o.several if several else o.one for o in others)
    return min(first.most * (1 + several), max(first.several if several else first.one, left - for_others), left)


def setup_here(model: str, device: str, seconds: float, scale: float) -> GpuSetup:
    """For this machine's devices. seconds: 0 for what all sections need, 8.4 minutes at most. LayoutError if there is none;
    CatalogError for an unknown model."""
    catalog.model(model)
    if device != "cuda":
        return GpuSetup(model, device, 0, 64 << 30, seconds or DEFAULT[False], scale)
    count = devices_here()
    if not count:
        raise LayoutError("there is no CUDA device here; --device pretend --scale 0.01 tries the program without one")
    import torch

    total = min(torch.cuda.get_device_properties(n).total_memory for n in range(count))
    seconds = seconds or DEFAULT[count > 1]
    # Members in pairs: as many trainers as engine ranks.
    return GpuSetup(model, device, count if count == 1 else count // 2 * 2, total, seconds, scale)


def _at(found: Any, *path: str) -> Any:
    """A figure by its place; None if anything on the way is missing."""
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def figures(found: dict[str, Any], setup: GpuSetup) -> list[dict[str, Any]]:
    """What is wanted, and whether it was reached; None where it was not measured."""
    rows = []
    told = _at(found, "model", "model") or _at(found, "pulls", "model")
    of = layers_of(told) if told else setup.model

    def row(what: str, value: float | None, wanted: float, unit: str = "") -> None:
        kept = None if value is None else value >= wanted
        rows.append(
            {
                "what": what,
                "value": None if value is None else round(value, 3),
                "wanted": wanted,
                "unit": unit,
                "kept": kept,
                "of": of,
            }
        )

    m2n, full = _at(found, "m2n", "m2n call by call", "net ms"), ("model", "full list")
    install, pulls = _at(found, *full, "install ms"), _at(found, "pulls", "full list")
    speed = m2n / install if m2n and install else None
    if setup.gpus > 1:
        gigabytes = _at(found, *full, "GB")
        rate = gigabytes / setup.half / install * 1e3 if gigabytes and install else None
        row("install over NVLink, of the raw link", rate / _LINK if rate else None, 0.8)
        row("install, times as fast as nccl.m2n", speed, 1.3, "x")
        whole = _at(found, *full, "everywhere ms")
        row(
            "publish called to installed everywhere, times as fast as nccl.m2n",
            m2n / whole if m2n and whole else None,
            1.0,
            "x",
        )
        gathered = _at(found, "m2n", "gather and broadcast", "whole model ms, scaled")
        row(
            "install, times as fast as gather and broadcast",
            gathered / install if gathered and install else None,
            _at(found, "m2n", "ratio of bytes") or float(setup.half),
            "x",
        )
    else:
        row("install, times as fast as nccl.m2n net of the barrier", speed, 8.0, "x")
        row("install, of the device-to-device copy", _at(found, *full, "install share of copy"), 0.7)
    row("publish, of the device-to-device copy", _at(found, *full, "publish share of copy"), 0.7)
    best = max((_at(pulls, way, "share") or 0.0 for way in ("kernel", "engine", "graph")), default=0.0)
    row("bare pulls, the fastest way, of the device-to-device copy", best or None, 0.7)
    row(
        "a computing member's rate beside movers over host arenas",
        _at(found, "share", "host arenas over gloo", "rate of alone"),
        0.95,
    )
    return rows


def right(found: Any) -> bool:
    """Whether nothing was found wrong anywhere: no byte, no outcome. Sections that failed are errors, not wrong bytes."""
    if isinstance(found, dict):
        if found.get("wrong") or found.get("right") is False:
            return False
        return all(right(value) for value in found.values())
    return all(right(value) for value in found) if isinstance(found, list) else True


def failed(found: Any, path: str = "") -> list[str]:
    """Where something could not be measured, as "section/what"."""
    if isinstance(found, dict):
        here = [path] if "error" in found else []
        return here + [p for key, value in found.items() for p in failed(value, f"{path}/{key}".lstrip("/"))]
    return [p for n, one in enumerate(found) for p in failed(one, f"{path}/{n}")] if isinstance(found, list) else []


def table(found: dict[str, Any]) -> Table:
    """What was wanted, then every section's figures."""
    made = Table(title=f"bench gpu, {found['setup']['model']}", show_lines=True)
    for column in ("section", "what", "figures"):
        made.add_column(column)
    for row in found["figures"]:
        kept = {True: "kept", False: "not kept", None: "not measured"}[row["kept"]]
        made.add_row("wanted", row["what"], f"{row['value']} {row['unit']} (wanted {row['wanted']}): {kept}")
    for name in SECTIONS:
        for what, value in (found.get(name) or {}).items():
            made.add_row(name, what, str(value))
    return made
