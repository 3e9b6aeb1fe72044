"""One member's slice of a transfer: bound to the slots of its host, and run.

What is bound stays right as long as plan and slots are the same, so the next publication that moves in the same way finds
it done. A landing cell is marked only when all its bytes are there, every sender has sealed them, and the source slots of
this host that were read are still of the generation that was published.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from elastic_reshard.arena import DomainChannel
from elastic_reshard.arena.device import Registered
from elastic_reshard.arena.landing import LandingSlot
from elastic_reshard.errors import ArenaError, TransferError
from elastic_reshard.mover.fast import Lane
from elastic_reshard.mover.gate import Gate
from elastic_reshard.mover.part import Carried, Origin, Page, Part
from elastic_reshard.mover.staging import Staging
from elastic_reshard.mover.starts import Line, Starts
from elastic_reshard.protocol.docs import TransferDoc
from elastic_reshard.protocol.window import Turn
from elastic_reshard.transport import Network, PeerViews, Program, SlotViews, StagingPlan, Views, bind, run
from elastic_reshard.transport.network import GroupedNetwork
from elastic_reshard.transport.views import Key

__all__ = ["Bound", "Staging", "bind_part", "carry"]

_Cells = npt.NDArray[np.int64]


@dataclass(eq=False)
class Bound:
    """A part over memory. Messages name ranks of the communicator."""

    part: Part
    program: Program
    traffic: list[tuple[int, int]]  # bytes sent and received in each round
    registered: Registered | None = None  # of its staging, which a larger part may have taken the place of


def bind_part(part: Part, origins: Mapping[int, Origin], landing: LandingSlot | None, staging: Staging) -> Bound:
    """Bind a part to its host's slots; origins by position. Some ms a hundred messages.

    ArenaError for memory that is not what the layouts say, or is not there; PlanError if it needs more staging than the
    plan may have."""
    model, rank = part.source
    peers: dict[int, PeerViews] = {}
    for at in part.reads:
        origin = _origin(part, origins, at)
        peers[at] = SlotViews(part.members[at], part.source_rank[at], origin.reader, origin.slot, model)
    held = {}
    if part.position in part.reads and rank is not None:
        mine = peers[part.position]
        names = [name for name, layout in model.items() if layout.local_shape(rank) is not None]
        held = {(0, name): mine.tensor(_source(name)) for name in names}
    plan = StagingPlan(part.slice, Views(held, _targets(part, landing)), staging.limit, wire=staging.wire)
    program = bind(plan, staging.of(plan.nbytes), peers, part.slice.rounds)
    rank_of = {at: number for number, at in enumerate(part.present)}
    traffic = []
    for r in program.rounds:
        for message in (*r.sends, *r.receives):
            message.peer = rank_of[message.peer]
        sent, received = (sum(m.nbytes for m in side) for side in (r.sends, r.receives))
        traffic.append((sent, received))
    # Sources stand still: who pulls from one needs no word of its owner, and says none.
    return Bound(part, Program(program.rounds, set(), set(), program.staging_bytes), traffic, staging.registered)


def _source(name: str) -> Key:
    return ("s", 0, name)


def _origin(part: Part, origins: Mapping[int, Origin], at: int) -> Origin:
    if at not in origins or at not in part.source_rank:
        raise ArenaError(f"the plan reads {part.members[at]}'s source slot, which did not come with the task; nothing was "
                         "moved. Its arena must be held on this host")  # fmt: skip
    return origins[at]


def _targets(part: Part, landing: LandingSlot | None) -> dict[tuple[int, str], torch.Tensor]:
    """The landing slot's tensors; checked against the layout."""
    if not part.lands:
        return {}
    who = part.members[part.position]
    if landing is None or part.destination is None:
        raise ArenaError(
            f"the plan lands cells in {who}, whose landing arena did not come with the task; nothing was moved"
        )
    if (landing.cells, landing.cell) != part.cells:
        raise ArenaError(
            f"{who}'s landing arena is of {landing.cells} cells of {landing.cell} bytes, the plan's are "
            f"{part.cells[0]} of {part.cells[1]}; nothing was moved. Make it of the job's cell size"
        )
    layout, rank = part.destination
    found: dict[tuple[int, str], torch.Tensor] = {}
    for name, tensor in layout.items():
        shape = tensor.local_shape(rank)
        if shape is None:
            continue
        mine = landing.tensor(name)
        if tuple(mine.shape) != shape or str(mine.dtype).removeprefix("torch.") != tensor.dtype:
            raise ArenaError(
                f"{who}'s landing arena has {name} as {mine.dtype}{list(mine.shape)}, the layout says "
                f"{tensor.dtype}{list(shape)}; nothing was moved"
            )
        found[part.target, name] = mine
    return found


class _Watch:
    """Gate, marks and words of one run."""

    def __init__(
        self, bound: Bound, origins: Mapping[int, Origin], landing: LandingSlot | None, gate: Gate, page: Page,
        carried: Carried, begins: Callable[[], None], full: bool, salt: int, hosts: Sequence[str], turn: Turn | None,
        ahead: bool, starts: Starts | None,
    ) -> None:  # fmt: skip
        self.full, self.salt, self._hosts = full, salt, hosts
        self._turn, self.ahead, self._starts = turn, ahead, starts
        self._flying: set[int] = set()  # rounds that were begun and have not landed
        self._shut = False  # it has said that it waits for its member's window
        self._begins = begins
        self._bound, self._part, self._gate, self._page = bound, bound.part, gate, page
        self._origins = {at: origins[at] for at in bound.part.reads}
        self._landing = landing if bound.part.lands else None
        self._reset = landing.generation if landing is not None else 0
        self._carried = carried
        self._again = [0] * bound.part.slice.rounds

    def prepare(self) -> None:
        """What is received again counts as missing until it has: its bytes are about to be written."""
        if self._landing is not None:
            cells, self._again = self._part.again(self._landing.held)
            self._landing.clear(cells)

    def may_begin(self, number: int) -> bool:
        self.waiting(None, -1)
        if self._starts is not None:
            r = self._bound.program.rounds[number]
            may = self._starts.begin(number, sorted({m.peer for m in (*r.sends, *r.receives)}), round_=number)
        else:
            may = self._gate.may_begin(number, self._enter)
        self._entered(number, may)
        self._show()
        if may:
            self._begins()
        return may

    def may_copy(self, number: int) -> bool:
        may = self._turn is None or self._gate.may_copy(number, self._enter)
        self._entered(number, may)
        return may

    def _entered(self, number: int, may: bool) -> None:
        if self._shut:
            self._shut = False
            self._page.waiting(None)
        if may:
            self._flying.add(number)

    def _enter(self) -> bool:
        """Whether the member's window, if it counts, lets a round begin. Until it does, this mover waits for its own member."""
        # While a round is under way it is inside, and stays there.
        if self._turn is None or self._flying or self._turn.enter():
            return True
        if not self._shut:
            self._shut = True
            self._page.waiting(self._part.position, window=True)
        return False

    def changed(self) -> list[str]:
        """Members whose slot, of those read, is not what was published any more."""
        return [self._part.members[at] for at, origin in self._origins.items() if not origin.intact]

    def intact(self) -> bool:
        return not self.changed() and (self._landing is None or self._landing.generation == self._reset)

    def landed(self, number: int) -> None:
        if not self.intact():
            raise _rewritten(self.changed() or [self._part.members[self._part.position]], f"during round {number}")
        cells = self._part.landing[number]
        if self._landing is not None:
            self._landing.mark(cells)
        sent, received = self._bound.traffic[number]
        done = self._carried
        done.sent, done.received, done.rounds = done.sent + sent, done.received + received, number + 1
        done.cells, done.resent = done.cells + len(cells), done.resent + self._again[number]
        self._flying.discard(number)
        if self._turn is not None and not self._flying:
            self._turn.leave()
        for at, nbytes in self._part.senders[number].items():
            done.links[self._hosts[at]] = done.links.get(self._hosts[at], 0) + nbytes
        self._show()

    def waiting(self, peer: int | None, cell: int) -> None:
        if peer is None:
            self._page.waiting(None)
        else:
            self._page.waiting(self._part.present[peer], max(0, cell))

    def _show(self) -> None:
        done = self._carried
        self._page.progress(
            cells=done.cells, began=self._gate.began, sent=done.sent, received=done.received, resent=done.resent
        )


def _shown(part: Part, page: Page) -> Callable[[int | None, bool, bool], None]:
    """Words about whom a start waits for, as those of a page."""

    def show(rank: int | None, own: bool, window: bool) -> None:
        if own:
            page.waiting(part.position, window=True)
        elif rank is None:
            page.waiting(None)
        else:
            page.waiting(part.present[rank], window=window)

    return show


def _rewritten(members: Sequence[str], when: str) -> TransferError:
    return TransferError(f"the slots of {', '.join(members)} were rewritten {when}; what was read since is not taken. "
                         "Publish again")  # fmt: skip


class _Carriage:
    """A communicator's network, as the way of a run."""

    channel: Final[DomainChannel | None] = None

    def __init__(
        self, rank: int, network: Network | GroupedNetwork | None, broke: Callable[[BaseException], None]
    ) -> None:
        self.rank, self._network, self.fail = rank, network, broke

    @property
    def network(self) -> Network | GroupedNetwork:
        if self._network is None:
            raise TransferError(f"member {self.rank} is alone, but its plan has messages; nothing was moved")
        return self._network


def carry(
    bound: Bound,
    doc: TransferDoc,
    origins: Mapping[int, Origin],
    landing: LandingSlot | None,
    network: Network | GroupedNetwork | None,
    gate: Gate,
    page: Page,
    deadline: float,
    broke: Callable[[BaseException], None],
    carried: Carried,
    begins: Callable[[], None] = lambda: None,
    turn: Turn | None = None,
    fast: Callable[[Lane], None] | None = None,
    line: Line | None = None,
) -> None:
    """Run a part, up to the gate's end; `carried` has what was moved, also when it raises. Collective over the members
    present; blocks, until `deadline` (time.monotonic) at most, in network operations as long as those do.

    broke: called with the error first, to close the network. begins: called when a round was begun. turn: with the member, if
    its window counts in this transfer; whoever calls leaves it when everything has been let go of. fast: moves what M2N moves,
    before the rounds. network: None when this member is alone. line: over which members agree when rounds start, on all or on
    none. Raises PeerLost or TransferTimeout (their `members` are ranks), DigestMismatch, TransferError for slots that were
    rewritten.
    """
    begun = time.monotonic()
    full, salt = doc.verify == "full", xxhash.xxh3_64_intdigest(doc.id.encode())
    turn = turn if bound.part.position in doc.paused else None
    starts = Starts(line, gate, turn, _shown(bound.part, page)) if line is not None else None
    watch = _Watch(
        bound, origins, landing, gate, page, carried, begins, full, salt, doc.hosts, turn, not doc.paused, starts
    )  # fmt: skip
    try:
        watch.prepare()
        changed = watch.changed()
        if changed:
            error = _rewritten(changed, "before anything was read")
            broke(error)
            raise error
        if bound.part.calls and fast is not None:
            fast(Lane(bound.part, origins, landing, gate, page, carried, doc.hosts, turn, full, salt, starts))
        carriage = _Carriage(bound.part.rank, network, broke)
        run(bound.program, carriage, deadline, watch)
        carried.complete = carried.rounds == bound.part.slice.rounds
    finally:
        carried.seconds = time.monotonic() - begun
        page.waiting(None)
