"""Transfers between domains: begun, watched, broken, finished. Pure; part of `core.step`.

One is in hand at a time. It is one epoch's attempt to land what a publication lacks somewhere; what it does not finish, the
next one takes up from the ledgers. A broken one is left in one way: all movers out, or proved dead; then the next is formed
anew. A mover of which neither is seen in time stays behind, and its member with it. What is not here: a second try on the
same communicator, and a judgement by anybody's error text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from elastic_reshard.protocol.docs import LandedDoc, Placed, PublicationState, TransferState
from elastic_reshard.protocol.messages import MoverSaid
from elastic_reshard.supervisor.events import Abandon, Ledgered, Moved
from elastic_reshard.supervisor.holdings import in_sight
from elastic_reshard.supervisor.lateness import (
    after_stall,
    closed,
    leave_out,
    mark_slow,
    overtaken,
    source_closed,
    stragglers,
)
from elastic_reshard.supervisor.networks import GLOO, choose, patience
from elastic_reshard.supervisor.parties import compose
from elastic_reshard.supervisor.publishing import abandon
from elastic_reshard.supervisor.queue import everybody, next_groups, waits_beside
from elastic_reshard.supervisor.state import Draft, Publication, Suspended, Transfer
from elastic_reshard.supervisor.unproved import give_up, in_vain, latest, owes, unproved

__all__ = ["ledgered", "moved", "settle"]


def moved(draft: Draft, event: Moved) -> None:
    """A watchdog says where a mover is."""
    member = draft.members.get(event.said.member)
    if member is None or member.doc.host != event.host:
        return
    draft.movers[event.said.member] = latest(draft.movers.get(event.said.member), event.said)
    transfer = draft.transfers.get(event.said.transfer)
    if transfer is None or event.said.waits is None:
        return
    # If a source is closed everybody waits for it, and nobody is to blame.
    if not source_closed(transfer, draft.movers):
        awaited = dict(transfer.awaited)
        awaited[event.said.waits[0]] = awaited.get(event.said.waits[0], 0) + 1
        draft.transfers[transfer.doc.id] = replace(transfer, awaited=awaited)


def ledgered(draft: Draft, event: Ledgered) -> None:
    """A watchdog says what a landing slot holds."""
    said = event.said
    if said.publication in draft.publications and said.member in draft.members:
        draft.ledgers[said.publication, said.member] = said


def settle(draft: Draft) -> None:
    """Carry on with the transfer in hand; begin the next when it is over."""
    transfer = draft.active()
    if transfer is not None:
        _judge(draft, transfer)
    if draft.active() is None:
        _begin(draft)


# -- reading


def _reports(draft: Draft, transfer: Transfer) -> dict[str, MoverSaid]:
    """What the movers of the present members say of this transfer."""
    found = {}
    for member in transfer.doc.present:
        said = draft.movers.get(member)
        if said is not None and said.transfer == transfer.doc.id:
            found[member] = said
    return found


def _unreachable(draft: Draft, transfer: Transfer) -> list[str]:
    if draft.now < draft.judge_from:
        return []
    return [m for m in transfer.doc.present if not in_sight(draft, m)]


def _inside(draft: Draft, transfer: Transfer, reports: dict[str, MoverSaid]) -> list[str]:
    """Members whose movers are not out of all operations, nor proved dead, nor nobody's any more."""
    found = []
    for member in transfer.doc.present:
        said = reports.get(member)
        if said is not None and said.state in ("out", "ended"):
            continue
        if (said is None or said.state == "starting") and not transfer.doc.values:
            continue  # it never had the values to meet the others with; a plan that is being made is no operation
        if member not in _unreachable(draft, transfer) and not _never_came(draft, transfer, member, said):
            found.append(member)
    return found


def _never_came(draft: Draft, transfer: Transfer, member: str, said: MoverSaid | None) -> bool:
    """Its host's watchdog is there since a while and knows of no mover in this transfer."""
    host = draft.hosts.get(draft.members[member].doc.host) if member in draft.members else None
    grace = draft.deadlines.mover_silent + draft.deadlines.proof_of_death
    grace += draft.deadlines.abort_over(transfer.doc.network)
    return said is None and host is not None and draft.now - max(host.greeted, transfer.since) >= grace


# -- judging


def _change(draft: Draft, transfer: Transfer, state: TransferState, reason: str = "", **more: Any) -> Transfer:
    """The one way in which a transfer's state changes."""
    doc = transfer.doc
    draft.log(f"transfer.{state}", transfer=doc.id, publication=doc.publication, epoch=doc.epoch, was=str(doc.state),
              reason=reason)  # fmt: skip
    doc = doc.model_copy(update={"state": state, "reason": reason[:4000] or doc.reason, **more})
    transfer = replace(transfer, doc=doc, since=draft.now, moved=draft.now)
    draft.put_transfer(transfer)
    return transfer


def _judge(draft: Draft, transfer: Transfer) -> None:
    reports = _reports(draft, transfer)
    state = transfer.doc.state
    if state is TransferState.BREAKING:
        _leave(draft, transfer, reports)
        return
    why = _broken(draft, transfer, reports)
    outs = [said for said in reports.values() if said.state == "out"]
    if not why and len(outs) == len(transfer.doc.present):
        _end(draft, transfer, reports, whole=all(said.outcome == "done" for said in outs))
    elif why:
        # The movers' set changes: what comes next is another epoch.
        draft.epoch_ended = draft.durable = True
        _leave(draft, _change(draft, transfer, TransferState.BREAKING, why), reports)
    elif state is TransferState.FORMING:
        _form(draft, transfer, reports)
    elif state is TransferState.STOPPING:
        _stop(draft, transfer, reports)
    else:
        _watch(draft, transfer, reports)


def _leave(draft: Draft, transfer: Transfer, reports: dict[str, MoverSaid]) -> None:
    """A broken one is over when all are out of it; or without those of whom that was not seen in time."""
    inside = _inside(draft, transfer, reports)
    if inside and not all(in_vain(draft, transfer, member) for member in inside):
        return
    for member in inside:
        if (said := reports.get(member)) is not None:
            give_up(draft, said)
    _end(draft, transfer, reports, whole=False)


def _broken(draft: Draft, transfer: Transfer, reports: dict[str, MoverSaid]) -> str:
    """Why a transfer can't go on; "" if it can. Ends and lost hosts are named before those who only failed because of them."""
    ended = [
        f"the mover of {m} has ended ({s.condemned or s.reason})" for m, s in reports.items() if s.state == "ended"
    ]
    ended += [
        f"the mover of {m} hangs in {said.transfer}: its end was not seen ({said.condemned or 'it is not out'})"
        for m in transfer.doc.present
        if unproved(draft, m) and (said := draft.movers[m]) and (m not in reports or reports[m].state != "out")
    ]
    gone = [f"{m} can't be reached" for m in _unreachable(draft, transfer)]
    failed = [f"{m}: {s.error} {s.reason}" for m, s in reports.items() if s.outcome in ("failed", "refused")]
    if ended or gone or failed:
        return "; ".join((ended + gone) or failed)
    waited = draft.now - transfer.since
    if transfer.doc.state is TransferState.FORMING and waited >= draft.deadlines.form:
        late = _not_ready(transfer, reports)
        return f"the movers of {', '.join(late)} were not ready within {draft.deadlines.form} s"
    stall = draft.deadlines.stall
    # Some cells still come, but the others do not wait for a straggler to get as far as they are.
    if transfer.doc.state is TransferState.STOPPING and (
        draft.now - transfer.moved >= stall or draft.now - transfer.since >= 2 * stall
    ):
        return f"its movers did not stop within {2 * stall} s, or completed no cell within {stall} s"
    return ""


def _form(draft: Draft, transfer: Transfer, reports: dict[str, MoverSaid]) -> None:
    """Tell the values once all are there. Unlike configs never meet."""
    present = transfer.doc.present
    if late := _not_ready(transfer, reports):
        _form_without(draft, transfer, late)
        return
    configs = Counter(said.config for said in reports.values())
    if len(configs) > 1:
        usual = configs.most_common(1)[0][0]
        unlike = [f"{m} ({s.config})" for m, s in reports.items() if s.config != usual]
        leave_out(draft, transfer, [m for m, s in reports.items() if s.config != usual])
        reason = f"communicators of unlike configuration: {', '.join(unlike)}, the others {usual}"
        draft.epoch_ended = draft.durable = True
        _change(draft, transfer, TransferState.BREAKING, reason)
        return
    draft.durable = True  # who may have the values by which they meet is known to the next term too
    _change(draft, transfer, TransferState.RUNNING, values={m: reports[m].values for m in present})


def _not_ready(transfer: Transfer, reports: dict[str, MoverSaid]) -> list[str]:
    return [m for m in transfer.doc.present if m not in reports or reports[m].state == "starting"]


def _form_without(draft: Draft, transfer: Transfer, late: list[str]) -> None:
    """Once it is late, the others do not wait for groups whose movers are not even ready."""
    publication = draft.publications.get(transfer.doc.publication)
    moving = publication is not None and publication.doc.state is PublicationState.MOVING
    if not moving or draft.now - transfer.begun < draft.policies.late_after:
        return
    slow = mark_slow(draft, transfer, late)
    if slow:
        draft.epoch_ended = draft.durable = True
        draft.log("group.left_behind", groups=sorted(slow), publication=transfer.doc.publication)
        _change(draft, transfer, TransferState.BREAKING, f"late: going on without {', '.join(sorted(slow))}")


def _watch(draft: Draft, transfer: Transfer, reports: dict[str, MoverSaid]) -> None:
    """While it runs: progress, stalls, and those for whom the others wait no longer."""
    cells = sum(said.cells for said in reports.values())
    if cells > transfer.cells:
        draft.transfers[transfer.doc.id] = replace(transfer, cells=cells, moved=draft.now)
        return
    if closed(transfer, reports):  # who takes turns with its member does not stall
        transfer = draft.transfers[transfer.doc.id] = replace(transfer, moved=draft.now)
    limit = patience(transfer.doc, draft.deadlines.stall, draft.policies)
    if draft.now - transfer.moved >= limit:
        draft.epoch_ended = draft.durable = True
        why = after_stall(draft, transfer, reports)
        _change(draft, transfer, TransferState.BREAKING, f"no cell was completed for {limit:.1f} s; {why}")
        return
    publication = draft.publications.get(transfer.doc.publication)
    if publication is None or publication.doc.state in (PublicationState.RELEASED, PublicationState.ABANDONED):
        _end_early(draft, transfer, reports, "its publication is over")
    elif draft.now - transfer.begun >= draft.policies.late_after and (
        publication.doc.state is PublicationState.MOVING or waits_beside(draft, transfer)
    ):
        _leave_behind(draft, transfer, reports)
    elif overtaken(draft, transfer, reports):
        _end_early(draft, transfer, reports, "a newer version is to be moved")


def _leave_behind(draft: Draft, transfer: Transfer, reports: dict[str, MoverSaid]) -> None:
    """Late: end this transfer, and go on without those for whom the others wait most."""
    slow = stragglers(draft, transfer, reports)
    if slow:
        draft.epoch_ended = draft.durable = True
        draft.log("group.left_behind", groups=sorted(slow), publication=transfer.doc.publication)
        _end_early(draft, transfer, reports, f"late: going on without {', '.join(sorted(slow))}")


def _end_early(draft: Draft, transfer: Transfer, reports: dict[str, MoverSaid], why: str) -> None:
    """Between two rounds; but a round that some have begun would not end before all have their windows open."""
    waiting = closed(transfer, reports)
    if not waiting:
        _change(draft, transfer, TransferState.STOPPING, why)
        return
    draft.epoch_ended = draft.durable = True
    publication, stalls, fruitless = draft.tried
    if publication == transfer.doc.publication:
        draft.tried = (publication, stalls, fruitless - 1)  # this epoch is broken without anybody's fault
    _change(draft, transfer, TransferState.BREAKING, f"{why}; the window of {', '.join(waiting)} is closed")


def _stop(draft: Draft, transfer: Transfer, reports: dict[str, MoverSaid]) -> None:
    """Once every mover has said which rounds it has begun, all end after the last of them. A slow one is given its time."""
    if closed(transfer, reports):
        _end_early(draft, transfer, reports, transfer.doc.reason)
        return
    cells = sum(said.cells for said in reports.values())
    if cells > transfer.cells:
        transfer = replace(transfer, cells=cells, moved=draft.now)
        draft.transfers[transfer.doc.id] = transfer
    present = transfer.doc.present
    held = [m for m in present if m in reports and (reports[m].held or reports[m].state == "out")]
    if transfer.doc.until is None and len(held) == len(present):
        until = max(0, max(reports[m].began for m in present) - 1)
        draft.put_transfer(replace(transfer, doc=transfer.doc.model_copy(update={"until": until})))


# -- its end


def _end(draft: Draft, transfer: Transfer, reports: dict[str, MoverSaid], whole: bool) -> None:
    """It is over: all movers are out or gone. Note what has landed; what has not, the next one moves."""
    doc = transfer.doc
    publication = draft.publications.get(doc.publication)
    draft.drop_transfer(doc.id)
    draft.durable = True
    received = sum(said.received for said in reports.values())
    draft.log("transfer.over", transfer=doc.id, publication=doc.publication, epoch=doc.epoch, whole=whole,
              bytes_network=received, seconds=round(draft.now - transfer.begun, 4), reason=doc.reason)  # fmt: skip
    if publication is None:
        return
    metrics = publication.doc.metrics
    metrics = metrics | {
        "bytes_network": metrics.get("bytes_network", 0.0) + received,
        "transfers": metrics.get("transfers", 0.0) + 1,
    }
    landed = _landed(publication, transfer) if whole else publication.doc.landed
    draft.put_publication(
        replace(publication, doc=publication.doc.model_copy(update={"metrics": metrics, "landed": landed}))
    )
    if whole:
        draft.tried = (doc.publication, 0, 0)
    elif doc.state is TransferState.BREAKING:
        _count_fruitless(draft, transfer, reports)


def _landed(publication: Publication, transfer: Transfer) -> tuple[LandedDoc, ...]:
    """Domains that have everything now, with the ranks they have it for, and who has it for them."""
    before = {(entry.where, entry.layout): entry for entry in publication.doc.landed}
    ranks = {where: set(entry.ranks) for where, entry in before.items()}
    by = {where: set(entry.by) for where, entry in before.items()}
    present = set(transfer.doc.present)
    places: dict[str, Placed] = {entry.where: entry for entry in publication.doc.landed}
    sources: dict[str, set[str]] = {}
    for source in publication.doc.sources:
        if source.member in present:
            sources.setdefault(source.where, set()).add(source.member)
    for part in transfer.doc.landings:
        where = (part.where, part.layout)
        places[part.where] = part
        ranks.setdefault(where, set()).add(part.rank)
        by[where] = by.get(where, set()) | sources.get(part.where, set()) | {part.member}
    return tuple(
        LandedDoc(
            host=places[where[0]].host, domain=places[where[0]].domain, layout=where[1], ranks=tuple(sorted(found)),
            by=tuple(sorted(by[where])),
        )
        for where, found in sorted(ranks.items())
    )  # fmt: skip


def _count_fruitless(draft: Draft, transfer: Transfer, reports: dict[str, MoverSaid]) -> None:
    """Bounds epochs without a new cell; what can't be had from those reachable is suspended, then given up."""
    doc = transfer.doc
    publication, stalls, fruitless = draft.tried
    if publication != doc.publication:
        stalls = fruitless = 0
    grown = any(
        (said := draft.ledgers.get((doc.publication, part.member))) is not None
        and said.bits
        and said.bits != doc.basis.get(part.member, "")
        for part in doc.landings
    )
    draft.tried = (doc.publication, stalls, 0 if grown else fruitless + 1)
    # All refuse alike what one is told to be like: then it is that one without whom they can go on. Who has no room on its
    # device for what a device's network needs may have it for gloo's, which comes next.
    others = ("ShardLost",) if doc.network == GLOO else ("ShardLost", "ArenaError")
    refused = [(m, s) for m, s in reports.items() if s.outcome == "refused" and s.error not in others]
    leave_out(draft, transfer, {who for m, s in refused for who in (s.blames or (m,))})
    if not doc.values and transfer.since - transfer.begun >= draft.deadlines.form:
        leave_out(draft, transfer, _not_ready(transfer, reports))
    fruitless = draft.tried[2]
    lost = [s.reason for s in reports.values() if s.outcome == "refused" and s.error == "ShardLost"]
    if lost:
        until = draft.now + draft.deadlines.orphan_hold
        if draft.suspended is not None and draft.suspended.publication == doc.publication:
            until = draft.suspended.until
        draft.suspended = Suspended(doc.publication, frozenset(doc.present), lost[0], until)
        draft.log("transfer.suspended", publication=doc.publication, reason=lost[0])
    elif fruitless >= draft.policies.fruitless:
        why = f"{fruitless} epochs in a row moved no cell; the last: {doc.reason}"
        _give_up(draft, doc.publication, {p.group for p in doc.destinations}, why)


def _give_up(draft: Draft, publication: str, groups: Iterable[str], why: str) -> None:
    """A publication that moves is abandoned; a committed one stays: these groups do without until others are reachable."""
    found = draft.publications.get(publication)
    draft.suspended = None
    draft.tried = (publication, 0, 0)
    if found is None:
        return
    draft.durable = True
    draft.log("transfer.given_up", publication=publication, groups=sorted(groups), reason=why)
    abandon(draft, Abandon(publication, why[:4000]))
    for group in groups:
        draft.given_up[publication, group] = (everybody(draft), draft.now + draft.deadlines.orphan_hold)


# -- the next one


def _begin(draft: Draft) -> None:
    publication, groups = next_groups(draft, everybody(draft))
    if publication is None or not groups:
        return
    held = draft.suspended
    if held is not None and held.publication != publication.doc.id:
        held = draft.suspended = None
    doc = compose(draft, publication, groups)
    # One that ran when the journal was lost leaves as soon as its watchdog hears the view, or is condemned; and says so.
    if any(owes(draft, member) for member in doc.present):
        return
    _, fallen = choose(draft, doc.publication, doc.present)
    if held is not None:
        if draft.now >= held.until:
            _give_up(draft, held.publication, {p.group for p in doc.destinations}, f"ShardLost: {held.reason}")
            return
        if frozenset(doc.present) == held.present:
            return
    if draft.tried[0] != doc.publication:
        draft.tried = (doc.publication, 0, 0)
    draft.durable = True
    draft.serial += 1
    known = {(part.member, part.arena) for part in publication.doc.landings}
    fresh = tuple(part for part in doc.landings if (part.member, part.arena) not in known)
    if fresh:
        landings = (*publication.doc.landings, *fresh)
        draft.put_publication(replace(publication, doc=publication.doc.model_copy(update={"landings": landings})))
    draft.put_transfer(Transfer(doc, draft.now, draft.now, draft.now))
    draft.log("transfer.forming", transfer=doc.id, publication=doc.publication, epoch=doc.epoch,
              members=list(doc.present), groups=[p.group for p in doc.destinations], network=doc.network)  # fmt: skip
    if fallen:
        draft.log("network.fallback", transfer=doc.id, publication=doc.publication, network=doc.network, why=fallen)
