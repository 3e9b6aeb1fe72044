"""The same calls to a supervisor for programs that use asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

import httpx
import tenacity
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, WebSocketException

from elastic_reshard.errors import Unauthorized
from elastic_reshard.protocol import places
from elastic_reshard.supervisor import calls
from elastic_reshard.supervisor.calls import Call, Steps
from elastic_reshard.supervisor.client import checked, settings, where
from elastic_reshard.supervisor.following import Follower
from elastic_reshard.supervisor.record import EventRecord

__all__ = ["AsyncSupervisorClient"]

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(describe: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncSupervisorClient, P], Awaitable[T]]:
    """A method that makes the described call."""

    @functools.wraps(describe)
    async def method(self: AsyncSupervisorClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.do(describe(*args, **kwargs))

    return method


def _stepping(describe: Callable[P, Steps[T]]) -> Callable[Concatenate[AsyncSupervisorClient, P], Awaitable[T]]:
    """A method that makes the described calls, one after the other."""

    @functools.wraps(describe)
    async def method(self: AsyncSupervisorClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        steps = describe(*args, **kwargs)
        call = next(steps)
        while True:
            found = await self.do(call)
            try:
                call = steps.send(found)
            except StopIteration as end:
                result: T = end.value
                return result

    return method


class AsyncSupervisorClient:
    """`SupervisorClient` for asyncio: the same methods, awaited. For one event loop; `await aclose()`, or use it as an
    asynchronous context manager. Any number of calls may be under way at once.

    url, timeout, patience, and what is raised: as for `SupervisorClient`."""

    def __init__(self, url: str, token: str, *, timeout: float = 5.0, patience: float = 0.0) -> None:
        self.url = places.base_url(url)
        self._timeout, self._patience, self._token = timeout, patience, checked(token)
        self._http = httpx.AsyncClient(**settings(self.url, token, timeout))

    @classmethod
    def found(
        cls, url: str | None = None, token: str | None = None, *, job: str | None = None, timeout: float = 5.0
    ) -> AsyncSupervisorClient:
        """With what is not given taken from $ELASTIC_RESHARD_URL, $ELASTIC_RESHARD_TOKEN and the runtime folder.

        ProtocolError if that tells of no supervisor, or of several.
        """
        return cls(*where(url, token, job), timeout=timeout)

    health = _stepping(calls.health)
    ready = _awaited(calls.ready)
    openapi = _awaited(calls.openapi)
    view = _awaited(calls.view)
    members = _awaited(calls.members)
    groups = _awaited(calls.groups)
    hosts = _awaited(calls.hosts)
    publications = _awaited(calls.publications)
    progress = _awaited(calls.progress)
    transfers = _awaited(calls.transfers)
    transfer = _awaited(calls.transfer)
    growing = _awaited(calls.growing)
    grows = _awaited(calls.grows)
    events = _awaited(calls.events)
    policies = _awaited(calls.policies)
    layout = _awaited(calls.layout)

    set_policies = _awaited(calls.set_policies)
    change_policies = _awaited(calls.change_policies)
    reset_policies = _awaited(calls.reset_policies)
    leave_member = _awaited(calls.leave_member)
    leave_group = _awaited(calls.leave_group)
    drain = _stepping(calls.drain)
    undrain = _awaited(calls.undrain)
    shrink = _stepping(calls.shrink)
    grow = _stepping(calls.grow)
    cancel_grow = _awaited(calls.cancel_grow)
    abandon = _awaited(calls.abandon)
    put_fragment = _awaited(calls.put_fragment)

    async def follow(
        self, after: int = 0, *, seconds: float | None = None, patience: float = 30.0
    ) -> AsyncIterator[EventRecord]:
        """Events as they happen, first those with numbers above `after`, as `SupervisorClient.follow`. Close it
        (`contextlib.aclosing`) when you leave it before its end."""
        follower = Follower(self.url, after, seconds, patience)
        headers = {"Authorization": f"Bearer {self._token}"}
        while not follower.over:
            try:
                async with connect(
                    follower.address, additional_headers=headers, open_timeout=self._timeout, close_timeout=1.0,
                    compression=None, proxy=None, max_size=16 << 20,
                ) as socket:  # fmt: skip
                    while not follower.over:
                        async with asyncio.timeout(follower.left):
                            message = await socket.recv()
                        for event in follower.read(message):
                            yield event
            except InvalidStatus as error:
                if error.response.status_code == 401:
                    raise Unauthorized(f"the supervisor at {self.url} does not know this token") from error
                await asyncio.sleep(follower.broke(error))
            except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
                if not follower.over:
                    await asyncio.sleep(follower.broke(error))

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncSupervisorClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def do(self, call: Call[T]) -> T:
        """Make one call, as described (`supervisor.calls`)."""
        again = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda error: calls.again(call, error)),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            stop=tenacity.stop_after_delay(self._patience),
            reraise=True,
        )
        try:
            answer: httpx.Response = await again(self._http.request, timeout=self._timeout + call.wait, **call.request)
        except httpx.TransportError as error:
            raise calls.broken_off(call, error, self.url) from error
        return calls.read(call, answer, self.url)
