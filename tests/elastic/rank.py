"""What runs inside a process of a test's world: functions that are called there, and the loop that calls them.

A function gets the process's `State` first. Its result, or what it raised, goes back through the pipe.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import elastic_reshard as er
from elastic_reshard.bench import values
from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.layout.dtensor import torch_dtype
from elastic_reshard.member import session
from elastic_reshard.protocol import hooks
from elastic_reshard.supervisor.server import Options, Supervisor
from tests.elastic import netns

__all__ = [
    "Seat",
    "State",
    "arm",
    "committed",
    "content",
    "enter",
    "events",
    "heard_of",
    "holds",
    "install",
    "join",
    "leave",
    "leave_when_asked",
    "main",
    "model",
    "publish",
    "publish_and_die",
    "reach",
    "receive",
    "serve",
    "stop_serving",
    "usage",
    "version",
]

# Uneven, replicated, three-dimensional, of two item sizes.
SHAPES = {
    "wide": ((48, 40), "float32", 0),
    "odd": ((7, 10), "float32", 0),
    "experts": ((3, 6, 8), "bfloat16", 1),
    "bias": ((33,), "float32", None),
}


def model(size: int, turn: int = 0, shapes: Mapping[str, Any] = SHAPES) -> ModelLayout:
    """The model over a group's ranks, sharded; `turn` shards another dim, as inference engines do."""
    mesh = Mesh.arange((size,))
    return ModelLayout(
        {
            name: TensorLayout(shape, dtype, mesh, (Replicate() if dim is None else Shard((dim + turn) % len(shape)),))
            for name, (shape, dtype, dim) in shapes.items()
        }
    )


def content(label: str | None) -> int:
    """Which values a label stands for: its digits."""
    return int("".join(c for c in label or "" if c.isdigit()))


def tensors_of(layout: ModelLayout, rank: int) -> dict[str, torch.Tensor]:
    """A rank's local tensors, zeroed."""
    return {
        name: torch.zeros(shape, dtype=torch_dtype(t.dtype))
        for name, t in layout.items()
        if (shape := t.local_shape(rank)) is not None
    }


@dataclass(frozen=True)
class Seat:
    """Where a process takes part."""

    url: str
    runtime: str
    token: str | None
    group: str
    size: int
    rank: int
    roles: tuple[str, ...]
    host: str = "a"
    environ: Mapping[str, str] = field(default_factory=dict)  # of what this process starts
    network: str = ""  # the file of its network namespace; "": its starter's


@dataclass
class State:
    """What a process of the world keeps between calls."""

    name: str
    folder: str
    member: session.Member | None = None
    seat: Seat | None = None
    layouts: dict[str, ModelLayout] = field(default_factory=dict)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # by role
    publications: dict[str, Any] = field(default_factory=dict)
    supervisor: Supervisor | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def m(self) -> session.Member:
        assert self.member is not None, f"{self.name} has not joined"
        return self.member

    @property
    def at(self) -> Seat:
        assert self.seat is not None
        return self.seat


def main(pipe: Connection, name: str, folder: str) -> None:
    """Call what is asked for until the pipe ends."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(filename=f"{folder}/{name}.log", level=logging.INFO, format="%(relativeCreated)d %(message)s")
    stacks = open(f"{folder}/{name}.stacks", "w")  # noqa: SIM115 - as long as the process
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    state = State(name, folder)
    while True:
        try:
            fn, args, kwargs = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = (True, fn(state, *args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test is told
            answer = (False, _told(error))
        try:
            pipe.send(answer)
        except BrokenPipeError:
            break
    os._exit(0)  # a world that is gone takes its processes with it, whatever their threads do


def _told(error: BaseException) -> dict[str, Any]:
    more = {k: v for k, v in vars(error).items() if k in ("members", "holders")}
    if hasattr(error, "violations"):
        more["violations"] = [str(v) for v in error.violations]
    kinds = [k.__name__ for k in type(error).__mro__]
    return {"kind": kinds[0], "kinds": kinds, "text": str(error), "more": more}


# -- a supervisor


def serve(state: State, options: Options) -> dict[str, Any]:
    """Start a supervisor in this process."""
    state.supervisor = s = Supervisor(options)
    return {"url": s.url, "token": s.token, "term": s.term, "instance": s.instance}


def stop_serving(state: State, over: bool) -> None:
    """End it in good order."""
    assert state.supervisor is not None
    state.supervisor.close(over=over)


def enter(_: State, network: str) -> None:
    """Be in a network namespace, by its file, with all that this thread starts from now on."""
    netns.enter(network)


# -- a member


def join(
    state: State,
    seat: Seat,
    *,
    shapes: Mapping[str, Any] = SHAPES,
    turn: int | None = None,
    deadline: float = 20.0,
    extra: Callable[[State], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Join with tensors of the model; `extra` makes more arguments, in this process."""
    state.seat = seat
    os.environ.update(seat.environ)
    if seat.network:
        enter(state, seat.network)
    given: dict[str, Any] = {}
    for role in seat.roles:
        turned = turn if turn is not None else int(role == "destination")
        state.layouts[role] = model(seat.size, turned, shapes)
        state.tensors[role] = tensors_of(state.layouts[role], seat.rank)
        values.poison(state.tensors[role])
    both = len(seat.roles) == 2
    for role in seat.roles:
        prefix = "destination_" if both and role == "destination" else ""
        given |= {f"{prefix}tensors": state.tensors[role], f"{prefix}layout": state.layouts[role]}
    given |= extra(state) if extra is not None else {}
    begun = time.monotonic()
    state.member = er.join(
        seat.url, name=state.name, group=er.Group(seat.group, seat.size, seat.rank), roles=set(seat.roles),
        runtime=seat.runtime, token=seat.token, host=seat.host, deadline=deadline, **given,
    )  # fmt: skip
    return {"id": state.member.id, "seconds": time.monotonic() - begun}


def publish(
    state: State, label: str, timeout: float = 20.0, extras: Mapping[str, Any] | None = None, named: bool = True
) -> float:
    """Make the values that the label stands for, and publish (`named` False: without the label). Seconds of the call."""
    values.fill(state.layouts["source"], state.tensors["source"], state.at.rank, content(label))
    begun = time.monotonic()
    extras = extras if named else {"stands_for": label}
    state.publications[label] = state.m.publish(label if named else None, extras=extras, timeout=timeout)
    seconds = time.monotonic() - begun
    # What is in the slot is a copy: the trainer goes on training.
    values.poison(state.tensors["source"])
    return seconds


def publish_and_die(state: State, label: str) -> None:
    """SIGKILL to itself as the next thing after publish() has returned."""
    values.fill(state.layouts["source"], state.tensors["source"], state.at.rank, content(label))
    state.m.publish(label)
    os.kill(os.getpid(), signal.SIGKILL)


def committed(state: State, label: str, timeout: float = 20.0, until: Any = "committed") -> int:
    """Wait for a publish of this process; its version."""
    return int(state.publications[label].wait(until, timeout))


def install(state: State, timeout: float = 20.0) -> dict[str, Any]:
    """Install, and look whether the tensors are the label's values, bit for bit."""
    begun = time.monotonic()
    result = state.m.install(timeout)
    seconds, stands_for = time.monotonic() - begun, result["label"] or result["extras"].get("stands_for")
    return result | {"seconds": seconds, "wrong": holds(state, stands_for), "held": version(state)}


def receive(state: State, timeout: float = 20.0) -> int:
    """Wait for a newer version and install it."""
    return state.m.receive(timeout)


def reach(state: State, version: int, timeout: float = 20.0) -> None:
    """Wait for newer versions and install them until it serves this one."""
    while state.m.weight_version < version:
        state.m.receive(timeout)


def holds(state: State, label: str | None) -> list[str]:
    """Names of live tensors that are not the label's values."""
    return values.wrong(state.layouts["destination"], state.tensors["destination"], state.at.rank, content(label))


def version(state: State) -> int:
    """What the member says it serves."""
    return state.m.weight_version


def heard_of(state: State, members: Sequence[str]) -> None:
    """Wait until this member has heard that these are its group's."""
    desk, deadline = state.m._desk, time.monotonic() + 10.0

    def told() -> bool | None:
        group = desk.core.my_group
        return True if group is not None and group.members == tuple(members) else None

    with desk.changed:
        desk.wait(told, deadline, lambda: f"{state.name} has not heard of {members}")


def leave(state: State) -> None:
    """Leave, and be no member."""
    state.m.leave(10.0)
    state.member = None


def leave_when_asked(state: State, timeout: float = 20.0) -> int:
    """Wait until it is asked to leave, and leave; the version that it served."""
    assert events(state, "leave", timeout)[-1][0] == "leave", "it was asked to leave"
    served = version(state)
    leave(state)
    return served


def arm(_: State, plan: Mapping[str, Any]) -> None:
    """Place faults in this process from now on, in place of those before."""
    hooks._armed = hooks.arm(json.dumps(plan))
    hooks._passed.clear()


def events(
    state: State, until: str, timeout: float = 10.0, mark: Mapping[str, str] | None = None
) -> list[tuple[str, int, str | None]]:
    """What watch() tells, up to the first event of a kind. mark: makes the file named for a kind when that is told."""
    found = []
    for event in state.m.watch(timeout=timeout):
        found.append((event.kind, event.weight_version, event.label))
        if mark is not None and event.kind in mark:
            Path(mark[event.kind]).touch()
        if event.kind == until:
            break
    return found


def usage(_: State) -> dict[str, int]:
    """What this process holds."""
    status = Path("/proc/self/status").read_text()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    maps = Path("/proc/self/maps").read_text().count("/memfd:")
    return {"fds": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(), "rss": rss, "maps": maps}


def hold_the_interpreter(_: State, seconds: float) -> float:
    """A native call that does not let go of the interpreter's lock."""
    begun = time.monotonic()
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))
    return time.monotonic() - begun
