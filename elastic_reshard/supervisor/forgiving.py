"""A supervisor that was late itself: what it did not listen to was nobody's lateness. Pure; part of `core.step`.

It looks at what has arrived meanwhile, and waits two beats before judging. No second is forgiven twice, and nothing that has
begun is moved into the future. One that was late before within `late_after` stutters: so that it finds somebody late at last,
each further time costs those for whom the others wait a beat, or a tenth of `late_after` if that is less.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_reshard.supervisor import unproved
from elastic_reshard.supervisor.state import Draft

__all__ = ["late"]

_TENTH = 0.1


def late(draft: Draft) -> None:
    """Nobody was listened to since the last step."""
    stepped = draft.job.stepped
    until = draft.now + 2 * draft.deadlines.beat
    draft.judge_from = max(draft.judge_from, until)
    stutters = draft.forgiven > 0.0 and stepped < draft.forgiven + draft.policies.late_after
    counted = min(draft.deadlines.beat, _TENTH * draft.policies.late_after) if stutters else 0.0
    seconds = until - max(stepped, draft.forgiven)
    _forgive(draft, seconds, min(counted, seconds))
    draft.forgiven = until
    draft.log("supervisor.late", seconds=round(draft.now - stepped, 3))


def _forgive(draft: Draft, seconds: float, counted: float) -> None:
    def later(moment: float) -> float:
        return min(moment + seconds - counted, draft.now)  # what has begun did so by now

    for name, transfer in draft.transfers.items():
        since, moved = transfer.since + seconds, transfer.moved + seconds
        draft.transfers[name] = replace(transfer, begun=later(transfer.begun), since=since, moved=moved)
    for name, publication in draft.publications.items():
        draft.publications[name] = replace(publication, begun=later(publication.begun))
    for name, group in draft.groups.items():
        (seq, ready), behind = group.first_ready, group.behind_since
        draft.groups[name] = replace(
            group, ticket_until=group.ticket_until + seconds, first_ready=(seq, later(ready)),
            behind_since=behind if behind is None else later(behind),
        )  # fmt: skip
    if draft.suspended is not None:
        draft.suspended = replace(draft.suspended, until=draft.suspended.until + seconds)
    if draft.growing is not None and not draft.growing.done:
        draft.growing = replace(draft.growing, until=draft.growing.until + seconds)
    unproved.later(draft, seconds)
