"""The demo as a person starts it: every bit checked, everything that was inflicted recovered from, nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from elastic_reshard.bench.demo import parameter_tree
from elastic_reshard.bench.elastic_demo_cast import DemoSetup, scaled
from elastic_reshard.errors import LayoutError
from elastic_reshard.layout import catalog

ROOT = Path(__file__).parents[1]
SOON = 90.0
LIMIT = 110.0  # seconds: "under two minutes", processes and all


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for all that a demo makes; at the end it is empty and no process of it lives."""
    with tempfile.TemporaryDirectory(prefix="d") as folder:
        yield Path(folder)
        deadline = time.monotonic() + 3.0  # what was killed takes a moment to be gone
        while (living := started_in(folder)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not living
        assert not [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]  # torch's own


def started_in(folder: str) -> list[str]:
    """Processes that were started with this folder as their temporary one, by anybody."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"TMPDIR={folder}\0".encode() in Path("/proc", name, "environ").read_bytes():
                found.append(f"{name}: {Path('/proc', name, 'cmdline').read_text()}")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def command(*more: str) -> list[str]:
    return [sys.executable, "-m", "elastic_reshard.cli", "demo", *more]


def environment(place: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(place),
        "TERM": "xterm",
        "COLUMNS": "140",
        "LINES": "50",
    }


def demo(place: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*more), env=environment(place), capture_output=True, text=True, timeout=LIMIT, check=False
    )


# -- the elastic one


def played(place: Path, *more: str) -> dict[str, Any]:
    """What a demo told as JSON, all of it looked at."""
    done = demo(place, "--json", *more)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["ok"]
    assert told["wrong"] == []
    look_at_versions(told)
    look_at_faults(told)
    changes = {c["what"]: c for c in told["changes"]}
    assert set(changes) == {"trainers come back", "engine joins", "engine leaves"}
    assert all(c["others"] for c in changes.values())
    assert changes["engine joins"]["network"] == told["refits"][0]["needed"] // 2  # once, for one more host
    last = told["refits"][-1]
    left = changes["engine leaves"]["whom"]
    assert {p["engine"] for p in told["proofs"]} == {"engine-0", "engine-1", "engine-2"} - {left}
    for proof in told["proofs"]:
        assert (proof["version"], proof["label"], proof["state"]) == (last["version"], last["label"], "current")
        assert proof["wrong"] == []
        assert proof["nbytes"] >= told["nbytes"]
    # Each version in each engine, once more at the end, and the joiner when it came.
    looks = sum(len(r["engines"]) for r in told["refits"]) + len(told["proofs"]) + 1
    assert told["compared"] == looks * told["proofs"][0]["nbytes"]
    # The same lines, for people who look on.
    shown = [line[line.index(" s  ") + 4 :] for line in done.stderr.splitlines()]
    assert sorted(shown) == sorted(line["text"] for line in told["lines"])
    return told


def look_at_versions(told: dict[str, Any]) -> None:
    refits = told["refits"]
    assert [r["version"] for r in refits] == [*range(1, len(refits) + 1)]
    assert len(refits) >= told["setup"]["versions"]
    steps = [int(r["label"].removeprefix("step-")) for r in refits]
    back = [n for n, (a, b) in enumerate(pairwise(steps)) if b <= a]
    assert [refits[n]["note"] for n in back] == ["trainers killed"]  # what came next has an older label
    hosts = {len(r["engines"]): r["needed"] for r in refits}
    assert all(needed == refits[0]["needed"] // 2 * engines for engines, needed in hosts.items())
    assert all(r["network"] == r["needed"] for r in refits if r["transfers"] == 1)


def look_at_faults(told: dict[str, Any]) -> None:
    faults = {f["what"]: f for f in told["faults"]}
    assert set(faults) == {"mover killed", "mover frozen", "trainers killed"}
    for fault in faults.values():
        assert 0 <= fault["committed"] <= fault["recovered"] + 0.1  # by two clocks
        assert told["refits"][fault["version"] - 1]["note"] == fault["what"]
    killed, frozen = faults["mover killed"], faults["mover frozen"]
    for fault in (killed, frozen):
        assert 0.1 < fault["landed"] < 1
        assert fault["noticed"] <= fault["replaced"] <= fault["committed"]
        assert 0 <= fault["resent"] < told["refits"][fault["version"] - 1]["needed"]
        assert f"the mover of {fault['whom']} has ended" in fault["why"]
        assert told["refits"][fault["version"] - 1]["transfers"] >= 2
    assert "no sign of life for 1.5 s" in frozen["why"]
    assert frozen["noticed"] > 1.0
    assert faults["trainers killed"]["resent"] == 0


@pytest.mark.long
def test_movers_and_trainers_are_lost_engines_come_and_go_and_every_bit_is_right(place: Path) -> None:
    told = played(place, "--versions", "8", "--mib", "24", "--seed", "5")
    assert len({f["whom"].partition("-")[0] for f in told["faults"]}) == 2  # a sending mover and a receiving one


@pytest.mark.long
@pytest.mark.timeout(150)
@pytest.mark.parametrize("options", [(), ("--seed", "2", "--model", "Qwen3-30B-A3B", "--mib", "64")])
def test_the_whole_demo_takes_less_than_two_minutes(place: Path, options: tuple[str, ...]) -> None:
    told = played(place, *options)
    assert len(told["refits"]) >= 30
    assert told["seconds"] < 120


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, r"landing .* [0-9]+/[0-9]+ cells"),
        pytest.param(signal.SIGTERM, r"version 2 \(step-2\) installed by 2 engines", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_a_demo_that_is_broken_off_leaves_nothing_behind(place: Path, number: signal.Signals, moment: str) -> None:
    """On a terminal, in the first transfer or later."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            command("--versions", "1000", "--mib", "8"), env=environment(place), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        try:
            os.close(theirs)
            seen = read_until(ours, re.compile(moment))
            assert "trainers-2" in seen
            assert "engines-2" in seen
            assert len(started_in(str(place))) > 8  # members, supervisor, watchdogs, movers
            if number is signal.SIGINT:
                os.killpg(process.pid, number)  # as Ctrl-C does
            else:
                process.send_signal(number)
            rest = read_until(ours, None)
            assert process.wait(20) in (1, 130)  # as typer's version has it
            assert "Traceback" not in rest
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(ours)


def read_until(terminal: int, wanted: re.Pattern[str] | None) -> str:
    """What a terminal shows, without its colours, until something is there (None: until its end)."""
    shown, deadline = "", time.monotonic() + SOON
    while time.monotonic() < deadline:
        try:
            shown += os.read(terminal, 1 << 16).decode(errors="replace")
        except OSError:  # nobody is at the other side
            if wanted is None:
                return shown
            raise AssertionError(f"it ended first: {shown[-3000:]}") from None
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
        if wanted is not None and wanted.search(shown):
            return shown
    raise AssertionError(f"not seen in {SOON} s: {wanted}; the last was {shown[-3000:]}")


@pytest.mark.parametrize("nbytes", [4 << 20, 48 << 20])
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-30B-A3B"])
def test_a_model_is_scaled_to_about_so_many_bytes_with_its_kinds_of_parameters(model: str, nbytes: int) -> None:
    spec = catalog.model(model)
    small = scaled(spec, nbytes)
    assert 0.9 * nbytes < 2 * small.numel <= nbytes
    assert {p.kind for p in small.parameters} == {p.kind for p in spec.parameters}
    names = {p.name for p in spec.parameters}
    assert {p.name for p in small.parameters} <= names
    assert all(size > 0 for p in small.parameters for size in p.shape)


def test_a_small_model_stays_as_it_is() -> None:
    tiny = catalog.model("tiny")
    assert scaled(tiny, 1 << 20) is tiny


def test_too_few_versions_for_all_the_faults_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"7 versions leave no room .*at least 8"):
        DemoSetup(versions=7)


# -- the bare one


@pytest.mark.long
def test_the_bare_demo_refits_versions_by_both_methods(place: Path) -> None:
    done = demo(place, "--bare", "--model", "tiny", "--versions", "2", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = json.loads(done.stdout)
    assert (ours["method"], theirs["method"]) == ("reshard", "gather + broadcast")
    whole = 2 * catalog.model("tiny").numel
    # One host is one domain: two engines pull one copy each, and nothing goes over the network.
    assert (ours["received"], ours["pulled"]) == (0, _held_by_engines())
    assert theirs["received"] > 4 * whole
    assert theirs["pulled"] == 0
    assert all(row["warm"] > 0 and row["cold"] > 0 for row in (ours, theirs))
    assert "4/4" in done.stderr
    assert "Traceback" not in done.stderr


def _held_by_engines() -> int:
    layout = catalog.layout(catalog.model("tiny"), catalog.Parallelism(dp=2, tp=2))
    return sum(layout.local_nbytes(rank) for rank in range(4))


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_the_trainers_model_has_the_catalogs_parameters(model: str) -> None:
    import torch

    spec = catalog.model(model)
    tree = parameter_tree(spec, torch.bfloat16)
    assert {n: tuple(p.shape) for n, p in tree.named_parameters()} == {p.name: p.shape for p in spec.parameters}
