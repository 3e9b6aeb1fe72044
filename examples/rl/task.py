"""The task: write the digits of the prompt in rising order. Anyone can check an answer; no data set is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Task"]


@dataclass(frozen=True)
class Task:
    """Prompts are `length` digits below `digits` and a separator; an answer is `length` tokens.

    Tokens 0 .. digits-1 are the digits, `separator` ends the prompt, and spare tokens fill the vocabulary to an
    even size, so that two ranks can halve it. A model may write any token: nothing is masked for it.
    """

    length: int = 4
    digits: int = 10

    @property
    def separator(self) -> int:
        return self.digits

    @property
    def vocabulary(self) -> int:
        return (self.digits + 2) // 2 * 2

    @property
    def prompt_length(self) -> int:
        return self.length + 1

    @property
    def answer_length(self) -> int:
        return self.length

    def prompts(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` prompts, int64 [n, prompt_length], digits drawn evenly and independently."""
        digits = torch.randint(self.digits, (n, self.length), generator=generator)
        return torch.cat([digits, torch.full((n, 1), self.separator)], dim=1)

    def solution(self, prompts: Tensor) -> Tensor:
        """The right answers, int64 [n, answer_length]."""
        return prompts[:, : self.length].sort(dim=1).values

    def reward(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """Partial credit: the share of positions that hold the right digit, float32 [n] in 0..1."""
        return (answers == self.solution(prompts)).float().mean(dim=1)

    def right(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """No partial credit: bool [n], whether the whole answer is right."""
        return (answers == self.solution(prompts)).all(dim=1)
