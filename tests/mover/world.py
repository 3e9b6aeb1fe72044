"""Movers' workers in processes of their own, over real arenas and gloo, driven as by a control thread; what must land."""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore

from elastic_reshard.arena.host import MappedArena
from elastic_reshard.arena.landing import LandingArena, LandingReader
from elastic_reshard.arena.slots import SlotArena
from elastic_reshard.communicator.gloo import GlooBackend
from elastic_reshard.layout import Mesh, ModelLayout, Replicate, Shard, TensorLayout
from elastic_reshard.layout.side import Side
from elastic_reshard.mover.core import Progress, Task
from elastic_reshard.mover.task import options_of, plan_of
from elastic_reshard.mover.work import Worker
from elastic_reshard.plan import CellGrid, Plan, transfer_digest
from elastic_reshard.protocol import bits
from elastic_reshard.protocol.docs import (
    LandingDoc,
    PartyDoc,
    PublicationDoc,
    PublicationState,
    SourceDoc,
    TransferDoc,
    TransferState,
)
from tests.processes import Rank, run_ranks

KIB = 1 << 10
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "rows": ((37, 10), "int32"),
    "flat": ((131,), "float32"),
    "deep": ((7, 33, 5), "int64"),
    "wide": ((300, 1001), "int32"),
    "one": ((), "float64"),
}


def model(ranks: int, *, dim: int | None = 0, copies: int = 1, shapes: Mapping[str, Any] = SHAPES) -> ModelLayout:
    """Every tensor in `ranks` parts (uneven ones) along a dim, `copies` times; those without that dim are replicated."""
    mesh = Mesh.arange((copies, ranks))
    return ModelLayout(
        {
            name: TensorLayout(
                shape,
                dtype,
                mesh,
                (Replicate(), Shard(dim % len(shape)) if shape and dim is not None else Replicate()),
            )
            for name, (shape, dtype) in shapes.items()
        }
    )


@lru_cache
def full(layout: TensorLayout, number: int, version: int) -> torch.Tensor:
    """A whole tensor: each element is its global index, moved by the tensor's number and the version."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return (torch.arange(layout.numel) + 1000 * number + 100_000 * version + 1).to(dtype).reshape(layout.shape)


def specs_of(layout: ModelLayout, rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    found = {}
    for name, tensor in layout.items():
        shape = tensor.local_shape(rank)
        if shape is not None:
            found[name] = (shape, getattr(torch, tensor.dtype))
    return found


def index(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))


@dataclass
class World:
    """Members on hosts, with their arenas, held by the test as a watchdog would. groups: destinations by name: (layout,
    hosts of its ranks). Publications alternate between two slots."""

    source: ModelLayout
    source_hosts: tuple[str, ...]
    groups: dict[str, tuple[ModelLayout, tuple[str, ...]]]
    cell: int = 16 * KIB
    message: int = 64 * KIB
    staging: int = 512 * KIB
    verify: str = "sampled"
    absent: tuple[str, ...] = ()
    version: int = 0
    members: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    sources: dict[str, SlotArena] = field(default_factory=dict)
    landings: dict[str, LandingArena] = field(default_factory=dict)
    parties: dict[str, tuple[str, int]] = field(default_factory=dict)  # member -> (group, rank)

    def __post_init__(self) -> None:
        for rank, host in enumerate(self.source_hosts):
            member = self._add(f"t{rank}", host, "trainers", rank)
            self.sources[member] = SlotArena(specs_of(self.source, rank), touch=False)
        for group, (layout, hosts) in self.groups.items():
            grid = CellGrid.of(layout, self.cell)
            for rank, host in enumerate(hosts):
                member = self._add(f"{group}{rank}", host, group, rank)
                cells = len(grid.cells_of_rank(rank))
                self.landings[member] = LandingArena(specs_of(layout, rank), cells, self.cell, touch=False)
        self.publish()

    def _add(self, name: str, host: str, group: str, rank: int) -> str:
        member = f"{name}@{len(self.members):016x}"
        self.members.append(member)
        self.hosts.append(host)
        self.parties[member] = (group, rank)
        return member

    @property
    def slot(self) -> int:
        return self.version % 2

    @property
    def id(self) -> str:
        return f"p{self.version}.1"

    def publish(self) -> None:
        """The next version, in the other slot."""
        self.version += 1
        for rank, arena in enumerate(self.sources.values()):
            self.fill(arena, rank, self.version)

    def fill(self, arena: SlotArena, rank: int, version: int) -> None:
        arena.begin_write(self.slot)
        for number, (name, layout) in enumerate(self.source.items()):
            if layout.local_shape(rank) is not None:
                whole = full(layout, number, version)
                for box, offset in layout.boxes(rank):
                    arena.tensor(self.slot, name)[index(offset, box.shape)] = whole[box.slices()]
        arena.end_write(self.slot)

    def layouts(self) -> dict[str, Side]:
        sides = [Side(self.source), *(Side(layout) for layout, _ in self.groups.values())]
        return {side.id: side for side in sides}

    def documents(self, epoch: int = 1, basis: Mapping[str, str] | None = None) -> tuple[TransferDoc, PublicationDoc]:
        """The transfer of the publication in hand, and the publication."""
        at = {member: position for position, member in enumerate(self.members)}
        held = [m for m in self.sources if m not in self.absent]
        publication = PublicationDoc(
            id=self.id, weight_version=self.version, label=None, extras={}, group="trainers", seq=1,
            layout=Side(self.source).id, state=PublicationState.MOVING,
            sources=tuple(
                SourceDoc(
                    member=m, rank=self.parties[m][1], host=self.hosts[at[m]], arena=self.sources[m].arena_id,
                    slot=self.slot, generation=self.sources[m].generation(self.slot),
                )
                for m in held
            ),
        )  # fmt: skip
        destinations = tuple(
            PartyDoc(
                group=group, layout=Side(layout).id,
                members=tuple(at[m] for m in self.members if self.parties[m][0] == group),
            )
            for group, (layout, _) in self.groups.items()
        )  # fmt: skip
        landings = tuple(
            LandingDoc(
                member=m, group=self.parties[m][0], rank=self.parties[m][1], host=self.hosts[at[m]],
                layout=Side(self.groups[self.parties[m][0]][0]).id, arena=arena.arena_id, slot=self.slot,
            )
            for m, arena in self.landings.items() if m not in self.absent
        )  # fmt: skip
        doc = TransferDoc(
            id=f"{self.id}:1.{epoch}", publication=self.id, epoch=epoch, state=TransferState.FORMING,
            members=tuple(self.members), hosts=tuple(self.hosts), absent=tuple(sorted(at[m] for m in self.absent)),
            source=PartyDoc(group="trainers", layout=publication.layout, members=tuple(range(len(self.sources)))),
            destinations=destinations, landings=landings, basis=dict(basis or {}), cell=self.cell, message=self.message,
            staging=self.staging, verify=self.verify, plan="",
        )  # fmt: skip
        return doc.model_copy(update={"plan": digest(doc, publication)}), publication

    def plan(self, doc: TransferDoc, publication: PublicationDoc) -> Plan:
        return plan_of(doc, publication, {k: (s.model, s.correspondences) for k, s in self.layouts().items()})

    def parcel(self, member: str, doc: TransferDoc, publication: PublicationDoc) -> Parcel:
        """What a watchdog would give the member's mover."""
        host = self.hosts[self.members.index(member)]
        near = [m for m, h in zip(self.members, self.hosts, strict=True) if h == host]
        rows = [
            (self.sources[m].arena_id, m, self.sources[m].table().decode(), False) for m in near if m in self.sources
        ]
        fds = [self.sources[m].fd for m in near if m in self.sources]
        for m in near:
            if m in self.landings:
                rows.append((self.landings[m].arena_id, m, self.landings[m].table().decode(), m == member))
                fds.append(self.landings[m].fd)
        layouts = {key: side.body.decode() for key, side in self.layouts().items()}
        return Parcel(os.getpid(), member, doc.model_dump_json(), publication.model_dump_json(), layouts, rows, fds)

    def parcels(self, doc: TransferDoc, publication: PublicationDoc) -> list[Parcel]:
        """For every member that is present, by its rank in the communicator."""
        return [self.parcel(m, doc, publication) for m in doc.present]

    # What must be, and what is.

    def basis(self) -> dict[str, str]:
        """What the ledgers of those present say, as the supervisor would tell it."""
        return {m: bits.pack(np.packbits(self.held(m)).tobytes()) for m in self.landings if m not in self.absent}

    def reader(self, member: str) -> LandingReader:
        arena = self.landings[member]
        return LandingReader(MappedArena(arena.readonly_fd()), arena.table(), arena.arena_id)

    def held(self, member: str) -> np.ndarray:
        reader = self.reader(member)
        found = reader.held(self.slot)
        return found if reader.publication(self.slot) == self.id else np.zeros_like(found)

    def wrong(self, member: str) -> list[int]:
        """Own cells that the ledger says are there, and that are not what was published: must be none, whatever happened."""
        layout, grid, own = self._grid(member)
        rank, found = self.parties[member][1], []
        reader, held = self.reader(member), self.held(member)
        boxes = cell_boxes(layout, grid)
        for at in np.flatnonzero(held):
            number, lo, hi = boxes[int(own[at])]
            name = list(layout)[number]
            for box, offset in layout[name].boxes(rank):
                if all(a <= b for a, b in zip(box.lo, lo, strict=True)) and all(
                    a >= b for a, b in zip(box.hi, hi, strict=True)
                ):
                    start = tuple(o + a - b for o, a, b in zip(offset, lo, box.lo, strict=True))
                    shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
                    mine = reader.tensor(self.slot, name)[index(start, shape)]
                    want = full(layout[name], number, self.version)[index(lo, shape)]
                    if not torch.equal(mine, want):
                        found.append(int(at))
                    break
            else:
                found.append(-1 - int(at))
        return found

    def _grid(self, member: str) -> tuple[ModelLayout, CellGrid, np.ndarray]:
        layout = self.groups[self.parties[member][0]][0]
        grid = CellGrid.of(layout, self.cell)
        return layout, grid, grid.cells_of_rank(self.parties[member][1])

    def landed(self, layout: ModelLayout, host: str) -> set[int]:
        """Cells of a layout that are in landing slots of a host; AssertionError if one is there twice."""
        found: list[int] = []
        for member in self.landings:
            if self.groups[self.parties[member][0]][0] is layout and self.hosts[self.members.index(member)] == host:
                found += self._grid(member)[2][self.held(member)].tolist()
        assert len(set(found)) == len(found), f"cells landed twice on {host}"
        return set(found)

    def needed(self, layout: ModelLayout, host: str) -> set[int]:
        """By brute force: cells that somebody there wants, and that the host's own sources do not have in full."""
        wanted: set[int] = set()
        for member in self.landings:
            if (
                self.groups[self.parties[member][0]][0] is layout
                and self.hosts[self.members.index(member)] == host
                and member not in self.absent
            ):
                wanted |= set(self._grid(member)[2].tolist())
        have: dict[str, np.ndarray] = {}
        for name, tensor in self.source.items():
            have[name] = np.zeros(tensor.shape, dtype=bool)
            for rank, member in enumerate(self.sources):
                if self.hosts[rank] == host and member not in self.absent and tensor.local_shape(rank) is not None:
                    for box, _ in tensor.boxes(rank):
                        have[name][box.slices()] = True
        found = set()
        for cell, (number, lo, hi) in cell_boxes(layout, CellGrid.of(layout, self.cell)).items():
            where = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
            if cell in wanted and not have[list(layout)[number]][where].all():
                found.add(cell)
        return found

    def check_landed(self) -> None:
        """Every host has exactly the cells that it needs, once each, bit for bit."""
        for layout in {id(layout): layout for layout, _ in self.groups.values()}.values():
            for host in set(self.hosts):
                assert self.landed(layout, host) == self.needed(layout, host), host
        assert all(self.wrong(member) == [] for member in self.landings)

    def close(self) -> None:
        for arena in (*self.sources.values(), *self.landings.values()):
            arena.close()


def small(**options: Any) -> World:
    """Two trainers on a host, an engine of TP2 on another."""
    return World(model(2), ("t", "t"), {"a": (model(2, dim=-1), ("e", "e"))}, **options)


def digest(doc: TransferDoc, publication: PublicationDoc) -> str:
    return transfer_digest(
        options_of(doc),
        (publication.layout, doc.source.members),
        [(p.layout, p.members) for p in doc.destinations],
        doc.hosts,
        doc.absent,
        doc.basis,
    )


def cell_boxes(layout: ModelLayout, grid: CellGrid) -> dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Of every cell: (number of its tensor, lo, hi)."""
    found = {}
    for number in range(len(layout)):
        cells = grid.tensors[number]
        _, lo, hi = cells.boxes(np.arange(cells.table.regions))
        for j in range(len(lo)):
            found[int(grid.base[number]) + j] = (number, tuple(lo[j].tolist()), tuple(hi[j].tolist()))
    return found


# In the movers' processes.


@dataclass(frozen=True)
class Parcel:
    """A task that can be pickled. fds: the test process's."""

    pid: int
    member: str
    transfer: str
    publication: str
    layouts: dict[str, str]
    rows: list[tuple[str, str, str, bool]]
    fds: list[int]

    def open(self) -> Task:
        fds = [
            os.open(f"/proc/{self.pid}/fd/{fd}", (os.O_RDWR if row[3] else os.O_RDONLY) | os.O_CLOEXEC)
            for fd, row in zip(self.fds, self.rows, strict=True)
        ]
        doc = TransferDoc.model_validate_json(self.transfer)
        payload = Task(doc, PublicationDoc.model_validate_json(self.publication), self.layouts).payload()
        said = {**json.loads(payload), "arenas": [[*row, 1] for row in self.rows]}
        return Task.read(json.dumps(said).encode(), fds)


class Page:
    """A status page that only this process sees."""

    def __init__(self) -> None:
        self.peers: set[int] = set()
        self.windows: set[int] = set()  # those for whose windows it has waited
        self.now: int | None = None
        self.last: dict[str, int] = {}

    def waiting(self, peer: int | None, cell: int = 0, *, window: bool = False) -> None:
        assert cell >= 0
        self.now = peer
        if window and peer is not None:
            self.windows.add(peer)
        if peer is not None:
            self.peers.add(peer)

    def progress(self, **totals: int) -> None:
        self.last = totals


class Mover:
    """A worker and its control thread, which is the caller's."""

    def __init__(self, me: Rank, member: str, backend: Any = None, page: Page | None = None) -> None:
        self.store, self.news = me.store(), queue.Queue[Progress]()
        self.page = page or Page()
        self.worker = Worker(member, self.page, self.news.put, backend or GlooBackend("lo"))
        self.said: list[Progress] = []

    def begin(self, parcel: Parcel) -> Task:
        task = parcel.open()
        self.task = task
        self.worker.begin(task)
        return task

    def next(self, seconds: float = 30.0) -> Progress:
        said = self.news.get(timeout=seconds)
        self.said.append(said)
        return said

    def until(self, right: Callable[[Progress], bool], seconds: float = 30.0) -> Progress:
        """The first word from now on that is right, or the last one."""
        deadline = time.monotonic() + seconds
        while True:
            said = self.next(max(0.01, deadline - time.monotonic()))
            if right(said) or said.state == "out":
                return said

    def meet(self) -> None:
        """Wait until ready; tell the values, hear those of all, feed them."""
        said = self.until(lambda p: p.state == "ready")
        if said.state == "out":
            return
        doc = self.task.transfer
        self.store.set(f"{doc.id}/{self.worker.member}", json.dumps(dict(said.values)))
        told = {m: json.loads(self.store.get(f"{doc.id}/{m}")) for m in doc.present}
        self.worker.feed(told)

    def run(self, parcel: Parcel) -> Progress:
        """A whole transfer, up to "out"."""
        self.begin(parcel)
        self.meet()
        return self.until(lambda p: p.state == "out")

    def over(self) -> None:
        """All are out: the transfer leaves the view."""
        doc = self.task.transfer
        self.store.set(f"{doc.id}/out/{self.worker.member}", "")
        for member in doc.present:
            self.store.get(f"{doc.id}/out/{member}")
        self.worker.finish()


def brief(said: Progress) -> dict[str, Any]:
    """What the tests look at, picklable."""
    return {key: value for key, value in said.__dict__.items() if key != "values"}


def transfers(me: Rank, worlds: list[list[list[Parcel]]]) -> list[list[dict[str, Any]]]:
    """Movers of several worlds; in each they take part in one transfer after another."""
    results = []
    for number, stages in enumerate(worlds):
        found = []
        if me.rank < len(stages[0]):
            mover = Mover(me, stages[0][me.rank].member)
            mover.store = PrefixStore(f"world {number}", mover.store)
            for parcels in stages:
                found.append(brief(mover.run(parcels[me.rank])))
                mover.over()
        results.append(found)
    return results


def run(fn: Callable[..., Any], parcels: Sequence[Parcel], *args: Any, **options: Any) -> list[Any]:
    """`fn(Rank, parcels, ...)` as every present member's mover."""
    return run_ranks(fn, len(parcels), list(parcels), *args, group=False, **options)
