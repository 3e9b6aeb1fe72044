"""The baseline's refit: the trainers gather every whole tensor, rank 0 broadcasts it, each engine rank cuts out its part.

All trainers and engines are in one process group of gloo; the loss of any of them ends it. The engines are paused while it
goes on, and the trainers wait for the last of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor, Shard
from transformers import Qwen3ForCausalLM

import elastic_reshard as er
from rl.calls import get
from rl.model import local, tensors
from rl.settings import RunFailed, Settings, World

__all__ = ["Listener", "Speaker", "place"]

_PATIENCE = timedelta(seconds=60)


def place(group: er.Group, settings: Settings) -> int:
    """The rank of a rank of a group among all: the trainers are the first."""
    before = 0 if group.name == "trainer" else 1 + int(group.name.rpartition("-")[2])
    return before * settings.ranks + group.rank


def _form(group: er.Group, settings: Settings, world: World) -> dist.ProcessGroupGloo:
    """One process group of everybody. Returns when all are there."""
    size = settings.ranks * (1 + settings.engines)
    store = TCPStore(world.at[0], world.at[1], is_master=False, timeout=_PATIENCE)
    return dist.ProcessGroupGloo(PrefixStore(world.name, store), place(group, settings), size, _PATIENCE)


def _broadcast(group: dist.ProcessGroupGloo, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait(_PATIENCE)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Sent:
    """What `Speaker.publish` returns."""

    weight_version: int


class Speaker:
    """Of a trainer rank."""

    def __init__(self, model: Qwen3ForCausalLM, group: er.Group, settings: Settings, hub: Any, world: World) -> None:
        self._model, self._seat, self._hub, self._world = model, group, hub, world
        self._group = _form(group, settings, world)

    @torch.no_grad()
    def publish(self, label: str, *, extras: Mapping[str, Any], timeout: float) -> _Sent:
        """Returns when every engine has it, or after a minute without one of them. Collective over everybody."""
        version = 0
        if self._seat.rank == 0:
            version = get(self._hub.mint.remote(f"{self._world.name}/version"), timeout)
        header = torch.tensor([version, int(extras["step"])])
        whole = torch.cat([_whole(t).flatten() for t in tensors(self._model).values()])
        _broadcast(self._group, header)
        _broadcast(self._group, whole)
        return _Sent(int(header[0]))

    def leave(self) -> None:
        """Nothing to do: everybody ends together."""


class Listener:
    """Of an engine rank."""

    def __init__(self, model: Qwen3ForCausalLM, group: er.Group, settings: Settings, world: World) -> None:
        self._model, self._seat, self._world = model, group, world
        self._group = _form(group, settings, world)

    @torch.no_grad()
    def install(self, timeout: float) -> dict[str, Any]:
        """Receive what the trainers send now. Collective over everybody."""
        begun = time.monotonic()
        header = torch.zeros(2, dtype=torch.int64)
        mine = tensors(self._model)
        whole = torch.empty(sum(t.numel() for t in mine.values()))
        _broadcast(self._group, header)
        _broadcast(self._group, whole)
        for t, part in zip(mine.values(), torch.split(whole, [t.numel() for t in mine.values()]), strict=True):
            local(t).copy_(_cut(part.view(t.shape), t, self._seat))
        version, step = (int(x) for x in header)
        return {
            "weight_version": version, "label": f"step-{step}", "extras": {"line": self._world.name, "step": step},
            "install_pause": time.monotonic() - begun,
        }  # fmt: skip

    def leave(self) -> None:
        """Nothing to do: everybody ends together."""


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _cut(whole: Tensor, like: Tensor, seat: er.Group) -> Tensor:
    """This rank's part of a whole tensor."""
    if not isinstance(like, DTensor):
        return whole
    (placement,) = like.placements
    if not isinstance(placement, Shard):
        return whole
    if whole.shape[placement.dim] % seat.size:
        raise RunFailed(f"a tensor of {tuple(whole.shape)} cannot be cut evenly for {seat.size} ranks")
    return whole.chunk(seat.size, placement.dim)[seat.rank]
