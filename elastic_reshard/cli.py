"""The command line: `elastic-reshard demo | plan | bench | supervisor | status | watch | leave | drain | shrink | grow |
chaos`. Results go to standard output, progress to standard error.

Exit codes: 0 done; 1 the work failed (a byte was wrong, a process was lost, nobody answered, fewer came than were asked for);
2 the input cannot be served, or was refused: nothing was done; 3 another supervisor has taken over; 4 asked, but not done in
time: ask again to see how far it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from elastic_reshard import cli_chaos, cli_control, cli_doctor, cli_job
from elastic_reshard.errors import (
    CatalogError,
    Fenced,
    LayoutError,
    PlanError,
    ProtocolError,
    RefitTimeout,
    ReshardError,
)
from elastic_reshard.layout import ModelLayout, catalog

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Weights resharded from M ranks to N.",
    epilog="Exit codes: 0 done; 1 failed, or nobody answered; 2 refused, nothing was done; 3 another supervisor has taken "
    "over; 4 asked, but not done in time.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measuring programs.")
app.add_typer(bench_app, name="bench")
cli_job.add_to(app)
cli_chaos.add_to(app)
cli_control.add_to(bench_app)
cli_doctor.add_to(app)
# Into a file or a pipe tables go at full width.
_out, _err = Console(width=None if sys.stdout.isatty() else 200, markup=False), Console(stderr=True, markup=False)

Model = Annotated[str, typer.Option(help="A model of the catalog.")]
SourceOption = Annotated[str, typer.Option("--source", help="The trainers' parallelism, such as fsdp4 or tp2xpp2.")]
DestinationOption = Annotated[str, typer.Option("--destination", help="The engines' parallelism, such as tp2xdp2.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def main() -> None:
    """Entry point: errors of the package become one sentence and an exit code, never a traceback."""
    try:
        app()
    except ReshardError as error:
        _fail(error)


def _fail(error: ReshardError) -> NoReturn:
    _err.print(f"elastic-reshard: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    if isinstance(error, Fenced):
        raise SystemExit(3)
    if isinstance(error, RefitTimeout):
        raise SystemExit(4)
    raise SystemExit(2 if isinstance(error, CatalogError | LayoutError | PlanError | ProtocolError) else 1)


def _layouts(model: str, source: str, destination: str) -> tuple[ModelLayout, ModelLayout, int, int]:
    spec = catalog.model(model)
    a, b = catalog.Parallelism.parse(source), catalog.Parallelism.parse(destination)
    return catalog.layout(spec, a), catalog.layout(spec, b, first_rank=a.world), a.world, b.world


def _need_memory(nbytes: int, what: str) -> None:
    """Refuse what would not fit into the memory that is free now."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    if nbytes > free:
        raise LayoutError(
            f"{what} needs about {nbytes / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free; choose a smaller model."
        )


def _most_processes(count: int) -> None:
    if count > 64:
        raise LayoutError(f"{count} members are {count} processes of this machine; at most 64 are started.")


def _local_bytes(layout: ModelLayout, ranks: Sequence[int]) -> int:
    return sum(layout.local_nbytes(rank) for rank in ranks)


@app.command()
def demo(
    model: Model = "Qwen3-0.6B",
    mib: Annotated[int, typer.Option(min=1, max=1 << 14, help="What the model is scaled down to.")] = 48,
    versions: Annotated[
        int | None,
        typer.Option(min=2, max=1000, help="Refits, 8 or more; default 30. With --bare: by each method, default 5."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Who is hit, when, in which order.")] = 0,
    bare: Annotated[
        bool, typer.Option(help="The bare reshard call against gather-and-broadcast, the model at its real size.")
    ] = False,
    json_: Json = False,
) -> None:
    """Refit engines in a loop while movers and trainers are killed, frozen and replaced, and engines come and go.

    On labelled hosts of this machine. Every bit of every version is compared; exit code 1 if one was wrong, or anything else.
    """
    if bare:
        _bare_demo(model, versions or 5, json_)
        return
    from elastic_reshard.bench.elastic_demo import play
    from elastic_reshard.bench.elastic_demo_cast import DemoSetup
    from elastic_reshard.bench.elastic_demo_view import Picture, line_text, no_screen, tables

    setup = DemoSetup(model, mib << 20, versions or 30, seed)
    _need_memory(setup.memory, f"the demo with {mib} MiB")
    live = _out.is_terminal and _err.is_terminal and not json_
    screen = Picture(setup, _err).live if live else no_screen
    outcome = play(setup, screen, lambda line: None if live else _err.print(line_text(line), soft_wrap=True))
    _out.print_json(json.dumps(outcome.to_data())) if json_ else _out.print(tables(outcome))
    if outcome.wrong:
        raise typer.Exit(1)


def _bare_demo(model: str, versions: int, json_: bool) -> None:
    """2 FSDP2 trainers to 4 inference members (TP2 DP2), several times, checked bit by bit."""
    spec = catalog.model(model)
    whole = spec.numel * 2
    # Trainers twice while FSDP2 shards them, two engines, and the baseline's buckets.
    _need_memory(5 * whole + (1 << 30), f"the demo with {spec.name}")
    from elastic_reshard.bench.demo import play

    with _Bar(2 * versions) as step:
        rows = play(
            model,
            versions,
            lambda rank, event: step(f"{event['method']}, version {event['version']}") if not rank else None,
        )
    if json_:
        _out.print_json(json.dumps([_fields(r) for r in rows]))
        return
    table = Table(title=f"{spec.name}, {whole / 1e9:.2f} GB in bf16: FSDP2 x 2 -> TP2 DP2; every bit checked")
    for column in ("method", "first refit", "later", "received", "pulled", "speed-up"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    slowest = rows[-1].warm
    for r in rows:
        table.add_row(
            r.method,
            f"{r.cold:.2f} s",
            f"{r.warm:.3f} s",
            _size(r.received),
            _size(r.pulled),
            f"{slowest / r.warm:.1f}x",
        )
    _out.print(table)


def _fields(row: Any) -> dict[str, Any]:
    """A row's fields, for JSON."""

    return asdict(row)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes else "-"


class _Bar:
    """A bar on standard error; yields a function that advances it with a label."""

    def __init__(self, total: int) -> None:
        self.bar = Progress(
            TextColumn("{task.description:<48}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(), console=_err,
        )  # fmt: skip
        self.task = self.bar.add_task("starting processes", total=total)

    def __enter__(self) -> Callable[[str], None]:
        self.bar.start()
        return lambda label: self.bar.update(self.task, advance=1, description=label)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


@app.command()
def plan(
    model: Model = "Qwen3-0.6B",
    source: SourceOption = "fsdp4",
    destination: DestinationOption = "tp2xdp2",
    domain: Annotated[int, typer.Option(min=1, help="Members of one domain: they map each other's memory.")] = 8,
    member: Annotated[int | None, typer.Option(help="Explain one member's part.")] = None,
    landing: Annotated[bool, typer.Option(help="Land cells for a later install, as the elastic layer does.")] = False,
    json_: Json = False,
) -> None:
    """Explain a refit between two layouts of a model: who sends what to whom, and what it costs at least."""
    from elastic_reshard.plan import Plan, PlanOptions, Topology
    from elastic_reshard.plan.explain import explain, to_json

    a, b, sources, destinations = _layouts(model, source, destination)
    # Source and destination hosts are unlike ones.
    labels = [("s", i // domain) for i in range(sources)] + [("d", i // domain) for i in range(destinations)]
    made = Plan.between(a, b, Topology.of(labels), PlanOptions(landing=landing))
    if json_:
        _out.print_json(json.dumps(to_json(made)))
    else:
        _out.print(explain(made, member), markup=False, highlight=False, soft_wrap=True)


@bench_app.command("refit")
def bench_refit(
    model: Model = "Qwen3-0.6B",
    source: Annotated[str, typer.Option(help="As for plan; default fsdp4, with --elastic fsdp2.")] = "",
    destination: Annotated[
        str, typer.Option(help="As for plan; default tp4, with --elastic tp2 for each engine.")
    ] = "",
    repeats: Annotated[int, typer.Option(min=2, max=1000)] = 5,
    elastic: Annotated[
        bool, typer.Option(help="Publish, commit and install through a supervisor; one domain.")
    ] = False,
    engines: Annotated[
        int, typer.Option(min=1, max=16, help="With --elastic: engines; one more joins at the end.")
    ] = 2,
    cast: Annotated[bool, typer.Option(help="With --elastic: trainers hold float32.")] = False,
    staging: Annotated[int, typer.Option(min=4, help="Staging of each member, MiB.")] = 64,
    per_tensor: Annotated[bool, typer.Option(help="Also the baselines that go tensor by tensor; slow.")] = True,
    json_: Json = False,
) -> None:
    """The reshard against gather-and-broadcast and memcpy, in one run, every byte checked after each method."""
    if elastic:
        _bench_elastic(model, source or "fsdp2", destination or "tp2", repeats, engines, cast, json_)
        return
    source, destination = source or "fsdp4", destination or "tp4"
    a, b, sources, destinations = _layouts(model, source, destination)
    _most_processes(sources + destinations)
    held = _local_bytes(a, range(sources)) + _local_bytes(b, range(sources, sources + destinations))
    _need_memory(3 * held + (sources + destinations) * (256 << 20), "this benchmark")
    from elastic_reshard.bench.refit import Setup, measure

    setup = Setup(a, b, sources, destinations, repeats, staging << 20, per_tensor)
    methods = 8 + 2 * per_tensor
    with _Bar(methods) as step:
        rows = measure(setup, lambda rank, event: step(event["method"]) if not rank else None)
    if json_:
        _out.print_json(json.dumps([r.to_data() for r in rows]))
        return
    from elastic_reshard.bench.tables import refit_table

    _out.print(refit_table(f"{model} {source} -> {destination}, {a.nbytes / 1e9:.2f} GB, {repeats} repeats", rows))


def _bench_elastic(
    model: str, source: str, destination: str, repeats: int, engines: int, cast: bool, json_: bool
) -> None:
    """`bench refit --elastic`: the model, and a small one for the latency of the protocol alone."""
    a, _, sources, ranks = _layouts(model, source, destination)
    b = catalog.layout(catalog.model(model), catalog.Parallelism.parse(destination))
    _most_processes(sources + (engines + 1) * ranks)
    trainers, served = _local_bytes(a, range(sources)), _local_bytes(b, range(ranks))
    _need_memory((6 if cast else 4) * trainers + (engines + 1) * served + (4 << 30), "this benchmark")
    from elastic_reshard.bench.elastic import ElasticSetup, measure_elastic
    from elastic_reshard.bench.tables import elastic_table

    tiny = catalog.model("tiny")
    small = [catalog.layout(tiny, catalog.Parallelism.parse(p)) for p in (source, destination)]
    setup = ElasticSetup(a, b, sources, engines, ranks, repeats, cast)
    with _Bar(2 * repeats + 204) as step:
        figures = measure_elastic(setup, step)
        empty = measure_elastic(ElasticSetup(small[0], small[1], sources, engines, ranks, 200, faults=False), step)
    if json_:
        _out.print_json(json.dumps({"model": figures.to_data(), "empty": empty.to_data()}))
        return
    title = f"{model} {source} -> {engines} engines of {destination}, {a.nbytes / 1e9:.2f} GB, {repeats} repeats"
    _out.print(elastic_table(title, figures, empty))


@bench_app.command("recovery")
def bench_recovery(
    mib: Annotated[int, typer.Option(min=4, max=1 << 16, help="Of the synthetic model, bf16.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Refits without a fault.")] = 5,
    rebuilds: Annotated[
        int, typer.Option(min=5, max=100_000, help="Communicators formed in a row, of a small model.")
    ] = 200,
    json_: Json = False,
) -> None:
    """Weights between hosts, and how long it takes to go on after the loss of a mover, a host or the supervisor.

    Every byte of every version is checked. Exit code 1 if one was wrong, or an outcome was."""
    from elastic_reshard.bench.recovery import RecoverySetup, measure_recovery, memory_needed, steps
    from elastic_reshard.bench.rows import rows_table

    setup = RecoverySetup(mib << 20, repeats, rebuilds, min(mib, 8) << 20)
    _need_memory(memory_needed(setup), "this benchmark")
    with _Bar(steps(setup)) as step:
        rows = measure_recovery(setup, step)
    if json_:
        _out.print_json(json.dumps([row.to_data() for row in rows]))
    else:
        _out.print(rows_table(f"{mib} MiB, 2 trainers -> 2 engines of TP2, four hosts; every byte checked", rows))
    if not all(row.right for row in rows):
        raise SystemExit(1)


@bench_app.command("gpu")
def bench_gpu(
    model: Annotated[str, typer.Option(help="A model of the catalog; cut down to what fits.")] = "Qwen3-4B",
    minutes: Annotated[
        float, typer.Option(min=0, max=60, help="For all of it; 0: 8.4 at most, which all sections need.")
    ] = 0.0,
    only: Annotated[str, typer.Option(help="Some sections, separated by commas.")] = "",
    device: Annotated[str, typer.Option(help="cuda; or pretend, to try the program without a GPU.")] = "cuda",
    scale: Annotated[float, typer.Option(min=0.0001, max=4, help="Of sizes that are not the model's.")] = 1.0,
    keep: Annotated[Path | None, typer.Option(help="A file for the JSON of all sections so far.")] = None,
    json_: Json = False,
) -> None:
    """All measurements on GPUs in one go: copies, publish and install, nccl.m2n, sharing the device, movers, losses.

    One GPU: two trainers and an engine of TP2 on it; several: a member on each. Every byte is checked. What fails is
    reported in its place, and the rest goes on. Exit code 1 if a byte or an outcome was wrong, 4 if something could not be
    measured."""
    from elastic_reshard.bench.gpu import SECTIONS, measure_gpu, setup_here, table

    chosen = [name for name in only.split(",") if name]
    unknown = sorted({*chosen} - {*SECTIONS})
    if unknown or device not in ("cuda", "pretend"):
        got = ", ".join(unknown) or device
        raise LayoutError(f"--only takes {', '.join(SECTIONS)}, --device cuda or pretend; got {got}.")
    setup = setup_here(model, device, minutes * 60, scale)
    found = measure_gpu(setup, lambda name: _err.print(f"{name} ...", highlight=False), chosen, keep)
    _out.print_json(json.dumps(found)) if json_ else _out.print(table(found))
    if not found["right"]:
        raise SystemExit(1)
    if found["failed"]:
        _err.print(f"not measured: {', '.join(found['failed'])}", highlight=False, markup=False)
        raise SystemExit(4)


@bench_app.command("plan")
def bench_plan(
    members: Annotated[str, typer.Option(help="Group sizes, separated by commas.")] = "64,256,1024,4096,10000",
    repeats: Annotated[int, typer.Option(min=1, max=100)] = 3,
    json_: Json = False,
) -> None:
    """The time to plan one member's slice, against a pairwise planner."""
    try:
        sizes = [int(n) for n in members.split(",")]
    except ValueError:
        raise LayoutError(f"--members wants numbers separated by commas, got {members!r}.") from None
    from elastic_reshard.bench import plan as bench

    rows = bench.run(sizes, repeats)
    _out.print_json(json.dumps([_fields(r) for r in rows])) if json_ else _out.print(bench.table(rows))


if __name__ == "__main__":
    main()
