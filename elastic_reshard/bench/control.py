"""`elastic-reshard bench control`: what a supervisor's process costs with many members, who are simulated by this process.

Each size: everybody joins; refits (publish, begin, movers meet, land, commit, install), whose every word travels as a real
one does; changes; beats alone. The supervisor's processor time is read apart from the simulators'.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Group, RenderableType
from rich.table import Table

from elastic_reshard.bench.control_cast import BODY, TRAINER, Cast
from elastic_reshard.bench.control_core import CoreFigures, measure_core
from elastic_reshard.bench.control_hosts import Crowd
from elastic_reshard.bench.control_server import ServerProcess
from elastic_reshard.bench.rows import Row, rows_table
from elastic_reshard.protocol.docs import GroupState, PublicationState, TransferDoc, TransferState
from elastic_reshard.protocol.view import View
from elastic_reshard.supervisor.client import SupervisorClient

__all__ = ["ControlFigures", "ControlSetup", "control_tables", "measure_control", "rows_of", "steps"]

_BEGIN_COMMIT: Final = 0.25  # seconds, wanted with 1,000 members
_CHANGE: Final = 1.0  # seconds
_BEATS: Final = 0.2  # of a core
_TARGETS_AT: Final = 1000
_MOVING: Final = 0.2  # seconds that the simulated movers take to move


@dataclass(frozen=True)
class ControlSetup:
    """sizes: numbers of members. refits, changes: of each; beats: seconds in which nothing but beats is said."""

    sizes: tuple[int, ...] = (1000,)
    per_host: int = 8
    refits: int = 5
    changes: int = 10
    beats: float = 5.0


@dataclass
class ControlFigures:
    """Of one size; seconds unless said otherwise, *_cpu of the supervisor's processor.

    begin: from the last rank's offer sent until all hosts have heard of the publication and its transfer; form, commit:
    likewise from the last mover's word until the values, and the commit. whole: from the first offer sent until all is
    installed, without the moving. change: a call until all have heard. beats_share: of one core. memory, peak, told: bytes
    (told: by the supervisor to all hosts, in one refit)."""

    members: int
    hosts: int
    join: float = 0.0
    join_cpu: float = 0.0
    begin: list[float] = field(default_factory=list)
    form: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    refit_cpu: float = 0.0
    told: int = 0
    change: list[float] = field(default_factory=list)
    leave: float = 0.0
    beats_share: float = 0.0
    memory: int = 0
    peak: int = 0
    core: CoreFigures | None = None

    def to_data(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def steps(setup: ControlSetup) -> int:
    """How often `measure_control` says where it is."""
    return len(setup.sizes) * 5


def measure_control(setup: ControlSetup, step: Callable[[str], None]) -> list[ControlFigures]:
    """Measure each size, smallest first, with a supervisor of its own. Blocks: half a minute for 1,000 members, some minutes
    for 10,000. Raises ReshardError if an outcome is wrong or does not come."""
    found = []
    for size in sorted(setup.sizes):
        cast = Cast(size, setup.per_host)
        with tempfile.TemporaryDirectory(prefix="er-control-") as folder, ServerProcess(Path(folder)) as server:
            figures = asyncio.run(_measure(setup, cast, server, lambda what, n=size: step(f"{n} members: {what}")))  # type: ignore[misc]
        step(f"{size} members: the state machine alone")
        figures.core = measure_core(Cast(size, setup.per_host))
        found.append(figures)
    return found


async def _measure(
    setup: ControlSetup, cast: Cast, server: ServerProcess, step: Callable[[str], None]
) -> ControlFigures:
    figures = ControlFigures(cast.members, cast.hosts)
    await asyncio.to_thread(_put_fragment, server)
    async with Crowd(cast, server.url, server.token) as crowd:
        step("joining")
        await _join(figures, crowd, server)
        step("refits")
        before, cpu = crowd.received, server.cpu()
        for number in range(1, setup.refits + 1):
            await _refit(figures, crowd, number)
        figures.refit_cpu = (server.cpu() - cpu) / setup.refits
        figures.told = (crowd.received - before) // setup.refits
        step("changes")
        await _changes(figures, crowd, server, setup.changes)
        step("beats")
        began, cpu = time.monotonic(), server.cpu()
        await asyncio.sleep(setup.beats)
        figures.beats_share = (server.cpu() - cpu) / (time.monotonic() - began)
        figures.memory, figures.peak = server.memory()
    return figures


def _put_fragment(server: ServerProcess) -> None:
    with SupervisorClient(server.url, server.token) as client:
        client.put_fragment(BODY)


async def _join(figures: ControlFigures, crowd: Crowd, server: ServerProcess) -> None:
    cast = crowd.cast
    began, cpu = time.monotonic(), server.cpu()
    await crowd.connect()
    await crowd.until(lambda view: TRAINER in view.groups and view.groups[TRAINER].count_from > 0, "trainers counted")
    await crowd.state(cast.count(crowd.view.groups[TRAINER]))
    figures.join = await crowd.until(cast.live, "everybody admitted") - began
    figures.join_cpu = server.cpu() - cpu


async def _refit(figures: ControlFigures, crowd: Crowd, number: int) -> None:
    """One version, from the first offer to the last install."""
    cast, first = crowd.cast, time.monotonic()
    await crowd.state(cast.publish(number))
    last = time.monotonic()
    figures.begin.append(await crowd.until(lambda view: _in(view, TransferState.FORMING), "a transfer") - last)
    await crowd.say(cast.ready(_transfer(crowd.view)))
    last = time.monotonic()
    figures.form.append(await crowd.until(lambda view: _in(view, TransferState.RUNNING), "the values") - last)
    transfer = _transfer(crowd.view)
    await crowd.say(cast.movers(transfer, "running"))
    await asyncio.sleep(_MOVING)
    await crowd.say(cast.ledgers(transfer))
    await crowd.say(cast.out(transfer))
    last = time.monotonic()
    figures.commit.append(await crowd.until(lambda view: _committed(view, number), "the commit") - last)
    await crowd.state(cast.ask(number))
    await crowd.until(lambda view: all(view.groups[name].ticket is not None for name in cast.engines), "tickets")
    await crowd.state(cast.pulled(crowd.view.groups))
    done = await crowd.until(lambda view: _served(view, cast, number), "installed")
    await crowd.state(cast.installed(crowd.view.groups))
    figures.whole.append(done - first - _MOVING)


def _transfer(view: View) -> TransferDoc:
    return next(iter(view.transfers.values()))


def _in(view: View, state: TransferState) -> bool:
    return any(transfer.state is state for transfer in view.transfers.values())


def _committed(view: View, version: int) -> bool:
    doc = view.publications.get(view.committed)
    return doc is not None and doc.weight_version == version and doc.state is PublicationState.COMMITTED


def _served(view: View, cast: Cast, version: int) -> bool:
    groups = [view.groups[name] for name in cast.engines]
    return all(group.serving == version and group.state is GroupState.CURRENT for group in groups)


async def _changes(figures: ControlFigures, crowd: Crowd, server: ServerProcess, changes: int) -> None:
    """A person asks one member after the other to leave, with much time; then an engine really leaves."""
    cast = crowd.cast
    name, engine = list(cast.engines.items())[-1]
    headers = {"Authorization": f"Bearer {server.token}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=60) as client:
        for number in range(changes):
            member, within = cast.trainers[number % len(cast.trainers)].id, 80_000.0 + number
            began = time.monotonic()
            (await client.post(f"/v1/members/{member}/leave", json={"within": within})).raise_for_status()
            heard = await crowd.until(lambda view, m=member, w=within: view.members[m].leave_within == w, "a leave")  # type: ignore[misc]
            figures.change.append(heard - began)
    began = time.monotonic()
    for player in engine:
        player.state(leaving=True)
    await crowd.state(engine)
    figures.leave = (
        await crowd.until(lambda view: name not in view.groups or not view.groups[name].whole, "left") - began
    )


# -- shown


def rows_of(figures: ControlFigures) -> list[Row]:
    """One line a figure, for one size. Bounds are set at 1,000 members."""
    bounded = figures.members == _TARGETS_AT
    begin, commit = statistics.median(figures.begin), statistics.median(figures.commit)
    change = max([*figures.change, figures.leave])
    core = figures.core

    def row(what: str, value: float, unit: str, bound: float | None = None, **beside: Any) -> Row:
        kept = value <= bound if bounded and bound is not None else None
        wanted = f"{bound:g} {unit}" if bounded and bound is not None else ""
        return Row(what, value, unit, wanted, kept, beside=beside)

    rows = [
        row("everybody joins, told to all", figures.join, "s", server=f"{figures.join_cpu:.2f} s"),
        row("begin + commit, told to all", begin + commit, "s", _BEGIN_COMMIT, begin=_ms(begin), commit=_ms(commit)),
        row("movers meet, told to all", statistics.median(figures.form), "s"),
        row("a whole refit, every word of it", statistics.median(figures.whole), "s",
            server=f"{figures.refit_cpu:.2f} s", told=f"{figures.told / 1e6:.0f} MB"),
        row("a change told to all, the slowest", change, "s", _CHANGE, p50=_ms(statistics.median(figures.change)),
            leaves=_ms(figures.leave)),
        row("steady beats, of a core", 100 * figures.beats_share, "%", 100 * _BEATS),
        row("memory of the supervisor", figures.memory / 2**20, "MiB", most=f"{figures.peak / 2**20:.0f} MiB"),
    ]  # fmt: skip
    if core is not None:
        rows.append(row("the state machine alone, statements", core.statements, "events/s", beats=f"{core.beats:.0f}",
                        batches=f"{core.batched:.0f}", refit=f"{core.refit:.2f} s for {core.refit_events}"))  # fmt: skip
    return rows


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def control_tables(found: Sequence[ControlFigures]) -> RenderableType:
    """A table for a single size; for several, how the figures grow."""
    if len(found) == 1:
        one = found[0]
        return rows_table(f"{one.members} members on {one.hosts} hosts, simulated", rows_of(one))
    table = Table(title="a supervisor's process with so many simulated members; medians")
    columns = ("members", "hosts", "join", "begin", "commit", "refit", "its cpu", "change", "beats", "memory", "alone")
    for column in columns:
        table.add_column(column, justify="right")
    for f in found:
        table.add_row(
            f"{f.members}", f"{f.hosts}", f"{f.join:.2f} s", _ms(statistics.median(f.begin)),
            _ms(statistics.median(f.commit)), f"{statistics.median(f.whole):.2f} s", f"{f.refit_cpu:.2f} s",
            _ms(max([*f.change, f.leave])), f"{100 * f.beats_share:.1f} %", f"{f.memory / 2**20:.0f} MiB",
            f"{f.core.statements:.0f}/s" if f.core is not None else "-",
        )  # fmt: skip
    return Group(table)
