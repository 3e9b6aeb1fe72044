"""The worker: one transfer at a time in a thread of its own, driven by the mover's control thread.

It maps what came with the task, works out the plan, forms the communicator and carries its part. Maps, plans and programs
are kept from one transfer to the next. What it says is a level; "out" comes when it has returned from every operation.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from elastic_reshard.arena.channel import close_all
from elastic_reshard.communicator.base import Backend, Communicator, Name
from elastic_reshard.communicator.registry import Registry
from elastic_reshard.communicator.store import ControlStore
from elastic_reshard.errors import ArenaError, ProtocolError, ReshardError, TransferError
from elastic_reshard.log import logger
from elastic_reshard.mover.carry import carry
from elastic_reshard.mover.core import Outcome, Progress, Task
from elastic_reshard.mover.fast import Lane, carry_fast
from elastic_reshard.mover.gate import Gate
from elastic_reshard.mover.networks import GLOO, backend_of
from elastic_reshard.mover.part import Carried, Page
from elastic_reshard.mover.ready import Ready, Shelf
from elastic_reshard.mover.staging import taken
from elastic_reshard.mover.starts import KEY, Line, Stand, listens_at
from elastic_reshard.protocol.window import Turn

__all__ = ["Worker"]

_log = logger("mover")
_FORM_S: Final = 60.0  # the supervisor ends a formation sooner
_PATIENCE_S: Final = 86400.0  # of a run: slow is not dead, and who is to be left is told
_RELEASE_S: Final = 1.0


@dataclass(eq=False)
class _Job:
    """One transfer in hand."""

    task: Task
    rank: int
    progress: Progress
    prepared: bool = False
    turn: Turn | None = None
    gate: Gate = field(default_factory=Gate)
    carried: Carried = field(default_factory=Carried)
    communicator: Communicator | None = None
    stand: Stand | None = None  # of rank 0, for as long as others may start rounds
    line: Line | None = None
    broken: ReshardError | None = None  # what the control thread found wrong
    store: ControlStore = field(init=False)

    @property
    def size(self) -> int:
        return len(self.task.transfer.present)

    @property
    def agrees(self) -> bool:
        """Whether members agree on each round's start: some have windows, and a network's kernels wait for peers."""
        doc = self.task.transfer
        return bool(doc.paused) and doc.network != GLOO and self.size > 1


class Worker:
    """As process.Work. All but the constructor is called by one thread, and returns at once.

    page: where `carry` shows how far it is. say: called with a Progress whenever something changed, mostly in the worker's
    thread. backend: None: what the transfer names; gloo over the interface that its settings name.
    """

    def __init__(
        self, member: str, page: Page, say: Callable[[Progress], None], backend: Backend | None = None
    ) -> None:
        self.member = member
        self._page, self._say, self._given = page, say, backend
        self._backends: dict[str, Backend] = {}
        self._shelf = Shelf(member)
        self._registry = Registry()
        self._lock = threading.Lock()
        self._job: _Job | None = None

    def begin(self, task: Task) -> None:
        """Take a task up; its descriptors are the worker's from now on. ProtocolError while another is in hand: then they
        stay the caller's."""
        if self._job is not None:
            raise ProtocolError(
                f"transfer {task.transfer.id} is to begin while {self._job.task.transfer.id} is in hand"
            )
        doc = task.transfer
        rank = doc.present.index(self.member) if self.member in doc.present else -1  # then it is refused
        job = _Job(task, rank, Progress(doc.id, "starting"))
        # What a formation that nobody waits for says later is still of its own job.
        job.store = ControlStore(
            Name(doc.epoch, doc.id),
            lambda key, value: self._set(job, key, value),
            lambda: self._tell(job, state="ready"),
        )
        self._job = job
        threading.Thread(target=self._work, args=(job,), name=f"mover {doc.id}", daemon=True).start()

    def feed(self, values: Mapping[str, Mapping[str, str]]) -> None:
        """What all members put into the rendezvous, as told."""
        job = self._job
        if job is None:
            return
        try:
            job.store.feed({key: bytes.fromhex(text) for told in values.values() for key, text in told.items()})
        except ValueError as error:  # ProtocolError is one
            told = error if isinstance(error, ProtocolError) else ProtocolError(f"values that are no hex: {error}")
            self._stop(job, str(told), told)

    def hold(self) -> None:
        """Begin no further round; said at once, with the rounds begun."""
        if self._job is not None:
            self._job.gate.hold()
            self._tell(self._job)

    def until(self, number: int) -> None:
        """End after that round. If a later one has begun it cannot: then the transfer is failed."""
        job = self._job
        if job is None:
            return
        try:
            job.gate.until(number)
        except ProtocolError as error:
            self._stop(job, str(error), error)

    def abort(self) -> None:
        """Leave all operations. Whether it did is said by "out"."""
        if self._job is not None:
            self._stop(self._job, "the transfer was broken off", None)

    def finish(self) -> None:
        """The transfer is over for all: close its communicator, in a thread of its own."""
        job, self._job = self._job, None
        if job is not None and job.stand is not None:
            job.stand.close()
        communicator = job.communicator if job is not None else None
        if communicator is not None:
            threading.Thread(
                target=lambda: self._registry.close(communicator, time.monotonic() + _RELEASE_S),
                name=f"close {communicator.name}",
                daemon=True,
            ).start()

    def _stop(self, job: _Job, reason: str, error: ReshardError | None) -> None:
        job.broken = job.broken or error
        job.gate.abort(reason)
        job.store.cancel(TransferError(reason))
        # Its deadline is now: both phases are begun, and nobody waits here for what may hang.
        self._registry.abort_all(time.monotonic(), reason, [job.store.name])

    def _tell(self, job: _Job, **changes: object) -> None:
        """Say where the job is; nothing after "out"."""
        with self._lock:
            if job.progress.state == "out":
                return
            done = job.carried
            job.progress = replace(
                job.progress,
                began=job.gate.began,
                held=job.gate.held,
                cells=done.cells,
                sent=done.sent,
                received=done.received,
                resent=done.resent,
                seconds=done.seconds,
                to_land=done.to_land,
                links=dict(done.links),
                **changes,  # type: ignore[arg-type]
            )
            self._say(job.progress)

    def _set(self, job: _Job, key: str, value: bytes) -> None:
        """The backend puts a value into the rendezvous."""
        with self._lock:
            job.progress = replace(job.progress, values={**job.progress.values, key: value.hex()})
        if job.progress.state == "ready":
            self._tell(job)

    def _work(self, job: _Job) -> None:
        try:
            outcome = self._whole(job)
        except ReshardError as error:
            met = job.progress.state == "running"
            early = not job.prepared or (isinstance(error, ProtocolError) and not met and error is not job.broken)
            self._over(job, "refused" if early else "failed", error)
        except BaseException as error:
            self._over(job, "failed", error)
            raise
        else:
            self._over(job, outcome, None)
        finally:
            job.task = replace(job.task, arenas=(), window=-1)

    def _whole(self, job: _Job) -> Outcome:
        """Everything; the outcome if it went well."""
        job.turn = _turn(job.task)
        ready = self._shelf.ready(job.task)
        job.prepared = True
        job.carried.to_land = ready.bound.part.to_land
        if job.size > 1:
            backend = self._chosen(job.task.transfer.network)
            job.progress = replace(job.progress, config=backend.config)
            deadline = time.monotonic() + _FORM_S
            if job.agrees and job.rank == 0:
                job.stand = Stand(listens_at(backend), job.size)
                job.store.set(KEY, job.stand.told)
            job.communicator = self._registry.form(backend, job.store, job.rank, job.size, deadline, tuple)
            if job.agrees:
                job.line = Line.call(job.store.get(KEY), job.rank, deadline, job.gate)
        if job.turn is not None and self._shelf.device is not None:
            job.turn.uses(taken(self._shelf.device))
        self._tell(job, state="ready")
        self._tell(job, state="running")
        _log.info(
            "transfer.runs", member=self.member, transfer=job.task.transfer.id, rounds=ready.bound.part.slice.rounds
        )
        self._carry(job, ready)
        return "done" if job.carried.complete else "stopped"

    def _carry(self, job: _Job, ready: Ready) -> None:
        carry(
            ready.bound,
            job.task.transfer,
            ready.origins,
            ready.landing,
            job.communicator.network if job.communicator is not None else None,
            job.gate,
            self._page,
            time.monotonic() + _PATIENCE_S,
            lambda error: self._release(job, str(error)),
            job.carried,
            lambda: self._tell(job),
            job.turn,
            lambda lane: self._carry_fast(job, ready, lane),
            job.line,
        )

    def _carry_fast(self, job: _Job, ready: Ready, lane: Lane) -> None:
        """What M2N moves. Failures that this process can leave release the communicator; after others it is no more."""
        communicator = job.communicator
        if communicator is None:
            raise TransferError(f"transfer {job.task.transfer.id} has calls of M2N for a member that is alone")
        try:
            carry_fast(
                lane, ready.bound.part, job.task.transfer, communicator, time.monotonic() + _PATIENCE_S,
                lambda error: self._tell(job, error=type(error).__name__, reason=str(error)),
            )  # fmt: skip
        except ReshardError as error:
            self._release(job, str(error))
            raise

    def _chosen(self, network: str) -> Backend:
        """The backend of a transfer's network, made once. ArenaError for one that uses a device that is not there."""
        if self._given is not None:
            return self._given
        if network not in self._backends:
            self._backends[network] = backend_of(network, self._shelf.device)
        return self._backends[network]

    def _release(self, job: _Job, reason: str) -> None:
        """Let go of the communicator, so that no peer waits for this member. Blocks as long as that hangs: then this process
        is condemned, for it is not out. A process whose device has failed ends here: its context can't be used again, so it
        would fail every transfer from now on."""
        try:
            if self._shelf.device is not None:
                self._shelf.device.current().record().done()
        except ArenaError as lost:
            self._tell(job, error=type(lost).__name__, reason=f"{reason}; {lost}")
            _log.error("mover.device_lost", member=self.member, transfer=job.task.transfer.id, why=str(lost))
            os.kill(os.getpid(), signal.SIGKILL)
        self._registry.abort_all(time.monotonic() + _RELEASE_S, reason, [job.store.name])
        mine = str(job.store.name)
        while any(what.rpartition(" ")[2] == mine for what in self._registry.pending):
            time.sleep(0.005)

    def _over(self, job: _Job, outcome: Outcome, error: BaseException | None) -> None:
        if error is not None:
            self._release(job, str(error))
        if job.turn is not None:  # before "out": after it the next transfer may begin, with a turn of its own
            job.turn.close()
        if job.line is not None:
            job.line.close()
        if job.stand is not None and error is not None:
            job.stand.close()
        if error is None:
            self._tell(job, state="out", outcome=outcome)
            return
        if job.gate.aborted and outcome == "failed":
            # What an abort makes of the operations is not what was wrong.
            if job.broken is None:
                self._tell(job, state="out", outcome="stopped", reason=job.gate.aborted)
                return
            error = job.broken
        present = job.task.transfer.present
        ranks = [m for m in getattr(error, "members", ()) if isinstance(m, int) and 0 <= m < len(present)]
        blames = tuple(present[rank] for rank in ranks)
        reason = str(error) + "".join(f" (member {rank} is {present[rank]})" for rank in ranks)
        _log.warning("transfer.failed", member=self.member, transfer=job.task.transfer.id, outcome=outcome, why=reason)
        self._tell(job, state="out", outcome=outcome, error=type(error).__name__, reason=reason, blames=blames)


def _turn(task: Task) -> Turn | None:
    """With the member; takes the window's descriptor, and all others if it is no window."""
    if task.window < 0:
        return None
    try:
        return Turn(task.window)
    except ProtocolError:
        close_all([fd for given in task.arenas for fd in given.fds])
        raise
