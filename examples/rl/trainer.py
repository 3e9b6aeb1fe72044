"""The actor of a trainer rank: one gang trains, checks every sample against the version that it names, and publishes.

A gang goes on from the newest checkpoint, which is older than what a former gang had reached. What it trains from there is a
line of its own: samples of the steps that were lost with the former gang are not trained on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

import elastic_reshard as er
from elastic_reshard import on_ray
from rl.broadcast import Speaker
from rl.buffer import Chunk
from rl.calls import get
from rl.checking import batch_of_chunks, check
from rl.engine import attempt
from rl.grpo import Learner
from rl.loop import meet
from rl.model import build, fsdp, tensors
from rl.settings import RunFailed, Settings, World
from rl.task import Task

__all__ = ["GOODBYE", "Publisher", "TrainerRank", "newest"]

GOODBYE = "goodbye"

_KEPT = 6  # snapshots of the last versions; a sample is at most `max_lag` steps old, and a version may overtake another
_WAIT = 1.0  # seconds of one question for a batch
_VERSION = 10.0  # seconds in which a version that an engine already serves must be known here too
_CHECKPOINTS = 3  # that are kept


@dataclass(slots=True)
class _Published:
    """One publish. version: once it is known."""

    step: int
    snapshot: Mapping[str, Tensor]
    handle: Any
    version: int | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """What rank 0 tells the other ranks to do next: train on chunks, whose weights are of published steps; or leave."""

    chunks: list[Chunk] = field(default_factory=list)
    steps: Mapping[int, int] = field(default_factory=dict)  # of versions
    leave: bool = False


class Publisher(Protocol):
    """How weights go out."""

    def publish(self, label: str, *, extras: Mapping[str, Any], timeout: float) -> Any:
        """As `er.Member.publish`: what it returns has a `weight_version`, None as long as none was given."""
        ...

    def leave(self) -> None:
        """Go in good order."""
        ...


class TrainerRank:
    """One rank. hub: the actor on the head. world: of the baseline."""

    def __init__(self, group: er.Group, settings: Settings, hub: Any, world: World | None = None) -> None:
        self.group, self.settings, self.hub, self.world = group, settings, hub, world
        self.line = attempt(settings, world)
        self._published: deque[_Published] = deque(maxlen=_KEPT)
        self._leaving = threading.Event()

    def run(self) -> None:
        """Until the last step is done, or it is asked to leave."""
        torch.set_num_threads(1)
        self._gang()
        path = self._agreed(str(newest(self.settings.checkpoints) or ""))
        if path:
            self.learner.load(Path(path))
        self._publisher = self._take_part()
        if self.group.rank == 0:
            get(self.hub.begin.remote(self.line, self.learner.steps))
        self._publish()
        while self.learner.steps < self.settings.steps:
            turn: _Turn = self._agreed(self._next() if self.group.rank == 0 else None)
            if turn.leave:
                self.learner.save(self._checkpoint())
                break
            if turn.chunks:
                self._step(turn)
        else:
            self._last()
        self._publisher.leave()

    # -- beginning

    def _gang(self) -> None:
        """Meet the other ranks, and make the model."""
        key = f"{self.group.name}/{self.line}/store"
        at = None
        if self.group.rank > 0:
            at = get(self.hub.told.remote(key, self.settings.start), self.settings.start)
        store = meet(at, self.group, lambda _, where: get(self.hub.tell.remote(key, where)))
        dist.init_process_group(
            "gloo", store=PrefixStore("gang", store), rank=self.group.rank, world_size=self.group.size,
            timeout=timedelta(seconds=self.settings.start),
        )  # fmt: skip
        task = Task()
        model = fsdp(build(task, self.settings.seed), init_device_mesh("cpu", (self.group.size,)))
        self.learner = Learner(model, task, lr=self.settings.lr)

    def _take_part(self) -> Publisher:
        if self.world is not None:
            return Speaker(self.learner.model, self.group, self.settings, self.hub, self.world)
        member = on_ray.join(
            self.settings.job, name=f"{self.group.name}-{self.group.rank}", role="source", group=self.group,
            tensors=lambda: tensors(self.learner.model), runtime=self.settings.runtime, deadline=self.settings.start,
        )  # fmt: skip
        threading.Thread(target=self._watch, args=(member,), name="watch", daemon=True).start()
        return member

    def _watch(self, member: er.Member) -> None:
        for event in member.watch():  # put out unasked, it raises NotAMember here, and in the next publish
            if event.kind == "leave":
                self._leaving.set()

    def _agreed(self, value: Any) -> Any:
        """What rank 0 says."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    # -- a step

    def _next(self) -> _Turn:
        """Of rank 0: waits a second at most, so that the other ranks are never left alone for long."""
        if self._leaving.is_set():
            return _Turn(leave=True)
        chunks = get(self.hub.take.remote(self.line, _WAIT), _WAIT)
        if not chunks:
            return _Turn()
        steps = {}
        for weights in {chunk.weights for chunk in chunks}:
            found = self._snapshot_of(weights.version)
            if found is None:
                get(self.hub.unusable.remote(self.line, weights.version))
                return _Turn()
            if found.step != weights.step:
                self._fail(f"version {weights.version} is of step {found.step}, but an engine was told {weights.step}")
            steps[weights.version] = found.step
        return _Turn(chunks, steps)

    def _snapshot_of(self, version: int) -> _Published | None:
        """The weights that travelled under a version; None if they are gone."""
        deadline = time.monotonic() + _VERSION
        while True:
            for published in self._published:
                published.version = published.version or published.handle.weight_version
                if published.version == version:
                    return published
            known = [p.version for p in self._published if p.version is not None]
            if (known and max(known) > version) or time.monotonic() > deadline:
                return None
            time.sleep(0.01)  # an engine has heard of it a moment earlier

    def _step(self, turn: _Turn) -> None:
        begun = time.monotonic()
        difference, checked = self._check(turn)
        metrics = self.learner.step(batch_of_chunks(turn.chunks))
        lags = [metrics.step - 1 - chunk.weights.step for chunk in turn.chunks]
        self._publish()
        fields = {
            "reward": metrics.reward, "right": metrics.right, "loss": metrics.loss, "grad_norm": metrics.grad_norm,
            "ratio_max": metrics.ratio_max, "lag": sum(lags) / len(lags), "lag_max": max(lags), "checked": checked,
            "difference": difference, "seconds": time.monotonic() - begun, "versions": sorted(turn.steps),
            "t": time.monotonic(),
        }  # fmt: skip
        noted = self.group.rank > 0 or get(self.hub.trained.remote(self.line, metrics.step, fields))
        if not noted:
            raise RunFailed(f"gang {self.line} was replaced while it trained step {metrics.step}")
        # Only now: a checkpoint of a step that the buffer has not heard of would have its tickets trained on twice.
        if metrics.step % self.settings.every == 0:
            self.learner.save(self._checkpoint())

    def _check(self, turn: _Turn) -> tuple[float, int]:
        by_step = {published.step: published.snapshot for published in self._published}
        snapshots = {version: by_step[step] for version, step in turn.steps.items()}
        try:
            return check(self.learner, snapshots, turn.chunks, self.settings.tolerance)
        except RunFailed as error:
            get(self.hub.fail.remote(str(error)))
            raise

    def _fail(self, why: str) -> None:
        get(self.hub.fail.remote(why))
        raise RunFailed(why)

    def _publish(self) -> None:
        step, begun = self.learner.steps, time.monotonic()
        label = f"step-{step}"
        handle = self._publisher.publish(label, extras={"line": self.line, "step": step}, timeout=60.0)
        self._published.append(_Published(step, self.learner.snapshot(), handle))
        if self.group.rank == 0:
            self.hub.note.remote("publish", begun, line=self.line, step=step, stall=time.monotonic() - begun)

    def _checkpoint(self) -> Path:
        """Where the present step is kept; older ones than the last few are removed."""
        if self.group.rank == 0:
            for old in _found(self.settings.checkpoints)[: 1 - _CHECKPOINTS]:
                _remove(old)
        self.settings.checkpoints.mkdir(parents=True, exist_ok=True)
        return self.settings.checkpoints / f"step-{self.learner.steps:06d}"

    def _last(self) -> None:
        """Stay until the driver says that the last version is everywhere."""
        if self.group.rank == 0:
            get(self.hub.finish.remote())
        deadline = time.monotonic() + 2 * self.settings.start
        while not self._agreed(get(self.hub.told.remote(GOODBYE, _WAIT), _WAIT) if self.group.rank == 0 else None):
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"the driver did not say within {2 * self.settings.start:g} s that all engines are served"
                )


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    found = _found(folder)
    return found[-1] if found else None


def _found(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if p.suffix == "")


def _remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
