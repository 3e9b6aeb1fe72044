"""Whose memory a device can map: as it is told, and as it is."""

from __future__ import annotations

import os

import pytest

from elastic_reshard.arena.neighbours import Neighbours, joined, near_by_nvml
from elastic_reshard.arena.pretend import APART_VARIABLE, FABRIC_VARIABLE, open_pretend
from elastic_reshard.errors import ArenaError


def test_where_words_differ_the_last_counts() -> None:
    assert joined([{"a": True, "b": False}, {"b": True, "c": False}], "cafe", 3) == Neighbours(
        ("a", "b"), ("c",), "cafe", 3
    )
    assert joined([]) == Neighbours()


def test_without_a_driver_nothing_is_known() -> None:
    assert near_by_nvml("00000000-0000-0000-0000-000000000000") == ({}, "", 0)


def test_pretend_devices_are_as_near_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_pretend(0).neighbours() == Neighbours(), "of others nothing is known"
    monkeypatch.setenv(APART_VARIABLE, "0-1 2-1")
    monkeypatch.setenv(FABRIC_VARIABLE, "cafe/3")
    assert open_pretend(0).neighbours() == Neighbours(("pretend:2",), ("pretend:1",), "cafe", 3)
    assert open_pretend(1).neighbours() == Neighbours((), ("pretend:0", "pretend:2"), "cafe", 3)
    memory = open_pretend(1).create(1000, "of another")
    for number in (1, 3):
        open_pretend(number).map(os.dup(memory.fd), memory.nbytes, writable=False).close()
    fd = os.dup(memory.fd)
    with pytest.raises(ArenaError, match="pretend:0 has no peer access to pretend:1"):
        open_pretend(0).map(fd, memory.nbytes, writable=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    memory.close()
