"""What a person who looks at the elastic demo sees: the supervisor's view and events, followed by a thread of its own.

It only reads. Lines come from two sides: what the demo says that it does, and what the supervisor says that happened.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, Self

from elastic_reshard.bench.play import Pages
from elastic_reshard.bench.stage import Stage
from elastic_reshard.protocol.docs import TransferDoc
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor.answers import HostDoc
from elastic_reshard.supervisor.client import SupervisorClient
from elastic_reshard.supervisor.record import EventRecord

__all__ = ["Line", "Moment", "Sight", "plain"]

_LOOK: Final = 0.2  # seconds between two looks where nothing happens
Kind = Literal["step", "calm", "fault", "found", "back", "change", "wrong"]


@dataclass(frozen=True)
class Line:
    """Something that happened. at: seconds since the demo began."""

    at: float
    kind: Kind
    text: str

    def to_data(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"at": round(self.at, 3)}


@dataclass(frozen=True)
class Moment:
    """All that a screen shows at one moment. transfer: the one in hand; landed: cells that each member has received in it."""

    seconds: float
    view: Told
    hosts: Mapping[str, HostDoc]
    transfer: TransferDoc | None
    landed: Mapping[str, int]
    lines: tuple[Line, ...]


def plain(text: str) -> str:
    """A reason for a person: members by their names, without their incarnations."""
    return re.sub(r"@[0-9a-f]+", "", text)


@dataclass
class _Seen:
    view: Told | None = None
    hosts: Mapping[str, HostDoc] = field(default_factory=dict)
    pages: Pages | None = None
    movers: dict[str, int] = field(default_factory=dict)


class Sight:
    """Follows a stage's supervisor until it is closed; use it as a context manager. say: is called with each line, from the
    thread that it comes from. Leaving it raises what kept it from following, if nothing else was raised before."""

    def __init__(self, stage: Stage, begun: float, say: Callable[[Line], None]) -> None:
        self._stage, self.begun, self._say = stage, begun, say
        self._client = SupervisorClient(stage.url, stage.token, patience=10.0)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._seen = _Seen()
        self._error: BaseException | None = None
        self._broken: set[str] = set()  # publications of which a transfer was broken
        self.lines: list[Line] = []
        self.offset = float("inf")  # from the supervisor's clock to this process's, as near as answers tell
        self._thread = threading.Thread(target=self._follow, name="sight", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._client.close()
        with self._lock:
            if self._seen.pages is not None:
                self._seen.pages.close()
        if error is None and self._error is not None:
            raise self._error

    def tell(self, kind: Kind, text: str) -> None:
        """One more line."""
        line = Line(time.monotonic() - self.begun, kind, text)
        with self._lock:
            self.lines.append(line)
        self._say(line)

    def when(self, event: EventRecord) -> float:
        """An event's time, of time.monotonic here."""
        return event.at + self.offset

    def moment(self) -> Moment | None:
        """What there is to see now; None before the first look."""
        with self._lock:
            seen = self._seen
            if seen.view is None:
                return None
            transfer = next((t for t in seen.view.transfers.values() if t is not None), None)
            glances = seen.pages.look() if seen.pages is not None and transfer is not None else {}
            landed = {member: glance.cells for member, glance in glances.items()}
            return Moment(
                time.monotonic() - self.begun, seen.view, dict(seen.hosts), transfer, landed, tuple(self.lines)
            )

    # -- following

    def _follow(self) -> None:
        after = 0
        try:
            while not self._over.is_set():
                page = self._client.events(after, 1000, wait=_LOOK)
                now = time.monotonic()
                after = page.next
                view, hosts = self._client.view(), self._client.hosts()
                with self._lock:
                    self.offset = min([self.offset, *(now - e.at for e in page.events)])
                    self._seen.view, self._seen.hosts = view, hosts
                    self._map(self._stage.movers())
                for kind, text in self._news(page.events):
                    self.tell(kind, text)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where the sight is left
            self._error = error

    def _map(self, movers: dict[str, int]) -> None:
        if movers == self._seen.movers:
            return
        if self._seen.pages is not None:
            self._seen.pages.close()
        self._seen.pages, self._seen.movers = Pages(movers), movers

    def _news(self, events: Iterable[EventRecord]) -> Iterable[tuple[Kind, str]]:
        for e in events:
            f = e.fields
            match e.event:
                case "transfer.breaking":
                    self._broken.add(f["publication"])
                    yield "found", f"the transfer is broken off: {plain(f['reason'])}"
                case "transfer.running" if f["publication"] in self._broken:
                    yield "back", f"formed anew in epoch {f['epoch']}; what has landed is not moved again"
                case "group.left_behind" if "groups" in f:
                    yield "found", f"late: the others go on without {', '.join(f['groups'])}"
                case "host.silent" if f["members"]:
                    yield "found", f"host {f['host']} is silent and given up"
                case "publication.abandoned":
                    yield "found", f"version {f['version']} is abandoned: {plain(f['reason'])}"
                case "group.partial":
                    yield "found", f"{f['group']} is PARTIAL: {plain(f['reason'])}"
