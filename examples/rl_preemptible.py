"""A real, small RL post-training run on nodes that are preempted, on two cores.

    python examples/rl_preemptible.py --short
    python examples/rl_preemptible.py --mode all --seeds 3 --out rl-runs

A Qwen3 of 0.1 million parameters learns to sort four digits by GRPO: two trainer ranks (FSDP2), two engine groups of two
ranks (tensor parallel), each engine rank's loop in a process of its own; all of it in actors of a Ray cluster whose nodes are
killed, drained and added meanwhile, the trainers' node once. Samples are at most `--max-lag` steps old. **Every** sample that
is trained on names the version it was drawn under, and its log-probabilities are computed again under that version: a
difference above 1e-4 ends the run with an error.

--mode elastic: elastic_reshard.on_ray. baseline: the same nodes, faults and work, with gather-and-broadcast of all weights,
and restart of everything when anything dies. quiet: as elastic, without faults. The runs lie in `--out`, one folder each
(`events.jsonl`, checkpoints, logs of the engines); tables and `report.png` are of all the runs that lie there.

Needs transformers and matplotlib: pip install 'elastic-reshard[examples]'.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

import elastic_reshard as er
from rl.report import report
from rl.run import play
from rl.schedule import SHORT, full
from rl.settings import Mode, Settings


class Wanted(StrEnum):
    """Which runs."""

    ELASTIC = "elastic"
    BASELINE = "baseline"
    QUIET = "quiet"
    ALL = "all"


def main(
    mode: Annotated[Wanted, typer.Option(help="Which runs.")] = Wanted.ELASTIC,
    seed: Annotated[int, typer.Option(help="The first seed: of weights, prompts and samples.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 1,
    steps: Annotated[int, typer.Option(min=50, help="Training steps of a run.")] = 200,
    max_lag: Annotated[int, typer.Option(min=0, help="Steps that a sample's weights may be behind.")] = 1,
    short: Annotated[bool, typer.Option("--short", help="14 steps; two nodes are killed.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where runs are kept; a temporary folder by default.")] = None,
) -> None:
    """Run, then show all runs in the folder."""
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster goes in good order then, too
    folder = out if out is not None else Path(tempfile.mkdtemp(prefix="rl-"))
    modes: tuple[Mode, ...] = get_args(Mode) if mode is Wanted.ALL else (mode.value,)
    for number in range(seed, seed + seeds):
        for one in modes:
            run = folder / f"{one}-seed{number}"
            shutil.rmtree(run, ignore_errors=True)  # of an earlier time
            settings = Settings(
                mode=one, seed=number, steps=14 if short else steps, folder=str(run.absolute()), runtime="",
                max_lag=max_lag, every=3 if short else 10,
            )  # fmt: skip
            faults = () if one == "quiet" else SHORT if short else full(steps)
            begun = time.monotonic()

            def say(line: str, about: str = f"{one}, seed {number}", begun: float = begun) -> None:
                console.print(
                    f"{time.monotonic() - begun:7.1f} s  {about}: {line}", highlight=False, markup=False, soft_wrap=True
                )

            try:
                play(settings, faults, say)
            except er.ReshardError as error:
                console.print(
                    f"the run failed: {error}; its events are in {run}", style="red", markup=False, soft_wrap=True
                )
                sys.exit(1)
    figure = report(folder, console)
    console.print(f"figure and events: {figure.parent}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
