"""A member's tensors as they are now: asked again at every publish and install, described again only when they changed.

Nothing here keeps a tensor alive between two calls: a trainer's `tensors=` may build new ones each time (casts of masters,
stacked experts), and they must not stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from elastic_reshard.arena.copies import raw
from elastic_reshard.arena.device import Device
from elastic_reshard.arena.devices import device_of, strided_of
from elastic_reshard.collective.fragments import Fragment, describe, fingerprint, local_tensors
from elastic_reshard.errors import ArenaError, LayoutMismatch, Violation
from elastic_reshard.layout import ModelLayout, TensorLayout
from elastic_reshard.layout.dtensor import dtype_name, torch_dtype
from elastic_reshard.layout.dtypes import is_castable
from elastic_reshard.layout.fragments import fragment_id

__all__ = ["Described", "Look", "MemberTensors", "Tensors", "Wire", "unowned"]

# Given by the user: a mapping, or what returns one (asked again each time).
Tensors = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]
# A dtype for every castable tensor, or for those named; None: no cast.
Wire = torch.dtype | Mapping[str, torch.dtype] | None
_KINDS: Final = ("cpu", "cuda")


@dataclass(frozen=True, eq=False)
class Described:
    """What a rank says of one side, as long as `state` doesn't change.

    body, fragment: the fragment as JSON-ready data with *wire* dtypes, and its content id. specs: shape of each local
    tensor and its wire dtype, which is what a slot holds. device: the one that they are on, None for the CPU.
    """

    state: tuple[object, ...]
    body: dict[str, Any]
    fragment: str
    specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    device: Device | None = None


@dataclass(frozen=True, eq=False)
class Look:
    """The tensors at one moment. Holds them: drop it after the copy."""

    described: Described
    tensors: Mapping[str, torch.Tensor]

    def local(self) -> dict[str, torch.Tensor]:
        """Local tensors, plain; ArenaError, naming it, for one that can't be copied from where it is."""
        return local_tensors(self.tensors, _KINDS)


class MemberTensors:
    """One side of one rank.

    given: the side's whole layout in group ranks with the tensors' *own* dtypes; None: told by the tensors (DTensors, or
    plain ones that are whole). renumber: group rank of each global rank, where DTensors' meshes have others.
    Not for several threads at once.
    """

    def __init__(
        self,
        tensors: Tensors,
        given: ModelLayout | None,
        rank: int,
        wire: Wire = None,
        renumber: Mapping[int, int] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._source, self._given, self._rank = tensors, given, rank
        self._wire, self._renumber, self._extra = wire, renumber, dict(extra or {})
        self._last: Described | None = None

    def look(self) -> Look:
        """Ask for the tensors, and describe them if they changed: 1 microsecond a plain tensor, 10 a DTensor, when not.

        Raises LayoutMismatch (every violation) or a LayoutError of `layout_of`, and whatever the user's callable raises.
        """
        tensors = dict(self._source() if callable(self._source) else self._source)
        state = fingerprint(tensors)
        if self._last is None or self._last.state != state:
            self._last = self._describe(tensors, state)
        return Look(self._last, tensors)

    def _describe(self, tensors: Mapping[str, torch.Tensor], state: tuple[object, ...]) -> Described:
        said = describe(tensors, self._given, self._rank, self._renumber)
        faults: list[Violation] = []
        if said.given is not None:
            model = {name: self._on_wire(name, layout, faults) for name, layout in said.given.items()}
            wired = Fragment({}, ModelLayout(model))
        else:
            wired = Fragment({name: self._told(name, x, faults) for name, x in said.layouts.items()}, None)
        if faults:
            raise LayoutMismatch(faults)
        local = local_tensors(tensors, _KINDS)
        specs = {
            name: (tuple(t.shape), torch_dtype(self._dtype(name, dtype_name(t.dtype), []))) for name, t in local.items()
        }
        body = wired.to_data() | self._extra
        return Described(state, body, fragment_id(body), specs, _device(local))

    def _told(
        self, name: str, x: TensorLayout | tuple[tuple[int, ...], str], faults: list[Violation]
    ) -> TensorLayout | tuple[tuple[int, ...], str]:
        if isinstance(x, TensorLayout):
            return self._on_wire(name, x, faults)
        return (x[0], self._dtype(name, x[1], faults))

    def _on_wire(self, name: str, layout: TensorLayout, faults: list[Violation]) -> TensorLayout:
        dtype = self._dtype(name, layout.dtype, faults)
        return layout if dtype == layout.dtype else replace(layout, dtype=dtype)

    def _dtype(self, name: str, has: str, faults: list[Violation]) -> str:
        """What travels of a tensor. A cast that was asked for by name and can't be is a fault; one asked for all is not."""
        asked = self._wire.get(name) if isinstance(self._wire, Mapping) else self._wire
        wanted = dtype_name(asked) if asked is not None else has
        if wanted == has or is_castable(has, wanted):
            return wanted
        if isinstance(self._wire, Mapping):
            faults.append(Violation(name, "dtype", f"{has} is never cast to {wanted}: only floating point is"))
        return has


def _device(local: Mapping[str, torch.Tensor]) -> Device | None:
    """The one device that all tensors are on. ArenaError if there are several, or some are on the CPU."""
    found: dict[Device | None, list[str]] = {}
    for name, tensor in local.items():
        if tensor.numel():
            found.setdefault(device_of(tensor), []).append(name)
    if len(found) > 1:
        where = "; ".join(
            f"{device.id if device else 'CPU'}: {', '.join(names[:4])}" for device, names in found.items()
        )
        raise ArenaError(f"tensors of one member must be on one device, these are on {len(found)} ({where}); move them")
    return next(iter(found), None)


class _Memory:
    """An array's memory, without the array."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, *not* kept alive: for prepared copies that run only while somebody holds the tensor itself.

    ArenaError for lazy conj or neg views.
    """
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    device = device_of(tensor)
    if device is not None:
        return device.tensor(replace(strided_of(tensor), owner=None), tensor.dtype)
    memory = _Memory(dict(np.asarray(raw(tensor)).__array_interface__))
    return torch.from_numpy(np.asarray(memory)).view(tensor.dtype)
