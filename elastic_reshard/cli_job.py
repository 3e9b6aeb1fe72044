"""The commands about a job: `elastic-reshard supervisor | status`, and those of `cli_watch`, `cli_ask` and `cli_change`.
None of them imports torch."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from elastic_reshard import cli_ask, cli_change
from elastic_reshard.cli_common import JobName, Json, Url, client_of, out, say, table
from elastic_reshard.cli_watch import watch
from elastic_reshard.errors import ProtocolError

if TYPE_CHECKING:
    from elastic_reshard.protocol.view import Told
    from elastic_reshard.supervisor.answers import HostDoc

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (supervisor, status, watch, *cli_ask.COMMANDS, *cli_change.COMMANDS):
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
    network: Annotated[
        str, typer.Option(help='What carries bytes between hosts: "auto", "gloo", "nccl" or "nccl_m2n".')
    ] = "auto",
    json_: Json = False,
) -> None:
    """Run the supervisor of a job until SIGTERM or SIGINT. Started again with the same journal, it goes on."""
    from elastic_reshard.protocol.deadlines import Policies
    from elastic_reshard.protocol.places import job_folder
    from elastic_reshard.protocol.processes import serviceable
    from elastic_reshard.supervisor.server import Options, Supervisor

    serviceable()
    _log_to_stderr()
    policies = Policies(
        min_groups=min_groups,
        late_after=late_after,
        max_lag=max_lag,
        gather_window=gather_window,
        install=install_within,
        network=network,
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
    with client_of(url, job) as client:
        view, health, hosts, growth = client.view(), client.health(), client.hosts(), client.growing()
    if json_:
        found = {
            "health": health,
            "view": view.model_dump(mode="json"),
            "hosts": {name: doc.model_dump(mode="json") for name, doc in hosts.items()},
            "grow": growth.model_dump(mode="json") if growth is not None else None,
        }
        out.print_json(json.dumps(found))
        return
    out.print(f"job {health['job']} at {client.url}", markup=False, highlight=False)
    out.print(Group(_tables(view), _hosts_table(hosts)))
    if growth is not None and not growth.done:
        wanted = f"{growth.groups} groups" if growth.groups else f"{growth.members} members"
        say(f"grow {growth.name} waits for {growth.missing} of {wanted}, {growth.left:.0f} s more")


def _tables(view: Told) -> RenderableType:
    head = f"term {view.term}, revision {view.revision}, epoch {view.membership_epoch}, committed {view.committed or 'nothing'}"
    groups = table("groups", "group", "roles", "state", "ranks", "serves", "reason")
    for name, g in view.groups.items():
        if g is not None:
            there = f"{sum(bool(m) for m in g.members)}/{g.size}"
            serves = f"v{g.serving}" if g.serving else "-"
            groups.add_row(name, "+".join(sorted(g.roles)), g.state, there, serves, g.refused or g.reason)
    members = table("members", "member", "group", "rank", "host", "state", "reason")
    for name, m in view.members.items():
        if m is not None:
            members.add_row(name, m.group, str(m.rank), m.host, m.state, m.reason)
    publications = table("publications", "publication", "version", "label", "group", "state", "reason")
    for name, p in view.publications.items():
        if p is not None:
            publications.add_row(name, f"v{p.weight_version}", p.label or "-", p.group, p.state, p.reason)
    return Group(Text(head), groups, members, publications, _transfers_table(view))


def _transfers_table(view: Told) -> RenderableType:
    transfers = table("transfer in hand", "transfer", "publication", "epoch", "state", "movers", "from", "to", "reason")
    for name, t in view.transfers.items():
        if t is not None:
            to = ", ".join(sorted({party.group for party in t.destinations}))
            there = f"{len(t.present)}/{len(t.members)}"
            transfers.add_row(name, t.publication, str(t.epoch), t.state, there, t.source.group, to, t.reason)
    return transfers if transfers.row_count else Text("no transfer in hand")


def _hosts_table(hosts: dict[str, HostDoc]) -> RenderableType:
    made = table("hosts", "host", "connection", "members", "movers")
    for name, host in hosts.items():
        members = ", ".join(f"{member} {state}" for member, state in host.members.items())
        movers = ", ".join(f"{member} {said.state}, {said.cells} cells" for member, said in host.movers.items())
        state = ("connected" if host.connected else "cut") + (", drained" if host.drained is not None else "")
        made.add_row(name, state, members or "-", movers or "-")
    return made
