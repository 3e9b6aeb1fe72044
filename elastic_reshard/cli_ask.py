"""The commands that ask about a job: `elastic-reshard show | events | ready | openapi`. None of them imports torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from elastic_reshard.cli_common import JobName, Json, Url, client_of, out, say, table
from elastic_reshard.errors import ProtocolError

if TYPE_CHECKING:
    from elastic_reshard.supervisor.answers import ProgressDoc
    from elastic_reshard.supervisor.client import SupervisorClient
    from elastic_reshard.supervisor.record import EventRecord

__all__ = ["COMMANDS"]

_Rows = Iterable[tuple[str, ...]]


def _members(docs: Mapping[str, Any]) -> _Rows:
    return ((k, d.group, str(d.rank), d.where, d.state, _asked(d.leave_within), d.reason) for k, d in docs.items())


def _groups(docs: Mapping[str, Any]) -> _Rows:
    for name, d in docs.items():
        there = f"{sum(bool(m) for m in d.members)}/{d.size}"
        serves = f"v{d.serving}" if d.serving else "-"
        yield name, "+".join(sorted(d.roles)), d.state, there, serves, d.refused or d.reason


def _publications(docs: Mapping[str, Any]) -> _Rows:
    return ((k, f"v{d.weight_version}", d.label or "-", d.group, d.state, d.reason) for k, d in docs.items())


def _transfers(docs: Mapping[str, Any]) -> _Rows:
    for name, d in docs.items():
        to = ", ".join(sorted({party.group for party in d.destinations}))
        there = f"{len(d.present)}/{len(d.members)}"
        yield name, d.publication, str(d.epoch), d.state, there, d.source.group, to, d.reason


def _hosts(docs: Mapping[str, Any]) -> _Rows:
    for name, d in docs.items():
        members = ", ".join(f"{member} {state}" for member, state in d.members.items())
        yield name, "connected" if d.connected else "cut", _asked(d.drained), members or "-"


def _grows(docs: Mapping[str, Any]) -> _Rows:
    for name, d in docs.items():
        wanted = f"{d.groups} groups" if d.groups else f"{d.members} members"
        state = "taken back" if d.cancelled else "done" if d.done else f"{d.left:.0f} s more"
        yield name, wanted, state, str(d.missing), ", ".join(d.admitted or d.ready) or "-"


def _progress(docs: Mapping[str, ProgressDoc]) -> _Rows:
    for name, d in docs.items():
        yield name, f"v{d.weight_version}", d.state, "", _landed(d.cells, d.of), f"{d.nbytes / 1e6:.1f} MB"
        for group, g in d.groups.items():
            yield "", "", g.state, group, _landed(g.cells, g.of), f"{g.nbytes / 1e6:.1f} MB"


def _landed(cells: int, of: int) -> str:
    return f"{cells}/{of} ({100 * cells // of} %)" if of else "-"


def _asked(within: float | None) -> str:
    return "-" if within is None else f"within {within:g} s"


# What can be shown: how it is asked for, the columns, and the rows.
_SHOWN: Final[
    dict[str, tuple[Callable[[SupervisorClient], Mapping[str, Any]], tuple[str, ...], Callable[[Any], _Rows]]]
] = {
    "members": (
        lambda client: client.members(), ("member", "group", "rank", "host", "state", "to leave", "reason"), _members,
    ),
    "groups": (lambda client: client.groups(), ("group", "roles", "state", "ranks", "serves", "reason"), _groups),
    "publications": (
        lambda client: client.publications(),
        ("publication", "version", "label", "group", "state", "reason"), _publications,
    ),
    "progress": (
        lambda client: client.progress(),
        ("publication", "version", "state", "group", "cells landed", "received"), _progress,
    ),
    "transfers": (
        lambda client: client.transfers(),
        ("transfer", "publication", "epoch", "state", "movers", "from", "to", "reason"), _transfers,
    ),
    "hosts": (lambda client: client.hosts(), ("host", "connection", "drained", "members"), _hosts),
    "grows": (lambda client: client.grows(), ("grow", "wanted", "state", "missing", "groups"), _grows),
}  # fmt: skip


def _kinds(incomplete: str) -> list[str]:
    return [kind for kind in _SHOWN if kind.startswith(incomplete)]


def show(
    what: Annotated[str, typer.Argument(help=" | ".join(_SHOWN), autocompletion=_kinds)],
    name: Annotated[str | None, typer.Argument(help="One of them only.")] = None,
    url: Url = None,
    job: JobName = None,
    json_: Json = False,
) -> None:
    """One kind of what there is: members, groups, publications, their progress, transfers, hosts, grows."""
    if what not in _SHOWN:
        raise ProtocolError(f"{what!r} cannot be shown; there are {', '.join(_SHOWN)}")
    ask, columns, rows = _SHOWN[what]
    with client_of(url, job) as client:
        docs = ask(client)
    if name is not None:
        if name not in docs:
            raise ProtocolError(f"no {name!r} among the {what}; there are {', '.join(docs) or 'none'}")
        docs = {name: docs[name]}
    if json_:
        out.print_json(json.dumps({key: doc.model_dump(mode="json") for key, doc in docs.items()}))
        return
    made = table(what, *columns)
    for row in rows(docs):
        made.add_row(*row)
    out.print(made)


def events(
    after: Annotated[int, typer.Option(min=0, help="Only those with higher numbers.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens, until interrupted.")] = False,
    seconds: Annotated[
        float | None, typer.Option("--for", min=0, help="With --follow: end after so many seconds.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Without --follow: the last so many.")] = 100,
    url: Url = None,
    job: JobName = None,
    json_: Json = False,
) -> None:
    """What happened, oldest first; with --json one line for each."""
    with suppress(KeyboardInterrupt), client_of(url, job) as client:
        found = client.follow(after, seconds=seconds) if follow else _last(client, after, limit)
        for event in found:
            if json_:
                sys.stdout.write(event.model_dump_json() + "\n")
                sys.stdout.flush()
            else:
                said = " ".join(f"{k}={v}" for k, v in event.fields.items())
                say(f"{event.number:>6} {event.time} {event.event} {said}")


def _last(client: SupervisorClient, after: int, limit: int) -> list[EventRecord]:
    found: list[EventRecord] = []
    while True:
        page = client.events(after, 1000)
        found = [*found, *page.events][-limit:]
        if not page.events:
            return found
        after = page.next


def ready(url: Url = None, job: JobName = None, json_: Json = False) -> None:
    """Whether the supervisor decides. Exit code 0: it does; 1: it does not, or nobody answers, and why."""
    with client_of(url, job) as client:
        client.ready()
    if json_:
        out.print_json(json.dumps({"ready": True}))
    else:
        say("ready")


def openapi(url: Url = None, job: JobName = None, json_: Json = True) -> None:
    """The description of the supervisor's HTTP interface, with examples. Always JSON."""
    with client_of(url, job) as client:
        sys.stdout.write(json.dumps(client.openapi(), indent=2) + "\n")


COMMANDS = (show, events, ready, openapi)
