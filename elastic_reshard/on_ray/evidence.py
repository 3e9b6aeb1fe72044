"""What Ray says of nodes and actors, as evidence for the supervisor. Pure.

Level, not edge: all that Ray says now is compared with all that the supervisor says now. An actor that cannot be reached is no
evidence of anything: only Ray's table of actors counts, and there only DEAD, or a later restart than the member's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from elastic_reshard.protocol.docs import MemberDoc, MemberState

__all__ = ["Drain", "LeaveOut", "Lift", "Notice", "Seen", "Worker", "judge", "lives"]

_PRESENT: Final = (MemberState.JOINING, MemberState.LIVE, MemberState.LEAVING)
_LONGEST: Final = 86_400.0  # seconds, for a drain without a deadline


@dataclass(frozen=True, slots=True)
class Worker:
    """A member inside an actor: which one, of which restart, on which node. actor: "" for a driver or task."""

    node: str
    actor: str = ""
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What Ray says. nodes: whether each lives. draining: seconds left, None without a deadline. actors: (state, restarts)."""

    nodes: Mapping[str, bool] = field(default_factory=dict)
    draining: Mapping[str, float | None] = field(default_factory=dict)
    actors: Mapping[str, tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drain:
    """A host is to be emptied within so many seconds."""

    host: str
    within: float


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """A member is there no more."""

    member: str
    why: str


@dataclass(frozen=True, slots=True)
class Lift:
    """A drained host has gone for good: Ray gives no node the same name again, so nobody need remember it."""

    host: str


Notice = Drain | LeaveOut | Lift


def lives(worker: Worker, seen: Seen) -> bool:
    """Whether nothing that Ray says speaks against it."""
    return not _end(worker, seen)


def _end(worker: Worker, seen: Seen) -> str:
    """Why it is there no more; "" as far as is known it is."""
    if not seen.nodes.get(worker.node, True):
        return f"Ray node {worker.node} is dead"
    state, restarts = seen.actors.get(worker.actor, ("ALIVE", worker.restarts))
    if state == "DEAD":
        return f"Ray actor {worker.actor} is dead"
    if restarts > worker.restarts or (state == "RESTARTING" and restarts == worker.restarts):
        return f"Ray actor {worker.actor} was restarted since"
    return ""


def judge(
    seen: Seen,
    workers: Mapping[str, Worker],
    members: Mapping[str, MemberDoc],
    drained: Mapping[str, float | None],
    margin: float,
    labels: Mapping[str, str] | None = None,
) -> list[Notice]:
    """What the supervisor is to be told. workers: by member id. drained: every host it knows, with the seconds that it
    gave, None if it is not drained. margin: seconds that a node keeps for its own end, after its members' time. labels: of
    nodes, the usual host label of each."""
    notices: list[Notice] = []
    on: dict[str, set[str]] = {}
    for name, worker in workers.items():
        if name in members:
            on.setdefault(worker.node, set()).add(members[name].host)
    for node, left in seen.draining.items():
        for host in sorted(on.get(node, ())):
            if seen.nodes.get(node, True) and drained.get(host, 0.0) is None:
                within = _LONGEST if left is None else max(0.0, left - min(margin, left / 2))
                notices.append(Drain(host, within))
    for name, worker in workers.items():
        doc = members.get(name)
        if doc is not None and doc.state in _PRESENT and (why := _end(worker, seen)):
            notices.append(LeaveOut(name, why))
    used = {doc.host for doc in members.values() if doc.state in _PRESENT}
    for node, host in (labels or {}).items():
        if not seen.nodes.get(node, True) and drained.get(host) is not None and host not in used:
            notices.append(Lift(host))
    return notices
