"""Prepared copies: views are made once, then copied as often as wanted: on the host in the caller's thread, on a device in
one launch for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_reshard.arena.boxes import CopyTable, host_strided
from elastic_reshard.arena.device import device_at
from elastic_reshard.arena.devices import device_of, strided_of
from elastic_reshard.arena.elements import BITS, tensor_over
from elastic_reshard.arena.strided import Place, Strided
from elastic_reshard.errors import ArenaError

if TYPE_CHECKING:
    from elastic_reshard.arena.device import Device, Stream

__all__ = ["Copies", "Elements", "raw", "strided_tensor"]

# Elements that can be copied: on the host, or by their address.
Elements = npt.NDArray[Any] | Strided


def raw(tensor: torch.Tensor) -> Elements:
    """A tensor's elements, no copy, any strides: integers of their size, or by their address if it is on a device.
    ArenaError for lazy conj or neg views and for tensors of other devices than CPUs and GPUs."""
    if tensor.is_conj() or tensor.is_neg():
        raise ArenaError(
            f"a {tensor.device.type} tensor (conj {tensor.is_conj()}, neg {tensor.is_neg()}) cannot be moved as it is; pass a "
            "plain tensor (resolve_conj(), resolve_neg())"
        )
    if device_of(tensor) is not None:
        return strided_of(tensor)
    array: npt.NDArray[Any] = tensor.detach().view(BITS[tensor.element_size()]).numpy()
    return array


def strided_tensor(array: Strided, dtype: torch.dtype) -> torch.Tensor:
    """An array on a device as a tensor of that dtype, no copy."""
    if array.device is None:
        raise ArenaError(
            f"host memory at {array.address:#x} can't be taken as a tensor of {dtype}: pass it as a numpy array"
        )
    return device_at(array.device).tensor(array, dtype)


# Strided copies with rows of this many bytes run 1.2 to 1.5 times as fast by torch's kernel as by numpy's (measured).
_TORCH_ROWS = range(64, 4096)


def _row_bytes(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> int:
    """Bytes that lie together in both, along the last dim; 0 if there are none."""
    item = target.dtype.itemsize
    if not target.ndim or target.strides[-1] != item or source.strides[-1] != item:
        return 0
    return int(target.shape[-1]) * item


def _widened(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Both as 8-byte elements, where rows and steps allow it."""
    steps = (_row_bytes(target, source), *target.strides[:-1], *source.strides[:-1])
    places = (target.ctypes.data, source.ctypes.data)
    if target.dtype.itemsize < 8 and not any(n % 8 for n in (*steps, *places)):
        return target.view(np.int64), source.view(np.int64)
    return target, source


def _bits(array: npt.NDArray[Any]) -> torch.Tensor:
    return tensor_over(array, BITS[array.dtype.itemsize])


def _by_address(array: Elements) -> Strided:
    return array if isinstance(array, Strided) else host_strided(array)


class _OnDevice:
    """What is launched on one device."""

    __slots__ = ("casts", "device", "pairs", "tables")

    def __init__(self, place: Place) -> None:
        self.device = device_at(place)
        self.pairs: list[tuple[Strided, Strided]] = []
        self.casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.tables: list[CopyTable] | None = None

    def prepared(self) -> list[CopyTable]:
        """One table, or two: how host memory is best reached is another matter than how a device's is."""
        if self.tables is None:
            apart: tuple[list[tuple[Strided, Strided]], ...] = ([], [])
            for pair in self.pairs:
                apart[any(side.device is None for side in pair)].append(pair)
            tables = [CopyTable.of(pairs) for pairs in apart if pairs]
            for table in tables:
                self.device.prepare(table)
            self.tables = tables
        return self.tables


class Copies:
    """Copies that run together. Those of the host run in the order of `add`; none on a device may read what another one
    writes. Not for several threads at once."""

    __slots__ = ("_casts", "_devices", "_pairs", "nbytes")

    def __init__(self) -> None:
        self._pairs: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._devices: dict[Place, _OnDevice] = {}
        self.nbytes = 0

    def add(self, target: Elements, source: Elements) -> None:
        """Bytes as they are; equal shapes and item sizes. An array beside one on a device must lie in memory that the device
        reaches (`Device.host`)."""
        if target.shape != source.shape or target.itemsize != source.itemsize:
            raise ArenaError(
                f"cannot copy {source.shape} of {source.itemsize} bytes each to {target.shape} of {target.itemsize} bytes each"
            )
        self.nbytes += target.nbytes
        if isinstance(target, Strided) or isinstance(source, Strided):
            self._add_on_device(_by_address(target), _by_address(source))
            return
        source = source.view(target.dtype)
        if target.flags.c_contiguous and source.flags.c_contiguous:
            self._pairs.append((target.reshape(-1), source.reshape(-1)))  # one memmove
        elif _row_bytes(target, source) in _TORCH_ROWS:
            wide = _widened(target, source)
            self._casts.append((_bits(wide[0]), _bits(wide[1])))
        else:
            self._pairs.append((target, source))

    def _add_on_device(self, target: Strided, source: Strided) -> None:
        device = target.device or source.device
        if device is None:
            raise ArenaError("a copy by addresses needs a device: both arrays are said to lie in host memory")
        there = self._on(device)
        there.pairs.append((target, source))
        there.tables = None

    def _on(self, place: Place) -> _OnDevice:
        found = self._devices.get(place)
        if found is None:
            found = self._devices[place] = _OnDevice(place)
        return found

    def cast(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """With torch's conversion from the source's dtype to the target's; equal shapes."""
        if target.shape != source.shape:
            raise ArenaError(f"cannot cast {tuple(source.shape)} to {tuple(target.shape)}")
        self.nbytes += target.nbytes
        device = device_of(target) or device_of(source)
        if device is None:
            self._casts.append((target, source))
        elif target.numel():
            self._on(device).casts.append((target, source))

    def extend(self, others: Iterable[Copies]) -> None:
        """All that others have, behind what is here: what was a launch each is one launch."""
        for other in others:
            self._pairs += other._pairs
            self._casts += other._casts
            self.nbytes += other.nbytes
            for place, there in other._devices.items():
                mine = self._on(place)
                mine.pairs += there.pairs
                mine.casts += there.casts
                mine.tables = None

    def __len__(self) -> int:
        there = sum(len(d.pairs) + len(d.casts) for d in self._devices.values())
        return len(self._pairs) + len(self._casts) + there

    @property
    def device(self) -> Device | None:
        """The device that some of them run on; None: all are done when `run` returns."""
        return next(iter(self.devices), None)

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices that some of them run on."""
        return tuple(there.device for there in self._devices.values())

    def prepare(self) -> None:
        """Do ahead what the first `run` would do beside launching: some 10 us a copy on a device, and an upload."""
        for there in self._devices.values():
            there.prepared()

    def run(self, stream: Stream | None = None) -> None:
        """Copy everything, at the speed of memory. Releases the GIL inside each copy.

        Those on a device are launched in the order of the stream (None: the caller's current one there) and are not done
        when this returns. ArenaError if host memory beside them is not registered; nothing was launched then.
        """
        for there in self._devices.values():
            on = there.device.current() if stream is None else stream
            for table in there.prepared():
                there.device.copy(table, on)
            if there.casts:
                there.device.cast([t for t, _ in there.casts], [s for _, s in there.casts], on)
        copyto = np.copyto
        for target, source in self._pairs:
            copyto(target, source)
        for to, frm in self._casts:
            to.copy_(frm)
