"""Calls to a supervisor, for the command line, for members and for programs. Blocking; each call has a timeout."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import tenacity
from pydantic import BaseModel, TypeAdapter, ValidationError

from elastic_reshard.errors import LayoutError, ProtocolError, RefitTimeout, SupervisorUnreachable, Unauthorized
from elastic_reshard.layout.fragments import canonical, fragment_id
from elastic_reshard.protocol import places
from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.protocol.docs import GroupDoc, MemberDoc, PublicationDoc, TransferDoc
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor.answers import Departure, Growth, HostDoc
from elastic_reshard.supervisor.record import EventPage

__all__ = ["SupervisorClient"]

T = TypeVar("T", bound=BaseModel)
D = TypeVar("D")
W = TypeVar("W", Departure, Growth)
# Seconds: the most that one call is asked to wait; and what the supervisor may take beyond a time that it was given.
_LONGEST_WAIT = 30.0
_GRACE = 5.0
_members: TypeAdapter[dict[str, MemberDoc]] = TypeAdapter(dict[str, MemberDoc])
_groups: TypeAdapter[dict[str, GroupDoc]] = TypeAdapter(dict[str, GroupDoc])
_growth: TypeAdapter[Growth | None] = TypeAdapter(Growth | None)
_hosts: TypeAdapter[dict[str, HostDoc]] = TypeAdapter(dict[str, HostDoc])
_transfers: TypeAdapter[dict[str, TransferDoc]] = TypeAdapter(dict[str, TransferDoc])
_publications: TypeAdapter[dict[str, PublicationDoc]] = TypeAdapter(dict[str, PublicationDoc])


class SupervisorClient:
    """A client of one supervisor. For one thread at a time; close it, or use it as a context manager.

    url: "127.0.0.1:29700" or with http://. timeout: seconds that one call may take, beside what it is asked to wait.
    patience: seconds for which a call is tried again while nobody listens (a supervisor that starts again); 0: not at all.

    Every method raises SupervisorUnreachable when nobody answered in time, Unauthorized when the token is wrong, and
    ProtocolError for what the supervisor refuses (LayoutError for a fragment).
    """

    def __init__(self, url: str, token: str, *, timeout: float = 5.0, patience: float = 0.0) -> None:
        self.url = places.base_url(url)
        self._timeout, self._patience = timeout, patience
        if not token.isascii() or not token.isprintable():
            raise Unauthorized("a job's token is printable ASCII; this one is not")
        # A proxy of the environment is for other machines' web, never for the job's own control plane.
        # Without TLS there is nothing to verify, and reading the certificates takes 20 ms.
        self._http = httpx.Client(
            verify=self.url.startswith("https:"),
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout,
            trust_env=False,
        )

    @classmethod
    def found(
        cls, url: str | None = None, token: str | None = None, *, job: str | None = None, timeout: float = 5.0
    ) -> SupervisorClient:
        """With what is not given taken from $ELASTIC_RESHARD_URL, $ELASTIC_RESHARD_TOKEN and the runtime folder.

        ProtocolError if that tells of no supervisor, or of several.
        """
        url = url or os.environ.get(places.URL_VARIABLE)
        token = token or os.environ.get(places.TOKEN_VARIABLE)
        if url is None or token is None:
            place = places.place_of(url, job)
            if url is None and place is None:
                raise ProtocolError(
                    "no supervisor is written down in the runtime folder; name one with --url or $ELASTIC_RESHARD_URL"
                )
            url = url or (place.url if place is not None else "")
            token = token or (place.token if place is not None else "")
            if not token:
                raise Unauthorized(
                    f"the token of the supervisor at {url} is not known here; set $ELASTIC_RESHARD_TOKEN"
                )
        return cls(url, token, timeout=timeout)

    # -- reading

    def health(self) -> dict[str, Any]:
        """status, job, term, instance, protocol, revision, hosts, deadlines, cell (bytes), verify."""
        found = self._data(self._call("GET", "/v1/health"))
        if "job" not in found:
            raise Unauthorized(f"the supervisor at {self.url} does not know this token; see $ELASTIC_RESHARD_TOKEN")
        return found

    def view(self, after: int = 0, wait: float = 0.0) -> Told:
        """The whole view; waits up to `wait` seconds (30 at most) for a revision other than `after`."""
        return self._read(Told, self._call("GET", "/v1/view", params={"after": after, "wait": wait}, wait=wait))

    def members(self) -> dict[str, MemberDoc]:
        """Members by id."""
        return self._docs(_members, self._call("GET", "/v1/members"))

    def groups(self) -> dict[str, GroupDoc]:
        """Groups by name."""
        return self._docs(_groups, self._call("GET", "/v1/groups"))

    def publications(self) -> dict[str, PublicationDoc]:
        """Publications by id."""
        return self._docs(_publications, self._call("GET", "/v1/publications"))

    def hosts(self) -> dict[str, HostDoc]:
        """Hosts by label: whether connected, their members, and what was last heard of the movers of these."""
        return self._docs(_hosts, self._call("GET", "/v1/hosts"))

    def transfers(self) -> dict[str, TransferDoc]:
        """Transfers in hand by id: one at most."""
        return self._docs(_transfers, self._call("GET", "/v1/transfers"))

    def transfer(self, key: str) -> TransferDoc:
        """One transfer. ProtocolError if it is over."""
        return self._read(TransferDoc, self._call("GET", f"/v1/transfers/{quote(key, safe='')}"))

    def growing(self) -> Growth | None:
        """The grow under way, or the last one that is done; None if there was none."""
        return self._docs(_growth, self._call("GET", "/v1/grow"))

    def events(self, after: int = 0, limit: int = 100, wait: float = 0.0) -> EventPage:
        """Events with numbers above `after`, oldest first; waits up to `wait` seconds (30 at most) for one."""
        params = {"after": after, "limit": limit, "wait": wait}
        return self._read(EventPage, self._call("GET", "/v1/events", params=params, wait=wait))

    def policies(self) -> Policies:
        """What the supervisor decides by."""
        return Policies(**self._data(self._call("GET", "/v1/policies")))

    def layout(self, key: str) -> dict[str, Any]:
        """A layout's body: "tensors" by name, "correspondences" or None."""
        return self._data(self._call("GET", f"/v1/layouts/{quote(key, safe='')}"))

    # -- acting

    def set_policies(self, policies: Policies) -> Policies:
        """Other policies, until the supervisor's next start."""
        body = {name: getattr(policies, name) for name in Policies.__dataclass_fields__}
        return Policies(**self._data(self._call("PUT", "/v1/policies", json=body)))

    def leave_member(self, member: str, within: float = 30.0, force: bool = False) -> MemberDoc:
        """Ask a member to leave within so many seconds; force: it is left out at once, whatever it is doing. Returns when
        the supervisor has taken it in."""
        path = f"/v1/members/{quote(member, safe='')}/leave"
        return self._read(MemberDoc, self._call("POST", path, json={"within": within, "force": force}))

    def leave_group(self, group: str, within: float = 30.0, force: bool = False) -> dict[str, MemberDoc]:
        """Ask all members of a group to leave within so many seconds; force: they are left out at once."""
        path = f"/v1/groups/{quote(group, safe='')}/leave"
        return self._docs(_members, self._call("POST", path, json={"within": within, "force": force}))

    def drain(self, host: str, within: float = 30.0, wait: bool = True) -> Departure:
        """Ask all members of a host to leave within so many seconds; who does not is left out. Idempotent: who was asked
        before with as many seconds keeps that deadline. Before the host is turned off, see `holding` of the answer.

        wait: block until all are out, at most `within` and about 5 s; RefitTimeout names who is still in. ProtocolError for
        a host that nobody knows."""
        path = f"/v1/hosts/{quote(host, safe='')}/drain"
        return self._parted(path, {"within": within}, f"host {host}", within, wait)

    def shrink(self, groups: Sequence[str], within: float = 30.0, wait: bool = True) -> Departure:
        """Ask all members of these groups to leave within so many seconds, by one change; who does not is left out.

        wait: as for `drain`. ProtocolError that names every unknown group: then nothing was done."""
        body = {"groups": list(groups), "within": within}
        return self._parted("/v1/groups/shrink", body, f"groups {', '.join(groups)}", within, wait)

    def grow(
        self, *, groups: int = 0, members: int = 0, within: float = 60.0, name: str | None = None, wait: bool = True
    ) -> Growth:
        """Have the next `groups` whole new groups, or the next `members` new members, admitted by one change: who joins is
        held until so many are there, or until `within` seconds have passed; then those that are there come in.

        name: of this request; one that is repeated under its name begins nothing anew. wait: block until it is done, at most
        `within` and about 5 s (RefitTimeout); `missing` of the answer says how many did not come. ProtocolError unless one
        of groups and members is given, or while another grow is under way."""
        key = name or f"grow-{uuid.uuid4().hex[:12]}"
        body = {"groups": groups, "members": members, "within": within, "name": key}
        growth = self._until(Growth, "/v1/grow", body, within, wait)
        if wait and not growth.done:
            raise RefitTimeout(
                f"grow {key}: {growth.missing} of {groups or members} {'groups' if groups else 'members'} are missing, and the "
                f"supervisor did not admit the others within {within:g} s; see its events"
            )
        return growth

    def abandon(self, publication: str, reason: str = "abandoned by request") -> PublicationDoc:
        """Give up a publication that moves. ProtocolError if it was committed."""
        path = f"/v1/publications/{quote(publication, safe='')}/abandon"
        return self._read(PublicationDoc, self._call("POST", path, json={"reason": reason}))

    def put_fragment(self, body: Mapping[str, Any]) -> str:
        """Hand in a fragment's body; its id. Idempotent. LayoutError if it is none."""
        key = fragment_id(body)
        self._call("PUT", f"/v1/fragments/{key}", content=canonical(body), refused=LayoutError)
        return key

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def __enter__(self) -> SupervisorClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- waiting

    def _parted(self, path: str, body: dict[str, Any], what: str, within: float, wait: bool) -> Departure:
        parting = self._until(Departure, path, body, within, wait)
        if wait and not parting.done:
            raise RefitTimeout(
                f"{what}: {', '.join(parting.missing)} did not leave within {within:g} s, and the supervisor did not leave "
                "them out; see `elastic-reshard status`, or let them leave by force",
                parting.missing,
            )
        return parting

    def _until(self, kind: type[W], path: str, body: dict[str, Any], within: float, wait: bool) -> W:
        """The same call until it is done or its time is over: repeated, it begins nothing anew."""
        until = time.monotonic() + within + _GRACE
        while True:
            left = max(0.0, min(_LONGEST_WAIT, until - time.monotonic())) if wait else 0.0
            found = self._read(kind, self._call("POST", path, json=body, params={"wait": left}, wait=left))
            if found.done or not wait or time.monotonic() >= until:
                return found

    # -- one call

    def _call(
        self,
        method: str,
        path: str,
        *,
        wait: float = 0.0,
        refused: type[ProtocolError] | type[LayoutError] = ProtocolError,
        **request: Any,
    ) -> httpx.Response:
        # Only what was never sent is sent again: a call that broke off may have been taken in.
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((httpx.ConnectError, httpx.ConnectTimeout)),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            stop=tenacity.stop_after_delay(self._patience),
            reraise=True,
        )
        try:
            answer: httpx.Response = again(self._http.request, method, path, timeout=self._timeout + wait, **request)
        except httpx.TransportError as error:
            raise SupervisorUnreachable(
                f"the supervisor at {self.url} did not answer {method} {path}: {type(error).__name__}: {error}. Is it running, "
                "and can this machine reach it? Groups go on serving what they have"
            ) from error
        if answer.status_code == 401:
            raise Unauthorized(f"{self._said(answer)} ({self.url})")
        if answer.status_code == 503:
            raise SupervisorUnreachable(f"{method} {path}: {self._said(answer)} ({self.url})")
        if answer.is_error:
            raise (ProtocolError if answer.status_code >= 500 else refused)(
                f"{method} {path}: {answer.status_code}: {self._said(answer)}"
            )
        return answer

    @staticmethod
    def _said(answer: httpx.Response) -> str:
        """The detail of a problem document, or the beginning of whatever came instead."""
        try:
            return str(answer.json()["detail"])
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            return answer.text[:200]

    def _read(self, kind: type[T], answer: httpx.Response) -> T:
        try:
            return kind.model_validate_json(answer.content)
        except ValidationError as error:
            raise self._foreign(error) from error

    def _docs(self, kind: TypeAdapter[D], answer: httpx.Response) -> D:
        try:
            return kind.validate_json(answer.content)
        except ValidationError as error:
            raise self._foreign(error) from error

    def _data(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            return dict(answer.json())
        except (ValueError, TypeError) as error:
            raise self._foreign(error) from error

    def _foreign(self, error: Exception) -> ProtocolError:
        return ProtocolError(f"{self.url} is no supervisor, or one of another version: {error}")
