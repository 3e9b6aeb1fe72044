"""Arenas of a host: given to everybody, read-only, kept for as long as somebody may need them."""

from __future__ import annotations

import fcntl
import os
import time

import pytest

from elastic_reshard.errors import NotAMember, RefitTimeout
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.docs import MemberState, PublicationDoc, PublicationState, SourceDoc
from tests.watchdog.world import World, memory, open_files, table_of, until


def publication(member: str, arena: str, state: PublicationState) -> PublicationDoc:
    source = SourceDoc(member=member, rank=0, host="a", arena=arena, slot=0, generation=2)
    return PublicationDoc(
        id="p1.1",
        weight_version=1,
        label=None,
        extras={},
        group="g",
        seq=1,
        layout="ab",
        state=state,
        sources=(source,),
    )


def test_arenas_reach_everybody_and_those_who_come_later(here: World) -> None:
    owner, early = here.local("owner").open(), here.local("early").open()
    far = here.agent().attached()
    arena = owner.offer(100)
    theirs = far.ask("offer", start=5000)
    late = here.local("late").open()
    for reader in (owner, early, late):
        assert reader.values(arena)[0] == 100
        assert reader.values(theirs)[0] == 5000
        kept = reader.link._shelf.arenas[theirs].fd
        assert fcntl.fcntl(kept, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert far.ask("values", arena=arena) == 512


def test_many_arenas_of_large_tables(here: World) -> None:
    owner, reader = here.local("owner").open(), here.local("reader").open()
    made = {}
    for i in range(40):
        arena, fd = memory(i, 8)
        made[arena] = table_of(i, 8) + b" " * 300_000
        owner.link.offer(arena, fd, made[arena])
        os.close(fd)
    for arena, table in made.items():
        held = reader.link.arena(arena, time.monotonic() + 5)
        os.close(held.fd)
        assert held.table == table
    late = here.local("late").open()
    for arena in made:
        late.values(arena)


def test_an_arena_that_nobody_offers_is_waited_for_until_the_deadline(here: World) -> None:
    local = here.local().open()
    began = time.monotonic()
    with pytest.raises(RefitTimeout, match="0" * 32):
        local.link.arena("0" * 32, began + 0.2)
    assert 0.2 <= time.monotonic() - began < 0.5
    local.link.close()
    with pytest.raises(NotAMember):
        local.link.arena("0" * 32, time.monotonic() + 5)


def test_the_owner_withdraws_and_everybody_lets_go(here: World) -> None:
    owner, reader = here.local("owner").open(), here.local("reader").open()
    arena = owner.offer(1)
    reader.values(arena)
    owner.link.withdraw(arena)
    until(lambda: arena not in reader.link._shelf.arenas)
    with pytest.raises(RefitTimeout):
        reader.link.arena(arena, time.monotonic() + 0.1)
    pid = here.watchdog().pid
    until(lambda: not any("memfd" in target for target in open_files(pid)))


def test_a_killed_owners_arena_serves_until_the_view_says_that_nobody_needs_it(here: World) -> None:
    reader = here.local("reader").open()
    owner = here.agent("owner").attached()
    arena = owner.ask("offer", start=40)
    reader.values(arena)
    member = owner.member
    here.supervisor.tell(publications={"p1.1": publication(member, arena, PublicationState.MOVING)})
    owner.kill()
    ended = until(lambda: here.supervisor.ended(member))
    assert [e.arenas_kept for e in ended] == [True]
    here.supervisor.state_of(member, MemberState.ORPHANED)
    here.supervisor.tell(publications={"p1.1": publication(member, arena, PublicationState.COMMITTED)})
    here.supervisor.state_of(member, MemberState.LOST)
    number = reader.state()
    until(lambda: here.supervisor.latest(reader.member) == number)
    assert reader.values(arena)[0] == 40, "committed: still needed, whatever became of its owner"
    assert here.local("late").open().values(arena)[0] == 40
    assert len(here.supervisor.ended(member)) == 1, "told once"
    here.supervisor.tell(publications={"p1.1": publication(member, arena, PublicationState.RELEASED)})
    until(lambda: arena not in reader.link._shelf.arenas)
    assert [
        e.arenas_kept for e in until(lambda: len(here.supervisor.ended(member)) == 2 and here.supervisor.ended(member))
    ] == [
        True,
        False,
    ]
    until(lambda: member not in here.watchdog().members, why="nothing is left of it")


def test_an_owner_without_arenas_is_gone_with_everything(here: World) -> None:
    keeper = here.local("keeper").open()
    agent = here.agent().attached()
    agent.kill()
    ended = until(lambda: here.supervisor.ended(agent.member))
    assert [e.arenas_kept for e in ended] == [False]
    assert keeper.link.connected


def test_what_was_said_just_before_death_is_heard_before_the_end(here: World) -> None:
    keeper = here.local("keeper").open()
    for turn in range(3):
        agent = here.agent(f"brief{turn}").attached()
        arena = agent.ask("offer", start=turn)
        number = agent.ask("state")
        agent.kill()
        until(lambda: here.supervisor.ended(agent.member))  # noqa: B023 - asked at once
        with here.supervisor.lock:
            ups = [m for _, m in here.supervisor.ups]
        order = [
            m.kind
            for m in ups
            if getattr(m, "member", getattr(getattr(m, "statement", None), "member", "")) == agent.member
        ]
        assert order[-1] == "ended"
        assert here.supervisor.latest(agent.member) == number
        assert keeper.values(arena)[0] == turn


def test_without_a_supervisor_nothing_is_dropped(here: World) -> None:
    here.deadlines = Deadlines(orphan_hold=0.3)
    reader = here.local("reader").open()
    owner = here.agent("owner").attached()
    arena = owner.ask("offer", start=3)
    reader.values(arena)
    here.supervisor.down()
    until(lambda: not reader.link.connected)
    owner.kill()
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 0.8)
    assert reader.values(arena)[0] == 3
    here.supervisor.members[owner.member] = here.supervisor.members[owner.member].model_copy(
        update={"state": MemberState.LOST}
    )
    here.supervisor.up()
    until(lambda: arena not in reader.link._shelf.arenas)
