"""What people ask for and a restart keeps: drained hosts, grows that are taken back, policies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.supervisor import core
from elastic_reshard.supervisor.events import DrainHost, Tick, UndrainHost
from elastic_reshard.supervisor.settings import recall, settings_of
from tests.supervisor.real import Start, call, heard, pair, problem, put_fragment
from tests.supervisor.talk import QUICK, Host, name, statement, until
from tests.supervisor.test_app_membership import Later, engine, engines, happened, post


def test_a_drained_host_stays_drained_until_that_is_lifted(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host, host.beating():
        assert post(supervisor, "/v1/hosts/a/drain?wait=9", within=0).json()["done"]
        assert call(supervisor, "GET", "/v1/hosts").json()["a"]["drained"] == 0
        call(supervisor, "POST", "/v1/hosts/a/drain", json={"within": 60})
        # Long after that call has ended, and its own group is not even whole.
        host.state(engine(1, "late", host="a", size=2))
        late = name(0, group="late")
        host.listen(lambda: late in host.view.members and host.view.members[late].leave_within == 60)
        assert host.view.members[late].reason == "host a is drained: leave, and join on another one"
        host.state(engine(1, "late", host="a", size=2, rank=1))
        both = [late, name(1, group="late")]
        host.listen(lambda: all(host.view.members[m].state == "live" for m in both if m in host.view.members))
        host.listen(lambda: [host.view.members[m].reason != "" for m in both] == [True, True])
        found = call(supervisor, "DELETE", "/v1/hosts/a/drain").json()
        assert (found["drained"], found["members"][late]) == (None, "live")
        host.listen(lambda: [host.view.members[m].leave_within for m in both] == [None, None])
        assert {host.view.members[m].reason for m in both} == {""}
        host.state(engine(1, "later", host="a"))
        host.admitted([engine(2, "later", host="a")])
        assert host.view.members[name(0, group="later")].leave_within is None
    said = problem(call(supervisor, "DELETE", "/v1/hosts/nowhere/drain"), 404)
    assert said == "no host 'nowhere'; there are a"


def test_lifting_a_drain_takes_back_only_what_it_asked(start: Start) -> None:
    supervisor = start()
    with pair(supervisor) as host:
        post(supervisor, "/v1/hosts/a/drain", within=60)
        post(supervisor, f"/v1/members/{name(0)}/leave", within=50)
        call(supervisor, "DELETE", "/v1/hosts/a/drain")
        host.listen(lambda: [host.view.members[name(r)].leave_within for r in (0, 1)] == [50, None])


def test_a_drain_asks_who_joins_on_other_hosts_nothing(start: Start) -> None:
    supervisor = start()
    with pair(supervisor), engines(supervisor, "engine") as other:
        post(supervisor, "/v1/hosts/a/drain", within=60)
        other.admitted([engine(1, "second")])
        assert {m.leave_within for m in other.view.members.values() if m.host == "b"} == {None}


def test_a_grow_is_taken_back_and_who_waited_comes_in(start: Start) -> None:
    supervisor = start()
    with engines(supervisor) as other:
        heard(other)
        assert post(supervisor, "/v1/grow", groups=3, within=600, name="three").status_code == 202
        other.state(engine(1, "e1"))
        until(lambda: call(supervisor, "GET", "/v1/grow").json()["ready"] == ["e1"], "e1 is ready")
        waiting = Later(lambda: post(supervisor, "/v1/grow?wait=9", groups=3, within=600, name="three"))
        gone = call(supervisor, "DELETE", "/v1/grow/three").json()
        assert (gone["done"], gone["cancelled"], gone["admitted"], gone["ready"]) == (True, True, [], ["e1"])
        assert waiting().json() == gone
        other.listen(lambda: "e1" in other.view.groups and other.view.groups["e1"].whole)
        assert call(supervisor, "DELETE", "/v1/grow/three").json() == gone
        assert post(supervisor, "/v1/grow?wait=9", groups=1, within=0, name="one").json()["done"]
        assert list(call(supervisor, "GET", "/v1/grows").json()) == ["three", "one"]
        assert "is done: 0 groups came in" in problem(call(supervisor, "DELETE", "/v1/grow/one"), 409)
        assert "no grow 'nine'; there are one, three" in problem(call(supervisor, "DELETE", "/v1/grow/nine"), 404)
        assert len(happened(supervisor, "grow.cancelled")) == 1


def test_policies_are_changed_in_part_and_reset(start: Start) -> None:
    supervisor = start(policies=Policies(late_after=11.0))
    before = call(supervisor, "GET", "/v1/policies").json()
    changed = call(supervisor, "PATCH", "/v1/policies", json={"min_groups": 2, "max_lag": 3}).json()
    assert changed == before | {"min_groups": 2, "max_lag": 3}
    assert call(supervisor, "PATCH", "/v1/policies", json={"max_lag": None}).json()["max_lag"] is None
    for bad, said in (
        ({"late_after": -1}, "late_after must not be negative"),
        ({"unknown": 1}, "unknown"),
        ({"late_after": None}, "late_after"),
        ({"network": "pigeons"}, "network must be one of"),
    ):
        assert said in problem(call(supervisor, "PATCH", "/v1/policies", json=bad), 422)
    answer = call(
        supervisor,
        "PATCH",
        "/v1/policies",
        content=b'{"late_after": NaN}',
        headers={"content-type": "application/json"},
    )
    assert "finite" in problem(answer, 422)
    assert call(supervisor, "DELETE", "/v1/policies").json() == before


def test_a_restart_keeps_all_of_it(start: Start, tmp_path: Path) -> None:
    kept: dict[str, Any] = {"journal": tmp_path / "j", "deadlines": QUICK}
    first = start(**kept)
    put_fragment(first)
    with Host(first, "b") as other, other.beating():
        heard(other)
        assert post(first, "/v1/grow?wait=9", groups=1, within=0, name="over").json()["done"]
        post(first, "/v1/grow", groups=2, within=600, name="two")
        other.state(engine(1, "e1"))
        until(lambda: call(first, "GET", "/v1/grow").json()["ready"] == ["e1"], "e1 is ready")
        call(first, "PATCH", "/v1/policies", json={"late_after": 12.5})
        post(first, "/v1/hosts/b/drain", within=500)
    first.close(over=False)
    second = start(**kept, policies=Policies(late_after=1.0, min_groups=7))
    assert call(second, "GET", "/v1/policies").json()["late_after"] == 12.5
    assert call(second, "GET", "/v1/hosts").json()["b"]["drained"] == 500
    assert list(call(second, "GET", "/v1/grows").json()) == ["over", "two"]
    assert post(second, "/v1/grow", groups=2, within=600, name="over").status_code == 409
    said = statement(
        0, 2, group="e1", size=1, roles={"destination"}, source=None, destination=engine(1).destination, host="b"
    )
    with Host(second, "b", statements=(said,)) as other, other.beating():
        other.listen(lambda: name(0, group="e1") in other.view.members)
        until(lambda: call(second, "GET", "/v1/grow").json()["missing"] == 1, "e1 is held again")
        assert other.view.members[name(0, group="e1")].state == "joining"
        other.admitted([engine(3, "e1"), engine(1, "e2")])
        found = call(second, "GET", "/v1/grow").json()
        assert (found["name"], found["done"], found["admitted"]) == ("two", True, ["e1", "e2"])
        other.listen(lambda: other.view.members[name(0, group="e2")].leave_within == 500)
        call(second, "DELETE", "/v1/hosts/b/drain")
        other.listen(lambda: {m.leave_within for m in other.view.members.values()} == {None})
    call(second, "DELETE", "/v1/policies")
    second.close(over=False)
    third = start(**kept, policies=Policies(late_after=1.0))
    assert call(third, "GET", "/v1/policies").json()["late_after"] == 1.0
    assert (
        call(third, "GET", "/v1/hosts").json() == {} or call(third, "GET", "/v1/hosts").json()["b"]["drained"] is None
    )


def test_what_is_journaled_is_what_was_asked_for() -> None:
    job = core.begin("job", 1, "i", 0.0, policies=Policies(late_after=3.0))
    job, effects = core.step(job, [Tick()], 0.1, lambda *_: True)
    assert not effects.settings
    job, effects = core.step(job, [DrainHost("a", 5.0), DrainHost("b", 6.0)], 0.2, lambda *_: True)
    assert effects.settings
    again, effects = core.step(job, [DrainHost("a", 5.0)], 0.3, lambda *_: True)
    assert not effects.settings
    assert again.drained == {"a": 5.0, "b": 6.0}
    job, effects = core.step(again, [UndrainHost("a")], 0.4, lambda *_: True)
    assert effects.settings
    kept = settings_of(job)
    assert (kept.policies, kept.drained) == (None, {"b": 6.0})
    back = recall(core.begin("job", 2, "k", 9.0), kept, 9.0)
    assert back.drained == {"b": 6.0}
    other = settings_of(replace(job, policies=Policies(late_after=4.0)))
    assert recall(core.begin("job", 2, "k", 9.0), other, 9.0).policies.late_after == 4.0


@pytest.mark.parametrize("host", ["a", "b"])
def test_the_oldest_drains_are_forgotten(host: str) -> None:
    job = core.begin("job", 1, "i", 0.0)
    job, _ = core.step(job, [DrainHost(f"{host}{n}") for n in range(4100)], 0.1, lambda *_: True)
    assert len(job.drained) == 4096
    assert f"{host}3" not in job.drained
    assert f"{host}4099" in job.drained
