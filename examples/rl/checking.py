"""That every sample was drawn under the version that it names: its log-probabilities, computed again under those weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl.buffer import Chunk
from rl.grpo import Batch, Learner
from rl.settings import RunFailed

__all__ = ["batch_of_chunks", "check"]


def check(
    learner: Learner, snapshots: Mapping[int, Mapping[str, Tensor]], chunks: Sequence[Chunk], tolerance: float
) -> tuple[float, int]:
    """(largest difference, samples checked). snapshots: by version; all that the chunks name are there. Collective, and every
    rank comes to the same. RunFailed, naming the version, if a log-probability differs by more than `tolerance`."""
    worst, checked = 0.0, 0
    for version in sorted({chunk.weights.version for chunk in chunks}):
        mine = [chunk for chunk in chunks if chunk.weights.version == version]
        batch = batch_of_chunks(mine)
        again = learner.logprobs_under(snapshots[version], batch)
        apart = float((again - batch.logprobs).abs().max())
        if not apart <= tolerance:
            raise RunFailed(
                f"samples of version {version} (step-{mine[0].weights.step}) have log-probabilities that differ by {apart:.2e} "
                f"from those under its weights; {tolerance:.0e} is allowed: {mine[0].owner} has served something else"
            )
        worst, checked = max(worst, apart), checked + len(batch.rewards)
    return worst, checked


def batch_of_chunks(chunks: Sequence[Chunk]) -> Batch:
    """All samples of these, in their order."""
    parts = {
        name: torch.cat([torch.from_numpy(getattr(chunk, name)) for chunk in chunks])
        for name in ("prompts", "answers", "logprobs", "rewards")
    }
    versions = [chunk.weights.version for chunk in chunks for _ in range(len(chunk.rewards))]
    return Batch(versions=versions, **parts)
