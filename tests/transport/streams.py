"""What tests of grouped networks share: members of a small landing plan, with tensors on the host or a pretend device."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_reshard.arena import HostArena
from elastic_reshard.arena.pretend import empty, open_pretend
from elastic_reshard.communicator import Communicator, GlooBackend, Name, Registry
from elastic_reshard.communicator.pretend import PretendBackend
from elastic_reshard.errors import ReshardError
from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.plan import Plan, PlanOptions, Topology
from elastic_reshard.transport import Network, Program, StagingPlan, Views, bind, run
from tests.communicator.world import Plane, soon
from tests.processes import Rank

KIB = 1 << 10
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "rows": ((37, 10), "int32"),
    "flat": ((131,), "float32"),
    "deep": ((7, 33, 5), "int64"),
    "wide": ((300, 1001), "int32"),
    "one": ((), "float64"),
    "bits": ((5, 333), "bfloat16"),
}
SOURCES, SIZE = 2, 4


def model(first: int, ranks: int, dim: int) -> ModelLayout:
    """Every tensor in uneven parts along a dim; those without dims are replicated."""
    mesh = Mesh.arange((ranks,), first=first)
    return ModelLayout(
        {
            name: TensorLayout(shape, dtype, mesh, (Shard(dim % len(shape)) if shape else Replicate(),))
            for name, (shape, dtype) in SHAPES.items()
        }
    )


SOURCE, DESTINATION = model(0, SOURCES, 0), model(SOURCES, SIZE - SOURCES, -1)
# Some 15 rounds; messages of whole cells, and shared ones.
OPTIONS = PlanOptions(message=64 * KIB, staging=256 * KIB, cell=16 * KIB, landing=True)


def plan() -> Plan:
    """Two sources, two destinations, each in a domain of its own: every byte crosses."""
    return Plan.between(SOURCE, DESTINATION, Topology(tuple(range(SIZE))), OPTIONS)


def full(layout: TensorLayout, number: int) -> torch.Tensor:
    """A whole tensor: each element is its global index, moved by the tensor's number."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return (torch.arange(layout.numel) % 60_000 + 1000 * number + 1).to(dtype).reshape(layout.shape)


def wanted(model_: ModelLayout, rank: int) -> dict[str, torch.Tensor]:
    """What a rank's tensors must be."""
    found = {}
    for number, (name, layout) in enumerate(model_.items()):
        shape = layout.local_shape(rank)
        if shape is not None:
            mine = found[name] = torch.zeros(shape, dtype=getattr(torch, layout.dtype))
            for box, offset in layout.boxes(rank):
                place = tuple(slice(a, a + n) for a, n in zip(offset, box.shape, strict=True))
                mine[place] = full(layout, number)[box.slices()]
    return found


@dataclass
class Watch:
    """As a mover's; ends before round `end`; before each of its rounds `before` is called."""

    end: int = 1 << 30
    full: bool = True
    salt: int = 7
    ahead: bool = True
    broken: int = -1  # the round in which its memory is said to have changed
    before: Callable[[int], None] = lambda number: None
    log: list[Any] = field(default_factory=list)
    done: int = 0

    def may_begin(self, number: int) -> bool:
        self.log.append(("may", number))
        self.before(number)
        return number < self.end

    def may_copy(self, number: int) -> bool:
        return number < self.end

    def intact(self) -> bool:
        self.done += 1
        return self.done != self.broken + 1

    def landed(self, number: int) -> None:
        self.log.append(("landed", number))

    def waiting(self, peer: int | None, cell: int) -> None:
        self.log.append(("waits", peer, cell))

    def numbers(self, what: str) -> list[int]:
        return [entry[1] for entry in self.log if entry[0] == what]


class Member:
    """One rank process: its tensors on host or device, its communicator by the wire, its program."""

    def __init__(self, me: Rank, place: str, wire: str, *, tells: bool = False) -> None:
        self.me, self.wire, self.device = me, wire, open_pretend(0)
        self.plane, self.registry = Plane(me), Registry()
        self.board = self.plane.board
        self.backend = PretendBackend(self.device, tells=tells) if wire == "device" else GlooBackend("lo")
        self._held: list[Any] = []
        side = SOURCE if me.rank < SOURCES else DESTINATION
        self.wanted = wanted(side, me.rank)
        self.tensors = {name: self._tensor(t, place) for name, t in self.wanted.items()}
        for name, tensor in self.tensors.items():
            if me.rank < SOURCES:
                tensor.copy_(self.wanted[name])
        self.failed: BaseException | None = None

    def _tensor(self, like: torch.Tensor, place: str) -> torch.Tensor:
        if place == "device":
            return empty(tuple(like.shape), like.dtype)
        arena = HostArena(max(1, like.nbytes))
        self._held.append(self.device.host(arena.bytes))  # kernels reach it, as a host arena beside NCCL
        return arena.empty(tuple(like.shape), like.dtype)

    def bind(self) -> Program:
        held = {(0, name): tensor for name, tensor in self.tensors.items()}
        views = Views(held, {}) if self.me.rank < SOURCES else Views({}, held)
        piece = plan().slice(self.me.rank)
        staged = StagingPlan(piece, views, OPTIONS.staging, wire=self.wire)  # type: ignore[arg-type]
        self.staged = staged.nbytes
        staging: Any = None
        if staged.nbytes and self.wire == "device":
            staging = self.device.scratch(staged.nbytes)
        elif staged.nbytes:
            staging = HostArena(staged.nbytes)
            self._held.append(self.device.host(staging.bytes))
        return bind(staged, staging, {}, piece.rounds)

    def form(self, epoch: int = 1, ranks: list[int] | None = None) -> Communicator:
        ranks = list(range(self.me.size)) if ranks is None else ranks
        name, rank = Name(epoch, "t"), ranks.index(self.me.rank)
        store = self.plane.store(name, rank, len(ranks))
        return self.registry.form(self.backend, store, rank, len(ranks), soon(), tuple)

    def carry(self, program: Program, communicator: Communicator, watch: Any, seconds: float = 20.0) -> str:
        """Run it; the error's name, "" for none."""
        self.watch = watch
        carriage = _Carriage(communicator, self._broke)
        try:
            run(program, carriage, soon(seconds), watch)
        except ReshardError as error:
            return type(error).__name__ + ": " + str(error)
        return ""

    def _broke(self, error: BaseException) -> None:
        """As a mover's worker: out of all operations before anything else."""
        self.failed = error
        assert self.registry.abort_all(soon(5), str(error)).out

    def right(self) -> list[str]:
        """Tensors that are what they must be, bit for bit."""
        return [name for name, t in self.tensors.items() if torch.equal(t, self.wanted[name])]

    def meet(self, what: str, ranks: list[int] | None = None) -> None:
        self.board.set(f"{what}/{self.me.rank}")
        for rank in range(self.me.size) if ranks is None else ranks:
            self.board.get(f"{what}/{rank}")

    def close(self) -> None:
        assert self.registry.abort_all(soon(5), "end").out
        self.plane.close()


class _Carriage:
    channel = None

    def __init__(self, communicator: Communicator, broke: Callable[[BaseException], None]) -> None:
        self.rank, self._communicator, self.fail = communicator.rank, communicator, broke

    @property
    def network(self) -> Network:
        return self._communicator.network  # type: ignore[return-value]


def kill(number: int = signal.SIGKILL) -> None:
    """This process ends, or stands still, here."""
    os.kill(os.getpid(), number)
    time.sleep(60)
