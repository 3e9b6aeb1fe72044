"""`elastic-reshard drain --here`: what Kubernetes' preStop calls. No torch, no address and no token are needed."""

from __future__ import annotations

import json

import typer
from rich.console import Console

__all__ = ["drain_here"]

_out, _err = Console(width=200, markup=False), Console(stderr=True, markup=False)


def drain_here(job: str | None, within: float, wait: bool, as_json: bool) -> None:
    """Drain every host of this machine (of one job, or of all), and wait until their watchdogs have gone, `within` seconds and
    two more. Nobody here: done. Raises typer.Exit(1) if somebody is still there then."""
    from elastic_reshard.watchdog.drain import drain, guarded

    done = drain(guarded(job), within, wait)
    if as_json:
        said = [
            {"job": d.job, "host": d.host, "members": d.members, "empty": d.empty, "waited": d.waited} for d in done
        ]
        _out.print_json(json.dumps(said))
    for one in () if as_json else done:
        left = "is empty" if one.empty else "is being drained"
        _line(f"host {one.host} of job {one.job} ({len(one.members)} members) {left} after {one.waited:.1f} s")
    if not done and not as_json:
        _line("no host of this machine has a watchdog: nothing to drain")
    if wait and not all(d.empty for d in done):
        _err.print(
            f"elastic-reshard: not empty within {within:g} s; what still runs is no member any more, or its watchdog is frozen",
            style="red", markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(1)


def _line(text: str) -> None:
    _out.print(text, markup=False, highlight=False, soft_wrap=True)
