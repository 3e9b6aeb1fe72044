"""Why something waits, in words: each sentence in the situation that it is about."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic_reshard.supervisor.waiting import Wait, waits
from tests.supervisor.drive import Stage

TWO_HOSTS = """
host a
host b
join t-0 t 0/1 source host=a source=a0
join e-0 e 0/2 destination host=b
join e-1 e 1/2 destination host=b
lands e-0 e-1
"""


def stage(*lines: str) -> Stage:
    """A job after some lines, as in the texts of `drive`."""
    made = Stage()
    for line in (line for text in lines for line in text.strip().splitlines()):
        what, *words = line.split()
        getattr(made, f"do_{what}")(*words)
    return made


def said(
    made: Stage, connected: Callable[[Stage], set[str]] = lambda made: set(made.hosts) - made.silent
) -> list[Wait]:
    return list(waits(made.job, connected(made), made.now, -100.0))


def one(made: Stage, about: str) -> Wait:
    found = [wait for wait in said(made) if wait.about == about]
    assert len(found) == 1, said(made)
    return found[0]


def test_a_job_that_has_all_it_wants_waits_for_nothing() -> None:
    made = stage(TWO_HOSTS)
    assert said(made) == []


@pytest.mark.parametrize(
    ("lines", "about", "why", "tone", "left"),
    [
        ("die e-1", "e", "1 of its 2 ranks is missing (rank 1)", "bad", None),
        ("silent b", "host b", "its connection is gone", "bad", 5.0),
        ("must_leave e-0 30", "e-0", "was asked to leave; then it is left out", "calm", 30.0),
        ("publish t-0 one", "version 1 (one)", "commits when e has all of it", "calm", 30.0),
        ("publish t-0 one\ntick 31", "version 1 (one)", "needs 1 complete groups to commit (min_groups), 0 are", "late", None),
        ("publish t-0 one\nmover t-0,e-0 ready", "transfer of epoch 2", "the movers of e-1 start and plan", "calm", 10.0),
        ("publish t-0 one\nmover t-0,e-0,e-1 ready\nmover t-0 ended",
         "transfer of epoch 2", "is broken off (the mover of t-0", "bad", None),
        (
            "publish t-0 one\nmover t-0,e-0,e-1 ready\nmover t-0,e-0 running\nmover e-1 running waits=e-0",
            "transfer of epoch 2", "e-1 waits for cells of e-0; broken off if none comes", "calm", 6.0,
        ),
        (
            "publish t-0 one\nmover t-0,e-0,e-1 ready\nmover t-0,e-0,e-1 running\nmover t-0 running waits=e-0 window=1",
            "transfer of epoch 2", "the window of e-0 is closed: it computes, and t-0 waits for it; left behind then", "calm",
            30.0,
        ),
        (
            "publish t-0 one\nmover t-0,e-0,e-1 ready\nmover e-0,e-1 running\nmover t-0 running waits=t-0 window=1",
            "transfer of epoch 2", "the window of t-0 is closed: it computes", "calm", None,
        ),
        (
            "publish t-0 one\nmover t-0,e-0,e-1 ready\nmover e-0 running\nmover t-0,e-1 out failed\ntick 6",
            "e-0", "its mover was killed in transfer p1.1:1.1 and hangs in the kernel", "bad", None,
        ),
        ("publish t-0 one\npublish t-0 two", "t", "its newest publish waits for the version that moves", "calm", None),
        ("grow", "grow g", "who joins is held until 2 groups are there", "calm", 60.0),
    ],
)  # fmt: skip
def test_each_says_who_why_and_for_how_long(lines: str, about: str, why: str, tone: str, left: float | None) -> None:
    made = stage(TWO_HOSTS)
    before = made.now
    if lines == "grow":
        from elastic_reshard.supervisor.events import Grow

        made.tell(Grow("g", groups=2, within=60.0))
    else:
        made = stage(TWO_HOSTS, lines)
    wait = one(made, about)
    assert why in wait.why
    assert wait.tone == tone
    assert "@" not in wait.about + wait.why, "no incarnations"
    if left is None:
        assert wait.until is None
    else:
        assert wait.until == pytest.approx(before + left + 100.0, abs=0.1)


ONE_HOST = """
host a
join t-0 t 0/1 source source=a0
join e-0 e 0/2 destination
join e-1 e 1/2 destination
publish t-0 one
"""


def test_installs_say_who_has_not_called_and_who_has_pulled() -> None:
    assert "may install version 1 (one): e-0, e-1 have not called install" in one(stage(ONE_HOST), "e").why
    asked = stage(ONE_HOST, "ask e-0")
    assert "e-1 has not called install" in one(asked, "e").why
    pulling = stage(ONE_HOST, "ask e-0\nask e-1\ntake e-0\ntake e-1\npulled e-0")
    wait = one(pulling, "e")
    assert wait.why == "installs version 1: 1 of 2 ranks have pulled it"
    assert wait.until == pytest.approx(110.0)
    broken = stage(ONE_HOST, "ask e-0\nask e-1\ntake e-0\ntake e-1\npulled e-0\npulled e-1 no memory")
    assert one(broken, "e").tone == "bad"
    assert "it must not serve: " in one(broken, "e").why
    assert "no memory" in one(broken, "e").why
    late = stage(ONE_HOST, "tick 31")
    assert (one(late, "e").tone, "may install" in one(late, "e").why) == ("late", True)


def test_max_lag_holds_the_next_version_back() -> None:
    made = stage("policies max_lag=0", ONE_HOST, "publish t-0 two")
    assert not [w for w in said(made) if w.about == "t"]
    assert one(made, "next version").why == "waits for e, more than 0 versions behind (max_lag), to install"


def test_of_a_chain_the_one_at_its_end_is_named() -> None:
    lines = "publish t-0 one\nmover t-0,e-0,e-1 ready\nmover t-0 running"
    lines += "\nmover e-1 running waits=e-0\nmover e-0 running waits=t-0"
    assert one(stage(TWO_HOSTS, lines), "transfer of epoch 2").why.startswith("e-0 waits for cells of t-0;")


def test_a_member_that_leaves_says_so() -> None:
    made = stage(ONE_HOST, "ask e-0\nask e-1\ntake e-0\nleave e-1")
    assert one(made, "e-1").why == "leaves once its group's install is over"


def test_a_lost_journal_says_how_many_are_missing() -> None:
    made = stage(TWO_HOSTS, "restart 3")
    assert "waits until 3 members have said what they have; 0 have" in one(made, "supervisor").why


def test_a_publish_waits_for_its_other_ranks() -> None:
    made = stage("host a\njoin t-0 t 0/2 source\njoin t-1 t 1/2 source", "publish t-0 one")
    wait = one(made, "t")
    assert wait.why.startswith("its newest publish waits for t-1;")
    assert wait.until == pytest.approx(105.0)
