"""Streams and events of a GPU, by the driver's handles."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol

from cuda.bindings import driver

from elastic_reshard.arena.driver import Context, call, outcome
from elastic_reshard.errors import ArenaError

if TYPE_CHECKING:
    from elastic_reshard.arena.device import Event

__all__ = ["CudaEvent", "CudaStream"]


class _Gpu(Protocol):
    """Whose streams these are: `cuda.CudaDevice`."""

    def event_of(self, stream: CudaStream) -> CudaEvent:
        """The point that a stream has reached."""

    def settle(self) -> None:
        """Let go of what launches that are done have used."""


def _destroy(maker: int, context: Context, function: Any, handle: Any) -> None:
    """A finalizer. The driver keeps what is still needed until it is done."""
    if os.getpid() == maker:
        with context.current():
            outcome(function, handle)  # fails only when the whole context is lost, which others report


class CudaEvent:
    """A point in a stream."""

    __slots__ = ("__weakref__", "_context", "_device", "handle")

    def __init__(self, device: _Gpu, context: Context, stream: int) -> None:
        self._device, self._context = device, context
        with context.current():
            self.handle: Final = call(driver.cuEventCreate, driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            weakref.finalize(self, _destroy, os.getpid(), context, driver.cuEventDestroy, self.handle).atexit = False
            call(driver.cuEventRecord, self.handle, stream)

    def reached(self) -> bool:
        """Whether everything before it has been done. Never blocks."""
        with self._context.current():
            error, _ = outcome(driver.cuEventQuery, self.handle)
        if error == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if error != driver.CUresult.CUDA_SUCCESS:
            raise ArenaError(
                f"work on {self._device!r} failed: {error!r}; end this process, its context can't be used again"
            )
        return True

    def done(self) -> bool:
        """As `reached`; and lets go of what launches before it have used."""
        if not self.reached():
            return False
        self._device.settle()
        return True

    def synchronize(self) -> None:
        """Block until it is done; in a device call that cannot be left."""
        with self._context.current():
            call(driver.cuEventSynchronize, self.handle)
        self._device.settle()


class CudaStream:
    """Work in order. owned: made by us, and destroyed with this."""

    __slots__ = ("__weakref__", "_context", "_device", "handle")

    def __init__(self, device: _Gpu, context: Context, handle: int, *, owned: bool) -> None:
        self._device, self._context = device, context
        self.handle: Final = handle
        if owned:
            weakref.finalize(self, _destroy, os.getpid(), context, driver.cuStreamDestroy, handle).atexit = False

    def record(self) -> CudaEvent:
        """The point reached now."""
        return self._device.event_of(self)

    def wait(self, event: Event) -> None:
        """What comes later begins after that point of another stream. Does not block the caller."""
        if not isinstance(event, CudaEvent):
            raise ArenaError(f"{event!r} is no event of a GPU")
        with self._context.current():
            call(driver.cuStreamWaitEvent, self.handle, event.handle, 0)

    def synchronize(self) -> None:
        """Block until all of it is done; in a device call that cannot be left."""
        with self._context.current():
            call(driver.cuStreamSynchronize, self.handle)
        self._device.settle()
