"""What movers on GPUs work with, as far as it is installed. A nursery loads it by importing this, so that no mover has to: that
takes seconds. None of it touches a GPU or starts a thread when it is imported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from elastic_reshard.log import logger

__all__ = ["LIBRARIES", "load"]

_log = logger("nursery")
LIBRARIES: Final = (
    "cuda.bindings.driver", "cuda.bindings.nvrtc", "elastic_reshard.arena.cuda", "nccl.core", "nccl.bindings.nccl", "nccl.m2n",
    "elastic_reshard.communicator.nccl", "elastic_reshard.transport.m2n",
)  # fmt: skip


def load(names: Sequence[str] = LIBRARIES) -> list[str]:
    """Import those that are there, and say which. One that is broken is left to the mover that needs it, whose error it is."""
    found = []
    for name in names:
        try:
            if find_spec(name) is not None:
                import_module(name)
                found.append(name)
        except ModuleNotFoundError:
            continue  # find_spec imports a name's parents
        except Exception as error:  # noqa: BLE001 - a library of another version raises what it likes; gloo needs none
            _log.warning("nursery.library_broken", library=name, why=str(error))
    return found


load()
