"""What can be seen between two steps and that the core does not log: epochs, ends of movers, beats that came late. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from elastic_reshard.protocol.messages import MoverSaid
from elastic_reshard.supervisor.events import Beaten, Event, Greeted, Happened, Moved
from elastic_reshard.supervisor.state import Job

__all__ = ["condemned_for", "late_beats", "noticed"]

_LATE: Final = 1.5  # beats between two
# How a watchdog's words for condemning begin or go on, and what a metric calls it.
_REASONS: Final = (
    ("no sign of life", "silent"),
    ("not out of all operations", "not_out"),
    ("its work failed", "failed"),
    ("its member is gone", "member_gone"),
    ("the watchdog goes", "watchdog_goes"),
)


def condemned_for(why: str) -> str:
    """One of a few words for why a mover was condemned: of bounded number, as labels must be."""
    return next((word for begin, word in _REASONS if begin in why), "other")


def noticed(events: Sequence[Event], happened: Sequence[Happened], before: Job, after: Job) -> Iterator[Happened]:
    """All log events of one step: ends of movers, what the core made of them, and the epoch that came of it."""
    for said in _said(events):
        was = before.movers.get(said.member)
        known = was is not None and (was.mover, was.state) == (said.mover, "ended")
        if said.state == "ended" and not known and after.movers.get(said.member) == said:
            yield Happened("mover.ended", {
                "member": said.member, "mover": said.mover, "transfer": said.transfer, "condemned": said.condemned,
                "reason": said.reason[:500],
            })  # fmt: skip
    yield from happened
    if after.membership_epoch != before.membership_epoch:
        yield Happened("membership.epoch", {"epoch": after.membership_epoch, "was": before.membership_epoch})


def _said(events: Sequence[Event]) -> Iterator[MoverSaid]:
    for event in events:
        if isinstance(event, Moved):
            yield event.said
        elif isinstance(event, Greeted):
            yield from event.hello.movers


def late_beats(events: Sequence[Event], before: Job, now: float) -> Counter[str]:
    """Hosts that were heard again after more than one and a half beats. None while this supervisor itself was late."""
    if now - before.stepped > before.deadlines.beat / 2:
        return Counter()
    hosts = {event.host for event in events if isinstance(event, Beaten)}
    limit = _LATE * before.deadlines.beat
    return Counter(h for h in hosts if (known := before.hosts.get(h)) is not None and now - known.heard > limit)
