"""What plans of groups are made of: how groups are, what happens to them, and what is to be done about it. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

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
]


class Phase(StrEnum):
    """Of one group; `plan` says what follows on what."""

    PAUSED = "paused"
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    DONE = "done"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds, except failures. failures: deaths of a group within `window` after which it is given up. pause: before the first
    start after a death; it doubles with each, up to `longest`. start_within: from when a group has room until it must be
    whole, and that it may run on when a member was put out. leave_within: that its members have to leave when it is to go.
    blind: that Ray's control service may be out of sight before the groups are kept no longer. Ray itself ends a process that
    cannot connect to it for RAY_gcs_rpc_server_reconnect_timeout_s (60 s, unless the whole cluster is started with another)."""

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
    nodes its ranks were). unwanted: it is to go, and that is to be asked of the supervisor. held: in this attempt a grow has
    let it wait for others. broken: seconds in which it was seen to run without being part of the job any more."""

    name: str
    fleet: str
    ranks: int
    phase: Phase = Phase.PAUSED
    attempt: int = 0
    since: float = 0.0
    until: float = 0.0
    ended: frozenset[int] = frozenset()
    move: bool = False
    failures: tuple[tuple[float, frozenset[str]], ...] = ()
    unwanted: bool = False
    held: bool = False
    broken: float = 0.0
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
    """All groups by name, which indices were given away, how well Ray is seen, which grows were heard of, which nodes are dead,
    and when the supervisor was heard last."""

    sizes: Mapping[str, Size]
    runs: Mapping[str, Run]
    indices: Mapping[str, int]
    sight: Sight
    grows: frozenset[str] = frozenset()
    dead: frozenset[str] = frozenset()
    heard: float = 0.0


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
    """A worker has ended. fault: "" if it returned. nodes: where the ranks of its attempt are or were: what one of them does to
    the others is seen before Ray knows its end. drained: it is to be elsewhere. alone: the fault was that no supervisor
    answered; late: that something did not come in time."""

    group: str
    attempt: int
    rank: int
    fault: str = ""
    nodes: frozenset[str] = frozenset()
    drained: bool = False
    alone: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class Viewed:
    """What the supervisor says. whole: groups. asked: of groups some of whose members were asked to leave, whether all were and
    none because of its host: it is to go for good. grow: (name, groups or 0, members or 0) of one that waits, or None. held:
    groups that are complete, and wait for the others of a grow. broken: that will not be whole again by themselves."""

    whole: frozenset[str]
    asked: Mapping[str, bool] = field(default_factory=dict)
    grow: tuple[str, int, int] | None = None
    held: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()


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
