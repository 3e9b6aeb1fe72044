"""`bench recovery`: one fault in the middle of a transfer each, and how long it takes to go on."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from elastic_reshard.bench import rank as on
from elastic_reshard.bench.play import Play, Shot, distinct
from elastic_reshard.bench.rows import Row
from elastic_reshard.bench.stage import Gang, Stage
from elastic_reshard.mover.status import Glance
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.docs import TransferDoc

__all__ = [
    "LARGE",
    "condemned",
    "host_vanishes",
    "joiner",
    "kill",
    "member_killed",
    "mover_killed",
    "supervisor_killed",
]

LARGE = 256 << 20  # bytes of a cell
_RANKS, _JOINER = 2, "e"
_TRIES = 20  # refits that may be over before something could be inflicted in their middle
_GOES_ON, _RECOVERS, _REPLACED = 2.0, 1.0, 0.5


def _mid_way(_: TransferDoc, __: Mapping[str, Glance], share: float) -> bool:
    return share >= 0.4


def _hit(play: Play, shoot: Callable[[], Shot | None]) -> tuple[Shot | None, int]:
    """The first shot that met a transfer in its middle, and how often it was tried."""
    for n in range(_TRIES):
        shot = shoot()
        if shot is not None:
            return play.told_again(shot), n + 1
    return None, _TRIES


def _missed(what: str, wanted: str) -> Row:
    return Row(
        what, None, "s", wanted, None, False, {"wrong": [f"{_TRIES} transfers were over too soon; take more MiB"]}
    )


def kill(pid: int) -> None:
    """SIGKILL; nothing if it is gone already."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def mover_killed(play: Play, name: str, gang: Gang, whole: float, times: int = 3, *, limit: float = _RECOVERS) -> Row:
    """The mover of rank 1 of a gang, several times; the median. whole: seconds of a transfer without a fault; limit: wanted.
    Not right if anything that had landed was moved again."""
    what = f"a {name} mover SIGKILLed in mid-transfer: to the commit, without the rest of the transfer"
    wanted = f"<= {limit:g} s; moved twice <= in flight"
    shots, values, condemned_ = [], [], []
    before: dict[str, int] = {}

    def inflict() -> None:
        before.update(play.stage.movers())
        kill(before[gang[1].id])

    for _ in range(times):
        shot, _ = _hit(play, lambda: play.shoot(inflict, _mid_way))
        if shot is None:
            return _missed(what, wanted)
        shots.append(shot)
        values.append(shot.played.committed - shot.at - shot.remaining(whole))
        condemned_.append(len(_replaced(play.stage, before) - {gang[1].id}))
    value = statistics.median(values)
    right = all(shot.twice <= shot.flying for shot in shots)
    beside = {"each s": [round(v, 3) for v in values], "movers condemned": condemned_, **_told(shots[-1], whole)}
    return Row(what, value, "s", wanted, value <= limit, right, beside)


def _told(shot: Shot, whole: float) -> dict[str, Any]:
    return {
        "kill to commit s": round(shot.played.committed - shot.at, 4), "rest s": round(shot.remaining(whole), 4),
        "landed": shot.landed, "in flight": shot.flying, "of": shot.total, "moved twice": shot.twice,
    }  # fmt: skip


def _replaced(stage: Stage, before: Mapping[str, int]) -> set[str]:
    """Members whose mover is another process than before, or none."""
    now = stage.movers()
    return {member for member, pid in before.items() if now.get(member) != pid}


def supervisor_killed(stage: Stage, play: Play) -> Row:
    """And started again at once. Not right if a mover is another one then, or the transfer was not carried on."""
    what = "supervisor SIGKILLed in mid-transfer, started again: from when it is back to the commit"
    wanted = f"<= {_GOES_ON:g} s; movers untouched"
    back = [0.0]
    before: list[dict[str, int]] = []

    def again() -> None:
        before.append(stage.movers())
        stage.kill_supervisor()
        back[0] = stage.start_supervisor()

    shot, tries = _hit(play, lambda: play.shoot(again, _mid_way))
    if shot is None:
        return _missed(what, wanted)
    value = max(0.0, shot.played.committed - back[0])
    transfers = int(play.publication().metrics.get("transfers", 0))
    untouched = before[-1] == stage.movers() and transfers == 1
    beside = {"away s": round(back[0] - shot.at, 3), "landed": shot.landed, "of": shot.total, "transfers": transfers}
    return Row(what, value, "s", wanted, value <= _GOES_ON, untouched, beside | {"tries": tries})


def joiner(stage: Stage, play: Play) -> Row:
    """An engine on a host that has nothing yet; those send it that have landed it. It stays in the play. Not right if a trainer
    sent, other bytes moved than it needs, or an engine that was there did anything."""
    others = {engine.name: engine.do(on.asks) for engine in play.engines}
    late = stage.gang("joiner", "destination", play.layouts.destination, [_JOINER] * _RANKS)
    before = stage.client.view()
    seats: list[set[str]] = []
    stage.join(late)
    joined = time.monotonic()
    calls = late.begin(on.receive)
    revision = before.revision
    while not all(call.done() for call in calls):
        view = stage.client.view(revision, 0.1)
        revision = view.revision
        seats.append({f"{n} {g.state}" for n, g in view.groups.items() if g is not None and n in others})
    found = [call.result() for call in calls]
    play.look(late)
    play.idle()
    last = [e.fields for e in stage.events() if e.event == "transfer.forming"][-1]
    hosts = stage.client.hosts()
    said = {m: s for doc in hosts.values() for m, s in doc.movers.items() if s.transfer == last["transfer"]}
    sent = {m: s.sent for m, s in said.items() if s.sent}
    landed = sum(s.received for s in hosts[_JOINER].movers.values())
    needed = distinct(late.layout, range(_RANKS))
    trainers = {actor.id for actor in play.trainer}
    served = {f"{name} current" for name in others}
    quiet = all(seen == served for seen in seats) and all(e.do(on.asks) == others[e.name] for e in play.engines)
    play.engines.append(late)
    right = not trainers & set(last["members"]) and not trainers & set(sent) and landed == needed and quiet
    return Row(
        "an engine joins on another host: admitted to installed", max(f["done"] for f in found) - joined, "s",
        "trainers send 0; others' pause 0", None, right,
        {"landed": landed, "needed": needed, "sent by": sorted(sent), "others current all the while": quiet,
         "install pause s": round(max(f["pause"] for f in found), 4)},
    )  # fmt: skip


def member_killed(play: Play, gone: Gang, whole: float) -> Row:
    """The last rank of an engine, which is gone with it, and out of the play; the others get the version."""
    what = "an engine's member SIGKILLed in mid-transfer: to the commit, without the rest of the transfer"
    return _engine_lost(play, gone, whole, what, _RECOVERS, lambda: [gone[-1].pid])


def host_vanishes(stage: Stage, play: Play, whole: float, gone: Gang | None = None) -> Row:
    """All processes of an engine's host (of the second's, if none is given), members, movers and watchdog; the others get the
    version. That engine is gone then, and out of the play."""
    lost, evict = gone if gone is not None else play.engines[1], Deadlines().evict
    what = "a host vanishes in mid-transfer: to the commit, without the rest of the transfer"
    return _engine_lost(play, lost, whole, what, evict + _RECOVERS, lambda: stage.processes_of(lost.hosts[0]))


def _engine_lost(
    play: Play, gone: Gang, whole: float, what: str, limit: float, victims: Callable[[], list[int]]
) -> Row:
    def inflict() -> None:
        for pid in victims():
            kill(pid)

    wanted = f"<= {limit:g} s"
    shot, tries = _hit(play, lambda: play.shoot(inflict, _mid_way, [gone.name]))
    if shot is None:
        return _missed(what, wanted)
    play.engines.remove(gone)
    value = shot.played.committed - shot.at - shot.remaining(whole)
    return Row(
        what, value, "s", wanted, value <= limit, shot.twice <= shot.flying, _told(shot, whole) | {"tries": tries}
    )


def condemned(stage: Stage, play: Play) -> Row:
    """A trainer's mover is killed while others wait for its message; on a stage of LARGE cells these hang in gloo."""
    deadline = Deadlines().abort
    what = f"movers stuck in gloo with a dead peer ({LARGE >> 20} MiB cells): broken off to all out or proved dead"
    wanted = f"<= {deadline:g} s and a tick; replaced <= {_REPLACED:g} s later"
    victim = play.trainer[1].id

    def waited_for(doc: TransferDoc, seen: Mapping[str, Glance], _: float) -> bool:
        return any(glance.peer == doc.members.index(victim) + 1 for glance in seen.values())

    before: list[dict[str, int]] = []

    def inflict() -> None:
        before.append(stage.movers())
        kill(before[-1][victim])

    shot, tries = _hit(play, lambda: play.shoot(inflict, waited_for))
    if shot is None:
        return _missed(what, wanted)
    stuck = sorted(_replaced(stage, before[-1]) - {victim})
    at = {e.event: e.at for e in reversed(list(stage.events())) if e.fields.get("transfer") == shot.doc.id}
    next_ = [e.at for e in stage.events() if e.event == "transfer.running" and e.at > at["transfer.over"]]
    out = at["transfer.over"] - at["transfer.breaking"]
    replaced = next_[0] - at["transfer.over"] if next_ else None
    tick = Deadlines().mover_beat
    in_time = out <= deadline + 2 * tick and replaced is not None and replaced <= _REPLACED
    kept = in_time if stuck else None  # nobody hung: small messages mostly get through
    beside = {
        "condemned": stuck, "replaced and running s": replaced and round(replaced, 4), "in flight": shot.flying,
        "kill to commit s": round(shot.played.committed - shot.at, 4), "moved twice": shot.twice, "tries": tries,
    }  # fmt: skip
    return Row(what, out, "s", wanted, kept, replaced is not None and shot.twice <= shot.flying, beside)
