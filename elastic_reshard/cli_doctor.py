"""`elastic-reshard doctor` and `elastic-reshard bundle`. No torch."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from elastic_reshard.errors import ProtocolError

if TYPE_CHECKING:
    from elastic_reshard.doctor.bundle import Wanted

__all__ = ["add_to"]

_out, _err = Console(width=None if sys.stdout.isatty() else 200, markup=False), Console(stderr=True, markup=False)
_COLOURS = {"ok": "green", "warn": "yellow", "bad": "bold red"}
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(doctor)
    app.command()(bundle)


def doctor(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where a supervisor would listen.")] = 29700,
    json_: Json = False,
) -> None:
    """What this machine can do, and what to do about what it cannot. Exit code 1 if something is bad."""
    from elastic_reshard.doctor import judge
    from elastic_reshard.doctor.gather import gather

    facts = gather(port=port)
    findings = judge(facts)
    bad = any(finding.mark == "bad" for finding in findings)
    if json_:
        said = {"ok": not bad, "findings": [asdict(f) for f in findings], "facts": facts.to_data()}
        _out.print_json(json.dumps(said))
    else:
        table = Table(show_edge=False)
        for column in ("", "what", "found", "what to do"):
            table.add_column(column, overflow="fold")
        for f in findings:
            table.add_row(
                f"[{_COLOURS[f.mark]}]{f.mark}[/]", f.name, f.said.replace("[", "\\["), f.todo.replace("[", "\\[")
            )
        _out.print(table)
    if bad:
        raise typer.Exit(1)


def bundle(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file; default: here, by job and time.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="The supervisor; else $ELASTIC_RESHARD_URL or this machine's.")
    ] = None,
    job: Annotated[str | None, typer.Option("--job", help="Which job, if this machine has several.")] = None,
    journal: Annotated[Path | None, typer.Option(help="Its journal, if it does not lie in the runtime folder.")] = None,
    within: Annotated[float, typer.Option(min=1, max=3600, help="Seconds that it may take.")] = 20.0,
    json_: Json = False,
) -> None:
    """One .tar.gz for whoever looks into a failure: view, events, journal, logs, stacks, versions. No weights, no token.

    What cannot be had (a supervisor that is down, say) is named in it and here; exit code 1 if that is the whole supervisor."""
    from elastic_reshard.doctor.bundle import collect

    wanted = _wanted(url, job, journal, within)
    made = collect(wanted)
    path = output or Path(f"elastic-reshard-{wanted.job}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    made.write(path)
    if json_:
        _out.print_json(json.dumps({"file": str(path), "files": sorted(made.files), "missing": made.missing}))
    else:
        _out.print(f"{path}: {len(made.files)} files, {path.stat().st_size / 1e6:.1f} MB", markup=False, soft_wrap=True)
        for name, why in made.missing.items():
            _err.print(f"missing: {name}: {why}", markup=False, highlight=False, soft_wrap=True)
    if "supervisor" in made.missing:
        raise typer.Exit(1)


def _wanted(url: str | None, job: str | None, journal: Path | None, within: float) -> Wanted:
    """What is known of the job here; a supervisor need not run."""
    from elastic_reshard.doctor.bundle import Wanted
    from elastic_reshard.protocol import places
    from elastic_reshard.watchdog.drain import guarded

    url = url or os.environ.get(places.URL_VARIABLE)
    url = places.base_url(url) if url else None
    place = places.place_of(url, job)
    jobs = {one.job for one in guarded()}
    if job is None and place is None and len(jobs) > 1:
        raise ProtocolError(f"this machine has the jobs {', '.join(sorted(jobs))}; say which with --job")
    name = job or (place.job if place is not None else next(iter(jobs), "job"))
    token = os.environ.get(places.TOKEN_VARIABLE) or (place.token if place is not None else "")
    if not token:  # of a supervisor that is down the folder still has it
        kept = places.runtime_folder() / name / "token"
        token = kept.read_text().strip() if kept.is_file() else ""
    return Wanted(name, url or (place.url if place is not None else ""), token, journal, None, within)
