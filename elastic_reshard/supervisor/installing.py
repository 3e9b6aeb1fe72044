"""Installs: one ticket for a whole group, one verdict, the same on every rank. Pure; part of `core.step`.

The missing edge: CURRENT is reached in `_report` alone, when every rank of a ticket for a committed publication has
reported that it pulled everything and that no slot had changed.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_reshard.protocol.docs import GroupState, PublicationState, TicketDoc, VerdictDoc
from elastic_reshard.protocol.ids import ticket_id
from elastic_reshard.supervisor.holdings import has_all
from elastic_reshard.supervisor.publishing import committed, target_state
from elastic_reshard.supervisor.state import Draft, Group, Member, Publication

__all__ = ["settle"]


def settle(draft: Draft) -> None:
    """Grant what whole groups ask for, and judge what is out."""
    for name in list(draft.groups):
        group = draft.groups[name]
        if "destination" not in group.doc.roles:
            continue
        members = [m for _, m in draft.group_members(group)]
        if group.doc.ticket is not None:
            _report(draft, group, members)
        if draft.groups[name].doc.ticket is None and group.doc.whole and all(m.taking_part for m in members):
            _adopt(draft, draft.groups[name], members)
            _grant(draft, draft.groups[name], members)
        _stand(draft, draft.groups[name])


def _become(draft: Draft, group: Group, state: GroupState, why: str = "") -> None:
    """The one way in which a group's state changes."""
    if group.doc.state is state:
        return
    draft.log(f"group.{state}", group=group.doc.name, was=str(group.doc.state), serving=group.doc.serving, reason=why)
    draft.change_group(group.doc.name, state=state)


def _asks(group: Group, members: list[Member]) -> dict[str, int]:
    """The install calls that have no answer yet."""
    answered = group.doc.verdict.asks if group.doc.verdict is not None else {}
    return {
        m.doc.id: m.said.install.ask
        for m in members
        if m.said is not None and m.said.install.asking and m.said.install.ask > answered.get(m.doc.id, 0)
    }


def _grant(draft: Draft, group: Group, members: list[Member]) -> None:
    asks = _asks(group, members)
    if group.doc.ticket is not None or len(asks) < len(members):
        return
    last = committed(draft)
    if last is None or group.doc.serving_publication == last.doc.id:
        version, publication = (last.doc.weight_version, last.doc.id) if last is not None else (0, "")
        reason = "" if last is not None else "nothing was committed yet"
        _answer(draft, group, VerdictDoc(
            ticket="", verdict="nothing", weight_version=version, publication=publication, asks=asks, reason=reason,
        ))  # fmt: skip
        return
    if not has_all(draft, group, last.doc):
        return
    patience = min(m.said.install.patience for m in members if m.said is not None)
    ticket = ticket_id(group.doc.name, last.doc.id, draft.job.term, draft.tickets + 1)
    _issue(draft, group, last, ticket, asks, patience)


def _issue(
    draft: Draft, group: Group, publication: Publication, ticket: str, asks: dict[str, int], patience: float
) -> None:
    within = min(draft.policies.install, patience)
    doc = TicketDoc(
        id=ticket, publication=publication.doc.id, weight_version=publication.doc.weight_version,
        attempt=draft.tickets + 1, asks=asks, within=within,
    )  # fmt: skip
    draft.tickets += 1
    draft.put_group(replace(group, ticket_until=draft.now + within))
    draft.change_group(group.doc.name, ticket=doc)
    _become(draft, draft.groups[group.doc.name], GroupState.INSTALLING)


def _adopt(draft: Draft, group: Group, members: list[Member]) -> None:
    """A ticket of an earlier term that some ranks were working on: go on with it, whole."""
    known = group.doc.verdict.ticket if group.doc.verdict is not None else ""
    asks = _asks(group, members)
    said = [m.said.install for m in members if m.said is not None and m.doc.id in asks]
    # A rank that was frozen through several verdicts may state a ticket older than the last: judged, too.
    begun = {
        i.ticket for i in said if i.ticket is not None and i.outcome != "none" and _stamp(i.ticket) > _stamp(known)
    }
    # Who was told CURRENT already need not ask any more.
    held = {m.doc.id: m.said.holding for m in members if m.said is not None and m.said.holding is not None}
    for ticket in sorted(begun):
        _, publication_, stamp = ticket.split(":")
        publication = draft.publications.get(publication_)
        if int(stamp.partition(".")[0]) == draft.job.term:
            continue  # answered in this term, by an older verdict
        told = next((h for h in held.values() if h.ticket == ticket), None)
        if told is not None:
            # One rank was told CURRENT: that was the verdict, and the others get it too.
            _answer(draft, group, VerdictDoc(
                ticket=ticket, verdict="current", weight_version=told.weight_version, publication=told.publication,
                asks=asks,
            ))  # fmt: skip
        elif publication is None or len(asks) < len(members) or not _can_end(publication, ticket, members):
            _answer(draft, group, VerdictDoc(
                ticket=ticket, verdict="partial", weight_version=0, publication=publication_, asks=asks,
                reason="the supervisor was restarted while it was installed, and it cannot be finished",
            ))  # fmt: skip
        else:
            draft.log("ticket.adopted", group=group.doc.name, ticket=ticket)
            _issue(draft, group, publication, ticket, asks, min(i.patience for i in said))
            _report(draft, draft.groups[group.doc.name], members)
        return


def _stamp(ticket: str) -> tuple[int, ...]:
    """(term, number) of a ticket."""
    return tuple(map(int, ticket.rpartition(":")[2].split("."))) if ticket else (0, 0)


def _can_end(publication: Publication, ticket: str, members: list[Member]) -> bool:
    """Whether a ticket of an earlier term can still come to CURRENT: its slots are kept, or nobody needs them any more."""
    installs = [m.said.install for m in members if m.said is not None]
    pulled = all(i.ticket == ticket and i.outcome == "pulled" for i in installs)
    kept = publication.doc.state is PublicationState.COMMITTED
    return kept or (pulled and publication.doc.state is PublicationState.RELEASED)


def _report(draft: Draft, group: Group, members: list[Member]) -> None:
    """Judge the ticket that is out by what its ranks have said."""
    ticket = group.doc.ticket
    if ticket is None:
        return
    failed: dict[str, str] = {}
    pulled = 0
    for member in members:
        said = member.said
        name = member.doc.id
        held = said.holding if said is not None else None
        if not member.taking_part or said is None:
            failed[name] = member.doc.reason or f"it is {member.doc.state}"
        elif held is not None and held.ticket == ticket.id:
            pulled += 1
        elif said.install.ticket == ticket.id and said.install.outcome == "failed":
            failed[name] = said.install.reason
        elif said.install.ticket == ticket.id and said.install.outcome == "pulled":
            pulled += 1
        elif said.install.ask != ticket.asks.get(name) or not said.install.asking:
            failed[name] = "its call ended before it had installed"
    if not failed and pulled < len(members) and draft.now >= group.ticket_until:
        late = [m.doc.id for m in members if m.said and m.said.install.outcome != "pulled"]
        failed = dict.fromkeys(late, f"not done within {ticket.within:.1f} s")
    if failed:
        reason = "; ".join(f"{name}: {why}" for name, why in failed.items())
        _verdict(draft, group, "partial", reason[:4000], tuple(failed))
    elif pulled == len(members):
        _record(draft, group, members)
        _verdict(draft, draft.groups[group.doc.name], "current", "", ())


def _record(draft: Draft, group: Group, members: list[Member]) -> None:
    """A group's figures, in the publication's metrics."""
    ticket = group.doc.ticket
    publication = draft.publications.get(ticket.publication) if ticket is not None else None
    if publication is None:
        return
    installs = [m.said.install for m in members if m.said is not None]
    name, version = group.doc.name, publication.doc.weight_version
    metrics = publication.doc.metrics | {
        f"install_pause/{name}": max(i.seconds for i in installs),
        f"installed_bytes/{name}": float(sum(i.nbytes for i in installs)),
        f"lag/{name}": float(max(0, version - group.doc.serving - 1)) if group.doc.serving else 0.0,
        f"installed_after/{name}": draft.now - publication.begun,
    }
    metrics["bytes_domain"] = sum(v for k, v in metrics.items() if k.startswith("installed_bytes/"))
    draft.put_publication(replace(publication, doc=publication.doc.model_copy(update={"metrics": metrics})))


def _verdict(draft: Draft, group: Group, verdict: str, reason: str, members: tuple[str, ...]) -> None:
    ticket = group.doc.ticket
    if ticket is None:
        return
    _answer(draft, group, VerdictDoc(
        ticket=ticket.id, verdict=verdict, weight_version=ticket.weight_version, publication=ticket.publication,  # type: ignore[arg-type]
        asks=ticket.asks, reason=reason, members=members,
    ))  # fmt: skip


def _answer(draft: Draft, group: Group, verdict: VerdictDoc) -> None:
    """Tell a group how its asks ended."""
    name = group.doc.name
    draft.change_group(name, ticket=None, verdict=verdict)
    if verdict.ticket:
        draft.groups[name] = replace(draft.groups[name], restored=False)
    draft.log("group.verdict", group=name, verdict=verdict.verdict, version=verdict.weight_version,
              ticket=verdict.ticket, reason=verdict.reason)  # fmt: skip
    group = draft.groups[name]
    if verdict.verdict == "current":
        draft.change_group(name, serving=verdict.weight_version, serving_publication=verdict.publication)
        draft.put_group(replace(draft.groups[name], behind_since=None))
        _become(draft, draft.groups[name], GroupState.CURRENT)
    elif verdict.verdict == "partial":
        draft.durable = True
        draft.change_group(name, serving=0, serving_publication="")
        _become(draft, draft.groups[name], GroupState.PARTIAL, verdict.reason)


def _stand(draft: Draft, group: Group) -> None:
    """Where a group stands now that all is said."""
    doc = group.doc
    last = committed(draft)
    behind = doc.whole and last is not None and doc.serving_publication != last.doc.id
    if behind != (group.behind_since is not None):
        group = replace(group, behind_since=draft.now if behind else None)
        draft.groups[doc.name] = group
    if doc.ticket is not None:
        return
    if not doc.whole:
        draft.change_group(doc.name, serving=0, serving_publication="")
        if doc.state is not GroupState.PARTIAL:
            _become(draft, draft.groups[doc.name], GroupState.STALE, doc.reason)
    elif doc.state is not GroupState.PARTIAL or doc.serving:
        _become(draft, group, target_state(draft, group))
