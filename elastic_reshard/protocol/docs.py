"""The documents of the view: members, groups and publications as the supervisor tells them and journals them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from elastic_reshard.protocol.base import Count, Message, Name, Role, Text

__all__ = [
    "EraDoc",
    "GroupDoc",
    "GroupState",
    "MemberDoc",
    "MemberState",
    "PublicationDoc",
    "PublicationState",
    "SourceDoc",
    "TicketDoc",
    "VerdictDoc",
]


class MemberState(StrEnum):
    """Of one incarnation."""

    JOINING = "joining"  # stated, but its group is not whole or not examined yet
    LIVE = "live"  # takes part
    ORPHANED = "orphaned"  # its process is gone or has left; its arenas still serve
    LEAVING = "leaving"  # asked to leave, or leaving by itself
    LOST = "lost"  # gone, with everything it held
    FORFEIT = "forfeit"  # no proof of death: nobody reuses its arenas
    REFUSED = "refused"  # never took part; `reason` says why


class GroupState(StrEnum):
    """Of a destination group towards the newest publication that has begun."""

    STALE = "stale"  # has not got it
    LANDING = "landing"  # it is on its way
    COMPLETE = "complete"  # every byte is in the group's domain
    INSTALLING = "installing"  # a ticket is out
    CURRENT = "current"  # every rank has installed it and reported
    PARTIAL = "partial"  # an install broke off: repeat it whole, do not serve
    LEFT_BEHIND = "left_behind"  # the others went on without it


class PublicationState(StrEnum):
    """Of one publication. Only COMMITTED may be installed."""

    MOVING = "moving"
    COMMITTED = "committed"
    RELEASED = "released"  # was committed; a newer one took its place and its slots are free
    ABANDONED = "abandoned"  # never committed; its slots are free


class SourceDoc(Message):
    """One slot of a publication: rank `rank` of the source group wrote it."""

    member: str
    rank: Count
    host: Name
    arena: str
    slot: Count
    generation: Count


class PublicationDoc(Message):
    """One version on its way. `groups`: how far each destination group was when it last changed."""

    id: str
    weight_version: Count
    label: str | None
    extras: dict[str, Any]
    group: Name
    seq: Count
    layout: str
    state: PublicationState
    sources: tuple[SourceDoc, ...]
    reason: Text = ""
    membership_epoch: Count = 0
    metrics: dict[str, float] = {}


class MemberDoc(Message):
    """One incarnation. `leave_within`: seconds that it was given to leave when it was asked to; None if it was not."""

    id: str
    group: Name
    rank: Count
    roles: frozenset[Role]
    host: Name
    state: MemberState
    reason: Text = ""
    leave_within: float | None = None


class TicketDoc(Message):
    """Permission for a whole group to install one publication once. asks: the install call of each member it answers."""

    id: str
    publication: str
    weight_version: Count
    attempt: Count
    asks: dict[str, Count]
    within: float


class VerdictDoc(Message):
    """How the asks of a group were answered last. "nothing": there is nothing newer than what it serves (or at all)."""

    ticket: str
    verdict: Literal["current", "partial", "nothing"]
    weight_version: Count
    publication: str
    asks: dict[str, Count]
    reason: Text = ""
    members: tuple[str, ...] = ()


class EraDoc(Message):
    """The publishes of one set of incarnations in one layout: those numbered above `start`, whose upper bits count the sets.
    A group's older era may have one left that was not minted yet. mixed: some had published before others joined, so that
    counting alone does not say which publishes belong together: labels must."""

    members: tuple[str, ...]
    start: Count
    layout: str
    fragments: tuple[tuple[str | None, str | None], ...]
    mixed: bool = False


class GroupDoc(Message):
    """A group. members: the incarnation last seated at each rank, "" for none. whole: all of them are LIVE and examined.

    source_layout, destination_layout: content ids (GET /v1/layouts/ID), None before the group was first examined.
    serving: the version that all ranks hold by verdict, 0 for none. floor: publishes up to this seq are minted, or never
    will be. count_from: from where publishes are counted since the incarnations last changed; its upper bits count those
    changes. fragments: per rank, what the layouts were made of. eras: whose publishes may still be minted, oldest first.
    """

    name: Name
    size: Count
    roles: frozenset[Role]
    members: tuple[str, ...]
    whole: bool
    state: GroupState
    source_layout: str | None = None
    destination_layout: str | None = None
    fragments: tuple[tuple[str | None, str | None], ...] = ()
    eras: tuple[EraDoc, ...] = ()
    serving: Count = 0
    serving_publication: str = ""
    floor: Count = 0
    count_from: Count = 0
    ticket: TicketDoc | None = None
    verdict: VerdictDoc | None = None
    reason: Text = ""
    refused: Text = ""  # why the fragments last stated cannot be served; "" when they can
