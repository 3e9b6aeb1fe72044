"""What a watchdog's connections know of the watchdog they belong to. `service.Service` is it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.places import Address
from elastic_reshard.watchdog.core import House

__all__ = ["Hosting", "Wakes"]


class Wakes(Protocol):
    """Something that looks again for what is to be done when it is told to."""

    def wake(self) -> None:
        """Look again. Returns at once."""


class Hosting(Protocol):
    """One host's watchdog, on one event loop."""

    @property
    def job(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def address(self) -> Address: ...
    @property
    def token(self) -> str: ...
    @property
    def instance(self) -> str: ...
    @property
    def deadlines(self) -> Deadlines: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def house(self) -> House: ...
