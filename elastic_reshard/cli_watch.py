"""`elastic-reshard watch`: what the page shows, in a terminal; with --json what happened, an event a line. No torch."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FrameType
from typing import Annotated, Any, Final

import typer
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_reshard.errors import SupervisorUnreachable, Unauthorized

__all__ = ["watch"]

# Into a file or a pipe tables go at full width.
_out = Console(width=None if sys.stdout.isatty() else 200, markup=False)
_AGAIN: Final = 0.25  # seconds between two attempts to connect
_SILENT: Final = 5.0  # seconds without a word after which a connection counts as lost; it says something each second
_LINES: Final = 12
_STYLES: Final = {"none": "dim", "calm": "cyan", "good": "green", "late": "yellow", "bad": "bold red"}
_STATES: Final = {
    "live": "green", "current": "green", "complete": "cyan", "installing": "cyan", "landing": "cyan", "joining": "cyan",
    "leaving": "cyan", "stale": "yellow", "left_behind": "yellow", "orphaned": "yellow", "waiting": "yellow",
    "partial": "bold red", "forfeit": "bold red",
}  # fmt: skip
_KINDS: Final = ("hosts", "members", "groups", "publications")


def watch(
    url: Annotated[
        str | None, typer.Option("--url", help="The supervisor; else $ELASTIC_RESHARD_URL or this machine's.")
    ] = None,
    job: Annotated[str | None, typer.Option("--job", help="Which job, if this machine has several.")] = None,
    seconds: Annotated[float | None, typer.Option("--for", min=0, help="End after so many seconds.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print what happens, an event a line as JSON.")] = False,
) -> None:
    """Show a job as it changes, until interrupted; with --json each event in a line, those known already first."""
    until = None if seconds is None else time.monotonic() + seconds
    interrupted = _interrupted()
    with suppress(KeyboardInterrupt):
        said = _messages(url, job, until, interrupted)
        if json_:
            _print_lines(said)
        else:
            _show(said)


def _interrupted() -> threading.Event:
    """Set by SIGINT, which interrupts as before: Python drops an exception that meets a finalizer, but not what is set."""
    found = threading.Event()

    def interrupt(_: int, __: FrameType | None) -> None:
        found.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    return found


# -- what is told


def _messages(
    url: str | None, job: str | None, until: float | None, over: threading.Event
) -> Iterator[dict[str, Any] | str]:
    """What the supervisor tells, and once each time that it can't be reached, why. None lost: each connection begins whole."""
    from elastic_reshard.supervisor.client import SupervisorClient, where

    away = False
    url, token = where(url, None, job)
    with SupervisorClient(url, token) as client:
        while not over.is_set() and (until is None or time.monotonic() < until):
            try:
                client.health()  # says which is wrong, the address or the token
                for message in _connection(client.url, token, until, over):
                    away = False
                    yield message
            except SupervisorUnreachable as error:
                if not away:
                    yield str(error)
                away = True
                time.sleep(_AGAIN)


def _connection(url: str, token: str, until: float | None, over: threading.Event) -> Iterator[dict[str, Any]]:
    """Of one connection. SupervisorUnreachable when it is lost."""
    from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
    from websockets.sync.client import connect

    why = f"the supervisor at {url} did not answer"
    try:
        with connect(
            "ws" + url.removeprefix("http") + "/v1/live",
            additional_headers={"Authorization": f"Bearer {token}"},
            compression=None, max_size=None, proxy=None, open_timeout=_SILENT, close_timeout=1.0,
        ) as socket:  # fmt: skip
            while not over.is_set():
                left = _SILENT if until is None else min(_SILENT, until - time.monotonic())
                if left <= 0:
                    return
                try:
                    yield json.loads(socket.recv(timeout=left))
                except TimeoutError as error:
                    if until is None or time.monotonic() < until:
                        raise SupervisorUnreachable(f"{why} for {_SILENT:g} s; it is tried again") from error
    except InvalidStatus as error:
        if error.response.status_code == 401:
            raise Unauthorized(
                f"the supervisor at {url} does not know this token; see $ELASTIC_RESHARD_TOKEN"
            ) from error
        raise SupervisorUnreachable(f"{why}: {error}; it is tried again") from error
    except (OSError, ConnectionClosed, WebSocketException) as error:
        raise SupervisorUnreachable(f"{why}: {error}; it is tried again") from error


def _print_lines(said: Iterator[dict[str, Any] | str]) -> None:
    """Events as they come, once each; that nobody answers is a line too."""
    term, seen = 0, 0
    for message in said:
        if isinstance(message, str):
            print(json.dumps({"event": "watch.unreachable", "fields": {"reason": message}}), flush=True)
            continue
        if "job" in message and message["job"]["term"] != term:
            term, seen = message["job"]["term"], 0
        for event in message.get("events", ()):
            if event["number"] > seen:
                seen = event["number"]
                print(json.dumps({k: v for k, v in event.items() if k != "words"}), flush=True)


# -- what is shown


class _Board:
    """All that was told, put together."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []

    def take(self, news: dict[str, Any]) -> None:
        """One message."""
        if news.get("whole"):
            self.seen, self.events = dict(news), []
        for kind in _KINDS:
            for key, doc in news.get(kind, {}).items() if not news.get("whole") else ():
                if doc is None:
                    self.seen[kind].pop(key, None)
                else:
                    self.seen[kind][key] = doc
        self.seen |= {key: news[key] for key in ("at", "job", "transfer", "waits") if key in news}
        self.events = (self.events + news.get("events", []))[-1000:]

    def draw(self) -> RenderableType:
        """One picture of it."""
        seen = self.seen
        j = seen["job"]
        committed = (
            f"version {j['committed']}" + (f" ({j['label']})" if j["label"] else "") if j["committed"] else "nothing"
        )
        head = Text(f"job {j['name']}   term {j['term']}   epoch {j['epoch']}   committed {committed}", style="bold")
        return Group(head, *self._waits(), *self._transfer(), self._groups(), self._hosts(), self._lines())

    def _waits(self) -> Iterator[RenderableType]:
        for wait in self.seen["waits"][:_LINES]:
            left = "" if wait["until"] is None else f"  ({max(0.0, wait['until'] - self.seen['at']):.0f} s more)"
            text = Text.assemble((f"{wait['about']}: ", "bold"), wait["why"], (left, "dim"))
            text.stylize(_STYLES[wait["tone"]], 0, len(wait["about"]) + 1)
            yield text

    def _transfer(self) -> Iterator[RenderableType]:
        t = self.seen["transfer"]
        if t is None:
            yield Text("no bytes move between hosts", style="dim")
            return
        yield Text(
            f"version {t['version']} from {t['source']}, epoch {t['epoch']}: {t['state']} {t['reason']}", style="cyan"
        )
        table = Table.grid(padding=(0, 2))
        for group, (done, all_) in t["cells"].items():
            said = f"{done} of {all_} cells" if all_ else f"{done} cells were there; being planned"
            table.add_row(f"  {group}", ProgressBar(total=all_ or 1, completed=min(done, all_), width=40), said)
        yield table

    def _groups(self) -> RenderableType:
        table = _table("groups", "group", "state", "serves", "ranks", "hosts", "reason")
        docs: Mapping[str, Any] = self.seen["groups"]
        for name, g in sorted(docs.items(), key=lambda item: ("destination" in item[1]["roles"], item[0])):
            lands = "destination" in g["roles"]
            behind = f", {g['lag']} behind" if g["lag"] and g["serving"] else ""
            serves = (f"v{g['serving']}{behind}" if g["serving"] else "nothing") if lands else "publishes"
            table.add_row(
                name,
                _state(g["state"]),
                serves,
                f"{g['there']}/{g['size']}",
                ", ".join(g["hosts"]),
                _plain(g["reason"]),
            )
        return table

    def _hosts(self) -> RenderableType:
        table = _table("hosts", "host", "connection", "members")
        for name, host in self.seen["hosts"].items():
            mine = [(n, m) for n, m in self.seen["members"].items() if m["host"] == name]
            up = Text("connected", "green") if host["connected"] else Text("no connection", "bold red")
            table.add_row(name, up, Columns([self._member(n, m) for n, m in mine], padding=(0, 3)) if mine else "-")
        return table

    def _member(self, name: str, m: Mapping[str, Any]) -> Text:
        busy = self.seen["transfer"] is not None and m["mover"]
        waits = f", waits for {_plain(m['waits'])}" if m["waits"] else ""
        return Text.assemble(_plain(name), " ", _state(m["state"]), f" (mover {m['mover']}{waits})" if busy else "")

    def _lines(self) -> RenderableType:
        lines = [Text.assemble((e["time"][11:23] + "  ", "dim"), (e["words"][1], _STYLES[e["words"][0]]))
                 for e in self.events if e["words"] is not None]  # fmt: skip
        return Group(*lines[-_LINES:])


def _show(said: Iterator[dict[str, Any] | str]) -> None:
    board = _Board()
    with Live(console=_out, auto_refresh=False) as live:
        for message in said:
            if isinstance(message, str):
                last = board.draw() if board.seen else Text("")
                live.update(Group(last, Text(message, style="red")), refresh=True)
            else:
                board.take(message)
                live.update(board.draw(), refresh=True)


def _state(state: str) -> Text:
    return Text(state.replace("_", " "), _STATES.get(state, "dim"))


def _plain(text: str) -> str:
    from elastic_reshard.supervisor.words import plain

    return plain(text)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", header_style="dim")
    return table
