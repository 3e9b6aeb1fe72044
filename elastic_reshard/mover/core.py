"""What a mover does about what it is told, and the task as it travels. Pure: no I/O, no clock. No torch.

Everything is level: an order is the whole TransferDoc as it is now, and doubled or overtaken ones do no harm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from pydantic import ValidationError

from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.docs import PublicationDoc, TransferDoc, TransferState
from elastic_reshard.protocol.messages import MoverSaid

__all__ = ["Abort", "Action", "Begin", "Core", "Feed", "Finish", "Given", "Hold", "Progress", "Task", "Until"]


class Given(NamedTuple):
    """An arena that came with a task. fd, memory (of a device arena, else -1): whoever takes the task closes them. writable:
    this member's own landing arena."""

    arena: str
    owner: str
    table: str
    writable: bool
    fd: int
    memory: int = -1

    @property
    def fds(self) -> tuple[int, ...]:
        """All that there are."""
        return (self.fd,) if self.memory < 0 else (self.fd, self.memory)


@dataclass(frozen=True)
class Task:
    """A transfer to take part in. layouts: bodies (GET /v1/layouts/ID) by id. device: the member's, "" for none. window: the
    descriptor of the member's window, -1 for none; closed by whoever takes the task."""

    transfer: TransferDoc
    publication: PublicationDoc
    layouts: Mapping[str, str]
    arenas: tuple[Given, ...] = ()
    device: str = ""
    window: int = -1

    @property
    def fds(self) -> tuple[int, ...]:
        """Those that go with a TASK frame."""
        found = tuple(fd for a in self.arenas for fd in a.fds)
        return found if self.window < 0 else (*found, self.window)

    def payload(self) -> bytes:
        """Of a TASK frame; `fds` go with it."""
        arenas = [[a.arena, a.owner, a.table, a.writable, len(a.fds)] for a in self.arenas]
        rest = {"layouts": dict(self.layouts), "arenas": arenas, "device": self.device, "window": self.window >= 0}
        head = f'{{"transfer":{self.transfer.model_dump_json()},"publication":{self.publication.model_dump_json()},'
        return (head + json.dumps(rest)[1:]).encode()

    @classmethod
    def read(cls, payload: bytes, fds: Sequence[int]) -> Task:
        """From a TASK frame. ProtocolError if it makes no sense; then the descriptors stay the caller's."""
        try:
            said, left = json.loads(payload), list(fds)
            window = left.pop() if said["window"] else -1
            given = []
            for arena, owner, table, writable, count in said["arenas"]:
                mine, left = left[:count], left[count:]
                if len(mine) != count or count not in (1, 2):
                    raise ValueError(f"{len(mine)} of {count} descriptors of arena {arena}")
                given.append(Given(str(arena), str(owner), str(table), bool(writable), *mine))
            if left:
                raise ValueError(f"{len(left)} descriptors too many")
            layouts = {str(key): str(body) for key, body in said["layouts"].items()}
            transfer = TransferDoc.model_validate(said["transfer"])
            publication = PublicationDoc.model_validate(said["publication"])
            device = str(said["device"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, ValidationError, RecursionError) as error:
            raise ProtocolError(f"a task that cannot be read: {str(error)[:500]}") from error
        return cls(transfer, publication, layouts, tuple(given), device, window)


State = Literal["starting", "ready", "running", "out"]
Outcome = Literal["none", "done", "stopped", "failed", "refused"]


@dataclass(frozen=True)
class Progress:
    """Where the work of one transfer is, said by the worker whenever it changes. Fields as in MoverSaid. A level.

    out: it has returned from every operation; its communicator may still be open."""

    transfer: str
    state: State
    outcome: Outcome = "none"
    error: str = ""
    reason: str = ""
    blames: tuple[str, ...] = ()
    config: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    began: int = 0
    held: bool = False
    cells: int = 0
    sent: int = 0
    received: int = 0
    resent: int = 0
    seconds: float = 0.0
    to_land: int = 0
    links: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Begin:
    """Start the work on this."""

    task: Task


@dataclass(frozen=True)
class Feed:
    """What the others put into the rendezvous: member -> key -> hex. All that is known."""

    values: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Hold:
    """Begin no further round; say which were begun."""


@dataclass(frozen=True)
class Until:
    """Go on to the end of this round, then be out."""

    round: int


@dataclass(frozen=True)
class Abort:
    """Get out of all operations at once."""


@dataclass(frozen=True)
class Finish:
    """The transfer is over: close its communicator. Only when out."""


Action = Begin | Feed | Hold | Until | Abort | Finish
_QUIET: Final = {
    "cells",
    "sent",
    "received",
    "resent",
    "seconds",
    "began",
    "links",
}  # told by the status page meanwhile


class Core:
    """One mover. `task` when a TASK came, `ordered` for an ORDER, `progressed` for the worker's word; each returns actions."""

    def __init__(self, member: str, mover: str) -> None:
        self.member, self.mover = member, mover
        self.task: Task | None = None
        self.progress: Progress | None = None
        self.unsaid = False  # `said` has changed in a way that is worth a report
        self._next: Task | None = None
        self._gone = False  # the transfer has left the view
        self._fed: Mapping[str, Mapping[str, str]] = {}
        self._held = self._aborted = False
        self._until: int | None = None

    @property
    def transfer(self) -> str:
        """The transfer in hand, "" for none."""
        return self.task.transfer.id if self.task is not None else ""

    @property
    def said(self) -> MoverSaid | None:
        """The report as it is now; None before the first task."""
        if self.progress is None:
            return None
        said: dict[str, Any] = {
            **self.progress.__dict__,
            "values": dict(self.progress.values),
            "links": dict(self.progress.links),
        }
        for text in ("error", "reason", "config"):
            said[text] = said[text][:4000]
        return MoverSaid(member=self.member, mover=self.mover, **said)

    def tasked(self, task: Task) -> list[Action]:
        """A transfer to take part in. Taken up when the one in hand is over."""
        if self.task is not None:
            self._next = task
            return [] if self._gone else self.ordered(None)
        return self._begin(task)

    def _begin(self, task: Task) -> list[Action]:
        self.task, self._next, self._gone = task, None, False
        self._fed, self._held, self._aborted, self._until = {}, False, False, None
        self.progress = Progress(task.transfer.id, "starting")
        self.unsaid = True
        return [Begin(task), *self.ordered(task.transfer)]

    @property
    def out(self) -> bool:
        """Whether nothing of the work is under way."""
        return self.progress is None or self.progress.state == "out"

    def ordered(self, order: TransferDoc | None) -> list[Action]:
        """The transfer as it is told now; None: it has left the view. ProtocolError for an order about another one."""
        if order is None:
            if self.task is None:
                return []
            self._gone = True
            return self._over() if self.out else self._abort()
        if self._next is not None and self._next.transfer.id == order.id:
            self._next = replace(self._next, transfer=order)
            return []
        if self.task is None or order.id != self.task.transfer.id:
            raise ProtocolError(f"an order about transfer {order.id}; in hand is {self.transfer or 'none'}")
        return [] if self.out else self._obey(order)

    def _obey(self, order: TransferDoc) -> list[Action]:
        actions: list[Action] = []
        if order.state == TransferState.BREAKING:
            return self._abort()
        met = order.state != TransferState.FORMING or all(member in order.values for member in order.present)
        if met and order.values and order.values != self._fed:
            self._fed = order.values
            actions.append(Feed(order.values))
        if order.state == TransferState.STOPPING:
            if not self._held:
                self._held = True
                actions.append(Hold())
            if order.until is not None and order.until != self._until:
                self._until = order.until
                actions.append(Until(order.until))
        return actions

    def _abort(self) -> list[Action]:
        if self._aborted:
            return []
        self._aborted = True
        return [Abort()]

    def _over(self) -> list[Action]:
        """Out, and over for the others too."""
        self.task = None
        return [Finish(), *(self._begin(self._next) if self._next is not None else [])]

    def progressed(self, progress: Progress) -> list[Action]:
        """The worker says where it is. What it says of a transfer that is over is not heard; out is final."""
        if self.task is None or progress.transfer != self.transfer or self.out:
            return []
        self.unsaid |= self.progress is None or _telling(progress) != _telling(self.progress)
        self.progress = progress
        return self._over() if progress.state == "out" and self._gone else []


def _telling(progress: Progress) -> dict[str, Any]:
    """What is reported at once when it changes."""
    told = {name: value for name, value in progress.__dict__.items() if name not in _QUIET}
    return {**told, "began": progress.began if progress.held else 0}
