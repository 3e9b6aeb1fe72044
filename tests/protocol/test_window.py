"""Turns on a device: the member's window, and a mover in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.processes import started
from elastic_reshard.protocol.window import Turn, Window

# A mover: does what it is told, a line each.
MOVER = """
import sys
from elastic_reshard.protocol.window import Turn
turn = Turn(int(sys.argv[1]))
for line in sys.stdin:
    print(getattr(turn, line.strip())(), flush=True)
"""
# A member that computes for ever, with its window closed.
MEMBER = """
import os, sys, time
from elastic_reshard.protocol.window import Window
window = Window()
os.set_inheritable(window.fd, True)
print(window.fd, flush=True)
sys.stdin.read()
"""


class Child:
    """A process, spoken to by lines."""

    def __init__(self, code: str, *args: str, fds: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        return self.line()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def window() -> Iterator[Window]:
    made = Window()
    yield made
    made.give_up()


@pytest.fixture
def mover(window: Window) -> Iterator[Child]:
    made = Child(MOVER, str(window.fd), fds=(window.fd,))
    yield made
    made.close()


def test_a_round_begins_only_while_it_is_open(window: Window, mover: Child) -> None:
    assert mover.ask("enter") == "False"
    assert not window.inside
    window.open()
    assert mover.ask("enter") == "True"
    assert window.inside
    begun = time.monotonic()
    assert not window.close(begun + 0.05), "the mover is inside, and that is told when the time is over"
    assert 0.05 <= time.monotonic() - begun < 1.0
    mover.ask("leave")
    assert mover.ask("enter") == "False", "it was closed, although it was not waited for to the end"


def test_closing_waits_until_the_mover_is_outside(window: Window, mover: Child) -> None:
    window.open()
    assert mover.ask("enter") == "True"
    found: list[bool] = []
    closing = threading.Thread(target=lambda: found.append(window.close(time.monotonic() + 20.0)))
    closing.start()
    mover.ask("leave")
    closing.join(10.0)
    assert found == [True]


def test_a_mover_that_was_killed_inside_is_not_waited_for(window: Window, mover: Child) -> None:
    window.open()
    assert mover.ask("enter") == "True"
    mover.close()
    begun = time.monotonic()
    assert window.close(begun + 20.0)
    assert time.monotonic() - begun < 5.0
    # The next mover begins outside.
    Turn(os.dup(window.fd)).close()
    assert not window.inside


def test_it_is_open_as_long_as_somebody_has_it_open(window: Window, mover: Child) -> None:
    window.open()
    window.open()
    assert mover.ask("enter") == "True"
    assert window.close(time.monotonic()), "another thread has it open: nobody is waited for"
    assert mover.ask("enter") == "True"
    mover.ask("leave")
    assert window.close(time.monotonic() + 5.0)
    assert mover.ask("enter") == "False"


def test_a_window_that_was_given_up_is_open(window: Window, mover: Child) -> None:
    fd = os.dup(window.fd)
    window.give_up()
    os.close(fd)
    assert mover.ask("enter") == "True"
    assert window.close(time.monotonic()), "nothing to wait for"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_is_dead_or_stopped_holds_nobody(how: signal.Signals) -> None:
    member = Child(MEMBER)
    try:
        turn = Turn(os.open(f"/proc/{member.pid}/fd/{member.line()}", os.O_RDWR | os.O_CLOEXEC))
        assert not turn.enter(), "it computes"
        os.kill(member.pid, how)
        deadline = time.monotonic() + 5.0
        while not turn.enter():
            assert time.monotonic() < deadline, "it computes nothing any more"
            time.sleep(0.005)
        if how is signal.SIGSTOP:
            turn.leave()
            os.kill(member.pid, signal.SIGCONT)
            while turn.enter():
                assert time.monotonic() < deadline, "it computes again"
                turn.leave()
                time.sleep(0.005)
        turn.close()
    finally:
        member.close()


def test_each_says_its_own_word_before_it_looks_at_the_others(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn(os.dup(window.fd))
    looked: list[tuple[str, int, int]] = []
    page, own = type(turn._page), type(turn._page).get

    def get(self: object, name: str) -> int:
        if name in ("open", "inside"):
            looked.append((name, own(turn._page, "inside"), own(turn._page, "open")))
        return own(self, name)  # type: ignore[arg-type]

    window.open()
    monkeypatch.setattr(page, "get", get)
    assert turn.enter()
    assert looked == [("open", 1, 1)], "it is inside when it looks whether it may be"
    looked.clear()
    assert not window.close(time.monotonic())
    assert looked[0] == ("inside", 1, 0), "it is closed when it looks whether the mover is inside"
    monkeypatch.undo()
    turn.close()


def test_what_the_mover_takes_is_told(window: Window) -> None:
    turn = Turn(os.dup(window.fd))
    assert window.memory == 0
    turn.uses(123 << 20)
    assert window.memory == 123 << 20
    turn.close()


def test_a_descriptor_that_is_no_window_is_refused() -> None:
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(ProtocolError, match="not sealed"):
        Turn(fd)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    assert started(os.getpid())


def test_neither_is_ever_in_while_the_other_is(window: Window) -> None:
    """Dekker's handshake: a member that closes and finds nobody inside, a mover that enters: never both."""
    turn = Turn(os.dup(window.fd))
    both, rounds, end = [], [0], time.monotonic() + 1.0
    computing = threading.Event()

    def moves() -> None:
        while time.monotonic() < end:
            if turn.enter():
                rounds[0] += 1
                if computing.is_set():
                    both.append("the mover entered while the member computed")
                turn.leave()

    mover = threading.Thread(target=moves)
    window.open()
    mover.start()
    turns = 0
    while time.monotonic() < end:
        assert window.close(time.monotonic() + 5.0)
        computing.set()
        time.sleep(0)
        computing.clear()
        window.open()
        turns += 1
    mover.join()
    turn.close()
    assert not both
    assert turns > 10
    assert rounds[0] > 10
