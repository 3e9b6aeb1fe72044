"""The publish copy: a member's local tensors into a slot of its arena, cast on the way where the wire's dtype is another."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from elastic_reshard.arena.copies import Copies, raw
from elastic_reshard.arena.slots import SlotArena
from elastic_reshard.errors import ArenaError
from elastic_reshard.layout import ModelLayout
from elastic_reshard.member.tensors import Described, Look, MemberTensors, Tensors, Wire, unowned

__all__ = ["Filled", "Filler"]


@dataclass(frozen=True)
class Filled:
    """One publish copy. seconds: the whole `fill`; nbytes: written to the slot; generation: what readers must find."""

    seconds: float
    nbytes: int
    generation: int


@dataclass(eq=False)
class _Prepared:
    """Copies that are right as long as the tensors' fingerprint is `state`."""

    state: tuple[object, ...]
    copies: Copies


class Filler:
    """Copies one member's tensors into slots. Calls nobody, enters no communicator. Not for several threads at once.

    tensors: mapping or callable (asked at every `describe`). given: the source layout in group ranks with the tensors' own
    dtypes, None for DTensors and whole plain tensors. wire_dtype: see `Wire`; integers and other dtypes that are never cast
    travel as they are.
    """

    def __init__(
        self,
        tensors: Tensors,
        given: ModelLayout | None,
        wire_dtype: Wire,
        rank: int,
        renumber: Mapping[int, int] | None = None,
    ) -> None:
        self._tensors = MemberTensors(tensors, given, rank, wire_dtype, renumber)
        self._look: Look | None = None
        self._prepared: WeakKeyDictionary[SlotArena, OrderedDict[int, _Prepared]] = WeakKeyDictionary()

    def describe(self) -> Described:
        """What is to be published, from the tensors as they are now; `described is` the last one's when nothing changed.

        Call it before each `fill`, in the thread that may touch the tensors; they are held until `fill` or `release`.
        Raises LayoutMismatch (every violation), a LayoutError, ArenaError for tensors that can't be copied from where they are.
        """
        self._look = self._tensors.look()
        return self._look.described

    def release(self) -> None:
        """Forget the tensors of `describe`, where no `fill` follows."""
        self._look = None

    def fill(self, arena: SlotArena, slot: int) -> Filled:
        """Write what `describe` saw (it is called here if it was not) into a slot. Blocks for the copy.

        The caller has checked that the slot may be written, and that the arena is of the description's specs; ArenaError
        if it isn't, before the slot is touched. When it raises later, the slot's word stays odd: nobody takes it for whole.
        """
        begin = time.monotonic()
        look = self._look if self._look is not None else self._tensors.look()
        try:
            copies = self._copies(look, arena, slot)
            arena.begin_write(slot)
            copies.run()  # after what the caller's stream does before
            if copies.device is not None:
                copies.device.current().synchronize()
            generation = arena.end_write(slot)
        finally:
            self._look = None
        return Filled(time.monotonic() - begin, copies.nbytes, generation)

    def _copies(self, look: Look, arena: SlotArena, slot: int) -> Copies:
        slots = self._prepared.setdefault(arena, OrderedDict())
        known = slots.get(slot)
        if known is None or (known.state is not look.described.state and known.state != look.described.state):
            slots[slot] = known = _Prepared(look.described.state, self._prepare(look, arena, slot))
        return known.copies

    def _prepare(self, look: Look, arena: SlotArena, slot: int) -> Copies:
        if look.described.specs != arena.specs:
            unlike = sorted(dict(set(look.described.specs.items()) ^ set(arena.specs.items())))
            raise ArenaError(f"the tensors {unlike[:8]} aren't what the arena was made for; make a SlotArena of the specs "
                             "that `describe` returns")  # fmt: skip
        copies = Copies()
        targets = arena.tensors(slot)
        for name, tensor in look.local().items():
            if not tensor.numel():
                continue
            source, target = unowned(tensor), targets[name]
            if source.dtype == target.dtype:
                copies.add(raw(target), raw(source))
            else:
                copies.cast(target, source)
        return copies
