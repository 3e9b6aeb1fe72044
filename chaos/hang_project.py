"""The same faults under this project: a job of real processes with tensors on devices, a mover killed or frozen in
mid-transfer, a trainer killed right after a publish."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

from elastic_reshard.bench import gpu_rank as at_device
from elastic_reshard.bench import rank as on
from elastic_reshard.bench.gpu_stage import DeviceStage, Kit
from elastic_reshard.bench.gpu_ways import FAILURES, failure
from elastic_reshard.bench.play import Play, Shot
from elastic_reshard.bench.stage import within
from elastic_reshard.bench.synthetic import transformer
from elastic_reshard.mover.status import Glance
from elastic_reshard.protocol.docs import TransferDoc

__all__ = ["AFTER_DETECTION", "play"]

TRAINERS, ENGINES = ("a", "b"), (("c", "d"),)
AFTER_DETECTION = 2.0  # seconds, wanted
_TRIES = 8
_SETTING_UP, _ROW = 60.0, 45.0  # seconds that each may take
Row: TypeAlias = Callable[[DeviceStage, Play], dict[str, Any]]


def play(kit: Kit, nbytes: int, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Everything over one network; rows, each with whether it was right and in time. tell: called with what there is after
    each. A row that fails is told with its error, and those after it have a fresh job. Blocks for a minute or so."""
    layouts = transformer(nbytes, len(TRAINERS), 1, len(ENGINES[0]))
    found: dict[str, Any] = {
        "wanted network": kit.network,
        "bytes": layouts.nbytes,
        "rows": [],
        "left": [],
        "right": False,
    }
    todo, tell_all = deque(_rows()), partial(tell, found)
    while todo:
        stage = DeviceStage(kit)
        try:
            with stage:
                game = Play(stage, layouts, TRAINERS, ENGINES)
                with within(_SETTING_UP):
                    for _ in range(2):
                        game.refit()
                found["network"] = _network(game)
                if kit.network not in ("auto", found["network"]):
                    found["error"] = f"the transfer went over {found['network']}, not {kit.network}: {_why(stage)}"
                    return found
                _play_rows(stage, game, todo, found["rows"], tell_all)
        except FAILURES as error:  # of the job itself
            return found | failure(error)
        found["left"] += stage.left
    found["right"] = not found["left"] and all(row["right"] for row in found["rows"])
    return found


def _rows() -> Iterator[tuple[str, Row]]:
    """The trainers' end is the last: they are gone then."""
    for fault in (signal.SIGKILL, signal.SIGSTOP):
        for what in ("a sending mover", "a receiving mover"):
            yield f"{what} {fault.name} in mid-transfer", partial(_mover, what=what, fault=fault)
    yield "trainers SIGKILLed after publish: their weights arrive", _trainers_killed


def _play_rows(
    stage: DeviceStage, game: Play, todo: deque[tuple[str, Row]], rows: list[dict[str, Any]], tell: Callable[[], None]
) -> None:
    """Until all are played or one fails: what that has begun would be in the way of the next."""
    while todo:
        what, run = todo.popleft()
        try:
            with within(_ROW):
                rows.append({"what": what, **run(stage, game), "wrong": list(game.wrong)})
        except FAILURES as error:
            rows.append({"what": what, "right": False, "wrong": list(game.wrong), **failure(error)})
            tell()
            return
        tell()


def _network(game: Play) -> str:
    """What the last transfer went over."""
    overs = [e for e in game.stage.events() if e.event == "transfer.forming"]
    return str(overs[-1].fields.get("network", "gloo")) if overs else "none"


def _why(stage: DeviceStage) -> str:
    said = [f"{e.event} {e.fields}" for e in stage.events() if "network" in e.event]
    return "; ".join(said[-3:])[:1000] or "no event says why"


def _mid_way(share: float) -> Callable[[TransferDoc, Mapping[str, Glance], float], bool]:
    """M2N is too fast for a look at its middle: it is hit as soon as it runs, and others enter calls with nobody there."""

    def ready(doc: TransferDoc, _: Mapping[str, Glance], landed: float) -> bool:
        return doc.network.endswith("_m2n") or landed >= share

    return ready


def _mover(stage: DeviceStage, game: Play, *, what: str, fault: signal.Signals) -> dict[str, Any]:
    """One mover, in mid-transfer."""
    before: dict[str, int] = {}
    victim = game.trainer[1] if what == "a sending mover" else game.engines[0][0]

    def inflict() -> None:
        before.update(stage.movers())
        os.kill(before[victim.id], fault)

    shot: Shot | None = None
    tries, broken = 0, None
    while (shot is None or broken is None) and tries < _TRIES:
        shot, tries = game.shoot(inflict, _mid_way(0.2)), tries + 1
        # Whose part was done when it was hit broke nothing.
        broken = _at(stage, "transfer.breaking", transfer=shot.doc.id) if shot is not None else None
    row: dict[str, Any] = {"tries": tries}
    if shot is None or broken is None:
        return row | {"right": False, "error": f"{_TRIES} transfers were over before it could be hit; take more MiB"}
    game.told_again(shot)
    now = stage.movers()
    total = shot.played.committed - shot.at
    after = (_at(stage, "publication.committed", publication=shot.doc.publication) or 0.0) - broken
    detected = max(0.0, total - after)
    untouched = _untouched(game)
    return row | {
        "fault to commit s": round(total, 3), "detected after s": round(detected, 3), "detection to commit s": round(after, 3),
        "wanted": f"<= detection + {AFTER_DETECTION:g} s", "kept": after <= AFTER_DETECTION,
        "movers replaced": sorted(m for m, pid in before.items() if now.get(m) != pid), "of movers": len(before),
        "landed at the fault": shot.landed, "of bytes": shot.total, "moved twice": shot.twice, "in flight": shot.flying,
        "members untouched": not untouched, "touched": untouched, "bit exact": not game.wrong,
        "right": not untouched and not game.wrong and now.get(victim.id) != before[victim.id],
    }  # fmt: skip


def _at(stage: DeviceStage, event: str, **fields: str) -> float | None:
    """When something first happened, in the supervisor's seconds."""
    return next((e.at for e in stage.events() if e.event == event and fields.items() <= e.fields.items()), None)


def _untouched(game: Play) -> list[str]:
    """What is wrong with any member: another process, a context that does not compute, weights that changed."""
    found = []
    for gang in (game.trainer, *game.engines):
        for number, actor in enumerate(gang.actors):
            if not actor.process.is_alive():
                found.append(f"{gang.name}-{number} ended")
            elif not actor.do(at_device.kernel_runs):
                found.append(f"{gang.name}-{number} computes wrongly")
            elif names := actor.do(on.check, game.version):
                found.append(f"{gang.name}-{number} holds {', '.join(names[:3])} wrong")
    return found


def _trainers_killed(stage: DeviceStage, game: Play) -> dict[str, Any]:
    """All trainers, the moment publish has returned; their weights still arrive."""
    game.version += 1
    game.trainer.do(on.fill, game.version)
    receiving = game.engines[0].begin(on.receive)
    told = game.trainer.do(at_device.publish_only, game.version)
    stage.dismiss(game.trainer)
    killed = time.monotonic()
    found = [call.result(60) for call in receiving]
    before = list(game.wrong)
    game.look(game.engines[0])
    return {
        "kill to installed everywhere s": round(max(f["done"] for f in found) - killed, 3),
        "published bytes": sum(t["nbytes"] for t in told), "right": game.wrong == before,
    }  # fmt: skip
