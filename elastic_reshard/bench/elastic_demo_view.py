"""The elastic demo on a terminal: a live view while it plays, tables of what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_reshard.bench.elastic_demo_cast import CELL, RANKS, DemoSetup
from elastic_reshard.bench.elastic_demo_outcome import Outcome
from elastic_reshard.bench.elastic_demo_watch import Line, Moment, Sight, plain
from elastic_reshard.plan.cells import CellGrid
from elastic_reshard.protocol.bits import unpack
from elastic_reshard.protocol.docs import GroupDoc, MemberDoc, TransferDoc
from elastic_reshard.protocol.ids import name_of
from elastic_reshard.protocol.messages import MoverSaid

__all__ = ["Picture", "line_text", "no_screen", "tables"]

_LINES: Final = 12  # of what happened, on the live view
_RATE: Final = 10.0  # pictures a second
_COLOURS: Final = {
    "step": "", "calm": "green", "fault": "bold red", "found": "yellow", "back": "bold green", "change": "cyan",
    "wrong": "bold white on red",
    "live": "green", "joining": "cyan", "orphaned": "yellow", "leaving": "cyan",
    "current": "green", "complete": "green", "installing": "cyan", "landing": "cyan", "stale": "yellow", "partial": "red",
    "running": "cyan", "ended": "bold red",
}  # fmt: skip
_GONE: Final = ("lost", "refused")


def line_text(line: Line) -> Text:
    """A line for a person: seconds, and what happened."""
    return Text.assemble((f"{line.at:7.2f} s  ", "dim"), (line.text, _COLOURS[line.kind]))


def no_screen(_: Sight) -> AbstractContextManager[object]:
    """Nothing is shown but lines."""
    return nullcontext()


class Picture:
    """Draws moments. `live` is a screen for `play`."""

    def __init__(self, setup: DemoSetup, console: Console) -> None:
        self._setup, self._console = setup, console
        source, destination = setup.layouts()
        grid = CellGrid.of(destination, CELL)
        self._cells, self._of_rank = grid.count, [len(grid.cells_of_rank(rank)) for rank in range(RANKS)]
        self._title = f"{setup.model} scaled to {source.nbytes / 2**20:.0f} MiB, seed {setup.seed}"

    @contextmanager
    def live(self, sight: Sight) -> Iterator[None]:
        """The view as it changes, until it is left; then nothing of it is left on the terminal."""

        def draw() -> RenderableType:
            moment = sight.moment()
            return self.draw(moment) if moment is not None else Text("starting processes")

        with Live(get_renderable=draw, console=self._console, refresh_per_second=_RATE, transient=True):
            yield

    def draw(self, moment: Moment) -> RenderableType:
        """One picture."""
        view = moment.view
        versions = [p for p in view.publications.values() if p is not None and p.state in ("moving", "committed")]
        newest = max(versions, key=lambda p: p.weight_version, default=None)
        head = f"{moment.seconds:5.1f} s   epoch {view.membership_epoch}"
        if newest is not None:
            head += f"   version {newest.weight_version} ({newest.label}) {newest.state}"
        if moment.transfer is not None:
            head += f"   transfer {moment.transfer.state} in epoch {moment.transfer.epoch}"
        lines = Group(*(line_text(line) for line in moment.lines[-_LINES:]))
        title = f"elastic-reshard demo: {self._title}"
        return Group(Panel(Group(Text(head), self._members(moment)), title=title), Panel(lines, title="what happened"))

    def _members(self, moment: Moment) -> Table:
        table = Table(expand=True, box=None)
        for column in ("host", "member", "process", "mover", "group", "version", "landed"):
            table.add_column(column, no_wrap=column != "mover", ratio=3 if column in ("mover", "landed") else None)
        docs = [m for m in moment.view.members.values() if m is not None and m.state not in _GONE]
        last = ""
        for doc in sorted(docs, key=lambda m: (m.roles == {"destination"}, m.host, m.group, m.rank, m.state)):
            group = moment.view.groups.get(doc.group)
            first = group is not None and doc.rank == 0 and doc.id in group.members
            table.add_row(
                doc.host if doc.host != last else "", name_of(doc.id), _coloured(doc.state), _mover(doc, moment),
                *self._of_group(group if first else None, doc, moment),
            )  # fmt: skip
            last = doc.host
        return table

    def _of_group(self, group: GroupDoc | None, doc: MemberDoc, moment: Moment) -> tuple[RenderableType, ...]:
        """State, version and what has landed, in the row of an engine's first rank."""
        if group is None or "destination" not in doc.roles:
            return "", "", ""
        landed: RenderableType = ""
        if moment.transfer is not None and any(p.group == group.name for p in moment.transfer.destinations):
            cells = min(self._cells, self._landed(group, moment.transfer, moment))
            landed = Table.grid(padding=(0, 1))
            landed.add_row(ProgressBar(self._cells, cells, width=20), f"{cells}/{self._cells} cells")
        return _coloured(group.state), str(group.serving), landed

    def _landed(self, group: GroupDoc, transfer: TransferDoc, moment: Moment) -> int:
        """Cells of a group that are there: those that had landed before this transfer, and those of it."""
        found = 0
        for rank, member in enumerate(group.members):
            basis = unpack(transfer.basis.get(member, ""), self._of_rank[rank])
            found += int(np.unpackbits(np.frombuffer(basis, dtype=np.uint8)).sum())
            if transfer.state != "forming":
                found += moment.landed.get(member, 0)
        return found


def _coloured(word: str) -> Text:
    return Text(str(word), _COLOURS.get(str(word), ""))


def _mover(doc: MemberDoc, moment: Moment) -> Text:
    """What is known of a member's mover."""
    host = moment.hosts.get(doc.host)
    said: MoverSaid | None = host.movers.get(doc.id) if host is not None else None
    if said is None:
        return Text("-", "dim")
    if said.state == "ended":
        return Text(f"condemned: {plain(said.condemned)}" if said.condemned else "killed", _COLOURS["ended"])
    if moment.transfer is None or said.transfer != moment.transfer.id or said.state == "out":
        return Text("idle", "dim")
    waits = f", waits for {name_of(said.waits[0])}" if said.waits is not None else ""
    return Text(f"{said.state}{waits}", _COLOURS["running"])


# -- at the end


def tables(outcome: Outcome) -> RenderableType:
    """What came of it."""
    verdict = Text("all as promised", "bold green")
    if outcome.wrong:
        verdict = Text("WRONG: " + "; ".join(outcome.wrong), _COLOURS["wrong"])
    compared = f"{outcome.compared / 2**20:.0f} MiB compared bit for bit, in {outcome.seconds:.1f} s: "
    return Group(_versions(outcome), _faults(outcome), _changes(outcome), _proofs(outcome), Text(compared) + verdict)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _seconds(value: float | None) -> str:
    return f"{value:.2f} s" if value is not None else "-"


def _versions(outcome: Outcome) -> Table:
    table = _table(
        "Versions", "version", "label", "epoch", "engines", "over the network", "needed", "publish", "everywhere", ""
    )
    for r in outcome.refits:
        table.add_row(
            str(r.version), r.label, str(r.epoch), str(len(r.engines)), _mib(r.network), _mib(r.needed), _seconds(r.copy),
            _seconds(r.seconds), r.note,
        )  # fmt: skip
    return table


def _faults(outcome: Outcome) -> Table:
    table = _table(
        "Faults", "what", "whom", "version", "landed", "noticed", "replaced", "committed", "everywhere", "moved again", "why"
    )  # fmt: skip
    for f in outcome.faults:
        landed = f"{f.landed:.0%}" if f.landed is not None else "-"
        table.add_row(
            f.what, f.whom, str(f.version), landed, _seconds(f.noticed), _seconds(f.replaced), _seconds(f.committed),
            _seconds(f.recovered), _mib(f.resent), f.why,
        )  # fmt: skip
    return table


def _changes(outcome: Outcome) -> Table:
    table = _table("Changes", "what", "who", "done after", "over the network", "the others")
    for c in outcome.changes:
        others = "did nothing" if c.others else "HAD TO INSTALL"
        table.add_row(c.what, c.whom, _seconds(c.seconds), _mib(c.network), others)
    return table


def _proofs(outcome: Outcome) -> Table:
    table = _table(
        "What engines serve at the end", "engine", "host", "version", "label", "state", "compared", "wrong tensors"
    )
    for p in outcome.proofs:
        table.add_row(p.engine, p.host, str(p.version), p.label, p.state, _mib(p.nbytes), ", ".join(p.wrong) or "none")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
