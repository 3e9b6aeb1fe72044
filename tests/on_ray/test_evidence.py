"""What of Ray's words becomes evidence. Pure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_reshard.on_ray.evidence import Drain, LeaveOut, Lift, Seen, Worker, judge, lives
from elastic_reshard.on_ray.views import asked_of, whole_of
from elastic_reshard.protocol.docs import GroupDoc, GroupState, MemberDoc, MemberState

ROOT = Path(__file__).parents[2]


def member(name: str, host: str = "h1", state: MemberState = MemberState.LIVE, asked: float | None = None) -> MemberDoc:
    return MemberDoc(
        id=name, group="g", rank=0, roles=frozenset({"source"}), host=host, state=state, leave_within=asked
    )


HERE = {"m": Worker("n1", "a1", 0)}
DOCS = {"m": member("m")}
FREE: dict[str, float | None] = {"h1": None}


def test_nothing_is_said_of_who_lives() -> None:
    seen = Seen({"n1": True}, {}, {"a1": ("ALIVE", 0)})
    assert judge(seen, HERE, DOCS, FREE, 2.0) == []
    assert judge(Seen(), HERE, DOCS, FREE, 2.0) == [], "what Ray does not know of is no evidence"


@pytest.mark.parametrize("state", ["ALIVE", "PENDING_CREATION", "DEPENDENCIES_UNREADY"])
def test_an_actor_that_is_not_reached_is_not_dead(state: str) -> None:
    """An ActorUnavailableError leaves Ray's table as it was."""
    assert judge(Seen({"n1": True}, {}, {"a1": (state, 0)}), HERE, DOCS, FREE, 2.0) == []


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (Seen({"n1": False}), "node n1 is dead"),
        (Seen({"n1": True}, {}, {"a1": ("DEAD", 0)}), "actor a1 is dead"),
        (Seen({"n1": True}, {}, {"a1": ("RESTARTING", 1)}), "restarted since"),
        (Seen({"n1": True}, {}, {"a1": ("ALIVE", 1)}), "restarted since"),
    ],
)
def test_who_is_gone_is_left_out(seen: Seen, why: str) -> None:
    (notice,) = judge(seen, HERE, DOCS, FREE, 2.0)
    assert isinstance(notice, LeaveOut)
    assert notice.member == "m"
    assert why in notice.why
    assert not lives(HERE["m"], seen)


def test_a_drain_is_forgotten_with_its_node_but_not_before() -> None:
    drained: dict[str, float | None] = {"h1": 30.0, "h2": 30.0, "h3": None, "other": 30.0}
    labels = {"n1": "h1", "n2": "h2", "n3": "h3"}
    seen = Seen({"n1": False, "n2": True, "n3": False})
    assert judge(seen, {}, {}, drained, 2.0, labels) == [Lift("h1")]
    assert judge(seen, {}, {"m": member("m", "h1")}, drained, 2.0, labels) == [], "a member of it may still be there"
    assert judge(seen, {}, {"m": member("m", "h1", MemberState.LOST)}, drained, 2.0, labels) == [Lift("h1")]
    assert judge(Seen(), {}, {}, drained, 2.0, labels) == [], "what Ray does not know of is no evidence"


def test_of_a_restarted_actor_only_the_former_incarnation_is_gone() -> None:
    workers = {"old": Worker("n1", "a1", 0), "new": Worker("n1", "a1", 1)}
    docs = {name: member(name) for name in workers}
    notices = judge(Seen({"n1": True}, {}, {"a1": ("ALIVE", 1)}), workers, docs, FREE, 2.0)
    assert [n.member for n in notices if isinstance(n, LeaveOut)] == ["old"]


@pytest.mark.parametrize("state", [MemberState.ORPHANED, MemberState.LOST, MemberState.FORFEIT, MemberState.REFUSED])
def test_who_is_out_is_not_left_out_again(state: MemberState) -> None:
    assert judge(Seen({"n1": False}), HERE, {"m": member("m", state=state)}, FREE, 2.0) == []
    assert judge(Seen({"n1": False}), HERE, {}, FREE, 2.0) == []


def test_a_notice_for_a_node_drains_its_hosts_once() -> None:
    workers = {**HERE, "other": Worker("n2", "a2", 0)}
    docs = {"m": member("m"), "other": member("other", "h2")}
    seen = Seen({"n1": True, "n2": True}, {"n1": 30.0})
    free: dict[str, float | None] = {"h1": None, "h2": None}
    assert judge(seen, workers, docs, free, 2.0) == [Drain("h1", 28.0)]
    assert judge(seen, workers, docs, {**free, "h1": 28.0}, 2.0) == [], "it is drained already"
    assert judge(Seen({"n1": True}, {"n1": 3.0}), HERE, DOCS, FREE, 2.0) == [Drain("h1", 1.5)], "half of little time"
    assert judge(Seen({"n1": True}, {"n1": None}), HERE, DOCS, FREE, 2.0) == [Drain("h1", 86_400.0)]
    assert judge(Seen({"n1": True}, {"n1": 30.0}), {}, {}, FREE, 2.0) == [], "none of ours is there"


def test_who_is_asked_to_go_for_good_and_who_is_to_be_elsewhere() -> None:
    docs = {"a": member("a", asked=5.0), "b": member("b", "h2", asked=5.0), "old": member("old", asked=5.0)}
    of = {"g": {"a", "b"}}
    assert asked_of(docs, of, frozenset()) == {"g": True}
    assert asked_of(docs, of, frozenset({"h2"})) == {"g": False}, "its host is drained"
    assert asked_of({**docs, "b": member("b", "h2")}, of, frozenset()) == {"g": False}, "only one of them is to go"
    assert asked_of({"old": docs["old"]}, of, frozenset()) == {}, "one of an earlier attempt"


def test_a_group_is_whole_by_members_of_the_present_attempt() -> None:
    doc = GroupDoc(
        name="g", size=2, roles=frozenset({"source"}), members=("a", "b"), whole=True, state=GroupState.STALE
    )
    assert whole_of({"g": doc}, {"g": {"a", "b"}}) == {"g"}
    assert whole_of({"g": doc}, {"g": {"a"}}) == frozenset()
    assert whole_of({"g": doc.model_copy(update={"whole": False})}, {"g": {"a", "b"}}) == frozenset()
    assert whole_of({}, {"g": set()}) == frozenset()


def test_nothing_else_needs_ray() -> None:
    """Every module of the package but those of on_ray can be imported where there is no Ray."""
    program = """
import importlib, pkgutil, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ImportError("there is no ray here")
sys.meta_path.insert(0, Blocked())
import elastic_reshard as er
for name in er.__all__:
    getattr(er, name)
imported = 0
for module in pkgutil.walk_packages(er.__path__, "elastic_reshard."):
    if module.name.startswith("elastic_reshard.on_ray") or module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        if "there is no ray here" in str(error):
            raise
    imported += 1
try:
    import elastic_reshard.on_ray
except ImportError as error:
    assert "there is no ray here" in str(error), error
else:
    raise SystemExit("on_ray was imported without ray")
print(imported)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 100
