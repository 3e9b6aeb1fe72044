"""Guarded calls: what a call that failed had in hand is let go of."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from elastic_reshard.communicator.guard import Guarded
from elastic_reshard.errors import TransferError, TransferTimeout


class Socket:
    """Something that must not stay open."""


def test_a_failed_call_keeps_nothing_that_it_had_in_hand() -> None:
    """gloo's operations lie in the frames of the error and of its cause: a mover that goes on must not keep them."""
    opened: list[weakref.ref[Socket]] = []

    def fails() -> None:
        held = Socket()
        opened.append(weakref.ref(held))
        raise TransferError("a peer is gone")

    def call() -> None:
        held = Socket()
        opened.append(weakref.ref(held))
        try:
            fails()
        except TransferError as error:
            raise TransferTimeout("it did not form") from error

    gc.disable()
    try:
        guarded = Guarded("forming", call)
        assert guarded.wait(time.monotonic() + 5.0)
        assert len(opened) == 2
        assert [ref() for ref in opened] == [None, None]
    finally:
        gc.enable()
    with pytest.raises(TransferTimeout, match="it did not form") as told:
        assert guarded.value
    assert isinstance(told.value.__cause__, TransferError), "what was wrong is told in full"
