"""When groups of workers are started, started again, moved and given up. Pure: one function, the clock comes as an argument.

A group's life: PAUSED until its time, WAITING for room, STARTING until it is whole in the supervisor's view, RUNNING; LEAVING
when it was asked to go; DONE, or GIVEN_UP. A group stands and falls together: when one of its workers dies the others are
ended and all are started again, after a pause that grows with the deaths that came lately; so many, and it is given up.
Deaths of nodes, and a supervisor that is away, are nobody's fault: no group is given up for them. While Ray itself is out of
sight nothing is decided, and that time is not counted against anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import tenacity

from elastic_reshard.errors import ProtocolError

__all__ = [
    "Action",
    "Ask",
    "End",
    "Ended",
    "Event",
    "Limits",
    "Missed",
    "NodesGone",
    "Phase",
    "Placed",
    "Resize",
    "Run",
    "Seen",
    "Sight",
    "Size",
    "Start",
    "State",
    "Tick",
    "Viewed",
    "begin",
    "lost",
    "more",
    "step",
]


class Phase(StrEnum):
    """Of one group; see above."""

    PAUSED = "paused"
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    DONE = "done"
    GIVEN_UP = "given_up"


_OVER: Final = (Phase.DONE, Phase.GIVEN_UP)
_WORKING: Final = (Phase.WAITING, Phase.STARTING, Phase.RUNNING, Phase.LEAVING)
_LAPSE: Final = 5.0  # seconds between two looks from which they are not counted against those who were to come or go
_AGAIN: Final = 0.2  # seconds before the look after the first that failed; it doubles with each, up to
_RARELY: Final = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds, except failures. failures: deaths of a group within `window` after which it is given up. pause: before the first
    start after a death; it doubles with each, up to `longest`. start_within: from when a group has room until it must be whole.
    leave_within: that its members have to leave when it is to go. blind: that Ray's control service may be out of sight before
    the groups are kept no longer. Ray itself ends a process that cannot connect to it for
    RAY_gcs_rpc_server_reconnect_timeout_s (60 s, unless the whole cluster is started with another)."""

    failures: int = 5
    window: float = 600.0
    pause: float = 1.0
    longest: float = 60.0
    start_within: float = 300.0
    leave_within: float = 30.0
    blind: float = 120.0

    def __post_init__(self) -> None:
        faults = [
            f"{n} must be positive" for n in ("failures", "window", "start_within", "blind") if getattr(self, n) <= 0
        ]
        faults += [f"{n} must not be negative" for n in ("pause", "leave_within") if getattr(self, n) < 0]
        if self.longest < self.pause:
            faults.append(f"longest ({self.longest}) must not be less than pause ({self.pause})")
        if faults:
            raise ProtocolError("limits that cannot work: " + "; ".join(faults))

    def pause_after(self, failures: int) -> float:
        """Seconds before the next start."""
        if failures == 0:
            return 0.0
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = failures
        return float(tenacity.wait_exponential(multiplier=self.pause, max=self.longest)(state))


@dataclass(frozen=True, slots=True)
class Size:
    """Of one fleet: ranks of a group, groups at the beginning, and whether a `grow` of the API is for it."""

    ranks: int
    groups: int
    grows: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """One group. attempt: its starts so far. since: when it came into its phase; until: when a pause is over. ended: ranks that
    have ended in this attempt. move: it is asked to go because it is to be elsewhere, not for good. failures: (when, on which
    node). unwanted: it is to go, and that is to be asked of the supervisor."""

    name: str
    fleet: str
    ranks: int
    phase: Phase = Phase.PAUSED
    attempt: int = 0
    since: float = 0.0
    until: float = 0.0
    ended: frozenset[int] = frozenset()
    move: bool = False
    failures: tuple[tuple[float, str], ...] = ()
    unwanted: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Sight:
    """Of Ray. since: when it was last seen well; looked: when it last answered at all. misses: looks that failed since, why the
    last one did, and until when there is none."""

    since: float
    looked: float
    misses: int = 0
    why: str = ""
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class State:
    """All groups by name, which indices were given away, how well Ray is seen, which grows were heard of, and which nodes are
    dead."""

    sizes: Mapping[str, Size]
    runs: Mapping[str, Run]
    indices: Mapping[str, int]
    sight: Sight
    grows: frozenset[str] = frozenset()
    dead: frozenset[str] = frozenset()


# -- what happens


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; all that was to be looked at was seen, and all that was to be done was done."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Ray answers: a look at it begins."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A look at Ray failed, or something that it was to do. Nothing is known of this turn."""

    why: str


@dataclass(frozen=True, slots=True)
class Placed:
    """There is room for a group, and its workers are being made."""

    group: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker has ended. fault: "" if it returned. node: where. drained: that is being emptied. alone: the fault was that no
    supervisor answered."""

    group: str
    attempt: int
    rank: int
    fault: str = ""
    node: str = ""
    drained: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Viewed:
    """What the supervisor says. whole: groups. asked: of groups some of whose members were asked to leave, whether all were and
    none because of its host: it is to go for good. grow: (name, groups or 0, members or 0) of one that waits, or None."""

    whole: frozenset[str]
    asked: Mapping[str, bool] = field(default_factory=dict)
    grow: tuple[str, int, int] | None = None


@dataclass(frozen=True, slots=True)
class NodesGone:
    """Nodes that are dead now."""

    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Resize:
    """A fleet is to have so many groups."""

    fleet: str
    groups: int


Event = Tick | Seen | Missed | Placed | Ended | Viewed | NodesGone | Resize

# -- what is to be done


@dataclass(frozen=True, slots=True)
class Start:
    """Find room for a group and make its workers."""

    group: str
    attempt: int


@dataclass(frozen=True, slots=True)
class End:
    """Kill what is left of an attempt, and give its room back."""

    group: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the supervisor that all members of a group leave. Asked again until it is so."""

    group: str


Action = Start | End | Ask


def begin(sizes: Mapping[str, Size], now: float) -> State:
    """The state from which all groups are started. Raises ProtocolError for sizes that cannot work."""
    faults = [f"fleet {name}: ranks must be positive" for name, size in sizes.items() if size.ranks < 1]
    faults += [f"fleet {name}: groups must not be negative" for name, size in sizes.items() if size.groups < 0]
    growing = [name for name, size in sizes.items() if size.grows]
    if len(growing) > 1:
        faults.append(f"fleets {', '.join(growing)}: only one of them can be what grows")
    if faults:
        raise ProtocolError("fleets that cannot work: " + "; ".join(faults))
    state = State(sizes, {}, {}, Sight(now, now))
    for name, size in sizes.items():
        state = more(state, name, size.groups, now)
    return state


def step(state: State, event: Event, now: float, limits: Limits) -> tuple[State, list[Action]]:
    """The next state, and what is to be done."""
    actions: list[Action] = []
    match event:
        case Placed(group, attempt):
            run = state.runs.get(group)
            if run is not None and (run.attempt, run.phase) == (attempt, Phase.WAITING):
                state = _put(state, replace(run, phase=Phase.STARTING, since=now))
        case Ended():
            state = _ended(state, event, now, limits, actions)
        case Viewed():
            state = _viewed(state, event, now, actions)
        case NodesGone(nodes):
            state = replace(state, dead=nodes)
            state = _put(state, *(_forgiven(run, nodes, now, limits) for run in state.runs.values()))
        case Resize(fleet, groups):
            state = _resize(state, fleet, groups, now, actions)
        case Tick():
            state = replace(state, sight=Sight(now, now))
        case Seen():
            return _seen(state, now), []
        case Missed(why):
            at = state.sight
            pause = min(_RARELY, _AGAIN * 2 ** min(at.misses, 10))
            return replace(state, sight=replace(at, misses=at.misses + 1, why=why, until=now + pause)), []
    return _time(state, now, limits, actions), actions


def lost(state: State, now: float, limits: Limits) -> str:
    """Why the groups cannot be kept any more: Ray was out of sight for too long; "" while they can."""
    gone = now - state.sight.since
    if gone < limits.blind:
        return ""
    return f"Ray was out of sight for {gone:.0f} s: {state.sight.why or 'its control service does not answer'}"


def _seen(state: State, now: float) -> State:
    """Whoever was to come or go gets the time back in which nobody could see it."""
    at = state.sight
    lapse = now - at.looked
    state = replace(state, sight=replace(at, looked=now, since=at.since if at.misses else now))
    if lapse < _LAPSE:
        return state
    due = (run for run in state.runs.values() if run.phase in (Phase.STARTING, Phase.LEAVING))
    return _put(state, *(replace(run, since=min(now, run.since + lapse)) for run in due))


def _put(state: State, *runs: Run) -> State:
    return replace(state, runs={**state.runs, **{run.name: run for run in runs}})


def more(state: State, fleet: str, count: int, now: float) -> State:
    """More groups of a fleet. A fleet of one group gives it its own name."""
    size, first = state.sizes[fleet], state.indices.get(fleet, 0)
    alone = size.groups == 1 and not size.grows
    names = [fleet if alone and i == 0 else f"{fleet}-{i}" for i in range(first, first + count)]
    state = replace(state, indices={**state.indices, fleet: first + count})
    return _put(state, *(Run(name, fleet, size.ranks, since=now, until=now) for name in names))


def _time(state: State, now: float, limits: Limits, actions: list[Action]) -> State:
    for run in list(state.runs.values()):
        if run.phase is Phase.PAUSED and now >= run.until:
            run = replace(run, phase=Phase.WAITING, attempt=run.attempt + 1, since=now, ended=frozenset(), move=False)
            actions.append(Start(run.name, run.attempt))
        elif run.phase is Phase.STARTING and now - run.since >= limits.start_within:
            run = _failed(run, f"it was not whole within {limits.start_within:g} s", "", now, limits, actions)
        elif run.phase is Phase.LEAVING and now - run.since >= limits.leave_within + limits.start_within:
            run = _gone(run, now, actions)
        else:
            continue
        state = _put(state, run)
    return state


def _ended(state: State, event: Ended, now: float, limits: Limits, actions: list[Action]) -> State:
    run = state.runs.get(event.group)
    if run is None or run.attempt != event.attempt or run.phase not in _WORKING or event.rank in run.ended:
        return state
    run = replace(run, ended=run.ended | {event.rank})
    if run.phase is Phase.LEAVING:
        # Of a group that is to be elsewhere nobody can go on without the one that went.
        run = _gone(run, now, actions) if run.move or len(run.ended) == run.ranks else run
    elif event.drained:
        run = _gone(replace(run, move=True), now, actions)
    elif (event.alone or (event.fault and event.node in state.dead)) and not run.unwanted:
        actions.append(End(run.name, run.attempt))
        run = replace(run, phase=Phase.PAUSED, since=now, until=now + limits.pause, reason=event.fault)
    elif event.fault:
        run = _failed(run, f"rank {event.rank}: {event.fault}", event.node, now, limits, actions)
    elif len(run.ended) == run.ranks:
        run = _over(run, Phase.DONE, "all its workers have returned", now, actions)
    return _put(state, run)


def _failed(run: Run, why: str, node: str, now: float, limits: Limits, actions: list[Action]) -> Run:
    lately = (*(f for f in run.failures if now - f[0] < limits.window), (now, node))
    run = replace(run, failures=lately)
    if run.unwanted:
        return _over(run, Phase.DONE, f"it was to go; {why}", now, actions)
    if len(lately) >= limits.failures:
        why = f"it has died {len(lately)} times within {limits.window:g} s, the last time: {why}"
        return _over(run, Phase.GIVEN_UP, why, now, actions)
    actions.append(End(run.name, run.attempt))
    until = now + limits.pause_after(len(lately))
    return replace(run, phase=Phase.PAUSED, since=now, until=until, reason=why)


def _forgiven(run: Run, dead: frozenset[str], now: float, limits: Limits) -> Run:
    """Deaths of nodes do not count; a group that was given up when one was not yet known to be that is started again."""
    failures = tuple(f for f in run.failures if f[1] not in dead)
    if failures == run.failures:
        return run
    if run.phase is Phase.GIVEN_UP and len(failures) < limits.failures:
        return replace(run, failures=failures, phase=Phase.PAUSED, since=now, until=now + limits.pause)
    return replace(run, failures=failures)


def _gone(run: Run, now: float, actions: list[Action]) -> Run:
    """A group that was asked to go is gone: for good, or to be elsewhere."""
    if not run.move or run.unwanted:
        return _over(run, Phase.DONE, "it was asked to leave", now, actions)
    actions.append(End(run.name, run.attempt))
    return replace(run, phase=Phase.PAUSED, since=now, until=now, reason="its host is to be emptied")


def _over(run: Run, phase: Phase, why: str, now: float, actions: list[Action]) -> Run:
    actions.append(End(run.name, run.attempt))
    return replace(run, phase=phase, since=now, reason=why)


def _viewed(state: State, event: Viewed, now: float, actions: list[Action]) -> State:
    for run in list(state.runs.values()):
        for_good = event.asked.get(run.name)
        if run.phase in (Phase.STARTING, Phase.RUNNING) and for_good is not None:
            if not for_good:
                actions.append(Ask(run.name))
            state = _put(state, replace(run, phase=Phase.LEAVING, since=now, move=not for_good))
        elif run.unwanted and run.phase in (Phase.STARTING, Phase.RUNNING):
            actions.append(Ask(run.name))
        elif run.phase is Phase.STARTING and run.name in event.whole:
            state = _put(state, replace(run, phase=Phase.RUNNING, since=now, reason=""))
    fleet = next((name for name, size in state.sizes.items() if size.grows), None)
    if event.grow is not None and fleet is not None and event.grow[0] not in state.grows:
        name, groups, members = event.grow
        state = replace(state, grows=state.grows | {name})
        state = more(state, fleet, groups or -(-members // state.sizes[fleet].ranks), now)
    return state


def _resize(state: State, fleet: str, groups: int, now: float, actions: list[Action]) -> State:
    """More groups, or the youngest go: those first that do not run yet."""
    there = [r for r in state.runs.values() if r.fleet == fleet and r.phase not in _OVER and not _going(r)]
    if groups > len(there):
        return more(state, fleet, groups - len(there), now)
    running = (Phase.STARTING, Phase.RUNNING)
    for run in _youngest(there)[: len(there) - groups]:
        if run.phase in running or run.phase is Phase.LEAVING:
            state = _put(state, replace(run, unwanted=True))
            actions.append(Ask(run.name))
        else:
            state = _put(state, _over(run, Phase.DONE, "it was not wanted any more", now, actions))
    return state


def _going(run: Run) -> bool:
    return run.unwanted or (run.phase is Phase.LEAVING and not run.move)


def _youngest(runs: Iterable[Run]) -> list[Run]:
    working = (Phase.STARTING, Phase.RUNNING, Phase.LEAVING)
    backwards = list(runs)[::-1]
    return [r for r in backwards if r.phase not in working] + [r for r in backwards if r.phase in working]
