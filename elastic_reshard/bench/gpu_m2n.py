"""The same tensors by `nccl.m2n.reshard`, call by call and grouped, and by NCCL gather-and-broadcast; what a barrier of all
ranks costs; native shrink and grow. Every byte looked at after each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch

from elastic_reshard.arena.devices import strided_of
from elastic_reshard.bench import gpu_nccl as bare
from elastic_reshard.bench import gpu_values
from elastic_reshard.bench.gpu_nccl import here, settle
from elastic_reshard.bench.gpu_setup import GpuSetup, model_layouts
from elastic_reshard.bench.gpu_ways import Tell, Way, run_ways
from elastic_reshard.bench.rank import State
from elastic_reshard.bench.synthetic import Layouts
from elastic_reshard.errors import ReshardError
from elastic_reshard.layout import ModelLayout
from elastic_reshard.layout.dtensor import torch_dtype
from elastic_reshard.plan import Destination, Plan, PlanOptions, Source, Topology
from elastic_reshard.plan.m2n import FastPart, fast_part
from elastic_reshard.transport.m2n import NcclM2n

__all__ = ["measure"]

_SAMPLE: Final = 256 << 20  # bytes that are gathered and broadcast where ranks share a GPU: it goes through the host
_LIMIT: Final = 60.0
_ctas: Final = 4


class _Stream:
    """The current stream, as far as calls need it."""

    @property
    def handle(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)


def measure(setup: GpuSetup) -> dict[str, Any]:
    """Everything of this section; each way in fresh processes, so that one that fails spoils no other."""
    if setup.device != "cuda":
        return {"skipped": "nccl.m2n needs a GPU"}
    layouts, told = model_layouts(setup)
    size = 2 * setup.half
    part = _part(layouts, setup.half)
    found: dict[str, Any] = {
        "model": told, "ranks": size, "fit M2N": len(part.calls), "do not fit": len(part.reasons),
        "reasons": sorted(set(part.reasons.values())),
        # What gather and broadcast moves into an engine rank, of what that rank needs.
        "ratio of bytes": round(layouts.destination.nbytes / layouts.destination.local_nbytes(0), 2),
    }  # fmt: skip
    ways: dict[str, Callable[[bare.Ranks, Tell], dict[str, Any]]] = {
        "m2n call by call": lambda ranks, tell: _m2n(ranks, setup, layouts, tell, grouped=False, blocking=True),
        "gather and broadcast": lambda ranks, tell: _gathered(ranks, setup, layouts, tell),
        "m2n on a nonblocking communicator":
        lambda ranks, tell: _m2n(ranks, setup, layouts, tell, grouped=False, blocking=False),
        "shrink and grow": _changed,
        "m2n grouped": lambda ranks, tell: _grouped(ranks, setup, layouts, tell),
    }  # fmt: skip
    return run_ways(setup.seconds, {name: _in_ranks(run, size, setup.gpus) for name, run in ways.items()}, found)


def _in_ranks(run: Callable[[bare.Ranks, Tell], dict[str, Any]], size: int, gpus: int) -> Way:
    def in_ranks(tell: Tell) -> dict[str, Any]:
        with bare.Ranks(size, gpus) as ranks:
            return run(ranks, tell)

    return in_ranks


def _grouped(ranks: bare.Ranks, setup: GpuSetup, layouts: Layouts, tell: Tell) -> dict[str, Any]:
    """Known to fail on long lists: then that is what was found."""
    try:
        return _m2n(ranks, setup, layouts, tell, grouped=True, blocking=True)
    except ReshardError as error:
        return {"fails": str(error)[-1500:]}


def _part(layouts: Layouts, half: int) -> FastPart:
    """What M2N can move where every rank is a domain of its own."""
    size = 2 * half
    source, target = (
        Source(layouts.source, tuple(range(half))),
        Destination(layouts.destination, tuple(range(half, size))),
    )
    return fast_part(Plan((source,), (target,), Topology.isolated(size), PlanOptions(landing=True)))


# -- in the ranks


def hold(state: State, layouts: Layouts, half: int) -> int:
    """Tensors of this rank's side, filled or poisoned; their bytes."""
    world = here()
    layout = layouts.source if world.rank < half else layouts.destination
    rank = world.rank % half
    shapes = {n: (t.local_shape(rank), t.dtype) for n, t in layout.items()}
    world.tensors = {
        n: torch.empty(s, dtype=torch_dtype(d), device="cuda") for n, (s, d) in shapes.items() if s is not None
    }
    gpu_values.poison(world.tensors)
    if world.rank < half:
        gpu_values.fill(layout, world.tensors, rank, 1)
    torch.cuda.synchronize()
    return sum(t.numel() * t.element_size() for t in world.tensors.values())


def reset(state: State, half: int) -> None:
    """Poison what is received."""
    if here().rank >= half:
        gpu_values.poison(here().tensors)
        torch.cuda.synchronize()


def wrong(state: State, layout: ModelLayout, half: int, names: frozenset[str] | None) -> list[str]:
    """Names of received tensors that are not right, of some or all."""
    world = here()
    if world.rank < half:
        return []
    mine = {n: t for n, t in world.tensors.items() if names is None or n in names}
    return gpu_values.wrong(ModelLayout({n: layout[n] for n in mine}), mine, world.rank - half, 1)


def reshard_all(state: State, part: FastPart, grouped: bool) -> float:
    """Seconds from a barrier to a barrier, with all calls between."""
    world = here()
    if world.handle is None:
        world.handle = NcclM2n(world.communicator.ptr, _Stream(), _ctas if world.shared else None)  # type: ignore[arg-type]
    calls = []
    for call in part.calls:
        source = strided_of(world.tensors[call.source_name]) if world.rank in call.source.ranks else None
        target = strided_of(world.tensors[call.name]) if world.rank in call.destination.ranks else None
        calls.append((call, source, target))
    bare.barrier_ms(state, 1)
    begun = time.monotonic()
    if grouped:
        from importlib import import_module

        with import_module("nccl.m2n").group():
            for one in calls:
                world.handle.enter(*one)
    else:
        for one in calls:
            world.handle.enter(*one)
    bare.barrier_ms(state, 1)
    return time.monotonic() - begun


def finish(state: State) -> float:
    """M2N finalized, then the communicator destroyed; seconds."""
    begun = time.monotonic()
    if here().handle is not None:
        here().handle.finalize()
    here().communicator.destroy()
    return time.monotonic() - begun


def gather_and_broadcast(state: State, layouts: Layouts, half: int, names: list[str]) -> float:
    """Each tensor whole to every destination: each source's shard broadcast to all, and this rank's part cut out; seconds."""
    world = here()
    stream = torch.cuda.current_stream().cuda_stream
    largest = max(layouts.source[n].numel for n in names)
    whole = torch.empty(largest, dtype=torch.bfloat16, device="cuda")
    bare.barrier_ms(state, 1)
    begun = time.monotonic()
    for name in names:
        have = layouts.source[name]
        full = whole[: have.numel].view(have.shape)
        for rank in have.mesh.ranks:
            for box, at in have.boxes(rank):
                part = full[box.slices()]
                piece = part if part.is_contiguous() else torch.empty(box.shape, dtype=torch.bfloat16, device="cuda")
                if world.rank == rank:
                    mine = world.tensors[name]
                    piece.copy_(mine[tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))])
                world.communicator.broadcast(piece.view(-1), piece.view(-1), rank, stream=stream)
                if piece is not part and world.rank >= half:
                    part.copy_(piece)
        if world.rank >= half:
            for box, at in layouts.destination[name].boxes(world.rank - half):
                target = world.tensors[name][tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))]
                target.copy_(full[box.slices()])
    bare.barrier_ms(state, 1)
    return time.monotonic() - begun


def shrink(state: State, excluded: list[int]) -> float:
    """A child without some; it replaces the parent, which is aborted. Seconds of the shrink."""
    world, begun = here(), time.monotonic()
    child = world.communicator.shrink(excluded)
    settle(world.communicator)
    took = time.monotonic() - begun
    world.communicator.abort()
    world.communicator, world.size = child, world.size - len(excluded)
    settle(child)
    bare.barrier_ms(state, 1)
    return took


def grown_id(state: State) -> bytes:
    """Of a communicator that is to be grown."""
    return bytes(here().communicator.get_unique_id())


def grow(state: State, size: int, rank: int | None, unique: bytes | None, shared: bool) -> float:
    """A larger child; rank: of a fresh process. Seconds until the first all-reduce over it is done."""
    world, nccl, begun = here(), bare.nccl(), time.monotonic()
    config = nccl.NCCLConfig(blocking=True, **({"max_ctas": _ctas} if shared else {}))
    told = nccl.UniqueId.from_bytes(unique) if unique is not None else None
    if rank is None:
        child = world.communicator.grow(size, told, config=config)
    else:
        child = nccl.Communicator().grow(size, told, rank=rank, config=config)
    settle(child)
    world.communicator, world.size = child, size
    bare.barrier_ms(state, 1)
    return time.monotonic() - begun


# -- the parent's side


def _m2n(
    ranks: bare.Ranks, setup: GpuSetup, layouts: Layouts, tell: Tell, *, grouped: bool, blocking: bool
) -> dict[str, Any]:
    formed = ranks.form(blocking=blocking)
    part, half = _part(layouts, setup.half), setup.half
    received = sum(ranks.do(hold, layouts, half, limit=_LIMIT)[half:])
    names = frozenset(call.name for call in part.calls)
    barrier = max(ranks.do(bare.barrier_ms, 20))
    first = max(ranks.do(reshard_all, part, grouped, limit=_LIMIT))
    found: dict[str, Any] = {
        "formed s": round(formed, 3), "barrier ms": round(barrier, 2), "first ms": round(1e3 * first, 1),
        "GB": round(received / 1e9, 3),
    }  # fmt: skip
    tell(found)
    ranks.do(reset, half)
    took: list[float] = []
    for _ in range(setup.repeats(5)):
        took.append(max(ranks.do(reshard_all, part, grouped, limit=_LIMIT)))
        median = sorted(took)[len(took) // 2]
        net = max(1e-6, median - barrier / 1e3)
        found |= {
            "with barrier ms": round(1e3 * median, 2), "net ms": round(1e3 * net, 2),
            "net GB/s": round(received / net / 1e9, 1), "repeats": len(took),
        }  # fmt: skip
        tell(found)
    found["wrong"] = _bad(ranks, layouts, half, names)
    tell(found)
    return found | {"ended s": round(max(ranks.do(finish)), 3)}


def _bad(ranks: bare.Ranks, layouts: Layouts, half: int, names: frozenset[str]) -> list[str]:
    found = ranks.do(wrong, layouts.destination, half, names)
    return [f"rank {rank}: {name}" for rank, unlike in enumerate(found) for name in unlike[:3]]


def _gathered(ranks: bare.Ranks, setup: GpuSetup, layouts: Layouts, tell: Tell) -> dict[str, Any]:
    ranks.form()
    half = setup.half
    ranks.do(hold, layouts, half, limit=_LIMIT)
    names, nbytes = [], 0
    for name, t in layouts.destination.items():
        # The embedding alone would be most of a sample.
        if setup.gpus > 1 or (t.nbytes < _SAMPLE // 4 and nbytes + t.nbytes <= _SAMPLE):
            names.append(name)
            nbytes += t.nbytes
    barrier = max(ranks.do(bare.barrier_ms, 20))
    ranks.do(gather_and_broadcast, layouts, half, names, limit=_LIMIT)
    ranks.do(reset, half)
    found: dict[str, Any] = {"tensors": len(names), "GB": round(nbytes / 1e9, 3)}
    took: list[float] = []
    for _ in range(3):
        took.append(max(ranks.do(gather_and_broadcast, layouts, half, names, limit=_LIMIT)))
        net = max(1e-6, sorted(took)[len(took) // 2] - barrier / 1e3)
        found |= {
            "net ms": round(1e3 * net, 1), "net GB/s of the model": round(nbytes / net / 1e9, 2),
            "whole model ms, scaled": round(1e3 * net * layouts.nbytes / max(1, nbytes), 1), "repeats": len(took),
        }  # fmt: skip
        tell(found)
    return found | {"wrong": _bad(ranks, layouts, half, frozenset(names))}


def _changed(ranks: bare.Ranks, _: Tell) -> dict[str, Any]:
    """The last rank leaves; a fresh process takes its place."""
    ranks.form()
    last, rest = ranks.size - 1, list(range(ranks.size - 1))
    shared = ranks.size > ranks.gpus
    shrunk = max(call.result(_LIMIT) for call in ranks.begin(shrink, [last], ranks=rest).values())
    ranks.actors[last].close()
    ranks.actors[last] = ranks.fresh(last)
    ranks.actors[last].do(bare.place, last, ranks.size, ranks.gpus)
    unique = ranks.actors[0].do(grown_id)
    begun = time.monotonic()
    calls = {r: ranks.actors[r].begin(grow, ranks.size, None, unique if r == 0 else None, shared) for r in rest}
    calls[last] = ranks.actors[last].begin(grow, ranks.size, last, unique, shared)
    each = [call.result(_LIMIT) for call in calls.values()]
    return {"shrink s": round(shrunk, 3), "grow s": round(max(each), 3), "in all s": round(time.monotonic() - begun, 3)}
