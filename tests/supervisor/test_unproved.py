"""How long others wait for a mover, by tables; the texts show what comes of it (condemned, hangs, owes, replica)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_reshard.protocol.deadlines import NETWORKS, Deadlines
from elastic_reshard.supervisor import unproved
from elastic_reshard.supervisor.events import Beaten, Grow, Tick
from tests.supervisor.drive import Stage

TRIO = """host a ; host b ; host c
join t-0 t 0/1 source host=a ; join e-0 e 0/1 destination host=b ; join f-0 f 0/1 destination host=c
tick 2 ; lands e-0 f-0 ; publish t-0 one"""


def stage(*lines: str, deadlines: Deadlines | None = None) -> Stage:
    made = Stage()
    made.job = replace(made.job, deadlines=deadlines or made.job.deadlines)
    for line in "\n".join((TRIO, *lines)).splitlines():
        made.say(line)
    return made


@pytest.mark.parametrize("network", [*NETWORKS, None])
def test_a_watchdog_is_given_the_time_that_it_takes(network: str | None) -> None:
    for deadlines in (Deadlines(), Deadlines(abort=9.0), Deadlines(abort_nccl=8.0)):
        look_and_ticks = deadlines.mover_beat
        takes = deadlines.abort_over(network) + deadlines.proof_of_death + look_and_ticks
        assert unproved._needs(deadlines, network) >= takes
        assert unproved._needs(deadlines, None) >= unproved._needs(deadlines, network)


@pytest.mark.parametrize("abort", [0.5, 8.0])
def test_one_that_aborts_in_its_time_is_not_called_hung(abort: float) -> None:
    made = stage("mover t-0,e-0,f-0 ready ; mover t-0,e-0,f-0 running", deadlines=Deadlines(abort=abort))
    said = made.say(f"mover t-0,f-0 out failed error=PeerLost ; tick {abort + 4}")
    assert not any(line.startswith("mover.unproved") for line in said)
    assert made.say("tick 1.5")[0].startswith("mover.unproved member=e-0")


def test_who_can_get_no_mover_at_all_is_not_waited_for() -> None:
    """A host that cannot fork has no word to say; the second time in a row the others go on."""
    made = stage()
    for _ in range(2):
        assert len(next(iter(made.job.transfers.values())).doc.present) == 3
        made.say("mover t-0,f-0 ready ; tick 10 ; mover t-0,f-0 out stopped")
    [transfer] = made.job.transfers.values()
    assert [name.partition("@")[0] for name in transfer.doc.present] == ["t-0", "f-0"]
    made.say("mover t-0,f-0 ready ; mover t-0,f-0 running ; holds f-0 p1.1 ; mover t-0,f-0 out done")
    assert made.job.committed == "p1.1"


def test_who_was_not_ready_when_another_ended_is_not_left_out() -> None:
    made = stage()
    for _ in range(2):
        made.say("mover t-0 ready ; mover t-0 ended failed")
    [transfer] = made.job.transfers.values()
    assert len(transfer.doc.present) == 3


# -- a supervisor that was late itself


@pytest.mark.parametrize(("quiet", "within"), [(0.0, 90.0), (1.0, 120.0), (3.0, 100.0)])
def test_somebody_is_late_at_last_for_a_supervisor_that_stutters(quiet: float, within: float) -> None:
    made = stage("mover t-0,e-0,f-0 starting")
    made.say("tick 1")
    since = made.now
    late_after = made.job.policies.late_after
    group = made.job.groups["f"]
    assert group.doc.state == "landing"
    while made.job.groups["f"].doc.state == "landing":
        assert made.now - since < within
        made.now += 2.5
        made.tell(*(Beaten(host) for host in made.hosts), Tick())
        if quiet:
            made.say(f"tick {quiet}")
    assert made.now - since >= late_after


def test_no_second_is_forgiven_twice_and_nothing_is_moved_into_the_future() -> None:
    made = stage("mover t-0,e-0,f-0 ready ; mover t-0,e-0,f-0 running")
    begun = made.now
    for _ in range(10):
        made.now += 2.5
        made.tell(*(Beaten(host) for host in made.hosts), Tick())
        made.say("tick 1")
    [transfer] = made.job.transfers.values()
    ahead = 2 * made.job.deadlines.beat
    assert begun < transfer.moved <= made.now + ahead
    assert transfer.begun <= made.now


def test_one_freeze_is_nobodys_lateness_and_ends_no_grow() -> None:
    made = stage("mover t-0,e-0,f-0 ready ; mover t-0,e-0,f-0 running")
    made.tell(Grow("g", groups=2, within=10.0))
    made.say("sleep 300")
    made.say("tick 5")
    assert made.job.growing is not None
    assert not made.job.growing.done
    assert made.job.publications["p1.1"].doc.state == "moving"
    assert made.job.groups["f"].doc.state == "landing"
    made.say("tick 8")
    assert made.job.growing.done
