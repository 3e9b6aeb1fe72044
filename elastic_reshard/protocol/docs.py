"""The documents of the view: members, groups and publications as the supervisor tells them and journals them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from elastic_reshard.protocol.base import Count, Message, Name, Role, Text

__all__ = [
    "EraDoc",
    "GroupDoc",
    "GroupState",
    "LandedDoc",
    "LandingDoc",
    "MemberDoc",
    "MemberState",
    "PartyDoc",
    "Placed",
    "PublicationDoc",
    "PublicationState",
    "SourceDoc",
    "TicketDoc",
    "TransferDoc",
    "TransferState",
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


class TransferState(StrEnum):
    """Of one transfer, which is one epoch's attempt to land what is missing. It leaves the view when it is over."""

    FORMING = "forming"  # movers plan, and give the values by which they will meet
    RUNNING = "running"  # all values are told: they form the communicator and move
    STOPPING = "stopping"  # planned: begin no further round, say which you have begun; then end after round `until`
    BREAKING = "breaking"  # leave all operations at once; who does not is condemned


class Placed(Message):
    """Something on a host. domain: its own within the host, "" where the host is one (`supervisor.domains`)."""

    host: Name
    domain: Text = ""

    @property
    def where(self) -> str:
        """Its domain: members of one can map each other's arenas."""
        return self.domain or self.host


class SourceDoc(Placed):
    """One slot of a publication: rank `rank` of the source group wrote it."""

    member: str
    rank: Count
    arena: str
    slot: Count
    generation: Count


class LandingDoc(Placed):
    """The slot of a landing arena in which a member, rank `rank` of `size`, lands or has landed its share of a publication's
    cells."""

    member: str
    group: Name
    rank: Count
    size: Count = 0
    layout: str
    arena: str
    slot: Count


class LandedDoc(Placed):
    """A domain that has every cell of a publication that these ranks of a destination layout need: in the landing slots of its
    members, or in source slots there. by: the members whose slots these are."""

    layout: str
    ranks: tuple[Count, ...]
    by: tuple[str, ...] = ()


class PublicationDoc(Message):
    """One version on its way. ranks: of its source group, of which `sources` may be some. landings: slots of landing arenas
    that hold some of it; landed: domains in which all has arrived."""

    id: str
    weight_version: Count
    label: str | None
    extras: dict[str, Any]
    group: Name
    seq: Count
    layout: str
    state: PublicationState
    sources: tuple[SourceDoc, ...]
    ranks: Count = 0
    reason: Text = ""
    membership_epoch: Count = 0
    metrics: dict[str, float] = {}
    landings: tuple[LandingDoc, ...] = ()
    landed: tuple[LandedDoc, ...] = ()


class PartyDoc(Message):
    """A group in a transfer: members[r] is the position, in the transfer's members, of rank r."""

    group: Name
    layout: str
    members: tuple[Count, ...]


class TransferDoc(Message):
    """Who moves what between domains in one epoch. The plan is a pure function of this document and the two kinds of
    layouts that it names; `plan` is its content id, and a mover whose own differs refuses before the first byte.

    members: all that the plan knows, in order; hosts: of each, its domain; machines: of each, its host, where a host has
    several domains (else the same, and empty). absent: positions of those that take no part.
    The communicator's ranks are the present ones in order. source: whose layout is the publication's; destinations: those
    that land, and those that hold landed cells. landings: where each present destination member lands. basis: what had
    landed before, by member (`protocol.bits`). cell, message, staging: bytes, of PlanOptions. values: by member, what each
    mover puts into the rendezvous: key to hex. until: the last round, when stopping. network: what carries the bytes ("gloo",
    or one that all present members have stated alike). paused: positions of members whose movers work only while those have
    their windows open; then nobody begins a round before the one before has landed.
    """

    id: str
    publication: str
    epoch: Count
    state: TransferState
    members: tuple[str, ...]
    hosts: tuple[Name, ...]
    absent: tuple[Count, ...] = ()
    source: PartyDoc
    destinations: tuple[PartyDoc, ...]
    landings: tuple[LandingDoc, ...]
    basis: dict[str, str] = {}
    cell: Count
    message: Count
    staging: Count
    verify: Literal["sampled", "full"] = "sampled"
    plan: str
    values: dict[str, dict[str, str]] = {}
    until: Count | None = None
    reason: Text = ""
    network: Name = "gloo"
    paused: tuple[Count, ...] = ()
    machines: tuple[Name, ...] = ()

    @property
    def seats(self) -> tuple[str, ...]:
        """Of each member, the host on which its mover runs."""
        return self.machines or self.hosts

    @property
    def present(self) -> tuple[str, ...]:
        """Members that take part, by their rank in the communicator."""
        if not self.absent:
            return self.members
        absent = frozenset(self.absent)
        return tuple(m for position, m in enumerate(self.members) if position not in absent)


class MemberDoc(Placed):
    """One incarnation. `leave_within`: seconds that it was given to leave when it was asked to; None if it was not. fabric: the
    NVLink fabric's "cluster/clique" that its GPU is in, "" for none: shown, no domain follows from it."""

    id: str
    group: Name
    rank: Count
    roles: frozenset[Role]
    state: MemberState
    reason: Text = ""
    leave_within: float | None = None
    fabric: Text = ""


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
    A group's older era may have one left that was not minted yet. mixed: some had published before others joined, or
    a call failed on some ranks only, so that counting alone does not say which publishes belong together: labels must."""

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
    renamed: bool = False  # its destination layout has correspondences of its own
    ticket: TicketDoc | None = None
    verdict: VerdictDoc | None = None
    reason: Text = ""
    refused: Text = ""  # why the fragments last stated cannot be served; "" when they can

    def seats(self, member: str, rank: int) -> bool:
        """Whether this incarnation was seated last at this rank. Who is refused for its group's size may name one beyond it."""
        return rank < len(self.members) and self.members[rank] == member
