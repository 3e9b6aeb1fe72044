"""Gauges for Prometheus, read from the state machine's state as it is. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from elastic_reshard.protocol.docs import GroupState, MemberState, PublicationState, TransferState
from elastic_reshard.supervisor.picture import cells_of
from elastic_reshard.supervisor.state import Job

__all__ = ["gauges"]

K = TypeVar("K", bound=tuple[str, ...])
_P: Final = "elastic_reshard_"


def gauges(job: Job, connected: Mapping[str, int], now: float) -> Iterator[Metric]:
    """All of them. connected: bytes that wait for each host that has a connection; now: time.monotonic."""
    yield from _job(job)
    yield from _counts(job)
    yield from _groups(job)
    yield from _hosts(job, connected, now)
    yield from _memory(job)
    yield from _transfer(job)


def _plain(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_P + name, text, value=value)


def _by(name: str, text: str, labels: tuple[str, ...], values: Mapping[K, float]) -> Metric:
    family = GaugeMetricFamily(_P + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _job(job: Job) -> Iterator[Metric]:
    committed = job.publications.get(job.committed)
    yield InfoMetricFamily(_P + "job", "The job of this supervisor.", value={"name": job.name})
    yield _plain("term", "Rises with every start of the supervisor.", job.term)
    yield _plain("membership_epoch", "Rises with every change of the set of members or movers.", job.membership_epoch)
    yield _plain("view_revision", "Rises with every change of what is told to hosts.", job.revision)
    yield _plain("weight_version", "The last version that began to move.", job.weight_version)
    version = committed.doc.weight_version if committed is not None else 0
    yield _plain("committed_version", "The last version that was committed; 0 for none.", version)
    yield _plain("recovering", "1 while a lost journal is being recovered from members.", float(job.recover_from > 0))


def _counts(job: Job) -> Iterator[Metric]:
    """By state; those that nobody is in are 0, so that a query never finds nothing."""
    members = Counter(m.doc.state for m in job.members.values())
    yield _by("members", "Members by state.", ("state",), {(str(s),): members[s] for s in MemberState})
    lands = [g for g in job.groups.values() if "destination" in g.doc.roles]
    groups = Counter(g.doc.state for g in lands)
    yield _by("groups", "Destination groups by state.", ("state",), {(str(s),): groups[s] for s in GroupState})
    publications = Counter(p.doc.state for p in job.publications.values())
    states = {(str(s),): float(publications[s]) for s in PublicationState}
    yield _by("publications", "Versions that are remembered, by state.", ("state",), states)


def _groups(job: Job) -> Iterator[Metric]:
    committed = job.publications.get(job.committed)
    last = committed.doc.weight_version if committed is not None else 0
    lands = {(name,): g.doc for name, g in job.groups.items() if "destination" in g.doc.roles}
    lag = {key: float(max(0, last - doc.serving)) for key, doc in lands.items()}
    yield _by("group_lag_versions", "Versions that a group is behind; all, if it serves none.", ("group",), lag)
    serving = {key: float(doc.serving) for key, doc in lands.items()}
    yield _by("group_serving_version", "The version that all ranks serve; 0 for none.", ("group",), serving)
    whole = {(name,): float(g.doc.whole) for name, g in job.groups.items()}
    yield _by("group_whole", "1 if all ranks of a group take part.", ("group",), whole)


def _hosts(job: Job, connected: Mapping[str, int], now: float) -> Iterator[Metric]:
    up = {(name,): float(name in connected) for name in {*job.hosts, *connected}}
    yield _by("host_connected", "1 if a host's watchdog is connected.", ("host",), up)
    silence = {(name,): max(0.0, now - host.heard) for name, host in job.hosts.items()}
    yield _by("host_silence_seconds", "Seconds since a host was heard.", ("host",), silence)
    waiting = {(name,): float(nbytes) for name, nbytes in connected.items()}
    yield _by("host_unsent_bytes", "Bytes that wait for a host to read them.", ("host",), waiting)


def _memory(job: Job) -> Iterator[Metric]:
    """Slots in which something lies that somebody may still need, and the memory that is known of."""
    slots: dict[tuple[str, ...], set[tuple[str, str, int]]] = {}
    for publication in job.publications.values():
        if publication.doc.state not in (PublicationState.MOVING, PublicationState.COMMITTED):
            continue
        for source in publication.doc.sources:
            slots.setdefault((source.host, "source"), set()).add((source.member, source.arena, source.slot))
        for part in publication.doc.landings:
            slots.setdefault((part.host, "landing"), set()).add((part.member, part.arena, part.slot))
    nbytes: Counter[tuple[str, ...]] = Counter()
    for name, member in job.members.items():
        host = member.doc.host
        for fill in member.offers:
            slots.setdefault((host, "source"), set()).add((name, fill.arena, fill.slot))
            nbytes[host, "source"] += fill.nbytes
        if member.said is not None and member.kept and member.said.landing is not None:
            nbytes[host, "landing"] += member.said.landing.nbytes
    held = {key: float(len(found)) for key, found in slots.items()}
    yield _by("slots_held", "Slots of arenas that hold something needed.", ("host", "kind"), held)
    yield _by("arena_bytes", "Source slots that are offered or held by their members, and landing arenas.",
              ("host", "kind"), {key: float(n) for key, n in nbytes.items()})  # fmt: skip


def _transfer(job: Job) -> Iterator[Metric]:
    doc = next((t.doc for t in job.transfers.values()), None)
    states = {(str(s),): float(doc is not None and doc.state is s) for s in TransferState}
    yield _by("transfer_in_hand", "1 for the state of the transfer in hand.", ("state",), states)
    said = {m: s for m in doc.present if (s := job.movers.get(m)) is not None and s.transfer == doc.id} if doc else {}
    cells = cells_of(doc, said) if doc is not None else {}
    landed = {(group,): float(found[0]) for group, found in cells.items()}
    yield _by("transfer_landed_cells", "Cells of the transfer in hand that have landed.", ("group",), landed)
    wanted = {(group,): float(found[1]) for group, found in cells.items()}
    yield _by("transfer_cells", "Cells of the transfer in hand, landed or to land.", ("group",), wanted)
