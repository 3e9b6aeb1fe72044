"""What is asked of the HTTP interface and what it answers, beside the view's own documents. The client reads the same."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from pydantic import BaseModel, Field, FiniteFloat, model_validator

from elastic_reshard.protocol.base import Message, Name
from elastic_reshard.protocol.docs import GroupState, MemberDoc, MemberState, PublicationState
from elastic_reshard.protocol.messages import MoverSaid

__all__ = [
    "AbandonFor",
    "Departure",
    "DrainWithin",
    "Fault",
    "GroupProgress",
    "GrowTo",
    "Growth",
    "Health",
    "HealthData",
    "HostDoc",
    "HostHealth",
    "LeaveWithin",
    "PoliciesChange",
    "PoliciesDoc",
    "Problem",
    "ProgressDoc",
    "Ready",
    "ShrinkBy",
]

Seconds = Annotated[FiniteFloat, Field(ge=0, le=86_400)]
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


class HealthData(TypedDict, total=False):
    """`Health` as plain data."""

    status: Literal["ok", "recovering"]
    job: str
    term: int
    instance: str
    protocol: int
    revision: int
    hosts: dict[str, dict[str, int | bool]]
    deadlines: dict[str, float]
    cell: int
    verify: Literal["sampled", "full"]


class Ready(BaseModel):
    """Whether the supervisor decides. While it does not, the answer is a problem document with status 503 that says why."""

    ready: bool


class HostDoc(BaseModel):
    """A host. members: those that it has, by id; movers: what was last heard of the movers of these. drained: the seconds
    that its members are given to leave, those that join later too; None if it is not drained. domains: those that its members
    are in. fabric: cliques of an NVLink fabric that they are in ("cluster/clique"), each with all hosts in it: only shown, as
    a domain is within one host."""

    connected: bool
    domains: list[str] = []
    fabric: dict[str, list[str]] = {}
    members: dict[str, MemberState] = {}
    movers: dict[str, MoverSaid] = {}
    drained: float | None = None


class GroupProgress(BaseModel):
    """Of one destination group towards a publication. cells: those that have landed for it, of `of` in all, as far as the
    movers of the running transfer have said (0: nothing is to land, or not yet known); nbytes: received for it by that
    transfer. Bytes that lie in the group's own domain already never land."""

    state: GroupState
    serving: int
    cells: int = 0
    of: int = 0
    nbytes: int = 0


class ProgressDoc(BaseModel):
    """How far a publication is. transfer: the one that moves it now, "" for none; seconds: since it began, by this
    supervisor's clock; groups: destination groups by name."""

    publication: str
    weight_version: int
    label: str | None
    state: PublicationState
    seconds: float
    transfer: str = ""
    epoch: int = 0
    cells: int = 0
    of: int = 0
    nbytes: int = 0
    groups: dict[str, GroupProgress]


class PoliciesDoc(Message):
    """All policies, as `Policies`. A change holds over restarts, until it is taken back by DELETE /v1/policies."""

    min_groups: int
    late_after: FiniteFloat
    max_lag: int | None
    gather_window: FiniteFloat
    install: FiniteFloat
    min_rate: FiniteFloat
    fruitless: int
    network: str = "auto"


class PoliciesChange(Message):
    """Some policies; those that are not named stay."""

    min_groups: int = 1
    late_after: FiniteFloat = 30.0
    max_lag: int | None = None
    gather_window: FiniteFloat = 5.0
    install: FiniteFloat = 120.0
    min_rate: FiniteFloat = float(1 << 20)
    fruitless: int = 4
    network: str = "auto"


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
    cancelled: it was taken back; who waited came in as if nobody had asked.

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
    cancelled: bool = False


class AbandonFor(Message):
    """Why a publication is given up."""

    reason: Annotated[str, Field(max_length=1024)] = "abandoned by request"


class Fault(BaseModel):
    """One thing that is wrong with a call. where: as in "body.within"."""

    where: str
    what: str


class Problem(BaseModel):
    """A problem document (RFC 9457). detail: what happened, to whom; remedy: what to do; errors: everything that is wrong with
    the call, where that can be said piece by piece."""

    type: str
    title: str
    status: int
    detail: str
    remedy: str
    errors: list[Fault] | None = None
