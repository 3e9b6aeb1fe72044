"""The watchdog and its supervisor: found again soon, obeyed by term, never in the members' way."""

from __future__ import annotations

import time

import pytest

from elastic_reshard.errors import Unauthorized
from elastic_reshard.protocol.messages import Stated
from elastic_reshard.protocol.view import Heard, Told
from tests.watchdog.world import Local, World, until


def told(local: Local) -> list[Told]:
    return [m for m in local.heard if isinstance(m, Told)]


def test_statements_go_up_and_the_view_comes_down(here: World) -> None:
    one, two = here.local("one").open(), here.local("two").open()
    numbers = [one.state() for _ in range(3)]
    until(lambda: [m for m in two.heard if isinstance(m, Heard) and m.numbers.get(one.member) == numbers[-1]])
    assert here.supervisor.latest(one.member) == numbers[-1]
    assert told(one)[0].base == 0
    assert told(two)[0].base == 0, "a later member starts with a snapshot, by its watchdog"
    assert len(here.supervisor.hellos()) == 1
    until(here.supervisor.beats, 3.0)


def test_a_restarted_supervisor_is_found_within_half_a_second(here: World) -> None:
    one, two = here.local("one").open(), here.local("two").open()
    for turn in range(2):
        here.supervisor.down()
        until(lambda: not one.link.connected and not two.link.connected)
        number = one.state()
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 1.1)  # noqa: B023 - long enough for several attempts
        here.supervisor.term += 1
        up = time.monotonic()
        here.supervisor.up()
        until(lambda: len(here.supervisor.hellos()) == turn + 2, 3.0)  # noqa: B023
        assert time.monotonic() - up <= 0.6
        hello = here.supervisor.hellos()[-1]
        assert {s.member: s.number for s in hello.statements} == {one.member: number, two.member: 1}
        assert hello.obeyed[0] == turn + 1
        until(lambda: one.link.connected and told(two)[-1].term == turn + 2)  # noqa: B023


def test_a_connection_that_breaks_is_made_again_at_once(here: World) -> None:
    one = here.local("one").open()
    time_connected = time.monotonic()
    until(lambda: time.monotonic() - time_connected > 1.1)
    for connection in list(here.supervisor._connections):
        connection.socket.shutdown(2)
    cut = time.monotonic()
    until(lambda: len(here.supervisor.hellos()) == 2)
    assert time.monotonic() - cut < 0.2
    until(lambda: one.link.connected)


def test_a_supervisor_that_does_not_read_blocks_no_member(here: World) -> None:
    one, two = here.local("one").open(), here.local("two").open()
    here.supervisor.reading.clear()
    slowest, number = 0.0, 0
    reason = {"reason": "x" * 4000}
    for _ in range(3000):
        began = time.monotonic()
        number = one.state(install=reason)
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 0.25, slowest
    assert two.values(one.offer(6))[0] == 6
    here.supervisor.reading.set()
    until(lambda: here.supervisor.latest(one.member) == number, 10.0)
    assert len(here.supervisor.said(Stated)) < 2990, "statements that were overtaken are not sent"
    assert here.log().count("watchdog.listening") == 1


def test_after_a_gap_it_asks_for_everything(here: World) -> None:
    one = here.local("one").open()
    until(lambda: told(one))
    here.supervisor.tell(base=here.supervisor.revision + 7)
    until(lambda: len(here.supervisor.hellos()) == 2)
    until(lambda: told(one)[-1].base == 0 and told(one)[-1].revision == here.supervisor.revision)
    assert all(t.base == 0 or t.base < t.revision for t in told(one)), "what left a gap was not passed on"


def test_a_lower_term_and_a_second_of_the_same_are_not_obeyed(here: World) -> None:
    here.supervisor.term, here.supervisor.instance = 5, "i5"
    one = here.local("one").open()
    until(lambda: told(one))
    for term, instance in ((4, "i4"), (5, "other")):
        here.supervisor.send(Heard(term=term, instance=instance, revision=99, numbers={one.member: 77}))
        here.supervisor.send(Told(term=term, instance=instance, base=0, revision=99, membership_epoch=9))
    here.supervisor.tell()
    until(lambda: told(one)[-1].revision == here.supervisor.revision)
    assert {(m.term, m.instance) for m in one.heard} == {(5, "i5")}
    # One of an older term that takes the port is connected to, and counts for nothing.
    here.supervisor.down()
    here.supervisor.term, here.supervisor.instance = 4, "i4"
    here.supervisor.up()
    hello = until(lambda: len(here.supervisor.hellos()) == 2 and here.supervisor.hellos()[-1])
    assert hello.obeyed == (5, "i5"), "so that it knows, and steps down"
    number = one.state()
    until(lambda: here.supervisor.latest(one.member) == number)
    assert not one.link.connected
    assert {m.term for m in one.heard} == {5}


def test_garbage_from_a_supervisor_is_a_lost_connection(here: World) -> None:
    one = here.local("one").open()
    for garbage in ("{", '{"kind": "told"}', "[]"):
        before = len(here.supervisor.hellos())
        here.supervisor.send(garbage)
        until(lambda: len(here.supervisor.hellos()) > before)  # noqa: B023
    until(lambda: one.link.connected)
    assert here.log().count("watchdog.listening") == 1


def test_a_supervisor_that_refuses_the_token_is_named_at_once(here: World) -> None:
    here.supervisor.token = "another"
    began = time.monotonic()
    with pytest.raises(Unauthorized, match="token"):
        here.local().open(8.0)
    assert time.monotonic() - began < 3.0
    until(lambda: here.running() is None)
