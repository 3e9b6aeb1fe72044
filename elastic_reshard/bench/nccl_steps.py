"""What the ranks of the NCCL probe do in each step. Each function returns what is printed; "ok" says whether it is right."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from elastic_reshard.arena import HostArena
from elastic_reshard.bench.nccl_rank import World, network_of
from elastic_reshard.communicator.base import Communicator, Name
from elastic_reshard.errors import TransferError
from elastic_reshard.layout import Mesh, ModelLayout, Shard, TensorLayout
from elastic_reshard.plan import Plan, PlanOptions, Topology
from elastic_reshard.transport import Program, StagingPlan, Views, bind, run

__all__ = ["change", "epochs", "lose", "rounds"]

_MIB: Final = 1 << 20
_SOURCES: Final = 2


def epochs(world: World) -> dict[str, Any]:
    """Twice: form, exchange groups of several sizes, close politely."""
    me, told = world.me, dict[str, Any]()
    for epoch in (1, 2):
        begun = time.monotonic()
        communicator = world.form(epoch, range(me.size))
        formed = time.monotonic() - begun
        sizes = (1000, 1 << 20, 1000)
        took = [round(1e3 * world.everybody(communicator, 10 * epoch + n, size), 2) for n, size in enumerate(sizes)]
        begun = time.monotonic()
        out = world.close(communicator)
        told[f"epoch {epoch}"] = {
            "form s": round(formed, 3), "exchange ms": took, "close s": round(time.monotonic() - begun, 3), "out": out,
            "config": getattr(communicator, "config", ""),
        }  # fmt: skip
    pending = world.registry.pending
    return {"ok": all(e["out"] for e in told.values()) and not pending, "pending": pending, **told}


def change(world: World) -> dict[str, Any]:
    """Four; the last leaves and the others shrink; a fresh process joins and they grow."""
    rank, told = world.me.rank, dict[str, Any]()
    grown: Communicator | None = None
    if rank < 4:
        parent = world.form(1, range(4))
        world.everybody(parent, 1, 5000)
        world.meet("first", range(4))
        if rank == 3:
            out = world.registry.abort_all(world.deadline, "it leaves").out
            return {"ok": out, "left": out}
        begun = time.monotonic()
        world.doing("shrinking natively to 3")
        smaller = world.registry.shrink(parent, Name(2, "probe"), [3], world.deadline, 10.0)
        told["shrink s"] = round(time.monotonic() - begun, 3)
        world.everybody(smaller, 2, 5000)
        world.meet("shrunk", range(3))
        begun = time.monotonic()
        world.doing("growing natively to 4")
        grown = world.registry.grow(smaller, world.store(Name(3, "probe"), rank, 4), 4, world.deadline, 10.0)
    else:
        world.hear("shrunk.0")
        begun = time.monotonic()
        world.doing("joining a grown communicator")
        store = world.store(Name(3, "probe"), 3, 4)
        grown = world.registry.join(world.backend, store, 3, 4, [3], world.deadline, tuple)
    told["grow s"] = round(time.monotonic() - begun, 3)
    world.everybody(grown, 3, 5000)
    told["pending"] = world.registry.pending  # the last one alone
    told["out"] = world.close(grown)
    return {"ok": told["out"] and len(told["pending"]) == 1, "config": getattr(grown, "config", ""), **told}


def _model(first: int, dim: int, megabytes: int) -> ModelLayout:
    mesh = Mesh.arange((2,), first=first)
    width = 1024
    shapes = {"wide": (megabytes * _MIB // (4 * width) - 1, width), "odd": (333, 77), "flat": (1001,)}
    return ModelLayout({n: TensorLayout(s, "int32", mesh, (Shard(dim % len(s)),)) for n, s in shapes.items()})


def _wanted(model: ModelLayout, rank: int) -> dict[str, torch.Tensor]:
    """Local tensors whose elements are their global index, moved by the tensor's number."""
    found = {}
    for number, (name, layout) in enumerate(model.items()):
        whole = (torch.arange(layout.numel, dtype=torch.int32) + 1_000_000 * number + 1).reshape(layout.shape)
        shape = layout.local_shape(rank)
        if shape is not None:
            mine = found[name] = torch.zeros(shape, dtype=torch.int32)
            for box, offset in layout.boxes(rank):
                mine[tuple(slice(a, a + n) for a, n in zip(offset, box.shape, strict=True))] = whole[box.slices()]
    return found


class _Member:
    """Two sources and two destinations, each in a domain of its own; tensors in device or host memory."""

    def __init__(self, world: World, place: str, megabytes: int) -> None:
        rank = world.me.rank
        source, destination = _model(0, 0, megabytes), _model(_SOURCES, -1, megabytes)
        options = PlanOptions(message=4 * _MIB, staging=32 * _MIB, cell=_MIB, landing=True)
        world.doing("planning and binding")
        self.wanted = _wanted(source if rank < _SOURCES else destination, rank)
        self._held: list[Any] = []
        self.tensors = {name: self._place(world, tensor, place) for name, tensor in self.wanted.items()}
        held = {(0, name): tensor for name, tensor in self.tensors.items()}
        piece = Plan.between(source, destination, Topology(tuple(range(4))), options).slice(rank)
        views = Views(held, {}) if rank < _SOURCES else Views({}, held)
        staged = StagingPlan(piece, views, options.staging, wire="device")
        staging = world.device.scratch(staged.nbytes) if staged.nbytes else None
        self.staged = staged.nbytes
        self.program: Program = bind(staged, staging, {}, piece.rounds)

    def _place(self, world: World, like: torch.Tensor, place: str) -> torch.Tensor:
        if place == "device":
            memory = world.device.create(like.nbytes, "probe")
            self._held.append(memory)
            flat = memory.strided(0, (like.numel(),), (4,), 4)
            return world.device.tensor(flat.reshape(tuple(like.shape)), like.dtype)
        arena = HostArena(like.nbytes)
        self._held.append(world.device.host(arena.bytes))
        return arena.empty(tuple(like.shape), like.dtype)

    def fill(self, world: World) -> None:
        """Sources have their data, destinations zeros."""
        for name, tensor in self.tensors.items():
            if world.me.rank < _SOURCES:
                tensor.copy_(self.wanted[name])
            else:
                tensor.zero_()
        world.device.current().synchronize()

    def wrong(self) -> list[str]:
        """Tensors that are not what they must be."""
        return [name for name, tensor in self.tensors.items() if not torch.equal(tensor.cpu(), self.wanted[name])]


class _Watch:
    """Lets everything pass, but calls `before` first."""

    full, salt, ahead = True, 7, True

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        self.landed_rounds, self._before = 0, before

    def may_begin(self, number: int) -> bool:
        self._before(number)
        return True

    def may_copy(self, number: int) -> bool:
        return True

    def intact(self) -> bool:
        return True

    def landed(self, number: int) -> None:
        self.landed_rounds += 1

    def waiting(self, peer: int | None, cell: int) -> None:
        pass


class _Carriage:
    channel = None

    def __init__(self, world: World, communicator: Communicator) -> None:
        self.rank, self.network, self._world = communicator.rank, network_of(communicator), world

    def fail(self, error: BaseException) -> None:
        """As a mover's worker: out of all operations first."""
        self._world.registry.abort_all(self._world.deadline, str(error))


def rounds(world: World, place: str, megabytes: int) -> dict[str, Any]:
    """A plan's rounds, twice, with full digests; every element compared."""
    member = _Member(world, place, megabytes)
    communicator = world.form(1, range(4))
    told: dict[str, Any] = {"rounds": len(member.program.rounds), "staged": member.staged, "ok": True}
    for number in range(2):
        member.fill(world)
        world.meet(f"ready{number}", range(4))
        world.doing(f"carrying rounds from {place} memory, run {number}")
        tally = run(member.program, _Carriage(world, communicator), world.deadline, _Watch())
        wrong = member.wrong()
        told[f"run {number}"] = {
            "s": round(tally.seconds, 3), "sent": tally.sent, "received": tally.received, "wrong": wrong
        }  # fmt: skip
        told["ok"] = told["ok"] and not wrong
        world.meet(f"done{number}", range(4))
    told["out"] = world.close(communicator)
    told["ok"] = told["ok"] and told["out"]
    return told


def lose(world: World, how: str, megabytes: int) -> dict[str, Any]:
    """Rank 1 kills or stops itself at a round; the others see nothing of it, are aborted by another thread, and form anew."""
    member, rank = _Member(world, "device", megabytes), world.me.rank
    communicator = world.form(1, range(4))
    member.fill(world)
    world.meet("ready", range(4))

    def before(number: int) -> None:
        if rank == 1 and number == 3:
            world.say("fallen")
            os.kill(os.getpid(), getattr(signal, how))

    told: dict[str, Any] = {}

    def control() -> None:
        """As a mover's control thread."""
        world.hear("fallen")
        time.sleep(1.0)
        told["told of it before the abort"] = bool(told.get("error"))
        begun = time.monotonic()
        report = world.registry.abort_all(begun + 15.0, f"rank 1 had {how}")
        told["abort s"], told["out"], told["why"] = round(time.monotonic() - begun, 3), report.out, report.why

    thread = threading.Thread(target=control, name="control", daemon=True)
    thread.start()
    world.doing(f"carrying rounds while rank 1 gets {how}")
    try:
        run(member.program, _Carriage(world, communicator), world.deadline, _Watch(before))
        told["error"] = ""
    except TransferError as error:
        told["error"] = f"{type(error).__name__}: {error}"
    world.doing(f"waiting for its abort after {how}")
    thread.join(20.0)
    begun = time.monotonic()
    survivors = [0, 2, 3]
    again = world.form(2, survivors)
    told["form anew s"] = round(time.monotonic() - begun, 3)
    world.everybody(again, 2, 100_000)
    told["then out"] = world.close(again)
    # Rank 0 may have sent all of its part before it was aborted; the destinations can't have received theirs.
    freed = rank == 0 or "was aborted" in told["error"]
    return {"ok": bool(told.get("out")) and told["then out"] and freed, **told}
