"""Real processes for benchmarks and the demo: one call starts N, hands them a store, collects their results."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastic_reshard.errors import PeerLost, ReshardError, TransferTimeout

__all__ = ["Worker", "run"]

PRELOAD = ("torch", "torch.distributed.tensor")
# Seconds. After a first failure the others get this long to show who ended without a word: that one is the culprit.
_GRACE = 0.3


@dataclass(frozen=True)
class Worker:
    """What a process of `run` is given. `store` is its own client of the parent's TCPStore; `report` hands an event
    (anything that pickles) to the parent's `on_event` while the process goes on, and may be called from any thread."""

    rank: int
    size: int
    store: TCPStore
    report: Callable[[dict[str, Any]], None]


@dataclass
class _Outcome:
    results: dict[int, Any] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # rank -> traceback, in order of arrival
    lost: list[int] = field(default_factory=list)  # ended without a result


def run(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float,
    on_event: Callable[[int, dict[str, Any]], None] | None = None,
) -> list[Any]:
    """Start `size` processes that each call `fn(worker, *args)`; block until all are done; results by rank.

    `fn` is a function of a module (it travels by name), `args` and results must pickle. Processes come from a forkserver
    with torch preloaded. `on_event(rank, event)` runs in the calling thread. Blocks at most `timeout` seconds.
    All processes have ended and are reaped when this returns or raises, whatever happened.

    Raises ReshardError with the full traceback of the first rank that failed, PeerLost for a rank that ended without a
    result (killed), TransferTimeout naming the ranks that were not done in time.
    """
    deadline = time.monotonic() + timeout
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    # Port 0: the kernel chooses, and the real port is passed on; nothing can take it in between.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    processes: list[ForkServerProcess] = []
    pipes: dict[Connection, int] = {}
    try:
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            pipes[mine] = rank
            process = context.Process(
                target=_main,
                args=(fn, rank, size, store.port, timeout, theirs, args),
                name=f"rank{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
        outcome = _collect(dict(pipes), deadline, on_event)
        for rank in outcome.lost:  # its pipe closes a moment before its end is known
            processes[rank].join(_GRACE)
        exits = _end(processes, 0.0 if outcome.failed or outcome.lost else deadline - time.monotonic())
    finally:
        _end(processes, 0.0)
        for process in processes:
            process.close()
        for pipe in pipes:
            pipe.close()
    _raise_first(outcome, exits, size, timeout)
    return [outcome.results[rank] for rank in range(size)]


def _collect(
    pipes: dict[Connection, int], deadline: float, on_event: Callable[[int, dict[str, Any]], None] | None
) -> _Outcome:
    """Read the pipes until each rank has given a result, failed or gone, or the deadline has passed."""
    outcome = _Outcome()
    while pipes and not outcome.lost and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pipes), left):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                kind, value = pipe.recv()
            except EOFError:
                outcome.lost.append(rank)
                kind, value = "gone", None
            if kind == "event":
                if on_event is not None:
                    on_event(rank, value)
                continue
            del pipes[pipe]
            if kind == "result":
                outcome.results[rank] = value
            elif kind == "failed":
                outcome.failed[rank] = value
                deadline = min(deadline, time.monotonic() + _GRACE)
    return outcome


def _end(processes: Sequence[ForkServerProcess], grace: float) -> list[int | None]:
    """Join each process for what is left of `grace`, then SIGKILL and reap it. Exit codes before the kill, by rank."""
    deadline = time.monotonic() + grace
    exits: list[int | None] = []
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        exits.append(process.exitcode)
    for process in processes:
        if process.exitcode is None:
            process.kill()
    for process in processes:
        process.join()
    return exits


def _raise_first(outcome: _Outcome, exits: Sequence[int | None], size: int, timeout: float) -> None:
    if outcome.lost:
        how = ", ".join(f"rank {r} (exit code {exits[r]})" for r in outcome.lost)
        raise PeerLost(
            f"{how} of {size} ended without a result: killed, out of memory or crashed in native code. "
            "All processes were ended; look at the system log, then run again.",
            outcome.lost,
        )
    if outcome.failed:
        rank, text = next(iter(outcome.failed.items()))
        more = f" ({len(outcome.failed) - 1} more failed after it)" if len(outcome.failed) > 1 else ""
        raise ReshardError(f"rank {rank} of {size} failed{more}; all processes were ended. Its traceback:\n{text}")
    late = [rank for rank in range(size) if rank not in outcome.results]
    if late:
        raise TransferTimeout(
            f"ranks {late} of {size} were not done after {timeout:g} s and were ended. "
            "Give a longer timeout, or look for what they wait for.",
            late,
        )


def _main(
    fn: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    timeout: float,
    pipe: Connection,
    args: tuple[Any, ...],
) -> None:
    """The life of one process."""
    threading.Thread(target=_die_with_parent, name="die-with-parent", daemon=True).start()
    lock = threading.Lock()

    def tell(kind: str, value: Any) -> None:
        with lock:
            pipe.send((kind, value))

    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))
        result = fn(Worker(rank, size, store, lambda event: tell("event", event)), *args)
        tell("result", result)
    except BaseException:  # noqa: BLE001 - whatever it was, the parent is told in full
        tell("failed", traceback.format_exc())
    pipe.close()


def _die_with_parent() -> None:
    """A benchmark whose parent was SIGKILLed leaves nothing behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
