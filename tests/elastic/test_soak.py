"""The soak: a short one without a finding, and the three planted bugs, each of which it must see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from chaos import plants, report
from chaos.faults import Fault, Hurt
from chaos.observer import Observer


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name is short enough for the sockets in it."""
    with TemporaryDirectory(prefix="soak-") as folder:
        yield Path(folder)


def play(folder: Path, seed: int, seconds: float, plant: str = "") -> dict[str, Any]:
    from chaos.soak import soak

    said: list[str] = []
    told: dict[str, Any] = soak(folder, seed, seconds, plant, said.append)
    print("\n".join(said))  # of a test that fails
    return told


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_short_soak_finds_nothing(short: Path, tmp_path: Path) -> None:
    told = play(short, seed=7, seconds=20.0)
    assert told["violations"] == []
    assert told["alarms"] == []
    assert told["faults"] >= 3
    assert told["samples"] > 100, "weights were looked at while they served"
    assert told["recovery"]["all"]["everywhere"]["count"] >= told["faults"] - 2  # the last two come when all is over
    report.write(told, tmp_path)
    assert json.loads((tmp_path / "soak.json").read_text()) == told
    assert "nothing was violated" in (tmp_path / "soak.html").read_text()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", sorted(plants.PLANTS))
def test_a_planted_bug_is_seen(short: Path, plant: str) -> None:
    told = play(short, seed=1, seconds=150.0, plant=plant)
    assert plants.SEEN[plant] in {f["what"] for f in told["violations"]}, told["violations"]


# -- the observer by itself, on lines that nobody wrote


def watching(*faults: Fault) -> Observer:
    observer = Observer(list(faults))
    observer.seats({"e-0": "c", "e-1": "c"}, {"e-0": "e", "e-1": "e"})
    for version in (1, 2, 3):
        observer.committed[version] = 0.0
    return observer


def served(observer: Observer, who: str, version: int, begun: float, end: float, **more: Any) -> None:
    line = {"t": end, "who": who, "pid": int(who[-1]) + 1, "kind": "served", "version": version, "after": version}
    observer.feed(line | {"label": f"s{version}", "known": True, "wrong": [], "begun": begun, "end": end} | more)


def found(observer: Observer) -> list[str]:
    observer.finish()
    return [finding.what for finding in observer.violations]


def ended(observer: Observer, call: str, seconds: float, error: str = "", at: float = 50.0) -> None:
    line = {"t": at, "who": "e-0", "pid": 1, "kind": "ended", "call": call, "number": 1, "limit": 8.0}
    observer.feed(line | {"seconds": seconds, "error": error, "text": ""})


def killed(name: str, at: float) -> Fault:
    return Fault(1, "kill", "member", 0.1, False, at=at, healed=at + 1.0, hurt=[Hurt("member", name, "c", 1, 1)])


def test_the_observer_is_content_with_ranks_that_take_turns() -> None:
    observer = watching()
    for version in (1, 2):
        served(observer, "e-0", version, version * 10.0, version * 10.0 + 5)
        served(observer, "e-1", version, version * 10.0 + 1, version * 10.0 + 6)
    assert found(observer) == []


def test_the_observer_sees_a_mixed_group() -> None:
    observer = watching()
    served(observer, "e-0", 1, 1.0, 5.0)
    served(observer, "e-1", 2, 4.0, 6.0)
    assert found(observer) == ["a group was mixed"]


def test_the_observer_sees_versions_that_fall() -> None:
    observer = watching()
    served(observer, "e-0", 2, 1.0, 2.0)
    served(observer, "e-1", 1, 3.0, 4.0)
    assert found(observer) == ["a group's version fell"]
    served(observer, "e-0", 1, 5.0, 6.0)
    assert "a version fell" in found(observer)


def test_the_observer_sees_wrong_bytes_and_what_was_never_committed() -> None:
    observer = watching()
    served(observer, "e-0", 1, 1.0, 2.0, wrong=["wide"])
    served(observer, "e-0", 9, 3.0, 4.0)
    assert found(observer) == ["wrong bytes were served", "served what was never committed"]


def test_the_observer_sees_a_version_that_is_given_twice() -> None:
    observer = watching()
    served(observer, "e-0", 1, 1.0, 2.0)
    served(observer, "e-1", 1, 1.0, 2.0, label="s2")
    assert found(observer) == ["a version was given twice"]


def test_the_observer_sees_late_calls_but_knows_who_was_frozen() -> None:
    observer = watching(
        Fault(1, "pause", "member", 9.0, False, at=41.0, healed=50.0, hurt=[Hurt("member", "e-0", "c", 1, 1)])
    )
    ended(observer, "install", 16.0)
    assert found(observer) == []
    ended(observer, "install", 16.0, at=90.0)
    assert found(observer) == ["a call was late"]


def test_errors_need_a_fault() -> None:
    observer = watching(killed("e-1", 45.0))
    ended(observer, "install", 1.0, "GroupBroken")
    assert found(observer) == []
    ended(observer, "install", 1.0, "GroupBroken", at=80.0)
    ended(observer, "install", 1.0, "ArenaError")
    assert found(observer) == ["an error without a fault", "an error that is no answer"]


def test_who_is_given_up_unhurt_is_a_false_alarm() -> None:
    observer = watching(killed("e-1", 45.0))

    def event(member: str) -> None:
        fields = {"member": member, "reason": "its process has ended"}
        observer.feed(
            {"t": 50.0, "who": "supervisor", "pid": 9, "kind": "event", "event": "member.lost", "fields": fields}
        )

    event("e-1@0123")
    assert observer.alarms == []
    event("e-0@0123")
    assert [alarm.who for alarm in observer.alarms] == ["e-0"]


def test_a_mover_that_is_condemned_unhurt_is_a_false_alarm() -> None:
    observer = watching(killed("e-1", 45.0))
    fields = {"member": "e-0@0123", "pid": 77, "why": "no sign of life for 1.5 s"}
    observer.condemned(50.0, "c", fields | {"why": "its work failed: PeerLost"})
    assert observer.alarms == []
    observer.condemned(50.0, "c", fields)
    assert [alarm.what for alarm in observer.alarms] == ["a mover was condemned"]
