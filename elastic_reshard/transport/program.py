"""A program: one member's slice bound to real memory. Built once per plan and set of tensors, run for every refit.

Binding decides for each leg whether its bytes go straight from tensor to tensor or through staging, and prepares every
view, so that running is nothing but copies, sends, receives and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from elastic_reshard.arena import Copies, HostArena, raw
from elastic_reshard.arena.device import DeviceMemory
from elastic_reshard.arena.strided import Strided
from elastic_reshard.errors import PlanError
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.plan import Kind, Slice, boxes_of_range
from elastic_reshard.transport.pieces import Memory, as_bytes, contiguous, on_device, run_of, tensor_of, typed
from elastic_reshard.transport.views import Key, PeerViews, Staged, Views

__all__ = ["Message", "Program", "Pull", "Round", "StagingPlan", "Wire", "bind"]

_ALIGN = 64
# Whose memory a network sends from and receives into.
Wire = Literal["host", "device"]


@dataclass
class Message:
    """One send or receive: a flat buffer of bytes (a CPU tensor of uint8, or device memory for grouped networks), and the
    copies before a send or after a receive (None: the buffer is the tensor's own memory). `number` counts the messages of
    its pair and direction, alike at both ends. cell: its first in landing plans, else -1."""

    peer: int
    number: int
    buffer: torch.Tensor | Strided
    copies: Copies | None
    cell: int = -1

    @property
    def nbytes(self) -> int:
        """Of the buffer."""
        return self.buffer.nbytes


@dataclass
class Pull:
    """Copies out of one peer's memory. staged: only after the peer said that this round's bytes are there."""

    owner: int
    copies: Copies
    staged: bool


@dataclass
class Round:
    """What one member does in one round."""

    receives: list[Message] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    stage: Copies = field(default_factory=Copies)
    stage_readers: set[int] = field(default_factory=set)  # who must be told that `stage` is done
    own: Copies = field(default_factory=Copies)
    pulls: list[Pull] = field(default_factory=list)
    landed_readers: set[int] = field(default_factory=set)  # who must be told that the receives are done
    landed: list[Pull] = field(default_factory=list)
    readers: set[int] = field(default_factory=set)  # who says when it has read this round's half of the staging
    owners: set[int] = field(default_factory=set)  # whom to tell so

    @property
    def talks(self) -> bool:
        """Whether it has messages."""
        return bool(self.sends or self.receives)

    @property
    def copies(self) -> bool:
        """Whether anything is copied within this host."""
        return self.own.nbytes > 0 or any(pull.copies.nbytes for pull in self.pulls)


@dataclass
class Program:
    """All rounds; `readers` read this member's memory and say at the end when they are done, `owners` wait for this
    member to say so."""

    rounds: list[Round]
    readers: set[int]
    owners: set[int]
    staging_bytes: int


class _Legs:
    """Lookup of a slice's columns as Python numbers: numpy scalars are slow one by one."""

    def __init__(self, s: Slice, views: Views) -> None:
        self.slice, self.views = s, views
        legs = s.legs
        self.kind, self.out, self.peer = legs.kind.tolist(), legs.out.tolist(), legs.peer.tolist()
        self.tensor, self.way, self.round = legs.tensor.tolist(), legs.way.tolist(), legs.round.tolist()
        self.first, self.last, self.install = legs.first.tolist(), legs.last.tolist(), legs.install.tolist()
        self.extent, self.source_at = legs.extent.tolist(), legs.source_at.tolist()
        self.target_at, self.message = legs.target_at.tolist(), s.message.tolist()
        self.cell = legs.cell.tolist()
        names = (legs.tensor, legs.region, legs.ordinal, legs.first, legs.last)
        self.names: list[tuple[int, int, int, int, int]] = list(zip(*(c.tolist() for c in names), strict=True))
        self.item = [itemsize(t.dtype) for t in s.tensors]
        self.wire: list[torch.dtype] = [getattr(torch, t.dtype) for t in s.tensors]
        self._raw: dict[tuple[Key, tuple[int, ...] | None], Any] = {}

    def __len__(self) -> int:
        return len(self.kind)

    def count(self, i: int) -> int:
        """Elements of a leg."""
        return int(self.last[i] - self.first[i])

    def nbytes(self, i: int) -> int:
        """Bytes of a leg."""
        return int(self.count(i) * self.item[self.tensor[i]])

    def key_of_sender(self, i: int) -> tuple[Key, tuple[int, ...] | None]:
        """The sender's buffer, and how its dims are permuted."""
        ref = self.slice.tensors[self.tensor[i]]
        if self.way[i] < 0:
            return ("d", ref.target, ref.name), None
        party, c = ref.ways[self.way[i]]
        permute = c.permute if c.permute != tuple(range(ref.dims)) else None
        return ("s", party, c.source), permute

    def key_of_receiver(self, i: int) -> Key:
        """The receiver's buffer."""
        ref = self.slice.tensors[self.tensor[i]]
        return ("d", ref.target, ref.name)

    def staged_name(self, i: int) -> Staged:
        """The leg's name in a staging table: the same on the owner's and on the reader's side."""
        t, region, ordinal, first, last = self.names[i]
        return (self.kind[i], t, region, ordinal, first, last)

    def index(self, i: int, at: list[list[int]]) -> tuple[Any, ...]:
        """Index of a leg's atom in a local tensor."""
        dims = self.slice.tensors[self.tensor[i]].dims
        return (..., *(slice(a, a + n) for a, n in zip(at[i][:dims], self.extent[i][:dims], strict=True)))

    def own_source(self, i: int) -> tuple[Any, bool]:
        """(atom in this member's own sending tensor, whether it must be cast): an array of raw elements, or a tensor."""
        key, permute = self.key_of_sender(i)
        tensor = self.views.tensor(key)
        cast = tensor.dtype != self.wire[self.tensor[i]]
        if (key, permute) not in self._raw:
            whole: Any = tensor.detach() if cast else raw(tensor)
            if permute is not None:
                whole = whole.permute(permute) if cast else whole.transpose(permute)
            self._raw[key, permute] = whole
        return self._raw[key, permute][self.index(i, self.source_at)], cast

    def own_target(self, i: int) -> Memory:
        """The leg's atom in this member's own destination tensor, raw."""
        key = self.key_of_receiver(i)
        if (key, None) not in self._raw:
            self._raw[key, None] = raw(self.views.tensor(key))
        found: Memory = self._raw[key, None][self.index(i, self.target_at)]
        return found

    def whole(self, i: int) -> bool:
        """Whether the leg is a whole atom."""
        n = 1
        for extent in self.extent[i]:
            n *= extent
        return self.first[i] == 0 and bool(self.last[i] == n)

    def boxes(self, i: int) -> list[tuple[tuple[Any, ...], tuple[int, ...], int]]:
        """(index in the atom, extent, elements before) of each box of the leg."""
        dims = self.slice.tensors[self.tensor[i]].dims
        found, before = [], 0
        for at, extent in boxes_of_range(self.extent[i][:dims], self.first[i], self.last[i]):
            index = (..., *(slice(a, a + n) for a, n in zip(at, extent, strict=True)))
            found.append((index, extent, before))
            before += int(np.prod(extent, dtype=np.int64))
        return found

    def flat(self, atom: Any, i: int) -> Memory | None:
        """The leg as one run of memory inside its atom, or None if it is not one."""
        if not isinstance(atom, np.ndarray | Strided):
            return None
        if contiguous(atom):
            return run_of(atom, self.first[i], self.last[i])
        boxes = self.boxes(i)
        if len(boxes) == 1 and contiguous(atom[boxes[0][0]]):
            return run_of(atom[boxes[0][0]], 0, self.count(i))
        return None

    def copy(self, copies: Copies, i: int, target: Memory, source: Any, cast: bool) -> None:
        """Atom to atom."""
        wire = self.wire[self.tensor[i]]
        for index, _, _ in [((...,), (), 0)] if self.whole(i) else self.boxes(i):
            if cast:
                copies.cast(tensor_of(target[index], wire), source[index])
            else:
                copies.add(target[index], source[index])

    def pack(self, copies: Copies, i: int, flat: Memory, source: Any, cast: bool) -> None:
        """Atom to a flat run."""
        wire = self.wire[self.tensor[i]]
        for index, extent, before in self.boxes(i):
            piece = run_of(flat, before, before + int(np.prod(extent, dtype=np.int64))).reshape(extent)
            if cast:
                copies.cast(tensor_of(piece, wire), source[index])
            else:
                copies.add(piece, source[index])

    def unpack(self, copies: Copies, i: int, target: Memory, flat: Memory) -> None:
        """A flat run to an atom."""
        for index, extent, before in self.boxes(i):
            piece = run_of(flat, before, before + int(np.prod(extent, dtype=np.int64))).reshape(extent)
            copies.add(target[index], piece)


class StagingPlan:
    """What of a slice goes through staging, and where in it: a function of the slice, of which tensors are mapped, and of
    the wire: a message goes straight only if its memory is of the kind that the network sends.

    Rounds use two halves in turn. `offsets` has the places of legs that peers read, from the beginning of the arena.
    """

    def __init__(self, s: Slice, views: Views, limit: int, *, install: bool = False, wire: Wire = "host") -> None:
        self.wire: Wire = wire
        self.legs = _Legs(s, views)
        self.rows = [i for i in range(len(self.legs)) if self.legs.install[i] == install]
        self.messages: dict[int, list[int]] = {}
        self.place: dict[int, int] = {}  # message -> place in its half; messages that go straight are not in it
        self.local: dict[Staged, int] = {}
        self.need = self._measure()
        self.half = -(-max(self.need.values(), default=0) // _ALIGN) * _ALIGN
        if 2 * self.half > limit:
            raise PlanError(
                f"member {s.member} needs {2 * self.half} bytes of staging, the limit is {limit}; raise staging, or put "
                "tensors into arenas (er.empty)"
            )
        self.offsets = self._offsets()

    @property
    def nbytes(self) -> int:
        """Size of the staging arena."""
        return 2 * self.half

    def at(self, round_: int, place: int) -> int:
        """Offset in the arena."""
        return (round_ % 2) * self.half + place

    def _measure(self) -> dict[int, int]:
        legs = self.legs
        need: dict[int, int] = {}
        self.landed_out = {legs.names[i] for i in self.rows if legs.kind[i] == Kind.LANDED and legs.out[i]}
        for i in self.rows:
            if legs.message[i] >= 0:
                self.messages.setdefault(legs.message[i], []).append(i)
        for number, rows in self.messages.items():
            if self.direct(rows) is None:
                r = legs.round[rows[0]]
                self.place[number] = need.get(r, 0)
                need[r] = self.place[number] + -(-sum(map(legs.nbytes, rows)) // _ALIGN) * _ALIGN
        for i in self.rows:
            if legs.kind[i] == Kind.LOCAL and legs.out[i] and not legs.views.in_arena(legs.key_of_sender(i)[0]):
                name, r = legs.staged_name(i), legs.round[i]
                if name not in self.local:
                    self.local[name] = need.get(r, 0)
                    need[r] = self.local[name] + -(-legs.nbytes(i) // _ALIGN) * _ALIGN
        return need

    def direct(self, rows: list[int]) -> Memory | None:
        """The tensor memory that a message can use itself."""
        legs, i = self.legs, rows[0]
        if len(rows) > 1:
            return None
        if legs.out[i]:
            atom, cast = legs.own_source(i)
            return None if cast else self._sendable(legs.flat(atom, i))
        if legs.names[i] in self.landed_out and not legs.views.in_arena(legs.key_of_receiver(i)):
            return None
        return self._sendable(legs.flat(legs.own_target(i), i))

    def _sendable(self, piece: Memory | None) -> Memory | None:
        """The piece, if the network takes such memory."""
        if self.wire == "device":
            return piece if piece is not None and on_device(piece) else None
        return piece if isinstance(piece, np.ndarray) else None

    def _offsets(self) -> dict[Staged, int]:
        legs, found = self.legs, {}
        for number, rows in self.messages.items():
            if number in self.place and not legs.out[rows[0]]:
                at = self.at(legs.round[rows[0]], self.place[number])
                for i in rows:
                    found[(int(Kind.LANDED), *legs.names[i])] = at
                    at += legs.nbytes(i)
        for i in self.rows:
            name = legs.staged_name(i)
            if name in self.local and legs.out[i]:
                found[name] = self.at(legs.round[i], self.local[name])
        return {name: at for name, at in found.items() if name[0] == Kind.LOCAL or name[1:] in self.landed_out}


def bind(
    plan: StagingPlan, staging: HostArena | DeviceMemory | None, peers: dict[int, PeerViews], rounds: int
) -> Program:
    """The program of a slice, over its own tensors, its staging (of the kind of the plan's wire) and its domain peers'
    declared memory. Where host and device memory meet in a copy, the host's must be registered with the device
    (`Device.host`), staging too. PlanError for staging of the wrong kind."""
    legs = plan.legs
    program = [Round() for _ in range(rounds)]
    memory = _memory_of(plan, staging)
    counted: dict[tuple[int, bool], int] = {}
    shared: dict[tuple[int, bool], Copies] = {}
    for number, rows in plan.messages.items():
        pair = (legs.peer[rows[0]], legs.out[rows[0]])
        # Messages of a group begin and end together, so their copies do too: few launches.
        copies = shared.setdefault((legs.round[rows[0]], pair[1]), Copies()) if plan.wire == "device" else Copies()
        message = _bind_message(plan, number, rows, counted.setdefault(pair, 0), memory, copies)
        counted[pair] += 1
        r = program[legs.round[rows[0]]]
        (r.sends if pair[1] else r.receives).append(message)
    pulls: dict[tuple[int, int, int, bool], Pull] = {}
    staged_done: set[tuple[int, Staged]] = set()
    for i in plan.rows:
        kind, r = legs.kind[i], program[legs.round[i]]
        if kind == Kind.SELF:
            atom, cast = legs.own_source(i)
            legs.copy(r.own, i, legs.own_target(i), atom, cast)
        elif kind in (Kind.LOCAL, Kind.LANDED) and legs.out[i]:
            _bind_served(plan, r, i, memory, staged_done)
        elif kind in (Kind.LOCAL, Kind.LANDED):
            _bind_pull(plan, r, i, peers[legs.peer[i]], pulls)
    near = [i for i in plan.rows if legs.kind[i] in (Kind.LOCAL, Kind.LANDED)]
    return Program(
        program,
        {legs.peer[i] for i in near if legs.out[i]},
        {legs.peer[i] for i in near if not legs.out[i]},
        plan.nbytes,
    )


def _memory_of(plan: StagingPlan, staging: HostArena | DeviceMemory | None) -> Memory:
    """The bytes of the staging."""
    if staging is None:
        return np.zeros(0, dtype=np.uint8)
    if isinstance(staging, HostArena) != (plan.wire == "host"):
        raise PlanError(f"a program for a {plan.wire} wire was given staging of another kind: {type(staging).__name__}")
    return staging.bytes if isinstance(staging, HostArena) else staging.strided(0, (staging.nbytes,), (1,), 1)


def _bind_message(
    plan: StagingPlan, number: int, rows: list[int], place: int, memory: Memory, copies: Copies
) -> Message:
    legs, out = plan.legs, plan.legs.out[rows[0]]
    staged = number in plan.place
    if staged:
        begin = at = plan.at(legs.round[rows[0]], plan.place[number])
        for i in rows:
            flat = typed(memory, at, legs.nbytes(i), legs.item[legs.tensor[i]])
            if out:
                legs.pack(copies, i, flat, *legs.own_source(i))
            else:
                legs.unpack(copies, i, legs.own_target(i), flat)
            at += legs.nbytes(i)
        buffer = memory[(slice(begin, at),)]
    else:
        straight = plan.direct(rows)
        if straight is None:
            raise PlanError(f"message {number} has neither staging nor memory of its own")
        buffer = straight
    return Message(legs.peer[rows[0]], place, as_bytes(buffer), copies if staged else None, legs.cell[rows[0]])


def _bind_served(plan: StagingPlan, r: Round, i: int, memory: Memory, done: set[tuple[int, Staged]]) -> None:
    legs, reader = plan.legs, plan.legs.peer[i]
    if legs.kind[i] == Kind.LANDED:
        r.landed_readers.add(reader)
        r.readers.add(reader)
        return
    name = legs.staged_name(i)
    if name not in plan.local:
        return
    r.stage_readers.add(reader)
    r.readers.add(reader)
    if (legs.round[i], name) not in done:
        done.add((legs.round[i], name))
        flat = typed(memory, plan.offsets[name], legs.nbytes(i), legs.item[legs.tensor[i]])
        legs.pack(r.stage, i, flat, *legs.own_source(i))


def _bind_pull(
    plan: StagingPlan, r: Round, i: int, peer: PeerViews, pulls: dict[tuple[int, int, int, bool], Pull]
) -> None:
    legs, kind, owner = plan.legs, plan.legs.kind[i], plan.legs.peer[i]
    key, permute = legs.key_of_sender(i)
    source = peer.array(key)
    staged = source is None
    cast = peer.dtype(key) != legs.wire[legs.tensor[i]]
    waits = staged or kind == Kind.LANDED
    where = (legs.round[i], owner, kind, waits)
    if where not in pulls:
        pulls[where] = Pull(owner, Copies(), waits)
        (r.landed if kind == Kind.LANDED else r.pulls).append(pulls[where])
    if waits:
        r.owners.add(owner)
    copies, target = pulls[where].copies, legs.own_target(i)
    if source is None:
        legs.unpack(copies, i, target, peer.staged(legs.staged_name(i), legs.count(i), legs.item[legs.tensor[i]]))
        return
    whole: Any = peer.tensor(key) if cast else source
    if permute is not None:
        whole = whole.permute(permute) if cast else whole.transpose(permute)
    legs.copy(copies, i, target, whole[legs.index(i, legs.source_at)], cast)
