"""Which layouts and fragments somebody may still ask for. Pure: what is needed, and what has not been for long enough."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from elastic_reshard.supervisor.state import Draft, Group, Job

__all__ = ["KEEP", "idle", "needed", "prune"]

# Seconds that a body is kept which nobody needs: a member hands its fragment in before it says that it has it, and whoever
# has an older view may ask for what that names.
KEEP: Final = 3600.0
# Answers of Match up to which none is forgotten.
_FITS: Final = 64


def needed(job: Job | Draft) -> set[str]:
    """Ids of all layouts and fragments that a group, a publication or a transfer names, that a member has stated, or that are
    being examined."""
    found: set[str | None] = set()
    for group in job.groups.values():
        found.update(_of_group(group))
    for member in job.members.values():
        if member.said is not None:
            found |= {member.said.source, member.said.destination}
    for publication in job.publications.values():
        doc = publication.doc
        found |= {doc.layout, *(p.layout for p in doc.landings), *(d.layout for d in doc.landed)}
    for transfer in job.transfers.values():
        moved = transfer.doc
        found |= {moved.source.layout, *(p.layout for p in moved.destinations), *(p.layout for p in moved.landings)}
    found.update(key for pair in job.matching for key in pair)
    return {key for key in found if key}


def _of_group(group: Group) -> Iterator[str | None]:
    doc, answer = group.doc, group.examined
    yield from (doc.source_layout, doc.destination_layout)
    yield from (era.layout for era in doc.eras)
    for fragments in (doc.fragments, group.asked or (), *(era.fragments for era in doc.eras)):
        yield from (key for pair in fragments for key in pair)
    if answer is not None:
        yield from (answer.source_layout, answer.destination_layout)
        yield from (key for pair in answer.fragments for key in pair)


def idle(
    since: Mapping[str, float], there: Collection[str], wanted: Collection[str], now: float, keep: float
) -> tuple[dict[str, float], set[str]]:
    """(since when each id that is there has not been needed, those that go now). since: the last answer; ids that were handed
    in or asked for meanwhile are at that moment in it."""
    still = {key: since.get(key, now) for key in there if key not in wanted}
    gone = {key for key, at in still.items() if now - at >= keep}
    return {key: at for key, at in still.items() if key not in gone}, gone


def prune(draft: Draft) -> None:
    """Forget which layouts fit each other when one of them is needed no more; looked at when there is another answer, and they
    are many."""
    if len(draft.fits) <= max(_FITS, len(draft.job.fits)):
        return
    wanted = needed(draft)
    draft.fits = {pair: fault for pair, fault in draft.fits.items() if wanted.issuperset(pair)}
