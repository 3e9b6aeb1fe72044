"""What a run is to do, known to every process of it; and what a process says when the run cannot go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import elastic_reshard as er

__all__ = ["Mode", "RunFailed", "Settings", "World"]

Mode = Literal["elastic", "quiet", "baseline"]


class RunFailed(er.ReshardError):
    """The run cannot go on, or must not: says what was waited for, or what was wrong with a sample."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. Picklable.

    mode: "elastic": with faults; "quiet": the same without; "baseline": the same faults, gather-and-broadcast and restart of
    everything. folder: its events and checkpoints, which every node reaches. runtime: of the host's watchdogs.
    prompts, samples: of one chunk, which is what an engine generates at once; chunks: in one training step. max_lag: steps
    that a sample's weights may be behind those that it trains. every: steps between checkpoints. tolerance: between
    log-probabilities of a token recorded by an engine and recomputed by the trainers, under the same version.
    patience: seconds without a step after which the run is given up. start: seconds in which a process must have begun.
    """

    mode: Mode
    seed: int
    steps: int
    folder: str
    runtime: str
    job: str = "rl"
    prompts: int = 32
    samples: int = 8
    chunks: int = 2
    max_lag: int = 1
    every: int = 10
    engines: int = 2
    ranks: int = 2
    lr: float = 1e-3
    tolerance: float = 1e-4
    patience: float = 300.0
    start: float = 180.0

    @property
    def events(self) -> Path:
        """The file of events."""
        return Path(self.folder) / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return Path(self.folder) / "checkpoints"


@dataclass(frozen=True, slots=True)
class World:
    """Of the baseline: one start of everything, and where all its processes meet."""

    name: str
    at: tuple[str, int]
