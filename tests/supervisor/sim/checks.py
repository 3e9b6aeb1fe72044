"""What must hold, after every event. `Broken` says which promise was broken, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_reshard.member.core import SlotState
from elastic_reshard.protocol.docs import GroupState, MemberState, PublicationDoc, PublicationState, VerdictDoc
from elastic_reshard.protocol.messages import Fill
from elastic_reshard.protocol.view import View
from elastic_reshard.supervisor.core import Job
from elastic_reshard.supervisor.events import Effects
from tests.supervisor.sim.memory import cells_of
from tests.supervisor.sim.shell import covers

if TYPE_CHECKING:
    from tests.supervisor.sim.clock import Proc
    from tests.supervisor.sim.members import Member, Round
    from tests.supervisor.sim.shell import Supervisor
    from tests.supervisor.sim.world import World

__all__ = ["Broken", "Checks", "Over"]

MOVING, COMMITTED, RELEASED, ABANDONED = PublicationState
_IN_USE = (MOVING, COMMITTED)
_NEXT = {MOVING: {COMMITTED, ABANDONED}, COMMITTED: {RELEASED}, RELEASED: set(), ABANDONED: set()}
_PART = (MemberState.LIVE, MemberState.LEAVING)


class Broken(AssertionError):
    """A promise that did not hold."""


class Over(Exception):
    """Nothing is left that was promised anything."""


class Checks:
    """Knows the truth: what was written where, what was minted, what every supervisor was."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.newest: Job | None = None
        self.states: dict[str, PublicationState] = {}
        self.minted: dict[str, PublicationDoc] = {}
        self.uids: dict[str, int] = {}
        self.versions: dict[int, str] = {}
        self.ever_committed: set[str] = set()
        self.judged: dict[str, str] = {}
        self.writes_at: dict[tuple[str, int, int], Round] = {}
        self.offers: dict[int, dict[int, tuple[Member, Fill]]] = {}
        self.published: set[int] = set()
        self.overwritten: set[int] = set()
        self.views: dict[tuple[int, str, int], tuple[Any, ...]] = {}
        self.refused: set[str] = set()
        self.obeyed: dict[str, int] = {}
        self.given_up: set[int] = set()  # rounds that an operator abandoned
        self.voided = False
        self.told_current: dict[str, dict[str, str]] = {}  # ticket -> member -> what it was told to hold

    def fail(self, what: str) -> None:
        """A promise is broken."""
        raise Broken(what)

    def must(self, holds: bool, what: str) -> None:
        """A promise."""
        if not holds:
            raise Broken(what)

    # -- supervisors

    def began(self, supervisor: Supervisor) -> None:
        """A new start of a supervisor, from its journal."""
        job = supervisor.job
        if not job.recover_from:
            if self.newest is not None:
                self._committed(self.newest, job)
            self.newest = job
            self._catch_up(job)
        self._remember(job)

    def outbid(self, job: Job) -> None:
        """It has taken a higher term while it recovers, and tells its view under that."""
        self._remember(job)

    def _recovered(self, newest: Job | None, job: Job) -> None:
        """A journal was lost, and what members and watchdogs knew has been put together."""
        if not any(dog.alive for dog in self.world.knowers):
            raise Over("the last who knew of it has left")
        self._catch_up(job)
        if newest is not None:
            self._committed(newest, job)
            self.must(job.membership_epoch >= newest.membership_epoch, "the epoch went back")

    def _catch_up(self, job: Job) -> None:
        """What a supervisor wrote and never told."""
        order = list(PublicationState)
        for key, publication in job.publications.items():
            now, was = publication.doc.state, self.states.get(key)
            if was is None:
                self._mint(publication.doc)
            self.must(
                was is None or now is was or order.index(was) < order.index(now) or was is COMMITTED,
                f"{key}: {was} to {now}",
            )
            self.must(was is not COMMITTED or now in (COMMITTED, RELEASED), f"{key} was committed and is {now}")
            if now in (COMMITTED, RELEASED):
                self.ever_committed.add(key)
            self.states[key] = now

    def _remember(self, job: Job) -> None:
        docs = tuple(
            {k: v.doc for k, v in side.items()} for side in (job.members, job.groups, job.publications, job.transfers)
        )
        self.views[job.term, job.instance, job.revision] = (*docs, job.membership_epoch, job.committed)

    def stepped(self, supervisor: Supervisor, before: Job, job: Job, effects: Effects) -> None:
        """A supervisor has gone from one state to the next, and written what it had to."""
        if effects.told is not None or job.term != before.term:
            self._remember(job)
        newest = self.newest
        if job.recover_from or (newest is not None and job.term < newest.term):
            return
        self.newest = job
        if before.recover_from:
            self._recovered(newest, job)
            return
        for happened in effects.happened:
            if happened.event == "group.counts_anew":
                self.voided = True  # what its ranks offered is given up, and told so
                self.given_up |= self.published
            if happened.event == "member.refused":
                self.refused.add(happened.fields["member"])
            if happened.event.startswith("publication."):
                self._publication(happened.fields["publication"], PublicationState(happened.event[12:]), before, job)
        for key, publication in job.publications.items():
            self.must(self.states[key] is publication.doc.state, f"{key} became {publication.doc.state} silently")
        self._committed(before, job)
        self._epoch(before, job, {h.event for h in effects.happened})
        self.world.landings.stepped(before, job, effects)
        for name, group in job.groups.items():
            was = before.groups.get(name)
            if was is None or was.doc is not group.doc:
                self._group(was.doc if was else None, group.doc, job)
            ticket = group.doc.ticket
            if ticket is not None and f":{job.term}." in ticket.id:
                state = job.publications[ticket.publication].doc.state
                lost = not all(self.world.arenas[s.arena].lives for s in self.minted[ticket.publication].sources)
                self.must(state is COMMITTED or lost, f"{ticket.publication} is {state} while {ticket.id} is out")
        self._bounds(job)

    def _publication(self, key: str, state: PublicationState, before: Job, job: Job) -> None:
        was = self.states.get(key)
        if state is MOVING:
            self.must(was is None, f"{key} was {was} and is moving")
            self._mint(job.publications[key].doc)
        else:
            self.must(was is not None and state in _NEXT[was], f"{key} went from {was} to {state}")
        if state is COMMITTED:
            complete = job.publications[key].doc.metrics["groups_complete"]
            sides = [
                [g for g in j.groups.values() if g.doc.whole and "destination" in g.doc.roles] for j in (before, job)
            ]
            whole = max(map(len, sides))
            least = job.policies.min_groups
            self.must(
                min(complete, whole) >= least, f"{key} was committed with {complete} of {least} groups ({whole} whole)"
            )
            self.ever_committed.add(key)
        if state is ABANDONED:
            self.given_up.add(self.uids[key])
        self.states[key] = state

    def _mint(self, doc: PublicationDoc) -> None:
        self.must(doc.weight_version not in self.versions, f"version {doc.weight_version} was minted twice")
        self.must(doc.weight_version > max(self.versions, default=0), f"version {doc.weight_version} is not a rise")
        self.versions[doc.weight_version] = doc.id
        self.minted[doc.id] = doc
        rounds = set()
        for source in doc.sources:
            at = (source.arena, source.slot, source.generation)
            self.must(at in self.writes_at, f"{doc.id} has a slot {at} that was never offered")
            rounds.add(self.writes_at[at].uid)
            now = self.world.arenas[source.arena].generations[source.slot]
            self.must(now == source.generation, f"{doc.id} was minted of {at}, which is at generation {now} now")
        self.must(covers(doc.layout, frozenset(s.rank for s in doc.sources)), f"{doc.id} has not all of the model")
        self.must(len(rounds) == 1, f"{doc.id} mixes the publishes {rounds}")
        self.uids[doc.id] = rounds.pop()

    def _committed(self, before: Job, job: Job) -> None:
        was, now = before.committed, job.committed
        if was == now or before.recover_from:
            return
        if now:
            rises = not was or job.publications[now].doc.weight_version > before.publications[was].doc.weight_version
            self.must(rises, f"committed went from {was} to {now}")
        else:
            sources = self.minted[was].sources
            left = frozenset(s.rank for s in sources if self.world.arenas[s.arena].lives)
            self.must(not covers(self.minted[was].layout, left), f"the committed {was} was lost, its arenas are there")

    def _epoch(self, before: Job, job: Job, events: set[str]) -> None:
        if before.recover_from:
            return
        was, now = ({m for m, d in j.members.items() if d.doc.state in _PART} for j in (before, job))
        rise = job.membership_epoch - before.membership_epoch
        due = was != now or "transfer.breaking" in events
        may = due or "transfer.stopping" in events  # without those that are late
        self.must(due <= rise <= may, f"the epoch rose by {rise} while {sorted(was)} became {sorted(now)}")

    def _group(self, was: Any, doc: Any, job: Job) -> None:
        verdict: VerdictDoc | None = doc.verdict
        if doc.ticket is not None and (was is None or was.ticket != doc.ticket):
            state = job.publications[doc.ticket.publication].doc.state
            adopted = f":{job.term}." not in doc.ticket.id and state is RELEASED
            self.must(state is COMMITTED or adopted, f"a ticket for {doc.ticket.publication}, which is {state}")
            judged = doc.ticket.id in self.judged and not self._unheard(doc.ticket.id, doc.members)
            self.must(not judged, f"ticket {doc.ticket.id} was judged already, and is out again")
        if verdict is not None and verdict.ticket and (was is None or was.verdict != verdict):
            told = self.judged.setdefault(verdict.ticket, verdict.verdict)
            unheard = self._unheard(verdict.ticket, doc.members)
            self.judged[verdict.ticket] = verdict.verdict
            self.must(
                told == verdict.verdict or unheard, f"ticket {verdict.ticket} was {told} and is {verdict.verdict}"
            )
            if verdict.verdict == "current":
                for name in doc.members:
                    self._exact(self.world.members[name], verdict.publication, "when its group was told CURRENT")
        became = doc.state is GroupState.CURRENT and (was is None or was.state is not GroupState.CURRENT)
        if became:
            self.must(doc.whole, f"group {doc.name} is CURRENT and not whole")
            self.must(bool(doc.serving_publication), f"group {doc.name} is CURRENT and serves nothing")
        if doc.serving_publication and (was is None or was.serving_publication != doc.serving_publication):
            self.must(doc.serving_publication in self.ever_committed, f"{doc.name} serves what was never committed")
            for name in doc.members:
                held = self.world.members[name].core.holding
                same = held is None or held.publication == doc.serving_publication or not verdict
                self.must(
                    same or bool(verdict and verdict.ticket),
                    f"{name} holds {held}, its group {doc.serving_publication}",
                )

    def _unheard(self, ticket: str, seated: tuple[str, ...]) -> bool:
        """Whether a verdict CURRENT was given and nobody who is there was told: a later supervisor may not know of it."""
        return self.judged[ticket] == "current" and not self.told_current.get(ticket, {}).keys() & set(seated)

    def _bounds(self, job: Job) -> None:
        finished = [p for p in job.publications.values() if p.doc.state in (RELEASED, ABANDONED)]
        self.must(len(finished) <= 16 and len(job.publications) <= 20, f"{len(job.publications)} publications are kept")
        self.must(len(self.stray(job)) <= 8, f"{len(job.members)} members are kept")
        for group in job.groups.values():
            self.must(len(group.doc.eras) <= 2, f"{len(group.doc.eras)} eras of {group.doc.name}")
        self.must(len(job.hosts) <= len(self.world.watchdogs), f"hosts {list(job.hosts)} are kept")
        self.must(set(job.waiting) <= set(job.members), f"{job.waiting} wait, and are no members")

    def stray(self, job: Job) -> list[str]:
        """Members that are in no seat and in no publication, and whose processes are gone."""
        seats = {m for g in job.groups.values() for m in g.doc.members}
        docs = [p.doc for p in job.publications.values() if p.doc.state in _IN_USE]
        used = {s.member for doc in docs for s in (*doc.sources, *doc.landings)}
        used |= {m for t in job.transfers.values() for m in t.doc.members}
        return [m for m in job.members if m not in seats and m not in used and not self.world.members[m].alive]

    # -- members

    def expected(self, member: Member, publication: str) -> dict[int, Any]:
        """What exactly a member holds that has installed it."""
        uid, spec = self.uids[publication], member.core.group
        layout = f"D{member.core.destination}x{spec.size}"
        return {cell: (uid, cell) for cell in cells_of(layout, spec.rank)}

    def _exact(self, member: Member, publication: str, when: str) -> None:
        wanted = self.expected(member, publication)
        self.must(member.tensors == wanted, f"{member.name} has {member.tensors} {when}, {publication} is {wanted}")

    def held(self, member: Member) -> None:
        """A member's install call has ended."""
        holding = member.core.holding
        if holding is None:
            return
        self.must(holding.publication in self.ever_committed, f"{member.name} holds {holding}, never committed")
        self._exact(member, holding.publication, "by verdict")
        told = self.told_current.setdefault(holding.ticket, {})
        told[member.name] = f"{holding.publication} {holding.weight_version}"
        self.must(len(set(told.values())) == 1, f"ticket {holding.ticket} was told as {told}")

    def replica(self, name: str, view: View) -> None:
        """Somebody's view has changed: it must be a state that the supervisor was in."""
        self.must(
            view.term >= self.obeyed.get(name, 0),
            f"{name} has obeyed {self.obeyed.get(name)}, now it obeys {view.term}",
        )
        self.obeyed[name] = view.term
        known = self.views.get((view.term, view.instance, view.revision))
        now = (
            view.members, view.groups, view.publications, view.transfers, view.membership_epoch, view.committed,
        )  # fmt: skip
        self.must(known == now, f"{name} has a view {view.term}/{view.instance}/{view.revision} that never was")

    def writes(self, member: Member, slot: SlotState) -> None:
        """A member begins to write a slot."""
        generation = self.world.arenas[slot.arena].generations[slot.slot]
        at = (slot.arena, slot.slot, generation)
        if at in self.writes_at:
            self.overwritten.add(self.writes_at[at].uid)
        for job in (self.newest,) if self.newest else ():
            for publication in job.publications.values():
                doc = publication.doc
                if doc.state in _IN_USE and any((s.arena, s.slot, s.generation) == at for s in doc.sources):
                    self.fail(f"{member.name} writes slot {at} of {doc.id}, which is {doc.state}")

    def offered(self, member: Member, fill: Fill, round_: Round) -> None:
        """A member has written a slot."""
        self.writes_at[fill.arena, fill.slot, fill.generation] = round_
        ranks = self.offers.setdefault(round_.uid, {})
        ranks[member.core.group.rank] = (member, fill)
        theirs = {m for m, _ in ranks.values()}
        others = [m for m in self.world.members.values() if m.alive and m.core.group.name == member.core.group.name]
        if len(ranks) == member.core.group.size and theirs.issuperset(others):
            self.published.add(round_.uid)  # before anybody came in another's place

    def dropped(self, who: Proc, arena: str) -> None:
        """A watchdog gives an arena's descriptor up."""
        for publication in self.newest.publications.values() if self.newest else ():
            doc = publication.doc
            needed = doc.state in _IN_USE and any(s.arena == arena for s in (*doc.sources, *doc.landings))
            self.must(not needed, f"{who.name} dropped arena {arena}, {doc.id} is {doc.state} and needs it")

    def in_time(self, member: Member, deadline: float, slack: float) -> None:
        """A call has ended."""
        late = self.world.clock.now - max(deadline, member.froze) - slack
        self.must(late <= 0, f"a call of {member.name} ended {late:.2f} s after its deadline")

    def each(self) -> None:
        """After every event: no group serves two versions at once."""
        if self.newest is None:
            return
        for group in self.newest.groups.values():
            held = set()
            for name in group.doc.members:
                member = self.world.members.get(name)
                if member is not None and member.alive and member.core.holding is not None:
                    held.add(member.core.holding.publication)
            self.must(len(held) <= 1, f"group {group.doc.name} serves {held} at once")

    # -- in the end

    def owed(self) -> int:
        """The newest round that all ranks had published and that may not be lost; 0 for none."""
        found = 0
        for uid in self.published - self.overwritten:
            if all(self._offered_still(*offer) for offer in self.offers[uid].values()):
                found = max(found, uid)
        return found

    def _offered_still(self, member: Member, fill: Fill) -> bool:
        if not member.alive and self.world.read.get(member.name, 0) < member.core.number:
            return False  # it and its watchdog were lost at once
        if member.name in self.refused:
            return False  # cut off in the middle of a change of layout, and refused for ranks that differ
        slot = next((s for s in member.core.slots if s.fill == fill), None)
        return slot is not None and slot.withdrawn is None and self.world.arenas[fill.arena].lives

    def settled(self, final: int) -> str:
        """After calm: what has not come about yet; "" when all is well."""
        job, world = self.newest, self.world
        if job is None or job.recover_from:
            return "no supervisor decides anything"
        if not job.committed and (final or self.owed()):
            return "nothing is committed"
        done = self.uids[job.committed] if job.committed else 0
        if done < final:
            return f"round {final} is not committed, {done} is"
        if done < self.owed() and self.owed() not in self.given_up:
            return f"round {self.owed()} was published by all and is not committed, {done} is"
        away = {m.host for m in world.members.values() if m.alive} - set(job.hosts)
        if away:
            return f"hosts {sorted(away)} are not heard"
        for gang in world.installers:
            group = job.groups.get(gang.name)
            names = tuple(m.name for m in gang.ranks)
            if group is None or not group.doc.whole or group.doc.members != names:
                return f"group {gang.name} is not whole: {group.doc if group else None}"
            if group.doc.serving_publication != job.committed or (
                job.committed and group.doc.state is not GroupState.CURRENT
            ):
                if world.landings.with_nobody(job, gang.name):
                    continue
                return f"group {gang.name} serves {group.doc.serving_publication!r}, {job.committed} is committed"
            for member in gang.ranks if job.committed else ():
                if member.tensors != self.expected(member, job.committed):
                    return f"{member.name} has {member.tensors}"
        return ""

    def at_rest(self) -> None:
        """No call is open, nothing is kept that nobody needs."""
        job = self.newest
        open_ = [m.name for m in self.world.members.values() if m.alive and (m.publishing or m.installing)]
        self.must(not open_, f"calls of {open_} never ended")
        stray = [str(job.members[m]) for m in self.stray(job)] if job else []
        self.must(not stray, f"members {stray} are kept and nobody needs them")
        self.world.landings.at_rest()
