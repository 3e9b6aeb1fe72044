"""Promises 1 to 5 of the pure cores, over histories in virtual time with faults at every step (`tests/supervisor/sim`)."""

from __future__ import annotations

import pytest

from tests.supervisor.sim import faults
from tests.supervisor.sim.run import play, play_many

LONG = 3_000


@pytest.mark.timeout(600)
def test_histories(request: pytest.FixtureRequest) -> None:
    """`--histories N` for more or fewer; `--seed S` for one again."""
    seed, count = request.config.getoption("--seed"), request.config.getoption("--histories")
    broken = play(seed) if seed is not None else play_many(count)
    assert not broken, broken


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_histories() -> None:
    broken = play_many(LONG)
    assert not broken, broken


@pytest.mark.parametrize("seed", [1382, 1715])
def test_histories_that_were_broken_once(seed: int) -> None:
    """1715: after a lost journal a transfer began while a mover still ran a former one. 1382: waiting for one that had formed
    nothing, for ever."""
    broken = play(seed)
    assert not broken, broken


@pytest.mark.parametrize("seed", range(24, 36))
def test_histories_in_which_movers_hang(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """29: every version was given up after one that hung before it was ready."""
    monkeypatch.setitem(faults._FAULTS, faults.hang_mover, 80)
    broken = play(seed)
    assert not broken, broken


def test_a_history_in_which_journals_are_lost_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer began while a mover that had said "ready" last still formed the communicator of a former one."""
    for fault, weight in ((faults.lose_journal, 20), (faults.partition, 20), (faults.abandon, 6)):
        monkeypatch.setitem(faults._FAULTS, fault, weight)
    broken = play(248)
    assert not broken, broken
