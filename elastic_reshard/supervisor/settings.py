"""What people have asked for and a restart must know: policies, grows, drained hosts. Journaled as one document."""

from __future__ import annotations

from dataclasses import asdict, replace

from pydantic import Field

from elastic_reshard.protocol.base import Count, Message, Name
from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.supervisor.state import Growing, Job

__all__ = ["GrowKept", "PoliciesKept", "Settings", "recall", "settings_of"]


class PoliciesKept(Message):
    """All policies, as `Policies`; one that a newer version knows and this one does not is refused."""

    min_groups: int
    late_after: float
    max_lag: int | None
    gather_window: float
    install: float
    min_rate: float
    fruitless: int
    network: str = "auto"


class GrowKept(Message):
    """A grow, as `Growing`, without the moment at which it ends: that is of one process's clock."""

    name: Name
    groups: Count
    members: Count
    within: float
    ready: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    came: Count = 0
    done: bool = False
    cancelled: bool = False


class Settings(Message):
    """policies: None if they are those of the start. grows: oldest first; the last may be under way. drained: seconds that
    members of a host are given to leave, by host."""

    policies: PoliciesKept | None = None
    grows: tuple[GrowKept, ...] = ()
    drained: dict[str, float] = Field(default_factory=dict)


def settings_of(job: Job) -> Settings:
    """What is to be journaled of a job."""
    grows = (*job.grown, *((job.growing,) if job.growing is not None else ()))
    return Settings(
        policies=PoliciesKept(**asdict(job.policies)) if job.policies != job.started_with else None,
        grows=tuple(_kept(growing) for growing in grows),
        drained=dict(job.drained),
    )


def _kept(growing: Growing) -> GrowKept:
    found = asdict(growing)
    del found["until"]
    return GrowKept(**found)


def recall(job: Job, settings: Settings, now: float) -> Job:
    """The job with what was asked for before a restart. A grow under way gets its whole time again, and so much more as
    nobody is judged for."""
    grows = [
        Growing(until=now + job.deadlines.reregister + kept.within, **kept.model_dump()) for kept in settings.grows
    ]
    kept = settings.policies
    members = {
        name: replace(m, by_drain=m.doc.leave_within == settings.drained.get(m.doc.host))
        if m.doc.leave_within is not None
        else m
        for name, m in job.members.items()
    }
    return replace(
        job,
        members=members,
        policies=Policies(**kept.model_dump()) if kept is not None else job.policies,
        growing=grows[-1] if grows else None,
        grown=tuple(grows[:-1]),
        drained=settings.drained,
    )
