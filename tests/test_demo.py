"""The demo as a person starts it: seconds for a tiny model, every bit checked, a table or JSON at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_reshard.bench.demo import parameter_tree
from elastic_reshard.layout import catalog

ROOT = Path(__file__).parents[1]


def demo(*more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic_reshard.cli", "demo", "--model", "tiny", "--versions", "2", *more]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_the_demo_refits_versions_by_both_methods() -> None:
    done = demo("--json")
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
