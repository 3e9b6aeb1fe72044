"""Calls of the CUDA driver: checked, with the GPU's context current. Imported only where a GPU is used."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

from cuda.bindings import driver

from elastic_reshard.errors import ArenaError

__all__ = ["Context", "call", "outcome", "uuid_of"]

_OK: Final = driver.CUresult.CUDA_SUCCESS
_pushed = threading.local()  # context: the one that was pushed last in this thread


def outcome(function: Callable[..., tuple[Any, ...]], *args: Any) -> tuple[Any, Any]:
    """(the driver's error code, what the call gave: nothing, one thing or a tuple)."""
    error, *rest = function(*args)
    return error, rest[0] if len(rest) == 1 else tuple(rest) if rest else None


def call(function: Callable[..., tuple[Any, ...]], *args: Any, hint: str = "") -> Any:
    """What a call of the driver gives. ArenaError with the call's and the error's names if it fails."""
    error, found = outcome(function, *args)
    if error != _OK:
        _, text = outcome(driver.cuGetErrorString, error)
        said = text.decode(errors="replace") if isinstance(text, bytes) else "no text"
        raise ArenaError(
            f"{function.__name__} failed: {getattr(error, 'name', error)} ({said})"
            + (
                f"; {hint}"
                if hint
                else "; if it names an illegal address, this process's use of the GPU is over: end it"
            )
        )
    return found


def uuid_of(index: int) -> str:
    """A GPU's UUID, as text, by its number in this process."""
    device = call(driver.cuDeviceGet, index)
    return str(uuid.UUID(bytes=bytes(call(driver.cuDeviceGetUuid, device).bytes)))


class Context:
    """A GPU's primary context, which torch uses too."""

    def __init__(self, index: int) -> None:
        import torch

        # torch first: it must be the one that makes the context, with its own settings.
        with torch.cuda.device(index):
            torch.cuda.synchronize()
        self.index: Final = index
        self.device: Final = call(driver.cuDeviceGet, index)
        self._context = call(driver.cuDevicePrimaryCtxRetain, self.device)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Within it, this thread's driver calls are for this GPU; afterwards for the one they were for. One inside another of
        the same GPU costs nothing; torch must not be asked for another device inside."""
        before = getattr(_pushed, "context", None)
        if before is self:
            yield
            return
        call(driver.cuCtxPushCurrent, self._context)
        _pushed.context = self
        try:
            yield
        finally:
            _pushed.context = None  # between the two it is neither, whoever asks
            call(driver.cuCtxPopCurrent)
            _pushed.context = before

    def attribute(self, name: str) -> int:
        """A property, by the end of its name in CUdevice_attribute."""
        which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(driver.cuDeviceGetAttribute, which, self.device))
