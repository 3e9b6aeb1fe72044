"""A mover is hit while its transfer moves: when, how far the others were, and what had to be moved again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from elastic_reshard.bench.elastic_demo_outcome import Fault
from elastic_reshard.bench.elastic_demo_refit import Flight, Refits
from elastic_reshard.bench.elastic_demo_watch import plain
from elastic_reshard.bench.play import Pages
from elastic_reshard.bench.stage import LIMIT
from elastic_reshard.errors import TransferTimeout
from elastic_reshard.mover.status import State
from elastic_reshard.mover.task import plan_of
from elastic_reshard.plan import Kind
from elastic_reshard.protocol.docs import PublicationDoc, TransferDoc, TransferState
from elastic_reshard.protocol.ids import name_of
from elastic_reshard.protocol.view import Told

__all__ = ["Hit", "hit", "told"]

_LOOK: Final = 0.0003  # seconds between two looks at pages in shared memory


@dataclass(frozen=True)
class Hit:
    """at: when (time.monotonic); landed: network bytes that had landed then; rounds: that each mover had begun when the
    transfer was broken off."""

    at: float
    transfer: TransferDoc
    member: str
    landed: int
    rounds: Mapping[str, int]


def hit(refits: Refits, flight: Flight, name: str, number: signal.Signals, share: float) -> Hit | None:
    """Send a signal to the mover of a member, by its name, once that share of a version's bytes has landed; returns when
    the transfer is broken off. None if there was no time for that: then nothing was broken."""
    doc = _running(refits, flight)
    if doc is None:
        return None
    member = next((m for m in doc.present if name_of(m) == name), "")
    movers = refits.stage.movers()
    pages = Pages({m: pid for m, pid in movers.items() if m in doc.present})
    try:
        landed = _landed(pages, flight.needed, share)
        mine = pages.look().get(member)
        if landed is None or mine is None or mine.state != State.RUNNING:
            return None
        os.kill(movers[member], number)
        at = time.monotonic()
        share = landed / flight.needed
        refits.sight.tell("fault", f"{number.name} to the mover of {name} (process {movers[member]}): {share:.0%} of version "
                                   f"{flight.version} has landed")  # fmt: skip
        rounds = _until_broken(refits, doc, pages)
        return Hit(at, doc, member, landed, rounds) if rounds is not None else None
    finally:
        pages.close()


def _running(refits: Refits, flight: Flight) -> TransferDoc | None:
    """The running transfer of a version; None if it was over before it was seen."""

    def look(view: Told) -> TransferDoc | bool:
        mine = {
            p.id: p.state for p in view.publications.values() if p is not None and p.weight_version == flight.version
        }
        for doc in view.transfers.values():
            if doc is not None and doc.publication in mine and doc.state is TransferState.RUNNING:
                return doc
        return any(state != "moving" for state in mine.values())

    found = look(refits.until(look, f"a transfer of version {flight.version} runs"))
    return found if isinstance(found, TransferDoc) else None


def _landed(pages: Pages, needed: int, share: float) -> int | None:
    """Wait until so much has landed; how much that is. None if all was there first."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        seen = pages.look().values()
        landed = sum(glance.received for glance in seen)
        if landed >= needed or all(glance.state == State.OUT for glance in seen):
            return None
        if landed >= share * needed:
            return landed
        time.sleep(_LOOK)
    raise TransferTimeout(f"waited {LIMIT:g} s for: {share:.0%} of {needed} bytes landed")


def _until_broken(refits: Refits, doc: TransferDoc, pages: Pages) -> dict[str, int] | None:
    """The rounds begun by each mover, when the transfer does not run any more. None if it went through whole."""
    began: dict[str, int] = {}
    view, deadline = refits.stage.client.view(), time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        now = view.transfers.get(doc.id)
        if now is None or now.state is not TransferState.RUNNING:
            broken = [
                e for e in refits.stage.events() if e.event == "transfer.breaking" and e.fields["transfer"] == doc.id
            ]
            return began if broken else None
        for member, glance in pages.look().items():
            began[member] = max(began.get(member, 0), glance.began)
        view = refits.stage.client.view(view.revision, 0.05)
    raise TransferTimeout(f"waited {LIMIT:g} s for: transfer {doc.id} is broken off or over")


def told(refits: Refits, flight: Flight, found: Hit, what: str, done: float, doc: PublicationDoc) -> Fault:
    """All that is known of a hit once its version is installed everywhere."""

    def after(kind: str) -> float:
        times = [refits.sight.when(e) - found.at for e in refits.events(doc, kind)]
        return next((max(0.0, t) for t in times if t > -0.005), 0.0)

    rounds = _rounds(refits, found.transfer, doc)
    total = sum(sum(r) for r in rounds.values())
    begun = sum(sum(r[: found.rounds.get(m, 0)]) for m, r in rounds.items())
    again = sum(int(e.fields["bytes_network"]) for e in refits.events(doc, "transfer.over")
                if e.fields["transfer"] != found.transfer.id)  # fmt: skip
    why = next((plain(e.fields["reason"]) for e in refits.events(doc, "transfer.breaking")), "")
    return Fault(
        what, name_of(found.member), flight.version, found.landed / flight.needed, after("transfer.breaking"),
        _next(refits, doc, found), after("publication.committed"), done - found.at, max(0, begun + again - total), why,
    )  # fmt: skip


def _next(refits: Refits, doc: PublicationDoc, found: Hit) -> float | None:
    """Seconds from a hit until the next transfer ran."""
    runs = [e for e in refits.events(doc, "transfer.running") if e.fields["transfer"] != found.transfer.id]
    return refits.sight.when(runs[0]) - found.at if runs else None


def _rounds(refits: Refits, doc: TransferDoc, publication: PublicationDoc) -> dict[str, list[int]]:
    """Network bytes that each member of a transfer receives in each round."""
    sides = {publication.layout: (refits.source, None)} | {
        p.layout: (refits.destination, None) for p in doc.destinations
    }
    plan = plan_of(doc, publication, sides)
    found = {}
    for member in doc.present:
        piece = plan.slice(doc.members.index(member))
        legs = piece.legs
        rows = np.flatnonzero(~legs.out & ~legs.install & (legs.kind == Kind.NET))
        found[member] = [int(n) for n in np.bincount(legs.round[rows], piece.nbytes[rows], piece.rounds)]
    return found
