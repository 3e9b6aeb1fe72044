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
