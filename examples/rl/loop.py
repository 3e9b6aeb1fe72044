"""An engine rank's loop, in a process of its own: it samples, and is the member of the job. Started by `rl.engine`.

Both ranks of a tensor-parallel group run it. Before each turn rank 0 tells what it is: WORK on a ticket, IDLE, HOLD (pause)
or LEAVE, so that both stop at the same point. While it is held, and only then, its driver may say `install`.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

import elastic_reshard as er
from elastic_reshard.errors import GroupBroken, NotAMember, NothingInstallable, RefitTimeout
from rl.broadcast import Listener
from rl.buffer import Chunk, Weights
from rl.grpo import batch_of
from rl.model import build, tensor_parallel, tensors
from rl.sample import rollout
from rl.settings import RunFailed, Settings
from rl.task import Task

__all__ = ["Loop", "Receiver", "main"]

_TURN = 1.0  # seconds without anything to do, after which rank 0 says so


class _Op(IntEnum):
    WORK, IDLE, HOLD, LEAVE = range(4)


class Receiver(Protocol):
    """How new weights come in."""

    def install(self, timeout: float) -> Mapping[str, Any]:
        """Put the newest version into the live tensors: as `er.Member.install`."""
        ...

    def leave(self) -> None:
        """Go in good order."""
        ...


class Loop:
    """One rank. The main thread computes and installs, one thread listens to the driver, one to the job."""

    def __init__(self, pipe: Connection, given: Mapping[str, Any]) -> None:
        self.settings: Settings = given["settings"]
        self.group: er.Group = given["group"]
        self.owner: str = given["owner"]
        self._pipe, self._sending = pipe, threading.Lock()
        self._inbox: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._pausing: int | None = None  # the command that is to be answered when it is held
        self._leaving = threading.Event()
        self._ticket: int | None = None
        self._asked = False
        self._weights: Weights | None = None
        self._begin(given)

    def _begin(self, given: Mapping[str, Any]) -> None:
        seat, settings = self.group, self.settings
        store = meet(given["store"], seat, self.say)
        dist.init_process_group(
            "gloo", store=PrefixStore("tp", store), rank=seat.rank, world_size=seat.size,
            timeout=timedelta(seconds=settings.start),
        )  # fmt: skip
        self.task = Task()
        self.model = tensor_parallel(build(self.task, settings.seed), init_device_mesh("cpu", (seat.size,)))
        threading.Thread(target=self._listen, name="driver", daemon=True).start()
        if "seat" in given:
            self._receiver: Receiver = self._join(given)
        else:
            self._receiver = Listener(self.model, self.group, settings, given["world"])

    def _join(self, given: Mapping[str, Any]) -> er.Member:
        seat = given["seat"]
        member = er.join(
            seat.url, token=seat.token, host=seat.host, runtime=self.settings.runtime, role="destination",
            name=f"{self.group.name}-{self.group.rank}", group=self.group, tensors=lambda: tensors(self.model),
            deadline=self.settings.start,
        )  # fmt: skip
        self.say("joined", member.id)
        threading.Thread(target=self._watch, args=(member,), name="watch", daemon=True).start()
        return member

    # -- other threads

    def say(self, what: str, *words: Any) -> None:
        """To the actor. Any thread."""
        with self._sending:
            self._pipe.send((what, *words))

    def _listen(self) -> None:
        try:
            while True:
                self._inbox.put(self._pipe.recv())
        except (EOFError, OSError):
            os._exit(3)  # whoever drives it is gone

    def _watch(self, member: er.Member) -> None:
        try:
            for event in member.watch():
                if event.kind == "leave":
                    self._leaving.set()
                    self._inbox.put(("wake",))
                self.say("event", event.kind, event.weight_version)
        except NotAMember as error:
            print(f"{self.owner} was put out: {error}", file=sys.stderr, flush=True)
            os._exit(4)  # it would sample from old weights for ever: its group is started again

    # -- the main thread

    def run(self) -> None:
        """Until it is asked to leave. It begins held: there are no weights yet."""
        try:
            self._hold()
            while not self._turn():
                pass
        except RuntimeError as error:
            if not self._leaving.is_set():  # the other rank was quicker to leave
                raise
            print(f"while leaving: {error}", file=sys.stderr)
        self._receiver.leave()
        self.say("left")

    def _turn(self) -> bool:
        """One turn, the same on all ranks; whether it was the last."""
        said = torch.tensor(self._decide() if self.group.rank == 0 else (0, 0))
        dist.broadcast(said, src=0)
        op, ticket = _Op(int(said[0])), int(said[1])
        if op is _Op.WORK:
            self._work(ticket)
        elif op is _Op.HOLD:
            self._hold()
        return op is _Op.LEAVE

    def _decide(self) -> tuple[int, int]:
        """Of rank 0. Waits a second at most."""
        deadline = time.monotonic() + _TURN
        while True:
            if self._leaving.is_set():
                return _Op.LEAVE, 0
            if self._pausing is not None:
                return _Op.HOLD, 0
            if self._ticket is not None:
                ticket, self._ticket = self._ticket, None
                return _Op.WORK, ticket
            if not self._asked:
                self.say("ask")
                self._asked = True
            try:
                what, *words = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return _Op.IDLE, 0
            if what == "ticket":
                self._asked, self._ticket = False, words[0]
            elif what == "pause":
                self._pausing = words[0]
            elif what in ("install", "resume"):
                self._answer(words[0], "refused", f"{what} of {self.owner}, which is not paused")

    def _work(self, ticket: int) -> None:
        settings, weights = self.settings, self._weights
        if weights is None:
            raise RunFailed(f"{self.owner} was to sample without weights")
        prompts = self.task.prompts(settings.prompts, _generator(settings.seed, ticket, 0))
        seed = int(torch.randint(2**62, (), generator=_generator(settings.seed, ticket, 1)))
        batch = batch_of(rollout(self.model, self.task, prompts, settings.samples, seed), self.task, weights.version)
        if self.group.rank == 0:
            arrays = [x.numpy() for x in (batch.prompts, batch.answers, batch.logprobs, batch.rewards)]
            self.say("samples", Chunk(ticket, self.owner, weights, *arrays))

    def _hold(self) -> None:
        """Paused: nothing is computed until `resume`."""
        if self._pausing is not None:
            self._answer(self._pausing, "paused")
            self._pausing = None
        while True:
            if self._leaving.is_set():
                return
            what, *words = self._inbox.get()
            if what == "pause":
                self._answer(words[0], "paused")
            elif what == "install":
                self._install(*words)
            elif what == "resume":
                if self._weights is None:
                    self._answer(words[0], "refused", f"{self.owner} has no weights to go on with")
                    continue
                self._answer(words[0], "resumed")
                return
            elif what == "ticket":
                self._asked, self._ticket = False, words[0]

    def _install(self, command: int, timeout: float) -> None:
        """In this thread, so that nothing else touches the weights. After GroupBroken there are none until the next."""
        try:
            result = dict(self._receiver.install(timeout))
        except (GroupBroken, NothingInstallable, RefitTimeout) as error:
            if not isinstance(error, NothingInstallable):
                self._weights = None
            self._answer(command, "refused", f"{type(error).__name__}: {error}")
            return
        extras = result["extras"]
        self._weights = Weights(str(extras["line"]), int(extras["step"]), int(result["weight_version"]))
        if result["label"] != f"step-{self._weights.step}":
            raise RunFailed(f"{self.owner} was told {result['label']} with the extras of step {self._weights.step}")
        if self.group.rank == 0:
            self.say("serves", self._weights)
        self._answer(command, "installed", result)

    def _answer(self, command: int, what: str, about: Any = None) -> None:
        self.say("answer", command, what, about)


def meet(at: tuple[str, int] | None, seat: er.Group, say: Any) -> TCPStore:
    """The store of this attempt: rank 0 makes it and says where it is."""
    if seat.rank > 0:
        if at is None:
            raise RunFailed(f"rank {seat.rank} of {seat.name} was not told where to meet")
        return TCPStore(at[0], at[1], is_master=False, timeout=timedelta(seconds=60))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    say("store", ("127.0.0.1", store.port))
    return store


def _generator(seed: int, ticket: int, use: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + ticket) * 2 + use)


def main(descriptor: int) -> None:
    """With the pipe of the actor that started it."""
    torch.set_num_threads(1)
    pipe = Connection(descriptor)
    Loop(pipe, pipe.recv()).run()
    # Ends without the interpreter's own end: threads of gloo and Ray's pipe have nothing left to say.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
