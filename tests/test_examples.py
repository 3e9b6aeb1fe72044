"""Each example runs as its docstring says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_torchrun_refit() -> None:
    example = ROOT / "examples" / "torchrun_refit.py"
    (told,) = re.findall(r"^    torchrun (.*)$", example.read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *told.split()]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.strip().splitlines()
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2", "version 3"]
    assert all("right on rank 2" in line and "Report(plan=" in line for line in lines)
    assert "planned=True" in lines[0]
    assert "planned=False" in lines[1]
    # All ranks are on one host and the engines' tensors in an arena; nothing went over the network.
    assert all("received=0," in line for line in lines)


def test_elastic_refit() -> None:
    example = ROOT / "examples" / "elastic_refit.py"
    assert "    python examples/elastic_refit.py\n" in example.read_text()
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(example)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.findall(
        r"engine rank (\d) serves version (\d+) \(step-(\d)\), all its weights are \[(\d)\.0\]", done.stdout
    )
    assert len(told) == done.stdout.count("serves version"), "an engine served two versions mixed"
    for rank in "01":
        mine = [(int(version), int(step), int(value)) for r, version, step, value in told if r == rank]
        assert [step for _, step, _ in mine] == [value for _, _, value in mine], "the weights are those of the label"
        versions = [version for version, _, _ in mine]
        assert versions == sorted(set(versions)), "weight_version only rises"
        assert {3, 4} <= {step for _, step, _ in mine}, "what was published before each kill has arrived"
    assert done.stdout.count("is gone") == 2


def run(name: str, *words: str, limit: float = 100.0) -> list[str]:
    """Run an example as its docstring says; what it printed."""
    example = ROOT / "examples" / name
    assert f"    python examples/{' '.join((name, *words))}\n" in example.read_text()
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(example), *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()


@pytest.mark.long
def test_preempt_notice() -> None:
    told = run("preempt_notice.py")
    served = [line for line in told if "serves" in line]
    assert served == [
        *(f"engine-{number} serves step-{step}" for step in (1, 2) for number in (1, 2)),
        *(f"engine-1 serves step-{step}" for step in (3, 4)),
    ]
    assert "host spot-2 is empty: engine-2 left" in told
    assert "host spot-2 may be turned off" in told
    assert any(line.startswith("engine-2 leaves asked to leave within") for line in told)


@pytest.mark.long
def test_membership_api() -> None:
    told = run("membership_api.py")
    assert told == [
        "version 1 is served by engine-0, engine-1",
        "POST /v1/groups/shrink 200",
        "done: True, out: ['engine-1']",
        "version 2 is served by engine-0",
        "POST /v1/grow 200",
        "done: True, in: ['engine-2', 'engine-3']",
        "version 3 is served by engine-0, engine-2, engine-3",
        "GET /v1/groups 200",
        "POST /v1/groups/shrink 200",
    ]
    # What the docstring tells to do by hand is what was done.
    text = (ROOT / "examples" / "membership_api.py").read_text().partition('"""\n\nfrom')[0]
    by_hand = re.findall(r'(?:-X (POST) )?"\$URL(/v1/[a-z/]+)', text)
    assert {f"{method or 'GET'} {path} 200" for method, path in by_hand} == {line for line in told if " /v1/" in line}


def versions_of(told: list[str]) -> None:
    assert told == [f"serves version {step} (step-{step}): [{10.0 * step}]" for step in (1, 2, 3)]


@pytest.mark.long
def test_integrate_engine_over_http() -> None:
    versions_of(run("integrate_engine.py", "http"))


@pytest.mark.long
def test_integrate_engine_by_ray() -> None:
    versions_of(run("integrate_engine.py", "ray"))


@pytest.mark.long
def test_ray_groups() -> None:
    first, again, phases = run("ray_groups.py")
    steps = [float(one) for one in re.findall(r"\d\.0", first)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 5.0
    assert again == "killed; the new engine-0 has installed [5.0]", "its trainer is gone by then"
    assert phases == "{'trainer': 'done', 'engine-0': 'done', 'engine-1': 'done'}"
