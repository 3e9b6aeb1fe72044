"""Real processes for tests: run a function as every rank of a small world and collect what each returns."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["Rank", "RankFailed", "run_ranks"]

_context = multiprocessing.get_context("forkserver")
# A forkserver that has imported torch starts a rank in about 0.03 s instead of seconds.
# Where there is NCCL for Python its imports, which touch no GPU, take seconds in each rank.
_LIBRARIES = [name for name in ("cuda.bindings.driver", "nccl.core") if find_spec(name.partition(".")[0]) is not None]
_context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch.distributed.fsdp", *_LIBRARIES])


class RankFailed(AssertionError):
    """A rank raised, ended without an answer, or was late. The message has its traceback or stacks."""


@dataclass(frozen=True)
class Rank:
    """What a rank's function gets first: its number, the world's size, and where the ranks meet."""

    rank: int
    size: int
    rendezvous: str
    timeout: float

    def store(self) -> Any:
        """A torch.distributed FileStore common to all ranks; wrap it in PrefixStore for several groups."""
        from torch.distributed import FileStore

        store = FileStore(self.rendezvous, self.size)
        store.set_timeout(timedelta(seconds=self.timeout))
        return store


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 60.0,
    group: bool = True,
    lost: Collection[int] = (),
) -> list[Any]:
    """Run `fn(Rank, *args)` in `size` new processes; results in rank order. Blocks `timeout` seconds at most.

    fn, args and results must be picklable (fn: a module's function). `group`: with a default gloo group.
    `lost`: ranks that are meant to die or stop; their result is None unless they answer.
    Every process has ended when this returns or raises. Raises RankFailed for the first rank that failed.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(size):
                reader, writer = _context.Pipe(duplex=False)
                me = Rank(rank, size, f"{folder}/store", timeout)
                process = _context.Process(target=_rank_main, args=(writer, me, group, fn, args))
                process.start()
                writer.close()
                processes.append(process)
                pipes.append(reader)
            return _collect(pipes, processes, deadline, frozenset(lost), Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def _collect(
    pipes: Sequence[Connection],
    processes: Sequence[BaseProcess],
    deadline: float,
    lost: frozenset[int],
    folder: Path,
) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    open_: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    while set(open_.values()) - lost:
        ready = wait(list(open_), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(set(open_.values()) - lost)
            files = [folder / f"{rank}.stacks" for rank in late]
            stacks = "\n".join(f"{f.stem}: {f.read_text()}" for f in files if f.exists())
            raise RankFailed(f"ranks {late} did not answer in time\n{stacks}")
        for pipe in ready:
            rank = open_.pop(pipe)
            try:
                failed, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                if rank in lost:
                    continue
                processes[rank].join(5)
                code = processes[rank].exitcode
                raise RankFailed(f"rank {rank} ended without an answer, exit code {code}") from None
            if failed:
                raise RankFailed(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return results


def _rank_main(pipe: Connection, me: Rank, group: bool, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with Path(me.rendezvous).with_name(f"{me.rank}.stacks").open("w") as stacks:
        # Shortly before the deadline, so that the report of a hang shows where it hangs.
        faulthandler.dump_traceback_later(me.timeout * 0.9, file=stacks)
        try:
            pipe.send((False, _run(me, group, fn, args)))
        except BaseException:  # noqa: BLE001 - whatever it is, the parent raises it
            pipe.send((True, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    pipe.close()


def _run(me: Rank, group: bool, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch

    torch.set_num_threads(1)
    if not group:
        return fn(me, *args)
    from torch import distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("default", me.store()),
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=me.timeout),
    )
    # gloo's mesh is formed when this end is: a rank that is done at once would break another's forming by its end.
    formed = dist.PrefixStore("formed", me.store())
    formed.set(str(me.rank), "")
    formed.wait([str(rank) for rank in range(me.size)], timedelta(seconds=me.timeout))
    result = fn(me, *args)
    dist.destroy_process_group()
    return result
