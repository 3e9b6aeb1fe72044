"""What runs have shown: one figure, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from rich.table import Table

from rl.trace import Cost, Trace, read

__all__ = ["draw", "load", "report", "tables"]

_TITLES = {
    "elastic": "elastic_reshard",
    "baseline": "gather-and-broadcast, restart on failure",
    "quiet": "no faults",
}
_GAP = 4.0  # seconds without a step that are left open in the curve
_COLOURS = {"elastic": "#0b6e4f", "baseline": "#b23a48", "quiet": "#8a8a8a"}


def load(folder: Path) -> list[Trace]:
    """The runs that lie in a folder, each in one of its own, by mode and seed."""
    traces = [read(path) for path in sorted(folder.glob("*/events.jsonl"))]
    order = list(_TITLES)
    return sorted(
        (t for t in traces if t.steps), key=lambda t: (order.index(str(t.about["mode"])), int(t.about["seed"]))
    )


def report(folder: Path, console: Console) -> Path:
    """Tables on the console and `report.png` in the folder; its path."""
    traces = load(folder)
    for table in tables(traces):
        console.print(table)
    return draw(traces, folder / "report.png")


# -- tables


def tables(traces: Sequence[Trace]) -> list[Table]:
    """Runs, and what each fault cost."""
    return [_runs(traces), _faults(traces)]


def _runs(traces: Sequence[Trace]) -> Table:
    table = Table(title="Runs")
    for name in ("mode", "seed"):
        table.add_column(name)
    for name in ("steps", "seconds", "final reward", "steps lost", "samples checked", "largest difference", "dropped"):
        table.add_column(name, justify="right")
    for trace in traces:
        counts = trace.counts
        dropped = sum(n for what, n in counts.items() if what.startswith("dropped"))
        table.add_row(
            str(trace.about["mode"]), str(trace.about["seed"]), str(max(trace.final())), f"{trace.seconds:.1f}",
            f"{trace.final_reward:.3f}", str(counts.get("lost_steps", 0)), str(trace.checked), f"{trace.difference:.1e}",
            str(dropped),
        )  # fmt: skip
    return table


def _faults(traces: Sequence[Trace]) -> Table:
    modes = [mode for mode in ("elastic", "baseline") if any(t.about["mode"] == mode and t.faults() for t in traces)]
    table = Table(
        title="Faults: seconds to recovery / wall-clock seconds lost (medians over seeds)",
        caption="*: it had not recovered when the next one came, whose cost is in it too. rl/trace.py defines both.",
    )
    table.add_column("fault")
    for mode in modes:
        table.add_column(_TITLES[mode], justify="right")
    costs = {mode: [t.costs() for t in traces if t.about["mode"] == mode] for mode in modes}
    most = max((len(run) for runs in costs.values() for run in runs), default=0)
    for i in range(most):
        about = next(run[i] for runs in costs.values() for run in runs if len(run) > i)
        cells = [_cell([run[i] for run in costs[mode] if len(run) > i]) for mode in modes]
        table.add_row(f"{about.what} {about.node} at step {about.step}", *cells)
    if modes:
        table.add_row("all of them", *(_sum(costs[mode]) for mode in modes), style="bold")
    return table


def _cell(costs: Sequence[Cost]) -> str:
    done = [(c.recovery, c.lost) for c in costs if c.recovery is not None and c.lost is not None]
    missing = len(costs) - len(done)
    late = f" ({missing} not before the end)" if missing else ""
    if not done:
        return f"-{late}"
    mark = "*" if any(c.overlaps for c in costs) else ""
    return f"{median(r for r, _ in done):.1f} / {median(lost for _, lost in done):.1f}{mark}{late}"


def _sum(runs: Sequence[Sequence[Cost]]) -> str:
    least = "at least " if any(c.lost is None for run in runs for c in run) else ""
    return f"{least}{mean(sum(c.lost or 0.0 for c in run) for run in runs):.1f}"


# -- the figure


def draw(traces: Sequence[Trace], path: Path) -> Path:
    """Reward, lag and refit time against time: the elastic run on the left, the baseline on the right; faults are marked."""
    from matplotlib.figure import Figure

    modes = [mode for mode in ("elastic", "baseline") if any(t.about["mode"] == mode for t in traces)] or ["quiet"]
    figure = Figure(figsize=(6.5 * len(modes), 8.5), layout="constrained")
    axes = figure.subplots(3, len(modes), sharex=True, sharey="row", squeeze=False)
    quiet = [t for t in traces if t.about["mode"] == "quiet"]
    for column, mode in enumerate(modes):
        mine = [t for t in traces if t.about["mode"] == mode]
        reward, lag, refit = (axes[row][column] for row in range(3))
        reward.set_title(_TITLES[mode])
        for trace in quiet if mode != "quiet" else []:
            _reward(reward, trace, _COLOURS["quiet"], 0.6, "without faults" if trace is quiet[0] else None)
        for trace in mine:
            _reward(reward, trace, _COLOURS[mode], 1.0 if trace is mine[0] else 0.35, None)
        shown = mine[0]
        lag.step([shown.at(s) for s in shown.steps], [float(s["lag"]) for s in shown.steps], color=_COLOURS[mode], lw=1)
        points = shown.refits()
        refit.plot([t for t, _ in points], [s for _, s in points], ".", ms=3, color=_COLOURS[mode])
        refit.set_yscale("log")
        refit.set_xlabel("seconds since the first step")
        for axis in (reward, lag, refit):
            _mark(axis, shown, words=axis is reward)
            axis.grid(alpha=0.25)
        if quiet and mode != "quiet":
            reward.legend(loc="lower right")
    for row, name in enumerate(("reward of a step", "lag of its samples (steps)", "publish to installed (s)")):
        axes[row][0].set_ylabel(name)
    figure.suptitle(f"GRPO on preemptible nodes, seed {traces[0].about['seed']}" if traces else "no runs")
    figure.savefig(path, dpi=130)
    return path


def _reward(axis: object, trace: Trace, colour: str, alpha: float, label: str | None) -> None:
    times: list[float] = []
    rewards: list[float] = []
    for step in trace.steps:
        if times and trace.at(step) - times[-1] > _GAP:
            times.append(times[-1])
            rewards.append(nan)
        times.append(trace.at(step))
        rewards.append(float(step["reward"]))
    axis.plot(times, rewards, color=colour, alpha=alpha, lw=1, label=label)  # type: ignore[attr-defined]


def _mark(axis: object, trace: Trace, *, words: bool) -> None:
    for cost in trace.costs():
        axis.axvline(cost.at, color="black", lw=0.8, ls="--")  # type: ignore[attr-defined]
        if cost.recovery is not None:
            axis.axvspan(cost.at, cost.at + cost.recovery, color="black", alpha=0.07)  # type: ignore[attr-defined]
        if words:
            axis.annotate(  # type: ignore[attr-defined]
                f"{cost.what} {cost.node}", (cost.at, 0.03), xycoords=("data", "axes fraction"), rotation=90, fontsize=7,
                ha="right", va="bottom",
            )  # fmt: skip
