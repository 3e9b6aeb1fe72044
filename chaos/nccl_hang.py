"""The abort that never returns, shown and cured:

    python -m chaos.nccl_hang [--quick] [--json] [--part bare|project] [--device cuda|pretend] [--networks nccl,nccl_m2n]
        [--keep FILE]

Four ranks on one GPU (or a rank on each, where there are several). First bare NCCL: `nccl.m2n.reshard` in flight, a peer killed
or frozen, and whether abort(), shrink(ABORT) and revoke() return on the survivors. Then the same under this project: movers are
condemned and replaced, and the version is committed bit for bit. Every part has a deadline; nothing of it is left. Exit code 1
if the project's half was not right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos import hang_bare, hang_project
from elastic_reshard.bench.census import nccl_segments
from elastic_reshard.bench.gpu_stage import Kit, devices_here
from elastic_reshard.bench.guarded import keep_result, print_result, run_part, until_told

__all__ = ["main"]

_BYTES = {"cuda": 512 << 20, "pretend": 48 << 20}
# Seconds that a part may take: one GPU needs 165 for the bare half (76 if quick), and 50 for each network of the project's.
_BARE = {False: 260.0, True: 150.0}
_PROJECT = {"cuda": 120.0, "pretend": 240.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    told = _parsed(arguments)
    gpus = devices_here() if told.device == "cuda" else 0
    if told.inside:
        until_told()
        print_result(_bare(told, gpus) if told.part == "bare" else _project(told, gpus, told.inside))
        return 0
    found: dict[str, Any] = {}
    if told.part in ("both", "bare"):
        if told.device == "cuda" and gpus:
            _part(found, "bare", _again(told, "bare", "bare"), _BARE[told.quick], told.keep)
        else:
            found["bare"] = {"skipped": "no CUDA device"}
    if told.part in ("both", "project"):
        for network in told.networks.split(","):
            _part(found, network, _again(told, "project", network), _PROJECT[told.device], told.keep)
    right = all(found[n].get("right") for n in found if n != "bare")
    found["right"] = right
    keep_result(told.keep, found)
    print(json.dumps(found)) if told.json else _show(found)
    return 0 if right else 1


def _part(found: dict[str, Any], name: str, part: Sequence[str], seconds: float, keep: Path | None) -> None:
    """Run one, and tell and keep what it has so far: a lent machine may go before the end."""
    _say(f"{name} (at most {seconds:g} s)")

    def so_far(data: Any) -> None:
        _say(json.dumps(data["rows"][-1:]))
        keep_result(keep, {**found, name: data})

    before = set(nccl_segments())
    found[name] = {"error": "it had told nothing yet when this was written"}
    keep_result(keep, found)
    found[name] = run_part(part, seconds, so_far).to_data()
    found[name]["shared memory of NCCL left"] = sorted(set(nccl_segments()) - before)
    keep_result(keep, found)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m chaos.nccl_hang", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 s for each way out, not 20")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", choices=("both", "bare", "project"), default="both")
    parser.add_argument("--device", choices=("cuda", "pretend"), default="cuda", help="pretend: without a GPU")
    parser.add_argument("--networks", default="", help="of the project's half, separated by commas")
    parser.add_argument("--mib", type=int, default=0, help="of the model that is moved")
    parser.add_argument("--keep", type=Path, help="a file for what is known so far, written anew after each row")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    told = parser.parse_args(arguments)
    told.networks = told.networks or ("nccl,nccl_m2n" if told.device == "cuda" else "pretend")
    return told


def _again(told: argparse.Namespace, part: str, inside: str) -> list[str]:
    """This program, for one part in a process of its own."""
    more = ["--quick"] if told.quick else []
    return [
        "chaos.nccl_hang",
        "--part",
        part,
        "--device",
        told.device,
        "--mib",
        str(told.mib),
        "--inside",
        inside,
        *more,
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _bare(told: argparse.Namespace, gpus: int) -> dict[str, Any]:
    size = 4 if gpus == 1 or gpus >= 4 else gpus
    found: dict[str, Any] = {"ranks": size, "gpus": gpus, "rows": []}
    for row in hang_bare.play(size, gpus, 5.0 if told.quick else 20.0):
        found["rows"].append(row)
        print_result(found)
    return found


def _project(told: argparse.Namespace, gpus: int, network: str) -> dict[str, Any]:
    kit = Kit(told.device, max(1, gpus), "device", "anytime", network)
    return hang_project.play(kit, (told.mib << 20) or _BYTES[told.device], print_result)


def _show(found: dict[str, Any]) -> None:
    for name, part in found.items():
        if not isinstance(part, dict):
            print(f"{name}: {part}")
            continue
        print(f"== {name} " + " ".join(f"{k}={v}" for k, v in part.items() if k != "rows"))
        for row in part.get("rows", []):
            print("  - " + ", ".join(f"{k}: {v}" for k, v in row.items()))


if __name__ == "__main__":
    raise SystemExit(main())
