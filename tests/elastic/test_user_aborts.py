"""What a user gives up ends for that reason, in bounded time, and takes no process with it."""

from __future__ import annotations

import os
import random
import subprocess
import time

import pytest

from elastic_reshard.watchdog.runtime import condemn
from tests.elastic import rank as on
from tests.elastic.actors import Failed
from tests.elastic.world import World


def _leave_while_it_waits(state: on.State) -> str:
    """Leave in one thread while another waits to install: the waiter's `finally` runs, and its error is the real one."""
    import threading

    from elastic_reshard.errors import NotAMember

    said: list[str] = []

    def wait() -> None:
        try:
            state.m.install(30.0)
        except NotAMember as error:
            said.append(str(error))
        finally:
            said.append("finally")

    waiting = threading.Thread(target=wait)
    waiting.start()
    with state.m._desk.changed:
        state.m._desk.changed.wait_for(lambda: state.m._desk.core.install.asking, 10.0)
    state.m.leave(10.0)
    waiting.join(10.0)
    return "; ".join(said) if not waiting.is_alive() else "still waiting"


def test_b09_an_abandoned_publication_ends_its_wait_by_the_users_reason_and_the_gang_goes_on(world: World) -> None:
    trainer = world.trainer().join()
    trainer.publish("s1")
    view = world.until(lambda v: any(p.state == "moving" for p in v.publications.values()), "no engine: it moves")
    (moving,) = view.publications
    calls = trainer.begin(on.committed, "s1")
    with world.client() as client:
        client.abandon(moving, "the run diverged")
    for call in calls:
        with pytest.raises(Failed, match=r"PublicationAbandoned.*the run diverged"):
            call.result()
    engine = world.engine().join()
    trainer.publish("s2")
    assert engine.receive("s2") == 2


def test_b09_leaving_frees_a_thread_that_waits(world: World) -> None:
    _, engine = world.both()
    said = engine[0].do(_leave_while_it_waits)
    assert "finally" in said
    assert "is no member any more" in said
    assert engine[1].do(on.version) == 0, "the other rank's process lives"


def test_b05_processes_that_hang_now_and_then_are_condemned_in_bounded_time() -> None:
    """What ignores polite signals and what is stopped end alike, by proof: the counts add up exactly."""
    coin = random.Random(5)
    hung = ended = 0
    for _ in range(100):
        process = subprocess.Popen(["sleep", "60"])
        pidfd = os.pidfd_open(process.pid)
        try:
            if coin.random() < 0.3:
                os.kill(process.pid, 19)  # SIGSTOP: it would never answer
                hung += 1
            begun = time.monotonic()
            assert condemn(pidfd, 2.0)
            assert time.monotonic() - begun < 2.0
            assert process.wait(1.0) == -9
            ended += 1
        finally:
            os.close(pidfd)
    assert ended == 100
    assert 10 < hung < 60
