"""What whoever is paged does to a job that runs: empties a host, and takes a bundle of it. Real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from tests.elastic import rank as on
from tests.elastic.world import Gang, World, results

ROOT = Path(__file__).parents[2]


def command(world: World, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line, in the world's runtime folder and without a token in its environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC_RESHARD_")}
    return subprocess.run(
        [sys.executable, "-m", "elastic_reshard", *arguments], capture_output=True, text=True, timeout=90, cwd=ROOT,
        env=clean | {"ELASTIC_RESHARD_RUNTIME": str(world.runtime)} | environment, check=False,
    )  # fmt: skip


def test_sigterm_to_a_watchdog_empties_its_host_and_nobody_elses(world: World) -> None:
    trainer = world.trainer().join()
    going = world.engine(0, hosts=("b",)).join()
    trainer.publish("s1")
    assert going.receive("s1") == 1
    watchdog = world.watchdog("b")
    leaving = going.begin(on.leave_when_asked)
    os.kill(watchdog.pid, signal.SIGTERM)
    assert results(leaving) == [1, 1], "they were asked, served what they had, and left"
    out = ("orphaned", "lost")
    world.until(
        lambda view: all(view.members[a.id].state in out for a in going if a.id in view.members), "they are out"
    )
    on_b = {doc["member"]: doc for doc in (e.fields for e in world.events("member.leave_asked"))}
    assert set(on_b) == {actor.id for actor in going}
    assert not world.evicted()
    trainer.publish("s2")
    stays = Gang(world, "other", 1, ("destination",)).join()
    assert stays.receive("s2") == 2


def _arena_bytes(members: tuple[int, ...]) -> set[bytes]:
    """Some of what is in the arenas of these processes: 64 bytes of each memfd at several places, but for zeros."""
    found = set()
    for pid in members:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            if "memfd:" not in os.readlink(path):
                continue
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                for at in range(4096, size - 64, max(64, size // 64)):
                    file.seek(at)
                    raw = file.read(64)
                    if len(set(raw)) > 8:
                        found.add(raw)
    return found


def _unpacked(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {}
        for entry in archive.getmembers():
            assert entry.isfile()
            file = archive.extractfile(entry)
            assert file is not None
            found[entry.name.partition("/")[2]] = file.read()
        return found


def _clean(files: dict[str, bytes], token: str, weights: set[bytes]) -> None:
    everything = b"\0".join(files.values())
    assert token.encode() not in everything
    assert len(weights) > 10, "there were weights to be found"
    assert not [raw for raw in weights if raw in everything or raw.hex().encode() in everything]


def test_a_bundle_has_what_is_needed_and_neither_token_nor_weights(world: World, tmp_path: Path) -> None:
    trainer, engine = world.trainer().join(), world.engine(0, hosts=("b",)).join()
    trainer.publish("s1")
    assert engine.receive("s1") == 1
    members = [actor.pid for actor in (*trainer, *engine)]
    weights = _arena_bytes(tuple(members))
    path = tmp_path / "case.tar.gz"
    arguments = ("bundle", "-o", str(path), "--url", world.url, "--journal", str(world.journal), "--job", world.job)
    done = command(world, *arguments, "--json", ELASTIC_RESHARD_TOKEN=world.token)
    assert done.returncode == 0, done.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    files = _unpacked(path)
    assert sorted(files) == json.loads(done.stdout)["files"]
    _clean(files, world.token, weights)
    view = json.loads(files["supervisor/view.json"])
    assert set(view["members"]) == {actor.id for actor in (*trainer, *engine)}
    events = [e["event"] for line in files["supervisor/events.json"].splitlines() for e in json.loads(line)["events"]]
    assert {"publication.moving", "publication.committed", "transfer.over", "group.current"} <= set(events)
    assert b"transfer.over: " in files["supervisor/epochs.txt"]
    assert "publications" in view
    assert {"supervisor/progress.json", "supervisor/metrics.txt"} <= set(files)
    journal = json.loads(files["journal.json"])
    assert journal["meta"]["weight_version"] == 1
    assert set(journal["docs"]["groups"]) == {trainer.name, engine.name}
    assert "layouts" in journal["rows"]
    assert "findings" in json.loads(files["doctor.json"])
    processes = json.loads(files["processes.json"])
    asked = [who for who, seen in processes.items() if "stacks" in seen]
    assert {"watchdog of a", "watchdog of b"} <= set(asked)
    assert [who for who in asked if who.startswith("mover ")], "movers were at work between the hosts"
    assert b"most recent call first" in files["logs/a.log"], "stacks of a watchdog"
    assert [n for n, raw in files.items() if "nursery" in n and b"most recent call first" in raw], "stacks of a mover"
    assert all(os.path.exists(f"/proc/{pid}") for pid in members), "whoever is looked at lives on"
    trainer.publish("s2")
    assert engine.receive("s2") == 2


def test_without_a_supervisor_the_bundle_says_what_is_missing(world: World, tmp_path: Path) -> None:
    trainer, engine = world.both()
    trainer.publish("s1")
    assert engine.receive("s1") == 1
    world.kill_supervisor()
    path = tmp_path / "case.tar.gz"
    done = command(world, "bundle", "-o", str(path), "--job", world.job, "--journal", str(world.journal))
    assert done.returncode == 1
    assert "missing: supervisor: the supervisor at http" in done.stderr
    files = _unpacked(path)
    assert world.token.encode() not in b"\0".join(files.values())
    missing: dict[str, Any] = json.loads(files["missing.json"])
    assert set(missing) == {"supervisor", "supervisor/health.json"}
    assert json.loads(files["journal.json"])["docs"]["publications"]
    assert json.loads(files["hosts/a.json"])["members"]
    world.start_supervisor()
