"""Rollouts: sample answers and record the log-probability under which each token was drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from rl.task import Task

__all__ = ["Rollout", "rollout"]


@dataclass(frozen=True)
class Rollout:
    """Sampled answers on the CPU; row i of all three belongs together, the samples of a prompt are neighbours."""

    prompts: Tensor  # int64 [n * samples, prompt]
    answers: Tensor  # int64 [n * samples, answer]
    logprobs: Tensor  # float32 [n * samples, answer], of each token at temperature 1


@torch.no_grad()
def rollout(model: Qwen3ForCausalLM, task: Task, prompts: Tensor, samples: int, seed: int) -> Rollout:
    """`samples` answers to each prompt, drawn at temperature 1. The same for the same weights, prompts and seed.

    Collective for a tensor-parallel model: all ranks call it alike and get the same tokens, since they see the same
    gathered logits and draw with the same seed.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = prompts.repeat_interleave(samples, dim=0)
    tokens, logprobs = prompts, []
    for _ in range(task.answer_length):
        logits = model(input_ids=tokens, logits_to_keep=1).logits[:, -1]
        logp = torch.log_softmax(logits, dim=-1)
        drawn = torch.multinomial(logp.exp(), 1, generator=generator)
        logprobs.append(logp.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], dim=1)
    return Rollout(prompts, tokens[:, prompts.shape[1] :].contiguous(), torch.cat(logprobs, dim=1))
