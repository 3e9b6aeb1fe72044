"""The workers of one attempt, on a pretended Ray that does what the test says: what is asked of it, and what is made of it."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, RayTaskError, RpcError

from elastic_reshard.errors import RefitTimeout, SupervisorUnreachable
from elastic_reshard.on_ray import cluster, fleet
from elastic_reshard.on_ray.fleet import Crew, Fleet, Gone

NODES = frozenset({"one", "two"})


@dataclass(eq=False)
class Room:
    id: int
    name: str
    shunned: frozenset[str]
    at: frozenset[str] = frozenset()
    removed: bool = False

    @property
    def state(self) -> str:
        return "REMOVED" if self.removed else "CREATED" if self.at else "PENDING"


@dataclass(eq=False)
class Pretended:
    """Ray: nodes that have room, rooms by id, in which of them workers were made, and what is kept. slow: rooms that are given
    back go later. states: of the actor. asked: what the actor was asked for, by which name and in which lane."""

    free: set[str] = field(default_factory=set)
    rooms: dict[int, Room] = field(default_factory=dict)
    made: list[int] = field(default_factory=list)
    slow: bool = False
    ids: Any = field(default_factory=itertools.count)
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    state: str = "ALIVE"
    asked: list[tuple[str, Any]] = field(default_factory=list)

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
        room.removed = not self.slow
        if not self.slow:
            self.rooms.pop(room.id, None)

    def of(self, name: str) -> Room | None:
        return next((room for room in self.rooms.values() if room.name == name), None)

    def unavailable(self, run: Any) -> None:
        raise ActorUnavailableError("the connection broke", None)

    # -- an actor class, and a handle of it

    def options(self, **given: Any) -> Any:
        self.made.append(given["scheduling_strategy"].placement_group.id)
        return SimpleNamespace(remote=lambda *_, **__: Handle(self))

    def run(self) -> None:
        """Of an actor."""


class Handle:
    """Of an actor of that Ray."""

    def __init__(self, of: Pretended) -> None:
        self.run, self.__ray_call__ = self.method("run", of), self.method("call", of)
        self._actor_id = SimpleNamespace(hex=lambda: "actor")

    @staticmethod
    def method(name: str, of: Pretended) -> Any:
        def options(concurrency_group: str = "") -> Any:
            return SimpleNamespace(remote=lambda *_: of.asked.append((name, concurrency_group)) or object())

        made = options()
        made.options = options
        return made


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    made = Pretended()
    monkeypatch.setattr(fleet, "placement_group", made.ask)
    monkeypatch.setattr(fleet, "remove_placement_group", made.remove)
    monkeypatch.setattr(cluster, "room_of", made.of)
    monkeypatch.setattr(cluster, "room_state", lambda room: room.state)
    monkeypatch.setattr(cluster, "room_nodes", lambda room: room.at)
    monkeypatch.setattr(cluster, "told", lambda key: made.kept.get(key, {}))
    monkeypatch.setattr(cluster, "keep", made.kept.__setitem__)
    monkeypatch.setattr(cluster, "lives_of", lambda actors: dict.fromkeys(actors, (made.state, 0)))
    monkeypatch.setattr(fleet.ray, "wait", lambda runs, **_: (runs, []))
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


def test_room_that_was_given_back_without_an_answer_is_asked_for_anew(
    pretended: Pretended, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the same nodes are to be shunned again as when it was asked for."""

    def lost(room: Room) -> None:
        pretended.remove(room)
        raise OSError("the control service has gone away meanwhile")

    assert not places(crew)
    (old,) = pretended.rooms
    with monkeypatch.context() as now:
        now.setattr(fleet, "remove_placement_group", lost)
        with pytest.raises(OSError, match="gone away"):
            places(crew, "one")
    pretended.free = {"one"}
    assert not places(crew)
    assert places(crew)
    assert old not in pretended.rooms


class Work:
    """A worker, as it is inside its actor. fault: what its `run` raises."""

    def __init__(self, fault: BaseException | None = None) -> None:
        self.fault = fault

    def run(self) -> None:
        if self.fault is not None:
            raise self.fault


@pytest.mark.parametrize(
    ("fault", "heard"),
    [
        (None, Gone(0)),
        (ValueError("no such thing"), Gone(0, "ValueError: no such thing")),
        (SupervisorUnreachable("nobody answers"), Gone(0, "SupervisorUnreachable: nobody answers", alone=True)),
        (RefitTimeout("not admitted"), Gone(0, "RefitTimeout: not admitted", late=True)),
    ],
)
def test_the_end_of_who_could_not_be_reached_for_a_moment_is_heard(
    pretended: Pretended, crew: Crew, monkeypatch: pytest.MonkeyPatch, fault: BaseException | None, heard: Gone
) -> None:
    pretended.free = {"one"}
    assert places(crew)
    assert pretended.asked == [("call", "")]
    monkeypatch.setattr(ray, "get", pretended.unavailable)
    assert crew.ended() == [], "that is no end"
    assert not crew.unheard, "it leaves word"
    with contextlib.suppress(ValueError, SupervisorUnreachable, RefitTimeout):
        fleet._work(Work(fault), "keeper/engine/1/0")
    monkeypatch.setattr(fleet, "_PROBE", 0.0)
    crew._probe_at = time.monotonic()
    assert crew.ended() == [heard]


@pytest.mark.parametrize("cause", [ActorUnavailableError("of its own", None), RpcError("no route", rpc_code=14)])
def test_what_run_raises_is_its_end_whatever_it_is(
    pretended: Pretended, crew: Crew, monkeypatch: pytest.MonkeyPatch, cause: Exception
) -> None:
    """Its own calls of other actors may fail by what would mean something else if Ray said it of this one."""
    pretended.free = {"one"}
    assert places(crew)
    raised = RayTaskError("run", "a traceback", cause).as_instanceof_cause()
    assert isinstance(raised, type(cause))

    def get(run: Any) -> None:
        raise raised

    monkeypatch.setattr(ray, "get", get)
    (gone,) = crew.ended()
    assert type(cause).__name__ in gone.fault


def test_the_error_of_a_run_outlives_that_no_word_could_be_left(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(key: str, value: Any) -> None:
        raise RpcError("the control service is away", rpc_code=14)

    monkeypatch.setattr(cluster, "keep", away)
    monkeypatch.setattr(fleet, "_SAY", 0.0)
    fleet._work(Work(), "keeper/engine/1/0")
    with pytest.raises(ValueError, match="no such thing"):
        fleet._work(Work(ValueError("no such thing")), "keeper/engine/1/0")


class Dreamer:
    """A worker whose `run` is async."""

    async def run(self) -> None:
        """Is not called here."""


def test_an_async_run_leaves_no_word(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "remote", lambda kind: pretended)
    crew = Crew(Fleet("engine", Dreamer), "engine", 1, "keeper")
    pretended.free = {"one"}
    assert places(crew)
    assert pretended.asked == [("run", "")]
    assert not crew.unheard
    monkeypatch.setattr(ray, "get", pretended.unavailable)
    assert crew.ended() == []
    assert crew.unheard
    pretended.state = "DEAD"
    crew._probe_at = time.monotonic()
    assert crew.ended() == [Gone(0, "its actor is dead")]
    assert not crew.unheard


def test_run_stays_in_its_lane(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the threads of the others are there for the program's own calls."""

    class Laned:
        @ray.method(concurrency_group="long")
        def run(self) -> None:
            """Is not called here."""

    monkeypatch.setattr(ray, "remote", lambda kind: pretended)
    pretended.free = {"one"}
    assert places(Crew(Fleet("engine", Laned), "engine", 1, "keeper"))
    assert pretended.asked == [("call", "long")]
