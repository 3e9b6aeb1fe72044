"""What the supervisor says that concerns groups of workers, and what Ray says of a worker's end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from elastic_reshard.on_ray.events import Ended
from elastic_reshard.on_ray.evidence import Worker
from elastic_reshard.on_ray.fleet import Gone
from elastic_reshard.protocol.docs import GroupDoc, MemberDoc, MemberState
from elastic_reshard.supervisor.answers import Growth
from elastic_reshard.supervisor.client import SupervisorClient

__all__ = ["Looked", "asked_of", "broken_of", "end_of", "held_of", "look", "whole_of"]

_PRESENT: Final = (MemberState.JOINING, MemberState.LIVE, MemberState.LEAVING)
_OUT: Final = (MemberState.ORPHANED, MemberState.LOST)
_LEFT: Final = "left"  # the supervisor's reason for who left by itself


@dataclass(frozen=True, slots=True)
class Looked:
    """whole, asked, grow, held, broken: as `events.Viewed`. drained: hosts that are to be emptied."""

    whole: frozenset[str] = frozenset()
    asked: Mapping[str, bool] = field(default_factory=dict)
    grow: tuple[str, int, int] | None = None
    drained: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()


def look(client: SupervisorClient, workers: Mapping[str, Worker], crews: Mapping[str, Sequence[str]]) -> Looked:
    """Ask the supervisor. workers: of members, in which actors they run. crews: actors of each group's present attempt: whoever
    is of an earlier one does not count. Blocks for three calls. Raises SupervisorUnreachable."""
    view = client.view()
    members = {name: doc for name, doc in view.members.items() if doc is not None}
    groups = {name: doc for name, doc in view.groups.items() if doc is not None}
    drained = frozenset(host for host, doc in client.hosts().items() if doc.drained is not None)
    growth = client.growing()
    of = {name: {m for m, w in workers.items() if w.actor and w.actor in actors} for name, actors in crews.items()}
    grow = (growth.name, growth.groups, growth.members) if growth is not None and not growth.done else None
    whole, held = whole_of(groups, of), held_of(growth, groups, members, crews)
    return Looked(whole, asked_of(members, of, drained), grow, drained, held, broken_of(members, of, whole))


def whole_of(groups: Mapping[str, GroupDoc], of: Mapping[str, set[str]]) -> frozenset[str]:
    """Groups that are whole by members of their present attempt. of: these, by group."""
    return frozenset(
        name for name, mine in of.items() if name in groups and groups[name].whole and set(groups[name].members) <= mine
    )


def held_of(
    growth: Growth | None, groups: Mapping[str, GroupDoc], members: Mapping[str, MemberDoc], names: Collection[str]
) -> frozenset[str]:
    """Groups that are complete, and are held by this grow until the others are there. names: groups that have an attempt now:
    whose members these are is not asked, for Ray is told of a member when it is admitted."""
    ready = set(growth.ready) - set(growth.admitted) if growth is not None and not growth.done else set()
    return frozenset(
        name
        for name in ready & set(names) & groups.keys()
        if all(m in members and members[m].state is MemberState.JOINING for m in groups[name].members)
    )


def broken_of(members: Mapping[str, MemberDoc], of: Mapping[str, set[str]], whole: Collection[str]) -> frozenset[str]:
    """Groups of which a member was put out, whatever it held is of use or not, and none has come in its place. Who left by
    itself may have more to do outside the job, and who is only out of reach may come back."""
    there = {(doc.group, doc.rank) for doc in members.values() if doc.state in _PRESENT}
    found = set()
    for name in of.keys() - set(whole):
        docs = [members[m] for m in of[name] if m in members]
        if {(name, doc.rank) for doc in docs if doc.state in _OUT and doc.reason != _LEFT} - there:
            found.add(name)
    return frozenset(found)


def asked_of(members: Mapping[str, MemberDoc], of: Mapping[str, set[str]], drained: frozenset[str]) -> dict[str, bool]:
    """Groups some of whose members were asked to leave: whether all were, none because of its host."""
    found = {}
    for name, mine in of.items():
        docs = [members[m] for m in mine if m in members and members[m].state in _PRESENT]
        asked = [doc for doc in docs if doc.leave_within is not None]
        if asked:
            found[name] = len(asked) == len(docs) and not any(doc.host in drained for doc in docs)
    return found


def end_of(
    group: str, attempt: int, gone: Gone, at: Sequence[str], dead: Collection[str], emptied: Collection[str]
) -> Ended:
    """A worker's end, for the plan. at: nodes of all ranks, "" where one never ran. dead, emptied: nodes. Who fails while
    another rank's node is being emptied fails for want of that rank; who returns has done its work, unless its own is."""
    own, nodes = at[gone.rank], frozenset(at) - {""}
    fault = f"its node {own} is dead" if own in dead else gone.fault
    drained = any(node in emptied for node in (nodes if fault else (own,)))
    return Ended(group, attempt, gone.rank, fault, nodes, drained, gone.alone, gone.late)
