"""What a worker keeps between transfers: maps of arenas, parts of plans, bound programs; and a task made ready with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from elastic_reshard.arena.channel import close_all
from elastic_reshard.arena.host import MappedArena
from elastic_reshard.arena.landing import LandingSlot, MappedWritable
from elastic_reshard.arena.slots import SlotReader
from elastic_reshard.errors import ArenaError
from elastic_reshard.mover.carry import Bound, Origin, Part, Staging, bind_part, part_of
from elastic_reshard.mover.task import Given, Task, check, check_plan, plan_of, sides_of
from elastic_reshard.protocol.docs import LandingDoc

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
        self._readers: dict[str, SlotReader] = {}
        self._landings: dict[str, tuple[MappedWritable, bytes]] = {}
        self._slots: dict[tuple[str, int], LandingSlot] = {}
        self._parts: OrderedDict[Hashable, Part] = OrderedDict()
        self._bound: OrderedDict[Hashable, tuple[Bound, frozenset[str]]] = OrderedDict()  # and the arenas it lies in
        self._staging = Staging()

    def ready(self, task: Task) -> Ready:
        """Plan, map and bind, or find it done; then make the landing slot one of the publication. Takes the task's descriptors,
        also when it raises. Moves nothing; blocks for the planning.

        Raises what makes a mover refuse: ProtocolError, LayoutError, PlanError (PlanMismatch, ShardLost), ArenaError."""
        given = {g.arena: g for g in task.arenas}
        try:
            return self._ready(task, given)
        finally:
            close_all([g.fd for g in given.values()])

    def _ready(self, task: Task, given: dict[str, Given]) -> Ready:
        doc, publication = task.transfer, task.publication
        check(doc, publication)
        self._forget(set(given))
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
        key = (doc.plan, doc.members, tuple(where))
        if key not in self._bound:
            self._staging.limit = doc.staging
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
        key = (doc.plan, doc.members)
        if key not in self._parts:
            layouts = {name: (side.model, side.correspondences) for name, side in sides.items()}
            _keep(self._parts, key, part_of(doc, plan_of(doc, publication, layouts), self.member))
        self._parts.move_to_end(key)
        return self._parts[key]

    def _forget(self, named: set[str]) -> None:
        """Let go of arenas that no task names any more, and of what is bound to them."""
        self._readers = {arena: reader for arena, reader in self._readers.items() if arena in named}
        self._landings = {arena: mapped for arena, mapped in self._landings.items() if arena in named}
        self._slots = {key: slot for key, slot in self._slots.items() if key[0] in named}
        for key in [key for key, (_, arenas) in self._bound.items() if not arenas <= named]:
            del self._bound[key]

    def _reader(self, arena: str, given: dict[str, Given]) -> SlotReader:
        if arena not in self._readers:
            told = _given(arena, given)
            self._readers[arena] = SlotReader(MappedArena(given.pop(arena).fd), told.table.encode(), arena)
        return self._readers[arena]

    def _landing(self, doc: LandingDoc, given: dict[str, Given]) -> LandingSlot:
        if doc.arena not in self._landings:
            told = _given(doc.arena, given)
            if not told.writable:
                raise ArenaError(f"landing arena {doc.arena} of {doc.member} did not come writable; nothing was moved")
            self._landings[doc.arena] = MappedWritable(given.pop(doc.arena).fd), told.table.encode()
        key = (doc.arena, doc.slot)
        if key not in self._slots:
            arena, table = self._landings[doc.arena]
            self._slots[key] = LandingSlot(arena, table, doc.slot, doc.arena)
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
