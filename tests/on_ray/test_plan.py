"""What is decided about groups of workers: the plan alone, on a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_reshard.errors import ProtocolError
from elastic_reshard.on_ray import plan
from elastic_reshard.on_ray.events import (
    Action,
    Ask,
    End,
    Ended,
    Event,
    Limits,
    Missed,
    NodesGone,
    Phase,
    Placed,
    Resize,
    Run,
    Seen,
    Size,
    Start,
    Tick,
    Viewed,
)

LIMITS = Limits(failures=3, window=100.0, pause=1.0, longest=8.0, start_within=20.0, leave_within=5.0)


class World:
    """A state, a clock, and what was to be done lately."""

    def __init__(self, limits: Limits = LIMITS, **sizes: Size) -> None:
        self.now, self.limits = 1000.0, limits
        self.state = plan.begin(sizes, self.now)
        self.did: list[Action] = []

    def tell(self, event: Event, after: float = 0.0) -> list[Action]:
        self.now += after
        self.state, self.did = plan.step(self.state, event, self.now, self.limits)
        return self.did

    def run(self, name: str) -> Run:
        return self.state.runs[name]

    def whole(self, name: str) -> None:
        """It is started, has room, and is whole."""
        self.tell(Tick())
        self.tell(Placed(name, self.run(name).attempt))
        self.tell(Viewed(frozenset({name})))
        assert self.run(name).phase is Phase.RUNNING

    def dies(self, name: str, rank: int = 0, **how: Any) -> list[Action]:
        return self.tell(
            Ended(name, self.run(name).attempt, rank, **{"fault": "it died", "nodes": frozenset({"n"}), **how})
        )

    def sees(self, asked: Mapping[str, bool] | None = None, after: float = 0.0, **more: Any) -> list[Action]:
        return self.tell(Viewed(frozenset(), asked or {}, **more), after)


def test_a_group_is_started_gets_room_and_runs() -> None:
    world = World(trainer=Size(2, 1))
    assert world.tell(Tick()) == [Start("trainer", 1)]
    assert world.tell(Tick(), 1000.0) == [], "waiting for room is no fault, however long"
    assert world.run("trainer").phase is Phase.WAITING
    world.tell(Placed("trainer", 1))
    assert world.run("trainer").phase is Phase.STARTING
    world.tell(Viewed(frozenset({"trainer"})))
    assert world.run("trainer").phase is Phase.RUNNING
    assert world.tell(Tick(), 1e6) == []


def test_one_worker_dies_and_the_whole_group_starts_again_after_a_pause() -> None:
    world = World(trainer=Size(2, 1))
    world.whole("trainer")
    assert world.dies("trainer", 1) == [End("trainer", 1)]
    assert "rank 1: it died" in world.run("trainer").reason
    assert world.tell(Tick(), 0.9) == []
    assert world.tell(Tick(), 0.2) == [Start("trainer", 2)]
    assert world.tell(Ended("trainer", 1, 0, "killed")) == [], "an end of an earlier attempt means nothing"
    assert world.run("trainer").phase is Phase.WAITING


def test_pauses_grow_and_what_dies_again_and_again_is_given_up() -> None:
    world = World(Limits(failures=6, pause=1.0, longest=8.0), trainer=Size(1, 1))
    pauses = []
    for attempt in range(1, 7):
        assert world.tell(Tick()) == [Start("trainer", attempt)]
        world.tell(Placed("trainer", attempt))
        world.dies("trainer")
        pauses.append(world.run("trainer").until - world.now)
        world.now = world.run("trainer").until
    assert pauses[:5] == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert world.run("trainer").phase is Phase.GIVEN_UP
    assert "died 6 times within 600 s" in world.run("trainer").reason
    assert world.tell(Tick(), 1e6) == [], "it stays given up"


def test_deaths_of_long_ago_do_not_count() -> None:
    world = World(trainer=Size(1, 1))
    for _ in range(10):
        world.whole("trainer")
        world.now += LIMITS.window / 2 + 1
        world.dies("trainer")
        world.now = world.run("trainer").until
    assert world.run("trainer").phase is not Phase.GIVEN_UP


def test_that_no_supervisor_answers_is_nobodys_fault() -> None:
    world = World(trainer=Size(1, 1))
    for attempt in range(1, 11):
        world.whole("trainer")
        assert world.tell(Ended("trainer", attempt, 0, "nobody answered", alone=True)) == [End("trainer", attempt)]
        assert world.run("trainer").until == world.now + LIMITS.pause
        assert world.tell(Tick(), LIMITS.pause) == [Start("trainer", attempt + 1)]
    assert world.run("trainer").failures == ()
    world.tell(Placed("trainer", 11))
    world.dies("trainer")
    assert len(world.run("trainer").failures) == 1, "what comes then is a fault as before"


def test_deaths_of_nodes_are_nobodys_fault() -> None:
    world = World(trainer=Size(1, 1))
    for attempt in range(10):
        world.whole("trainer")
        world.dies("trainer", nodes={f"n{attempt}"})
        world.tell(NodesGone(frozenset(f"n{i}" for i in range(attempt + 1))))
        world.now = world.run("trainer").until
    assert world.run("trainer").phase is not Phase.GIVEN_UP
    assert world.run("trainer").failures == ()


def test_a_node_known_to_be_dead_is_blamed_at_once_and_one_known_later_is_then() -> None:
    world = World(Limits(failures=1, pause=1.0), trainer=Size(2, 1))
    world.whole("trainer")
    world.tell(NodesGone(frozenset({"n"})))
    assert world.dies("trainer", fault="its node n is dead") == [End("trainer", 1)]
    assert world.run("trainer").failures == ()
    assert world.tell(Tick(), 1.0) == [Start("trainer", 2)]
    world.tell(Placed("trainer", 2))
    assert world.dies("trainer", nodes={"m"}) == [End("trainer", 2)]
    assert world.run("trainer").phase is Phase.GIVEN_UP
    world.tell(NodesGone(frozenset({"n", "o"})))
    assert world.run("trainer").phase is Phase.GIVEN_UP, "another one"
    world.tell(NodesGone(frozenset({"n", "m"})))
    assert world.run("trainer").phase is Phase.PAUSED
    assert world.tell(Tick(), 1.0) == [Start("trainer", 3)]
    assert world.dies("trainer", fault="", nodes={"n"}) == []


def test_a_rank_that_fails_for_want_of_one_on_a_dead_node_is_not_at_fault() -> None:
    """Its connection breaks within milliseconds; Ray knows of the node's death a quarter of a minute later."""
    world = World(trainer=Size(2, 1))
    gone: set[str] = set()
    for attempt in range(5):
        world.whole("trainer")
        world.dies("trainer", 0, fault="Connection closed by peer", nodes={"home", f"spot-{attempt}"})
        gone.add(f"spot-{attempt}")
        world.tell(NodesGone(frozenset(gone)), 15.0)
        world.now = max(world.now, world.run("trainer").until)
    assert world.run("trainer").phase is not Phase.GIVEN_UP
    assert world.run("trainer").failures == ()
    world.whole("trainer")
    assert world.dies("trainer", 0, nodes={"home", "spot-0"}) == [End("trainer", 6)]
    assert world.run("trainer").failures == (), "known before"


def test_a_node_that_dies_long_after_a_fault_explains_nothing() -> None:
    world = World(Limits(failures=1), trainer=Size(2, 1))
    world.whole("trainer")
    world.dies("trainer", nodes={"home", "spot"})
    assert world.run("trainer").phase is Phase.GIVEN_UP
    world.tell(NodesGone(frozenset({"spot"})), 181.0)
    assert world.run("trainer").phase is Phase.GIVEN_UP


def test_who_is_not_whole_in_time_has_failed() -> None:
    world = World(trainer=Size(2, 1))
    world.tell(Tick())
    world.tell(Placed("trainer", 1))
    assert world.tell(Tick(), LIMITS.start_within - 0.1) == []
    assert world.tell(Tick(), 0.2) == [End("trainer", 1)]
    assert "not whole within 20 s" in world.run("trainer").reason


def test_a_group_whose_workers_have_all_returned_is_done() -> None:
    world = World(trainer=Size(2, 1))
    world.whole("trainer")
    assert world.dies("trainer", 0, fault="") == []
    assert world.run("trainer").phase is Phase.RUNNING
    assert world.dies("trainer", 1, fault="") == [End("trainer", 1)]
    assert world.run("trainer").phase is Phase.DONE
    assert world.tell(Tick(), 1e6) == []


def test_a_shrink_ends_a_group_for_good() -> None:
    world = World(engine=Size(2, 2, grows=True))
    world.whole("engine-0")
    world.whole("engine-1")
    assert world.sees({"engine-1": True}) == []
    assert world.run("engine-1").phase is Phase.LEAVING
    assert world.dies("engine-1", 0, fault="") == []
    assert world.dies("engine-1", 1) == [End("engine-1", 1)], "how it ends does not matter any more"
    assert world.run("engine-1").phase is Phase.DONE
    assert world.tell(Tick(), 1e6) == []
    assert world.run("engine-0").phase is Phase.RUNNING


def test_a_drained_host_moves_the_whole_group_without_blame() -> None:
    world = World(engine=Size(2, 1))
    world.whole("engine")
    assert world.sees({"engine": False}) == [Ask("engine")], "the ranks on other hosts are asked too"
    assert world.dies("engine", 0, fault="") == [End("engine", 1), Start("engine", 2)]
    assert world.run("engine").failures == ()


def test_a_worker_that_left_its_drained_node_before_anybody_looked_is_moved_too() -> None:
    world = World(engine=Size(1, 1))
    world.whole("engine")
    assert world.dies("engine", fault="", drained=True) == [End("engine", 1), Start("engine", 2)]
    world.whole("engine")
    assert world.dies("engine", drained=True) == [End("engine", 2), Start("engine", 3)], "killed by its node's end"
    assert world.run("engine").failures == ()


def test_a_grow_makes_more_groups_once() -> None:
    world = World(trainer=Size(2, 1), engine=Size(2, 1, grows=True))
    world.tell(Tick())
    assert world.sees(grow=("more", 2, 0)) == [Start("engine-1", 1), Start("engine-2", 1)]
    assert world.sees(grow=("more", 2, 0)) == [], "the same request"
    assert world.sees(grow=("again", 0, 3)) == [Start("engine-3", 1), Start("engine-4", 1)], "three members: two groups"
    world.sees({})
    assert set(world.state.runs) == {"trainer", *(f"engine-{i}" for i in range(5))}


def test_a_group_that_a_grow_holds_is_not_late() -> None:
    """engine-0 has room at once, engine-1 waits for a node: the first one's `join` is over again and again meanwhile."""
    world = World(engine=Size(1, 0, grows=True))
    grow = ("more", 2, 0)
    assert world.sees(grow=grow) == [Start("engine-0", 1), Start("engine-1", 1)]
    for attempt in range(1, 11):
        world.tell(Placed("engine-0", attempt))
        for _ in range(12):
            assert world.sees(after=10.0, grow=grow, held=frozenset({"engine-0"})) == []
        assert world.dies("engine-0", fault="RefitTimeout: not admitted", late=True) == [End("engine-0", attempt)]
        assert world.tell(Tick(), LIMITS.pause) == [Start("engine-0", attempt + 1)]
    assert world.run("engine-0").failures == ()
    world.tell(Placed("engine-0", 11))
    world.sees(after=LIMITS.start_within - 1, grow=grow, held=frozenset({"engine-0"}))
    assert "others of a grow" in world.run("engine-0").reason
    world.tell(Viewed(frozenset({"engine-0", "engine-1"})), 1.0)
    assert (world.run("engine-0").phase, world.run("engine-0").reason) == (Phase.RUNNING, "")
    world.dies("engine-0", fault="RefitTimeout: no version", late=True)
    assert len(world.run("engine-0").failures) == 1, "nothing held it then"


def test_what_comes_too_late_without_a_grow_is_a_fault_and_so_is_another_with_one() -> None:
    world = World(engine=Size(1, 2))
    for name in ("engine-0", "engine-1"):
        world.tell(Tick())
        world.tell(Placed(name, 1))
    world.sees(held=frozenset({"engine-1"}))
    for name, late in (("engine-0", True), ("engine-1", False)):
        world.dies(name, late=late)
        assert len(world.run(name).failures) == 1
    world.tell(Tick(), LIMITS.pause)
    world.tell(Placed("engine-1", 2))
    world.dies("engine-1", late=True)
    assert len(world.run("engine-1").failures) == 2, "what an earlier attempt was held by does not count"


def test_who_is_held_no_longer_has_the_time_that_was_left() -> None:
    world = World(engine=Size(1, 1))
    world.tell(Tick())
    world.tell(Placed("engine", 1))
    world.sees(after=5.0)
    world.sees(after=100.0, held=frozenset({"engine"}))
    assert world.tell(Tick(), LIMITS.start_within - 5.1) == []
    assert world.tell(Tick(), 0.2) == [End("engine", 1)]


def test_a_group_that_runs_on_outside_the_job_is_started_again() -> None:
    world = World(engine=Size(1, 2))
    for name in ("engine-0", "engine-1"):
        world.whole(name)
    broken = frozenset({"engine-1"})
    for _ in range(19):
        assert world.sees(after=1.0, broken=broken) == []
    assert world.sees(after=1.0) == [], "it has mended itself"
    for _ in range(19):
        assert world.sees(after=1.0, broken=broken) == []
    assert world.sees(after=1.0, broken=broken) == [End("engine-1", 1)]
    assert "not whole for 20 s" in world.run("engine-1").reason
    assert len(world.run("engine-1").failures) == 1
    assert world.tell(Tick(), LIMITS.pause) == [Start("engine-1", 2)]
    world.whole("engine-1")
    assert world.sees(after=1.0, broken=broken) == [], "another one"
    assert world.run("engine-0").phase is Phase.RUNNING


def test_what_nobody_could_see_breaks_no_group_and_what_winds_up_is_let() -> None:
    world = World(engine=Size(2, 1))
    world.whole("engine")
    broken = frozenset({"engine"})
    world.sees(after=1.0, broken=broken)
    assert world.sees(after=1000.0, broken=broken) == [], "the supervisor was away"
    assert world.sees(after=3.0, broken=broken) == []
    world.dies("engine", 1, fault="")
    for _ in range(100):
        assert world.sees(after=1.0, broken=broken) == []
    world.dies("engine", 0, fault="")
    assert world.run("engine").phase is Phase.DONE


def test_resize_down_asks_the_youngest_until_they_are_asked() -> None:
    world = World(engine=Size(1, 3, grows=True))
    world.whole("engine-0")
    world.whole("engine-1")
    assert world.tell(Resize("engine", 1)) == [End("engine-2", 1), Ask("engine-1")]
    assert world.run("engine-2").phase is Phase.DONE, "it did not run yet"
    assert world.sees() == [Ask("engine-1")], "the supervisor was away"
    assert world.tell(Resize("engine", 1)) == [], "who goes is not counted"
    world.sees({"engine-1": True})
    assert world.sees() == []
    world.dies("engine-1", fault="")
    assert world.run("engine-1").phase is Phase.DONE
    assert world.tell(Resize("engine", 2)) == [Start("engine-3", 1)], "no name is given twice"


def test_one_that_dies_while_it_is_to_go_is_not_started_again() -> None:
    world = World(engine=Size(1, 2))
    world.whole("engine-0")
    world.whole("engine-1")
    world.tell(Resize("engine", 1))
    world.dies("engine-1")
    assert world.run("engine-1").phase is Phase.DONE


def test_a_group_that_does_not_go_when_asked_is_ended() -> None:
    world = World(engine=Size(1, 1))
    world.whole("engine")
    world.sees({"engine": True})
    assert world.tell(Tick(), LIMITS.leave_within) == []
    assert world.tell(Tick(), LIMITS.start_within) == [End("engine", 1)]
    assert world.run("engine").phase is Phase.DONE


def test_while_ray_is_out_of_sight_nothing_is_decided_and_looks_grow_rare() -> None:
    world = World(trainer=Size(2, 1), engine=Size(1, 1))
    world.whole("engine")
    world.tell(Placed("trainer", 1))
    pauses = []
    for _ in range(8):
        assert world.tell(Missed("it is away"), 10.0) == [], "trainer's time is over, but nobody could have seen it"
        pauses.append(round(world.state.sight.until - world.now, 3))
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert world.tell(Seen()) == []
    assert world.tell(Tick(), LIMITS.start_within - 0.1) == [], "it gets back what was lost to it"
    assert world.tell(Tick(), 0.2) == [End("trainer", 1)]
    assert world.run("engine").phase is Phase.RUNNING


def test_a_look_that_takes_long_is_not_counted_against_those_who_come_or_go() -> None:
    world = World(trainer=Size(2, 1), engine=Size(1, 1))
    world.whole("engine")
    world.sees({"engine": True})
    world.tell(Placed("trainer", 1))
    world.now += 1000.0
    assert world.tell(Seen()) == []
    assert world.tell(Tick()) == []
    assert world.run("trainer").phase is Phase.STARTING
    assert world.run("engine").phase is Phase.LEAVING
    assert world.tell(Tick(), LIMITS.start_within) == [End("trainer", 1)]
    assert world.tell(Tick(), LIMITS.leave_within) == [Start("trainer", 2), End("engine", 1)]


def test_who_sees_nothing_for_too_long_gives_up() -> None:
    world = World(Limits(blind=30.0), trainer=Size(1, 1))
    world.whole("trainer")

    def lost() -> str:
        return plan.lost(world.state, world.now, world.limits)

    world.tell(Missed("no route"), 29.9)
    assert lost() == ""
    world.tell(Seen(), 0.05)
    assert lost() == "", "it answers"
    world.tell(Missed("no room to be had"), 0.1)
    assert "out of sight for 30 s: no room to be had" in lost(), "but not to all that it was asked"
    world.tell(Tick())
    assert lost() == ""
    world.now += 29.9
    assert lost() == ""
    world.now += 0.2
    assert "its control service does not answer" in lost(), "not even with an error"
    world.tell(Seen())
    assert lost() == ""


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"a": Size(0, 1)}, "ranks must be positive"),
        ({"a": Size(1, -1)}, "groups must not be negative"),
        ({"a": Size(1, 1, True), "b": Size(1, 1, True)}, "only one of them"),
    ],
)
def test_sizes_that_cannot_work(sizes: dict[str, Size], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        plan.begin(sizes, 0.0)


def test_limits_that_cannot_work() -> None:
    with pytest.raises(ProtocolError, match=r"failures must be positive.*longest"):
        Limits(failures=0, pause=2.0, longest=1.0)


_group = st.sampled_from(["trainer", "engine-0", "engine-1"])
_event = st.one_of(
    st.just(Tick()),
    st.just(Seen()),
    st.just(Missed("away")),
    st.builds(Placed, _group, st.integers(1, 3)),
    st.builds(Ended, _group, st.integers(1, 3), st.integers(0, 1), st.sampled_from(["", "died"]), st.just({"n"}),
              st.booleans()),
    st.builds(Viewed, st.frozensets(_group), st.dictionaries(_group, st.booleans(), max_size=2),
              st.sampled_from([None, ("g", 1, 0)]), st.frozensets(_group), st.frozensets(_group)),
    st.builds(Resize, st.just("engine"), st.integers(0, 3)),
    st.just(NodesGone(frozenset({"n"}))),
)  # fmt: skip


@given(st.lists(st.tuples(_event, st.floats(0.0, 50.0)), max_size=40))
def test_each_start_is_ended_before_the_next_and_numbers_only_rise(events: list[tuple[Event, float]]) -> None:
    world = World(trainer=Size(2, 1), engine=Size(2, 2, grows=True))
    under_way: dict[str, int] = {}
    for event, after in events:
        for action in world.tell(event, after):
            if isinstance(action, Start):
                assert action.group not in under_way, "two attempts at once"
                assert action.attempt == world.run(action.group).attempt
                under_way[action.group] = action.attempt
            elif isinstance(action, End):
                under_way.pop(action.group, None)
        for name, run in world.state.runs.items():
            working = run.phase in (Phase.WAITING, Phase.STARTING, Phase.RUNNING, Phase.LEAVING)
            assert working == (name in under_way), f"{name} is {run.phase}"
            assert len(run.failures) <= LIMITS.failures
