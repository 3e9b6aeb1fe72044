"""The workers of one attempt, on a pretended Ray that does what the test says: what is asked of it, and what is made of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from elastic_reshard.on_ray import cluster, fleet
from elastic_reshard.on_ray.fleet import Crew, Fleet

NODES = frozenset({"one", "two"})


@dataclass(eq=False)
class Room:
    id: int
    name: str
    shunned: frozenset[str]
    at: frozenset[str] = frozenset()


@dataclass(eq=False)
class Pretended:
    """Ray: nodes that have room, rooms by id, and workers that were made. slow: rooms that are given back go later."""

    free: set[str] = field(default_factory=set)
    rooms: dict[int, Room] = field(default_factory=dict)
    made: list[int] = field(default_factory=list)
    slow: bool = False
    ids: Any = field(default_factory=itertools.count)

    def ask(self, bundles: Any, *, name: str, bundle_label_selector: Any, **_: Any) -> Room:
        assert name not in {room.name for room in self.rooms.values()}, "Ray gives no name twice"
        said = bundle_label_selector[0]["ray.io/node-id"] if bundle_label_selector else "!in()"
        room = Room(next(self.ids), name, frozenset(said.removeprefix("!in(").removesuffix(")").split(",")) - {""})
        self.rooms[room.id] = room
        self.give()
        return room

    def give(self) -> None:
        """Room that is free is given to who waits for it."""
        for room in self.rooms.values():
            for node in sorted(self.free - room.shunned) if not room.at else ():
                self.free.discard(node)
                room.at = frozenset({node})
                break

    def remove(self, room: Room) -> None:
        self.free |= room.at
        if not self.slow:
            self.rooms.pop(room.id, None)

    def of(self, name: str) -> Room | None:
        return next((room for room in self.rooms.values() if room.name == name), None)

    # -- an actor class, and a handle of it

    def options(self, **given: Any) -> Pretended:
        self.made.append(given["scheduling_strategy"].placement_group.id)
        return self

    def remote(self, *_: Any, **__: Any) -> Any:
        return self

    @property
    def run(self) -> Any:
        return self


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    made = Pretended()
    monkeypatch.setattr(fleet, "placement_group", made.ask)
    monkeypatch.setattr(fleet, "remove_placement_group", made.remove)
    monkeypatch.setattr(cluster, "room_of", made.of)
    monkeypatch.setattr(cluster, "room_ready", lambda room: bool(room.at))
    monkeypatch.setattr(cluster, "room_nodes", lambda room: room.at)
    return made


@pytest.fixture
def crew(pretended: Pretended) -> Crew:
    return Crew(Fleet("engine", pretended), "engine", 1, "keeper")


def places(crew: Crew, *shunned: str) -> bool:
    return crew.place(lambda: shunned)


def test_who_waits_for_room_takes_a_node_that_may_be_used_again(pretended: Pretended, crew: Crew) -> None:
    assert not places(crew, "one")
    pretended.free = {"one"}
    pretended.give()
    assert not places(crew, "one"), "there is none elsewhere"
    assert len(pretended.rooms) == 1
    assert not places(crew), "it has been emptied, and is given back to use"
    assert places(crew)
    assert len(pretended.rooms) == len(pretended.made) == 1
    assert not places(crew, "one"), "what is made stays"


def test_who_waits_for_room_does_not_take_what_is_being_emptied(pretended: Pretended, crew: Crew) -> None:
    assert not places(crew)
    pretended.free = {"one"}  # by the drain itself: who was there has left
    pretended.give()
    assert not places(crew, "one")
    assert not places(crew, "one")
    assert pretended.made == []
    pretended.free |= {"two"}
    pretended.give()
    assert places(crew, "one")
    assert [room.at for room in pretended.rooms.values()] == [{"two"}]
    assert "one" in pretended.free


def test_room_that_is_elsewhere_is_taken_whatever_is_shunned_by_now(pretended: Pretended, crew: Crew) -> None:
    pretended.free = {"two"}
    assert places(crew, "one")
    assert len(pretended.made) == 1


def test_room_is_asked_for_anew_when_what_was_given_back_is_gone(pretended: Pretended, crew: Crew) -> None:
    pretended.slow = True
    assert not places(crew, "one")
    (old,) = pretended.rooms
    for _ in range(3):
        assert not places(crew)
    assert set(pretended.rooms) == {old}
    del pretended.rooms[old]
    pretended.free = {"one"}
    assert places(crew)
    assert old not in pretended.rooms


def test_an_answer_that_was_lost_is_no_second_room(pretended: Pretended, crew: Crew, monkeypatch: Any) -> None:
    def lost(*given: Any, **named: Any) -> None:
        pretended.ask(*given, **named)
        raise OSError("the control service has gone away meanwhile")

    with monkeypatch.context() as now:
        now.setattr(fleet, "placement_group", lost)
        with pytest.raises(OSError, match="gone away"):
            places(crew, "one")
    assert not places(crew), "it was asked for with another node to be shunned"
    pretended.free = set(NODES)
    assert places(crew)
    assert len(pretended.rooms) == 1
