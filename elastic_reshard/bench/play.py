"""Refits on a stage: played, broken into in the middle, and looked at afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from elastic_reshard.bench import rank as on
from elastic_reshard.bench.stage import Call, Gang, Stage, patience
from elastic_reshard.bench.synthetic import Layouts
from elastic_reshard.errors import ProtocolError, TransferTimeout
from elastic_reshard.layout import ModelLayout
from elastic_reshard.layout.dtypes import itemsize
from elastic_reshard.mover.status import Glance, State, StatusReader
from elastic_reshard.mover.task import plan_of
from elastic_reshard.plan import Kind
from elastic_reshard.protocol.docs import PublicationDoc, PublicationState, TransferDoc, TransferState

__all__ = ["Pages", "Play", "Played", "Shot", "distinct"]

_PAGE = "/memfd:mover status"


def distinct(layout: ModelLayout, ranks: Sequence[int]) -> int:
    """Bytes that these ranks hold, each element once."""
    total = 0
    for t in layout.values():
        regions = np.unique(np.concatenate([t.table.entry_region[t.table.entries_of(rank)] for rank in ranks]))
        total += int(t.table.numel[regions].sum()) * itemsize(t.dtype)
    return total


class Pages:
    """The status pages of movers, mapped here too: what they show at any moment, and what they showed last when they died."""

    def __init__(self, movers: Mapping[str, int]) -> None:
        self._pages = {member: reader for member, pid in movers.items() if (reader := _opened(pid)) is not None}

    def look(self) -> dict[str, Glance]:
        """By member."""
        return {member: page.glance() for member, page in self._pages.items()}

    def close(self) -> None:
        """Unmap them."""
        for page in self._pages.values():
            page.close()
        self._pages.clear()


def _opened(pid: int) -> StatusReader | None:
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith(_PAGE):
                return StatusReader(os.open(f"/proc/{pid}/fd/{name}", os.O_RDONLY | os.O_CLOEXEC))
    except (FileNotFoundError, ProcessLookupError, ProtocolError):
        return None
    return None


@dataclass
class Played:
    """A refit that is over. Times are of time.monotonic; by engine those of its slowest rank."""

    version: int
    begun: float
    returned: float
    committed: float
    done: dict[str, float] = field(default_factory=dict)
    pause: float = 0.0

    @property
    def everywhere(self) -> float:
        """Seconds from the publish of the last trainer rank to the last install."""
        return max(self.done.values()) - self.begun


@dataclass
class Shot:
    """A refit with something inflicted in its middle. at: when; landed, begun: network bytes that had landed and that were
    begun by then, of `total`; doc: the transfer in hand then."""

    at: float
    doc: TransferDoc
    landed: int
    begun: int
    total: int
    played: Played
    again: int = 0  # bytes of the transfers after it

    @property
    def flying(self) -> int:
        """Bytes begun, not landed."""
        return self.begun - self.landed

    @property
    def twice(self) -> int:
        """Of the bytes begun by then, those that were moved again."""
        return max(0, self.again + self.begun - self.total)

    def remaining(self, whole: float) -> float:
        """Seconds that the rest takes where the whole takes so many."""
        return whole * (1 - self.landed / self.total)


class Play:
    """Trainers and engines on a stage, and the versions they have had. wrong: tensors found wrong, with where."""

    def __init__(
        self, stage: Stage, layouts: Layouts, trainers: Sequence[str], engines: Sequence[Sequence[str]]
    ) -> None:
        self.stage, self.layouts = stage, layouts
        self.trainer = stage.gang("trainer", "source", layouts.source, trainers)
        self.engines = [
            stage.gang(f"engine-{n}", "destination", layouts.destination, hosts) for n, hosts in enumerate(engines)
        ]
        self.version = 0
        self.wrong: list[str] = []
        self._kept: dict[str, dict[str, Any]] = {}
        stage.join(self.trainer, *self.engines)

    # -- a refit

    def begin(self) -> tuple[list[Call], dict[str, list[Call]]]:
        """The next version: trainers publish it, engines wait for it."""
        self.version += 1
        self.trainer.do(on.fill, self.version)
        receiving = {engine.name: engine.begin(on.receive) for engine in self.engines}
        return self.trainer.begin(on.publish, self.version), receiving

    def finish(self, calls: tuple[list[Call], dict[str, list[Call]]], without: Sequence[str] = ()) -> Played:
        """Wait until it is installed everywhere (but for engines that are gone), and look at every byte."""
        told = [call.result() for call in calls[0]]
        played = Played(self.version, *(max(t[key] for t in told) for key in ("begun", "returned", "committed")))
        for engine in self.engines:
            if engine.name in without:
                continue
            found = [call.result() for call in calls[1][engine.name]]
            played.done[engine.name] = max(f["done"] for f in found)
            played.pause = max(played.pause, *(f["pause"] for f in found))
            versions = {f["version"] for f in found} | {t["version"] for t in told}
            if len(versions) > 1:
                self.wrong.append(f"{engine.name} was told other versions of step {self.version}: {versions}")
            self.look(engine)
        return played

    def look(self, engine: Gang) -> None:
        """Compare an engine's tensors with the version, bit for bit."""
        for rank, names in enumerate(engine.do(on.check, self.version)):
            if names:
                self.wrong.append(f"{engine.name} rank {rank}, version {self.version}: {', '.join(names[:5])}")

    def refit(self) -> Played:
        """One version without a fault."""
        return self.finish(self.begin())

    # -- what the supervisor says

    def publication(self, version: int | None = None) -> PublicationDoc:
        """Of a version (the last), from the view. TransferTimeout if there is none soon."""
        label = f"step-{version or self.version}"
        deadline, revision = time.monotonic() + patience(), 0
        while time.monotonic() < deadline:
            view = self.stage.client.view(revision, 0.0 if not revision else 1.0)
            revision = view.revision
            for doc in view.publications.values():
                if doc is not None and doc.label == label:
                    return doc
        raise TransferTimeout(f"{label} is no publication of the view")

    def running(self) -> TransferDoc | None:
        """The running transfer of the last version, once there is one; None if the version is committed before it was seen."""
        publication, revision = self.publication(), 0
        deadline = time.monotonic() + patience()
        while time.monotonic() < deadline:
            view = self.stage.client.view(revision, 0.0 if not revision else 1.0)
            revision = view.revision
            for doc in view.transfers.values():
                if doc is not None and doc.publication == publication.id and doc.state is TransferState.RUNNING:
                    return doc
            now = view.publications.get(publication.id)
            if now is None or now.state != "moving":
                return None
        raise TransferTimeout(f"no transfer of step-{self.version} runs")

    def idle(self) -> None:
        """Wait until no transfer is in hand."""
        revision, deadline = 0, time.monotonic() + patience()
        while time.monotonic() < deadline:
            view = self.stage.client.view(revision, 0.0 if not revision else 1.0)
            revision = view.revision
            if not any(view.transfers.values()):
                return
        raise TransferTimeout("a transfer does not end")

    def overs(self, publication: str) -> list[Any]:
        """The ends of a publication's transfers, as events of the supervisor that runs now."""
        return [e for e in self.stage.events() if e.event == "transfer.over" and e.fields["publication"] == publication]

    def stretches(self) -> dict[str, float]:
        """Seconds of the last version's way through the supervisor: from its beginning until its movers meet, until they are
        all out, until it is committed; moving: all of it."""
        publication = self.publication().id
        at = {e.event: e.at for e in self.stage.events() if e.fields.get("publication") == publication}
        marks = [at[f"publication.{PublicationState.MOVING}"], at["transfer.running"], at["transfer.over"],
                 at[f"publication.{PublicationState.COMMITTED}"]]  # fmt: skip
        steps = dict(zip(("planning", "transfer", "commit"), (b - a for a, b in pairwise(marks)), strict=True))
        return steps | {"moving": marks[-1] - marks[0]}

    # -- a fault in the middle

    def shoot(
        self,
        inflict: Callable[[], None],
        ready: Callable[[TransferDoc, Mapping[str, Glance], float], bool],
        without: Sequence[str] = (),
    ) -> Shot | None:
        """A refit in which `inflict` is called as soon as `ready` (of the transfer, its movers' pages, the share landed) says
        so. None if the transfer was over before; then it was a refit like any other."""
        pages = Pages(self.stage.movers())
        try:
            calls = self.begin()
            doc = self.running()
            gone = {actor.id for name in without for actor in self.stage.gangs[name]}
            mid = self._middle(doc, pages, ready, gone) if doc is not None else None
            if doc is None or mid is None:
                self.finish(calls)
                return None
            at = time.monotonic()
            inflict()
            begun, landed, total = mid
            return Shot(at, doc, landed, begun, total, self.finish(calls, without))
        finally:
            pages.close()

    def _middle(
        self,
        doc: TransferDoc,
        pages: Pages,
        ready: Callable[[TransferDoc, Mapping[str, Glance], float], bool],
        gone: Collection[str],
    ) -> tuple[int, int, int] | None:
        """Wait for the moment: network bytes (begun, landed, of all) then, but for those to members that will be gone; None if
        the transfer was over first."""
        rounds = {member: r for member, r in self._rounds(doc).items() if member not in gone}
        total = sum(int(r.sum()) for r in rounds.values())
        deadline = time.monotonic() + patience()
        while time.monotonic() < deadline:
            seen = {member: glance for member, glance in pages.look().items() if member in rounds}
            landed = sum(glance.received for glance in seen.values())
            if landed >= total or all(glance.state == State.OUT for glance in seen.values()):
                return None
            if ready(doc, seen, landed / total):
                begun = sum(int(rounds[m][: glance.began].sum()) for m, glance in seen.items())
                return max(begun, landed), landed, total
            time.sleep(0.0003)
        raise TransferTimeout(f"transfer {doc.id} neither ended nor came to its middle")

    def _rounds(self, doc: TransferDoc) -> dict[str, Any]:
        """Network bytes that each member of a transfer receives in each round."""
        if doc.plan in self._kept:
            return self._kept[doc.plan]
        sides = {doc.source.layout: (self.layouts.source, None)}
        sides |= {party.layout: (self.layouts.destination, None) for party in doc.destinations}
        plan = plan_of(doc, self.publication(), sides)
        found = {}
        for member in doc.present:
            piece = plan.slice(doc.members.index(member))
            legs = piece.legs
            rows = np.flatnonzero(~legs.out & ~legs.install & (legs.kind == Kind.NET))
            found[member] = np.bincount(legs.round[rows], piece.nbytes[rows], piece.rounds)
        self._kept[doc.plan] = found
        return found

    def told_again(self, shot: Shot) -> Shot:
        """With the bytes that the transfers after the shot moved."""
        overs = self.overs(shot.doc.publication)
        shot.again = sum(int(e.fields["bytes_network"]) for e in overs if e.fields["transfer"] != shot.doc.id)
        return shot
