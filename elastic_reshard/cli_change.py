"""The commands that change a job: `elastic-reshard leave | drain | undrain | shrink | grow | ungrow | abandon | policies`.
None of them imports torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_reshard.cli_common import (
    JobName,
    Json,
    NoWait,
    RequestId,
    Url,
    client_of,
    complain,
    groups_there,
    grows_there,
    hosts_there,
    members_and_groups_there,
    out,
    publications_there,
    say,
    table,
)
from elastic_reshard.errors import ProtocolError

if TYPE_CHECKING:
    from elastic_reshard.protocol.docs import MemberDoc
    from elastic_reshard.protocol.view import Told
    from elastic_reshard.supervisor.answers import Departure

__all__ = ["COMMANDS"]

Within = Annotated[float, typer.Option(min=0, max=86_400, help="Seconds that they have; then they are left out.")]


def leave(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MEMBER_OR_GROUP",
            help="A group, a member's id, or its name.",
            autocompletion=members_and_groups_there,
        ),
    ],
    within: Annotated[float, typer.Option(min=0, help="Seconds that it has; then it is left out.")] = 30.0,
    force: Annotated[bool, typer.Option("--force", help="It is left out at once, whatever it is doing.")] = False,
    url: Url = None,
    job: JobName = None,
    request_id: RequestId = None,
    json_: Json = False,
) -> None:
    """Ask a member, or all members of a group, to leave. Returns when the supervisor has taken it in."""
    with client_of(url, job) as client:
        group, members = _named(client.view(), name)
        if group:
            asked = client.leave_group(name, within, force, request_id=request_id)
        else:
            asked = {m: client.leave_member(m, within, force, request_id=request_id) for m in members}
    if json_:
        out.print_json(json.dumps({k: doc.model_dump(mode="json") for k, doc in asked.items()}))
        return
    done = "was left out" if force else f"was asked to leave within {within:g} s"
    for key, doc in asked.items():
        say(f"{key} (rank {doc.rank} of {doc.group}) {done}")


def drain(
    host: Annotated[
        str | None, typer.Argument(help="A host's label, as `status` shows it.", autocompletion=hosts_there)
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="All hosts of this machine, by their watchdogs: without address or token.")
    ] = False,
    within: Within = 30.0,
    no_wait: NoWait = False,
    url: Url = None,
    job: JobName = None,
    request_id: RequestId = None,
    json_: Json = False,
) -> None:
    """Ask all members of a host to leave, and wait until they are out: then it may be turned off. May be repeated.

    Whoever joins the host later is asked to leave too, until `undrain`; --here holds only for those that are there."""
    if here == (host is not None):
        raise ProtocolError("say which: a host's label, or --here for this machine")
    if host is None:
        from elastic_reshard.cli_here import drain_here

        drain_here(job, within, not no_wait, json_)
        return
    with client_of(url, job) as client:
        parting = client.drain(host, within, wait=not no_wait, request_id=request_id)
    _show(parting, f"host {host}", json_)


def undrain(
    host: Annotated[str, typer.Argument(help="A host's label, as `status` shows it.", autocompletion=hosts_there)],
    url: Url = None,
    job: JobName = None,
    request_id: RequestId = None,
    json_: Json = False,
) -> None:
    """Lift a drain: who is still in and was asked to leave only because of it may stay, and new members may join."""
    with client_of(url, job) as client:
        found = client.undrain(host, request_id=request_id)
    if json_:
        out.print_json(found.model_dump_json())
    else:
        say(f"host {host} is not drained; {len(found.members)} members are known there")


def shrink(
    groups: Annotated[
        list[str], typer.Argument(metavar="GROUP...", help="Groups that leave together.", autocompletion=groups_there)
    ],
    within: Within = 30.0,
    no_wait: NoWait = False,
    url: Url = None,
    job: JobName = None,
    request_id: RequestId = None,
    json_: Json = False,
) -> None:
    """Ask all members of these groups to leave, by one change, and wait until they are out."""
    with client_of(url, job) as client:
        parting = client.shrink(groups, within, wait=not no_wait, request_id=request_id)
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
    request_id: RequestId = None,
    json_: Json = False,
) -> None:
    """Hold who joins until so many are there, then admit them by one change. Exit code 1 if fewer came."""
    if (groups > 0) == (members > 0):
        raise ProtocolError("say how many: --groups N or --members N, one of them")
    with client_of(url, job) as client:
        growth = client.grow(
            groups=groups, members=members, within=within, name=name, wait=not no_wait, request_id=request_id
        )
    if json_:
        out.print_json(growth.model_dump_json())
    elif growth.cancelled:
        say(f"grow {growth.name} was taken back")
    elif growth.done:
        say(f"admitted: {', '.join(growth.admitted) or 'nobody'}")
    else:
        say(f"grow {growth.name} waits for {growth.missing} more, {growth.left:.0f} s")
    if growth.done and growth.missing and not growth.cancelled:
        wanted = f"{groups} groups" if groups else f"{members} members"
        complain(f"{growth.missing} of {wanted} did not come within {within:g} s; start them and grow again")
    if growth.done and growth.missing:
        raise typer.Exit(1)


def ungrow(
    name: Annotated[str, typer.Argument(help="Of a grow under way, as `show grows` says.", autocompletion=grows_there)],
    url: Url = None,
    job: JobName = None,
    request_id: RequestId = None,
    json_: Json = False,
) -> None:
    """Take back a grow under way: who waits comes in as if nobody had asked for it."""
    with client_of(url, job) as client:
        growth = client.cancel_grow(name, request_id=request_id)
    if json_:
        out.print_json(growth.model_dump_json())
    else:
        say(f"grow {name} was taken back; {', '.join(growth.ready) or 'nobody'} waited for it")


def abandon(
    publication: Annotated[
        str, typer.Argument(help="The id of a publication that moves.", autocompletion=publications_there)
    ],
    reason: Annotated[str, typer.Option(help="What its members are told.")] = "abandoned by request",
    url: Url = None,
    job: JobName = None,
    request_id: RequestId = None,
    json_: Json = False,
) -> None:
    """Give up a publication that moves: it will never be committed, and its slots are free."""
    with client_of(url, job) as client:
        doc = client.abandon(publication, reason, request_id=request_id)
    if json_:
        out.print_json(doc.model_dump_json())
    else:
        say(f"publication {publication} (v{doc.weight_version}, {doc.label or 'no label'}) is abandoned: {doc.reason}")


def policies(
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change one; may be repeated.")
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Back to what the supervisor was started with.")] = False,
    url: Url = None,
    job: JobName = None,
    request_id: RequestId = None,
    json_: Json = False,
) -> None:
    """What the supervisor decides by; changed by --set, from now on and over restarts."""
    if set_ and reset:
        raise ProtocolError("say --set or --reset, not both")
    changes = dict(_setting(text) for text in set_ or ())
    with client_of(url, job) as client:
        if reset:
            found = client.reset_policies(request_id=request_id)
        elif changes:
            found = client.change_policies(request_id=request_id, **changes)
        else:
            found = client.policies()
    plain = {name: getattr(found, name) for name in found.__dataclass_fields__}
    if json_:
        out.print_json(json.dumps(plain))
        return
    made = table("policies", "name", "value")
    for name, value in plain.items():
        made.add_row(name, "any" if value is None else str(value))
    out.print(made)


def _setting(text: str) -> tuple[str, Any]:
    """ "late_after=10" as ("late_after", 10); a value that is no JSON is text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ProtocolError(f"--set wants NAME=VALUE, as in --set late_after=10, not {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _show(parting: Departure, what: str, as_json: bool) -> None:
    """How far a drain or shrink is."""
    if as_json:
        out.print_json(parting.model_dump_json())
        return
    for key, doc in parting.members.items():
        say(f"{key} (rank {doc.rank} of {doc.group} on {doc.host}) {_where(doc, parting)}")
    say(f"{what}: {'all are out' if parting.done else f'{len(parting.missing)} still in'}")
    if parting.holding:
        complain(
            f"versions in the memory of {', '.join(parting.holding)} are still needed; a host that goes before a newer "
            "one is committed takes them with it"
        )


def _where(doc: MemberDoc, parting: Departure) -> str:
    if doc.id not in parting.missing:
        return "is out"
    return f"was asked to leave within {doc.leave_within or 0:g} s"


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


COMMANDS = (leave, drain, undrain, shrink, grow, ungrow, abandon, policies)
