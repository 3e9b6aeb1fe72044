"""What a worker keeps between transfers: maps of arenas, parts of plans, bound programs; and a task made ready with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from elastic_reshard.arena.channel import close_all
from elastic_reshard.arena.device import Device, DeviceMemory, Registered
from elastic_reshard.arena.host import MappedArena
from elastic_reshard.arena.landing import LandingSlot, MappedWritable
from elastic_reshard.arena.shared import device_named, map_memory
from elastic_reshard.arena.slots import SlotReader
from elastic_reshard.arena.tables import memory_of
from elastic_reshard.errors import ArenaError
from elastic_reshard.mover.carry import Bound, bind_part
from elastic_reshard.mover.part import NETWORKS, Origin, Part, part_of
from elastic_reshard.mover.staging import Staging
from elastic_reshard.mover.task import Given, Task, check, check_plan, plan_of, sides_of
from elastic_reshard.protocol.docs import LandingDoc
from elastic_reshard.protocol.mps import WHY, mps_running
from elastic_reshard.transport.program import Wire

__all__ = ["Ready", "Shelf"]

_KEPT: Final = 8
_V = TypeVar("_V")


@dataclass(frozen=True, eq=False)
class Ready:
    """A task of which only the network is missing."""

    bound: Bound
    origins: Mapping[int, Origin]
    landing: LandingSlot | None


class Shelf:
    """One member's. Not for several threads at once."""

    def __init__(self, member: str) -> None:
        self.member = member
        self.device: Device | None = None  # once something has needed it
        self._readers: dict[str, SlotReader] = {}
        self._landings: dict[str, tuple[MappedWritable, bytes, DeviceMemory | None]] = {}
        self._maps: dict[str, MappedArena] = {}  # of arenas that lie in host memory whole
        self._registered: dict[str, Registered] = {}
        self._slots: dict[tuple[str, int], LandingSlot] = {}
        self._parts: OrderedDict[Hashable, Part] = OrderedDict()
        self._bound: OrderedDict[Hashable, tuple[Bound, frozenset[str]]] = OrderedDict()  # and the arenas it lies in
        self._staging = Staging(growing=self._bound.clear)

    def ready(self, task: Task) -> Ready:
        """Plan, map and bind, or find it done; then make the landing slot one of the publication. Takes the task's descriptors,
        also when it raises. Moves nothing; blocks for the planning.

        Raises what makes a mover refuse: ProtocolError, LayoutError, PlanError (PlanMismatch, ShardLost), ArenaError."""
        given = {g.arena: g for g in task.arenas}
        try:
            return self._ready(task, given)
        finally:
            close_all([fd for g in given.values() for fd in g.fds])

    def _ready(self, task: Task, given: dict[str, Given]) -> Ready:
        doc, publication = task.transfer, task.publication
        check(doc, publication)
        self._forget(set(given))
        self._open(task)
        part = self._part(task)
        sources = {s.member: s for s in publication.sources}
        origins = {}
        where = []
        for at in sorted(part.reads):
            source = sources.get(part.members[at])
            if source is None:
                raise ArenaError(f"the plan reads {part.members[at]}'s source slot, but the publication has none of it")
            origins[at] = Origin(self._reader(source.arena, given), source.slot, source.generation)
            if not origins[at].intact:
                raise ArenaError(
                    f"slot {source.slot} of {source.member} is of generation {origins[at].reader.generation(source.slot)}, "
                    f"published was {source.generation}; nothing was moved. Publish again"
                )
            where.append((source.arena, source.slot))
        landing = next((d for d in doc.landings if d.member == self.member), None) if part.lands else None
        slot = self._landing(landing, given) if landing is not None else None
        if landing is not None:
            where.append((landing.arena, landing.slot))
        self._refuse_unheld(part, slot, publication.id)
        self._register()
        wire: Wire = "host" if doc.network == "gloo" else "device"
        key = (doc.plan, doc.members, tuple(where), wire, doc.network in NETWORKS)
        if key not in self._bound:
            self._staging.limit, self._staging.wire, self._staging.device = doc.staging, wire, self.device
            bound = bind_part(part, origins, slot, self._staging)
            _keep(self._bound, key, (bound, frozenset(arena for arena, _ in where)))
        self._bound.move_to_end(key)
        if slot is not None:
            slot.begin(publication.id)
        return Ready(self._bound[key][0], origins, slot)

    def _part(self, task: Task) -> Part:
        doc, publication = task.transfer, task.publication
        sides = sides_of(task.layouts)
        check_plan(doc, publication)
        key = (doc.plan, doc.members, doc.network in NETWORKS)
        if key not in self._parts:
            layouts = {name: (side.model, side.correspondences) for name, side in sides.items()}
            _keep(self._parts, key, part_of(doc, plan_of(doc, publication, layouts), self.member))
        self._parts.move_to_end(key)
        return self._parts[key]

    def _open(self, task: Task) -> None:
        """The member's device, if anything of the task is on one. ArenaError under MPS."""
        on_device = task.transfer.network != "gloo" or any(given.memory >= 0 for given in task.arenas)
        identity = task.device or self._device_of(task)
        if self.device is not None or not (on_device and identity):
            return
        if not identity.startswith("pretend:"):
            found = mps_running(identity)
            if found:
                raise ArenaError(
                    f"the mover of {self.member} does not use GPU {identity} under CUDA MPS ({found}): {WHY}"
                )
        self.device = device_named(identity)
        self._forget(set())  # mapped for no device

    def _device_of(self, task: Task) -> str:
        """Where the member's own arenas lie, by their tables: a watchdog that came after the member's end knows no statement of
        it."""
        own = (memory_of(g.table.encode()) for g in task.arenas if g.owner == self.member and g.memory >= 0)
        return next((said[1] for said in own if said is not None), "")

    def _register(self) -> None:
        """Let the device reach arenas in host memory."""
        for arena, mapped in self._maps.items() if self.device is not None else ():
            if arena not in self._registered and self.device is not None:
                self._registered[arena] = self.device.host(mapped.bytes)

    def _forget(self, named: set[str]) -> None:
        """Let go of arenas that no task names any more, and of what is bound to them."""
        self._readers = {arena: reader for arena, reader in self._readers.items() if arena in named}
        self._landings = {arena: mapped for arena, mapped in self._landings.items() if arena in named}
        self._slots = {key: slot for key, slot in self._slots.items() if key[0] in named}
        self._maps = {arena: mapped for arena, mapped in self._maps.items() if arena in named}
        self._registered = {arena: held for arena, held in self._registered.items() if arena in named}
        for key in [key for key, (_, arenas) in self._bound.items() if not arenas <= named]:
            del self._bound[key]

    def _reader(self, arena: str, given: dict[str, Given]) -> SlotReader:
        if arena not in self._readers:
            told = _given(arena, given)
            memory = self._memory(given, arena)
            mapped = MappedArena(given.pop(arena).fd, for_device=self.device is not None and memory is None)
            self._readers[arena] = SlotReader(mapped, told.table.encode(), arena, memory)
            if memory is None:
                self._maps[arena] = mapped
        return self._readers[arena]

    def _memory(self, given: dict[str, Given], arena: str) -> DeviceMemory | None:
        """An arena's device memory, mapped; its descriptor is given no more."""
        told, given[arena] = given[arena], given[arena]._replace(memory=-1)
        return map_memory(told.table.encode(), told.memory, self.device, writable=told.writable, arena_id=arena)

    def _landing(self, doc: LandingDoc, given: dict[str, Given]) -> LandingSlot:
        if doc.arena not in self._landings:
            told = _given(doc.arena, given)
            if not told.writable:
                raise ArenaError(f"landing arena {doc.arena} of {doc.member} did not come writable; nothing was moved")
            memory = self._memory(given, doc.arena)
            mapped = MappedWritable(given.pop(doc.arena).fd)
            self._landings[doc.arena] = mapped, told.table.encode(), memory
            if memory is None:
                self._maps[doc.arena] = mapped
        key = (doc.arena, doc.slot)
        if key not in self._slots:
            arena, table, memory = self._landings[doc.arena]
            self._slots[key] = LandingSlot(arena, table, doc.slot, doc.arena, memory)
        return self._slots[key]

    def _refuse_unheld(self, part: Part, slot: LandingSlot | None, publication: str) -> None:
        """ArenaError if the plan counts on cells that are not in this member's landing slot."""
        if slot is None or not part.basis.any():
            return
        missing = int((part.basis & ~slot.held).sum()) if slot.publication == publication else int(part.basis.sum())
        if missing:
            raise ArenaError(
                f"the plan takes {int(part.basis.sum())} cells of {publication} as landed in {self.member}, but slot "
                f"{slot.slot} of its arena lacks {missing} of them; nothing was moved. Plan anew from what its ledger says"
            )


def _given(arena: str, given: Mapping[str, Given]) -> Given:
    if arena not in given:
        raise ArenaError(f"arena {arena} did not come with the task; nothing was moved. It must be held on this host")
    return given[arena]


def _keep(cache: OrderedDict[Hashable, _V], key: Hashable, value: _V) -> None:
    cache[key] = value
    while len(cache) > _KEPT:
        cache.popitem(last=False)
