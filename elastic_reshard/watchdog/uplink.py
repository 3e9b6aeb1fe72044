"""A watchdog's connection to the supervisor: made again whenever it is lost, jittered; never in anybody's way."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from typing import TYPE_CHECKING, Any, Final, Protocol

from pydantic import ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random

from elastic_reshard.errors import PeerLost
from elastic_reshard.log import logger
from elastic_reshard.watchdog.core import Relay
from elastic_reshard.watchdog.hosting import Hosting

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

__all__ = ["Uplink"]

_log = logger("watchdog")
_AGAIN: Final = wait_random(0.05, 0.5)  # seconds between attempts, after the first retry
_UNAUTHORIZED: Final = 2.0  # between attempts that are refused for the token: only a new supervisor mends it
_BRIEF: Final = 1.0  # a connection that lasted less is no reason to retry at once
_LARGEST: Final = 64 << 20  # bytes of a message of the supervisor


class _Refused(PeerLost):
    """The supervisor turned the token down."""


class Reporting(Hosting, Protocol):
    """What the uplink tells its watchdog; see `service.Service`."""

    def told(self, raw: bytes) -> Relay: ...
    def ready(self) -> bool: ...
    def hello(self) -> bytes: ...
    def refresh(self) -> None: ...
    def connection_state(self, connected: bool, kind: str = "", reason: str = "") -> None: ...


class Uplink:
    """Speaks for the house: Hello, then what is unsaid, whenever there is something; a beat each `deadlines.beat`."""

    def __init__(self, service: Reporting) -> None:
        self._service = service
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._why = ""
        self._socket: ClientConnection | None = None

    @property
    def _url(self) -> str:
        scheme, _, rest = self._service.url.partition("://")
        return f"{'wss' if scheme == 'https' else 'ws'}://{rest.rstrip('/')}/v1/host"

    def wake(self) -> None:
        """Look for what is unsaid."""
        self._wake.set()

    async def run(self) -> None:
        """For ever; cancel it."""
        client = await asyncio.to_thread(importlib.import_module, "websockets.asyncio.client")
        exceptions = await asyncio.to_thread(importlib.import_module, "websockets.exceptions")
        while not self._service.ready():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._service.deadlines.watchdog_beat)
            self._wake.clear()
        while True:
            retrying = AsyncRetrying(
                wait=_pause,
                retry=retry_if_exception_type((OSError, TimeoutError, exceptions.WebSocketException, PeerLost)),
                before_sleep=self._failed,
            )
            async for attempt in retrying:
                with attempt:
                    await self._once(client, exceptions)

    def _failed(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        kind = "Unauthorized" if isinstance(error, _Refused) else ""
        why = str(error) or type(error).__name__
        if why != self._why:
            _log.warning("supervisor.unreachable", url=self._url, attempt=state.attempt_number, why=why)
            self._why = why
        self._service.connection_state(False, kind, why)

    async def _once(self, client: Any, exceptions: Any) -> None:
        """One connection, to its end. Returns if it lasted; else raises why it did not."""
        service = self._service
        if service.address.look():
            _log.warning("supervisor.moved", url=service.url)
        try:
            socket = await client.connect(
                self._url,
                additional_headers={"Authorization": f"Bearer {service.token}"},
                open_timeout=service.deadlines.connect,
                close_timeout=0.2,
                ping_interval=4 * service.deadlines.beat,
                ping_timeout=max(20.0, 4 * service.deadlines.evict),
                max_size=_LARGEST,
                compression=None,
                proxy=None,
            )
        except exceptions.InvalidStatus as error:
            if error.response.status_code in (401, 403):
                raise _Refused(f"the supervisor at {service.url} refused the job's token") from error
            raise
        began = service.loop.time()
        try:
            self._socket = socket
            ending = await self._talk(socket, exceptions)
        finally:
            self._socket = None
            heard = service.house.obeyed
            service.house.cut()
            # Without the closing handshake: a frozen or dead supervisor would not answer it.
            socket.transport.abort()
        service.connection_state(False, "", ending)
        _log.warning("supervisor.lost", url=self._url, why=ending)
        if not heard or service.loop.time() - began < _BRIEF:
            raise PeerLost(ending)

    async def _talk(self, socket: ClientConnection, exceptions: Any) -> str:
        """Speak and hear until the connection ends; why it did."""
        speaker = asyncio.create_task(self._speak(socket))
        beats = asyncio.create_task(self._beats())
        hearer = asyncio.create_task(self._hear(socket))
        tasks = (speaker, beats, hearer)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for found in results:
            if isinstance(found, BaseException):
                if not isinstance(found, exceptions.WebSocketException | OSError | asyncio.CancelledError):
                    raise found
            elif found:
                return found
        return f"the connection to {self._url} ended: {socket.close_reason or socket.close_code or 'broken'}"

    async def _hear(self, socket: ClientConnection) -> str:
        while True:
            raw = await socket.recv(decode=False)
            try:
                relay = self._service.told(raw)
            except ValidationError as error:
                return f"the supervisor sent what is no message: {str(error)[:500]}"
            if relay is Relay.RECONNECT:
                return "something that the supervisor told was missed"
            if self._service.house.obeyed and self._why:
                _log.info("supervisor.back", url=self._url)
                self._why = ""

    async def _speak(self, socket: ClientConnection) -> None:
        house = self._service.house
        await socket.send(self._service.hello(), text=True)
        while True:
            self._flushed.clear()
            for said in house.outgoing(self._service.loop.time()):
                await socket.send(said, text=True)
            if not house.unsaid:
                self._flushed.set()
                await self._wake.wait()
            self._wake.clear()

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self._service.deadlines.beat)
            self._service.refresh()
            self._service.house.beat()
            self._wake.set()

    async def close(self, within: float) -> None:
        """Wait for what is unsaid to be said, if the supervisor is there; then close politely. `within` seconds at most."""
        if self._socket is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                if self._service.house.unsaid:
                    self._flushed.clear()
                    self._wake.set()
                await self._flushed.wait()
                await self._socket.close()


def _pause(state: RetryCallState) -> float:
    if state.outcome is not None and isinstance(state.outcome.exception(), _Refused):
        return _UNAUTHORIZED
    return 0.0 if state.attempt_number == 1 else float(_AGAIN(state))
