"""What Prometheus reads: each number from what happened, labels of bounded number, and queries that find something."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from elastic_reshard import supervisor
from elastic_reshard.protocol.docs import GroupState, MemberState, PublicationState, TransferState
from elastic_reshard.protocol.messages import Hello, MoverSaid
from elastic_reshard.supervisor import core, metrics, noticing, words
from elastic_reshard.supervisor.events import Beaten, Cut, Greeted, Happened, Moved
from elastic_reshard.supervisor.metrics import IGNORED, SPECS, Metrics, Update, updates
from elastic_reshard.supervisor.server import Supervisor
from elastic_reshard.supervisor.state import Host
from elastic_reshard.watchdog import crew
from tests.supervisor.drive import TEXTS, play
from tests.supervisor.real import call, pair, problem
from tests.supervisor.sim.scenes import Scene
from tests.supervisor.watched import Watched

HERE = Path(supervisor.__file__).parent
STATES = {"member": MemberState, "group": GroupState, "publication": PublicationState, "transfer": TransferState}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def logged() -> Iterator[str]:
    """Every name of an event that the package logs into a supervisor's record."""
    found = re.compile(r"(?:\.log|record\.add|Happened)\(\s*f?\"([a-z_]+)\.([a-z_]+|\{state\})\"")
    for path in HERE.glob("*.py"):
        for room, step in found.findall(path.read_text()):
            yield from (f"{room}.{s}" for s in ([step] if step != "{state}" else map(str, STATES[room])))


def test_no_event_is_forgotten() -> None:
    names = set(logged())
    assert len(names) > 50
    rules = set(metrics._RULES)
    assert rules.isdisjoint(IGNORED)
    assert names <= rules | IGNORED, f"say in metrics.py what these count: {names - rules - IGNORED}"
    assert rules <= names, f"nobody logs {rules - names}"
    assert set(words._RULES) <= names, f"nobody logs {set(words._RULES) - names}"


def test_names_follow_the_conventions() -> None:
    for name, spec in SPECS.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert not name.endswith("_total"), "the text adds it"
        assert not any(word in name for word in ("_ms", "_mb", "_milli", "_minutes")), "base units only"
        assert spec.kind != "histogram" or name.endswith("_seconds")
        assert spec.help.endswith(".")
        assert set(spec.labels) <= {"outcome", "verdict", "state", "reason", "host", "source", "destination"}
    assert all(update.metric in SPECS for _, found in mapped() for update in found)


def mapped() -> Iterator[tuple[str, list[Update]]]:
    """One event of each kind that counts, and what it changes."""
    job = core.begin("job", 1, "i", 0.0)
    fields: dict[str, Any] = {
        "publication": "p", "whole": True, "transfer": "t", "seconds": 2.5, "bytes_network": 7.0, "verdict": "partial",
        "group": "g", "groups": ["g", "h"], "condemned": "no sign of life for 1.5 s", "ticket": "x",
    }  # fmt: skip
    for event in metrics._RULES:
        yield event, updates(Happened(event, fields), job, job)


def test_what_one_event_changes() -> None:
    found = dict(mapped())
    assert all(found.values())
    assert found["publication.abandoned"] == [Update("publications_abandoned")]
    assert found["transfer.over"][:3] == [
        Update("transfers", 1.0, ("whole",)), Update("transfer_seconds", 2.5, ("whole",)), Update("network_bytes", 7.0),
    ]  # fmt: skip
    assert found["group.verdict"] == [Update("installs", 1.0, ("partial",))]
    assert found["group.left_behind"] == [Update("groups_left_behind", 2.0)]
    assert found["mover.ended"] == [Update("movers_condemned", 1.0, ("silent",))]
    assert found["supervisor.late"] == [Update("supervisor_late"), Update("supervisor_late_seconds", 2.5)]
    job = core.begin("job", 1, "i", 0.0)
    assert updates(Happened("group.left_behind", {"group": "g"}), job, job) == [], "a state is no count"
    assert updates(Happened("group.verdict", {"verdict": "nothing", "group": "g"}), job, job) == []
    assert updates(Happened("mover.ended", {"condemned": ""}), job, job) == [Update("movers_died")]
    assert updates(Happened("unheard.of", {}), job, job) == []


def test_a_watchdogs_words_for_condemning_are_known() -> None:
    source = Path(crew.__file__).read_text() + Path(crew.__file__).with_name("movers.py").read_text()
    for begin, word in noticing._REASONS[:4]:
        assert f'"{begin}' in source, f"no watchdog says {begin!r} any more"
        assert noticing.condemned_for(f"{begin} and so on") == word
    assert noticing.condemned_for("something new") == "other"
    assert sum(f.count("self.condemn(") for f in source.splitlines()) == 4, (
        "another reason: give it a word in noticing.py"
    )


@pytest.mark.parametrize("path", sorted(TEXTS.glob("*.txt")), ids=lambda path: path.stem)
def test_all_that_can_happen_can_be_watched(path: Path, watched: Watched) -> None:
    """Nothing that is watched is changed by it, and what a watcher puts together is what there is."""
    play(path.read_text())
    assert watched.steps > 3
    seen = watched.see()
    for kind in ("hosts", "members", "groups", "publications"):
        assert watched.told[kind] == {k: vars(v) for k, v in getattr(seen, kind).items()}
    assert watched.told["waits"] == [vars(w) for w in seen.waits]
    json.dumps(watched.told)
    for happened in watched.happened:
        said = words.told(happened.event, happened.fields)
        assert said is None or ("@" not in said.text and "{" not in said.text), said
    assert "@" not in watched.metrics.text("")[0].decode(), "no incarnation is a label"


def _die(scene: Scene) -> None:
    scene.world.rng.choice(scene.movers()).die()


def _freeze(scene: Scene) -> None:
    scene.world.rng.choice(scene.movers()).freeze()


@pytest.mark.parametrize("loss", [_die, _freeze])
def test_a_loss_in_the_middle_is_counted_once(loss: Callable[[Scene], None], watched: Watched) -> None:
    scene = Scene(1)
    first = scene.publish()
    scene.until(lambda: scene.current(first), 10.0)
    epoch = scene.job.membership_epoch
    assert (watched.value("transfers_total", outcome="whole"), watched.value("commits_total")) == (1, 1)
    assert watched.value("groups", state="current") == 2
    second = scene.publish()
    scene.in_the_middle()
    assert watched.value("transfer_in_hand", state="running") == 1
    loss(scene)
    scene.until(lambda: scene.current(second), 20.0)
    assert (watched.value("transfers_total", outcome="whole"), watched.value("transfers_total", outcome="broken")) == (
        2,
        1,
    )
    assert watched.value("commits_total") == watched.value("publications_begun_total") == 2
    assert watched.value("publications_abandoned_total") == 0
    assert watched.value("installs_total", verdict="current") == 4
    assert watched.value("install_seconds_count") == 4
    assert watched.value("transfer_seconds_count", outcome="broken") == 1
    assert watched.value("membership_epoch") == scene.job.membership_epoch == epoch + 1
    assert watched.value("group_lag_versions", group="e0") == 0
    assert watched.value("group_serving_version", group="e1") == scene.job.weight_version
    samples = watched.samples()
    reasons = {labels: n for (name, labels), n in samples.items() if name == "elastic_reshard_movers_condemned_total"}
    lost = sum(reasons.values()) + (watched.value("movers_died_total") or 0)
    assert lost >= 1
    assert (watched.value("movers_condemned_total", reason="silent") == 1) == (loss is _freeze)
    assert sum(h.event == "mover.ended" for h in watched.happened) == lost, "each end is noticed once"


def test_links_are_of_hosts_and_vanish_with_them() -> None:
    job = core.begin("job", 1, "i", 0.0)
    said = MoverSaid(
        member="e-0@" + "0" * 16, mover="ab", transfer="t", state="out", received=12, resent=5, links={"a": 7, "c": 5}
    )
    member = type("M", (), {"doc": type("D", (), {"host": "b"})})()
    after = replace(job, movers={said.member: said}, members={said.member: member})
    over = Happened("transfer.over", {"transfer": "t", "whole": False, "seconds": 1.0, "bytes_network": 12})
    found = updates(over, job, after)
    assert Update("link_bytes", 7.0, ("a", "b")) in found
    assert Update("link_bytes", 5.0, ("c", "b")) in found
    assert Update("resent_bytes", 5.0) in found
    hosts = {name: Host(name, 0.0) for name in ("a", "b", "c")}
    shown = replace(job, hosts=hosts)
    made = Metrics(lambda: (shown, {}, 1.0))
    for update in found:
        made.take(update)
    text = made.text("")[0].decode()
    assert 'link_bytes_total{destination="b",source="a"} 7.0' in text
    assert 'host_silence_seconds{host="c"} 1.0' in text
    shown = replace(job, hosts={k: h for k, h in hosts.items() if k != "a"})
    text = made.text("")[0].decode()
    assert 'source="a"' not in text
    assert 'link_bytes_total{destination="b",source="c"} 5.0' in text


def test_an_end_that_is_told_again_is_noticed_once() -> None:
    job = core.begin("job", 1, "i", 0.0)
    said = MoverSaid(member="e-0@" + "0" * 16, mover="ab", transfer="t", state="ended")
    after = replace(job, movers={said.member: said})
    hello = Hello(job="job", host="a", machine="m", watchdog="ab", movers=(said,))
    assert [h.event for h in noticing.noticed([Moved("a", said)], (), job, after)] == ["mover.ended"]
    assert [h.event for h in noticing.noticed([Greeted(hello)], (), job, after)] == ["mover.ended"]
    assert list(noticing.noticed([Moved("a", said), Greeted(hello)], (), after, after)) == []
    both = [h.event for h in noticing.noticed([], [Happened("x.y", {})], job, replace(job, membership_epoch=1))]
    assert both == ["x.y", "membership.epoch"], "causes come before what came of them"


def test_late_beats_are_a_hosts_not_the_supervisors() -> None:
    job = replace(core.begin("job", 1, "i", 0.0), hosts={"a": Host("a", 10.0), "b": Host("b", 11.5)}, stepped=11.9)
    assert noticing.late_beats([Beaten("a"), Beaten("a"), Beaten("b"), Beaten("unknown")], job, 12.0) == {"a": 1}
    assert noticing.late_beats([Cut("a")], job, 12.0) == {}
    assert noticing.late_beats([Beaten("a")], replace(job, stepped=11.0), 12.0) == {}, "who did not look can't tell"


def test_hosts_that_come_and_go_leave_nothing_though_nobody_scrapes() -> None:
    job = replace(core.begin("job", 1, "i", 0.0), hosts={"a": Host("a", 0.0), "b": Host("b", 0.0)})
    found = Metrics(lambda: (job, {}, 0.0))
    for host in ("a", "b"):
        found.take(Update("beats_late", 1.0, (host,)))
    found.stepped([], [Happened("host.silent", {"host": "b"})], job, replace(job, hosts={"a": job.hosts["a"]}), 1.0)
    assert list(found._counters["beats_late"]) == [("a",)]


# -- over HTTP, and the files that ask for it


def test_a_scrape_brings_the_token_and_gets_what_it_accepts(start: Callable[..., Supervisor]) -> None:
    made = start()
    assert problem(call(made, "GET", "/metrics", headers={"Authorization": "Bearer wrong-token"}), 401)
    with pair(made):
        plain = call(made, "GET", "/metrics")
        assert plain.headers["content-type"].startswith("text/plain; version=")
        families = {f.name: f for f in text_string_to_metric_families(plain.text)}
        assert {s.labels["state"]: s.value for s in families["elastic_reshard_members"].samples}["live"] == 2
        assert families["elastic_reshard_commits"].type == "counter"
        assert families["elastic_reshard_install_seconds"].samples[-1].value == 0
        assert families["process_resident_memory_bytes"].samples[0].value > 10 << 20
        strict = call(made, "GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert strict.headers["content-type"].startswith("application/openmetrics-text")
        assert {f.name for f in open_families(strict.text)} == {n.removesuffix("_info") for n in families}
    assert start(job="other").url != made.url, "two in one process"


def existing(watched: Watched) -> dict[str, set[str]]:
    """Names of all samples that there can be, with their labels."""
    job = core.begin("job", 1, "i", 0.0)
    watched.job = replace(job, hosts={"a": Host("a", 0.0)})
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
    found: dict[str, set[str]] = {}
    for family in watched.metrics.registry.collect():
        for suffix in suffixes.get(family.type, ("",)):
            of = found.setdefault(family.name + suffix, set())
            spec = SPECS.get(family.name.removeprefix("elastic_reshard_"))
            of |= set(spec.labels) if spec is not None else {k for s in family.samples for k in s.labels}
            of |= {"le"} if suffix == "_bucket" else set()
    gauges = {"slots_held": {"host", "kind"}, "arena_bytes": {"host", "kind"}, "transfer_cells": {"group"},
              "transfer_landed_cells": {"group"}, "group_lag_versions": {"group"}, "host_unsent_bytes": {"host"}}  # fmt: skip
    return found | {f"elastic_reshard_{name}": labels for name, labels in gauges.items()}


def faults(query: str, known: dict[str, set[str]]) -> list[str]:
    """What a query asks for that there is not. instance, job and up are Prometheus' own."""
    bare = re.sub(r'"[^"]*"', '""', query)
    names = set(re.findall(r"\b(?:elastic_reshard|process|python)_[a-z_]+\b", bare))
    wrong = [f"no metric {name}" for name in names - set(known)]
    labels = {"instance", "job"} | {label for name in names & set(known) for label in known[name]}
    asked = re.findall(r"by \(([^)]*)\)", bare) + re.findall(r"{([^}]*)}", bare)
    for label in re.findall(r"[a-z_]+", " ".join(asked)):
        wrong += [f"no label {label}"] if label not in labels else []
    return wrong if names or "up" in bare else [*wrong, "asks for nothing"]


def test_every_query_of_the_dashboard_finds_something(watched: Watched) -> None:
    known = existing(watched)
    board = json.loads((HERE / "grafana.json").read_text())
    panels = [p for p in board["panels"] if p["type"] != "row"]
    queries = [(p["title"], t["expr"], t["legendFormat"]) for p in panels for t in p["targets"]]
    queries += [(a["name"], a["expr"], "") for a in board["annotations"]["list"]]
    assert len(queries) > 40
    for title, query, legend in queries:
        assert not (wrong := faults(query, known)), f"{title}: {wrong} in {query}"
        by = re.findall(r"{{(\w+)}}", legend)
        assert all(
            any(label in known[name] for name in re.findall(r"elastic_reshard_[a-z_]+", query)) for label in by
        ), title
    asked = set(re.findall(r"elastic_reshard_[a-z_]+", " ".join(q for _, q, _ in queries)))
    counters = {f"elastic_reshard_{n}" + ("_total" if s.kind == "counter" else "_bucket") for n, s in SPECS.items()}
    unused = counters - asked - {"elastic_reshard_" + n for n in (
        "publications_begun_total", "supervisor_late_total", "members_gone_total", "transfers_suspended_total",
        "transfers_given_up_total", "network_fallbacks_total",
    )}  # fmt: skip
    assert not unused, f"counted, but on no panel: {unused}"
    ids = [p["id"] for p in board["panels"]]
    assert len(ids) == len(set(ids))
    assert faults("rate(elastic_reshard_comits_total[1m])", known), "a wrong name is found"
    assert faults("sum by (node) (elastic_reshard_groups)", known), "a wrong label is found"


def test_every_alert_asks_for_something_and_says_what_to_do(watched: Watched) -> None:
    known = existing(watched)
    rules = [r for g in yaml.safe_load((HERE / "alerts.yml").read_text())["groups"] for r in g["rules"]]
    assert len(rules) >= 6
    for rule in rules:
        assert not (wrong := faults(rule["expr"], known)), f"{rule['alert']}: {wrong}"
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}
        for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
            assert any(label in known.get(name, ()) for name in re.findall(r"elastic_reshard_[a-z_]+", rule["expr"])), (
                label
            )
