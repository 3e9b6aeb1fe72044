"""When groups of workers are started, started again, moved and given up. Pure: one function, the clock comes as an argument.

A group's life: PAUSED until its time, WAITING for room, STARTING until it is whole in the supervisor's view, RUNNING; LEAVING
when it was asked to go; DONE, or GIVEN_UP. A group stands and falls together: when one of its workers dies the others are
ended and all are started again, after a pause that grows with the deaths that came lately; so many, and it is given up.
Deaths of nodes, a supervisor that is away, and a grow that holds who came first are nobody's fault: no group is given up for
them. While Ray itself is out of sight nothing is decided, and that time is not counted against anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from elastic_reshard.errors import ProtocolError
from elastic_reshard.on_ray.events import (
    Action,
    Ask,
    End,
    Ended,
    Event,
    Limits,
    Missed,
    NodesGone,
    Phase,
    Placed,
    Resize,
    Run,
    Seen,
    Sight,
    Size,
    Start,
    State,
    Tick,
    Viewed,
)

__all__ = ["begin", "lost", "more", "step"]

_OVER: Final = (Phase.DONE, Phase.GIVEN_UP)
_WORKING: Final = (Phase.WAITING, Phase.STARTING, Phase.RUNNING, Phase.LEAVING)
_LAPSE: Final = 5.0  # seconds between two looks from which they are not counted against those who were to come or go
_AGAIN: Final = 0.2  # seconds before the look after the first that failed; it doubles with each, up to
_RARELY: Final = 5.0
_KNOWN: Final = 180.0  # seconds from a node's end to when it must be known; Ray takes 15 to 65 of them, and may be away


def begin(sizes: Mapping[str, Size], now: float) -> State:
    """The state from which all groups are started. Raises ProtocolError for sizes that cannot work."""
    faults = [f"fleet {name}: ranks must be positive" for name, size in sizes.items() if size.ranks < 1]
    faults += [f"fleet {name}: groups must not be negative" for name, size in sizes.items() if size.groups < 0]
    growing = [name for name, size in sizes.items() if size.grows]
    if len(growing) > 1:
        faults.append(f"fleets {', '.join(growing)}: only one of them can be what grows")
    if faults:
        raise ProtocolError("fleets that cannot work: " + "; ".join(faults))
    state = State(sizes, {}, {}, Sight(now, now), heard=now)
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
            state = _viewed(state, event, now, limits, actions)
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
            run = replace(
                run, phase=Phase.WAITING, attempt=run.attempt + 1, since=now, ended=frozenset(), move=False, held=False,
                broken=0.0,
            )  # fmt: skip
            actions.append(Start(run.name, run.attempt))
        elif run.phase is Phase.STARTING and now - run.since >= limits.start_within:
            run = _failed(run, f"it was not whole within {limits.start_within:g} s", frozenset(), now, limits, actions)
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
    elif _faultless(state, run, event) and not run.unwanted:
        actions.append(End(run.name, run.attempt))
        run = replace(run, phase=Phase.PAUSED, since=now, until=now + limits.pause, reason=event.fault)
    elif event.fault:
        run = _failed(run, f"rank {event.rank}: {event.fault}", event.nodes, now, limits, actions)
    elif len(run.ended) == run.ranks:
        run = _over(run, Phase.DONE, "all its workers have returned", now, actions)
    return _put(state, run)


def _faultless(state: State, run: Run, event: Ended) -> bool:
    """Whether what befell it is nobody's fault."""
    waited = event.late and run.held and run.phase is Phase.STARTING
    return event.alone or waited or bool(event.fault and event.nodes & state.dead)


def _failed(run: Run, why: str, nodes: frozenset[str], now: float, limits: Limits, actions: list[Action]) -> Run:
    lately = (*(f for f in run.failures if now - f[0] < limits.window), (now, nodes))
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
    """Deaths of nodes do not count, whichever rank was there: the others fail for want of it, long before Ray knows why. A
    group that was given up meanwhile is started again."""
    failures = tuple(f for f in run.failures if now - f[0] >= _KNOWN or not f[1] & dead)
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


def _viewed(state: State, event: Viewed, now: float, limits: Limits, actions: list[Action]) -> State:
    for run in list(state.runs.values()):
        for_good = event.asked.get(run.name)
        if run.phase in (Phase.STARTING, Phase.RUNNING) and for_good is not None:
            if not for_good:
                actions.append(Ask(run.name))
            state = _put(state, replace(run, phase=Phase.LEAVING, since=now, move=not for_good))
        elif run.unwanted and run.phase in (Phase.STARTING, Phase.RUNNING):
            actions.append(Ask(run.name))
        elif run.phase is Phase.STARTING and run.name in event.whole:
            state = _put(state, replace(run, phase=Phase.RUNNING, since=now, reason="", held=False))
        elif run.phase is Phase.STARTING and run.name in event.held:
            since = min(now, run.since + now - state.heard)  # its clock stands still
            state = _put(state, replace(run, since=since, held=True, reason="it waits for the others of a grow"))
        elif run.phase is Phase.RUNNING:
            broken = run.broken + min(now - state.heard, _LAPSE) if run.name in event.broken and not run.ended else 0.0
            run = replace(run, broken=broken)
            if broken >= limits.start_within:
                why = f"it was not whole for {broken:.0f} s, and none of its workers has ended"
                run = _failed(run, why, frozenset(), now, limits, actions)
            state = _put(state, run)
    state = replace(state, heard=now)
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
