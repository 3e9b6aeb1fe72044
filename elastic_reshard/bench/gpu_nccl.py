"""Bare NCCL ranks for measuring, one process each, on as many GPUs as there are: what this project is compared with.

Functions whose first argument is a `State` run in the ranks; what they keep is in this module, one world a process.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch

from elastic_reshard.bench.rank import State
from elastic_reshard.bench.stage import PRELOAD, Actor, Call
from elastic_reshard.errors import ReshardError

__all__ = [
    "Here", "Ranks", "barrier_ms", "enter", "fly", "form", "here", "leave", "place", "probe", "settle", "unique_id", "warm",
]  # fmt: skip

T = TypeVar("T")
_MORE: Final = ("cuda.bindings.driver", "nccl.core", "nccl.m2n")
_CTAS: Final = 4  # of every rank, where several share a GPU
_WIDE: Final = 4096
_IN_PROGRESS: Final = 7  # ncclInProgress


@dataclass
class Here:
    """A rank's world. gpu: its device's number."""

    rank: int = 0
    size: int = 1
    gpu: int = 0
    shared: bool = True
    communicator: Any = None
    handle: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    flying: Any = None
    launched: int = 0
    all_launched: threading.Event = field(default_factory=threading.Event)


_here = Here()


def here() -> Here:
    """This process's."""
    return _here


class Ranks:
    """Rank processes, parent's side. Use it as a context manager: all have ended when it is left, by SIGKILL."""

    def __init__(self, size: int, gpus: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, *_MORE, "elastic_reshard.bench.gpu_nccl"])
        if size > max(1, gpus):
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        self.size, self.gpus = size, gpus
        self.actors: list[Actor] = []

    def __enter__(self) -> Self:
        self.actors = [Actor(f"rank {rank}", self._context) for rank in range(self.size)]
        return self

    def fresh(self, rank: int) -> Actor:
        """A new process in the place of one that has ended."""
        return Actor(f"rank {rank} again", self._context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self.actors:
            actor.close()

    def begin(self, fn: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> dict[int, Call]:
        """Call a function in all, or in some."""
        chosen = range(self.size) if ranks is None else ranks
        return {rank: self.actors[rank].begin(fn, *args) for rank in chosen}

    def do(self, fn: Callable[..., T], *args: Any, limit: float = 60.0) -> list[T]:
        """Call a function in all and wait; results by rank."""
        return [call.result(limit) for call in self.begin(fn, *args).values()]

    def form(self, *, blocking: bool = True) -> float:
        """Place the ranks and form a communicator; seconds of the slowest, without imports and contexts."""
        calls = [actor.begin(place, rank, self.size, self.gpus) for rank, actor in enumerate(self.actors)]
        for call in calls:
            call.result()
        unique = self.actors[0].do(unique_id)
        return max(self.do(form, unique, blocking))


# -- in the ranks


def place(state: State, rank: int, size: int, gpus: int) -> str:
    """Take a device; its name."""
    del state
    _here.rank, _here.size, _here.gpu, _here.shared = rank, size, rank % max(1, gpus), size > gpus
    torch.cuda.set_device(_here.gpu)
    torch.zeros(1, device="cuda")
    return torch.cuda.get_device_name(_here.gpu)


def unique_id(state: State) -> bytes:
    """Of a communicator to be formed."""
    del state
    return bytes(nccl().get_unique_id())


def form(state: State, unique: bytes, blocking: bool) -> float:
    """Form the communicator; seconds."""
    del state
    core = nccl()
    options: dict[str, Any] = {"max_ctas": _CTAS} if _here.shared else {}
    begun = time.monotonic()
    _here.communicator = core.Communicator.init(
        _here.size, _here.rank, core.UniqueId.from_bytes(unique), core.NCCLConfig(blocking=blocking, **options)
    )
    settle(_here.communicator)
    return time.monotonic() - begun


def settle(communicator: Any) -> None:
    """Wait until a nonblocking call has been carried out. ReshardError after 30 s, or for an error."""
    deadline = time.monotonic() + 30
    while (state := int(communicator.get_async_error())) == _IN_PROGRESS:
        if time.monotonic() > deadline:
            raise ReshardError(f"rank {_here.rank}: NCCL was still in progress after 30 s")
        time.sleep(0.0005)
    if state:
        raise ReshardError(f"rank {_here.rank}: NCCL is in state {state}: {communicator.get_last_error()}")


def nccl() -> Any:
    """nccl4py's stable face."""
    return import_module("nccl.core")


def _m2n() -> Any:
    return import_module("nccl.m2n")


def enter(what: str) -> None:
    """Launch one operation of all ranks on the current stream: "m2n" (two sources, the others destinations), or "allreduce"."""
    stream, half = torch.cuda.current_stream(), _here.size // 2
    side, number = ("src", _here.rank) if _here.rank < half else ("dst", _here.rank - half)
    tensor = _here.tensors["flight"]
    if what == "allreduce":
        core = nccl()
        _here.communicator.allreduce(tensor, tensor, core.MAX, stream=stream.cuda_stream)
        return
    m2n = _m2n()
    if _here.handle is None:
        _here.handle = m2n.init(m2n.Config(max_cta=_CTAS if _here.shared else None))
    del number
    rows, width = tensor.shape
    local = {"src": (rows, width), "dst": (rows * half, width // (_here.size - half))}
    if side == "dst":
        local = {"src": (rows // half, width * (_here.size - half)), "dst": (rows, width)}
    m2n.reshard(
        tensor if side == "src" else None,
        tensor if side == "dst" else None,
        _here.communicator,
        stream.cuda_stream,
        src_mesh=m2n.Mesh((half,), 0), src_placements=[m2n.Shard(0)], src_local_shape=local["src"], src_dtype="bfloat16",
        dst_mesh=m2n.Mesh((_here.size - half,), half), dst_placements=[m2n.Shard(1)], dst_local_shape=local["dst"],
        dst_dtype="bfloat16", handle=_here.handle,
    )  # fmt: skip


def warm(state: State, what: str, nbytes: int) -> float:
    """Memory for operations of about so many bytes, and a few of them; seconds of the last."""
    del state
    half = _here.size // 2
    rows = nbytes // (2 * _WIDE) // half * half
    shape = (rows // half, _WIDE) if _here.rank < half else (rows, _WIDE // (_here.size - half))
    if what == "allreduce":
        shape = (rows, _WIDE)
    _here.tensors["flight"] = torch.full(shape, float(_here.rank), dtype=torch.bfloat16, device="cuda")
    took = 0.0
    for _ in range(3):
        begun = time.monotonic()
        enter(what)
        torch.cuda.synchronize()
        took = time.monotonic() - begun
    return took


def fly(state: State, what: str, times: int) -> dict[str, Any]:
    """Launch so many operations, in a thread, and return while they are in flight: how many were launched within 2 s, and how
    long that took. Launching may block once a peer is gone."""
    del state
    _here.launched, _here.all_launched, begun = 0, threading.Event(), time.monotonic()

    def launch() -> None:
        torch.cuda.set_device(_here.gpu)
        for _ in range(times):
            enter(what)
            _here.launched += 1
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        _here.flying = event
        _here.all_launched.set()

    threading.Thread(target=launch, name="launch", daemon=True).start()
    _here.all_launched.wait(2.0)
    return {"launched": _here.launched, "seconds": round(time.monotonic() - begun, 3)}


def probe(state: State) -> dict[str, Any]:
    """What a survivor can see: whether its stream is done, and the communicator's error."""
    del state
    done = _here.flying is not None and bool(_here.flying.query())
    return {"done": done, "launched": _here.launched, "async error": str(_here.communicator.get_async_error())}


def leave(state: State, how: str, dead: Sequence[int], limit: float) -> dict[str, Any]:
    """Try to get out by `abort`, `shrink` or `revoke`, in a thread; whether that returned in `limit` seconds, and what it
    raised."""
    del state
    found: dict[str, Any] = {"rank": _here.rank, "how": how, "returned": False, "seconds": None, "error": ""}
    over = threading.Event()

    def call() -> None:
        torch.cuda.set_device(_here.gpu)
        begun = time.monotonic()
        try:
            _ways()[how](list(dead))
        except BaseException as error:  # noqa: BLE001 - whatever it was, it is told
            found["error"] = f"{type(error).__name__}: {error}"[:200]
        found["seconds"] = round(time.monotonic() - begun, 3)
        over.set()

    threading.Thread(target=call, name=how, daemon=True).start()
    found["returned"] = over.wait(limit)
    return dict(found)


def _ways() -> dict[str, Callable[[list[int]], Any]]:
    core, communicator = nccl(), _here.communicator
    return {
        "abort": lambda _: communicator.abort(),
        "shrink": lambda dead: communicator.shrink(dead, flag=core.CommShrinkFlag.ABORT),
        "revoke": lambda _: communicator.revoke(),
    }


def barrier_ms(state: State, times: int) -> float:
    """Milliseconds of one barrier of all ranks (an all-reduce of 4 bytes and its end seen by the host): the median."""
    del state
    word = torch.zeros(1, device="cuda")
    core, took = nccl(), []
    for _ in range(times):
        begun = time.monotonic()
        _here.communicator.allreduce(word, word, core.SUM, stream=torch.cuda.current_stream().cuda_stream)
        settle(_here.communicator)  # a nonblocking one refuses the next call while it is still in progress
        torch.cuda.synchronize()
        took.append(time.monotonic() - begun)
    return 1e3 * sorted(took)[len(took) // 2]
