"""The commands about a job: `elastic-reshard supervisor | status | watch | leave | drain | shrink | grow`. None of them
imports torch."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic_reshard.errors import ProtocolError, SupervisorUnreachable

if TYPE_CHECKING:
    from elastic_reshard.protocol.docs import MemberDoc
    from elastic_reshard.protocol.view import Told
    from elastic_reshard.supervisor.answers import Departure, HostDoc
    from elastic_reshard.supervisor.client import SupervisorClient

__all__ = ["add_to"]

# Into a file or a pipe tables go at full width.
_out, _err = Console(width=None if sys.stdout.isatty() else 200), Console(stderr=True)

Url = Annotated[str | None, typer.Option("--url", help="The supervisor; else $ELASTIC_RESHARD_URL or this machine's.")]
_POLL = 2.0  # seconds of one long poll
JobName = Annotated[str | None, typer.Option("--job", help="Which job, if this machine has several.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Within = Annotated[float, typer.Option(min=0, max=86_400, help="Seconds that they have; then they are left out.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return when the supervisor has taken it in.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (supervisor, status, watch, leave, drain, shrink, grow):
        app.command()(command)


def supervisor(
    job: Annotated[str, typer.Option(help="The job's name.")] = "job",
    host: Annotated[str, typer.Option(help="Where to listen. Only this machine can reach 127.0.0.1.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one, which is printed.")] = 29700,
    journal: Annotated[
        Path | None,
        typer.Option(help="What a restart needs to know. Default: in the runtime folder, which a reboot may empty."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the job's token; else $ELASTIC_RESHARD_TOKEN, else one is made and kept."),
    ] = None,
    min_groups: Annotated[int, typer.Option(min=0, help="Destination groups that a commit needs.")] = 1,
    late_after: Annotated[
        float, typer.Option(min=0, help="Seconds after which a commit waits for nobody else.")
    ] = 30.0,
    max_lag: Annotated[
        int | None, typer.Option(min=0, help="Versions that a group in time may be behind when one begins.")
    ] = None,
    gather_window: Annotated[
        float, typer.Option(min=0, help="Seconds that a publish waits for its other ranks.")
    ] = 5.0,
    install_within: Annotated[float, typer.Option(min=1, help="Most seconds of one install of a group.")] = 120.0,
    recover_from_members: Annotated[
        int, typer.Option(min=0, help="The journal is lost: wait until so many members have said what they have.")
    ] = 0,
    cell_bytes: Annotated[
        int, typer.Option(min=16, max=1 << 30, help="Of what moves between hosts at once; the same at every start.")
    ] = 1 << 20,
    full: Annotated[
        bool, typer.Option("--verify-full", help="Digests of every byte between hosts, not of samples.")
    ] = False,
    json_: Json = False,
) -> None:
    """Run the supervisor of a job until SIGTERM or SIGINT. Started again with the same journal, it goes on."""
    from elastic_reshard.protocol.deadlines import Policies
    from elastic_reshard.protocol.places import job_folder
    from elastic_reshard.supervisor.server import Options, Supervisor

    _log_to_stderr()
    policies = Policies(
        min_groups=min_groups,
        late_after=late_after,
        max_lag=max_lag,
        gather_window=gather_window,
        install=install_within,
    )
    options = Options(
        job=job, host=host, port=port, journal=journal or job_folder(job) / "journal.sqlite", token=_token(token_file),
        policies=policies, recover_from=recover_from_members, cell=cell_bytes, verify="full" if full else "sampled",
    )  # fmt: skip
    asked = threading.Event()
    _on_signals(asked)
    running = Supervisor(options)
    try:
        told = {"job": job, "url": running.url, "term": running.term, "instance": running.instance, "pid": os.getpid()}
        line = json.dumps(told) if json_ else f"supervisor of job {job}, term {running.term}, at {running.url}"
        print(line, flush=True)
        while not asked.wait(0.2) and not running.wait(0):
            pass
    finally:
        running.close(over=False)
    running.wait(0)


def _on_signals(asked: threading.Event) -> None:
    def ask(_: int, __: FrameType | None) -> None:
        asked.set()

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)


def _log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("elastic_reshard").setLevel(logging.INFO)


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ProtocolError(f"token file {path} cannot be read: {error.strerror}") from error


def status(url: Url = None, job: JobName = None, json_: Json = False) -> None:
    """Groups, members, publications and hosts of a job, and the transfer in hand, now."""
    with _client(url, job) as client:
        view, health, hosts, growth = client.view(), client.health(), client.hosts(), client.growing()
    if json_:
        found = {
            "health": health,
            "view": view.model_dump(mode="json"),
            "hosts": {name: doc.model_dump(mode="json") for name, doc in hosts.items()},
            "grow": growth.model_dump(mode="json") if growth is not None else None,
        }
        _out.print_json(json.dumps(found))
        return
    _out.print(f"job {health['job']} at {client.url}", markup=False, highlight=False)
    _out.print(Group(_tables(view), _hosts_table(hosts)))
    if growth is not None and not growth.done:
        wanted = f"{growth.groups} groups" if growth.groups else f"{growth.members} members"
        _say(f"grow {growth.name} waits for {growth.missing} of {wanted}, {growth.left:.0f} s more")


def watch(
    url: Url = None,
    job: JobName = None,
    seconds: Annotated[float | None, typer.Option("--for", min=0, help="End after so many seconds.")] = None,
    json_: Json = False,
) -> None:
    """Show a job as it changes, until interrupted; with --json one line for each change: the documents that changed."""
    until = None if seconds is None else time.monotonic() + seconds
    with suppress(KeyboardInterrupt), _client(url, job) as client:
        views = _views(client, until, _interrupted())
        if json_:
            before: dict[str, Any] = {}
            for found in views:
                now = {"unreachable": found} if isinstance(found, str) else found.model_dump(mode="json")
                print(json.dumps(_difference(before, now)), flush=True)
                before = now if "unreachable" not in now else before
            return
        with Live(console=_out, auto_refresh=False) as live:
            last: RenderableType = Text("")
            for found in views:
                if isinstance(found, str):
                    live.update(Group(last, Text(found, style="red")), refresh=True)
                else:
                    last = _tables(found)
                    live.update(last, refresh=True)


def _interrupted() -> threading.Event:
    """Set by SIGINT, which interrupts as before: Python drops an exception that meets a finalizer, but not what is set."""
    found = threading.Event()

    def interrupt(_: int, __: FrameType | None) -> None:
        found.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    return found


def _views(client: SupervisorClient, until: float | None, over: threading.Event) -> Iterator[Told | str]:
    """Every view that is new, and once each time that nobody answers, why."""
    seen, away, known = (0, 0), False, 0
    while not over.is_set() and (left := _POLL if until is None else until - time.monotonic()) > 0:
        try:
            view = client.view(after=known, wait=min(left, _POLL))
        except SupervisorUnreachable as error:
            if not away:
                yield str(error)
            away = True
            time.sleep(min(left, 0.25))
            continue
        away, known = False, view.revision
        if (view.term, view.revision) != seen:
            seen = (view.term, view.revision)
            yield view


def _difference(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What a line of `watch --json` says: of documents those that changed, None for those that are gone."""
    changed = {}
    for key, value in now.items():
        if not isinstance(value, dict):
            changed[key] = value
            continue
        old = before.get(key, {})
        differing: dict[str, Any] = {k: v for k, v in value.items() if old.get(k) != v}
        changed[key] = differing | {k: None for k in old if k not in value}
    return changed


def leave(
    name: Annotated[str, typer.Argument(metavar="MEMBER_OR_GROUP", help="A group, a member's id, or its name.")],
    within: Annotated[float, typer.Option(min=0, help="Seconds that it has; then it is left out.")] = 30.0,
    force: Annotated[bool, typer.Option("--force", help="It is left out at once, whatever it is doing.")] = False,
    url: Url = None,
    job: JobName = None,
    json_: Json = False,
) -> None:
    """Ask a member, or all members of a group, to leave. Returns when the supervisor has taken it in."""
    with _client(url, job) as client:
        group, members = _named(client.view(), name)
        if group:
            asked = client.leave_group(name, within, force)
        else:
            asked = {member: client.leave_member(member, within, force) for member in members}
    if json_:
        _out.print_json(json.dumps({k: doc.model_dump(mode="json") for k, doc in asked.items()}))
        return
    done = "was left out" if force else f"was asked to leave within {within:g} s"
    for key, doc in asked.items():
        _say(f"{key} (rank {doc.rank} of {doc.group}) {done}")


def drain(
    host: Annotated[str, typer.Argument(help="A host's label, as `status` shows it.")],
    within: Within = 30.0,
    no_wait: NoWait = False,
    url: Url = None,
    job: JobName = None,
    json_: Json = False,
) -> None:
    """Ask all members of a host to leave, and wait until they are out: then it may be turned off. May be repeated."""
    with _client(url, job) as client:
        parting = client.drain(host, within, wait=not no_wait)
    _show(parting, f"host {host}", json_)


def shrink(
    groups: Annotated[list[str], typer.Argument(metavar="GROUP...", help="Groups that leave together.")],
    within: Within = 30.0,
    no_wait: NoWait = False,
    url: Url = None,
    job: JobName = None,
    json_: Json = False,
) -> None:
    """Ask all members of these groups to leave, by one change, and wait until they are out."""
    with _client(url, job) as client:
        parting = client.shrink(groups, within, wait=not no_wait)
    _show(parting, ", ".join(groups), json_)


def grow(
    groups: Annotated[int, typer.Option(min=0, help="How many whole new groups.")] = 0,
    members: Annotated[int, typer.Option(min=0, help="Or: how many new members.")] = 0,
    within: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds; then those that are there come in.")
    ] = 60.0,
    name: Annotated[str | None, typer.Option(help="Of this request: repeated, it is the same one.")] = None,
    no_wait: NoWait = False,
    url: Url = None,
    job: JobName = None,
    json_: Json = False,
) -> None:
    """Hold who joins until so many are there, then admit them by one change. Exit code 1 if fewer came."""
    if (groups > 0) == (members > 0):
        raise ProtocolError("say how many: --groups N or --members N, one of them")
    with _client(url, job) as client:
        growth = client.grow(groups=groups, members=members, within=within, name=name, wait=not no_wait)
    if json_:
        _out.print_json(growth.model_dump_json())
    elif growth.done:
        _say(f"admitted: {', '.join(growth.admitted) or 'nobody'}")
    else:
        _say(f"grow {growth.name} waits for {growth.missing} more, {growth.left:.0f} s")
    if growth.done and growth.missing:
        wanted = f"{groups} groups" if groups else f"{members} members"
        _complain(f"{growth.missing} of {wanted} did not come within {within:g} s; start them and grow again")
        raise typer.Exit(1)


def _show(parting: Departure, what: str, as_json: bool) -> None:
    """How far a drain or shrink is."""
    if as_json:
        _out.print_json(parting.model_dump_json())
        return
    for key, doc in parting.members.items():
        _say(f"{key} (rank {doc.rank} of {doc.group} on {doc.host}) {_where(doc, parting)}")
    _say(f"{what}: {'all are out' if parting.done else f'{len(parting.missing)} still in'}")
    if parting.holding:
        _complain(
            f"versions in the memory of {', '.join(parting.holding)} are still needed; a host that goes before a newer "
            "one is committed takes them with it"
        )


def _where(doc: MemberDoc, parting: Departure) -> str:
    if doc.id not in parting.missing:
        return "is out"
    return f"was asked to leave within {doc.leave_within or 0:g} s"


def _say(line: str) -> None:
    _out.print(line, markup=False, highlight=False, soft_wrap=True)


def _complain(line: str) -> None:
    _err.print(f"elastic-reshard: {line}", style="red", markup=False, highlight=False, soft_wrap=True)


def _named(view: Told, name: str) -> tuple[bool, Sequence[str]]:
    """(whether it is a group, the members if it is none). ProtocolError for an unknown or ambiguous name."""
    from elastic_reshard.protocol.ids import name_of

    if name in view.members:
        return False, [name]
    by_name = [member for member in view.members if name_of(member) == name]
    if name in view.groups and by_name and any(_group_of(view, member) != name for member in by_name):
        raise ProtocolError(f"{name} is a group and the name of {', '.join(by_name)}; say the member's whole id")
    if name in view.groups:
        return True, []
    if len(by_name) == 1:
        return False, by_name
    known = ", ".join([*view.groups, *view.members][:32]) or "none"
    if by_name:
        raise ProtocolError(f"{name} is the name of several members: {', '.join(by_name)}; say one's whole id")
    raise ProtocolError(f"no member and no group {name!r}; there are: {known}")


def _group_of(view: Told, member: str) -> str:
    doc = view.members[member]
    return doc.group if doc is not None else ""


def _client(url: str | None, job: str | None) -> SupervisorClient:
    from elastic_reshard.supervisor.client import SupervisorClient

    return SupervisorClient.found(url, job=job)


def _tables(view: Told) -> RenderableType:
    head = f"term {view.term}, revision {view.revision}, epoch {view.membership_epoch}, committed {view.committed or 'nothing'}"
    groups = _table("groups", "group", "roles", "state", "ranks", "serves", "reason")
    for name, g in view.groups.items():
        if g is not None:
            there = f"{sum(bool(m) for m in g.members)}/{g.size}"
            serves = f"v{g.serving}" if g.serving else "-"
            groups.add_row(name, "+".join(sorted(g.roles)), g.state, there, serves, g.refused or g.reason)
    members = _table("members", "member", "group", "rank", "host", "state", "reason")
    for name, m in view.members.items():
        if m is not None:
            members.add_row(name, m.group, str(m.rank), m.host, m.state, m.reason)
    publications = _table("publications", "publication", "version", "label", "group", "state", "reason")
    for name, p in view.publications.items():
        if p is not None:
            publications.add_row(name, f"v{p.weight_version}", p.label or "-", p.group, p.state, p.reason)
    return Group(Text(head), groups, members, publications, _transfers_table(view))


def _transfers_table(view: Told) -> RenderableType:
    transfers = _table(
        "transfer in hand", "transfer", "publication", "epoch", "state", "movers", "from", "to", "reason"
    )
    for name, t in view.transfers.items():
        if t is not None:
            to = ", ".join(sorted({party.group for party in t.destinations}))
            there = f"{len(t.present)}/{len(t.members)}"
            transfers.add_row(name, t.publication, str(t.epoch), t.state, there, t.source.group, to, t.reason)
    return transfers if transfers.row_count else Text("no transfer in hand")


def _hosts_table(hosts: dict[str, HostDoc]) -> RenderableType:
    table = _table("hosts", "host", "connection", "members", "movers")
    for name, host in hosts.items():
        members = ", ".join(f"{member} {state}" for member, state in host.members.items())
        movers = ", ".join(f"{member} {said.state}, {said.cells} cells" for member, said in host.movers.items())
        table.add_row(name, "connected" if host.connected else "cut", members or "-", movers or "-")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
