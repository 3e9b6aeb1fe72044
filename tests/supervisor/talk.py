"""What a watchdog would say to a supervisor, said by a test over a real socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any

from websockets.sync.client import ClientConnection, connect

from elastic_reshard.layout.fragments import fragment_id
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.messages import Beat, Ended, Fill, GroupSpec, Hello, Stated, Statement
from elastic_reshard.protocol.view import Farewell, Heard, Told, View, read_down
from elastic_reshard.supervisor.server import Supervisor

__all__ = ["QUICK", "Host", "body", "fill", "key", "name", "statement", "until"]

QUICK = Deadlines(
    beat=0.1, evict=0.5, watchdog_beat=0.05, watchdog_silent=0.5, connect=0.5, proof_of_death=0.5, orphan_hold=1.0,
    reregister=0.6,
)  # fmt: skip


def body(rows: int = 4, name: str = "w") -> dict[str, Any]:
    """The fragment of a rank that holds one tensor whole."""
    return {"whole": False, "tensors": {name: {"plain": [[rows, 4], "float32"]}}}


def key(rows: int = 4, name: str = "w") -> str:
    """Its id."""
    return fragment_id(body(rows, name))


def name(rank: int, start: int = 0, group: str = "trainer") -> str:
    """A member's id."""
    return f"{group}-{rank}@{start * 1000 + rank:016x}"


def statement(
    rank: int, number: int, *, group: str = "trainer", size: int = 2, start: int = 0, **more: Any
) -> Statement:
    """A source rank's statement."""
    wanted: dict[str, Any] = {
        "member": name(rank, start, group), "group": GroupSpec(name=group, size=size, rank=rank), "roles": {"source"},
        "host": "a", "pid": 1, "number": number, "source": key(),
    }  # fmt: skip
    return Statement(**(wanted | more))


def fill(seq: int, **more: Any) -> Fill:
    """An offered slot."""
    wanted: dict[str, Any] = {"slot": 0, "generation": 2 * seq, "seq": seq, "fragment": key(), "label": "step"}
    return Fill(arena="ab" * 16, **(wanted | more))


def until(condition: Callable[[], bool], what: str, within: float = 10.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.005)


class Host:
    """One host's connection, with a replica of the view."""

    def __init__(
        self, supervisor: Supervisor, host: str = "a", *, connection: socket.socket | None = None, **hello: Any
    ) -> None:
        self.host = host
        self.view = View()
        self.heard: dict[str, int] = {}
        self.farewell: Farewell | None = None
        self.snapshots = 0
        self._said: dict[str, Statement] = {s.member: s for s in hello.get("statements", ())}
        self._stack, self._raw = ExitStack(), connection
        self.socket: ClientConnection = self._stack.enter_context(
            connect(
                supervisor.url.replace("http", "ws") + "/v1/host",
                additional_headers={"Authorization": f"Bearer {supervisor.token}"},
                compression=None,
                max_size=None,
                close_timeout=1.0,
                sock=connection,
                max_queue=1 if connection else 64,
            )
        )
        said: dict[str, Any] = {"job": supervisor.job, "host": host, "machine": "m", "watchdog": "ab"}
        self.say(Hello(**(said | hello)))

    def say(self, message: Hello | Stated | Ended | Beat) -> None:
        self.socket.send(message.model_dump_json())

    def state(self, *statements: Statement) -> None:
        for one in statements:
            self._said[one.member] = one
            self.say(Stated(statement=one))

    def _count_alike(self) -> None:
        """What members do by themselves: count as their group does, and say so."""
        for said in list(self._said.values()):
            group = self.view.groups.get(said.group.name)
            seated = group is not None and group.seats(said.member, said.group.rank)
            if group is not None and seated and group.count_from > said.count_from:
                self.state(said.model_copy(update={"count_from": group.count_from}))

    def publish(self, seq: int, number: int, **more: Any) -> tuple[Statement, Statement]:
        """Statements of the trainer group that offer its publish `seq`."""
        offered = fill(self.view.groups["trainer"].count_from + seq, **more)
        both = (statement(0, number, fills=(offered,)), statement(1, number, fills=(offered,)))
        self.state(*both)
        return both

    def listen(self, condition: Callable[[], bool], within: float = 10.0) -> None:
        """Take in what comes until a condition holds."""
        deadline = time.monotonic() + within
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"not within {within} s; view {self.view.snapshot()}, heard {self.heard}"
            message = read_down(self.socket.recv(timeout=left))
            if isinstance(message, Told):
                self.snapshots += message.base == 0
                assert self.view.apply(message), f"gap: {message.base} after {self.view.revision}"
                self._count_alike()
            elif isinstance(message, Heard):
                assert message.revision <= self.view.revision, "heard before the view that shows it"
                self.heard.update(message.numbers)
            else:
                self.farewell = message

    def admitted(self, statements: Sequence[Statement]) -> None:
        """State and wait until all of them are LIVE."""
        self.state(*statements)
        members = [s.member for s in statements]
        self.listen(lambda: all(m in self.view.members and self.view.members[m].state == "live" for m in members))

    @contextmanager
    def beating(self) -> Iterator[None]:
        """With beats, for as long as the block takes."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(0.2):
                self.say(Beat())

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        if self._raw is not None:
            # The client library would wait for what it does not read.
            with suppress(OSError):
                self._raw.shutdown(socket.SHUT_RDWR)
        self._stack.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
