"""What is asked of the HTTP interface and what it answers, beside the view's own documents. The client reads the same."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from elastic_reshard.protocol.base import Message, Name
from elastic_reshard.protocol.docs import MemberDoc, MemberState
from elastic_reshard.protocol.messages import MoverSaid

__all__ = [
    "AbandonFor",
    "Departure",
    "DrainWithin",
    "GrowTo",
    "Growth",
    "Health",
    "HostDoc",
    "HostHealth",
    "LeaveWithin",
    "PoliciesDoc",
    "Problem",
    "ShrinkBy",
]

Seconds = Annotated[float, Field(ge=0, le=86_400)]
Many = Annotated[int, Field(ge=0, le=1 << 20)]


class HostHealth(BaseModel):
    """A host's connection. waiting: bytes that wait for it to read; overflows: how often it got a snapshot instead."""

    connected: bool
    waiting: int = 0
    overflows: int = 0


class Health(BaseModel):
    """Without the token: the status alone. cell: bytes; verify: how landed cells are checked."""

    status: Literal["ok", "recovering"]
    job: str | None = None
    term: int | None = None
    instance: str | None = None
    protocol: int | None = None
    revision: int | None = None
    hosts: dict[str, HostHealth] | None = None
    deadlines: dict[str, float] | None = None
    cell: int | None = None
    verify: Literal["sampled", "full"] | None = None


class HostDoc(BaseModel):
    """A host. members: those that it has, by id; movers: what was last heard of the movers of these."""

    connected: bool
    members: dict[str, MemberState] = {}
    movers: dict[str, MoverSaid] = {}


class PoliciesDoc(Message):
    """All policies, as `Policies`. A change holds until the supervisor's next start."""

    min_groups: int
    late_after: float
    max_lag: int | None
    gather_window: float
    install: float
    min_rate: float
    fruitless: int


class LeaveWithin(Message):
    """Seconds that members have to leave by themselves. force: none, they are left out at once."""

    within: Seconds = 30.0
    force: bool = False


class DrainWithin(Message):
    """Seconds that the host's members have to leave by themselves."""

    within: Seconds = 30.0


class ShrinkBy(Message):
    """Groups that are to leave together, and the seconds that they have."""

    groups: Annotated[tuple[Name, ...], Field(min_length=1, max_length=4096)]
    within: Seconds = 30.0


class GrowTo(Message):
    """How many new groups, or new members, are to come in by one change. within: seconds after which those that are there
    come in. name: of this request; repeated, it is the same request, not another one."""

    groups: Many = 0
    members: Many = 0
    within: Seconds = 60.0
    name: Name | None = None

    @model_validator(mode="after")
    def _one(self) -> GrowTo:
        if (self.groups > 0) == (self.members > 0):
            raise ValueError("say groups or members, one of them and not both, at least 1")
        return self


class Departure(Message):
    """How far a drain or shrink is. members: whom it is about, as known last; missing: of these, who is still in.

    holding: who is out, while versions in its arenas are still needed; a host that goes now takes them with it."""

    done: bool
    members: dict[str, MemberDoc]
    missing: tuple[str, ...] = ()
    holding: tuple[str, ...] = ()


class Growth(Message):
    """How far a grow is. groups, members: what was asked for, the other is 0. left: seconds until it takes what is there.

    ready: groups that are whole and wait for the others; admitted: groups that came in by this change, once it is done.
    missing: how many of the groups or members that were asked for are not there (or did not come)."""

    name: Name
    groups: int
    members: int
    left: float
    done: bool
    ready: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    missing: int = 0


class AbandonFor(Message):
    """Why a publication is given up."""

    reason: Annotated[str, Field(max_length=1024)] = "abandoned by request"


class Problem(BaseModel):
    """A problem document."""

    type: str
    title: str
    status: int
    detail: str
