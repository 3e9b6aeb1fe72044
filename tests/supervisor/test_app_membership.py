"""Who is in the job, changed over HTTP: leave, drain, shrink, grow; and what is shown of hosts and transfers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.messages import Ended, Landing, MoverSaid
from elastic_reshard.supervisor.server import Supervisor
from tests.supervisor.real import Start, call, heard, pair, problem, put_fragment
from tests.supervisor.talk import QUICK, Host, key, name, statement, until


def happened(supervisor: Supervisor, event: str) -> list[dict[str, Any]]:
    page = call(supervisor, "GET", "/v1/events?limit=1000").json()["events"]
    return [e["fields"] for e in page if e["event"] == event]


def post(supervisor: Supervisor, path: str, **body: Any) -> httpx.Response:
    return call(supervisor, "POST", path, json=body)


class Later:
    """A call in a thread of its own."""

    def __init__(self, ask: Callable[[], httpx.Response]) -> None:
        self.answers: list[httpx.Response] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(ask()))
        self._thread.start()

    @property
    def pending(self) -> bool:
        return self._thread.is_alive()

    def __call__(self) -> httpx.Response:
        self._thread.join(15)
        return self.answers[0]


def engine(number: int, group: str = "engine", *, host: str = "b", size: int = 1, rank: int = 0, **more: Any) -> Any:
    """A destination rank's statement."""
    wanted: dict[str, Any] = {"roles": {"destination"}, "source": None, "destination": key(), "host": host}
    return statement(rank, number, group=group, size=size, **(wanted | more))


def engines(supervisor: Supervisor, *groups: str) -> Host:
    """Host b with groups of one that are admitted."""
    put_fragment(supervisor)
    host = Host(supervisor, "b")
    host.admitted([engine(1, group) for group in groups])
    return host


# -- drain


def test_a_host_is_drained_and_only_it(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host, engines(supervisor, "engine") as other:
        asked = post(supervisor, "/v1/hosts/a/drain", within=60)
        assert asked.status_code == 202
        found = asked.json()
        assert (found["done"], found["missing"]) == (False, [name(0), name(1)])
        assert {m["leave_within"] for m in found["members"].values()} == {60}
        other.listen(lambda: other.view.members[name(1)].leave_within == 60)
        assert other.view.members[name(0, group="engine")].leave_within is None
        waiting = Later(lambda: post(supervisor, "/v1/hosts/a/drain?wait=9", within=61))
        other.listen(lambda: other.view.members[name(1)].leave_within == 61)
        host.state(statement(0, 2, leaving=True))
        other.listen(lambda: other.view.members[name(0)].state == "lost")
        assert waiting.pending, "one is still in"
        host.state(statement(1, 2, leaving=True))
        done = waiting()
        assert (done.status_code, done.json()["done"], done.json()["missing"]) == (200, True, [])
        assert {m["state"] for m in done.json()["members"].values()} == {"lost"}
        other.listen(lambda: "trainer" not in other.view.groups)
        assert other.view.groups["engine"].whole


def test_a_repeated_drain_puts_no_deadline_off(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host, host.beating():
        for _ in range(3):
            assert post(supervisor, "/v1/hosts/a/drain", within=60).status_code == 202
        assert len(happened(supervisor, "member.leave_asked")) == 2
        began = time.monotonic()
        for wait in (0.2, 9):
            answer = post(supervisor, f"/v1/hosts/a/drain?wait={wait}", within=1.0)
        assert answer.status_code == 200
        assert 0.8 < time.monotonic() - began < 5, "the second call has put it off, or did not wait"
        assert [e["within"] for e in happened(supervisor, "member.leave_asked")] == [60, 60, 1.0, 1.0]


def test_a_host_that_was_drained_and_is_gone_is_done(start: Start) -> None:
    supervisor = start(deadlines=QUICK)
    with engines(supervisor, "engine") as other, other.beating():
        with pair(supervisor) as host:
            assert post(supervisor, "/v1/hosts/a/drain?wait=9", within=0).json()["done"]
            host.say(Ended(member=name(0)))
            host.say(Ended(member=name(1)))
            host.listen(lambda: set(host.view.groups) == {"engine"} == {m.group for m in host.view.members.values()})
        until(lambda: not call(supervisor, "GET", "/v1/hosts").json()["a"]["connected"], "host a is gone")
        again = post(supervisor, "/v1/hosts/a/drain?wait=9", within=0)
        assert (again.status_code, again.json()) == (200, {"done": True, "members": {}, "missing": [], "holding": []})
        assert problem(post(supervisor, "/v1/hosts/c/drain", within=0), 404) == "no host 'c'; there are a, b"
        assert other.view.groups["engine"].whole


def test_waiting_ends_with_its_time_and_says_who_is_in(start: Start) -> None:
    supervisor = start()
    with pair(supervisor):
        began = time.monotonic()
        answer = post(supervisor, "/v1/hosts/a/drain?wait=0.3", within=60)
        assert 0.3 <= time.monotonic() - began < 5
        assert (answer.status_code, answer.json()["missing"]) == (202, [name(0), name(1)])
        for path in ("/v1/hosts/a/drain?wait=31", "/v1/groups/shrink?wait=-1", "/v1/grow?wait=x"):
            problem(post(supervisor, path, groups=["trainer"]), 422)
        problem(post(supervisor, "/v1/hosts/a/drain", within=-1), 422)
        problem(post(supervisor, "/v1/hosts/a/drain", within=1, force=True), 422)


def test_waiting_ends_with_the_supervisor(start: Start) -> None:
    supervisor = start()
    with pair(supervisor):
        waiting = Later(lambda: post(supervisor, "/v1/hosts/a/drain?wait=30", within=60))
        until(lambda: len(happened(supervisor, "member.leave_asked")) == 2, "they are asked")
        began = time.monotonic()
        supervisor.close(over=False)
        assert waiting().status_code in (202, 503)
        assert time.monotonic() - began < 8


def test_who_joins_a_host_while_it_is_drained_is_asked_too(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host, host.beating():
        waiting = Later(lambda: post(supervisor, "/v1/hosts/a/drain?wait=9", within=60))
        host.listen(lambda: host.view.members[name(1)].leave_within == 60)
        host.state(engine(1, "late", host="a"))
        late = name(0, group="late")
        host.listen(lambda: late in host.view.members and host.view.members[late].leave_within == 60, within=5)
        host.state(*(statement(r, 2, leaving=True) for r in (0, 1)), engine(2, "late", host="a", leaving=True))
        assert waiting().status_code == 200
        assert set(waiting().json()["members"]) == {name(0), name(1), late}
        assert len(happened(supervisor, "member.leave_asked")) == 3


def test_a_drain_tells_what_the_host_still_holds(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host:
        host.publish(1, number=2)
        host.listen(lambda: bool(host.view.publications))
        answer = post(supervisor, "/v1/hosts/a/drain?wait=9", within=0)
        assert (answer.status_code, answer.json()["holding"]) == (200, [name(0), name(1)])
        assert post(supervisor, "/v1/hosts/a/drain", within=0).json()["holding"] == [name(0), name(1)]


# -- shrink, leave


def test_groups_leave_by_one_change(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host, engines(supervisor, "e1", "e2", "e3") as other:
        host.listen(lambda: host.view.revision == other.view.revision)
        before = host.view.membership_epoch
        answer = post(supervisor, "/v1/groups/shrink?wait=9", groups=["e1", "e3", "e1"], within=0)
        assert answer.status_code == 200, answer.text
        assert set(answer.json()["members"]) == {name(0, group="e1"), name(0, group="e3")}
        host.listen(lambda: set(host.view.groups) == {"trainer", "e2"})
        assert host.view.membership_epoch == before + 1
        again = post(supervisor, "/v1/groups/shrink?wait=9", groups=["e1", "e3"], within=0)
        assert (again.status_code, again.json()["done"]) == (200, True)
        assert len(happened(supervisor, "member.leave_asked")) == 2


def test_one_unknown_group_and_nothing_is_done(start: Start) -> None:
    supervisor = start()
    with pair(supervisor):
        said = problem(post(supervisor, "/v1/groups/shrink", groups=["x", "trainer", "y"], within=0), 404)
        assert said == "no group 'x', 'y'; there are trainer"
        for bad in (
            {"groups": []},
            {"groups": ["trainer"], "within": -1},
            {"groups": "trainer"},
            {"group": ["trainer"]},
        ):
            problem(post(supervisor, "/v1/groups/shrink", **bad), 422)
        assert happened(supervisor, "member.leave_asked") == []
        assert {m["state"] for m in call(supervisor, "GET", "/v1/members").json().values()} == {"live"}


def test_by_force_a_member_is_out_at_once(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host, engines(supervisor, "e1", "e2") as other:
        path = f"/v1/members/{name(0, group='e1')}/leave"
        answer = post(supervisor, path, within=600, force=True)
        assert (answer.status_code, answer.json()["state"]) == (202, "lost")
        assert [m["state"] for m in post(supervisor, "/v1/groups/e2/leave", force=True).json().values()] == ["lost"]
        other.listen(lambda: set(other.view.groups) == {"trainer"})
        host.listen(lambda: host.view.revision == other.view.revision)
        assert host.view.groups["trainer"].whole


# -- grow


def test_a_grow_lets_all_of_them_in_by_one_change(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host, engines(supervisor) as other:
        heard(other)
        before = other.view.membership_epoch
        assert call(supervisor, "GET", "/v1/grow").json() is None
        first = post(supervisor, "/v1/grow", groups=2, within=60, name="two")
        assert (first.status_code, first.json()["missing"], first.json()["done"]) == (202, 2, False)
        assert 50 < first.json()["left"] <= 60
        other.state(engine(1, "e1"))
        until(lambda: call(supervisor, "GET", "/v1/grow").json()["ready"] == ["e1"], "e1 is ready")
        held = post(supervisor, "/v1/grow?wait=0.2", groups=2, within=60, name="two")
        assert (held.status_code, held.json()["missing"]) == (202, 1)
        other.listen(lambda: name(0, group="e1") in other.view.members)
        assert other.view.members[name(0, group="e1")].state == "joining"
        waiting = Later(lambda: post(supervisor, "/v1/grow?wait=9", groups=2, within=60, name="two"))
        other.admitted([engine(2, "e1"), engine(1, "e2")])
        done = waiting()
        assert done.status_code == 200
        assert (done.json()["admitted"], done.json()["missing"]) == (["e1", "e2"], 0)
        assert other.view.membership_epoch == before + 1
        # The same request, and a later one, and then the first again: nothing begins anew.
        assert post(supervisor, "/v1/grow", groups=2, within=60, name="two").json() == done.json()
        assert post(supervisor, "/v1/grow?wait=9", groups=1, within=0, name="three").json()["done"]
        assert post(supervisor, "/v1/grow", groups=2, within=60, name="two").json() == done.json()
        assert [e["name"] for e in happened(supervisor, "grow.waiting")] == ["two", "three"]
        host.listen(lambda: host.view.membership_epoch == before + 1)


def test_one_grow_at_a_time(start: Start) -> None:
    supervisor = start()
    assert post(supervisor, "/v1/grow", groups=2, within=60, name="two").status_code == 202
    said = problem(post(supervisor, "/v1/grow", groups=1, within=60, name="other"), 409)
    assert "grow two still waits for 2 of 2 groups" in said
    assert "nothing was done" in said
    problem(post(supervisor, "/v1/grow", groups=1, within=60), 409)
    assert "asked for 2 groups" in problem(post(supervisor, "/v1/grow", members=2, within=60, name="two"), 409)
    assert [e["name"] for e in happened(supervisor, "grow.waiting")] == ["two"]


def test_after_its_time_a_grow_takes_what_is_there(start: Start) -> None:
    supervisor = start()
    with engines(supervisor) as other:
        heard(other)
        waiting = Later(lambda: post(supervisor, "/v1/grow?wait=9", groups=3, within=2.0))
        until(lambda: call(supervisor, "GET", "/v1/grow").json() is not None, "it holds")
        other.admitted([engine(1, "e1")])
        found = waiting()
        assert (found.status_code, found.json()["admitted"], found.json()["missing"]) == (200, ["e1"], 2)
        assert call(supervisor, "GET", "/v1/grow").json() == found.json()


def test_a_grow_by_members_counts_members_of_whole_groups(start: Start) -> None:
    supervisor = start()
    with engines(supervisor) as other:
        heard(other)
        waiting = Later(lambda: post(supervisor, "/v1/grow?wait=9", members=3, within=60))
        until(lambda: call(supervisor, "GET", "/v1/grow").json() is not None, "it holds")
        other.state(engine(1, "e1", size=2), engine(1, "e1", size=2, rank=1))
        until(lambda: call(supervisor, "GET", "/v1/grow").json()["missing"] == 1, "two are ready")
        assert waiting.pending
        other.admitted([engine(1, "e2")])
        assert (waiting().json()["admitted"], waiting().json()["missing"]) == (["e1", "e2"], 0)


@pytest.mark.parametrize(
    "body", [{}, {"groups": 1, "members": 1}, {"groups": 0}, {"groups": -1}, {"members": 1, "x": 1}]
)
def test_a_grow_wants_groups_or_members(start: Start, body: dict[str, int]) -> None:
    supervisor = start()
    said = problem(post(supervisor, "/v1/grow", **body), 422)
    if set(body) <= {"groups", "members"} and min(body.values(), default=0) >= 0:
        assert "say groups or members, one of them and not both" in said
    assert call(supervisor, "GET", "/v1/grow").json() is None


# -- what is shown


def test_hosts_and_the_transfer_in_hand_are_shown(start: Start) -> None:
    supervisor = start()
    landing = Landing(arena="cd" * 16, cells=1, cell=1 << 20)
    with pair(supervisor) as host, engines(supervisor) as other:
        other.admitted([engine(1, landing=landing)])
        heard(host).listen(lambda: "engine" in host.view.groups)
        host.publish(1, number=2)
        host.listen(lambda: bool(host.view.transfers))
        (transfer,) = host.view.transfers.values()
        assert call(supervisor, "GET", "/v1/transfers").json() == {transfer.id: transfer.model_dump(mode="json")}
        one = call(supervisor, "GET", f"/v1/transfers/{transfer.id}").json()
        assert (one["state"], one["epoch"], one["publication"]) == ("forming", transfer.epoch, transfer.publication)
        assert transfer.id in problem(call(supervisor, "GET", "/v1/transfers/none"), 404)
        said = MoverSaid(member=name(0), mover="ab", transfer=transfer.id, state="starting", cells=0)
        host.say(said)
        until(lambda: bool(call(supervisor, "GET", "/v1/hosts").json()["a"]["movers"]), "the mover is shown")
        found = call(supervisor, "GET", "/v1/hosts").json()
        assert found["a"] == {
            "connected": True,
            "members": {name(0): "live", name(1): "live"},
            "movers": {name(0): said.model_dump(mode="json")},
            "drained": None,
            "domains": ["a"],
            "fabric": {},
        }
        engine_ = {name(0, group="engine"): "live"}
        assert found["b"] == {
            "connected": True, "members": engine_, "movers": {}, "drained": None, "domains": ["b"], "fabric": {},
        }  # fmt: skip
    until(lambda: not call(supervisor, "GET", "/v1/hosts").json()["b"]["connected"], "host b is cut")


def test_what_a_supervisor_was_started_with_is_told(start: Start) -> None:
    found = call(start(cell=4096, verify="full"), "GET", "/v1/health").json()
    assert (found["cell"], found["verify"]) == (4096, "full")
    found = call(start(job="other"), "GET", "/v1/health").json()
    assert (found["cell"], found["verify"]) == (1 << 20, "sampled")
    for bad, said in (
        ({"cell": 8}, "cell .8 bytes. must be 16 to"),
        ({"verify": "none"}, "must be 'sampled' or 'full'"),
    ):
        with pytest.raises(ProtocolError, match=said):
            start(**bad)
