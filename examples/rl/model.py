"""A tiny decoder of Qwen3's architecture, and the two ways in which its weights lie: FSDP2 and tensor parallel.

Both keep the parameters' names and make them DTensors, so that the layouts of both sides can be read off them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl.task import Task

__all__ = ["build", "fsdp", "local", "tensor_parallel", "tensors", "token_logprobs"]

HIDDEN, LAYERS, HEADS = 64, 2, 4


def build(task: Task, seed: int) -> Qwen3ForCausalLM:
    """Random float32 weights, the same bytes for a seed in every process. The caller's random state is kept."""
    config = Qwen3Config(
        vocab_size=task.vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        use_cache=False,  # answers are a few tokens: computing anew is as fast, and just what the trainer computes
        initializer_range=0.05,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def fsdp(model: Qwen3ForCausalLM, mesh: DeviceMesh) -> Qwen3ForCausalLM:
    """The model, sharded in place by FSDP2 over the 1-D `mesh`. Collective."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    # The root too gives back what it gathered, so that parameters are shards whenever nobody computes.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def tensor_parallel(model: Qwen3ForCausalLM, mesh: DeviceMesh) -> Qwen3ForCausalLM:
    """The model, cut in place over the 1-D `mesh`: heads, MLP and vocabulary; norms stay whole. Collective.

    Logits are gathered, so that every rank sees the same ones to the bit.
    """
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    return model


def tensors(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    """Name to parameter, live memory, no copy. With FSDP2 or tensor parallelism all are DTensors: what a rank holds
    whole beside cut parameters is stated as Replicate. Tied weights appear once."""
    names = [name for name, _ in model.named_parameters()]
    state = model.state_dict()
    found = {name: state[name].detach() for name in names}
    mesh = next((t.device_mesh for t in found.values() if isinstance(t, DTensor)), None)
    if mesh is None:
        return found
    whole = [Replicate()] * mesh.ndim
    return {
        name: t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, whole, run_check=False)
        for name, t in found.items()
    }


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: live memory, no copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def token_logprobs(model: Qwen3ForCausalLM, prompts: Tensor, answers: Tensor) -> Tensor:
    """log p of each answer token after the prompt and the tokens before it, float32 [n, answer]. One forward;
    collective if the model is. Gradients flow unless the caller has turned them off."""
    size = answers.shape[1]
    tokens = torch.cat([prompts, answers[:, :-1]], dim=1)
    logits = model(input_ids=tokens, logits_to_keep=size).logits
    return torch.log_softmax(logits, dim=-1).gather(2, answers.unsqueeze(2)).squeeze(2)
