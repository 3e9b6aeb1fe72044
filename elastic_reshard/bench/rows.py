"""Lines of a table of figures, each with what is wanted and whether it was right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

__all__ = ["Row", "rows_table"]


@dataclass
class Row:
    """One line: what was measured, in a unit; what is wanted. kept: whether a bound was kept, None where none is set. right:
    whether bytes and outcomes were."""

    what: str
    value: float | None
    unit: str
    wanted: str
    kept: bool | None = None
    right: bool = True
    beside: dict[str, Any] = field(default_factory=dict)

    def to_data(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def _cells(rows: list[Row]) -> Iterator[tuple[str, str, str, str, str]]:
    for row in rows:
        value = (
            "-"
            if row.value is None
            else f"{row.value:.3f} {row.unit}"
            if row.unit == "s"
            else f"{row.value:.0f} {row.unit}"
        )
        bound = {True: "kept", False: "not kept", None: ""}[row.kept]
        right = "right" if row.right else "WRONG"
        yield row.what, value.strip(), row.wanted, f"{bound} {right}".strip(), ", ".join(_shown(row.beside))


def _shown(beside: Mapping[str, Any]) -> Iterator[str]:
    for key, found in beside.items():
        if isinstance(found, dict) and isinstance(found.get("all"), dict):
            yield f"{key}: {_totals(found['all'])}"
        else:
            yield f"{key} {found}"


def _totals(held: Mapping[str, int]) -> str:
    return (
        f"{held['processes']} processes with {held['descriptors']} descriptors, {held['threads']} threads, "
        f"{held['anonymous'] / 2**20:.0f} MiB of their own, {held['memfd'] / 2**20:.0f} MiB of memfds"
    )


def rows_table(title: str, rows: list[Row]) -> Table:
    """One line a figure, with what was wanted, whether it was right, and what it consists of."""
    table = Table(title=title, show_lines=True)
    for column in ("what", "measured", "wanted", "", "beside"):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for cells in _cells(rows):
        table.add_row(*cells)
    return table
