"""What a process of a `Stage` is asked to do. Each function's first argument is what the process keeps between calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from elastic_reshard.arena import empty_like
from elastic_reshard.bench import values
from elastic_reshard.collective import reshard
from elastic_reshard.errors import ReshardError
from elastic_reshard.layout import ModelLayout
from elastic_reshard.layout.dtensor import torch_dtype
from elastic_reshard.member import Group, Member
from elastic_reshard.member import join as join_job
from elastic_reshard.protocol.base import Role
from elastic_reshard.supervisor.server import Options, Supervisor
from elastic_reshard.transport import Endpoint
from elastic_reshard.watchdog.runtime import VARIABLE

__all__ = [
    "Seat",
    "State",
    "asks",
    "bare_copy",
    "check",
    "fill",
    "form",
    "join",
    "part",
    "poison",
    "publish",
    "receive",
    "serve",
    "stop_serving",
    "through",
]

_DEADLINE = 100.0


@dataclass(frozen=True)
class Seat:
    """Where a member takes part. layout: of its group, in group ranks."""

    url: str
    runtime: str
    token: str
    group: str
    size: int
    rank: int
    role: Role
    host: str
    layout: ModelLayout


@dataclass
class State:
    """What a process keeps. values: the module that makes and compares its tensors' values."""

    name: str
    values: ModuleType = values
    seat: Seat | None = None
    member: Member | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    supervisor: Supervisor | None = None
    store: TCPStore | None = None
    endpoint: Endpoint | None = None
    flat: Callable[[], object] | None = None

    @property
    def m(self) -> Member:
        if self.member is None:
            raise ReshardError(f"{self.name} has not joined")
        return self.member

    @property
    def at(self) -> Seat:
        if self.seat is None:
            raise ReshardError(f"{self.name} has no seat")
        return self.seat


def serve(state: State, options: Options) -> tuple[str, str]:
    """Be the supervisor; its URL and token."""
    state.supervisor = Supervisor(options)
    return state.supervisor.url, state.supervisor.token


def stop_serving(state: State) -> None:
    """End the job in good order."""
    if state.supervisor is not None:
        state.supervisor.close(over=True)


def join(state: State, seat: Seat) -> str:
    """Become a member, with tensors in arena memory; its id."""
    torch.set_num_threads(1)
    os.environ[VARIABLE] = seat.runtime  # by which the processes that it starts are known
    state.seat = seat
    shapes = {name: (t.local_shape(seat.rank), t.dtype) for name, t in seat.layout.items()}
    meta = {n: torch.empty(s, dtype=torch_dtype(d), device="meta") for n, (s, d) in shapes.items() if s is not None}
    state.tensors = empty_like(meta)
    values.poison(state.tensors)
    state.member = join_job(
        seat.url, name=state.name, role=seat.role, group=Group(seat.group, seat.size, seat.rank), tensors=state.tensors,
        layout=seat.layout, host=seat.host, token=seat.token, runtime=seat.runtime, deadline=_DEADLINE,
    )  # fmt: skip
    return state.member.id


def fill(state: State, version: int) -> None:
    """Write a version's values into the live tensors."""
    state.values.fill(state.at.layout, state.tensors, state.at.rank, version)


def poison(state: State) -> None:
    """Write what no version has."""
    state.values.poison(state.tensors)


def check(state: State, version: int) -> list[str]:
    """Names of live tensors that are not bit for bit that version."""
    found: list[str] = state.values.wrong(state.at.layout, state.tensors, state.at.rank, version)
    return found


def publish(state: State, version: int) -> dict[str, float]:
    """Publish and wait for the commit: when it was called, returned, and committed (time.monotonic), and as which version."""
    begun = time.monotonic()
    publication = state.m.publish(f"step-{version}", timeout=_DEADLINE)
    returned = time.monotonic()
    found = publication.wait("committed", _DEADLINE)
    return {"begun": begun, "returned": returned, "committed": time.monotonic(), "nbytes": float(publication.nbytes),
            "version": float(found)}  # fmt: skip


def receive(state: State) -> dict[str, float]:
    """Install the next version: when it was there, which it is, and the pause of the install."""
    found = state.m.receive(_DEADLINE)
    done = time.monotonic()
    return {"done": done, "version": float(found), "pause": float(state.m.last_install["install_pause"])}


def asks(state: State) -> tuple[int, int]:
    """How often it was asked to install, and what it serves."""
    return state.m._desk.core.install.ask, state.m.weight_version


# -- the bare parts of a refit


def form(state: State, port: int, name: str, rank: int, domains: Sequence[str]) -> None:
    """An endpoint of all members, in these domains, over the network between them."""
    state.store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_DEADLINE))
    store = PrefixStore(name, state.store)
    state.endpoint = Endpoint.form(store, rank, len(domains), domains=list(domains), timeout=_DEADLINE)


def part(state: State) -> None:
    """Leave the endpoint."""
    if state.endpoint is not None:
        state.endpoint.close()
    state.endpoint = state.store = None


def through(state: State, layout: ModelLayout) -> tuple[float, float]:
    """One bare reshard of the live tensors, into the live tensors; begun and done. layout: in the endpoint's ranks."""
    begun = time.monotonic()
    if state.at.role == "source":
        reshard(source=state.tensors, source_layout=layout, group=state.endpoint, deadline=_DEADLINE)
    else:
        reshard(destination=state.tensors, destination_layout=layout, group=state.endpoint, deadline=_DEADLINE)
    return begun, time.monotonic()


def bare_copy(state: State) -> float:
    """Seconds of the bare copy that is this member's part: of its shard's bytes, or the last install's pull again."""
    if state.at.role == "source":
        state.flat = copy = state.flat or _flat(state)
    else:
        copy = state.m.rehearse_install()  # anew: the last install was out of the other slots
    begun = time.monotonic()
    copy()
    return time.monotonic() - begun


def _flat(state: State) -> Callable[[], object]:
    nbytes = sum(t.numel() * t.element_size() for t in state.tensors.values())
    meta = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    source, target = (empty_like({"flat": meta})["flat"].fill_(1).numpy() for _ in range(2))
    return lambda: np.copyto(target, source)
