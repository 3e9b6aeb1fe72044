"""The driver of one run: the cluster, the groups, the faults in their time, and an end by a deadline whatever happens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

import elastic_reshard as er
from elastic_reshard import on_ray
from rl.baseline import Together
from rl.calls import get
from rl.conductor import Conductor, Ranks
from rl.engine import EngineRank
from rl.hub import Hub
from rl.nodes import Nodes
from rl.schedule import Fault, Schedule
from rl.settings import RunFailed, Settings
from rl.trainer import GOODBYE, TrainerRank

__all__ = ["play"]

_TURN = 0.1
_EVICT = 3.0  # seconds of a host's silence: until then a transfer in hand waits for its movers, whatever Ray says


def play(settings: Settings, faults: tuple[Fault, ...], say: Callable[[str], None]) -> dict[str, Any]:
    """One run from its beginning to its end; what the buffer counted. Blocks for minutes, never for longer than
    `settings.patience` without a step. say: told what happens, a line at a time.

    Raises RunFailed: which wait was too long, or which sample was not of the version that it names."""
    settings.checkpoints.mkdir(parents=True, exist_ok=True)
    with Nodes(settings.job) as nodes:
        settings = replace(settings, runtime=str(nodes.runtime))
        hub: Any = ray.remote(Hub).options(num_cpus=0, resources={"head": 1}, max_concurrency=64).remote(settings)
        about = {"mode": settings.mode, "seed": settings.seed, "steps": settings.steps, "engines": settings.engines}
        get(hub.note.remote("run", **about))
        nodes.add("gang-0")
        for number in range(settings.engines):
            nodes.add(f"spot-{number}")
        with _ranks(settings, hub) as ranks:
            names = [f"engine-{number}" for number in range(settings.engines)]
            conductors = [Conductor(name, ranks, hub) for name in names]
            try:
                _watch(settings, Schedule(faults), nodes, hub, ranks, say)
                _everywhere(settings, conductors, hub, ranks)
            finally:
                for conductor in conductors:
                    conductor.close()
                ended: dict[str, Any] = get(hub.close.remote())
        return ended


@contextlib.contextmanager
def _ranks(settings: Settings, hub: Any) -> Iterator[Any]:
    """Who keeps the workers running."""
    many = {"max_concurrency": 8}
    given = {"settings": settings, "hub": hub}
    if settings.mode == "baseline":
        with Together(settings, hub) as together:
            yield together
        return
    policies = er.Policies(min_groups=1, late_after=5.0, max_lag=settings.max_lag)
    on_ray.start(
        settings.job, runtime=settings.runtime, policies=policies, deadlines=er.Deadlines(evict=_EVICT),
        actor={"resources": {"head": 1}},
    )  # fmt: skip
    fleets = [
        on_ray.Fleet(
            kind, worker, size=settings.ranks, groups=count, each={"CPU": 0.5, room: 1}, arguments=given, options=many,
            strategy="STRICT_PACK",
        )
        for kind, room, worker, count in (
            ("trainer", "gang", TrainerRank, 1), ("engine", "spot", EngineRank, settings.engines)
        )
    ]  # fmt: skip
    limits = on_ray.Limits(failures=4, pause=0.2, longest=2.0, start_within=settings.start)
    try:
        with on_ray.Groups(settings.job, fleets, limits) as groups:
            yield groups
    finally:
        try:
            _keep_events(settings)
        finally:
            on_ray.close(settings.job)


def _keep_events(settings: Settings) -> None:
    """What the supervisor tells of the run, beside the run's own events."""
    after = 0
    with on_ray.client(settings.job) as client, (Path(settings.folder) / "supervisor.jsonl").open("w") as file:
        while page := client.events(after=after, limit=1000).events:
            file.writelines(event.model_dump_json() + "\n" for event in page)
            after = page[-1].number


def _watch(
    settings: Settings, schedule: Schedule, nodes: Nodes, hub: Any, ranks: Ranks, say: Callable[[str], None]
) -> None:
    """Until the last step is done."""
    phases: dict[str, tuple[str, int]] = {}
    shown = 0
    while True:
        state = get(hub.state.remote())
        for name, run in ranks.status().items():
            now = (str(run.phase), run.attempt)
            if phases.get(name) != now:
                phases[name] = now
                hub.note.remote("group", group=name, phase=now[0], attempt=run.attempt, reason=run.reason)
                say(f"{name}: {now[0]}, attempt {run.attempt}{f' ({run.reason[:120]})' if run.reason else ''}")
                if run.phase is on_ray.Phase.GIVEN_UP:
                    raise RunFailed(f"group {name} was given up: {run.reason}")
        if state["failed"]:
            raise RunFailed(state["failed"])
        if state["over"]:
            return
        if state["step"] >= shown + 10:
            shown = state["step"]
            say(f"step {shown}")
        _preempt(schedule, state, nodes, hub, say)
        if state["since_step"] > settings.patience:
            raise RunFailed(
                f"no step for {settings.patience:g} s after step {state['step']}: groups {_words(phases)}; ready chunks: "
                f"{state['ready']} of {settings.chunks}, being sampled: {state['leased']}, in training: {state['taken']}"
            )
        time.sleep(_TURN)


def _everywhere(settings: Settings, conductors: list[Conductor], hub: Any, ranks: Ranks) -> None:
    """The last version is to be served by every engine, also by those that were lost a moment ago; then the trainers leave."""

    def until(there: Callable[[], bool], what: Callable[[], str]) -> None:
        deadline = time.monotonic() + settings.start
        while not there():
            if time.monotonic() > deadline:
                raise RunFailed(f"after the last step, within {settings.start:g} s: {what()}")
            time.sleep(_TURN)

    until(
        lambda: all(conductor.step == settings.steps for conductor in conductors),
        lambda: (
            "not served by " + ", ".join(f"{c.group} (step {c.step})" for c in conductors if c.step < settings.steps)
        ),
    )
    get(hub.tell.remote(GOODBYE, True))
    first = next(iter(ranks.status()))
    until(lambda: ranks.status()[first].phase is on_ray.Phase.DONE, lambda: f"{first} did not leave")


def _preempt(schedule: Schedule, state: Mapping[str, Any], nodes: Nodes, hub: Any, say: Callable[[str], None]) -> None:
    """Carry out what is due."""
    for name in nodes.sweep():
        hub.note.remote("fault", time.monotonic(), what="kill", node=name, step=state["step"], noticed=True)
        say(f"node {name} is gone, as it was told")
    for fault in schedule.due(state["newest"], time.monotonic()):
        hub.note.remote("fault", time.monotonic(), what=fault.what, node=fault.node, step=state["step"])
        say(f"step {state['step']}: {fault.what} node {fault.node}")
        if fault.what == "add":
            nodes.add(fault.node)
        elif fault.what == "drain":
            nodes.drain(fault.node, fault.seconds)
        else:
            nodes.kill(fault.node)


def _words(phases: Mapping[str, tuple[str, int]]) -> str:
    return ", ".join(f"{name} {phase} (attempt {attempt})" for name, (phase, attempt) in phases.items())
