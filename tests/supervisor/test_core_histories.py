"""Promises 1 to 5 of the pure cores, over histories in virtual time with faults at every step (`tests/supervisor/sim`)."""

from __future__ import annotations

import pytest

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
