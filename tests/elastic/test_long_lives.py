"""Much of the same: nothing grows, nobody stalls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from tests.elastic import rank as on
from tests.elastic.world import Gang, World


def _grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What a process holds more of. A few descriptors may be on their way out."""
    found = [k for k in ("threads", "maps") if after[k] > before[k]]
    found += ["fds"] if after["fds"] > before["fds"] + 2 else []
    return found + (["rss"] if after["rss"] > before["rss"] + 8192 else [])  # KiB


def test_b56_fifty_refits_and_five_losses_leave_nothing(world: World) -> None:
    trainer, engine, other = world.trainer().join(), world.engine(0).join(), world.engine(1).join()
    survivors = [trainer[0], engine[0], *other]
    before: list[dict[str, int]] = []
    segments, journal = 0, 0
    for step in range(1, 51):
        trainer.publish(f"s{step}")
        trainer.committed(f"s{step}")
        assert engine.install()["weight_version"] == other.install()["weight_version"] == step
        if step % 10 == 0:
            gang: Gang = trainer if step % 20 == 0 else engine
            gang[1].kill()
            world.forget(gang[1])
            gang[1].close()
            gang.replace(1)
        if step == 20:
            before = [actor.do(on.usage) for actor in survivors]
            segments, journal = len(os.listdir("/dev/shm")), world.journal.stat().st_size
    after = [actor.do(on.usage) for actor in survivors]
    grown = {a.name: (g, b, c) for a, b, c in zip(survivors, before, after, strict=True) if (g := _grown(b, c))}
    assert not grown
    assert len(os.listdir("/dev/shm")) <= segments
    assert world.journal.stat().st_size <= 1.25 * journal, "the journal forgets what ended long ago"


def _publish_and_watch(state: on.State, seconds: float) -> tuple[list[float], int]:
    """Publish at 10 Hz while another thread waits in watch(); how long each publish took, and events heard."""
    heard: list[str] = []

    def listen() -> None:
        heard.extend(event.kind for event in state.m.watch(timeout=1.0))

    thread = threading.Thread(target=listen)
    thread.start()
    took = []
    begun = time.monotonic()
    while (now := time.monotonic()) - begun < seconds:
        took.append(on.publish(state, f"s{len(took) + 1}"))
        time.sleep(max(0.0, 0.1 - (time.monotonic() - now)))
    thread.join()
    return took, len(heard)


@pytest.mark.long
def test_b46_watching_does_not_stall_publishing(make_world: Callable[..., World]) -> None:
    world = make_world(min_groups=0)
    trainer = world.trainer(size=1).join()
    ((took, heard),) = trainer.do(_publish_and_watch, 3.0)
    assert len(took) >= 20, f"10 Hz were not kept: {took}"
    assert max(took) < 1.0, f"a publish stalled: {took}"
    assert heard >= len(took), "each was at least pending once"
