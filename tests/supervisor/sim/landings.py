"""What must hold of movers, landing slots and transfers, whatever goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_reshard.protocol.docs import PublicationDoc, PublicationState, TransferDoc
from elastic_reshard.supervisor.core import Job
from elastic_reshard.supervisor.events import Effects
from elastic_reshard.supervisor.holdings import reachable
from elastic_reshard.supervisor.state import Draft
from elastic_reshard.supervisor.unproved import unproved
from tests.supervisor.sim.memory import LandingArena, cells_of
from tests.supervisor.sim.shell import covers

if TYPE_CHECKING:
    from tests.supervisor.sim.movers import Mover
    from tests.supervisor.sim.world import World

__all__ = ["Landings"]

_IN_USE = (PublicationState.MOVING, PublicationState.COMMITTED)
LONGEST = 120.0  # seconds that a transfer may be in the view


class Landings:
    """Knows what movers do to memory."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.at_work: dict[
            str, tuple[Mover, str]
        ] = {}  # member -> its mover that has a communicator, and of which transfer
        self.excused: set[tuple[Mover, str]] = set()
        self.arrivals: dict[
            tuple[str, str, str, int], int
        ] = {}  # (publication, host, layout, cell) -> how often it landed
        self.formed: dict[str, int] = {}  # publication -> transfers
        self.begun_at: dict[str, float] = {}

    # -- movers

    def forked(self, mover: Mover) -> None:
        """A process was made."""

    def began(self, mover: Mover, doc: TransferDoc) -> None:
        """It has taken a task."""
        others = [m for m in self.world.movers.values() if m.member == mover.member and m is not mover and m.alive]
        busy = [m.name for m in others if m.work is not None and not m.work.out]
        self.world.checks.must(not busy, f"{mover.name} begins {doc.id} while {busy} of the same member are at work")

    def forms(self, mover: Mover, doc: TransferDoc) -> None:
        """It is about to meet the others."""
        self.at_work[mover.member] = (mover, doc.id)

    def finished(self, mover: Mover) -> None:
        """Its communicator is closed."""
        if self.at_work.get(mover.member, (None, ""))[0] is mover:
            del self.at_work[mover.member]

    def reset(self, mover: Mover, arena: LandingArena, slot: int, publication: str) -> None:
        """A landing slot is to be used for a publication."""
        held, job = arena.publications[slot], self.world.checks.newest
        if held in ("", publication) or job is None or held not in job.publications:
            return
        doc = job.publications[held].doc
        kept = doc.state in _IN_USE and any((p.arena, p.slot) == (arena.arena, slot) for p in doc.landings)
        self.world.checks.must(
            not kept, f"{mover.name} resets slot {slot} of {arena.owner} for {publication}, {held} is {doc.state}"
        )

    def wrote(self, mover: Mover, arena: LandingArena, slot: int, cell: int) -> None:
        """Bytes were put into a landing slot."""
        if cell in arena.held[slot]:
            self._right(mover, arena, slot, cell)

    def marked(self, mover: Mover, doc: TransferDoc, arena: LandingArena, slot: int, cell: int) -> None:
        """A ledger's bit was set."""
        self._right(mover, arena, slot, cell)
        self.world.checks.must(cell in arena.own, f"{mover.name} landed cell {cell}, which is none of its member's")
        key = (arena.publications[slot], mover.host, arena.layout, cell)
        self.arrivals[key] = self.arrivals.get(key, 0) + 1

    def _right(self, mover: Mover, arena: LandingArena, slot: int, cell: int) -> None:
        publication = arena.publications[slot]
        wanted = (self.world.checks.uids[publication], cell)
        found = arena.cells[slot][cell]
        self.world.checks.must(
            found == wanted, f"{mover.name} left {found} in cell {cell} of {publication}, which is {wanted}"
        )

    # -- the supervisor

    def stepped(self, before: Job, job: Job, effects: Effects) -> None:
        """A supervisor has gone from one state to the next."""
        self.world.checks.must(len(job.transfers) <= 1, f"transfers {list(job.transfers)} at once")
        self._excuse(job)
        for happened in effects.happened:
            if happened.event in ("transfer.forming", "transfer.running"):
                of = happened.fields["transfer"]
                self._alone(job, of, happened.event == "transfer.running")
                if happened.event == "transfer.forming":
                    key = happened.fields["publication"]
                    self.formed[key] = self.formed.get(key, 0) + 1
        for key, publication in job.publications.items():
            was = before.publications.get(key)
            if publication.doc.state in _IN_USE and (was is None or was.doc is not publication.doc):
                self._claims(publication.doc)
        for transfer in job.transfers.values():
            since = self.begun_at.setdefault(transfer.doc.id, self.world.clock.now)
            self.world.checks.must(
                self.world.clock.now - since <= LONGEST,
                f"transfer {transfer.doc.id} is {transfer.doc.state} since {since:.1f}",
            )

    def _excuse(self, job: Job) -> None:
        """Movers that could not be reached when others went on; they are out before they take part again."""
        draft = Draft(job, self.world.clock.now, covers)
        judges = self.world.clock.now >= job.judge_from
        for member in self.at_work:
            gone = judges and (member not in job.members or not reachable(draft, member))
            if gone or unproved(job, member):  # the word of a watchdog that saw no end is no silence
                self.excused.add(self.at_work[member])

    def _alone(self, job: Job, transfer: str, runs: bool) -> None:
        """A new epoch forms only after each old mover that can be reached is out; none of its own members runs in another."""
        present = job.transfers[transfer].doc.present if transfer in job.transfers else ()
        for member, (mover, of) in self.at_work.items():
            out = not mover.alive or mover.work is None or mover.work.out or mover.work.doc.id != of
            gone = (mover, of) in self.excused and not (runs and member in present)
            self.world.checks.must(out or gone or of == transfer, f"{transfer} goes on while {mover.name} is in {of}")

    def _claims(self, doc: PublicationDoc) -> None:
        """What is said to have landed is there, unless it has died with somebody meanwhile."""
        for entry in doc.landed:
            parts = [p for p in doc.landings if p.host == entry.host and p.layout == entry.layout]
            arenas = [self.world.landing_arenas[p.arena] for p in parts]
            here = [s for s in doc.sources if s.host == entry.host]
            if not all(a.lives for a in arenas) or not all(self.world.arenas[s.arena].lives for s in here):
                continue
            there = {c for s in here for c in cells_of(doc.layout, s.rank)}
            for part, arena in zip(parts, arenas, strict=True):
                if arena.publications[part.slot] == doc.id:
                    there |= arena.held[part.slot]
            lacking = {c for rank in entry.ranks for c in cells_of(entry.layout, rank)} - there
            self.world.checks.must(
                not lacking, f"{doc.id} is said to be on {entry.host} as {entry.layout}, cells {lacking} are not"
            )

    # -- in the end

    def with_nobody(self, job: Job, group: str) -> bool:
        """Whether a group does without what was committed, for good reason: nobody who can be reached has all that it needs."""
        if (job.committed, group) not in job.given_up:
            return False
        doc, draft = job.publications[job.committed].doc, Draft(job, self.world.clock.now, covers)
        there = {c for s in doc.sources if reachable(draft, s.member) for c in cells_of(doc.layout, s.rank)}
        layout = job.groups[group].doc.destination_layout or ""
        for part in doc.landings:
            arena = self.world.landing_arenas[part.arena]
            if part.layout == layout and reachable(draft, part.member) and arena.publications[part.slot] == doc.id:
                there |= arena.held[part.slot]
        ranks = range(job.groups[group].doc.size)
        return not {c for rank in ranks for c in cells_of(layout, rank)} <= there

    def at_rest(self) -> None:
        """Nothing moves any more."""
        job = self.world.checks.newest
        self.world.checks.must(
            job is None or not job.transfers, f"transfers {list(job.transfers) if job else ''} never end"
        )
        busy = [m.name for m in self.world.movers.values() if m.alive and m.work is not None]
        self.world.checks.must(not busy, f"movers {busy} are still at work")
        for member in {m.member for m in self.world.movers.values()}:
            alive = [m.name for m in self.world.movers.values() if m.alive and m.member == member]
            self.world.checks.must(len(alive) <= 1, f"{member} has the movers {alive}")
