"""Groups of workers kept as they are wanted: the thread that does what `plan` decides."""

from __future__ import annotations

import functools
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

import ray
import tenacity
from ray.actor import ActorHandle

from elastic_reshard.errors import (
    Fenced,
    MembershipError,
    ProtocolError,
    RefitTimeout,
    ReshardError,
    SupervisorUnreachable,
)
from elastic_reshard.log import logger
from elastic_reshard.on_ray import again, cluster, events, plan
from elastic_reshard.on_ray.fleet import Crew, Fleet
from elastic_reshard.on_ray.keeper import client as client_of
from elastic_reshard.on_ray.kept import Kept
from elastic_reshard.on_ray.lookout import Workers
from elastic_reshard.on_ray.views import Looked, end_of, look
from elastic_reshard.supervisor.client import SupervisorClient

__all__ = ["Groups"]

_log = logger("on_ray")
_TURN: Final = 0.2  # seconds between looks at Ray
_VIEW: Final = 1.0  # seconds between looks at the supervisor
_SWEEP: Final = 10.0  # seconds between searches for what another one left
_LOOK: Final = 1.0  # seconds after which who waits looks whether Ray is still seen
_BLIND: Final = 5.0  # seconds without a whole look from which its end is worth a word
_FIND: Final = 0.3  # seconds of one search for it
_RARER: Final = 3  # times, how much rarer those are than looks
_END: Final = 10.0  # seconds for the thread's end


class Groups:
    """Starts the groups of these fleets, starts them again, moves and resizes them, until it is closed or its process ends
    (the workers are then ended by Ray, unless `adopt`). A thread of its own does it; any thread may ask. A context manager.

    Ray's control service may be away: the workers go on, nothing is decided meanwhile, and that time is nobody's. When it was
    away for `limits.blind`, the groups are kept no longer: every call raises MembershipError.

    `shrink` of the API ends a group for good; `drain` of a host, and Ray's notice for a node, make its groups start again
    elsewhere; `grow` makes more groups of the fleet that grows. The supervisor may be away: who dies is replaced all the same.

    adopt: for drivers that are started again. The workers outlive this process, whatever ends it. The next one's `Groups` with
    adopt takes over, as they are, the groups all of whose workers still run, ends what is left of the others and starts
    those anew; what was done stays done, there are as many groups as there were (`resize` changes it), and deaths are
    counted from the beginning. Only `close` ends the workers: a `with` block that ends by an error leaves them to the next one.
    A job has one such keeper, the last: the calls of those before raise Fenced. A `Groups` without adopt ends them first
    if it has fleets of the same names. `run` must not be async.

    Raises ProtocolError for fleets that cannot work; with adopt, MembershipError if Ray does not answer."""

    def __init__(
        self, job: str, fleets: Sequence[Fleet], limits: events.Limits | None = None, *, adopt: bool = False
    ) -> None:
        self._job, self._limits = job, limits or events.Limits()
        self._fleets = {fleet.name: fleet for fleet in fleets}
        if len(self._fleets) < len(fleets):
            raise ProtocolError("fleets that cannot work: two have one name")
        if adopt and (faults := [fault for fleet in fleets if (fault := fleet.fits())]):
            raise ProtocolError("fleets that cannot work: " + "; ".join(faults))
        self._state = plan.begin({fleet.name: fleet.sizes for fleet in fleets}, time.monotonic())
        self._changed = threading.Condition()
        self._resizes: list[events.Resize] = []
        self._crews: dict[str, Crew] = {}
        self._todo: deque[events.Action] = deque()  # each is repeated until Ray has taken it
        self._kept, self._adopt, self._leave = Kept(job), adopt, False
        self._sweep_at = 0.0
        self._keeper = f"{cluster.NAMESPACE}/{job}/{uuid.uuid4().hex}"
        if adopt:
            self._take_over()
        self._shown = self._state.runs  # what users see: when it has been done
        self._dead: frozenset[str] = frozenset()
        self._looked = Looked()
        self._look_at = 0.0
        self._workers = Workers(job)
        self._client: SupervisorClient | None = None
        self._stop = False
        self._error: BaseException | None = None
        self._unended = (
            "Ray has not answered"  # why workers may still run after the end; "" when none does that should not
        )
        self._thread = threading.Thread(target=self._main, name=f"elastic-reshard-groups-{job}", daemon=True)
        self._thread.start()

    # -- for the user, any thread

    def status(self) -> dict[str, events.Run]:
        """All groups by name, those that are over included. Raises as `wait` if the thread has ended by an error."""
        with self._changed:
            self._check()
            return dict(self._shown)

    def workers(self, group: str) -> list[ActorHandle[Any]]:
        """The actors of a group's present attempt, by rank, for the program's own calls; empty while it has none. They may be
        gone a moment later."""
        with self._changed:
            self._check()
            crew = self._crews.get(group)
            return crew.handles if crew is not None and crew.placed else []

    def resize(self, fleet: str, groups: int) -> None:
        """Have so many groups of a fleet: more are started, or the youngest are asked to leave. Returns at once. Raises
        ProtocolError for a fleet that is not there."""
        if fleet not in self._fleets or groups < 0:
            raise ProtocolError(f"there is no fleet {fleet!r} of {groups} groups; fleets are {', '.join(self._fleets)}")
        with self._changed:
            self._check()
            self._resizes.append(events.Resize(fleet, groups))

    def wait(self, *names: str, phase: events.Phase = events.Phase.DONE, timeout: float | None = None) -> None:
        """Block until these groups (all, without names) are in a phase. Raises MembershipError if one was given up, naming
        why; RefitTimeout; whatever ended the thread."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self._check()
                about = [run for name, run in self._shown.items() if not names or name in names]
                lost = [run for run in about if run.phase is events.Phase.GIVEN_UP]
                if lost and phase is not events.Phase.GIVEN_UP:
                    raise MembershipError("; ".join(f"group {run.name} was given up: {run.reason}" for run in lost))
                late = [run for run in about if run.phase is not phase]
                if not late and len(about) >= len(set(names)):
                    return
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    said = "; ".join(f"{r.name} is {r.phase}{f' ({r.reason})' if r.reason else ''}" for r in late)
                    raise RefitTimeout(f"not {phase} within {timeout:g} s: {said or 'unknown groups'}",
                                       [r.name for r in late])  # fmt: skip
                self._changed.wait(_LOOK if left is None else min(left, _LOOK))

    def _take_over(self) -> None:
        """What the driver before left."""
        sizes = {fleet.name: fleet.sizes for fleet in self._fleets.values()}
        try:
            said = self._kept.take()
            self._keeper = self._kept.keeper
            for run in again.runs(said, sizes):
                crew = self._crew(run)
                if run.phase in again.STARTED and crew.find():
                    self._crews[run.name] = crew
        except cluster.SIGHTLESS as error:
            raise MembershipError(
                f"the groups of job {self._job} could not be looked for, Ray does not answer: {cluster.words_of(error)}. "
                "Start this program again when its head is well"
            ) from error
        self._state = again.resume(said, sizes, self._crews.keys(), time.monotonic())
        if said:
            _log.info("groups.adopted", job=self._job, groups=sorted(self._crews))

    def _crew(self, run: events.Run) -> Crew:
        return Crew(self._fleets[run.fleet], run.name, run.attempt, self._keeper, outlives=self._adopt)

    def close(self, leave: bool = False) -> None:
        """End all workers, and wait until Ray has taken it, 10 s at most. Idempotent. Ask for `resize(fleet, 0)` and wait
        before, if they are to leave in good order.

        leave: let them run, for the next `Groups` of the job with adopt. Raises ProtocolError without adopt; MembershipError,
        naming their groups, if workers may still run. They are ended when Ray is seen again, for `limits.blind` seconds; call
        it again to wait for that."""
        if leave and not self._adopt:
            raise ProtocolError("without adopt no workers can be left running: give Groups adopt=True")
        with self._changed:
            self._leave = self._leave or leave
            self._stop = True
            self._changed.notify_all()
        self._thread.join(_END)
        if self._unended and not self._leave and (self._crews or self._adopt):
            last = (
                f"on_ray.Groups({self._job!r}, [], adopt=True).close() does it"
                if self._adopt
                else "its end is theirs too"
            )
            raise MembershipError(
                f"workers of job {self._job} may still run, of groups {', '.join(sorted(self._crews)) or '(none)'}: "
                f"{self._unended}. This program goes on trying to end them, for {self._limits.blind:g} s; then {last}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(leave=self._adopt and error is not None)
        except MembershipError as unended:
            if error is None:
                raise
            error.add_note(str(unended))

    def _check(self) -> None:
        # The thread may be in a call to Ray that does not come back: then it is noticed here.
        if self._error is None and not self._stop and (why := plan.lost(self._state, time.monotonic(), self._limits)):
            self._lost(why)
        if self._error is not None:
            raise self._error

    def _lost(self, why: str) -> None:
        self._error = MembershipError(
            f"the groups of job {self._job} are kept no longer: {why}. Their workers may still run; see that Ray's head is "
            "well, and start this program again"
        )

    # -- the thread

    def _main(self) -> None:
        try:
            while not self._stop and self._error is None:
                self._try_turn()
                with self._changed:
                    if not self._stop:
                        self._changed.wait(max(_TURN, self._state.sight.until - time.monotonic()))
        except BaseException as error:  # noqa: BLE001 - whatever ended it, every call raises it
            self._error = error
        finally:
            if self._error is not None:
                _log.error("groups.ended", job=self._job, error=f"{type(self._error).__name__}: {self._error}")
            with self._changed:
                self._changed.notify_all()
            self._end_all()

    def _end_all(self) -> None:
        """End who is left, again and again while Ray does not take it. Without `adopt`, Ray's own end is theirs."""
        leave = self._adopt and (self._leave or self._error is not None)
        again = tenacity.Retrying(
            retry=tenacity.retry_if_result(bool),
            wait=tenacity.wait_exponential(multiplier=0.2, max=2.0),
            stop=tenacity.stop_after_delay(max(_END, self._limits.blind)),
            retry_error_callback=lambda state: self._unended,
        )
        self._unended = "" if leave else again(self._end_some)
        if not self._unended:
            self._crews.clear()
        if self._client is not None:
            self._client.close()

    def _end_some(self) -> str:
        """End whom Ray lets; "" if nobody is left, else why not. Those that another Groups keeps by now are left to it."""
        if not ray.is_initialized():
            return "Ray was shut down before them" if self._adopt and self._crews else ""
        why = ""
        try:
            if self._adopt:
                self._kept.check()
            for name, crew in list(self._crews.items()):
                try:
                    crew.end()
                    del self._crews[name]
                except cluster.SIGHTLESS as error:
                    why = cluster.words_of(error)
            if self._adopt and not why:
                self._kept.drop()
        except Fenced as error:
            _log.warning("groups.not_ended", job=self._job, why=cluster.words_of(error))
            return ""
        except cluster.SIGHTLESS as error:
            why = cluster.words_of(error)
        if why:
            _log.warning("groups.not_ended", job=self._job, groups=sorted(self._crews), why=why)
            self._unended = why
        return why

    def _try_turn(self) -> None:
        """Look at everything once. A look that fails is no news of anybody."""
        since = self._state.sight.since
        try:
            self._turn()
        except cluster.SIGHTLESS as error:
            if not ray.is_initialized():
                raise
            why = cluster.words_of(error)
            self._decide(events.Missed(why))
            at = self._state.sight
            _log.warning("groups.blind", job=self._job, misses=at.misses, why=why,
                         seconds=round(time.monotonic() - at.since, 1))  # fmt: skip
            if gone := plan.lost(self._state, time.monotonic(), self._limits):
                self._lost(gone)
            return
        if (seconds := time.monotonic() - since) > _BLIND:
            _log.warning("groups.sees_again", job=self._job, seconds=round(seconds, 1))

    def _turn(self) -> None:
        self._see_nodes()
        self._see_others()
        self._work()
        with self._changed:
            resizes, self._resizes = self._resizes, []
        for resize in resizes:
            self._decide(resize)
        if time.monotonic() >= self._look_at:
            self._see_supervisor()
            self._look_at = time.monotonic() + _VIEW * (1 if self._client is not None else _RARER)
        shun = functools.cache(self._shunned)
        for crew in list(self._crews.values()):
            if crew.place(shun):
                self._step(events.Placed(crew.group, crew.attempt))
            self._see_ends(crew)
        self._step(events.Tick())

    def _see_nodes(self) -> None:
        nodes = cluster.nodes()
        self._step(events.Seen())
        dead = frozenset(node for node, alive in nodes.items() if not alive)
        if dead != self._dead:
            self._dead = dead
            self._step(events.NodesGone(dead))

    def _see_others(self) -> None:
        """Whether another one keeps these groups now; what is left of the one before is ended."""
        if self._adopt:
            self._kept.check()
        if time.monotonic() < self._sweep_at:
            return
        if self._adopt:
            self._kept.sweep({crew.name for crew in self._crews.values()})
            self._sweep_at = time.monotonic() + _SWEEP
        else:
            self._kept.end_others(self._fleets)
            self._sweep_at = math.inf

    def _see_ends(self, crew: Crew) -> None:
        ends = crew.ended()
        if not ends:
            return
        if self._client is not None:
            self._see_supervisor()  # what the host was asked to do may be younger than our last look
        empty = self._emptied()
        at = [cluster.node_of(actor) for actor in crew.actors]
        for gone in ends:
            crew.settled(gone)
            self._step(end_of(crew.group, crew.attempt, gone, at, self._dead, empty))

    def _emptied(self) -> set[str]:
        """Nodes that are being emptied, by Ray or by the supervisor."""
        drained = {node for node in cluster.nodes() if cluster.host_of(node) in self._looked.drained}
        return drained | set(cluster.draining())

    def _shunned(self) -> list[str]:
        """Nodes on which nothing is to be started."""
        return sorted(self._emptied() - self._dead)

    def _see_supervisor(self) -> None:
        """A look at the supervisor, if it is there. Workers go on without it, whatever it has ended by."""
        try:
            if self._client is None:
                self._client = client_of(self._job, _FIND, patience=0.0)
            crews = {crew.group: crew.actors for crew in self._crews.values()}
            self._looked = look(self._client, self._workers.look(), crews)
        except ReshardError as error:
            tell = _log.info if isinstance(error, SupervisorUnreachable) else _log.warning
            tell("groups.no_supervisor", job=self._job, why=f"{type(error).__name__}: {error}"[:300])
            if self._client is not None:
                self._client.close()
                self._client = None
            return
        looked = self._looked
        unheard = {crew.group for crew in self._crews.values() if crew.unheard} - looked.whole
        self._step(events.Viewed(looked.whole, looked.asked, looked.grow, looked.held, looked.broken | unheard))

    def _step(self, event: events.Event) -> None:
        self._decide(event)
        self._work()

    def _decide(self, event: events.Event) -> None:
        state, actions = plan.step(self._state, event, time.monotonic(), self._limits)
        for name, run in state.runs.items():
            was = self._state.runs.get(name)
            if was is None or was.phase is not run.phase:
                _log.info(f"group.{run.phase}", job=self._job, group=name, attempt=run.attempt, reason=run.reason)
        self._state = state
        self._todo.extend(actions)

    def _work(self) -> None:
        """Do what is to be done, and then show it. What Ray does not take now comes first in the next turn."""
        if self._adopt:
            self._kept.write(again.words(self._state))
        while self._todo:
            self._do(self._todo[0])
            self._todo.popleft()
        with self._changed:
            self._shown = self._state.runs
            self._changed.notify_all()

    def _do(self, action: events.Action) -> None:
        match action:
            case events.Start(group, attempt):
                self._crews[group] = self._crew(replace(self._state.runs[group], attempt=attempt))
            case events.End(group, attempt):
                crew = self._crews.get(group)
                if crew is not None and crew.attempt == attempt:
                    crew.end()
                    del self._crews[group]
            case events.Ask(group):
                self._ask(group)

    def _ask(self, group: str) -> None:
        """If it is not taken in, the plan asks again."""
        if self._client is None:
            return
        try:
            self._client.shrink([group], within=self._limits.leave_within, wait=False)
        except ReshardError as error:
            _log.info("groups.not_asked", job=self._job, group=group, why=str(error)[:300])
