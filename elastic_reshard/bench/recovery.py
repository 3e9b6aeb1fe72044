"""`bench recovery`: weights between hosts, and how long it takes to go on after the loss of anything.

Two trainers on hosts of their own, two engines of TP2 on hosts of theirs: four labels of one machine, a real process for
everything. Every version is checked bit for bit in every engine. What a figure is compared with is taken in the same run.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from rich.table import Table
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastic_reshard.bench import rank as on
from elastic_reshard.bench.census import count
from elastic_reshard.bench.play import Play, Shot, distinct
from elastic_reshard.bench.stage import Gang, Stage, until
from elastic_reshard.bench.synthetic import transformer, uniform
from elastic_reshard.mover.status import Glance
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.docs import TransferDoc

__all__ = ["RecoverySetup", "Row", "measure_recovery", "memory_needed", "recovery_table", "steps"]

TRAINERS, ENGINES = ("a", "b"), (("c", "c"), ("d", "d"))
_RANKS, _JOINER = 2, "e"
_TRIES = 20  # refits that may be over before something could be inflicted in their middle
_LARGE = 256 << 20
_COUNTS = ("processes", "descriptors", "threads", "memfd", "memfds")
_BOUND_MS, _GOES_ON, _RECOVERS, _REPLACED = 50.0, 2.0, 1.0, 0.5


@dataclass(frozen=True)
class RecoverySetup:
    """nbytes: of the model; small: of the model that is rebuilt for `rebuilds` times. repeats: refits without a fault."""

    nbytes: int = 1 << 30
    repeats: int = 5
    rebuilds: int = 200
    small: int = 8 << 20


@dataclass
class Row:
    """One line: what was measured, in a unit; what is wanted. kept: whether a bound was kept, None where none is set. right:
    whether bytes and outcomes were."""

    what: str
    value: float | None
    unit: str
    wanted: str
    kept: bool | None = None
    right: bool = True
    beside: dict[str, Any] = field(default_factory=dict)

    def to_data(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def memory_needed(setup: RecoverySetup) -> int:
    """Bytes: trainers' tensors, two slots, and the bare copy's; three engines' tensors and two landing slots; processes."""
    return setup.nbytes * (1 + 2 + 2 + 3 + 6) + (2 << 30)


def steps(setup: RecoverySetup) -> int:
    """How often `measure_recovery` says what it does."""
    return setup.repeats + 12 + setup.rebuilds


def measure_recovery(setup: RecoverySetup, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measure everything; blocks for minutes. No process of it is left, whatever happens. Raises ReshardError for what
    could not be carried out at all; wrong bytes and outcomes are in the rows."""
    rows = []
    for part in (_hosts, _stuck, _many):
        say(f"{part.__name__.strip('_')}: starting processes")
        rows += part(setup, say)
    return rows


def _played(stage: Stage, play: Play, rows: list[Row]) -> list[Row]:
    """With what was found wrong at the end."""
    wrong = [*play.wrong, *(f"{left} did not go by itself" for left in stage.left)]
    rows[-1].beside |= {"wrong": [*rows[-1].beside.get("wrong", []), *wrong]} if wrong else {}
    rows[-1].right &= not wrong
    return rows


# -- one job, all its faults


def _hosts(setup: RecoverySetup, say: Callable[[str], None]) -> list[Row]:
    layouts = transformer(setup.nbytes, len(TRAINERS), len(ENGINES), _RANKS)
    with Stage() as stage:
        play = Play(stage, layouts, TRAINERS, ENGINES)
        rows, whole = _warm(stage, play, setup.repeats, say)
        for name, gang in (("sending", play.trainer), ("receiving", play.engines[0])):
            say(f"a {name} mover is killed")
            rows.append(_mover_killed(play, name, gang, whole))
        say("the supervisor is killed")
        rows.append(_supervisor_killed(stage, play))
        say("an engine joins on another host")
        rows.append(_joiner(stage, play))
        say("a host vanishes")
        rows.append(_host_vanishes(stage, play, whole))
    return _played(stage, play, rows)


def _warm(stage: Stage, play: Play, repeats: int, say: Callable[[str], None]) -> tuple[list[Row], float]:
    """Refits without a fault beside their bare parts; also the seconds of a transfer."""
    bare = _Bare(stage, play)
    say("first refits")
    for _ in range(2):  # both slots of every arena
        play.refit()
        bare.once()
    samples = []
    for n in range(repeats):
        for engine in play.engines:
            engine.do(on.poison)
        played = play.refit()
        landed = _into_hosts(stage, play)
        parts = bare.once()
        samples.append({"everywhere": played.everywhere, "publish": played.returned - played.begun, **play.stretches(),
                        "install pause": played.pause, **parts})  # fmt: skip
        say(f"refit {n + 1}")
    bare.close()
    rows = [_overhead(samples, play), _bytes(landed, play)]
    return rows, statistics.median(s["moving"] for s in samples)


class _Bare:
    """What a refit is made of, without any protocol, by the same processes: the trainers' copy, one `reshard` over the network
    between the same hosts, the engines' copy."""

    def __init__(self, stage: Stage, play: Play) -> None:
        self._play = play
        self._members = [*play.trainer.actors, *(actor for engine in play.engines for actor in engine.actors)]
        domains = [*play.trainer.hosts, *(host for engine in play.engines for host in engine.hosts)]
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        calls = [actor.begin(on.form, self._store.port, "bare", rank, domains)
                 for rank, actor in enumerate(self._members)]  # fmt: skip
        for call in calls:
            call.result()

    def once(self) -> dict[str, float]:
        """Seconds of each part, of its slowest member."""
        play, trainers = self._play, len(self._play.trainer)
        copy = max(play.trainer.do(on.bare_copy))
        calls = [call for engine in play.engines for call in engine.begin(on.bare_copy)]
        install = max(call.result() for call in calls)
        layouts = play.layouts
        told = [actor.begin(on.through, layouts.source if rank < trainers else layouts.together)
                for rank, actor in enumerate(self._members)]  # fmt: skip
        ends = [call.result() for call in told]
        for engine in play.engines:
            play.look(engine)
        return {"copy": copy, "reshard": max(done for _, done in ends) - max(begun for begun, _ in ends),
                "install copy": install}  # fmt: skip

    def close(self) -> None:
        """Part."""
        for actor in self._members:
            actor.do(on.part)


def _overhead(samples: list[dict[str, float]], play: Play) -> Row:
    over = [s["everywhere"] - s["copy"] - s["reshard"] - s["install copy"] for s in samples]
    beside = {key: round(1e3 * statistics.median(s[key] for s in samples), 2) for key in samples[0]}
    value = 1e3 * statistics.median(over)
    return Row(
        "publish called to installed everywhere, warm: beside copy + reshard + install copy", value, "ms",
        f"<= {_BOUND_MS:g} ms", value <= _BOUND_MS, not play.wrong, beside | {"least": round(1e3 * min(over), 2)},
    )  # fmt: skip


def _into_hosts(stage: Stage, play: Play) -> dict[str, int]:
    """Network bytes that the movers of each host said they received for the last version."""
    play.idle()
    publication = play.publication().id
    return {
        host: sum(said.received for said in doc.movers.values() if said.transfer.startswith(publication))
        for host, doc in stage.client.hosts().items()
    }


def _bytes(landed: Mapping[str, int], play: Play) -> Row:
    """Exactly what each engine's host needs, and nothing for the trainers'."""
    needed = dict.fromkeys(TRAINERS, 0)
    for engine in play.engines:
        needed[engine.hosts[0]] = distinct(engine.layout, range(len(engine)))
    in_all = int(play.publication().metrics["bytes_network"])
    return Row(
        "network bytes into each host, beyond the distinct bytes it needs",
        float(sum(abs(landed.get(host, 0) - n) for host, n in needed.items())), "bytes", "0", None,
        dict(landed) == needed and in_all == sum(needed.values()), {"landed": dict(landed), "needed": needed},
    )  # fmt: skip


# -- faults


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


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _mover_killed(play: Play, name: str, gang: Gang, whole: float) -> Row:
    what = f"a {name} mover SIGKILLed in mid-transfer: to the commit, without the rest of the transfer"
    wanted = f"<= {_RECOVERS:g} s; twice <= in flight"
    shot, tries = _hit(play, lambda: play.shoot(lambda: _kill(play.stage.movers()[gang[1].id]), _mid_way))
    if shot is None:
        return _missed(what, wanted)
    value = shot.played.committed - shot.at - shot.remaining(whole)
    kept = value <= _RECOVERS
    right = shot.twice <= shot.flying
    return Row(what, value, "s", wanted, kept, right, _told(shot, whole) | {"tries": tries})


def _told(shot: Shot, whole: float) -> dict[str, Any]:
    return {
        "kill to commit s": round(shot.played.committed - shot.at, 4), "rest s": round(shot.remaining(whole), 4),
        "landed": shot.landed, "in flight": shot.flying, "of": shot.total, "moved twice": shot.twice,
    }  # fmt: skip


def _supervisor_killed(stage: Stage, play: Play) -> Row:
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


def _joiner(stage: Stage, play: Play) -> Row:
    """Of another host than all that hold the version; those send it that have landed it."""
    others = {engine.name: engine.do(on.asks) for engine in play.engines}
    joiner = stage.gang("joiner", "destination", play.layouts.destination, [_JOINER] * _RANKS)
    before = stage.client.view()
    seats: list[set[str]] = []
    stage.join(joiner)
    joined = time.monotonic()
    calls = joiner.begin(on.receive)
    revision = before.revision
    while not all(call.done() for call in calls):
        view = stage.client.view(revision, 0.1)
        revision = view.revision
        seats.append({f"{n} {g.state}" for n, g in view.groups.items() if g is not None and n in others})
    found = [call.result() for call in calls]
    play.look(joiner)
    play.idle()
    last = [e.fields for e in stage.events() if e.event == "transfer.forming"][-1]
    hosts = stage.client.hosts()
    said = {m: s for doc in hosts.values() for m, s in doc.movers.items() if s.transfer == last["transfer"]}
    sent = {m: s.sent for m, s in said.items() if s.sent}
    landed = sum(s.received for s in hosts[_JOINER].movers.values())
    needed = distinct(joiner.layout, range(_RANKS))
    trainers = {actor.id for actor in play.trainer}
    served = {f"{name} current" for name in others}
    quiet = all(seen == served for seen in seats) and all(e.do(on.asks) == others[e.name] for e in play.engines)
    play.engines.append(joiner)
    right = not trainers & set(last["members"]) and not trainers & set(sent) and landed == needed and quiet
    return Row(
        "an engine joins on another host: admitted to installed", max(f["done"] for f in found) - joined, "s",
        "trainers send 0; others' pause 0", None, right,
        {"landed": landed, "needed": needed, "sent by": sorted(sent), "others current all the while": quiet,
         "install pause s": round(max(f["pause"] for f in found), 4)},
    )  # fmt: skip


def _host_vanishes(stage: Stage, play: Play, whole: float) -> Row:
    evict = Deadlines().evict
    what = "a host vanishes in mid-transfer: to the commit, without the rest of the transfer"
    wanted = f"<= {evict + _RECOVERS:g} s"
    gone = play.engines[1]

    def vanish() -> None:
        pids = stage.processes_of(gone.hosts[0])
        for pid in pids:
            _kill(pid)

    shot, tries = _hit(play, lambda: play.shoot(vanish, _mid_way, [gone.name]))
    if shot is None:
        return _missed(what, wanted)
    value = shot.played.committed - shot.at - shot.remaining(whole)
    return Row(what, value, "s", wanted, value <= evict + _RECOVERS, shot.twice <= shot.flying,
               _told(shot, whole) | {"tries": tries})  # fmt: skip


# -- movers that are stuck


def _stuck(setup: RecoverySetup, say: Callable[[str], None]) -> list[Row]:
    """Messages so large that gloo does not tell a peer's death: survivors hang until they are condemned."""
    layouts = uniform(setup.nbytes, len(TRAINERS), len(ENGINES), _RANKS)
    with Stage(cell=_LARGE) as stage:
        play = Play(stage, layouts, TRAINERS, ENGINES)
        for _ in range(2):
            play.refit()
        say("a peer is killed in a large message")
        rows = [_condemned(stage, play)]
    return _played(stage, play, rows)


def _condemned(stage: Stage, play: Play) -> Row:
    deadline = Deadlines().abort
    what = f"movers stuck in gloo with a dead peer ({_LARGE >> 20} MiB cells): broken off to all out or proved dead"
    wanted = f"<= {deadline:g} s and a tick; replaced <= {_REPLACED:g} s later"
    victim = play.trainer[1].id

    def waited_for(doc: TransferDoc, seen: Mapping[str, Glance], _: float) -> bool:
        return any(glance.peer == doc.members.index(victim) + 1 for glance in seen.values())

    before: list[dict[str, int]] = []

    def inflict() -> None:
        before.append(stage.movers())
        _kill(before[-1][victim])

    shot, tries = _hit(play, lambda: play.shoot(inflict, waited_for))
    if shot is None:
        return _missed(what, wanted)
    now = stage.movers()
    condemned = sorted(m for m, pid in before[-1].items() if m != victim and now.get(m) != pid)
    at = {e.event: e.at for e in reversed(list(stage.events())) if e.fields.get("transfer") == shot.doc.id}
    next_ = [e.at for e in stage.events() if e.event == "transfer.running" and e.at > at["transfer.over"]]
    out = at["transfer.over"] - at["transfer.breaking"]
    replaced = next_[0] - at["transfer.over"] if next_ else None
    tick = Deadlines().mover_beat
    kept = out <= deadline + 2 * tick and replaced is not None and replaced <= _REPLACED
    beside = {
        "condemned": condemned, "replaced and running s": replaced and round(replaced, 4), "in flight": shot.flying,
        "kill to commit s": round(shot.played.committed - shot.at, 4), "moved twice": shot.twice, "tries": tries,
    }  # fmt: skip
    return Row(what, out, "s", wanted, kept, replaced is not None and shot.twice <= shot.flying, beside)


# -- again and again


def _many(setup: RecoverySetup, say: Callable[[str], None]) -> list[Row]:
    """Every refit forms a communicator anew; each fifth loses a mover."""
    layouts = transformer(setup.small, len(TRAINERS), len(ENGINES), _RANKS)
    with Stage() as stage:
        play = Play(stage, layouts, TRAINERS, ENGINES)
        losses = _Losses(stage, play)
        for n in range(min(20, setup.rebuilds)):  # every mover was lost once or twice
            losses.refit(n % 3 == 0)
        before, formed = _quiet(stage, play), losses.formed()
        begun = time.monotonic()
        for n in range(setup.rebuilds):
            losses.refit(n % 5 == 4)
            say(f"rebuild {n + 1}")
        seconds, formed = time.monotonic() - begun, losses.formed() - formed
        after = _quiet(stage, play)
    grown = _grown(before, after)
    row = Row(
        f"{setup.rebuilds} refits in a row, {formed} communicators formed, {setup.rebuilds // 5} movers killed: each",
        seconds / setup.rebuilds, "s", "descriptors, threads, memory, processes flat", None, not grown,
        {"before": before, "after": after} | ({"wrong": grown} if grown else {}),
    )  # fmt: skip
    return _played(stage, play, [row])


class _Losses:
    """Refits of which some lose a mover, each in its turn."""

    def __init__(self, stage: Stage, play: Play) -> None:
        self._stage, self._play, self._turn = stage, play, 0

    def refit(self, lost: bool) -> None:
        """One version."""
        play = self._play
        calls = play.begin()
        if lost:
            play.running()  # or it is over: then the mover is lost between two transfers
            movers = sorted(self._stage.movers().items())
            _kill(movers[self._turn % len(movers)][1])
            self._turn += 1
        play.finish(calls)

    def formed(self) -> int:
        """Transfers that were formed so far."""
        return sum(e.event == "transfer.running" for e in self._stage.events())


def _quiet(stage: Stage, play: Play) -> dict[str, dict[str, int]]:
    """What the job's processes hold, by kind, when nothing is under way and every mover is there."""
    members = len(play.trainer) + sum(map(len, play.engines))
    play.refit()
    play.idle()
    until(lambda: len(stage.movers()) == members, "every member has its mover")
    return until(_Still(stage), "what the processes hold does not change", every=0.25)


class _Still:
    """What the job's processes hold, once two looks in a row saw the same: what is being closed is gone by then."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._last: dict[str, dict[str, int]] = {}

    def __call__(self) -> dict[str, dict[str, int]] | None:
        living = sorted(self._stage.living().items())
        last, self._last = self._last, {kind: count(pid for pid, _ in found).to_data() for kind, found in living}
        return self._last if _whole(last) == _whole(self._last) else None


def _whole(held: Mapping[str, Mapping[str, int]]) -> dict[str, tuple[int, ...]]:
    return {kind: tuple(numbers[key] for key in _COUNTS) for kind, numbers in held.items()}


def _grown(before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What there is more of than before. Memory of their own may grow by what allocators keep and the record of events."""
    found = []
    for kind, held in after.items():
        known = before.get(kind, dict.fromkeys(held, 0))
        found += [f"{key} of {kind}: {known[key]} to {held[key]}" for key in _COUNTS if held[key] > known[key]]
        if held["anonymous"] > 1.05 * known["anonymous"] + (8 << 20):
            found.append(f"memory of {kind}: {known['anonymous']} to {held['anonymous']} bytes")
    return found


# -- for people


def _cells(rows: list[Row]) -> Iterator[tuple[str, str, str, str, str]]:
    for row in rows:
        value = (
            "-"
            if row.value is None
            else f"{row.value:.3f} {row.unit}"
            if row.unit == "s"
            else f"{row.value:.0f} {row.unit}"
        )
        bound = {True: "kept", False: "[red]not kept[/]", None: ""}[row.kept]
        right = "right" if row.right else "[bold red]WRONG[/]"
        yield row.what, value.strip(), row.wanted, f"{bound} {right}".strip(), ", ".join(_shown(row.beside))


def _shown(beside: Mapping[str, Any]) -> Iterator[str]:
    for key, found in beside.items():
        if isinstance(found, dict) and found and all(isinstance(v, dict) for v in found.values()):
            yield f"{key}: " + "; ".join(f"{kind} {_totals(held)}" for kind, held in found.items())
        else:
            yield f"{key} {found}"


def _totals(held: Mapping[str, int]) -> str:
    return (
        f"{held['processes']} with {held['descriptors']} descriptors, {held['threads']} threads, "
        f"{held['anonymous'] / 2**20:.0f} MiB of their own, {held['memfd'] / 2**20:.0f} MiB of memfds"
    )


def recovery_table(title: str, rows: list[Row]) -> Table:
    """One line a figure, with what was wanted, whether it was right, and what it consists of."""
    table = Table(title=title, show_lines=True)
    for column in ("what", "measured", "wanted", "", "beside"):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for cells in _cells(rows):
        table.add_row(*cells)
    return table
