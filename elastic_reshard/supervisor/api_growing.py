"""Several groups or members admitted by one change: asked for, waited for, taken back. Part of the HTTP interface."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, HTTPException, Response

from elastic_reshard.supervisor.answers import Growth, GrowTo
from elastic_reshard.supervisor.api_acting import Until, so_far
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.events import CancelGrow, Grow
from elastic_reshard.supervisor.once import Asked
from elastic_reshard.supervisor.shown import found, growth_of, growths_of

__all__ = ["growing", "reading_grows"]


def growing(routes: APIRouter, shell: Shell) -> None:
    """Add the calls that change something."""
    later: dict[int | str, dict[str, Any]] = {202: {"model": Growth, "description": "Not done yet; see missing."}}

    @routes.post("/v1/grow", responses=later)
    async def grow(to: GrowTo, response: Response, asked: Asked, wait: Until = 0.0) -> Growth:
        """Hold who joins until so many are there, then admit them by one change. 409 while another grow is under way."""
        name = to.name or f"grow-{asked.digest if asked is not None else uuid.uuid4().hex[:12]}"
        growth = _taken(shell, name, to)
        if growth is None:
            await shell.settle(Grow(name, to.groups, to.members, to.within), asked)
            growth = _taken(shell, name, to)
        if growth is not None and not growth.done:
            await shell.changed(lambda: _past(shell, name), wait)
            growth = _taken(shell, name, to)
        if growth is None:
            raise HTTPException(409, f"grow {name} was not taken in; ask again")
        return so_far(response, growth)

    @routes.delete("/v1/grow/{name}")
    async def cancel(name: str, asked: Asked) -> Growth:
        """Take back a grow under way: who waits comes in as if nobody had asked. 409 for one that is done."""
        found(growths_of(shell), "grow", name)
        await shell.settle(CancelGrow(name), asked)
        growth = found(growths_of(shell), "grow", name)
        if not growth.cancelled:
            raise HTTPException(409, f"grow {name} is done: {len(growth.admitted)} groups came in by it")
        return growth


def reading_grows(routes: APIRouter, shell: Shell) -> None:
    """Add the calls that only tell."""

    @routes.get("/v1/grow")
    async def growth() -> Growth | None:
        """The grow under way, or the last one that is done."""
        return growth_of(shell)

    @routes.get("/v1/grows")
    async def grows() -> dict[str, Growth]:
        """Grows by name, the one under way and the last 64 that are done."""
        return growths_of(shell)


def _taken(shell: Shell, name: str, wanted: GrowTo) -> Growth | None:
    """The request of this name as it is now. HTTPException: 409 while another one is under way."""
    growth = growths_of(shell).get(name)
    if growth is None:
        now = growth_of(shell)
        if now is not None and not now.done:
            raise HTTPException(409, _busy(now))
        return None
    if (growth.groups, growth.members) != (wanted.groups, wanted.members):
        raise HTTPException(409, f"grow {name} asked for {_amount(growth)}; ask for more by another name")
    return growth


def _past(shell: Shell, name: str) -> bool:
    growing_ = shell.job.growing
    return growing_ is None or growing_.name != name or growing_.done


def _amount(growth: Growth) -> str:
    return f"{growth.groups} groups" if growth.groups else f"{growth.members} members"


def _busy(growth: Growth) -> str:
    return (
        f"grow {growth.name} still waits for {growth.missing} of {_amount(growth)}, {growth.left:g} s more; nothing was done. "
        "Wait until it is over, take it back (DELETE /v1/grow/NAME), or repeat it by its name to see how far it is"
    )
