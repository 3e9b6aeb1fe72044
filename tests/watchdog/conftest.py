"""Fixtures of the watchdog's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.watchdog.world import World, world


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A short path: Unix sockets have short names."""
    with tempfile.TemporaryDirectory(prefix="er-") as folder:
        yield Path(folder)


@pytest.fixture
def here(runtime: Path) -> Iterator[World]:
    with world(runtime) as made:
        yield made
