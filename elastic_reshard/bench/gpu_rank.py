"""What a member of a `DeviceStage` is asked to do. Each function's first argument is what the process keeps between calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elastic_reshard.bench import gpu_values
from elastic_reshard.bench.gpu_compute import Compute, Rates
from elastic_reshard.bench.rank import Seat, State
from elastic_reshard.errors import RefitTimeout, ReshardError
from elastic_reshard.layout.dtensor import torch_dtype
from elastic_reshard.member import Group
from elastic_reshard.member import join as join_job
from elastic_reshard.protocol.docs import PublicationState
from elastic_reshard.watchdog.runtime import VARIABLE

__all__ = [
    "Place",
    "bare_flat",
    "compute",
    "compute_and_receive",
    "device_memory",
    "empty",
    "join",
    "kernel_runs",
    "publish_only",
    "pull_again",
    "receive_idle",
]  # fmt: skip

_DEADLINE = 100.0
_computes: dict[str, Compute] = {}


@dataclass(frozen=True)
class Place:
    """device: "cuda", "pretend" or "cpu"; index: which one. stage, window: of `join`; None: not given."""

    device: str
    index: int
    stage: str | None = None
    window: str | None = None

    @property
    def torch_device(self) -> torch.device:
        """As torch calls it."""
        return torch.device("cuda", self.index) if self.device == "cuda" else torch.device("cpu")


def empty(place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor there."""
    if place.device == "pretend":
        from elastic_reshard.arena import pretend

        return pretend.empty(shape, dtype, place.index)
    return torch.empty(shape, dtype=dtype, device=place.torch_device)


def join(state: State, seat: Seat, place: Place) -> str:
    """Become a member with tensors on a device; its id."""
    torch.set_num_threads(1)
    os.environ[VARIABLE] = seat.runtime  # by which the processes that it starts are known
    if place.device == "cuda":
        torch.cuda.set_device(place.index)
    state.seat, state.values = seat, gpu_values
    shapes = {name: (t.local_shape(seat.rank), t.dtype) for name, t in seat.layout.items()}
    state.tensors = {n: empty(place, s, torch_dtype(d)) for n, (s, d) in shapes.items() if s is not None}
    gpu_values.poison(state.tensors)
    more: dict[str, Any] = {key: value for key, value in (("stage", place.stage), ("window", place.window)) if value}
    state.member = join_job(
        seat.url, name=state.name, role=seat.role, group=Group(seat.group, seat.size, seat.rank), tensors=state.tensors,
        layout=seat.layout, host=seat.host, token=seat.token, runtime=seat.runtime, deadline=_DEADLINE, **more,
    )  # fmt: skip
    return state.member.id


def synchronize(state: State) -> None:
    """Wait for the device."""
    if any(t.is_cuda for t in state.tensors.values()):
        torch.cuda.synchronize()


def kernel_runs(state: State) -> bool:
    """Whether this process's context still computes: a sum over its own tensors, and a matrix product with a known result."""
    tensor = next(iter(state.tensors.values()))
    device = tensor.device
    ones = torch.ones((64, 64), dtype=torch.float32, device=device)
    product = ones @ ones
    total = tensor.detach().reshape(-1).view(torch.uint8).to(torch.int64).sum()
    return bool((product == 64).all().item()) and int(total.item()) >= 0


def publish_only(state: State, version: int) -> dict[str, float]:
    """Publish and return: the process may be killed from now on. When it was called and returned, and the bytes."""
    synchronize(state)
    begun = time.monotonic()
    publication = state.m.publish(f"step-{version}", timeout=_DEADLINE)
    returned = time.monotonic()
    synchronize(state)
    return {"begun": begun, "returned": returned, "nbytes": float(publication.nbytes), "synchronized": time.monotonic()}


def receive_idle(state: State) -> dict[str, float]:
    """As `rank.receive`, with the window open while it waits: an engine that has nothing to do."""
    with _idle(state):
        found = state.m.receive(_DEADLINE)
    done = time.monotonic()
    return {"done": done, "version": float(found), "pause": float(state.m.last_install["install_pause"])}


def _idle(state: State) -> Any:
    member: Any = state.m
    return member.idle()


def bare_flat(state: State) -> dict[str, float]:
    """Seconds of a plain copy of as many bytes as this member's tensors have, between memory of its own; all members of a gang
    do it at the same time, as they pull."""
    nbytes = sum(t.numel() * t.element_size() for t in state.tensors.values())
    device = next(iter(state.tensors.values())).device
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
    synchronize(state)
    begun = time.monotonic()
    target.copy_(source)
    synchronize(state)
    seconds = time.monotonic() - begun
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()  # torch would keep it from the others on the device
    return {"seconds": seconds, "nbytes": float(nbytes)}


def pull_again(state: State, repeats: int) -> dict[str, Any]:
    """The pulls of the last install, again and again, without any protocol: seconds each, and the bytes."""
    pull: Callable[[], int] = state.m.rehearse_install()
    seconds, nbytes = [], 0
    for _ in range(repeats):
        synchronize(state)
        begun = time.monotonic()
        nbytes = pull()
        synchronize(state)
        seconds.append(time.monotonic() - begun)
    return {"seconds": seconds, "nbytes": nbytes}


def compute(state: State, place: Place, seconds: float) -> Rates:
    """Compute and do nothing else for so long."""
    return _compute(place).run(time.monotonic() + seconds)


def _compute(place: Place) -> Compute:
    key = f"{place.device}:{place.index}"
    if key not in _computes:
        _computes[key] = Compute(place.torch_device)
    return _computes[key]


def compute_and_receive(state: State, place: Place, seconds: float, versions: int, window: str) -> dict[str, Any]:
    """Compute; install each version when it is there. window: "idle": as soon as one is on its way, compute nothing and leave
    the device to the movers until it is installed; else compute on while it moves. Rates are of the time spent computing."""
    work, end, installed, pauses = _compute(place), time.monotonic() + seconds, 0, []
    rates, waited = Rates(), 0.0
    while time.monotonic() < end and installed < versions:
        work.some(rates)
        if window == "idle" and _coming(state):
            begun = time.monotonic()
            with _idle(state):
                state.m.receive(_DEADLINE)
            waited += time.monotonic() - begun
        elif not _try_receive(state):
            continue
        installed += 1
        pauses.append(float(state.m.last_install["install_pause"]))
    if installed < versions:
        raise ReshardError(f"{state.name} installed {installed} of {versions} versions in {seconds:g} s")
    return {"rates": rates, "pauses": pauses, "waited": waited, "installed": installed}


def _coming(state: State) -> bool:
    """Whether a version is on its way, or there."""
    desk = state.m._desk
    with desk.changed:
        moving = any(doc.state is PublicationState.MOVING for doc in desk.core.view.publications.values())
        return moving or desk.core.installable() is not None


def _try_receive(state: State) -> bool:
    desk = state.m._desk
    with desk.changed:
        if desk.core.installable() is None:
            return False
    try:
        state.m.receive(_DEADLINE)
    except RefitTimeout as error:
        raise ReshardError(f"{state.name} could not install: {error}") from error
    return True


def device_memory(state: State) -> dict[str, Any]:
    """What the member reports of memory, and what is free on its device."""
    found: dict[str, Any] = {"report": dict(state.m.memory or {})}
    if any(t.is_cuda for t in state.tensors.values()):
        free, total = torch.cuda.mem_get_info()
        found |= {"free": free, "total": total}
    return found
