"""What the commands about a job have in common: options, how a supervisor is found, names for the shell's completion."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from elastic_reshard.errors import ReshardError

if TYPE_CHECKING:
    from elastic_reshard.supervisor.client import SupervisorClient

__all__ = [
    "JobName",
    "Json",
    "NoWait",
    "RequestId",
    "Url",
    "client_of",
    "complain",
    "err",
    "groups_there",
    "grows_there",
    "hosts_there",
    "members_and_groups_there",
    "out",
    "publications_there",
    "say",
    "table",
]

# Into a file or a pipe tables go at full width.
out, err = Console(width=None if sys.stdout.isatty() else 200, markup=False), Console(stderr=True, markup=False)
_QUICK: Final = 1.0  # seconds that a person's shell waits for names

Url = Annotated[str | None, typer.Option("--url", help="The supervisor; else $ELASTIC_RESHARD_URL or this machine's.")]
JobName = Annotated[str | None, typer.Option("--job", help="Which job, if this machine has several.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return when the supervisor has taken it in.")]
RequestId = Annotated[
    str | None,
    typer.Option("--request-id", help="A name for this: sent again under its name it is done no second time."),
]


def client_of(url: str | None, job: str | None, timeout: float = 5.0) -> SupervisorClient:
    """The client of the supervisor that is meant. ProtocolError if none is known, or several are."""
    from elastic_reshard.supervisor.client import SupervisorClient

    return SupervisorClient.found(url, job=job, timeout=timeout)


def say(line: str) -> None:
    """One line of result."""
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def complain(line: str) -> None:
    """One sentence to standard error."""
    err.print(f"elastic-reshard: {line}", style="red", markup=False, highlight=False, soft_wrap=True)


def table(title: str, *columns: str) -> Table:
    """An empty table."""
    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


# -- completion: nothing at all where no supervisor answers at once


def _there(context: typer.Context, begun: str, names: Callable[[SupervisorClient], Iterable[str]]) -> list[str]:
    try:
        with client_of(context.params.get("url"), context.params.get("job"), _QUICK) as client:
            return [name for name in names(client) if name.startswith(begun)]
    except ReshardError:
        return []


def hosts_there(ctx: typer.Context, incomplete: str) -> list[str]:
    """Labels of hosts."""
    return _there(ctx, incomplete, lambda client: client.hosts())


def groups_there(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of groups."""
    return _there(ctx, incomplete, lambda client: client.groups())


def members_and_groups_there(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of groups, and ids of members."""
    return _there(ctx, incomplete, lambda client: [*client.groups(), *client.members()])


def publications_there(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of publications that move."""
    return _there(ctx, incomplete, lambda client: [k for k, p in client.publications().items() if p.state == "moving"])


def grows_there(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of grows under way."""
    return _there(ctx, incomplete, lambda client: [k for k, g in client.grows().items() if not g.done])
