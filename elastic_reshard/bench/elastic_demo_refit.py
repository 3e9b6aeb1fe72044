"""Refits of the elastic demo: one version after another, each looked at in every engine when it is installed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic_reshard.bench import elastic_demo_rank as does
from elastic_reshard.bench import rank as on
from elastic_reshard.bench.elastic_demo_cast import RANKS, DemoSetup
from elastic_reshard.bench.elastic_demo_outcome import Outcome, Refit
from elastic_reshard.bench.elastic_demo_watch import Sight, plain
from elastic_reshard.bench.play import distinct
from elastic_reshard.bench.stage import LIMIT, Call, Gang, Stage
from elastic_reshard.errors import ReshardError, TransferTimeout
from elastic_reshard.protocol.docs import PublicationDoc, PublicationState
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor.record import EventRecord

__all__ = ["Flight", "Refits"]


@dataclass
class Flight:
    """A version on its way."""

    version: int
    label: str
    publishing: list[Call]
    receiving: dict[str, list[Call]]
    needed: int


class Refits:
    """Trainers and engines on a stage, and the versions that they have had."""

    def __init__(self, setup: DemoSetup, stage: Stage, sight: Sight, outcome: Outcome) -> None:
        self.setup, self.stage, self.sight, self.outcome = setup, stage, sight, outcome
        self.source, self.destination = setup.layouts()
        self.trainer: Gang
        self.engines: dict[str, Gang] = {}
        self.version = self.step = 0
        outcome.nbytes = self.source.nbytes

    def wrong(self, text: str) -> None:
        """Something is not as promised."""
        self.outcome.wrong.append(text)
        self.sight.tell("wrong", text)

    # -- a refit

    def begin(self) -> Flight:
        """The next version: engines wait for it, trainers publish it."""
        self.version, self.step = self.version + 1, self.step + 1
        hosts = {engine.hosts[0] for engine in self.engines.values()}
        needed = len(hosts) * distinct(self.destination, range(RANKS))
        label = f"step-{self.step}"
        receiving = {name: engine.begin(on.receive) for name, engine in self.engines.items()}
        publishing = self.trainer.begin(does.publish, self.version, label)
        return Flight(self.version, label, publishing, receiving, needed)

    def published(self, flight: Flight) -> tuple[float, float]:
        """Wait for the trainers' calls: when the first began, and seconds of the longest."""
        told = [call.result() for call in flight.publishing]
        return min(t["begun"] for t in told), max(t["returned"] - t["begun"] for t in told)

    def installed(self, flight: Flight) -> float:
        """Wait until all engines have it, and look at every bit; when the last had it."""
        done = 0.0
        for name, calls in flight.receiving.items():
            told = [call.result() for call in calls]
            done = max(done, *(t["done"] for t in told))
            versions = {int(t["version"]) for t in told}
            if versions != {flight.version}:
                self.wrong(f"{name} was told versions {sorted(versions)} instead of {flight.version}")
            self.look(self.engines[name])
        return done

    def finish(self, flight: Flight, times: tuple[float, float], done: float, note: str = "") -> PublicationDoc:
        """Note a version that is installed everywhere."""
        doc = self.publication(flight.version)
        network, transfers = int(doc.metrics.get("bytes_network", 0)), int(doc.metrics.get("transfers", 0))
        refit = Refit(
            flight.version, flight.label, doc.membership_epoch, tuple(flight.receiving), network, flight.needed, transfers,
            times[1], done - times[0], note,
        )  # fmt: skip
        self.outcome.refits.append(refit)
        if doc.label != flight.label:
            self.wrong(f"version {flight.version} is labelled {doc.label!r}, published as {flight.label!r}")
        reasons = "; ".join(plain(e.fields["reason"]) for e in self.events(doc, "transfer.breaking"))
        if not reasons and network != flight.needed:
            self.wrong(f"version {flight.version}: {network} bytes over the network, where {flight.needed} are needed")
        if reasons and not note:
            self.outcome.refits[-1] = replace(refit, note=f"formed anew unasked: {reasons}")
        return doc

    def calm(self) -> None:
        """A refit that nothing happens to."""
        flight = self.begin()
        self.finish(flight, self.published(flight), self.installed(flight))
        last = self.outcome.refits[-1]
        self.sight.tell("calm", f"version {last.version} ({last.label}) installed by {len(last.engines)} engines in "
                                f"{last.seconds:.2f} s")  # fmt: skip

    def look(self, engine: Gang) -> list[str]:
        """Compare an engine's tensors with the version, bit for bit; names of those that differ."""
        found = []
        for rank, names in enumerate(engine.do(on.check, self.version)):
            self.outcome.compared += self.destination.local_nbytes(rank)
            if names:
                found += names
                self.wrong(f"{engine.name} rank {rank} is not version {self.version} in {', '.join(names[:5])}")
        return found

    # -- what the supervisor says

    def until(self, ready: Callable[[Told], object], what: str) -> Told:
        """The first view in which something holds. TransferTimeout."""
        view, deadline = self.stage.client.view(), time.monotonic() + LIMIT
        while not ready(view):
            if time.monotonic() > deadline:
                raise TransferTimeout(f"waited {LIMIT:g} s for: {what}")
            view = self.stage.client.view(view.revision, 1.0)
        return view

    def publication(self, version: int) -> PublicationDoc:
        """Of a version that all engines have, once its transfer is over."""

        def found(view: Told) -> PublicationDoc | None:
            return next((p for p in view.publications.values() if p is not None and p.weight_version == version), None)

        view = self.until(
            lambda v: not any(v.transfers.values()) and (p := found(v)) is not None and p.state is PublicationState.COMMITTED,
            f"version {version} is committed and its transfer over",
        )  # fmt: skip
        doc = found(view)
        if doc is None:
            raise ReshardError(f"version {version} has left the view")
        return doc

    def events(self, doc: PublicationDoc, kind: str) -> list[EventRecord]:
        """The supervisor's events of a kind about a publication, oldest first."""
        return [e for e in self.stage.events() if e.event == kind and e.fields["publication"] == doc.id]
