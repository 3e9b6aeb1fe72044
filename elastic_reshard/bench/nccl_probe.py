"""Whether NCCL does here what the movers need of it: `python -m elastic_reshard.bench.nccl_probe`, on one GPU or several.

Ranks in processes of their own form communicators, exchange groups, carry a plan's rounds, shrink and grow, and lose a peer by
SIGKILL and SIGSTOP. Every step has a deadline, after which its processes are killed; what a step's ranks raised, or where they
hung, is in the JSON that is printed last. The exit code is the number of steps that failed. At most two minutes.
`--pretend` runs the same over the pretend device.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from elastic_reshard.bench import nccl_steps as steps
from elastic_reshard.bench.nccl_rank import Rank, main

__all__ = ["run"]

_PRELOAD: Final = ("torch", "elastic_reshard.bench.nccl_steps", "elastic_reshard.mover.carry")
_LIBRARIES: Final = ("cuda.bindings.driver", "cuda.bindings.nvrtc", "nccl.core")
_ALL_S: Final = 115.0
_Step = tuple[str, Callable[..., Any], int, tuple[Any, ...], tuple[int, ...], float]

STEPS: Final[tuple[_Step, ...]] = (
    # name, what a rank does, ranks, arguments, those that are lost, seconds
    ("two ranks: form, exchange, close", steps.epochs, 2, (), (), 30.0),
    ("four ranks: form, exchange, close", steps.epochs, 4, (), (), 30.0),
    ("two to two: rounds from device memory", steps.rounds, 4, ("device", 64), (), 40.0),
    ("two to two: rounds from host memory by device staging", steps.rounds, 4, ("host", 16), (), 40.0),
    ("shrink natively, grow natively", steps.change, 5, (), (), 40.0),
    ("a peer is SIGKILLed in a run: abort, form anew", steps.lose, 4, ("SIGKILL", 64), (1,), 40.0),
    ("a peer is SIGSTOPped in a run: abort, form anew", steps.lose, 4, ("SIGSTOP", 64), (1,), 40.0),
)


def run(kind: str, chosen: Sequence[str] = ()) -> dict[str, Any]:
    """All steps, or those whose names have one of the words; JSON-ready. Blocks two minutes at most; leaves no process."""
    begun = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *(name for name in _LIBRARIES if kind == "nccl" and _there(name))])
    found: dict[str, Any] = {"kind": kind, "torch": torch.__version__, "steps": {}}
    for name, fn, size, args, lost, limit in STEPS:
        if chosen and not any(word in name for word in chosen):
            continue
        left = _ALL_S - (time.monotonic() - begun)
        if left < 5:
            found["steps"][name] = {"ok": False, "error": "no time was left for it"}
            continue
        found["steps"][name] = _step(context, kind, fn, size, args, lost, min(limit, left))
        print(f"{name}: {'ok' if found['steps'][name]['ok'] else 'FAILED'}", file=sys.stderr, flush=True)
    found["seconds"] = round(time.monotonic() - begun, 1)
    found["failed"] = [name for name, step in found["steps"].items() if not step["ok"]]
    return found


def _there(name: str) -> bool:
    return find_spec(name.partition(".")[0]) is not None


def _step(
    context: Any, kind: str, fn: Callable[..., Any], size: int, args: tuple[Any, ...], lost: Sequence[int], limit: float
) -> dict[str, Any]:
    """One step: what each rank said, by rank; all its processes have ended then."""
    begun, deadline = time.monotonic(), time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            me = Rank(rank, size, kind, folder, limit)
            process = context.Process(target=main, args=(theirs, me, fn, args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        said: dict[int, Any] = {}
        wrong: dict[int, str] = {}
        try:
            for rank, pipe in enumerate(pipes):
                if rank not in lost:
                    _hear(rank, pipe, deadline, Path(folder), said, wrong)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()
    good = not wrong and all(one.get("ok") for one in said.values())
    return {"ok": good, "seconds": round(time.monotonic() - begun, 1), "ranks": said, "wrong": wrong}


def _hear(rank: int, pipe: Any, deadline: float, folder: Path, said: dict[int, Any], wrong: dict[int, str]) -> None:
    stacks = folder / f"{rank}.stacks"
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        text = stacks.read_text() if stacks.exists() else ""
        wrong[rank] = f"it did not end in time; it was {_doing(folder, rank)}. {text[-4000:]}"
        return
    try:
        ok, value = pipe.recv()
    except EOFError:
        wrong[rank] = f"it ended without an answer while it was {_doing(folder, rank)}"
        return
    if ok:
        said[rank] = value
    else:
        wrong[rank] = f"it raised while it was {_doing(folder, rank)}:\n{value}"


def _doing(folder: Path, rank: int) -> str:
    words = folder / f"{rank}.doing"
    return words.read_text() if words.exists() else "starting"


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only steps whose names have one of these")
    parser.add_argument("--pretend", action="store_true", help="over the pretend device")
    options = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if not options.pretend and not torch.cuda.is_available():
        print(json.dumps({"error": "no CUDA device; --pretend runs the steps without one"}))
        return 2
    found = run("pretend" if options.pretend else "nccl", options.words)
    print(json.dumps(found, indent=1))
    return len(found["failed"])


if __name__ == "__main__":
    sys.exit(_main())
