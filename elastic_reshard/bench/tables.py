"""Benchmark results as tables for a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from elastic_reshard.bench.elastic import Figures, rows
from elastic_reshard.bench.refit import MEMCPY, PACKED, Row

__all__ = ["elastic_table", "refit_table"]


def refit_table(title: str, rows: Sequence[Row]) -> Table:
    """One line a method: seconds of the slowest member, cold and warm (median, best), ratios to the packed baselines and
    to memcpy (of the bare transfer), bytes by link, memory beyond the tensors."""
    table = Table(title=title)
    for column in ("method", "cold s", "warm s", "best s", "transfer s", "vs all-gather", "vs one root", "of memcpy",
                   "network GB", "pulled GB", "memory MiB"):  # fmt: skip
        table.add_column(column, justify="left" if column == "method" else "right")
    by_name = {r.method: r for r in rows}
    all_gather, root = (min(r.seconds for n, r in by_name.items() if n.startswith(p)) for p in PACKED)
    for r in rows:
        bare = r.transfer if r.transfer is not None else r.seconds
        table.add_row(
            r.method, f"{r.cold:.2f}", f"{r.seconds:.3f}", f"{r.best:.3f}",
            f"{r.transfer:.3f}" if r.transfer is not None else "-",
            f"{all_gather / r.seconds:.1f}x", f"{root / r.seconds:.1f}x", f"{by_name[MEMCPY].seconds / bare:.0%}",
            f"{r.network / 1e9:.2f}", f"{r.pulled / 1e9:.2f}", f"{r.memory / 2**20:.0f}",
        )  # fmt: skip
    return table


def elastic_table(title: str, figures: Figures, empty: Figures | None) -> Table:
    """One line a figure: seconds (medians of the slowest member), what they are compared with, and what was wanted."""
    table = Table(title=title)
    for column in ("what", "seconds", "beside", "ratio or rest", "wanted"):
        table.add_column(column, justify="left" if column in ("what", "wanted") else "right")
    for what, seconds in figures.cold.items():
        table.add_row(f"cold: {what}", f"{seconds:.3f}", "", "", "")
    for row in rows(figures, empty):
        beside = f"{row['of']:.4f}" if "of" in row else f"p99 {row['p99']:.4f}" if "p99" in row else ""
        rest = f"{row['ratio']:.2f}x" if "ratio" in row else f"+{row['over']:.4f} s" if "over" in row else ""
        table.add_row(row["what"], f"{row['value']:.4f}", beside, rest, row["wanted"])
    return table
