"""The command `elastic-reshard chaos soak`. What it runs lies beside the package in a checkout and is not installed with it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_reshard.errors import ProtocolError

__all__ = ["add_to"]

_chaos = typer.Typer(no_args_is_help=True, help="Jobs under fire: faults on purpose, and an observer.")


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(_chaos, name="chaos")


@_chaos.callback()
def _group() -> None:
    """So that `soak` keeps its name while it is the only one."""


@_chaos.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.1, max=10_000, help="How long faults come.")] = 15.0,
    seed: Annotated[int, typer.Option(help="The same faults in the same order for the same seed.")] = 1,
    plant: Annotated[str, typer.Option(help="Break the job on purpose: term, zombie or leak; it must be seen.")] = "",
    report: Annotated[Path, typer.Option(help="A folder for soak.json and soak.html.")] = Path("soak"),
    keep: Annotated[
        bool, typer.Option("--keep", help="Also keep what the processes wrote, if it was violated.")
    ] = False,
) -> None:
    """3 trainers and 5 inference ranks on 4 labelled hosts while processes and hosts are killed, frozen and woken by seed;
    exit code 1 if anything that is promised was violated."""
    arguments = ["--minutes", str(minutes), "--seed", str(seed), "--report", str(report), *["--keep"] * keep]
    if plant:
        arguments += ["--plant", plant]
    raise typer.Exit(_found().main(arguments))


def _found() -> Any:
    """The module chaos.soak, of this checkout or of the current folder."""
    for folder in (Path(__file__).resolve().parents[1], Path.cwd()):
        if (folder / "chaos" / "soak.py").is_file() and str(folder) not in sys.path:
            sys.path.append(str(folder))
    if importlib.util.find_spec("chaos") is None or importlib.util.find_spec("chaos.soak") is None:
        raise ProtocolError(
            "the soak is not installed with the package: it lies in the folder chaos/ of a checkout. Run it there, with this "
            "command or as `python -m chaos.soak`"
        )
    return importlib.import_module("chaos.soak")
