"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import hypothesis
import pytest

from tests.leaks import left_behind, traces

# How long processes may take to be gone and sockets to be closed after a test.
PATIENCE = 3.0


# The same examples in each run, and none is late: on a busy machine one that is not run for a moment would be. Fresh ones:
# HYPOTHESIS_PROFILE=explore.
hypothesis.settings.register_profile(
    "repeat", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

# Begun first, so that one of two workers is not left with them at the end.
_SLOW = ("tests/on_ray/", "tests/test_examples.py", "tests/elastic/")

_failed = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((n for n, path in enumerate(_SLOW) if item.nodeid.startswith(path)), len(_SLOW)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--histories", type=int, default=150, help="how many simulated histories (tests/supervisor/sim)")
    parser.addoption("--seed", type=int, default=None, help="play this one simulated history only")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves processes, descriptors or shared memory fails; tests/leaks.py has what is kept."""
    before = traces()
    yield
    if request.node.stash.get(_failed, False):
        return  # its traceback holds what its frames held
    found = left_behind(before, PATIENCE)
    if found:
        pytest.fail("left behind: " + "; ".join(found), pytrace=False)
