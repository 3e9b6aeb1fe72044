"""Calls to a supervisor, for the command line, for members and for programs. Blocking; each call has a timeout."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx
import tenacity
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect

from elastic_reshard.errors import ProtocolError, Unauthorized
from elastic_reshard.protocol import places
from elastic_reshard.supervisor import calls
from elastic_reshard.supervisor.calls import Call, Steps
from elastic_reshard.supervisor.following import Follower
from elastic_reshard.supervisor.record import EventRecord

__all__ = ["SupervisorClient", "checked", "settings", "where"]

P = ParamSpec("P")
T = TypeVar("T")


def checked(token: str) -> str:
    """The token. Raises Unauthorized for what can be none."""
    if not token.isascii() or not token.isprintable():
        raise Unauthorized("a job's token is printable ASCII; this one is not")
    return token


def settings(url: str, token: str, timeout: float) -> dict[str, Any]:
    """Of both clients' connections."""
    # A proxy of the environment is for other machines' web, never for the job's own control plane.
    # Without TLS there is nothing to verify, and reading the certificates takes 20 ms.
    return {
        "verify": url.startswith("https:"),
        "base_url": url,
        "headers": {"Authorization": f"Bearer {checked(token)}"},
        "timeout": timeout,
        "trust_env": False,
    }


def where(url: str | None, token: str | None, job: str | None) -> tuple[str, str]:
    """(url, token) with what is not given taken from $ELASTIC_RESHARD_URL, $ELASTIC_RESHARD_TOKEN and the runtime folder.

    ProtocolError if that tells of no supervisor, or of several."""
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
            raise Unauthorized(f"the token of the supervisor at {url} is not known here; set $ELASTIC_RESHARD_TOKEN")
    return url, token


def _blocking(describe: Callable[P, Call[T]]) -> Callable[Concatenate[SupervisorClient, P], T]:
    """A method that makes the described call."""

    @functools.wraps(describe)
    def method(self: SupervisorClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.do(describe(*args, **kwargs))

    return method


def _stepping(describe: Callable[P, Steps[T]]) -> Callable[Concatenate[SupervisorClient, P], T]:
    """A method that makes the described calls, one after the other."""

    @functools.wraps(describe)
    def method(self: SupervisorClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        steps = describe(*args, **kwargs)
        call = next(steps)
        while True:
            try:
                call = steps.send(self.do(call))
            except StopIteration as end:
                found: T = end.value
                return found

    return method


class SupervisorClient:
    """A client of one supervisor. For one thread at a time; close it, or use it as a context manager.

    url: "127.0.0.1:29700" or with http://. timeout: seconds that one call may take, beside what it is asked to wait.
    patience: seconds for which a call is tried again while nobody listens (a supervisor that starts again); 0: not at all.

    Every method raises SupervisorUnreachable when nobody answered in time, Unauthorized when the token is wrong, and
    ProtocolError for what the supervisor refuses (LayoutError for a fragment). Calls that change something act once, however
    often they are sent; `request_id` names one, so that another process can repeat it.
    """

    def __init__(self, url: str, token: str, *, timeout: float = 5.0, patience: float = 0.0) -> None:
        self.url = places.base_url(url)
        self._timeout, self._patience, self._token = timeout, patience, checked(token)
        self._http = httpx.Client(**settings(self.url, token, timeout))

    @classmethod
    def found(
        cls, url: str | None = None, token: str | None = None, *, job: str | None = None, timeout: float = 5.0
    ) -> SupervisorClient:
        """With what is not given taken from $ELASTIC_RESHARD_URL, $ELASTIC_RESHARD_TOKEN and the runtime folder.

        ProtocolError if that tells of no supervisor, or of several.
        """
        return cls(*where(url, token, job), timeout=timeout)

    health = _stepping(calls.health)
    ready = _blocking(calls.ready)
    openapi = _blocking(calls.openapi)
    view = _blocking(calls.view)
    members = _blocking(calls.members)
    groups = _blocking(calls.groups)
    hosts = _blocking(calls.hosts)
    publications = _blocking(calls.publications)
    progress = _blocking(calls.progress)
    transfers = _blocking(calls.transfers)
    transfer = _blocking(calls.transfer)
    growing = _blocking(calls.growing)
    grows = _blocking(calls.grows)
    events = _blocking(calls.events)
    policies = _blocking(calls.policies)
    layout = _blocking(calls.layout)

    set_policies = _blocking(calls.set_policies)
    change_policies = _blocking(calls.change_policies)
    reset_policies = _blocking(calls.reset_policies)
    leave_member = _blocking(calls.leave_member)
    leave_group = _blocking(calls.leave_group)
    drain = _stepping(calls.drain)
    undrain = _blocking(calls.undrain)
    shrink = _stepping(calls.shrink)
    grow = _stepping(calls.grow)
    cancel_grow = _blocking(calls.cancel_grow)
    abandon = _blocking(calls.abandon)
    put_fragment = _blocking(calls.put_fragment)

    def follow(self, after: int = 0, *, seconds: float | None = None, patience: float = 30.0) -> Iterator[EventRecord]:
        """Events as they happen, first those with numbers above `after`; blocks until there is one. After a connection that
        broke it goes on from where it was, and after a restart of the supervisor with all that the new one tells.

        seconds: after which it ends, None: never. patience: seconds that nobody may answer, then SupervisorUnreachable.
        An event named "events.dropped" says how many were forgotten before they were read (the last 10,000 are kept)."""
        follower = Follower(self.url, after, seconds, patience)
        headers = {"Authorization": f"Bearer {self._token}"}
        while not follower.over:
            try:
                with connect(
                    follower.address, additional_headers=headers, open_timeout=self._timeout, close_timeout=1.0,
                    compression=None, proxy=None, max_size=16 << 20,
                ) as socket:  # fmt: skip
                    while not follower.over:
                        yield from follower.read(socket.recv(timeout=follower.left))
            except InvalidStatus as error:
                if error.response.status_code == 401:
                    raise Unauthorized(f"the supervisor at {self.url} does not know this token") from error
                time.sleep(follower.broke(error))
            except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
                if not follower.over:
                    time.sleep(follower.broke(error))

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def __enter__(self) -> SupervisorClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def do(self, call: Call[T]) -> T:
        """Make one call, as described (`supervisor.calls`)."""
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: calls.again(call, error)),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            stop=tenacity.stop_after_delay(self._patience),
            reraise=True,
        )
        try:
            answer: httpx.Response = again(self._http.request, timeout=self._timeout + call.wait, **call.request)
        except httpx.TransportError as error:
            raise calls.broken_off(call, error, self.url) from error
        return calls.read(call, answer, self.url)
