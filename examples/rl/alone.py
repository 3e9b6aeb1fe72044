"""The same training without elasticity: two processes, each a trainer rank (FSDP2) and an engine rank (TP2) at once.

    cd examples && python -m rl.alone --seed 0 --steps 200

Prints a line of JSON a step. The refit is torch's own gather of every whole tensor, cut again on each rank: what can be
done while nobody dies. Answers are trained on one step late, as in the elastic run. The same seed prints the same numbers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from multiprocessing import get_context
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Qwen3ForCausalLM

from rl.grpo import Batch, Learner, Metrics, batch_of
from rl.model import build, fsdp, local, tensor_parallel, tensors
from rl.sample import rollout
from rl.task import Task

__all__ = ["PROMPTS", "SAMPLES", "refit", "train"]

PROMPTS, SAMPLES = 64, 8  # a batch: PROMPTS groups of SAMPLES answers each
LAG = 1  # steps between drawing answers and training on them
RANKS = 2


@torch.no_grad()
def refit(trainer: Qwen3ForCausalLM, engine: Qwen3ForCausalLM) -> None:
    """Copy the trainer's weights into the engine. Every byte goes to every rank. Collective."""
    source = tensors(trainer)
    for name, into in tensors(engine).items():
        weight = source[name]
        assert isinstance(weight, DTensor) and isinstance(into, DTensor)  # noqa: PT018
        local(into).copy_(local(distribute_tensor(weight.full_tensor(), into.device_mesh, into.placements)))


def train(
    mesh: DeviceMesh, task: Task, seed: int, steps: int, lag: int = LAG, groups: int = PROMPTS
) -> Iterator[Metrics]:
    """Train from the seed's random weights; yields each step's metrics, the same on every rank. Collective."""
    learner = Learner(fsdp(build(task, seed), mesh), task)
    engine = tensor_parallel(build(task, seed), mesh)
    generator = torch.Generator().manual_seed(seed)
    waiting: deque[Batch] = deque()
    for _ in range(steps + lag):
        prompts = task.prompts(groups, generator)
        seed_of_draw = int(torch.randint(2**62, (), generator=generator))
        waiting.append(batch_of(rollout(engine, task, prompts, SAMPLES, seed_of_draw), task, learner.steps))
        if len(waiting) > lag:
            yield learner.step(waiting.popleft())
            refit(learner.model, engine)


def _rank(rank: int, rendezvous: str, seed: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    begun = time.monotonic()
    for metrics in train(init_device_mesh("cpu", (RANKS,)), Task(), seed, steps):
        if rank == 0:
            print(json.dumps({"seconds": round(time.monotonic() - begun, 2)} | asdict(metrics)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(
    seed: Annotated[int, typer.Option(help="Of weights, prompts and samples.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
) -> None:
    """Train on two processes of this machine."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, f"{folder}/store", seed, steps)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("a rank failed; its traceback is above")


if __name__ == "__main__":
    typer.run(main)
