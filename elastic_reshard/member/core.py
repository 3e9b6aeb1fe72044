"""What one member decides, by the view it was told: which slot may be written, which ticket is its own, how a call ended.

Pure: no I/O, no clock, no threads. `member.session` drives it under a lock; the simulator drives it without processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from elastic_reshard.protocol.base import Role
from elastic_reshard.protocol.docs import (
    GroupDoc,
    GroupState,
    MemberDoc,
    MemberState,
    PublicationDoc,
    PublicationState,
    TicketDoc,
    VerdictDoc,
)
from elastic_reshard.protocol.messages import Fill, GroupSpec, Holding, Install, Landing, Reach, Statement
from elastic_reshard.protocol.view import Farewell, Heard, Told, View

__all__ = ["MemberCore", "SlotState"]

_IN_USE = (PublicationState.MOVING, PublicationState.COMMITTED)
_HOLDING = (MemberState.JOINING, MemberState.LIVE, MemberState.LEAVING, MemberState.ORPHANED)  # have arenas that serve
_PERHAPS_COMPLETE = (GroupState.COMPLETE, GroupState.INSTALLING, GroupState.PARTIAL, GroupState.LEFT_BEHIND)
_UNREADABLE = (MemberState.LOST, MemberState.FORFEIT, MemberState.REFUSED)
_REMEMBERED = 64


@dataclass
class SlotState:
    """One slot of this member's arena. fill: what was offered last; withdrawn: the statement from which on it is not
    offered any more."""

    arena: str
    slot: int
    fill: Fill | None = None
    withdrawn: int | None = None
    writing: bool = False


class MemberCore:
    """One incarnation's part of the protocol. Not for several threads at once."""

    def __init__(self, member: str, group: GroupSpec, roles: frozenset[Role], host: str, pid: int) -> None:
        self.member, self.group, self.roles, self.host, self.pid = member, group, roles, host, pid
        self.view = View()
        self.number = 0  # of the last statement
        self.heard = 0  # statements up to here were taken in, and the view shows it
        self.source: str | None = None
        self.destination: str | None = None
        self.source_from = 0
        self.count = 0  # the last publish
        self.count_from = 0  # as the group's document says
        self._label: str | None = None  # of the last publish
        self._offered: tuple[int, str | None, int] = 0, None, 0  # last: number, label; a digest of the numbers of all
        self.unsaid = False  # something changed that the supervisor waits for: state it
        self.install = Install()
        self.holding: Holding | None = None
        self.leaving = False
        self.device = ""
        self.networks: dict[str, str] = {}
        self.window: Literal["anytime", "paused", "network"] = "anytime"
        self.reach: Reach | None = None
        self.label = ""  # of its domain, if its user gave one
        self.farewell: Farewell | None = None
        self.slots: list[SlotState] = []
        self.landing: Landing | None = None
        self._landing_for = ""  # the destination layout that it was made for
        self._old_landings: set[str] = set()  # made for another layout, not withdrawn yet
        self._held_with: tuple[str, ...] = ()
        self._minted: dict[int, PublicationDoc] = {}

    # -- what it says and hears

    def statement(self) -> Statement:
        """All that is to be said now, with a new number."""
        self.number += 1
        self.unsaid = False
        fills = tuple(s.fill for s in self.slots if s.fill is not None and s.withdrawn is None)
        return Statement(
            member=self.member, group=self.group, roles=self.roles, host=self.host, pid=self.pid, number=self.number,
            source=self.source, destination=self.destination, source_from=self.source_from,
            count_from=self.count_from, fills=fills, install=self.install, holding=self.holding, landing=self.landing,
            leaving=self.leaving, device=self.device, networks=self.networks, window=self.window,
            reach=self.reach, domain=self.label,
        )  # fmt: skip

    def hear(self, said: Told | Heard | Farewell) -> bool:
        """Take in a message; False if it is not to be obeyed or leaves a gap (then a new snapshot is needed)."""
        if isinstance(said, Told):
            if not self.view.apply(said):
                return False
            # Of an earlier connection, or of a supervisor that another has taken over from. One that ends a job may still be
            # reached for a moment by a watchdog that connects again, and what that tells does not begin the job anew.
            if not (self.over and self.farewell is not None and self.farewell.instance == said.instance):
                self.farewell = None
            self._learn()
            return True
        if not self.view.obeys(said.term, said.instance):
            return False
        if isinstance(said, Farewell):
            self.farewell = said
        elif said.revision <= self.view.revision:
            self.heard = max(self.heard, said.numbers.get(self.member, 0))
        return True

    def _learn(self) -> None:
        group = self.my_group
        # Also if this rank came late and its slot is not among the sources: one answer for all ranks.
        peers = {
            m for era in (group.eras if group is not None else ()) if self.member in era.members for m in era.members
        }
        peers.add(self.member)
        for doc in self.view.publications.values():
            if doc.group == self.group.name and any(source.member in peers for source in doc.sources):
                self._minted[doc.seq] = doc
        while len(self._minted) > _REMEMBERED:
            del self._minted[min(self._minted)]
        if group is not None and self._seated(group) and group.count_from > self.count_from:
            self.count_from, self.unsaid = group.count_from, True
        if group is not None and self.holding is not None and (not group.whole or group.members != self._held_with):
            self.holding = None
        layout = group.destination_layout if group is not None else None
        if layout is not None and self.landing is not None and layout != self._landing_for:
            self._old_landings.add(self.landing.arena)
            self.landing, self._landing_for, self.unsaid = None, "", True

    @property
    def me(self) -> MemberDoc | None:
        """This incarnation's document."""
        return self.view.members.get(self.member)

    @property
    def domain(self) -> str:
        """The domain that this member is in, as the supervisor tells."""
        return self.me.where if self.me is not None else self.host

    @property
    def my_group(self) -> GroupDoc | None:
        """This member's group."""
        return self.view.groups.get(self.group.name)

    def _seated(self, group: GroupDoc) -> bool:
        return group.seats(self.member, self.group.rank)

    @property
    def accepted(self) -> str | None:
        """The fragment of its source layout with which the group took this member in last."""
        group = self.my_group
        if group is None or not self._seated(group) or not group.fragments:
            return None
        return group.fragments[self.group.rank][0]

    @property
    def admitted(self) -> bool:
        """Whether this member takes part, in a whole group."""
        group = self.my_group
        return group is not None and group.whole and self._seated(group)

    @property
    def out(self) -> str:
        """Why this member takes no part any more; "" while it does or may."""
        if self.over:
            return "its job is over"
        doc = self.me
        if doc is not None and doc.state in (MemberState.LOST, MemberState.ORPHANED, MemberState.REFUSED):
            return doc.reason or f"it is {doc.state}"
        return ""

    @property
    def parting(self) -> bool:
        """Whether its end is its own, or known to it: it leaves, was asked to, or its job is over."""
        asked = self.me is not None and self.me.leave_within is not None
        return self.leaving or asked or self.over

    @property
    def over(self) -> bool:
        """Whether its job is: nobody takes note of anything any more."""
        return self.farewell is not None and self.farewell.over

    def missing(self) -> list[str]:
        """Ranks of the group that are not there, with the last known member of each."""
        group = self.my_group
        if group is None:
            return [f"rank {r}" for r in range(self.group.size) if r != self.group.rank]
        found = []
        for rank, name in enumerate(group.members):
            doc = self.view.members.get(name)
            if doc is None or doc.state not in (MemberState.LIVE, MemberState.LEAVING, MemberState.JOINING):
                found.append(f"rank {rank} ({name}: {doc.reason or doc.state})" if name and doc else f"rank {rank}")
        return found

    # -- publishing

    def new_arena(self, arena: str, slots: int) -> None:
        """Publish into a new arena from now on; older ones are kept in mind until their slots are free."""
        self.slots += [SlotState(arena, slot) for slot in range(slots)]

    def next_publish(self, label: str | None = None) -> int:
        """The number of a publish that begins. Taken first of all: a call that fails is its step too. One with the label of the
        call that failed just before is that one again, where labels tell steps apart."""
        seq, told, _ = self._offered
        again = label not in (None, told) and label == self._label and seq < self.count > self.count_from
        if not again:
            self.count = max(self.count, self.count_from) + 1
        self._label = label
        return self.count

    @property
    def must_label(self) -> bool:
        """Whether publishes without a label could be taken for others': some ranks were replaced, or counted otherwise."""
        group = self.my_group
        return group is not None and bool(group.eras) and group.eras[-1].mixed

    def referenced(self, slot: SlotState) -> PublicationDoc | None:
        """The publication that needs the slot's bytes, if one does."""
        if slot.fill is None:
            return None
        at = (self.member, slot.arena, slot.slot, slot.fill.generation)
        for doc in self.view.publications.values():
            if doc.state in _IN_USE and any((s.member, s.arena, s.slot, s.generation) == at for s in doc.sources):
                return doc
        return None

    def _free(self, slot: SlotState) -> bool:
        if slot.writing:
            return False
        if slot.fill is None:
            return True
        group = self.my_group
        never = group is not None and slot.fill.seq <= group.floor
        never = never or (slot.withdrawn is not None and slot.withdrawn <= self.heard)
        return never and self.referenced(slot) is None

    def claim(self, arena: str) -> tuple[SlotState | None, bool]:
        """(a slot to write, whether a statement is to be sent). Without a slot: wait for the next change, call again.

        The oldest free one; else a publish that was offered and is not minted is withdrawn: the newest replaces it."""
        mine = [s for s in self.slots if s.arena == arena]
        for slot in mine:
            if slot.withdrawn is not None and self.referenced(slot) is not None:
                slot.withdrawn = None  # it was minted before that was heard
        free = [s for s in mine if self._free(s)]
        if free:
            slot = min(free, key=lambda s: s.fill.seq if s.fill is not None else 0)
            slot.fill, slot.withdrawn, slot.writing = None, None, True
            return slot, False
        if any(s.withdrawn is not None for s in mine):
            return None, False
        waiting = [s for s in mine if s.fill is not None and not s.writing and self.referenced(s) is None]
        if waiting:
            oldest = min(waiting, key=lambda s: s.fill.seq if s.fill is not None else 0)
            oldest.withdrawn = self.number + 1
            return None, True
        return None, False

    def unclaim(self) -> bool:
        """The call ended without an offer: what it had claimed is free, what it had withdrawn is offered again. Whether a
        statement is to be sent."""
        changed = False
        for slot in self.slots:
            if slot.writing:
                slot.fill, slot.writing = None, False
            if slot.withdrawn is not None:
                slot.withdrawn, changed = None, True
        return changed

    def offer(self, slot: SlotState, fill: Fill) -> None:
        """A claimed slot has been written: it may be minted."""
        slot.fill, slot.writing = fill.model_copy(update={"before": self._offered[2]}), False
        self._offered = fill.seq, fill.label, zlib.crc32(fill.seq.to_bytes(8, "little"), self._offered[2])

    def holders(self, arena: str) -> list[str]:
        """Who holds the arena's slots, in words."""
        found = []
        for slot in self.slots:
            if slot.arena != arena:
                continue
            doc = self.referenced(slot)
            if doc is not None:
                users = [
                    g.name for g in self.view.groups.values() if g.ticket is not None and g.ticket.publication == doc.id
                ]
                by = f", installed now by {', '.join(users)}" if users else ""
                found.append(f"slot {slot.slot}: version {doc.weight_version} ({doc.state}{by})")
            else:
                found.append(f"slot {slot.slot}: a publish that is offered, or being written")
        return found

    def unused_arenas(self, current: str) -> list[str]:
        """Older arenas whose slots nobody needs; they are forgotten here."""
        old = {s.arena for s in self.slots if s.arena != current}
        gone = [a for a in old if all(self._free(s) for s in self.slots if s.arena == a)]
        self.slots = [s for s in self.slots if s.arena not in gone]
        return gone

    def published(self, seq: int) -> tuple[str, PublicationDoc | None]:
        """How far a publish is: "offered", "moving", "committed", "released", "abandoned", or "void": never minted."""
        doc = self._minted.get(seq)
        if doc is not None:
            now = self.view.publications.get(doc.id)
            if now is None and doc.state in _IN_USE and self.view.publications:
                return "released", doc  # forgotten long ago
            return str((now or doc).state), now or doc
        group = self.my_group
        if group is not None and seq <= group.floor:
            return "void", None
        offered = any(s.fill is not None and s.fill.seq == seq and s.withdrawn is None for s in self.slots)
        return ("offered" if offered else "void"), None

    # -- landing

    def wants_landing(self) -> bool:
        """Whether what this member installs may have to come from another domain, so that it needs memory to land in."""
        if "destination" not in self.roles:
            return False
        members, here = self.view.members.values(), self.domain
        sources = [m for m in members if "source" in m.roles and m.state in _HOLDING]
        if any(m.where != here for m in sources):
            return True
        docs = [p for p in self.view.publications.values() if p.state in _IN_USE]
        domains = {at.where for doc in docs for at in doc.sources} | {at.where for doc in docs for at in doc.landings}
        if domains - {here}:
            return True
        return not sources and any(m.state is MemberState.LIVE and m.where != here for m in members)

    def landing_due(self) -> str | None:
        """The destination layout for which a landing arena is to be made now; None if none is wanted, or it is there."""
        group = self.my_group
        if group is None or group.destination_layout is None or not self.admitted or not self.wants_landing():
            return None
        return group.destination_layout if group.destination_layout != self._landing_for else None

    def new_landing(self, landing: Landing, layout: str) -> None:
        """Land in this arena from now on, as soon as it is stated."""
        if self.landing is not None:
            self._old_landings.add(self.landing.arena)
        self.landing, self._landing_for = landing, layout

    def has_unused_landings(self) -> bool:
        """Whether `unused_landings` has something to tell."""
        return bool(self._old_landings) and bool(self._old_landings - self._landings_in_use())

    def unused_landings(self) -> list[str]:
        """Landing arenas for former layouts that nothing in the view refers to; they are forgotten here."""
        gone = sorted(self._old_landings - self._landings_in_use())
        self._old_landings.difference_update(gone)
        return gone

    def _landings_in_use(self) -> set[str]:
        docs = [p.landings for p in self.view.publications.values() if p.state in _IN_USE]
        docs += [t.landings for t in self.view.transfers.values()]
        return {at.arena for landings in docs for at in landings}

    def gone(self) -> frozenset[str]:
        """Members whose arenas nobody counts on any more: what is needed of them lies elsewhere too."""
        return frozenset(name for name, doc in self.view.members.items() if doc.state in _UNREADABLE)

    # -- installing

    def installable(self) -> PublicationDoc | None:
        """The committed publication, if this member's whole group does not serve it yet and has every byte in its domains."""
        doc = self.view.publications.get(self.view.committed)
        group = self.my_group
        if doc is None or doc.state is not PublicationState.COMMITTED or group is None or not self.admitted:
            return None
        if "destination" not in self.roles:
            return None
        return doc if group.serving_publication != doc.id and self._arrived(doc, group) else None

    def _arrived(self, doc: PublicationDoc, group: GroupDoc) -> bool:
        """Whether all that each rank of the group needs is in its domain, as far as the view shows it."""
        for rank, name in enumerate(group.members):
            member = self.view.members.get(name)
            here = member.where if member is not None else self.domain
            near = sum(source.where == here for source in doc.sources)
            landed = any(
                at.where == here and at.layout == group.destination_layout and rank in at.ranks for at in doc.landed
            )
            # Replicas near may hold everything: only the supervisor knows, and says so by the group's state.
            replicas = near > 0 and group.state in _PERHAPS_COMPLETE
            if near < len(doc.sources) and not landed and not replicas:
                return False
        return True

    def ask(self, patience: float) -> None:
        """An install call begins. A ticket that was pulled and has no verdict yet stays this member's ticket."""
        undecided = self.install.outcome == "pulled" and self.answer() is None
        keep: Mapping[str, Any] = (
            {
                "ticket": self.install.ticket,
                "outcome": "pulled",
                "seconds": self.install.seconds,
                "nbytes": self.install.nbytes,
            }
            if undecided
            else {}
        )
        self.install = Install(ask=self.install.ask + 1, asking=True, patience=max(0.0, patience), **keep)

    def grant(self) -> TicketDoc | None:
        """The ticket that answers this member's call and was not taken up yet."""
        group = self.my_group
        ticket = group.ticket if group is not None else None
        if ticket is None or not self.install.asking or ticket.asks.get(self.member) != self.install.ask:
            return None
        # Pulled already, by an earlier call or under an earlier supervisor: its verdict is all that is wanted.
        done = (self.install.ticket, self.holding.ticket if self.holding is not None else None)
        return ticket if ticket.id not in done else None

    def take_up(self, ticket: TicketDoc) -> None:
        """The pull begins. From here on the live tensors are nobody's version until a verdict says so."""
        self.holding = None
        self.install = self.install.model_copy(update={"ticket": ticket.id, "outcome": "pulling"})

    def report(self, ok: bool, reason: str, seconds: float, nbytes: int) -> None:
        """The pull ended."""
        outcome = "pulled" if ok else "failed"
        self.install = self.install.model_copy(
            update={"outcome": outcome, "reason": reason[:4000], "seconds": seconds, "nbytes": nbytes}
        )

    def answer(self) -> VerdictDoc | None:
        """How this member's call, or the ticket it worked on, was answered."""
        group = self.my_group
        verdict = group.verdict if group is not None else None
        if verdict is None:
            return None
        if verdict.ticket and verdict.ticket == self.install.ticket:
            return verdict
        ours = verdict.asks.get(self.member) == self.install.ask and self.install.ask > 0
        return verdict if ours and self.install.ticket is None else None

    def end_call(self, verdict: VerdictDoc | None) -> None:
        """The install call ends: by a verdict, or (None) by its own deadline."""
        update: dict[str, Any] = {"asking": False}
        if verdict is not None and verdict.verdict == "current" and self.install.outcome == "pulled":
            update["outcome"] = "none"  # decided: a supervisor that starts later must not take it up again
            self.holding = Holding(
                weight_version=verdict.weight_version, publication=verdict.publication, ticket=verdict.ticket
            )
            group = self.my_group
            self._held_with = group.members if group is not None else ()
        elif verdict is not None and verdict.verdict == "partial":
            self.holding = None
            update |= {"outcome": "failed", "reason": verdict.reason}
        elif verdict is None and self.install.outcome == "pulling":
            update |= {"outcome": "failed", "reason": "its call ended before it had installed"}
        self.install = self.install.model_copy(update=update)
