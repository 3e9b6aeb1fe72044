"""What the supervisor's state machine is told, and what it answers. Plain data; time comes beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.protocol.messages import Hello, Statement
from elastic_reshard.protocol.view import Told

__all__ = [
    "Abandon",
    "Beaten",
    "Cut",
    "Effects",
    "Event",
    "Examine",
    "Examined",
    "Greeted",
    "Happened",
    "Leave",
    "Match",
    "Matched",
    "MemberEnded",
    "SetPolicies",
    "Spoken",
    "Tick",
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


@dataclass(frozen=True, slots=True)
class Matched:
    """The answer to Match: "" if the source layout serves the destination layout, else every violation."""

    source_layout: str
    destination_layout: str
    fault: str


@dataclass(frozen=True, slots=True)
class Leave:
    """A person asks members to leave within a time. Empty names nothing; members by id, or all of a group."""

    members: tuple[str, ...] = ()
    group: str = ""
    within: float = 30.0


@dataclass(frozen=True, slots=True)
class Abandon:
    """A person gives up a publication that is not committed."""

    publication: str
    reason: str = "abandoned by request"


@dataclass(frozen=True, slots=True)
class SetPolicies:
    """New policies."""

    policies: Policies


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Greeted | Spoken | MemberEnded | Beaten | Cut | Examined | Matched | Leave | Abandon | SetPolicies | Tick


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
    whole view (before anything else). examine, match: questions whose answers come back as events.
    """

    told: Told | None = None
    durable: bool = False
    heard: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    snapshots: tuple[str, ...] = ()
    examine: tuple[Examine, ...] = ()
    match: tuple[Match, ...] = ()
    happened: tuple[Happened, ...] = ()
