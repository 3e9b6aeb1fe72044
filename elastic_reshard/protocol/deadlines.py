"""All deadlines in one place, checked when they are made. Seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from elastic_reshard.errors import ProtocolError

__all__ = ["NETWORKS", "Deadlines", "Policies"]

# "pretend": grouped sends over gloo between members whose devices are pretended, for machines without a GPU.
NETWORKS: Final = ("auto", "gloo", "nccl", "nccl_m2n", "pretend", "pretend_m2n")


def _endless(values: Mapping[str, Any]) -> list[str]:
    """JSON has no such numbers: they would be told and journaled as null, which nobody can read."""
    return [
        f"{name} must be finite, not {value}: a large number will do"
        for name, value in values.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long silence means nothing. Monotonic clocks only, the receiver's.

    beat, evict: a host's beats to the supervisor, and the silence after which its members are given up.
    watchdog_beat, watchdog_silent: a watchdog's beats to its members, and the silence after which they replace it.
    mover_beat, mover_silent: a mover's signs of life to its watchdog, and the silence after which it is condemned.
    form: from a transfer's beginning until all movers have planned and met. abort: until a mover is out of all operations
    when an epoch is broken; then it is condemned. abort_nccl: the same over NCCL, whose own abort takes 0.5 to 0.8 s.
    stall: no cell completed for so long, and the time that `min_rate` (policies) gives one: the epoch is broken.
    connect: one attempt to connect. proof_of_death: SIGKILL until the end is seen.
    orphan_hold: how long what a dead process left is kept for somebody who may need it.
    reregister: how long a restarted supervisor judges nobody.
    forget: how long nothing is heard of the hosts of a whole group, until the group is forgotten if nothing in its arenas is
    needed. Who comes back later joins anew, as it would have to in any case.
    drain: how long the members of a host have to leave when its watchdog gets SIGTERM; Kubernetes' own grace is 30 s.
    """

    beat: float = 1.0
    evict: float = 5.0
    watchdog_beat: float = 0.25
    watchdog_silent: float = 2.0
    mover_beat: float = 0.25
    mover_silent: float = 1.5
    form: float = 10.0
    abort: float = 0.5
    abort_nccl: float = 1.0
    stall: float = 5.0
    connect: float = 5.0
    proof_of_death: float = 2.0
    orphan_hold: float = 30.0
    reregister: float = 6.0
    forget: float = 600.0
    drain: float = 25.0

    def __post_init__(self) -> None:
        faults = _endless(asdict(self))
        faults += [f"{f.name} must be positive" for f in fields(self) if getattr(self, f.name) <= 0]
        if self.evict < 3 * self.beat:
            faults.append(f"evict ({self.evict}) must be at least 3 beats ({self.beat}): two may be lost")
        if self.watchdog_silent < 4 * self.watchdog_beat:
            faults.append(f"watchdog_silent ({self.watchdog_silent}) must be at least 4 beats ({self.watchdog_beat})")
        if self.mover_silent < 4 * self.mover_beat:
            faults.append(f"mover_silent ({self.mover_silent}) must be at least 4 beats ({self.mover_beat})")
        if self.stall < 2 * self.mover_silent:
            faults.append(
                f"stall ({self.stall}) must be at least twice mover_silent ({self.mover_silent}), which finds a frozen mover"
            )
        if self.reregister < self.evict:
            faults.append(f"reregister ({self.reregister}) must not be less than evict ({self.evict})")
        if self.forget < self.evict:
            faults.append(f"forget ({self.forget}) must not be less than evict ({self.evict})")
        if faults:
            raise ProtocolError("deadlines that cannot work: " + "; ".join(faults))

    def abort_over(self, network: str | None) -> float:
        """`abort`, or `abort_nccl`; None: over what is not known, so the longer one."""
        if network is None:
            return max(self.abort, self.abort_nccl)
        return self.abort_nccl if network.startswith("nccl") else self.abort

    def to_data(self) -> dict[str, float]:
        """JSON-ready."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Policies:
    """What the supervisor decides by; may be changed while it runs.

    min_groups: destination groups that must have a version before it is committed.
    late_after: seconds after its beginning from which a publication waits for nobody else, nor a publish for an install.
    max_lag: a publication begins only when no group that is not late serves a version more than so many behind; None: any.
    gather_window: seconds from a publish's first rank until those that are ready, if they cover the model, are enough.
    min_rate: bytes per second below which a mover counts as stuck, not slow: beside `stall` a cell has its time at that rate,
    or, if that is longer, what is under way before the first cell lands at 30 MB/s (over NCCL 128 MiB).
    fruitless: epochs in a row without a new cell, after which a transfer is given up.
    install: most seconds that one install of a group may take, from ticket to verdict.
    network: what carries bytes between hosts. "auto": what uses the members' devices, where all that take part have stated one
    with the same config, else "gloo". Another one by name: that one, as "auto" does it, and no other device network.
    """

    min_groups: int = 1
    late_after: float = 30.0
    max_lag: int | None = None
    gather_window: float = 5.0
    install: float = 120.0
    min_rate: float = float(1 << 20)
    fruitless: int = 4
    network: str = "auto"

    def __post_init__(self) -> None:
        faults = _endless(asdict(self))
        faults += [
            f"{name} must be a whole number, not {value}"
            for name in ("min_groups", "max_lag", "fruitless")
            if not isinstance(value := getattr(self, name), int | None)
        ]
        faults += [
            f"{name} must not be negative"
            for name in ("min_groups", "late_after", "gather_window")
            if getattr(self, name) < 0
        ]
        faults += [
            f"{name} must be positive" for name in ("install", "min_rate", "fruitless") if getattr(self, name) <= 0
        ]
        if self.max_lag is not None and self.max_lag < 0:
            faults.append("max_lag must be None or not negative")
        if self.network not in NETWORKS:
            faults.append(f"network must be one of {', '.join(NETWORKS)}, not {self.network!r}")
        if faults:
            raise ProtocolError("policies that cannot work: " + "; ".join(faults))
