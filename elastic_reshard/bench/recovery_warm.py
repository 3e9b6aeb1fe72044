"""`bench recovery`, without a fault: what a refit between hosts costs beside its bare parts, and what it moves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastic_reshard.bench import rank as on
from elastic_reshard.bench.play import Play, distinct
from elastic_reshard.bench.rows import Row
from elastic_reshard.bench.stage import Stage

__all__ = ["warm"]

_BOUND_MS = 50.0


def warm(stage: Stage, play: Play, repeats: int, say: Callable[[str], None]) -> tuple[list[Row], float]:
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
        host: sum(said.received for said in doc.movers.values() if said.transfer.startswith(f"{publication}:"))
        for host, doc in stage.client.hosts().items()
    }


def _bytes(landed: Mapping[str, int], play: Play) -> Row:
    """Exactly what each engine's host needs, and nothing for the trainers'."""
    needed = dict.fromkeys(play.trainer.hosts, 0)
    for engine in play.engines:
        needed[engine.hosts[0]] = distinct(engine.layout, range(len(engine)))
    in_all = int(play.publication().metrics["bytes_network"])
    return Row(
        "network bytes into each host, beyond the distinct bytes it needs",
        float(sum(abs(landed.get(host, 0) - n) for host, n in needed.items())), "bytes", "0", None,
        dict(landed) == needed and in_all == sum(needed.values()), {"landed": dict(landed), "needed": needed},
    )  # fmt: skip
