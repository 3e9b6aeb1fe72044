"""What the supervisor's state machine is told, and what it answers. Plain data; time comes beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.protocol.messages import Hello, LedgerSaid, MoverSaid, Statement
from elastic_reshard.protocol.view import Told

__all__ = [
    "Abandon",
    "Beaten",
    "CancelGrow",
    "ChangePolicies",
    "Cut",
    "DrainHost",
    "Effects",
    "Event",
    "Examine",
    "Examined",
    "Greeted",
    "Grow",
    "Happened",
    "Leave",
    "Ledgered",
    "Match",
    "Matched",
    "MemberEnded",
    "Moved",
    "SetPolicies",
    "Spoken",
    "Tick",
    "UndrainHost",
]


@dataclass(frozen=True, slots=True)
class Greeted:
    """A host's watchdog has connected and said all it knows."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class Spoken:
    """A statement of a member, by its host's watchdog."""

    host: str
    statement: Statement


@dataclass(frozen=True, slots=True)
class MemberEnded:
    """A host's watchdog saw a member's end. arenas_kept: the watchdog holds its arenas."""

    host: str
    member: str
    arenas_kept: bool
    how: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """Where a member's mover is, by its host's watchdog."""

    host: str
    said: MoverSaid


@dataclass(frozen=True, slots=True)
class Ledgered:
    """What a landing slot holds, by its host's watchdog."""

    host: str
    said: LedgerSaid


@dataclass(frozen=True, slots=True)
class Beaten:
    """A sign of life of a host."""

    host: str


@dataclass(frozen=True, slots=True)
class Cut:
    """A host's connection is gone; the host may come back."""

    host: str


@dataclass(frozen=True, slots=True)
class Examined:
    """The answer to Examine: the joined layouts, or `fault` with every violation."""

    group: str
    fragments: tuple[tuple[str | None, str | None], ...]
    source_layout: str | None
    destination_layout: str | None
    fault: str = ""
    renamed: bool = False  # the destination layout has correspondences of its own


@dataclass(frozen=True, slots=True)
class Matched:
    """The answer to Match: "" if the source layout serves the destination layout, else every violation."""

    source_layout: str
    destination_layout: str
    fault: str


@dataclass(frozen=True, slots=True)
class Leave:
    """A person asks members to leave within a time: by id, all of a group or of several, or all of a host (a drain).
    force: they are left out at once, whatever they are doing. "" names nothing."""

    members: tuple[str, ...] = ()
    group: str = ""
    within: float = 30.0
    host: str = ""
    groups: tuple[str, ...] = ()
    force: bool = False


@dataclass(frozen=True, slots=True)
class Grow:
    """A person wants one change of the membership instead of many: who joins is admitted when so many whole groups, or so
    many members, are there, or `within` seconds have passed. name: the request; the same one again changes nothing."""

    name: str
    groups: int = 0
    members: int = 0
    within: float = 60.0


@dataclass(frozen=True, slots=True)
class CancelGrow:
    """A person takes a grow back: who waits comes in as if nobody had asked for it."""

    name: str


@dataclass(frozen=True, slots=True)
class DrainHost:
    """A person wants a host emptied: its members are asked to leave within a time, and so is whoever joins there until that
    is lifted."""

    host: str
    within: float = 30.0


@dataclass(frozen=True, slots=True)
class UndrainHost:
    """A person lifts a drain."""

    host: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """A person gives up a publication that is not committed."""

    publication: str
    reason: str = "abandoned by request"


@dataclass(frozen=True, slots=True)
class SetPolicies:
    """New policies. None: those that the supervisor was started with."""

    policies: Policies | None


@dataclass(frozen=True, slots=True)
class ChangePolicies:
    """Some policies, by name; the others stay. Each is one that `Policies` takes."""

    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Greeted
    | Spoken
    | MemberEnded
    | Moved
    | Ledgered
    | Beaten
    | Cut
    | Examined
    | Matched
    | Leave
    | Grow
    | CancelGrow
    | DrainHost
    | UndrainHost
    | Abandon
    | SetPolicies
    | ChangePolicies
    | Tick
)


@dataclass(frozen=True, slots=True)
class Examine:
    """Wanted: the layouts that a group's fragments (source, destination; by rank) make together."""

    group: str
    fragments: tuple[tuple[str | None, str | None], ...]


@dataclass(frozen=True, slots=True)
class Match:
    """Wanted: whether a source layout serves a destination layout."""

    source_layout: str
    destination_layout: str


@dataclass(frozen=True, slots=True)
class Happened:
    """One log event: a stable name and fields."""

    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Effects:
    """What is to be done, in this order: journal, then tell.

    told: what changed in the view; None if nothing did. durable: it must be on disk before anyone is told.
    heard: per host, the numbers of statements that were taken in (told after the view). snapshots: hosts that need the
    whole view (before anything else). silent: hosts that were given up: hang up, so that they say Hello again.
    examine, match: questions whose answers come back as events. settings: what people have asked for has changed, and must be
    on disk before anyone is told.
    """

    told: Told | None = None
    durable: bool = False
    heard: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    snapshots: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    examine: tuple[Examine, ...] = ()
    match: tuple[Match, ...] = ()
    happened: tuple[Happened, ...] = ()
    settings: bool = False
