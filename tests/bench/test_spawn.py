"""The benchmark's processes: results by rank, failures in full, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from elastic_reshard.bench.spawn import Worker, run
from elastic_reshard.errors import PeerLost, ReshardError, TransferTimeout


def nothing(worker: Worker) -> int:
    return worker.rank


@pytest.fixture(scope="module", autouse=True)
def _first_run() -> None:
    """What stays for this process's life is made here, outside of the tests that look for leaks and watch the time:
    the forkserver, and the pipe of libuv's first loop (libuv is under TCPStore)."""
    assert run(nothing, 1, timeout=60) == [0]


def meet(worker: Worker, factor: int) -> tuple[int, int, int]:
    """Every rank waits in the store for every other."""
    worker.store.set(f"rank{worker.rank}", str(factor * worker.rank))
    worker.report({"began": worker.rank})
    values = [int(worker.store.get(f"rank{r}")) for r in range(worker.size)]
    return worker.rank, sum(values), os.getpid()


def test_results_come_by_rank_and_events_as_they_happen() -> None:
    events: list[tuple[int, dict[str, Any]]] = []
    results = run(meet, 3, 10, timeout=60, on_event=lambda rank, event: events.append((rank, event)))
    assert [(rank, total) for rank, total, _ in results] == [(0, 30), (1, 30), (2, 30)]
    assert len({pid for *_, pid in results} | {os.getpid()}) == 4
    assert sorted(events, key=lambda item: item[0]) == [(r, {"began": r}) for r in range(3)]


def wait_for_event(worker: Worker) -> None:
    """Ends only when the parent has answered the event."""
    worker.report({"port": worker.store.port})
    worker.store.get("answer")


def test_events_arrive_while_the_rank_goes_on() -> None:
    def answer(_: int, event: dict[str, Any]) -> None:
        TCPStore("127.0.0.1", event["port"], is_master=False).set("answer", "yes")

    assert run(wait_for_event, 1, timeout=60, on_event=answer) == [None]


def fail_in_the_second(worker: Worker) -> None:
    if worker.rank == 1:
        raise ZeroDivisionError("the reason")
    worker.store.get("never set")


def test_a_failure_is_raised_with_its_traceback_and_ends_the_others() -> None:
    begin = time.monotonic()
    with pytest.raises(
        ReshardError, match=r"(?s)rank 1 of 3 failed.*fail_in_the_second.*ZeroDivisionError: the reason"
    ):
        run(fail_in_the_second, 3, timeout=60)
    assert time.monotonic() - begin < 30


def die_in_the_second(worker: Worker) -> None:
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if worker.rank == 2:
        raise ConnectionError("what a survivor sees")
    worker.store.get("never set")


def test_a_killed_rank_is_named_before_those_who_stumble_over_it() -> None:
    with pytest.raises(PeerLost, match=r"rank 1 \(exit code -9\)") as caught:
        run(die_in_the_second, 3, timeout=60)
    assert caught.value.members == (1,)


def never_end(worker: Worker) -> None:
    if worker.rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()


@pytest.mark.long
def test_a_late_rank_is_named_and_ended() -> None:
    with pytest.raises(TransferTimeout, match=r"ranks \[1\] of 2") as caught:
        run(never_end, 2, timeout=4)
    assert caught.value.members == (1,)


def tell_pid(worker: Worker, folder: str) -> None:
    (Path(folder) / f"{worker.rank}.tmp").write_text(str(os.getpid()))
    (Path(folder) / f"{worker.rank}.tmp").rename(Path(folder) / f"{worker.rank}.pid")
    signal.pause()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def until(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.long
def test_a_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    program = (
        "from elastic_reshard.bench.spawn import run\n"
        "from tests.bench.test_spawn import tell_pid\n"
        f"run(tell_pid, 2, {str(tmp_path)!r}, timeout=60)\n"
    )
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, "-c", program], cwd=root, env=env) as parent:
        files = [tmp_path / f"{rank}.pid" for rank in range(2)]
        started = until(lambda: all(f.exists() for f in files), 40)
        parent.kill()
    assert started
    pids = [int(f.read_text()) for f in files]
    assert until(lambda: all(gone(pid) for pid in pids), 10)
