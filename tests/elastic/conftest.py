"""The world of a test, and what it says when a test fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elastic_reshard.protocol.deadlines import Deadlines, Policies
from tests.elastic.netns import Networks, missing
from tests.elastic.world import Settings, World


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """A world with a supervisor that runs; deadlines and policies by name."""
    with ExitStack() as stack:

        def make(start: bool = True, token: str | None = None, **given: Any) -> World:
            special = {k: given[k] for k in ("cell", "hooks") if k in given}
            changes = {k: v for k, v in given.items() if k not in special}
            timing = {k: v for k, v in changes.items() if k in Deadlines.__dataclass_fields__}
            policies = {k: v for k, v in changes.items() if k in Policies.__dataclass_fields__}
            assert len(timing) + len(policies) == len(changes)
            settings = Settings(Deadlines(**({"orphan_hold": 2.0} | timing)), Policies(**policies), token, **special)
            world = stack.enter_context(World(tmp_path, settings))
            if start:
                world.start_supervisor()
            return world

        yield make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A world with a supervisor that runs, with the usual deadlines."""
    return make_world()


@pytest.fixture
def networks() -> Iterator[Networks]:
    """Two sides in networks of their own, "left" and "right". Ask for it before `make_world`: worlds end first."""
    lacking = missing()
    if lacking:
        pytest.skip(lacking)
    with Networks(["left", "right"]) as networks:
        yield networks
