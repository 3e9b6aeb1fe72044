"""GRPO: no value network; an answer is as good as its reward is above its own group's mean.

What is used of it: advantages normalized within the group of answers to one prompt, the clipped ratio against the
log-probabilities recorded when the answer was drawn (which may be a step old), Adam. There is no KL term: the model
starts from random weights, so there is no reference worth staying near.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3ForCausalLM

from rl.model import local, tensors, token_logprobs
from rl.sample import Rollout
from rl.task import Task

__all__ = ["Batch", "Learner", "Metrics", "advantages", "batch_of"]


@dataclass(frozen=True)
class Batch:
    """Answers with what was recorded when they were drawn. CPU tensors, picklable, a few KiB."""

    prompts: Tensor  # int64 [n, prompt]; rows with the same prompt are one group
    answers: Tensor  # int64 [n, answer]
    logprobs: Tensor  # float32 [n, answer], under the weights of `versions`
    rewards: Tensor  # float32 [n]
    versions: list[int]  # the weight_version under which each row was drawn


@dataclass(frozen=True)
class Metrics:
    """What a step saw, the same on every rank."""

    step: int  # steps taken, this one included
    reward: float  # mean over the batch, before the step
    right: float  # share of answers that are right in every position
    loss: float
    grad_norm: float  # before it is clipped
    ratio_max: float  # largest p_now / p_recorded of a token: 1 on policy
    clipped: float  # share of tokens whose ratio is outside 1 +- clip


def batch_of(rollout: Rollout, task: Task, version: int) -> Batch:
    """A rollout with its rewards, all of it drawn under `version`."""
    rewards = task.reward(rollout.prompts, rollout.answers)
    return Batch(rollout.prompts, rollout.answers, rollout.logprobs, rewards, [version] * len(rewards))


def advantages(batch: Batch) -> Tensor:
    """(reward - mean) / (std + 1e-4) within the rows of a prompt, float32 [n]; 0 where all rows of it got the same."""
    rows = [tuple(row) for row in batch.prompts.tolist()]
    number = {row: at for at, row in enumerate(dict.fromkeys(rows))}
    group = torch.tensor([number[row] for row in rows])
    count = torch.zeros(len(number)).index_add_(0, group, torch.ones_like(batch.rewards))
    mean = torch.zeros_like(count).index_add_(0, group, batch.rewards) / count
    above = batch.rewards - mean[group]
    variance = torch.zeros_like(count).index_add_(0, group, above.square()) / count
    return above / (variance.sqrt()[group] + 1e-4)


class Learner:
    """One rank's part of the training. All ranks of the model's mesh call every method alike, with the same batch
    (`snapshot` alone is local); a plain model is a mesh of one."""

    def __init__(
        self, model: Qwen3ForCausalLM, task: Task, lr: float = 1e-3, clip: float = 0.2, max_norm: float = 1.0
    ) -> None:
        self.model, self.task, self.clip, self.max_norm = model, task, clip, max_norm
        self.steps = 0
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.95))
        for p in model.parameters():  # as Adam's first step would; here, so that a checkpoint has a place to load into
            moments = {kind: torch.zeros_like(p, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[p] = {"step": torch.tensor(0.0)} | moments
        mesh: DeviceMesh | None = getattr(next(model.parameters()), "device_mesh", None)
        self.rank, self.size = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        self._group = None if mesh is None else mesh.get_group()

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """log p of all rows' tokens under the current weights, float32 [n, answer], on every rank. Collective."""
        return token_logprobs(self.model, batch.prompts, batch.answers)

    def step(self, batch: Batch) -> Metrics:
        """One Adam step on the whole batch, of which each rank computes its share. Collective."""
        n = len(batch.rewards)
        mine = slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)
        advantage = advantages(batch)[mine, None]
        now = token_logprobs(self.model, batch.prompts[mine], batch.answers[mine])
        ratio = (now - batch.logprobs[mine]).exp()
        clamped = ratio.clamp(1 - self.clip, 1 + self.clip)
        gain = torch.minimum(ratio * advantage, clamped * advantage)
        # FSDP2 averages gradients over ranks: `size` makes the average of shares the mean over the batch.
        loss = -gain.sum() * self.size / batch.answers.numel()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.steps += 1
        outside = (ratio != clamped).sum()
        total = torch.stack([loss.detach() / self.size, outside / batch.answers.numel()])
        largest = ratio.detach().max() if ratio.numel() else torch.tensor(0.0)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return Metrics(
            step=self.steps,
            reward=batch.rewards.mean().item(),
            right=self.task.right(batch.prompts, batch.answers).float().mean().item(),
            loss=total[0].item(),
            grad_norm=(norm.full_tensor() if isinstance(norm, DTensor) else norm).item(),
            ratio_max=largest.item(),
            clipped=total[1].item(),
        )

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the weights that this rank holds, for `logprobs_under`."""
        return {name: local(t).clone() for name, t in tensors(self.model).items()}

    def logprobs_under(self, snapshot: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """As `logprobs`, under the weights of a snapshot; the current ones are put back, bit for bit. Collective."""
        current = self.snapshot()
        self._put(snapshot)
        try:
            return self.logprobs(batch)
        finally:
            self._put(current)

    @torch.no_grad()
    def _put(self, shards: Mapping[str, Tensor]) -> None:
        for name, t in tensors(self.model).items():
            local(t).copy_(shards[name])

    def save(self, path: Path) -> None:
        """Write weights, Adam's moments and the step as the folder `path`, which appears whole or not at all.

        Collective. A folder of that name is replaced; a save that was killed leaves one with a suffix, cleared by the next.
        """
        partial, former = path.with_name(path.name + ".partial"), path.with_name(path.name + ".former")
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(former, ignore_errors=True)
        self._barrier()
        state_dict_saver.save(
            self._state(), checkpoint_id=partial, process_group=self._group, no_dist=self._group is None
        )
        if self.rank == 0:
            if path.exists():
                os.replace(path, former)
            os.replace(partial, path)
            shutil.rmtree(former, ignore_errors=True)
        self._barrier()

    def load(self, path: Path) -> None:
        """Go on from what `save` has written; the gang may have another size than the one that saved. Collective."""
        state = self._state()
        # Into the memory of weights and moments, in place.
        state_dict_loader.load(state, checkpoint_id=path, process_group=self._group, no_dist=self._group is None)
        self.steps = int(state["steps"])

    def _state(self) -> dict[str, Tensor]:
        """All that a resumed run needs, by name; live memory but for the step."""
        state = {f"weight.{name}": t for name, t in tensors(self.model).items()}
        for name, parameter in self.model.named_parameters():
            state |= {f"adam.{kind}.{name}": t for kind, t in self.optimizer.state[parameter].items()}
        return state | {"steps": torch.tensor(self.steps)}

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)
