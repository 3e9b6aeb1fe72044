"""SIGKILL of any one process at random moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import random_kills


def _flat(report: random_kills.Report) -> None:
    """Processes that were there all the time hold no more in the end than in the beginning."""
    for name in report.before.keys() & report.after.keys():
        before, after = report.before[name], report.after[name]
        assert after["fds"] <= before["fds"] + 8, f"{name}: descriptors grow: {before} -> {after}"
        assert after["maps"] <= before["maps"] + 8, f"{name}: mappings grow: {before} -> {after}"
        assert after["threads"] <= before["threads"], f"{name}: threads grow: {before} -> {after}"


@pytest.mark.long
def test_any_one_process_is_killed_at_random_moments(tmp_path: Path) -> None:
    report = random_kills.run(tmp_path, seed=20261129, kills=15)
    assert sum(report.kills.values()) == 15
    assert set(report.kills) == set(random_kills.KINDS), "the seed takes each kind"
    assert report.versions >= 15
    _flat(report)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_any_one_process_is_killed_a_hundred_times(tmp_path: Path, seed: int) -> None:
    report = random_kills.run(tmp_path, seed=seed, kills=100)
    assert report.versions >= 100
    _flat(report)
