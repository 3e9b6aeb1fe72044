"""`elastic-reshard bench control`: what a supervisor costs with many members."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from elastic_reshard.errors import LayoutError

__all__ = ["add_to"]

_out, _err = Console(width=200, markup=False), Console(stderr=True, markup=False)
_GROWTH = "100,300,1000,3000,10000"


def add_to(bench: typer.Typer) -> None:
    """Add the command."""
    bench.command("control")(control)


def control(
    members: Annotated[
        str, typer.Option(help=f"How many; several, separated by commas: how it grows, as {_GROWTH}.")
    ] = "1000",
    refits: Annotated[int, typer.Option(min=1, max=1000)] = 5,
    beats: Annotated[float, typer.Option(min=1, max=3600, help="Seconds in which nothing but beats is said.")] = 5.0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Simulated hosts and members, eight a host, over real WebSockets to a real supervisor, whose processor time is its own.

    1,000 members take half a minute, 10,000 some minutes and 4 GiB. Exit code 1 if something did not come as it must."""
    try:
        sizes = tuple(int(n) for n in members.split(","))
    except ValueError:
        raise LayoutError(f"--members wants numbers separated by commas, got {members!r}.") from None
    if not sizes or min(sizes) < 16 or max(sizes) > 100_000:
        raise LayoutError(f"--members {members}: 16 to 100,000 can be simulated.")
    from elastic_reshard.bench.control import ControlSetup, control_tables, measure_control, rows_of

    setup = ControlSetup(sizes, refits=refits, beats=beats)
    found = measure_control(setup, lambda what: _err.print(what, highlight=False))
    if json_:
        data = [f.to_data() | {"rows": [row.to_data() for row in rows_of(f)]} for f in found]
        _out.print_json(json.dumps(data))
    else:
        _out.print(control_tables(found))
