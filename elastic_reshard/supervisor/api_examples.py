"""Examples for the description of the HTTP interface: one job with a trainer gang and two engines, at one moment."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from elastic_reshard.protocol.base import Role
from elastic_reshard.protocol.deadlines import Deadlines, Policies
from elastic_reshard.protocol.docs import (
    GroupDoc,
    GroupState,
    LandingDoc,
    MemberDoc,
    MemberState,
    PartyDoc,
    PublicationDoc,
    PublicationState,
    SourceDoc,
    TransferDoc,
    TransferState,
)
from elastic_reshard.protocol.ids import PROTOCOL
from elastic_reshard.protocol.messages import MoverSaid
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor.answers import (
    AbandonFor,
    Departure,
    DrainWithin,
    GroupProgress,
    Growth,
    GrowTo,
    Health,
    HostDoc,
    HostHealth,
    LeaveWithin,
    PoliciesDoc,
    ProgressDoc,
    Ready,
    ShrinkBy,
)
from elastic_reshard.supervisor.record import EventPage, EventRecord

__all__ = ["NAMES", "Example", "examples"]

_T, _E = "trainer-0@00c0ffee00c0ffee", "engine-3-0@0badcafe0badcafe"
_LAYOUT, _FRAGMENT = "5f1d7a84db00d2fce00b31a7fc73224f", "2d06800538d394c2a1b2c3d4e5f60718"
_P, _X = "p7.1", "p7.1:1.12"
# Of what is in paths.
NAMES: Final = {
    "member": _E, "group": "engine-3", "host": "node-7", "publication": _P, "transfer": _X, "name": "two-more",
    "fragment": _FRAGMENT, "layout": _LAYOUT,
}  # fmt: skip


class Example(NamedTuple):
    """What is sent, None for nothing; and what is answered."""

    sent: Any
    answered: Any


def _plain(value: BaseModel) -> Any:
    return value.model_dump(mode="json")


def _member(name: str, group: str, role: Role, host: str, **more: Any) -> MemberDoc:
    return MemberDoc(
        id=name, group=group, rank=0, roles=frozenset({role}), host=host, **({"state": MemberState.LIVE} | more)
    )


def _group(name: str, member: str, role: Role, state: GroupState, **more: Any) -> GroupDoc:
    return GroupDoc(name=name, size=1, roles=frozenset({role}), members=(member,), whole=True, state=state, **more)


def _publication(**more: Any) -> PublicationDoc:
    wanted: dict[str, Any] = {
        "id": _P, "weight_version": 7, "label": "step-7", "extras": {}, "group": "trainer", "seq": 4294967303,
        "layout": _LAYOUT, "state": PublicationState.MOVING, "ranks": 1, "membership_epoch": 3,
        "sources": (SourceDoc(member=_T, rank=0, host="node-1", arena="ab" * 16, slot=1, generation=8),),
        "metrics": {"publish_stall": 0.056, "published_bytes": 1192099840.0},
    }  # fmt: skip
    return PublicationDoc(**(wanted | more))


def _transfer() -> TransferDoc:
    return TransferDoc(
        id=_X, publication=_P, epoch=3, state=TransferState.RUNNING, members=(_T, _E), hosts=("node-1", "node-7"),
        source=PartyDoc(group="trainer", layout=_LAYOUT, members=(0,)),
        destinations=(PartyDoc(group="engine-3", layout=_LAYOUT, members=(1,)),),
        landings=(LandingDoc(
            member=_E, group="engine-3", rank=0, size=1, host="node-7", layout=_LAYOUT, arena="cd" * 16, slot=0,
        ),),
        cell=1 << 20, message=1 << 20, staging=64 << 20, plan="9c56cc51b374c3ba189210d5b6d4bf57",
    )  # fmt: skip


def _reading() -> dict[str, Any]:
    members = {_T: _member(_T, "trainer", "source", "node-1"), _E: _member(_E, "engine-3", "destination", "node-7")}
    groups = {
        "trainer": _group("trainer", _T, "source", GroupState.STALE, source_layout=_LAYOUT),
        "engine-3": _group(
            "engine-3", _E, "destination", GroupState.LANDING, destination_layout=_LAYOUT, serving=6,
            serving_publication="p6.1",
        ),
    }  # fmt: skip
    publication, transfer = _publication(), _transfer()
    view = Told(
        term=1, instance="feedfacefeedface", base=0, revision=42, membership_epoch=3, committed="p6.1", members=dict(members),
        groups=dict(groups), publications={_P: publication}, transfers={_X: transfer},
    )  # fmt: skip
    said = MoverSaid(member=_E, mover="ab12", transfer=_X, state="running", cells=300, received=314572800)
    hosts = {
        "node-1": HostDoc(connected=True, members={_T: MemberState.LIVE}),
        "node-7": HostDoc(connected=True, members={_E: MemberState.LIVE}, movers={_E: said}),
    }
    progress = ProgressDoc(
        publication=_P, weight_version=7, label="step-7", state=PublicationState.MOVING, seconds=0.21, transfer=_X,
        epoch=3, cells=300, of=1137, nbytes=314572800,
        groups={"engine-3": GroupProgress(state=GroupState.LANDING, serving=6, cells=300, of=1137, nbytes=314572800)},
    )  # fmt: skip
    event = EventRecord(
        number=17, at=3.1, time="2026-11-29T12:00:00.000+00:00", event="publication.moving", fields={"publication": _P}
    )
    health = Health(
        status="ok", job="job", term=1, instance="feedfacefeedface", protocol=PROTOCOL, revision=42, cell=1 << 20,
        hosts={"node-7": HostHealth(connected=True)}, deadlines=Deadlines().to_data(), verify="sampled",
    )  # fmt: skip
    plain: dict[str, Any] = {
        "health": _plain(health), "ready": _plain(Ready(ready=True)), "view": _plain(view),
        "events": _plain(EventPage(events=[event], next=17, dropped=0, instance="feedfacefeedface")),
        "members": {k: _plain(m) for k, m in members.items()}, "member": _plain(members[_E]),
        "groups": {k: _plain(g) for k, g in groups.items()}, "group": _plain(groups["engine-3"]),
        "hosts": {k: _plain(h) for k, h in hosts.items()}, "publications": {_P: _plain(publication)},
        "publication": _plain(publication), "progress": _plain(progress), "all_progress": {_P: _plain(progress)},
        "transfers": {_X: _plain(transfer)}, "transfer": _plain(transfer), "policies": asdict(Policies()),
        "get_fragment": _FRAGMENT_BODY, "get_layout": _LAYOUT_BODY,
    }  # fmt: skip
    return plain


_FRAGMENT_BODY: Final = {"whole": False, "tensors": {"lm_head.weight": {"plain": [[151936, 1024], "bfloat16"]}}}
_LAYOUT_BODY: Final = {
    "tensors": {"lm_head.weight": {"shape": [151936, 1024], "dtype": "bfloat16"}},
    "correspondences": None,
}


def _acting() -> dict[str, Example]:
    leaving = _member(_E, "engine-3", "destination", "node-7", leave_within=30.0)
    parting = Departure(done=False, members={_E: leaving}, missing=(_E,))
    growth = Growth(name="two-more", groups=2, members=0, left=41.5, done=False, ready=("engine-4",), missing=1)
    taken_back = growth.model_copy(update={"left": 0.0, "done": True, "missing": 2, "cancelled": True})
    policies = PoliciesDoc(**asdict(Policies()))
    other = policies.model_copy(update={"late_after": 10.0})
    abandoned = _publication(state=PublicationState.ABANDONED, reason="not this one")
    leave = _plain(LeaveWithin())
    return {
        "growth": Example(None, _plain(growth)),
        "grows": Example(None, {"two-more": _plain(growth)}),
        "grow": Example(_plain(GrowTo(groups=2, name="two-more")), _plain(growth)),
        "cancel": Example(None, _plain(taken_back)),
        "leave_member": Example(leave, _plain(leaving)),
        "leave_group": Example(leave, {_E: _plain(leaving)}),
        "shrink": Example(_plain(ShrinkBy(groups=("engine-3",))), _plain(parting)),
        "drain": Example(_plain(DrainWithin()), _plain(parting)),
        "undrain": Example(None, _plain(HostDoc(connected=True, members={_E: MemberState.LIVE}))),
        "set_policies": Example(_plain(other), _plain(other)),
        "change_policies": Example({"late_after": 10.0}, _plain(other)),
        "reset_policies": Example(None, _plain(policies)),
        "abandon": Example(_plain(AbandonFor(reason="not this one")), _plain(abandoned)),
        "put_fragment": Example(_FRAGMENT_BODY, None),
    }


@cache
def examples() -> dict[str, Example]:
    """By operation id."""
    return {**{name: Example(None, found) for name, found in _reading().items()}, **_acting()}
