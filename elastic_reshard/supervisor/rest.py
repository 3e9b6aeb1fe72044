"""Steps in which nothing but signs of life came, while nothing is pending: there is nothing to settle then. Pure.

With thousands of members most steps are of this kind, and settling looks at every one of them. What is pending by time is
listed here; whatever is not, would be seen a beat later: that often everything is settled in any case.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_reshard.protocol.docs import PublicationState
from elastic_reshard.supervisor.events import Beaten, Event, Tick
from elastic_reshard.supervisor.state import Draft, Group

__all__ = ["at_rest", "rests"]


def at_rest(draft: Draft, events: Sequence[Event]) -> bool:
    """Whether this step, whose events were taken in and judged by time, needs no settling."""
    settled = draft.job.settled
    if settled is None or draft.now - settled >= draft.deadlines.beat:
        return False
    return not draft.touched and all(isinstance(event, Beaten | Tick) for event in events)


def rests(draft: Draft) -> bool:
    """Whether, after settling, time alone changes nothing within a beat but by hosts' silence and members' deadlines, at which
    every step looks."""
    if draft.transfers or draft.suspended is not None or draft.given_up or draft.waiting or draft.matching:
        return False
    if draft.now < draft.judge_from or draft.recover_from or (draft.growing is not None and not draft.growing.done):
        return False
    moving = any(p.doc.state is PublicationState.MOVING for p in draft.publications.values())
    return not moving and not any(_pending(group) for group in draft.groups.values())


def _pending(group: Group) -> bool:
    """An install under way, layouts that are asked for, a publish that waits for other ranks, or a version not yet installed,
    which makes the group late some time."""
    gathering = group.first_ready[0] > group.doc.floor
    return group.doc.ticket is not None or group.asked is not None or gathering or group.behind_since is not None
