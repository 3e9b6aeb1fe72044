"""What a supervisor can be asked, described once for both clients: what is sent and how the answer is read. No I/O.

A description is a `Call`, or a generator of calls that is sent each answer in turn and returns the result.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar, cast
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from elastic_reshard.errors import (
    LayoutError,
    ProtocolError,
    RefitTimeout,
    ReshardError,
    SupervisorUnreachable,
    Unauthorized,
)
from elastic_reshard.layout.fragments import canonical, fragment_id
from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.protocol.docs import GroupDoc, MemberDoc, PublicationDoc, TransferDoc
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor.answers import Departure, Growth, HealthData, HostDoc, ProgressDoc
from elastic_reshard.supervisor.record import EventPage

__all__ = ["GRACE", "Call", "Steps", "again", "broken_off", "read"]

T = TypeVar("T")
W = TypeVar("W", Departure, Growth)
Steps = Generator["Call[Any]", Any, T]
# Seconds: the most that one call is asked to wait; and what the supervisor may take beyond a time that it was given.
_LONGEST_WAIT = 30.0
GRACE = 5.0


@dataclass(frozen=True)
class Call(Generic[T]):
    """One call. wait: seconds that the supervisor is asked to wait; key: the name under which it acts once; refused: what is
    raised if the supervisor does not take it."""

    method: str
    path: str
    reader: Callable[[bytes], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None
    content: bytes | None = None
    wait: float = 0.0
    key: str = ""
    refused: type[ReshardError] = ProtocolError

    @property
    def repeatable(self) -> bool:
        """Whether it may be sent again when it is not known what became of it."""
        return self.method == "GET" or bool(self.key)

    @property
    def request(self) -> dict[str, Any]:
        """For httpx."""
        found: dict[str, Any] = {"method": self.method, "url": self.path, "params": dict(self.params)}
        if self.key:
            found["headers"] = {"Idempotency-Key": self.key}
        if self.data is not None:
            found["json"] = self.data
        if self.content is not None:
            found["content"] = self.content
        return found


# -- reading answers


def read(call: Call[T], answer: httpx.Response, url: str) -> T:
    """What the answer says. Raises Unauthorized, SupervisorUnreachable (503), or what the call says for one that is refused;
    ProtocolError for an answer of somebody else."""
    if answer.status_code == 401:
        raise Unauthorized(f"{_said(answer)} ({url})")
    if answer.status_code == 503:
        raise SupervisorUnreachable(f"{call.method} {call.path}: {_said(answer)} ({url})")
    if answer.is_error:
        kind = ProtocolError if answer.status_code >= 500 else call.refused
        raise kind(f"{call.method} {call.path}: {answer.status_code}: {_said(answer)}")
    try:
        return call.reader(answer.content)
    except (ValidationError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, ReshardError):
            raise
        raise ProtocolError(f"{url} is no supervisor, or one of another version: {error}") from error


def broken_off(call: Call[Any], error: httpx.TransportError, url: str) -> SupervisorUnreachable:
    """Nobody answered."""
    return SupervisorUnreachable(
        f"the supervisor at {url} did not answer {call.method} {call.path}: {type(error).__name__}: {error}. Is it running, "
        "and can this machine reach it? Groups go on serving what they have"
    )


def again(call: Call[Any], error: BaseException) -> bool:
    """Whether the call may be tried again after this. What was never sent may always; else a call may have been taken in."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return True
    return call.repeatable and isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)


def _said(answer: httpx.Response) -> str:
    """The detail of a problem document, or the beginning of whatever came instead."""
    try:
        return str(answer.json()["detail"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return answer.text[:200]


def _as(kind: Any) -> Callable[[bytes], Any]:
    return TypeAdapter(kind).validate_json


def _plain(raw: bytes) -> dict[str, Any]:
    return dict(json.loads(raw))


def _policies(raw: bytes) -> Policies:
    return Policies(**_plain(raw))


_view = _as(Told)
_member, _members = _as(MemberDoc), _as(dict[str, MemberDoc])
_groups = _as(dict[str, GroupDoc])
_hosts, _host = _as(dict[str, HostDoc]), _as(HostDoc)
_growth, _maybe_growth, _growths = _as(Growth), _as(Growth | None), _as(dict[str, Growth])
_publication, _publications = _as(PublicationDoc), _as(dict[str, PublicationDoc])
_progress, _all_progress = _as(ProgressDoc), _as(dict[str, ProgressDoc])
_transfer, _transfers = _as(TransferDoc), _as(dict[str, TransferDoc])
_departure, _page = _as(Departure), _as(EventPage)


def _in(*parts: str) -> str:
    """A path, whatever is in the names."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def _named(request_id: str | None) -> str:
    return request_id or uuid.uuid4().hex


# -- reading


def health() -> Steps[HealthData]:
    """status, job, term, instance, protocol, revision, hosts, deadlines, cell (bytes), verify."""
    found = yield Call("GET", "/v1/health", _plain)
    if "job" not in found:
        raise Unauthorized("the supervisor does not know this token; see $ELASTIC_RESHARD_TOKEN")
    return cast(HealthData, found)


def ready() -> Call[bool]:
    """True. SupervisorUnreachable that says why, while the supervisor decides nothing."""
    return Call("GET", "/v1/ready", lambda raw: bool(_plain(raw)["ready"]))


def openapi() -> Call[dict[str, Any]]:
    """The description of the HTTP interface, with examples."""
    return Call("GET", "/openapi.json", _plain)


def view(after: int = 0, wait: float = 0.0) -> Call[Told]:
    """The whole view; waits up to `wait` seconds (30 at most) for a revision other than `after`."""
    return Call("GET", "/v1/view", _view, {"after": after, "wait": wait}, wait=wait)


def members() -> Call[dict[str, MemberDoc]]:
    """Members by id."""
    return Call("GET", "/v1/members", _members)


def groups() -> Call[dict[str, GroupDoc]]:
    """Groups by name."""
    return Call("GET", "/v1/groups", _groups)


def hosts() -> Call[dict[str, HostDoc]]:
    """Hosts by label: whether connected or drained, their members, and what was last heard of the movers of these."""
    return Call("GET", "/v1/hosts", _hosts)


def publications() -> Call[dict[str, PublicationDoc]]:
    """Publications by id."""
    return Call("GET", "/v1/publications", _publications)


def progress() -> Call[dict[str, ProgressDoc]]:
    """How far each publication is, by id: cells and bytes that landed, by group."""
    return Call("GET", "/v1/progress", _all_progress)


def transfers() -> Call[dict[str, TransferDoc]]:
    """Transfers in hand by id: one at most."""
    return Call("GET", "/v1/transfers", _transfers)


def transfer(key: str) -> Call[TransferDoc]:
    """One transfer. ProtocolError if it is over."""
    return Call("GET", _in("transfers", key), _transfer)


def growing() -> Call[Growth | None]:
    """The grow under way, or the last one that is done; None if there was none."""
    return Call("GET", "/v1/grow", _maybe_growth)


def grows() -> Call[dict[str, Growth]]:
    """Grows that are remembered, by name; the one under way comes last."""
    return Call("GET", "/v1/grows", _growths)


def events(after: int = 0, limit: int = 100, wait: float = 0.0, instance: str = "") -> Call[EventPage]:
    """One page of events with numbers above `after`, oldest first; waits up to `wait` seconds (30 at most) for one. `follow`
    tells them one by one as they happen. instance: by which `after` counts; a supervisor that was started since tells all."""
    params = {"after": after, "limit": limit, "wait": wait, "instance": instance}
    return Call("GET", "/v1/events", _page, params, wait=wait)


def policies() -> Call[Policies]:
    """What the supervisor decides by."""
    return Call("GET", "/v1/policies", _policies)


def layout(key: str) -> Call[dict[str, Any]]:
    """A layout's body: "tensors" by name, "correspondences" or None."""
    return Call("GET", _in("layouts", key), _plain)


# -- acting. request_id: a name for the call; sent again under its name it acts no second time. None: one is made


def set_policies(policies: Policies, *, request_id: str | None = None) -> Call[Policies]:
    """Other policies; restarts of the supervisor keep them."""
    return Call("PUT", "/v1/policies", _policies, data=asdict(policies), key=_named(request_id))


def change_policies(*, request_id: str | None = None, **changes: float | int | str | None) -> Call[Policies]:
    """Some policies by name, as late_after=10.0; the others stay. Restarts of the supervisor keep them."""
    return Call("PATCH", "/v1/policies", _policies, data=changes, key=_named(request_id))


def reset_policies(*, request_id: str | None = None) -> Call[Policies]:
    """The policies that the supervisor was started with."""
    return Call("DELETE", "/v1/policies", _policies, key=_named(request_id))


def leave_member(
    member: str, within: float = 30.0, force: bool = False, *, request_id: str | None = None
) -> Call[MemberDoc]:
    """Ask a member to leave within so many seconds; force: it is left out at once, whatever it is doing. Returns when
    the supervisor has taken it in."""
    data = {"within": within, "force": force}
    return Call("POST", _in("members", member, "leave"), _member, data=data, key=_named(request_id))


def leave_group(
    group: str, within: float = 30.0, force: bool = False, *, request_id: str | None = None
) -> Call[dict[str, MemberDoc]]:
    """Ask all members of a group to leave within so many seconds; force: they are left out at once."""
    data = {"within": within, "force": force}
    return Call("POST", _in("groups", group, "leave"), _members, data=data, key=_named(request_id))


def drain(host: str, within: float = 30.0, wait: bool = True, *, request_id: str | None = None) -> Steps[Departure]:
    """Ask all members of a host to leave within so many seconds, and whoever joins it later too, until `undrain`; who does
    not leave is left out. Idempotent: who was asked before with as many seconds keeps that deadline. Before the host is
    turned off, see `holding` of the answer.

    wait: block until all are out, at most `within` and about 5 s; RefitTimeout names who is still in. ProtocolError for
    a host that nobody knows."""
    call = Call("POST", _in("hosts", host, "drain"), _departure, data={"within": within}, key=_named(request_id))
    return _parted(call, f"host {host}", within, wait)


def undrain(host: str, *, request_id: str | None = None) -> Call[HostDoc]:
    """Lift a drain: members that were asked only because of it and are still in may stay. ProtocolError for a host that nobody
    knows."""
    return Call("DELETE", _in("hosts", host, "drain"), _host, key=_named(request_id))


def shrink(
    groups: Sequence[str], within: float = 30.0, wait: bool = True, *, request_id: str | None = None
) -> Steps[Departure]:
    """Ask all members of these groups to leave within so many seconds, by one change; who does not is left out.

    wait: as for `drain`. ProtocolError that names every unknown group: then nothing was done."""
    data = {"groups": list(groups), "within": within}
    call = Call("POST", "/v1/groups/shrink", _departure, data=data, key=_named(request_id))
    return _parted(call, f"groups {', '.join(groups)}", within, wait)


def grow(
    *,
    groups: int = 0,
    members: int = 0,
    within: float = 60.0,
    name: str | None = None,
    wait: bool = True,
    request_id: str | None = None,
) -> Steps[Growth]:
    """Have the next `groups` whole new groups, or the next `members` new members, admitted by one change: who joins is
    held until so many are there, or until `within` seconds have passed; then those that are there come in.

    name: of this request; one that is repeated under its name begins nothing anew. wait: block until it is done, at most
    `within` and about 5 s (RefitTimeout); `missing` of the answer says how many did not come. ProtocolError unless one
    of groups and members is given, or while another grow is under way."""
    key = name or f"grow-{uuid.uuid4().hex[:12]}"
    data = {"groups": groups, "members": members, "within": within, "name": key}
    growth = yield from _until(Call("POST", "/v1/grow", _growth, data=data, key=_named(request_id)), within, wait)
    if wait and not growth.done:
        raise RefitTimeout(
            f"grow {key}: {growth.missing} of {groups or members} {'groups' if groups else 'members'} are missing, and the "
            f"supervisor did not admit the others within {within:g} s; see its events"
        )
    return cast(Growth, growth)


def cancel_grow(name: str, *, request_id: str | None = None) -> Call[Growth]:
    """Take back a grow under way: who waits comes in as if nobody had asked. ProtocolError if it is unknown or done."""
    return Call("DELETE", _in("grow", name), _growth, key=_named(request_id))


def abandon(
    publication: str, reason: str = "abandoned by request", *, request_id: str | None = None
) -> Call[PublicationDoc]:
    """Give up a publication that moves. ProtocolError if it was committed."""
    path = _in("publications", publication, "abandon")
    return Call("POST", path, _publication, data={"reason": reason}, key=_named(request_id))


def put_fragment(body: Mapping[str, Any]) -> Call[str]:
    """Hand in a fragment's body; its id. Idempotent. LayoutError if it is none."""
    key = fragment_id(body)
    return Call("PUT", _in("fragments", key), lambda _: key, content=canonical(body), refused=LayoutError)


# -- waiting


def _parted(call: Call[Departure], what: str, within: float, wait: bool) -> Steps[Departure]:
    parting = yield from _until(call, within, wait)
    if wait and not parting.done:
        raise RefitTimeout(
            f"{what}: {', '.join(parting.missing)} did not leave within {within:g} s, and the supervisor did not leave "
            "them out; see `elastic-reshard status`, or let them leave by force",
            parting.missing,
        )
    return parting


def _until(call: Call[W], within: float, wait: bool) -> Steps[W]:
    """The same call until it is done or its time is over: repeated, it begins nothing anew."""
    until = time.monotonic() + within + GRACE
    while True:
        left = max(0.0, min(_LONGEST_WAIT, until - time.monotonic())) if wait else 0.0
        found: W = yield Call(call.method, call.path, call.reader, {"wait": left}, call.data, wait=left, key=call.key)
        if found.done or not wait or time.monotonic() >= until:
            return found
