"""Each example runs as its docstring says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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
