"""Calls in threads of their own: whoever waits is freed, whatever gloo or the user does."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from elastic_reshard.collective import Handle, Report
from elastic_reshard.errors import PeerLost, TransferError
from elastic_reshard.transport import Endpoint
from tests.collective import worlds
from tests.processes import Rank, run_ranks

MESSAGES, DEADLINE = 400, 9.0
DONE = Report("", 0, False, False, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0)


class Stream:
    """Many messages of 1 MiB under way at once, waited for in order, as a transfer does."""

    def __init__(self, me: Rank, endpoint: Endpoint) -> None:
        self.me, self.endpoint = me, endpoint
        self.error: BaseException | None = None

    def run(self) -> Report:
        network, peer = self.endpoint.network, 1 - self.me.rank
        begin = network.send if self.me.rank == 0 else network.receive
        buffer = torch.zeros(1 << 20, dtype=torch.uint8)
        pending = [begin(peer, buffer) for _ in range(MESSAGES)]
        for number, one in enumerate(pending):
            if self.me.rank == 1 and number == MESSAGES // 20:
                os.kill(os.getpid(), signal.SIGKILL)
            one.wait(time.monotonic() + DEADLINE)
        return DONE


def cut_off(me: Rank) -> tuple[str, Any, float, bool]:
    """The receiver is killed in the middle. gloo forgets the message of which a part was on its way: its wait lasts until
    the deadline, which the caller does not wait for."""
    endpoint = worlds.form(me, [0, 1])
    begun = time.monotonic()
    handle = Handle(Stream(me, endpoint))
    handle.start()
    error = worlds.error_of(handle.wait)
    took = time.monotonic() - begun
    assert handle.done()
    assert worlds.error_of(handle.wait) is error
    return type(error).__name__, getattr(error, "members", None), took, endpoint.closed


def test_a_message_that_gloo_forgets_does_not_hold_the_caller() -> None:
    (kind, members, took, closed), _ = run_ranks(cut_off, 2, group=False, lost=[1])
    assert (kind, members, closed) == (PeerLost.__name__, (1,), True)
    assert took < DEADLINE - 3.0


def interrupted(me: Rank, early: bool) -> tuple[str, float]:
    """Ctrl-C in a call whose partner does not come. early: while its thread begins."""
    case = worlds.catalog_case("tiny", "fsdp1", "tp1")
    source, destination = (worlds.tensors(side, me.rank, "arena") for side in (case.source, case.destination))
    endpoint = worlds.form(me, [0, 1])
    begun = time.monotonic()
    if me.rank == 1:
        me.store().wait(["interrupted"])
        error = worlds.error_of(lambda: worlds.call(case, endpoint, source, destination))
        return type(error).__name__, time.monotonic() - begun
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        while endpoint._network is None or endpoint.network.waiting_since is None:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    def begin(handle: Handle) -> None:
        start(handle)
        raise KeyboardInterrupt

    start = Handle.start
    if early:
        Handle.start = begin  # type: ignore[method-assign]
    else:
        threading.Thread(target=interrupt).start()
    try:
        worlds.call(case, endpoint, source, destination)
    except KeyboardInterrupt:
        me.store().set("interrupted", "")
        assert endpoint.closed
        return "KeyboardInterrupt", time.monotonic() - begun
    raise AssertionError("it went on")


@pytest.mark.parametrize("early", [False, True])
def test_an_interrupt_ends_the_call_at_once_and_frees_the_others(early: bool) -> None:
    (kind, took), (other, other_took) = run_ranks(interrupted, 2, early, group=False)
    assert kind == "KeyboardInterrupt"
    assert other in {PeerLost.__name__, TransferError.__name__}
    assert max(took, other_took) < 10.0
