"""Networks: how bytes go between domains. Two small interfaces: messages, each by itself (gloo), and groups of sends and
receives of device memory, in the order of a stream (NCCL).

A network moves whole buffers between members in order per pair. It knows nothing of plans, tensors or arenas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from elastic_reshard.arena.device import Device, Stream
from elastic_reshard.arena.strided import Strided
from elastic_reshard.errors import PeerLost, TransferTimeout
from elastic_reshard.transport.polling import whole_ms

__all__ = ["Evidence", "GlooNetwork", "GroupedNetwork", "Network", "Pending"]

# Says which of the members are known to have ended; waits a moment for evidence to come up.
Evidence = Callable[[], tuple[int, ...]]

# torch takes tags as signed 32-bit integers; the sequence widens to Python's and is folded into this range.
_TAGS = 1 << 30


class Pending(Protocol):
    """A send or receive under way. Its buffer must not be touched until `wait` has returned."""

    def wait(self, deadline: float) -> None:
        """Block until done, at most until `deadline` (time.monotonic). Raises PeerLost or TransferTimeout."""


class Network(Protocol):
    """Sends and receives of flat, contiguous uint8 CPU tensors. One thread uses it at a time.

    waiting_since: when (time.monotonic) the wait for a message began that goes on now, else None.

    Every message of a pair and direction has a sequence number; a send meets the receive of the same number, in whatever
    order they are started.
    """

    waiting_since: float | None

    def reserve(self, peer: int, sends: int, receives: int) -> tuple[int, int]:
        """Take numbers for messages that will be started out of order: the first of each. Both ends reserve alike."""

    def send(self, peer: int, buffer: torch.Tensor, number: int | None = None) -> Pending:
        """Start a send of the next number, or of a reserved one; returns at once."""

    def receive(self, peer: int, buffer: torch.Tensor, number: int | None = None) -> Pending:
        """Start a receive of exactly the buffer's size; returns at once."""

    def close(self) -> None:
        """Close all connections, so that no peer waits for this member. Idempotent; does not block."""


@runtime_checkable
class GroupedNetwork(Protocol):
    """Groups of sends and receives of flat, contiguous bytes in one device's memory. One thread uses it at a time.

    Groups are launched on one stream, so they meet in order: all members that take part in two groups launch them in the
    same order. Copies and digests on that stream come between them as they were launched. waiting_since: as Network's.
    """

    waiting_since: float | None

    @property
    def device(self) -> Device:
        """Whose memory it moves."""

    @property
    def stream(self) -> Stream:
        """On which everything is launched."""

    def exchange(
        self, sends: Sequence[tuple[int, Strided]], receives: Sequence[tuple[int, Strided]], deadline: float
    ) -> Pending:
        """Launch one group of (peer, bytes). Per pair and direction the buffers of both ends meet in the order given, and
        sizes must agree. Returns when it is launched, `deadline` (time.monotonic) at most. Raises as `Pending.wait`."""

    def point(self) -> Pending:
        """All that has been launched on the stream up to now."""

    def close(self) -> None:
        """Leave, so that no peer waits for this member where the backend can tell it. Idempotent."""


class _GlooPending:
    """Holds the Work: dropping it would cancel the transfer without a word (measured)."""

    __slots__ = ("_evidence", "_network", "_peer", "_what", "_work")

    def __init__(self, work: dist.Work, peer: int, what: str, network: GlooNetwork) -> None:
        self._work, self._peer, self._what, self._network = work, peer, what, network
        self._evidence = network.evidence

    def wait(self, deadline: float) -> None:
        now = self._network.waiting_since = time.monotonic()
        try:
            # A wait that times out closes every pair of the group: the transfer is over anyway then.
            self._work.wait(whole_ms(deadline - now))
        except RuntimeError as error:
            raise self._failure(deadline, error) from error
        finally:
            self._network.waiting_since = None

    def _failure(self, deadline: float, error: RuntimeError) -> PeerLost | TransferTimeout:
        late = time.monotonic() >= deadline
        ended = self._evidence()
        if ended:
            names = ", ".join(map(str, ended))
            return PeerLost(
                f"member {names} ended during a transfer (seen while this member was {self._what} member {self._peer}). "
                "Destination tensors may be half written; form a new group without it and refit again",
                ended,
            )
        if late:
            return TransferTimeout(
                f"the deadline passed while {self._what} member {self._peer}, which has neither ended nor moved its "
                "bytes; see whether it is frozen, or give a longer deadline",
                (self._peer,),
            )
        return PeerLost(
            f"the connection to member {self._peer} closed while {self._what} it; no process that can be seen from here "
            f"has ended, so the cause may be another member that gave up ({str(error).splitlines()[0][:160]})",
            (self._peer,),
        )


class GlooNetwork:
    """gloo, over a process group built directly: no default group is needed, and one process can hold several.

    Forming it is collective over all members and connects every pair, so no first use can hang on a member that is
    gone; blocks until `timeout` seconds have passed. `interface`: a network device by name ("lo"), None for the one that
    gloo chooses (GLOO_SOCKET_IFNAME, else the host name's).
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        interface: str | None,
        evidence: Evidence,
        first_sequence: int = 0,
    ) -> None:
        self.evidence = evidence
        self.waiting_since: float | None = None
        self._sent: dict[int, int] = dict.fromkeys(range(size), first_sequence)
        self._received: dict[int, int] = dict.fromkeys(range(size), first_sequence)
        self._rank, self._size = rank, size
        options = dist.ProcessGroupGloo._Options()
        options._timeout = whole_ms(timeout)
        if interface is not None:
            options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
        else:
            options._devices = [dist.ProcessGroupGloo.create_default_device()]
        begun = time.monotonic()
        try:
            self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            late = time.monotonic() >= begun + timeout
            ended = evidence()
            said = f"member {rank} could not connect to all of {size} members (it had {timeout:.1f} s): "
            if ended:
                raise PeerLost(
                    f"{said}member {', '.join(map(str, ended))} ended; form the group anew without it", ended
                ) from error
            others = tuple(m for m in range(size) if m != rank)
            kind = TransferTimeout if late else PeerLost
            raise kind(said + str(error).splitlines()[0][:200], others) from error

    def reserve(self, peer: int, sends: int, receives: int) -> tuple[int, int]:
        first = self._sent[peer], self._received[peer]
        self._sent[peer] += sends
        self._received[peer] += receives
        return first

    def send(self, peer: int, buffer: torch.Tensor, number: int | None = None) -> Pending:
        tag = (self.reserve(peer, 1, 0)[0] if number is None else number) % _TAGS
        return self._start(lambda g: g.send([buffer], peer, tag), peer, "sending to")

    def receive(self, peer: int, buffer: torch.Tensor, number: int | None = None) -> Pending:
        tag = (self.reserve(peer, 0, 1)[1] if number is None else number) % _TAGS
        return self._start(lambda g: g.recv([buffer], peer, tag), peer, "receiving from")

    def _start(self, begin: Callable[[dist.ProcessGroupGloo], dist.Work], peer: int, what: str) -> Pending:
        if self._group is None:
            raise PeerLost(f"the network of member {self._rank} is closed; form a new one", (peer,))
        try:
            return _GlooPending(begin(self._group), peer, what, self)
        except RuntimeError as error:
            raise PeerLost(
                f"the connection to member {peer} is closed ({str(error).splitlines()[0][:160]}); form a new group",
                self.evidence() or (peer,),
            ) from error

    def close(self) -> None:
        group, self._group = self._group, None
        if group is None or self._size == 1:
            return
        # Neither abort() nor shutdown() frees a blocked operation; a wait that times out closes every pair (measured). Of a
        # peer whose pair is closed already the receive fails at once and closes nothing: so each is tried.
        for step in range(1, self._size):
            peer = (self._rank + step) % self._size
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _TAGS + 1).wait(timedelta(milliseconds=1))
