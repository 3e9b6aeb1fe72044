"""Whom the others do not wait for any longer, at limits that the texts of interaction/ do not reach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_reshard.protocol.docs import TransferState
from tests.supervisor.drive import Stage


@pytest.mark.parametrize("times", [1, 1_024, 1_025, 1_000_000])
def test_who_was_left_behind_any_number_of_times_gives_way_to_the_next_version(times: int) -> None:
    stage = Stage()
    for line in [
        "host a ; host b ; host c ; policies late_after=4",
        "join t-0 t 0/1 source host=a ; join e-0 e 0/1 destination host=b ; join f-0 f 0/1 destination host=c",
        "lands f-0 ; publish t-0 one ; mover t-0,f-0 ready ; mover t-0,f-0 running ; holds f-0 p1.1",
        "mover t-0,f-0 out done ; tick 4 ; lands e-0 ; mover e-0,f-0 ready ; mover e-0,f-0 running",
    ]:
        stage.say(line)
    (catching_up,) = stage.job.transfers.values()
    assert (stage.job.committed, catching_up.doc.state) == ("p1.1", TransferState.RUNNING)
    stage.job = replace(stage.job, lateness={"e": times})
    stage.say("publish t-0 two ; tick 2")
    running = stage.job.transfers[catching_up.doc.id].doc.state is TransferState.RUNNING
    assert running == (times == 1)  # the first time it is given `late_after`
    stage.say("tick 2")
    assert stage.job.transfers[catching_up.doc.id].doc.state is TransferState.STOPPING
    assert stage.job.lateness == {"e": times + 1}


@pytest.mark.parametrize(
    ("closed", "seen"), [(True, True), (False, True), (False, False)],
    ids=["e computes", "e is slow", "the network is slow, nobody is seen waiting"],
)  # fmt: skip
@pytest.mark.parametrize("apart", [True, False], ids=["f's arena came later", "f's layout goes alone"])
def test_who_is_not_in_the_transfer_in_hand_waits_for_it_no_longer_than_late_after(
    closed: bool, seen: bool, apart: bool
) -> None:
    stage = Stage()
    for line in [
        "host a ; host b ; host c ; policies late_after=20",
        "join t-0 t 0/1 source host=a ; join e-0 e 0/1 destination host=b ; join f-0 f 0/1 destination host=c",
    ]:
        stage.say(line)
    if apart:
        f = stage.job.groups["f"]
        renamed = replace(f, doc=f.doc.model_copy(update={"renamed": True}))
        stage.job = replace(stage.job, groups={**stage.job.groups, "f": renamed})
    stage.say("tick 2 ; lands e-0 ; publish t-0 one ; lands f-0 ; mover t-0,e-0 ready ; mover e-0 running")
    (first,) = stage.job.transfers.values()
    for cells in range(1, 100):
        if first.doc.id not in stage.job.transfers or stage.job.transfers[first.doc.id].doc.state != "running":
            break
        moved = "" if closed else f" cells={cells}"
        waits = " waits=e-0" if seen else ""
        stage.say(f"mover t-0 running{waits} ; mover e-0 running{' waits=e-0' if closed else moved} ; tick 0.5")
    assert 20 <= stage.now - first.begun <= 21
    stage.say("mover t-0,e-0 running held=1" if not closed else "tick 0.5")
    stage.say("mover t-0,e-0 out stopped ; mover t-0,f-0 ready ; mover t-0,f-0 running ; holds f-0 p1.1")
    stage.say("mover t-0,f-0 out done")
    assert stage.job.committed == "p1.1"
    assert stage.now - stage.job.publications["p1.1"].begun <= 22
    assert stage.job.lateness == {"e": 1}
