"""The tensors of a transfer that M2N moves, in a mover: from source slots into landing slots, before the rounds of the
rest.

Whatever fails once a call was entered ends this process: it could not leave its communicator (measured), so it must not be
taken for one that did.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from elastic_reshard.arena.strided import Strided
from elastic_reshard.errors import ArenaError, ReshardError, TransferError
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.log import logger
from elastic_reshard.mover.gate import Gate
from elastic_reshard.plan.m2n import Fast, FastPart
from elastic_reshard.protocol.docs import TransferDoc
from elastic_reshard.protocol.window import Turn
from elastic_reshard.transport.m2n import Exchanged, FastRun, Memory, NcclM2n, Reshard
from elastic_reshard.transport.network import GroupedNetwork

if TYPE_CHECKING:
    from elastic_reshard.arena.landing import LandingSlot
    from elastic_reshard.communicator.base import Communicator
    from elastic_reshard.mover.part import Carried, Origin, Page, Part
    from elastic_reshard.mover.starts import Starts

__all__ = ["Lane", "carry_fast"]

_log = logger("mover")
_BEFORE: Final = -1  # the round of all that comes before the rounds
_FIRST: Final = -(1 << 40)  # the number of the first start: before those of rounds


class Lane:
    """Gate, marks and words of the fast part of one run: transport.m2n.FastWatch."""

    def __init__(
        self,
        part: Part,
        origins: Mapping[int, Origin],
        landing: LandingSlot | None,
        gate: Gate,
        page: Page,
        carried: Carried,
        hosts: tuple[str, ...],
        turn: Turn | None,
        full: bool,
        salt: int,
        starts: Starts | None = None,
    ) -> None:
        self.full, self.salt, self._hosts = full, salt, hosts
        self._part, self._gate, self._page, self._carried, self._turn = part, gate, page, carried, turn
        self._origin = origins.get(part.position)
        self._landing = landing
        self._reset = landing.generation if landing is not None else 0
        self._shut = False
        self._starts, self._number = starts, _FIRST

    def memory(self) -> Memory:
        """This member's slots. ArenaError for what is not there, or not on a device."""

        def source(_: int, name: str) -> Strided:
            if self._origin is None:
                raise ArenaError(f"M2N sends {name}, whose slot did not come with the task; nothing was moved")
            return _on_device(self._origin.reader.array(self._origin.slot, name), name)

        def target(_: int, name: str) -> Strided:
            if self._landing is None:
                raise ArenaError(f"M2N lands {name}, but no landing slot came with the task; nothing was moved")
            return _on_device(self._landing.array(name), name)

        return Memory(source, target)

    def prepare(self, fast: FastPart, rank: int) -> None:
        """What is received again counts as missing until it has."""
        if self._landing is None:
            return
        for call in fast.calls:
            if rank in call.destination.ranks:
                self._landing.clear(self._own(call.cells_of(rank)))

    def begin(self) -> None:
        # Calls tie all ranks together: a kernel of one waits for every other.
        if self._starts is not None:
            self._starts.begin(self._number, range(len(self._part.present)), round_=_BEFORE)
            self._number += 1
        else:
            self._gate.may_begin(_BEFORE, self._enter)
        if self._shut:
            self._shut = False
            self._page.waiting(None)

    def _enter(self) -> bool:
        if self._turn is None or self._turn.enter():
            return True
        if not self._shut:
            self._shut = True
            self._page.waiting(self._part.position, window=True)
        return False

    def end(self) -> None:
        if self._turn is not None:
            self._turn.leave()

    def intact(self) -> bool:
        same = self._landing is None or self._landing.generation == self._reset
        return same and (self._origin is None or self._origin.intact)

    def landed(self, call: Fast, cells: tuple[int, int]) -> None:
        if self._landing is None or self._landing.generation != self._reset:
            who = self._part.members[self._part.position]
            raise TransferError(
                f"{who}'s landing slot was reset while M2N wrote to it; nothing is taken. Publish again"
            )
        own = self._own(cells)
        self._landing.mark(own)
        done, item = self._carried, itemsize(call.dtype)
        done.cells += len(own)
        for piece in call.pieces():
            if piece.receiver == self._part.rank:
                host, nbytes = self._hosts[self._part.present[piece.sender]], piece.box.numel * item
                done.received += nbytes
                done.links[host] = done.links.get(host, 0) + nbytes
        self._page.progress(
            cells=done.cells, began=self._gate.began, sent=done.sent, received=done.received, resent=done.resent
        )

    def sent(self, nbytes: int) -> None:
        """What this member is named for as the sender."""
        self._carried.sent += nbytes

    def _own(self, cells: tuple[int, int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Numbers among the member's own cells, which are a run of the grid's."""
        first = int(np.searchsorted(self._part.own, cells[0]))
        return np.arange(first, first + cells[1] - cells[0], dtype=np.int64)


def _on_device(memory: Any, name: str) -> Strided:
    if not isinstance(memory, Strided):
        raise ArenaError(f"{name} lies in host memory, and M2N moves device memory only; join with stage='device', or choose "
                         "another network. Nothing was moved")  # fmt: skip
    return memory


def carry_fast(
    lane: Lane, part: Part, doc: TransferDoc, communicator: Communicator, deadline: float,
    say: Callable[[ReshardError], None],
) -> None:  # fmt: skip
    """Move what M2N moves of a transfer. Collective over the members present; blocks.

    say: told of an error before this process ends by it. Raises only what was found before a call was entered: ArenaError,
    TransferError; after that any failure is the end of this process, by SIGKILL."""
    network = communicator.network
    if part.fast is None or not isinstance(network, GroupedNetwork):
        raise TransferError(f"network {doc.network} has no groups, or no calls; nothing was moved")
    made = partial(_reshard, doc.network, communicator, network, deadline)
    run = FastRun(part.fast, part.rank, made, network, lane.memory(), lane)
    lane.prepare(part.fast, part.rank)
    try:
        run.run(deadline)
    except ReshardError as error:
        if run.broken:
            say(error)
            _log.error("m2n.broken", transfer=doc.id, why=str(error))
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()  # it does not come to this
        raise
    lane.sent(run.sent)


class _Counted:
    """Calls count as being inside the communicator: who aborts it knows that one has not returned, and none is entered
    after."""

    def __init__(self, inner: Reshard, network: Any) -> None:
        self._inner, self._network = inner, network

    def enter(self, call: Fast, source: Strided | None, target: Strided | None) -> None:
        with self._network.inside():
            self._inner.enter(call, source, target)

    def finalize(self) -> None:
        with self._network.inside():
            self._inner.finalize()


def _reshard(name: str, communicator: Communicator, network: GroupedNetwork, deadline: float) -> Reshard:
    if name == "pretend_m2n":
        return Exchanged(network, communicator.rank, deadline)
    end: Any = communicator
    native = end._native  # M2N takes NCCL's own communicator, which is nobody else's business
    return _Counted(NcclM2n(int(native._made.ptr), network.stream, native._agreed.config.max_ctas), network)
