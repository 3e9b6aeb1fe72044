"""Judges a job by what its processes wrote down and by what was done to them. Shares no code with what it judges.

What it is told: lines of players (`players.Records`), events of supervisors, log lines of watchdogs, and the faults. What it
tells: violations of what is promised, and false alarms, which are judgements about somebody who had not been hurt.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.faults import Fault

__all__ = ["Finding", "Observer"]

GRACE = 2.5  # seconds by which a call may be late, on a machine that is busy
AFTERMATH = 15.0  # seconds for which a fault explains what happens to others
HASTE = 2.0  # seconds in which nobody need have installed anything
ZOMBIE = 15.0  # seconds in which a supervisor that wakes with an older term must be gone
_ALWAYS = {
    "receive": {"RefitTimeout"},
    "install": {"NothingInstallable"},
    "join": set(),
    "publish": set(),
    "wait": {"RefitTimeout"},
    "watch": set(),
}
# What a call may say when somebody was hurt.
_AFTER_A_FAULT = {
    "join": {"RefitTimeout", "SupervisorUnreachable"},
    "publish": {"SlotsBusy", "SupervisorUnreachable"},
    "wait": {"PublicationAbandoned"},
    "watch": set(),
    "receive": {"RefitTimeout", "GroupBroken", "NothingInstallable", "SupervisorUnreachable"},
    "install": {"RefitTimeout", "GroupBroken", "NothingInstallable", "SupervisorUnreachable"},
}


@dataclass(frozen=True)
class Finding:
    """Something that must not be. at: time.monotonic."""

    at: float
    what: str
    who: str
    detail: str


@dataclass
class _Open:
    call: str
    begun: float
    limit: float
    told: bool = False


@dataclass
class Observer:
    """Everything that was told so far. faults: those that were inflicted; others add to it and fill it in."""

    faults: list[Fault]
    violations: list[Finding] = field(default_factory=list)
    alarms: list[Finding] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)  # label of each version
    committed: dict[int, float] = field(default_factory=dict)  # versions, and when that was first heard
    samples: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    resent: int = 0
    network: int = 0
    events: Counter[str] = field(default_factory=Counter)
    installed: dict[str, tuple[float, int]] = field(default_factory=dict)  # name -> when, which step
    groups: Mapping[str, str] = field(default_factory=dict)  # group of each member's name
    over: bool = False  # the job ends: who goes now was asked to
    _open: dict[tuple[int, int], _Open] = field(default_factory=dict)
    _sections: dict[str, list[tuple[float, float, int, str]]] = field(default_factory=lambda: defaultdict(list))
    _served: dict[int, int] = field(default_factory=dict)  # last version by process
    _published: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    _pids: dict[int, str] = field(default_factory=dict)
    _where: dict[str, str] = field(default_factory=dict)

    def violation(self, at: float, what: str, who: str, detail: str) -> None:
        """One more."""
        self.violations.append(Finding(at, what, who, detail))

    # -- who was hurt

    def hurt(self, at: float, *names: str, after: float = AFTERMATH) -> list[Fault]:
        """Faults of these (of anybody, if none are named) that were under way then, or just before."""
        return [
            f
            for f in self.faults
            if f.at <= at and (not f.healed or at <= f.healed + after) and (not names or f.names() & set(names))
        ]

    def frozen(self, pid: int, begun: float, end: float) -> float:
        """Seconds in which a process was stopped."""
        found = 0.0
        for fault in self.faults:
            if fault.action in ("stop", "pause") and any(hurt.pid == pid for hurt in fault.hurt):
                found += max(0.0, min(end, fault.healed or end) - max(begun, fault.at))
        return found

    def _hosts_of(self, host: str, at: float) -> tuple[bool, bool]:
        """Whether the host, or its watchdog, was hurt."""
        there = self.hurt(at)
        return any(f.target == "host" and f.host == host for f in there), bool(self.hurt(at, f"watchdog {host}"))

    # -- what players write

    def feed(self, line: Mapping[str, Any]) -> None:
        """A line of a player."""
        self._pids[line["pid"]] = line["who"]
        match line["kind"]:
            case "call":
                self._open[line["pid"], line["number"]] = _Open(line["call"], line["t"], line["limit"])
                self.calls[line["call"]] += 1
            case "ended":
                self._ended(line)
            case "served":
                self._serve(line)
            case "published":
                self._published[line["step"]][line["who"]] = line["t"]
            case "committed":
                self._commit(line["version"], f"s{line['step']}", line["t"], line["who"])
            case "not_committed" if line["error"] == "PublicationAbandoned":
                self._abandoned(line)
            case "installed":
                if line["label"] is not None:
                    self._name(line["version"], line["label"], line["t"], line["who"])
                    self.installed[line["who"]] = (line["t"], int(line["label"][1:]))
            case "crashed":
                self.violation(line["t"], "a process ended by an error", line["who"], line["text"])
            case "event":
                self._event(line)

    def _name(self, version: int, label: str, at: float, who: str) -> None:
        known = self.labels.setdefault(version, label)
        if known != label:
            self.violation(at, "a version was given twice", who, f"version {version} is {known} and {label}")

    def _commit(self, version: int, label: str, at: float, who: str) -> None:
        self._name(version, label, at, who)
        self.committed.setdefault(version, at)

    def _ended(self, line: Mapping[str, Any]) -> None:
        self._open.pop((line["pid"], line["number"]), None)
        call, error, end = line["call"], line["error"], line["t"]
        begun = end - line["seconds"]
        allowed = line["limit"] + GRACE + self.frozen(line["pid"], begun, end)
        if line["seconds"] > allowed:
            detail = f"{call} took {line['seconds']:.1f} s of {line['limit']} s: {error} {line['text']}"
            self.violation(end, "a call was late", line["who"], detail)
        if not error:
            return
        self.errors[f"{call}: {error}"] += 1
        if error in _ALWAYS[call] or _hasty(line["text"]):
            return
        hurt = self.hurt(end)
        if error == "NotAMember":
            self._given_up(end, line["who"], line["text"])
        elif not hurt or error not in _AFTER_A_FAULT[call]:
            self.violation(end, "an error without a fault" if not hurt else "an error that is no answer", line["who"],
                           f"{call}: {error}: {line['text']}")  # fmt: skip

    def _serve(self, line: Mapping[str, Any]) -> None:
        self.samples += 1
        who, version, at = line["who"], line["version"], line["end"]
        if line["wrong"]:
            self.violation(at, "wrong bytes were served", who, f"version {version}, {line['label']}: {line['wrong']}")
        if not line["known"]:
            self.violation(at, "serves what it never installed", who, f"version {version}")
        if line["label"] is not None:
            self._name(version, line["label"], at, who)
        if line["after"] not in (0, version):
            self.violation(at, "its version changed while it served", who, f"{version} -> {line['after']}")
        before = self._served.get(line["pid"], 0)
        if version < before:
            self.violation(at, "a version fell", who, f"served {version} after {before}")
        self._served[line["pid"]] = max(before, version)
        group = self.groups.get(who, who)
        end = line["end"] if line["after"] == version else line["begun"]
        sections = self._sections[group]
        if sections and sections[-1][2:] == (version, who) and line["begun"] - sections[-1][1] < 0.1:
            sections[-1] = (sections[-1][0], end, version, who)
        else:
            sections.append((line["begun"], end, version, who))

    def _abandoned(self, line: Mapping[str, Any]) -> None:
        """What all ranks had published is lost by no single fault of a process."""
        whole = self._published.get(line["step"], {})
        if len(whole) < 3:
            return
        hurt = [f for f in self.hurt(line["t"]) if f.at >= min(whole.values()) - AFTERMATH]
        if len(hurt) < 2 and not any(f.target == "host" for f in hurt):
            self.violation(line["t"], "a published version was lost", line["who"], f"s{line['step']}: {line['text']}")

    # -- what the job's guards say

    def _event(self, line: Mapping[str, Any]) -> None:
        event, fields, at = line["event"], line["fields"], line["t"]
        self.events[event] += 1
        if event == "publication.committed":
            self._commit(int(fields["version"]), fields["label"], at, "supervisor")
        elif event == "transfer.over":
            self.network += int(fields.get("bytes_network", 0))
        elif event == "host.silent":
            self._silent(at, fields["host"], f"members {fields['members']}")
        elif event in ("member.forfeit", "member.lost", "member.orphaned", "member.refused"):
            self._given_up(at, fields["member"].rpartition("@")[0], f"{event}: {fields.get('reason')}")

    def _silent(self, at: float, host: str, detail: str) -> None:
        vanished, watchdog = self._hosts_of(host, at)
        members = [who for who, where in self._where.items() if where == host]
        if not self.over and not vanished and not (watchdog and self.hurt(at, *members)):
            self.alarms.append(Finding(at, "a host was given up", host, detail))

    def _given_up(self, at: float, name: str, detail: str) -> None:
        host = self._where.get(name, "")
        vanished, _ = self._hosts_of(host, at)
        if not self.over and not vanished and not self.hurt(at, name):
            self.alarms.append(Finding(at, "a member was given up", name, detail))

    def seats(self, where: Mapping[str, str], groups: Mapping[str, str]) -> None:
        """Host and group of each member's name."""
        self._where, self.groups = dict(where), dict(groups)

    def condemned(self, at: float, host: str, fields: Mapping[str, Any]) -> None:
        """A watchdog's log line about a mover that it ends."""
        why, pid = str(fields.get("why", "")), fields.get("pid", 0)
        self.events["mover.condemned"] += 1
        if why.startswith(("the watchdog goes", "its member is gone")):
            return
        vanished, watchdog = self._hosts_of(host, at)
        stopped = any(hurt.pid == pid for f in self.faults for hurt in f.hurt)
        guards = watchdog or vanished or bool(self.hurt(at, "nursery"))
        explained = stopped or guards if why.startswith("no sign of life") else bool(self.hurt(at))
        if not explained:
            self.alarms.append(Finding(at, "a mover was condemned", str(fields.get("member")), why))

    def replaced(self, at: float, host: str, pid: int, why: str) -> None:
        """A member's log line about a watchdog that it ends."""
        self.events["watchdog.condemned"] += 1
        if not any(hurt.pid == pid for f in self.faults for hurt in f.hurt):
            self.alarms.append(Finding(at, "a watchdog was condemned", host, why))

    # -- judging

    def late(self, now: float, alive: Sequence[int]) -> None:
        """Calls that do not end, of processes that live."""
        for (pid, _), open_ in self._open.items():
            if pid in alive and not open_.told:
                over = now - open_.begun - open_.limit - GRACE - self.frozen(pid, open_.begun, now)
                if over > 1.0:
                    open_.told = True
                    self.violation(now, "a call did not end", self._pids[pid], f"{open_.call}, {open_.limit} s")

    def finish(self) -> None:
        """What only the whole shows: groups that were mixed, versions that fell, and that were served but never committed."""
        for group, sections in self._sections.items():
            for finding in _mixed(group, sorted(sections)):
                self.violations.append(finding)
            for at, _, version, who in sections:
                if version not in self.committed:
                    self.violation(at, "served what was never committed", who, f"version {version}")
                    break


def _hasty(text: str) -> bool:
    """Whether an install broke off because a call had hardly any time left when its version came."""
    short = re.search(r"not done within ([0-9.]+) s", text)
    return short is not None and float(short.group(1)) < HASTE


def _mixed(group: str, sections: list[tuple[float, float, int, str]]) -> Iterator[Finding]:
    """Ranks of a group that served different versions at one time, and a version older than one that the group had served."""
    newest, ends = 0, dict[int, tuple[float, str]]()
    for begun, end, version, who in sections:
        if version < newest:
            yield Finding(begun, "a group's version fell", who, f"{group} served {version} after {newest}")
        newest = max(newest, version)
        ends = {v: (until, other) for v, (until, other) in ends.items() if until > begun or v == version}
        for v, (_, other) in ends.items():
            if v != version:
                yield Finding(begun, "a group was mixed", group, f"{who} served {version}, {other} {v} at once")
        if end > ends.get(version, (0.0, ""))[0]:
            ends[version] = (end, who)
