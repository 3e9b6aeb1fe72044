"""Which device a tensor is on, and devices by the names that tables give them."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from elastic_reshard.arena.pretend import open_pretend, pretend_at
from elastic_reshard.arena.strided import Strided
from elastic_reshard.errors import ArenaError

if TYPE_CHECKING:
    import torch

    from elastic_reshard.arena.device import Device

__all__ = ["device_of", "open_device", "strided_of"]


def _gpus() -> ModuleType:
    try:
        from elastic_reshard.arena import cuda
    except ImportError as error:
        raise ArenaError(
            f"GPUs need the package cuda-bindings, which can't be imported ({error}); install elastic-reshard[gpu]"
        ) from error
    return cuda


def device_of(tensor: torch.Tensor) -> Device | None:
    """The device that a tensor's elements are on; None: host memory. ArenaError for other kinds than CPU and CUDA."""
    if tensor.is_cpu:
        return pretend_at(tensor.data_ptr())
    if tensor.is_cuda:
        gpu: Device = _gpus().open_index(tensor.device.index)
        return gpu
    raise ArenaError(f"a {tensor.device.type} tensor can't be moved; only CPU and CUDA tensors can")


def open_device(kind: str, identity: str) -> Device:
    """The device that a table names, in this process. Takes its context at the first call, some 0.3 s on a GPU. ArenaError
    if it is not there or not visible."""
    if kind == "pretend":
        return open_pretend(identity)
    if kind == "cuda":
        gpu: Device = _gpus().open_uuid(identity)
        return gpu
    raise ArenaError(f"memory of kind {kind!r} is not known; this version knows 'cuda' and 'pretend'")


def strided_of(tensor: torch.Tensor) -> Strided:
    """A plain tensor by its address, on whatever it lies; keeps it. ArenaError for lazy conj or neg views."""
    if tensor.is_conj() or tensor.is_neg():
        raise ArenaError("a lazy conj or neg view has no bytes of its own; pass resolve_conj() or resolve_neg() of it")
    item = tensor.element_size()
    strides = tuple(step * item for step in tensor.stride())
    return Strided(tensor.data_ptr(), tuple(tensor.shape), strides, item, device_of(tensor), tensor.detach())
