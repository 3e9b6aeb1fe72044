"""Publications: minted, begun, complete, committed, released. Pure; part of `core.step`.

At most one moves. What waits behind it are offered slots that are not minted yet, so the newest replaces the waiting one
by being written over it. A commit waits for `min_groups`, and for nobody who is late.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_reshard.protocol.base import fitting
from elastic_reshard.protocol.docs import EraDoc, GroupState, PublicationDoc, PublicationState, SourceDoc
from elastic_reshard.protocol.ids import publication_id
from elastic_reshard.protocol.messages import Fill
from elastic_reshard.supervisor.counting import next_era
from elastic_reshard.supervisor.events import Abandon
from elastic_reshard.supervisor.holdings import behind, has_all, nobody_has
from elastic_reshard.supervisor.state import Draft, Group, Member, Publication

__all__ = ["abandon", "become", "committed", "settle"]

# Finished publications that stay in the view, so that whoever waits for one learns how it ended.
_REMEMBERED = 16


def become(draft: Draft, publication: Publication, state: PublicationState, reason: str = "") -> None:
    """The one way in which a publication's state changes."""
    doc = publication.doc
    draft.log(f"publication.{state}", publication=doc.id, version=doc.weight_version, label=doc.label, reason=reason)
    draft.durable = True
    draft.put_publication(replace(publication, doc=doc.model_copy(update={"state": state, "reason": fitting(reason)})))


def committed(draft: Draft) -> Publication | None:
    """The last committed publication."""
    return draft.publications.get(draft.committed)


def abandon(draft: Draft, event: Abandon) -> None:
    """A person gives up a publication that moves."""
    publication = draft.publications.get(event.publication)
    if publication is not None and publication.doc.state is PublicationState.MOVING:
        become(draft, publication, PublicationState.ABANDONED, event.reason)


def settle(draft: Draft) -> None:
    """Mint what is ready, commit what is complete, release what is over; again until nothing changes."""
    _give_up_lost(draft)
    _mint(draft)
    while _commit(draft):
        _mint(draft)
    _release(draft)


def _give_up_lost(draft: Draft) -> None:
    """Nobody can install what lay in arenas that are gone."""
    for publication in list(draft.publications.values()):
        if publication.doc.state not in (PublicationState.MOVING, PublicationState.COMMITTED):
            continue
        gone = nobody_has(draft, publication.doc)
        if gone:
            was_committed = publication.doc.state is PublicationState.COMMITTED
            state = PublicationState.RELEASED if was_committed else PublicationState.ABANDONED
            become(draft, publication, state, gone)
            if publication.doc.id == draft.committed:
                draft.committed = ""


# -- minting


def _mint(draft: Draft) -> None:
    if draft.moving() is not None or _held_back(draft):
        return
    for group in draft.groups.values():
        for era in reversed(group.doc.eras):
            found = _ready(draft, group, era)
            if found is not None:
                _begin(draft, draft.groups[group.doc.name], era, *found)
                return


def _held_back(draft: Draft) -> bool:
    """Whether a group that is not late is too far behind for another version (`max_lag`)."""
    last, most = committed(draft), draft.policies.max_lag
    if last is None or most is None:
        return False
    return any(
        last.doc.weight_version - group.doc.serving > most and not _late(draft, group)
        for group in draft.groups.values()
        if group.doc.whole and "destination" in group.doc.roles
    )


def _late(draft: Draft, group: Group) -> bool:
    return group.behind_since is not None and draft.now - group.behind_since >= draft.policies.late_after


def _offers(draft: Draft, group: Group, era: EraDoc) -> dict[int, dict[int, tuple[Member, Fill]]]:
    """seq -> rank -> who offers it, of what this era may still publish."""
    found: dict[int, dict[int, tuple[Member, Fill]]] = {}
    for rank, name in enumerate(era.members):
        member = draft.members.get(name)
        for fill in member.offers if member is not None else ():
            if fill.seq > max(era.start, group.doc.floor) and fill.fragment == era.fragments[rank][0]:
                found.setdefault(fill.seq, {})[rank] = (draft.members[name], fill)
    return found


def _ready(draft: Draft, group: Group, era: EraDoc) -> tuple[int, dict[int, tuple[Member, Fill]]] | None:
    """The newest publish that can begin: of all ranks; or of all that live, if they cover the model; or, after
    `gather_window`, of any that cover it."""
    offers = _offers(draft, group, era)
    unlike: dict[int, tuple[Member, Fill]] = {}
    for seq in sorted(offers, reverse=True):
        ready = offers[seq]
        labels = {fill.label for _, fill in ready.values()}
        if len(labels) > 1 or (
            labels == {None} and (era.mixed or len({fill.before for _, fill in ready.values()}) > 1)
        ):
            unlike = unlike or ready
            continue  # ranks that count differently must not be mixed
        if len(ready) == len(era.members):
            return seq, ready
        if group.first_ready[0] < seq and era is group.doc.eras[-1]:
            group = replace(group, first_ready=(seq, draft.now))
            draft.groups[group.doc.name] = group
        absent = [
            m for r, name in enumerate(era.members) if r not in ready and (m := draft.members.get(name)) is not None
        ]
        alone = not any(m.present for m in absent)
        waited = group.first_ready[0] == seq and draft.now - group.first_ready[1] >= draft.policies.gather_window
        if (alone or waited) and draft.covers(era.layout, frozenset(ready)):
            return seq, ready
    unlike = unlike if len(unlike) > 1 else _apart(offers, era)
    if unlike and era is group.doc.eras[-1]:
        _count_anew(draft, draft.groups[group.doc.name], unlike)
    return None


def _apart(offers: dict[int, dict[int, tuple[Member, Fill]]], era: EraDoc) -> dict[int, tuple[Member, Fill]]:
    """The newest that each rank offers, if it is one step by its label and no rank's number is another's: numbers of ranks that
    heard of a new count at steps of their own may never meet."""
    newest = {rank: found for seq in sorted(offers) for rank, found in offers[seq].items()}
    fills = [fill for _, fill in newest.values()]
    labels, numbers = {fill.label for fill in fills}, {fill.seq for fill in fills}
    alike = len(fills) == len(era.members) and len(labels) == 1 and None not in labels
    return newest if alike and len(numbers) > 1 else {}


def _count_anew(draft: Draft, group: Group, ready: dict[int, tuple[Member, Fill]]) -> None:
    """One number under two labels, one label under two numbers, or no label after a call that failed on some ranks only: they
    do not count alike, and would not by themselves ever again. What they offer is given up, and all begin to count from the
    same number; as each hears of it at another step, labels are needed from now on."""
    said = ", ".join(f"{m.doc.id} {'without a label' if f.label is None else repr(f.label)}" for m, f in ready.values())
    start = next_era(group.doc.count_from)
    era = group.doc.eras[-1].model_copy(update={"start": start, "mixed": True})
    reason = fitting(
        f"its ranks published unlike steps as one; they count anew, each publish needs a label of its step: {said}"
    )
    draft.durable = True
    eras = (*group.doc.eras[:-1], era)
    draft.change_group(group.doc.name, count_from=start, floor=start, eras=eras, reason=reason)
    draft.log("group.counts_anew", group=group.doc.name, reason=reason)


def _begin(draft: Draft, group: Group, era: EraDoc, seq: int, ready: dict[int, tuple[Member, Fill]]) -> None:
    draft.weight_version += 1
    draft.durable = True
    fills = [fill for _, fill in ready.values()]
    sources = tuple(
        SourceDoc(
            member=m.doc.id, rank=rank, host=m.doc.host, domain=m.doc.domain, arena=f.arena, slot=f.slot,
            generation=f.generation,
        )
        for rank, (m, f) in sorted(ready.items())
    )  # fmt: skip
    metrics = {
        "publish_stall": max(f.stall for f in fills), "published_bytes": float(sum(f.nbytes for f in fills)),
        "membership_epoch": float(draft.membership_epoch),
    }  # fmt: skip
    first = min(ready)
    doc = PublicationDoc(
        id=publication_id(draft.job.term, draft.weight_version), weight_version=draft.weight_version,
        label=ready[first][1].label, extras=ready[first][1].extras, group=group.doc.name, seq=seq, layout=era.layout,
        state=PublicationState.MOVING, sources=sources, ranks=len(era.members),
        membership_epoch=draft.membership_epoch, metrics=metrics,
    )  # fmt: skip
    draft.put_publication(Publication(doc, draft.now))
    kept = tuple(e for e in group.doc.eras if e is era or e is group.doc.eras[-1])
    draft.change_group(group.doc.name, floor=seq, eras=kept, reason="" if group.doc.whole else group.doc.reason)
    draft.log("publication.moving", publication=doc.id, version=doc.weight_version, label=doc.label, group=doc.group,
              sources=[s.member for s in sources], epoch=draft.membership_epoch)  # fmt: skip


# -- committing


def _commit(draft: Draft) -> bool:
    moving, last = draft.moving(), committed(draft)
    if moving is None:
        return False
    if last is not None and moving.doc.weight_version <= last.doc.weight_version:
        become(draft, moving, PublicationState.ABANDONED, f"{last.doc.id} is committed, which is no older")
        return False
    waited = draft.now - moving.begun
    complete = late = missing = 0
    left: list[str] = []
    for group in draft.groups.values():
        if not group.doc.whole or "destination" not in group.doc.roles:
            continue
        if has_all(draft, group, moving.doc):
            complete += 1
        elif waited >= draft.policies.late_after or behind(draft, group, moving.doc):
            late += 1
            left += [group.doc.name] if waited >= draft.policies.late_after else []
        else:
            missing += 1
    if missing or complete < draft.policies.min_groups:
        return False
    metrics = moving.doc.metrics | {
        "transfer": waited, "bytes_network": moving.doc.metrics.get("bytes_network", 0.0),
        "groups_complete": float(complete), "groups_late": float(late),
    }  # fmt: skip
    draft.put_publication(replace(moving, doc=moving.doc.model_copy(update={"metrics": metrics})))
    become(draft, draft.publications[moving.doc.id], PublicationState.COMMITTED)
    draft.committed = moving.doc.id
    draft.slow |= {(moving.doc.id, name) for name in left}
    return True


def _release(draft: Draft) -> None:
    """Give back slots that nobody installs from any more, and forget what ended long ago."""
    used = {g.doc.ticket.publication for g in draft.groups.values() if g.doc.ticket is not None}
    for publication in list(draft.publications.values()):
        over = publication.doc.state is PublicationState.COMMITTED and publication.doc.id != draft.committed
        if over and publication.doc.id not in used:
            become(draft, publication, PublicationState.RELEASED, f"{draft.committed} is committed")
    ended = (PublicationState.RELEASED, PublicationState.ABANDONED)
    finished = sorted((p.doc.weight_version, p.doc.id) for p in draft.publications.values() if p.doc.state in ended)
    for _, publication_ in finished[:-_REMEMBERED]:
        draft.drop_publication(publication_)


def target_state(draft: Draft, group: Group) -> GroupState:
    """How a whole destination group without a ticket stands towards the newest publication that has begun."""
    moving, last = draft.moving(), committed(draft)
    newest = moving or last
    if newest is None:
        return GroupState.STALE
    if group.doc.serving_publication == newest.doc.id:
        return GroupState.CURRENT
    if has_all(draft, group, newest.doc):
        return GroupState.LEFT_BEHIND if _late(draft, group) else GroupState.COMPLETE
    if newest.doc.state is PublicationState.MOVING:
        late = draft.now - newest.begun >= draft.policies.late_after
        return GroupState.LEFT_BEHIND if late else GroupState.LANDING
    return GroupState.LEFT_BEHIND
