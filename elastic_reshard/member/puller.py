"""The install copy: a member's regions out of the domain's slots, into its live tensors or to the user's function.

Who is read for which box is the planner's decision, as for every transfer; here its slice is bound to memory once and run
as often as that memory is where it was. Enters no communicator, waits for nobody.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from elastic_reshard.arena.copies import Copies
from elastic_reshard.arena.device import Device, Registered, Stream
from elastic_reshard.arena.slots import SlotReader
from elastic_reshard.collective.fragments import Fragment
from elastic_reshard.errors import ArenaError, LayoutError, LayoutMismatch, RefitError, Violation
from elastic_reshard.layout import Correspondence, ModelLayout
from elastic_reshard.layout.dtensor import dtype_name, torch_dtype
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.layout.fragments import correspondences_to_data, fragment_id
from elastic_reshard.member.landed import Landed, landing_slice
from elastic_reshard.member.tensors import Look, MemberTensors, Tensors, unowned
from elastic_reshard.plan import Destination, Plan, PlanOptions, Slice, Source, TensorRef, Topology
from elastic_reshard.transport.program import StagingPlan, bind
from elastic_reshard.transport.views import PeerViews, SlotViews, Views

__all__ = ["Install", "Origin", "Prepared", "Puller", "Request"]

# Called with (name, tensor) one after another, as vLLM's load_weights is; what it returns is not looked at.
Install = Callable[[Iterator[tuple[str, torch.Tensor]]], object]

# Nothing is staged, so nothing needs rounds; stripes only where a replica's share is worth a copy of its own.
_OPTIONS: Final = PlanOptions(message=1 << 50, staging=1 << 60, min_stripe=1 << 20)
_KEPT: Final = 4  # two slots of the members now, and of those before a change


@dataclass(frozen=True, eq=False)
class Origin:
    """One slot of a publication, as a source rank offered it."""

    reader: SlotReader
    slot: int
    generation: int


@dataclass(frozen=True, eq=False)
class Request:
    """What to install. source: with wire dtypes; destination: with the live tensors' dtypes; both in their group's ranks.

    origins: by source rank; replicas may be missing. correspondences: None for equal names. landed: what has come from
    other hosts, in slots of the same destination layout; empty if nothing had to.
    """

    source: ModelLayout
    destination: ModelLayout
    origins: Mapping[int, Origin]
    correspondences: tuple[Correspondence, ...] | None = None
    landed: tuple[Landed, ...] = ()


@dataclass(eq=False)
class _Step:
    """Copies that run together; with a function, those of one tensor and the tensor itself. in_host: it lies in host memory,
    so that what a device copies there has to be waited for."""

    copies: Copies
    name: str = ""
    tensor: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    gaps: bool = False  # no region covers all of it
    in_host: bool = False

    def streams(self) -> dict[tuple[str, int], Stream]:
        """What it would be launched on now."""
        currents = {device.id: device.current() for device in self.copies.devices}
        return {(device, stream.handle): stream for device, stream in currents.items()}

    def run(self) -> None:
        if self.gaps:
            self.tensor.zero_()
        self.copies.run()
        for stream in self.streams().values() if self.in_host else ():
            stream.synchronize()


@dataclass(eq=False)
class _Bound:
    """A slice bound to slots and tensors; right as long as these tensors' fingerprint is `state`."""

    state: tuple[object, ...]
    steps: list[_Step]
    ranks: tuple[int, ...]
    landed: tuple[int, ...]  # of the request's landing slots, those that it reads
    nbytes: int


@dataclass(eq=False)
class _Piece:
    """A slice, and whom its peers stand for: members below `sources` are source ranks, others landing slots by number."""

    slice: Slice
    sources: int
    landed: dict[int, int]


@dataclass(eq=False)
class Prepared:
    """One install, checked, nothing moved yet. Holds the live tensors: drop it afterwards.

    nbytes: what `run` reads. ranks: source ranks whose slots it reads.
    """

    nbytes: int
    ranks: tuple[int, ...]
    _steps: list[_Step] = field(repr=False)
    _origins: Mapping[int, Origin] = field(repr=False)
    _landed: tuple[Landed, ...] = field(repr=False)
    _install: Install | None = field(repr=False)
    _look: Look | None = field(repr=False)

    def changed(self) -> list[int]:
        """Source ranks whose slot, of those read, isn't of the generation that was published: empty before *and* after
        `run`, or what was installed is not to be used."""
        origins = ((rank, self._origins[rank]) for rank in self.ranks)
        return [rank for rank, o in origins if o.generation % 2 or o.reader.generation(o.slot) != o.generation]

    def lapsed(self) -> list[str]:
        """Members whose landing slot, of those read, was reset since it was looked at: empty before *and* after `run`, as
        `changed`."""
        return [slot.member for slot in self._landed if slot.lapsed()]

    def run(self) -> int:
        """Copy everything, in this thread and on its current stream of a device; returns bytes read. Blocks until all is copied
        (and for the user's function).

        Raises what the function raises, and RefitError if it didn't take every tensor; either way, and also by
        KeyboardInterrupt, tensors may be half new: repeat it whole.
        """
        handing = _Handing(self._steps)
        try:
            if self._install is None:
                for _ in handing:
                    pass
                return self.nbytes
            self._install(iter(handing))
        finally:
            handing.end()
        if handing.taken <= len(self._steps):
            raise RefitError(
                f"the install function returned after {handing.taken} of {len(self._steps)} tensors without asking for "
                "more; it must go through its iterator to the end. Mend it, then install again"
            )
        return self.nbytes


class _Handing:
    """Assembles one tensor after another. taken: tensors asked for, the end counting as one."""

    def __init__(self, steps: list[_Step]) -> None:
        self._steps, self.taken, self.over = steps, 0, False
        self._streams: dict[tuple[str, int], Stream] = {}  # a user's function may change the current one

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self.over:
            raise RefitError("this install is over, its slots may hold another version by now; take all tensors inside "
                             "the install function")  # fmt: skip
        at = self.taken
        self.taken = min(at + 1, len(self._steps) + 1)
        if at >= len(self._steps):
            raise StopIteration
        step = self._steps[at]
        self._streams.update(step.streams())
        step.run()
        return step.name, step.tensor.detach()  # another object each time: the user may reshape it

    def end(self) -> None:
        """Wait for what was launched: slots may be written again, and generations are compared, only after that."""
        self.over = True
        for stream in self._streams.values():
            stream.synchronize()


class Puller:
    """Fills one destination rank's live tensors (`tensors`), or hands named tensors to `install`. One thread at a time.

    With `install`, `given` is the destination's layout, and tensors are assembled one at a time in a buffer as large as
    the largest, or refused with ArenaError if that is more than `limit` bytes; a tensor is whole when it is handed out
    (in the order of the current stream, on a device), and valid until the next is asked for. device: where that buffer
    lies. Without it, `given` is None for DTensors and whole plain tensors.
    """

    def __init__(
        self,
        rank: int,
        *,
        tensors: Tensors | None = None,
        given: ModelLayout | None = None,
        install: Install | None = None,
        correspondences: tuple[Correspondence, ...] | None = None,
        limit: int | None = None,
        renumber: Mapping[int, int] | None = None,
        device: Device | None = None,
    ) -> None:
        if (tensors is None) == (install is None) or (install is not None and given is None):
            raise LayoutError("give either `tensors` to be filled in place, or `install` together with a layout")
        extra = {} if correspondences is None else {"correspondences": correspondences_to_data(correspondences)}
        self._tensors = MemberTensors(tensors, given, rank, None, renumber, extra) if tensors is not None else None
        self._rank, self._given, self._install, self._limit, self._extra = rank, given, install, limit, extra
        self.device = device  # the one that the tensors, or the buffer, are on; None: the CPU
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._registered: dict[Device, Registered] = {}
        self._slices: OrderedDict[Hashable, _Piece] = OrderedDict()
        self._bound: OrderedDict[Hashable, _Bound] = OrderedDict()

    def describe(self) -> tuple[dict[str, Any], str]:
        """(body of the destination's fragment, its content id), from the tensors as they are now.

        Raises LayoutMismatch (every violation), a LayoutError."""
        if self._tensors is not None:
            described = self._tensors.look().described
            self.device = described.device
            return described.body, described.fragment
        body = Fragment({}, self._given).to_data() | self._extra
        return body, fragment_id(body)

    def buffer_nbytes(self, destination: ModelLayout) -> int:
        """Bytes of the buffer that `install` is served from; 0 when tensors are filled in place."""
        if self._install is None:
            return 0
        return max((_local_nbytes(destination, name, self._rank) for name in destination), default=0)

    def look(self) -> Look | None:
        """The live tensors as they are now, for `check`; None where a function is handed them. Raises as `check` does."""
        return self._tensors.look() if self._tensors is not None else None

    def check(self, request: Request, look: Look | None = None) -> Prepared:
        """Plan and bind, or find it done: nothing moves. Blocks for some ms a hundred tensors the first time, for the
        fingerprint of the live tensors afterwards, if there is no look at them yet.

        Raises LayoutMismatch (every violation), ShardLost (boxes that nothing here holds), ArenaError (slots that don't hold
        what the layout says, or a buffer beyond the limit), and whatever the user's `tensors` callable raises.
        """
        look = self.look() if look is None else look
        state = look.described.state if look is not None else ()
        what: Hashable = (request.source.content_id, request.destination.content_id, request.correspondences)
        where = tuple((rank, o.reader, o.slot) for rank, o in sorted(request.origins.items()))
        where += tuple((slot.rank, slot.reader, slot.slot) for slot in request.landed)
        if request.landed:
            what = (what, tuple((slot.rank, slot.held.tobytes()) for slot in request.landed))
        bound = self._bound.get((what, where))
        if bound is None or (bound.state is not state and bound.state != state):
            piece = self._slice((what, frozenset(request.origins)), request)
            bound = self._bind(piece, request, look)
            _keep(self._bound, (what, where), bound)
        self._bound.move_to_end((what, where))
        landed = tuple(request.landed[number] for number in bound.landed)
        return Prepared(bound.nbytes, bound.ranks, bound.steps, dict(request.origins), landed, self._install, look)

    def forget(self, reader: SlotReader) -> None:
        """Let go of an arena whose owner is gone or has made another."""
        gone = [key for key in self._bound if any(r is reader for _, r, _ in key[1])]  # type: ignore[index]
        for key in gone:
            del self._bound[key]

    def close(self) -> None:
        """Let go of the buffer and of everything bound. May be called again."""
        self._bound.clear()
        self._registered.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _slice(self, key: Hashable, request: Request) -> _Piece:
        """What this rank pulls. Source rank r is member r, destination rank r is member `sources` + r, one domain."""
        if key not in self._slices:
            _keep(self._slices, key, self._landing(request) if request.landed else self._near(request))
        self._slices.move_to_end(key)
        return self._slices[key]

    def _near(self, request: Request) -> _Piece:
        """Everything out of source slots."""
        ranks = _ranks(request.source)
        sources = max(ranks, default=-1) + 1
        wanted = max(_ranks(request.destination) | {self._rank}) + 1
        plan = Plan(
            (Source(request.source, tuple(range(sources)), request.correspondences),),
            (Destination(request.destination, tuple(range(sources, sources + wanted))),),
            Topology.single(sources + wanted),
            _OPTIONS,
            absent=frozenset(ranks - request.origins.keys()),
        )
        return _Piece(plan.slice(sources + self._rank), sources, {})

    def _landing(self, request: Request) -> _Piece:
        """What has landed out of landing slots, the rest out of source slots."""
        piece, peers = landing_slice(
            request.source, request.destination, request.correspondences, self._rank,
            frozenset(request.origins), request.landed,
        )  # fmt: skip
        number = {slot: n for n, slot in enumerate(request.landed)}
        sources = max(_ranks(request.source), default=-1) + 1
        return _Piece(piece, sources, {member: number[slot] for member, slot in peers.items()})

    def _bind(self, piece: _Piece, request: Request, look: Look | None) -> _Bound:
        peers: dict[int, PeerViews] = {
            rank: SlotViews("the source", rank, origin.reader, origin.slot, request.source)
            for rank, origin in request.origins.items()
            if rank < piece.sources
        }
        for member, number in piece.landed.items():
            slot = request.landed[number]
            peers[member] = SlotViews("the destination", slot.rank, slot.reader, slot.slot, request.destination)
        there = self._devices_of(request)
        if look is not None:
            if there and look.described.device is None:
                raise ArenaError(
                    f"rank {self._rank} has its tensors on the CPU, but slots of this host lie on {there[0].id}; nothing was "
                    'read. Let those members join with stage="host"'
                )
            local = look.local()
            _refuse_unlike(request.destination, local, self._rank)
            targets = {(0, name): unowned(t) for name, t in local.items()}
            steps = [_Step(_copies(piece.slice, targets, peers))]
        else:
            steps = self._steps(piece.slice, request.destination, peers, there)
        legs = piece.slice.legs
        read = np.unique(legs.peer[~legs.out]).tolist()
        ranks = tuple(member for member in read if member < piece.sources)
        landed = tuple(piece.landed[member] for member in read if member >= piece.sources)
        state = look.described.state if look is not None else ()
        return _Bound(state, steps, ranks, landed, sum(step.copies.nbytes for step in steps))

    @staticmethod
    def _devices_of(request: Request) -> list[Device]:
        readers = [o.reader for o in request.origins.values()] + [slot.reader for slot in request.landed]
        return list({reader.device: None for reader in readers if reader.device is not None})

    def _steps(
        self, piece: Slice, destination: ModelLayout, peers: dict[int, PeerViews], there: list[Device]
    ) -> list[_Step]:
        """One for each tensor that this rank has a part in, in the order of the model. there: devices that slots lie on."""
        self._make_buffer(destination)
        if self.device is None and self._buffer.numel():
            for device in there:
                if device not in self._registered:
                    self._registered[device] = device.host(self._buffer.numpy())
        order = np.argsort(piece.legs.tensor, kind="stable")
        bounds = np.searchsorted(piece.legs.tensor, np.arange(len(piece.tensors) + 1), sorter=order).tolist()
        steps = []
        for t, ref in enumerate(piece.tensors):
            layout = destination[ref.name]
            shape = layout.local_shape(self._rank)
            if shape is None:
                continue
            nbytes = _local_nbytes(destination, ref.name, self._rank)
            tensor = self._buffer[:nbytes].view(torch_dtype(layout.dtype)).view(shape)
            copies = _copies(_only(piece, ref, order[bounds[t] : bounds[t + 1]]), {(0, ref.name): tensor}, peers)
            steps.append(_Step(copies, ref.name, tensor, copies.nbytes < nbytes, self.device is None))
        return steps

    def _make_buffer(self, destination: ModelLayout) -> None:
        needed = self.buffer_nbytes(destination)
        if self._limit is not None and needed > self._limit:
            raise ArenaError(f"the largest tensor of rank {self._rank} takes {needed} bytes, the install buffer may have "
                             f"{self._limit}; raise its limit, or install in place")  # fmt: skip
        if self._buffer.numel() < needed:
            self._bound.clear()  # their tensors lie in the old one
            self._registered.clear()
            self._buffer = _zeros(needed, self.device)  # touched now, not in the pause


def _zeros(nbytes: int, device: Device | None) -> torch.Tensor:
    if device is None:
        return torch.zeros(nbytes, dtype=torch.uint8)
    found = device.tensor(device.scratch(nbytes).strided(0, (nbytes,), (1,), 1), torch.uint8)
    found.zero_()
    device.current().synchronize()  # a user's function may have another stream write to it
    return found


def _keep(cache: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    cache[key] = value
    while len(cache) > _KEPT:
        cache.popitem(last=False)


def _ranks(model: ModelLayout) -> set[int]:
    return {rank for layout in model.values() for rank in layout.mesh.ranks}


def _local_nbytes(model: ModelLayout, name: str, rank: int) -> int:
    shape = model[name].local_shape(rank)
    return 0 if shape is None else math.prod(shape) * itemsize(model[name].dtype)


def _refuse_unlike(destination: ModelLayout, local: Mapping[str, torch.Tensor], rank: int) -> None:
    """LayoutMismatch where the live tensors aren't what the layout says of this rank."""
    faults = []
    for name, layout in destination.items():
        want, has = layout.local_shape(rank), local.get(name)
        if want is None or not math.prod(want):
            continue
        if has is None:
            faults.append(Violation(name, "missing", f"rank {rank} is in its layout, but gave no tensor"))
        elif tuple(has.shape) != want or dtype_name(has.dtype) != layout.dtype:
            faults.append(
                Violation(name, "shape", f"rank {rank} has {dtype_name(has.dtype)}{list(has.shape)}, the layout says "
                          f"{layout.dtype}{list(want)}")
            )  # fmt: skip
    if faults:
        raise LayoutMismatch(faults)


def _only(piece: Slice, ref: TensorRef, rows: npt.NDArray[np.int64]) -> Slice:
    """The slice of one tensor alone."""
    legs = piece.legs.take(rows)
    legs = legs.replace(tensor=np.zeros(len(rows), dtype=np.int64))
    return Slice(piece.member, piece.plan, (ref,), legs, piece.message[rows], piece.rounds)


def _copies(piece: Slice, targets: Mapping[tuple[int, str], torch.Tensor], peers: dict[int, PeerViews]) -> Copies:
    """The slice's copies, bound as a transfer inside a domain binds them, all in one; nothing of it is staged."""
    program = bind(StagingPlan(piece, Views({}, targets), 0), None, peers, piece.rounds)
    pulls = [pull.copies for r in program.rounds for pull in (*r.pulls, *r.landed)]
    first = piece.member % max(1, len(pulls))  # not all ranks begin with the same peer
    found = Copies()
    found.extend(pulls[first:] + pulls[:first])
    return found
