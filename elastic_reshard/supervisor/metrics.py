"""`/metrics` for Prometheus: counters from what happened, gauges from the state as it is when somebody asks.

The core counts nothing. `updates` says which metrics one log event changes, `gauges` reads the state; both are pure, and
`Metrics` only adds up. Labels are hosts, groups, states and a few words: never members, incarnations or versions. What
belongs to a host or group that is gone is gone with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from elastic_reshard.supervisor.domains import host_of
from elastic_reshard.supervisor.events import Event, Happened
from elastic_reshard.supervisor.gauges import gauges
from elastic_reshard.supervisor.noticing import condemned_for, late_beats
from elastic_reshard.supervisor.state import Job

__all__ = ["IGNORED", "SPECS", "Metrics", "Spec", "Update", "updates"]

_P: Final = "elastic_reshard_"
# Seconds: from a small model on one host to a large one between hosts.
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Spec(NamedTuple):
    """What a metric is. Counters are named without `_total`, which the text adds. bound: which of the labels are hosts."""

    kind: Literal["counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    hosts: tuple[int, ...] = ()


class Update(NamedTuple):
    """A counter is to rise by `value`, or a histogram takes it in. labels: values, in the order of the spec's."""

    metric: str
    value: float = 1.0
    labels: tuple[str, ...] = ()


SPECS: Final[Mapping[str, Spec]] = {
    "publish_stall_seconds": Spec("histogram", "How long a publish held up the trainers: the slowest rank's copy."),
    "commit_seconds": Spec("histogram", "From a version's beginning to its commit."),
    "transfer_seconds": Spec("histogram", "One epoch's transfer between hosts, by how it ended.", ("outcome",)),
    "install_seconds": Spec("histogram", "How long an install held up a group: its slowest rank."),
    "publications_begun": Spec("counter", "Versions that began to move."),
    "commits": Spec("counter", "Versions committed."),
    "publications_abandoned": Spec("counter", "Versions given up before they were committed."),
    "published_bytes": Spec("counter", "Bytes that trainers copied into slots."),
    "network_bytes": Spec("counter", "Bytes received over the network, those of broken transfers too."),
    "link_bytes": Spec(
        "counter", "Of those, by link; a mover that was killed has not said its part.", ("source", "destination"), (0, 1)
    ),
    "resent_bytes": Spec("counter", "Bytes received that had been there before a transfer was broken off."),
    "installed_bytes": Spec("counter", "Bytes that installs pulled into live tensors."),
    "transfers": Spec("counter", "Transfers that are over, by how they ended.", ("outcome",)),
    "transfers_suspended": Spec("counter", "Times that nobody reachable held a part of a version."),
    "transfers_given_up": Spec("counter", "Transfers given up: no cell moved, or a part was lost."),
    "installs": Spec("counter", "Installs of whole groups, by verdict.", ("verdict",)),
    "groups_broken": Spec("counter", "Groups that lost a member."),
    "groups_left_behind": Spec("counter", "Times that the others went on without a group that was late."),
    "membership_epochs": Spec("counter", "Epochs of the membership that ended."),
    "members_gone": Spec("counter", "Members that left the membership, by what became of them.", ("state",)),
    "movers_condemned": Spec("counter", "Movers ended by their watchdogs, by reason.", ("reason",)),
    "movers_unproved": Spec("counter", "Movers that were killed and whose end was not seen: others went on without them."),
    "movers_died": Spec("counter", "Movers that ended by themselves or by somebody else's signal."),
    "network_fallbacks": Spec("counter", "Transfers that took a slower network than the one wanted."),
    "watchdogs_replaced": Spec("counter", "Watchdogs that another one took the place of."),
    "hosts_given_up": Spec("counter", "Hosts that were silent for too long."),
    "beats_late": Spec("counter", "Beats of a host that came more than half a beat late.", ("host",), (0,)),
    "supervisor_late": Spec("counter", "Times that the supervisor itself ran late and judged nobody."),
    "supervisor_late_seconds": Spec("counter", "Seconds by which it did."),
}  # fmt: skip

# Events that change no counter: gauges show what they lead to, or they lead to one that counts.
IGNORED: Final = frozenset({
    "grow.admitting", "grow.cancelled", "grow.done", "grow.refused", "grow.waiting", "group.admitted", "group.counts_anew",
    "group.gone", "group.refused", "host.cut", "host.drained", "host.refused", "host.undrained", "layouts.awaited",
    "layouts.forgotten",
    "member.joining", "member.leave_asked", "member.leaving",
    "member.live", "member.refused", "policies.changed", "publication.released", "supervisor.ended", "supervisor.recovered",
    "supervisor.started", "supervisor.term_raised", "ticket.adopted", "transfer.breaking", "transfer.forming",
    "transfer.running", "transfer.stopping", "stream.cut",
    "group.stale", "group.landing", "group.complete", "group.installing", "group.current", "group.partial",
})  # fmt: skip


def updates(happened: Happened, before: Job, after: Job) -> list[Update]:
    """What one log event of a step changes. before, after: the state around that step."""
    rule = _RULES.get(happened.event)
    return rule(happened.fields, before, after) if rule is not None else []


Fields = Mapping[str, Any]
_Rule = Callable[[Fields, Job, Job], list[Update]]


def _one(metric: str, *labels: str) -> _Rule:
    return lambda fields, before, after: [Update(metric, 1.0, labels)]


def _figures(after: Job, publication: str) -> Mapping[str, float]:
    found = after.publications.get(publication)
    return found.doc.metrics if found is not None else {}


def _moving(fields: Fields, _: Job, after: Job) -> list[Update]:
    found = _figures(after, fields["publication"])
    stall = [Update("publish_stall_seconds", found["publish_stall"])] if "publish_stall" in found else []
    return [Update("publications_begun"), Update("published_bytes", found.get("published_bytes", 0.0)), *stall]


def _committed(fields: Fields, _: Job, after: Job) -> list[Update]:
    found = _figures(after, fields["publication"])
    return [Update("commits"), *([Update("commit_seconds", found["transfer"])] if "transfer" in found else [])]


def _over(fields: Fields, before: Job, after: Job) -> list[Update]:
    outcome = "whole" if fields["whole"] else "broken"
    said = [s for s in after.movers.values() if s.transfer == fields["transfer"]]
    links: Counter[tuple[str, str]] = Counter()
    for mover in said:
        member = after.members.get(mover.member) or before.members.get(mover.member)
        for source, nbytes in mover.links.items() if member is not None else ():
            links[host_of(source), member.doc.host if member is not None else ""] += nbytes
    return [
        Update("transfers", 1.0, (outcome,)),
        Update("transfer_seconds", fields["seconds"], (outcome,)),
        Update("network_bytes", fields["bytes_network"]),
        Update("resent_bytes", float(sum(s.resent for s in said))),
        *(Update("link_bytes", float(n), link) for link, n in sorted(links.items())),
    ]


def _verdict(fields: Fields, before: Job, after: Job) -> list[Update]:
    verdict, name = fields["verdict"], fields["group"]
    if verdict == "nothing":
        return []
    found = [Update("installs", 1.0, (verdict,))]
    known = before.groups.get(name)
    ticket = known.doc.ticket if known is not None else None
    if verdict == "current" and ticket is not None and ticket.id == fields["ticket"]:
        figures = _figures(after, ticket.publication)
        if f"install_pause/{name}" in figures:
            found.append(Update("install_seconds", figures[f"install_pause/{name}"]))
            found.append(Update("installed_bytes", figures[f"installed_bytes/{name}"]))
    return found


def _left_behind(fields: Fields, _: Job, __: Job) -> list[Update]:
    # A group whose state became left_behind is logged under the same name, by `group`.
    return [Update("groups_left_behind", float(len(fields["groups"])))] if "groups" in fields else []


def _ended(fields: Fields, _: Job, __: Job) -> list[Update]:
    if not fields["condemned"]:
        return [Update("movers_died")]
    return [Update("movers_condemned", 1.0, (condemned_for(fields["condemned"]),))]


def _own_lateness(fields: Fields, _: Job, __: Job) -> list[Update]:
    return [Update("supervisor_late"), Update("supervisor_late_seconds", fields["seconds"])]


_RULES: Final[Mapping[str, _Rule]] = {
    "publication.moving": _moving,
    "publication.committed": _committed,
    "publication.abandoned": _one("publications_abandoned"),
    "transfer.over": _over,
    "transfer.suspended": _one("transfers_suspended"),
    "transfer.given_up": _one("transfers_given_up"),
    "group.verdict": _verdict,
    "group.broken": _one("groups_broken"),
    "group.left_behind": _left_behind,
    "membership.epoch": _one("membership_epochs"),
    "member.orphaned": _one("members_gone", "orphaned"),
    "member.lost": _one("members_gone", "lost"),
    "member.forfeit": _one("members_gone", "forfeit"),
    "mover.ended": _ended,
    "mover.unproved": _one("movers_unproved"),
    "network.fallback": _one("network_fallbacks"),
    "watchdog.replaced": _one("watchdogs_replaced"),
    "host.silent": _one("hosts_given_up"),
    "supervisor.late": _own_lateness,
}


@dataclass
class _Spread:
    """A histogram's numbers: how many values fell into each bucket, and their sum."""

    counts: list[int]
    sum: float = 0.0

    def take(self, value: float) -> None:
        at = next((i for i, limit in enumerate(_SECONDS) if value <= limit), len(_SECONDS))
        self.counts[at] += 1
        self.sum += value

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        total = 0
        for limit, count in zip((*_SECONDS, float("inf")), self.counts, strict=True):
            total += count
            yield str(limit).replace("inf", "+Inf"), float(total)


class Metrics(Collector):
    """One supervisor's. All methods are the event loop's; each returns at once.

    look: the state, the hosts that are connected and the bytes that wait for each, now."""

    def __init__(self, look: Callable[[], tuple[Job, Mapping[str, int], float]]) -> None:
        self.registry = CollectorRegistry()
        self._look = look
        self._counters: dict[str, dict[tuple[str, ...], float]] = {
            n: {} for n, s in SPECS.items() if s.kind == "counter"
        }
        self._spreads: dict[str, dict[tuple[str, ...], _Spread]] = {
            n: {} for n, s in SPECS.items() if s.kind == "histogram"
        }
        for name, spec in SPECS.items():  # those without labels are there from the start, at 0
            if not spec.labels:
                self._count(Update(name, 0.0)) if spec.kind == "counter" else self._spread(name, ())
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def stepped(
        self, events: Sequence[Event], happened: Iterable[Happened], before: Job, after: Job, now: float
    ) -> None:
        """One step of the state machine was done at `now` (time.monotonic)."""
        for one in happened:
            for update in updates(one, before, after):
                self.take(update)
            if one.event == "host.silent":  # for where nobody ever scrapes
                self._forget(after, ())
        for host, count in late_beats(events, before, now).items():
            self.take(Update("beats_late", float(count), (host,)))

    def take(self, update: Update) -> None:
        """Add one update."""
        if SPECS[update.metric].kind == "counter":
            self._count(update)
        else:
            self._spread(update.metric, update.labels).take(update.value)

    def _count(self, update: Update) -> None:
        values = self._counters[update.metric]
        values[update.labels] = values.get(update.labels, 0.0) + update.value

    def _spread(self, metric: str, labels: tuple[str, ...]) -> _Spread:
        return self._spreads[metric].setdefault(labels, _Spread([0] * (len(_SECONDS) + 1)))

    def text(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the form that a client accepts, and its media type."""
        encode, kind = choose_encoder(accept)
        return encode(self.registry), kind

    def describe(self) -> Iterable[Metric]:
        """Nothing: what `collect` gives is known by asking it."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        job, connected, now = self._look()
        self._forget(job, connected)
        yield from gauges(job, connected, now)
        for name, values in self._counters.items():
            counter = CounterMetricFamily(_P + name, SPECS[name].help, labels=SPECS[name].labels)
            for labels, value in values.items():
                counter.add_metric(labels, value)
            yield counter
        for name, spreads in self._spreads.items():
            histogram = HistogramMetricFamily(_P + name, SPECS[name].help, labels=SPECS[name].labels)
            for labels, spread in spreads.items():
                histogram.add_metric(labels, list(spread.buckets()), spread.sum)
            yield histogram

    def _forget(self, job: Job, connected: Iterable[str]) -> None:
        """What was counted of hosts that are gone."""
        hosts = {*job.hosts, *connected, *(m.doc.host for m in job.members.values())}
        for name, spec in SPECS.items():
            for labels in [k for k in self._counters.get(name, {}) if any(k[i] not in hosts for i in spec.hosts)]:
                del self._counters[name][labels]
