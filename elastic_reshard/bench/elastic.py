"""`bench refit --elastic`: publish, commit and install through a supervisor, against the bare copies they are made of.

One process per member, one domain, real supervisor process. In every repetition the bare copies of the same bytes are taken
beside the refit, by the same processes at the same time, so that ratios are of one run. Bytes are checked at the first and
the last version.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.distributed_c10d import PrefixStore

from elastic_reshard.arena import empty
from elastic_reshard.bench.spawn import Worker
from elastic_reshard.bench.spawn import run as spawn
from elastic_reshard.bench.values import fill, wrong
from elastic_reshard.errors import DigestMismatch, ReshardError
from elastic_reshard.layout import ModelLayout
from elastic_reshard.layout.dtensor import torch_dtype
from elastic_reshard.member import Group, Member, join
from elastic_reshard.watchdog.runtime import running

__all__ = ["ElasticSetup", "Figures", "measure_elastic", "rows"]

_DEADLINE = 120.0
_HOST, _JOB = "bench", "bench"


@dataclass(frozen=True)
class ElasticSetup:
    """What to measure. Layouts are in group ranks. trainers: ranks of the source group; engines: destination groups of
    `engine_ranks` each; one more joins at the end. cast: trainers hold float32 and publish the layout's dtype."""

    source: ModelLayout
    destination: ModelLayout
    trainers: int
    engines: int
    engine_ranks: int
    repeats: int = 7
    cast: bool = False
    faults: bool = True

    @property
    def members(self) -> int:
        """Processes, without the engine that joins at the end."""
        return self.trainers + self.engines * self.engine_ranks


@dataclass
class Figures:
    """Seconds, of the slowest member; lists have one entry per warm repetition."""

    cold: dict[str, float] = field(default_factory=dict)
    memcpy: list[float] = field(default_factory=list)
    publish: list[float] = field(default_factory=list)
    pull: list[float] = field(default_factory=list)
    install: list[float] = field(default_factory=list)
    everywhere: list[float] = field(default_factory=list)
    joiner: dict[str, float] = field(default_factory=dict)
    faults: dict[str, float] = field(default_factory=dict)
    published: int = 0
    installed: int = 0

    def to_data(self) -> dict[str, Any]:
        """JSON-ready."""
        return dict(self.__dict__)


def measure_elastic(setup: ElasticSetup, on_event: Callable[[str], None] | None = None) -> Figures:
    """Run everything; blocks for a minute or so. DigestMismatch when a wrong byte was installed."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        with _Supervisor(Path(folder)) as supervisor:
            size = setup.members + setup.engine_ranks

            def event(rank: int, said: dict[str, Any]) -> None:
                if "do" in said:
                    supervisor.act(said["do"], Path(said["then"]))
                if on_event is not None and not rank:
                    on_event(said.get("phase", said.get("do", "")))

            results = spawn(_member, size, setup, supervisor.url, str(folder), timeout=600, on_event=event)
    return _summed_up(setup, results)


class _Supervisor:
    """The supervisor as a process of its own, and the faults that this benchmark inflicts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.port = 0

    def __enter__(self) -> _Supervisor:
        self.start()
        return self

    def start(self) -> None:
        """Start, or start again on the same journal and port."""
        command = [
            sys.executable, "-m", "elastic_reshard", "supervisor", "--job", _JOB, "--port", str(self.port),
            "--journal", str(self.folder / "journal.sqlite"), "--json",
        ]  # fmt: skip
        environment = os.environ | {"ELASTIC_RESHARD_RUNTIME": str(self.folder)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
        )
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            raise ReshardError("the supervisor did not start; run `elastic-reshard supervisor` to see why")
        self.url = json.loads(line)["url"]
        self.port = int(self.url.rpartition(":")[2])

    def act(self, what: str, then: Path) -> None:
        """Inflict a fault, and make the file `then` holding the time from which it counts."""
        if what.startswith("watchdog"):
            found = running(_JOB, _HOST, self.folder)
            if found is None:
                raise ReshardError("no watchdog runs")
            os.kill(found.pid, signal.SIGKILL if what.endswith("SIGKILLed") else signal.SIGSTOP)
            now = time.monotonic()
        else:
            self.end(signal.SIGKILL)
            self.start()
            now = time.monotonic()
        scratch = then.with_suffix(".part")
        scratch.write_text(str(now))
        scratch.rename(then)

    def end(self, how: signal.Signals) -> None:
        """End the process and reap it."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(10)
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process = None

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGTERM)


def _tensors(layout: ModelLayout, rank: int, dtype: str | None) -> dict[str, torch.Tensor]:
    shapes = {name: t.local_shape(rank) for name, t in layout.items()}
    return {
        name: torch.zeros(shape, dtype=torch_dtype(dtype or layout[name].dtype))
        for name, shape in shapes.items()
        if shape is not None
    }


class _Bench:
    """One member's life in the benchmark."""

    def __init__(self, worker: Worker, setup: ElasticSetup, url: str, runtime: str) -> None:
        self.worker, self.setup, self.url, self.runtime = worker, setup, url, runtime
        self.is_source = worker.rank < setup.trainers
        engine, rank = divmod(worker.rank - setup.trainers, setup.engine_ranks)
        self.rank = worker.rank if self.is_source else rank
        self.group = Group("trainer", setup.trainers, self.rank) if self.is_source else Group(
            f"engine-{engine}", setup.engine_ranks, rank)  # fmt: skip
        self.joins_late = worker.rank >= setup.members
        self.layout = setup.source if self.is_source else setup.destination
        self.tensors = _tensors(self.layout, self.rank, "float32" if self.is_source and setup.cast else None)
        self.store = PrefixStore("elastic", worker.store)
        self.barriers = 0
        self.told: dict[str, Any] = {"samples": [], "wrong": [], "faults": {}}
        self.version = 0

    def barrier(self, size: int) -> None:
        """Wait for the first `size` members."""
        self.barriers += 1
        self.store.set(f"{self.barriers}/{self.worker.rank}", "")
        self.store.wait([f"{self.barriers}/{rank}" for rank in range(size)])

    def join(self) -> Member:
        """As a user would."""
        given = self.layout
        if self.is_source and self.setup.cast:
            given = ModelLayout({n: replace(t, dtype="float32") for n, t in given.items()})
        return join(
            self.url, name=f"{self.group.name}-{self.rank}", role="source" if self.is_source else "destination",
            group=self.group, tensors=self.tensors, layout=given, host=_HOST, runtime=self.runtime,
            wire_dtype=torch.bfloat16 if self.is_source and self.setup.cast else None, deadline=_DEADLINE,
        )  # fmt: skip

    def refit(self, m: Member) -> dict[str, float]:
        """One version, from all trainers to all engines."""
        self.version += 1
        begun = time.monotonic()
        if self.is_source:
            publication = m.publish(label=f"step-{self.version}", timeout=_DEADLINE)
            stalled = time.monotonic() - begun
            publication.wait("committed", _DEADLINE)
            return {"begun": begun, "publish": stalled, "nbytes": publication.nbytes}
        while m.weight_version < self.version:
            m.receive(_DEADLINE)
        done = time.monotonic()
        figures = m.last_install
        return {"done": done, "install": figures["install_pause"], "nbytes": figures["nbytes"]}

    def bare(self, m: Member) -> Callable[[], float]:
        """The same bytes, without any protocol: a flat copy (with the cast) or the same pull."""
        if self.is_source:
            nbytes = int(self.told["samples"][0]["nbytes"])
            if self.setup.cast:
                source, target = torch.ones(nbytes // 2), empty((nbytes // 2,), torch.bfloat16)
                return _timed(lambda: target.copy_(source))
            flat, into = (empty((nbytes,), torch.uint8).fill_(1).numpy() for _ in range(2))
            return _timed(lambda: np.copyto(into, flat))
        return _timed(m.rehearse_install())

    def check(self) -> None:
        """Remember every wrong byte."""
        if not self.is_source and not self.setup.cast:
            self.told["wrong"] += wrong(self.layout, self.tensors, self.rank, self.version)

    def fill(self) -> None:
        """Write the next version."""
        if self.is_source and not self.setup.cast:
            fill(self.layout, self.tensors, self.rank, self.version + 1)


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def once() -> float:
        begun = time.monotonic()
        work()
        return time.monotonic() - begun

    return once


def _member(worker: Worker, setup: ElasticSetup, url: str, runtime: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    bench = _Bench(worker, setup, url, runtime)
    if bench.joins_late:
        return _late(bench)
    begun = time.monotonic()
    with bench.join() as m:
        bench.told["join"] = time.monotonic() - begun
        bench.fill()
        bench.barrier(setup.members)
        bench.told["samples"].append(bench.refit(m))
        bench.check()
        _phase(bench, "first refit")
        bench.barrier(setup.members)
        bench.refit(m)  # the other slot is cold too
        bare = bench.bare(m)
        bare()
        for repeat in range(setup.repeats):
            if repeat == setup.repeats - 1:
                bench.fill()
            bench.barrier(setup.members)
            sample = bench.refit(m)
            if repeat == setup.repeats - 1:
                bench.check()  # before the bare copy, which may read the other slot
            bench.barrier(setup.members)
            if bench.is_source:  # as in a refit: sources copy together, then destinations
                sample["bare"] = bare()
            bench.barrier(setup.members)
            if not bench.is_source:
                sample["bare"] = bare()
            bench.told["samples"].append(sample)
            _phase(bench, f"refit {repeat + 1}")
        bench.barrier(setup.members + setup.engine_ranks)  # now another engine joins
        bench.barrier(setup.members + setup.engine_ranks)
        if setup.faults:
            for what in ("watchdog SIGKILLed", "watchdog SIGSTOPped", "supervisor SIGKILLed"):
                bench.told["faults"][what] = _fault(bench, m, what)
        bench.barrier(setup.members)
    return bench.told


def _phase(bench: _Bench, phase: str) -> None:
    bench.worker.report({"phase": phase})


def _late(bench: _Bench) -> dict[str, Any]:
    """An engine that joins when all the others have installed."""
    everybody = bench.setup.members + bench.setup.engine_ranks
    bench.barriers += 2 + 3 * bench.setup.repeats
    bench.version = 2 + bench.setup.repeats
    bench.barrier(everybody)
    begun = time.monotonic()
    with bench.join() as m:
        joined = time.monotonic()
        bench.told["version"] = m.receive(_DEADLINE)
        bench.told["joiner"] = {"join": joined - begun, "first install": time.monotonic() - joined}
        bench.check()
        bench.barrier(everybody)
    return bench.told


def _fault(bench: _Bench, m: Member, what: str) -> float:
    """Seconds from a fault (for the supervisor: from when it is back) to the next version installed everywhere."""
    then = Path(bench.runtime) / f"fault-{what.replace(' ', '-')}"
    bench.barrier(bench.setup.members)
    if not bench.worker.rank:
        bench.worker.report({"do": what, "then": str(then)})
    deadline = time.monotonic() + _DEADLINE
    while not then.exists():
        if time.monotonic() > deadline:
            raise ReshardError(f"the fault {what!r} was not inflicted")
        time.sleep(0.001)
    since = float(then.read_text())
    bench.refit(m)
    return time.monotonic() - since


def _summed_up(setup: ElasticSetup, results: list[dict[str, Any]]) -> Figures:
    sources, engines = results[: setup.trainers], results[setup.trainers : setup.members]
    late = results[setup.members :]
    bad = sorted({name for r in results for name in r["wrong"]})
    if bad:
        raise DigestMismatch([(name, "after an install", -1) for name in bad])
    found = Figures()
    found.published = sum(int(r["samples"][0]["nbytes"]) for r in sources)
    found.installed = sum(int(r["samples"][0]["nbytes"]) for r in engines)
    for i in range(len(sources[0]["samples"])):
        published = [r["samples"][i] for r in sources]
        installed = [r["samples"][i] for r in engines]
        everywhere = max(s["done"] for s in installed) - max(s["begun"] for s in published)
        publish, install = max(s["publish"] for s in published), max(s["install"] for s in installed)
        if not i:
            found.cold = {"join": max(r["join"] for r in results[: setup.members]), "publish": publish,
                          "install": install, "everywhere": everywhere}  # fmt: skip
            continue
        found.publish.append(publish)
        found.install.append(install)
        found.everywhere.append(everywhere)
        found.memcpy.append(max(s["bare"] for s in published))
        found.pull.append(max(s["bare"] for s in installed))
    found.joiner = {key: max(r["joiner"][key] for r in late) for key in late[0]["joiner"]}
    found.faults = {what: max(r["faults"][what] for r in results[: setup.members]) for what in results[0]["faults"]}
    return found


def rows(figures: Figures, empty: Figures | None) -> Iterator[Mapping[str, Any]]:
    """(what, value, wanted) for each line of the table; seconds are medians."""

    def median(samples: list[float]) -> float:
        return statistics.median(samples) if samples else 0.0

    publish, memcpy = median(figures.publish), median(figures.memcpy)
    install, pull = median(figures.install), median(figures.pull)
    ratio = median([a / b for a, b in zip(figures.publish, figures.memcpy, strict=True)])
    yield {"what": "publish stall", "value": publish, "of": memcpy, "ratio": ratio, "wanted": "<= 1.15x a memcpy"}
    ratio = median([a / b for a, b in zip(figures.install, figures.pull, strict=True)])
    yield {"what": "install pause", "value": install, "of": pull, "ratio": ratio, "wanted": "<= 1.15x the bare pull"}
    over = median([e - p - b for e, p, b in zip(figures.everywhere, figures.publish, figures.pull, strict=True)])
    yield {"what": "publish called to installed everywhere", "value": median(figures.everywhere), "of": publish + pull,
           "over": over, "wanted": "<= publish copy + bare pull + 0.05 s"}  # fmt: skip
    if empty is not None:
        ordered = sorted(empty.everywhere)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        yield {"what": "the same, empty model, p50", "value": median(ordered), "p99": p99, "wanted": "p50 <= 0.015 s"}
    yield {"what": "joiner: join, first install", "value": figures.joiner.get("first install", 0.0),
           "of": figures.joiner.get("join", 0.0), "wanted": "from the domain's slots"}  # fmt: skip
    for what, seconds in figures.faults.items():
        wanted = "<= 2 s after it is back" if what.startswith("supervisor") else "<= 3 s"
        yield {"what": f"{what}: next version installed after", "value": seconds, "wanted": wanted}
