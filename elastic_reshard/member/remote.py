"""What a member asks the supervisor for directly: what job this is, and bodies of layouts by content id, kept."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from elastic_reshard.errors import ReshardError, Unauthorized
from elastic_reshard.layout import Correspondence, ModelLayout
from elastic_reshard.layout.fragments import canonical
from elastic_reshard.layout.side import Side
from elastic_reshard.log import logger
from elastic_reshard.protocol import places
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.supervisor.client import SupervisorClient

__all__ = ["About", "Remote"]

_log = logger("member")
_CALL = 5.0  # most seconds of one attempt
_CELL: Final = 1 << 20  # of a supervisor that does not say


class About(NamedTuple):
    """A job: its name, its deadlines, and bytes of a cell of landing arenas."""

    job: str
    deadlines: Deadlines
    cell: int


class Remote:
    """One member's way to the supervisor's HTTP side. Any thread. A connection a call: these are few, and cold.

    Deadlines are of time.monotonic(); while nobody listens a call is tried again until then. Raises SupervisorUnreachable,
    Unauthorized, ProtocolError.
    """

    def __init__(self, url: str, token: str | None, runtime: Path | None) -> None:
        self.url, self.runtime = places.base_url(url), runtime
        self._address: places.Address | None = None  # once the job's name is known
        self.token = token or os.environ.get(places.TOKEN_VARIABLE) or self._kept_token()
        self._sides: dict[str, Side] = {}
        self._said: dict[str, Mapping[str, Any]] = {}

    def _kept_token(self) -> str:
        place = places.place_of(self.url, runtime=self.runtime)
        if place is None or not place.token:
            raise Unauthorized(
                f"the token of the job at {self.url} is not known here; pass token=, or set ${places.TOKEN_VARIABLE} "
                "(a supervisor of this user on this machine leaves it in the runtime folder)"
            )
        return place.token

    def _client(self, deadline: float) -> SupervisorClient:
        left = max(0.05, deadline - time.monotonic())
        if self._address is not None and self._address.look():
            self.url = self._address.url
        return SupervisorClient(self.url, self.token, timeout=min(_CALL, left), patience=left)

    def about(self, deadline: float) -> About:
        """What the supervisor says of its job."""
        with self._client(deadline) as client:
            health = client.health()
        self._address = places.Address(self.url, str(health["job"]), self.runtime)
        return About(str(health["job"]), Deadlines(**health["deadlines"]), int(health.get("cell", _CELL)))

    def put_fragment(self, body: Mapping[str, Any], deadline: float) -> None:
        """Hand in what a fragment's id stands for. Kept, for a supervisor that has lost its journal."""
        with self._client(deadline) as client:
            self._said[client.put_fragment(body)] = body

    def say_again(self) -> None:
        """Hand in all fragments again, in a thread of its own: a new supervisor may have lost them. Returns at once."""

        def say() -> None:
            try:
                for body in list(self._said.values()):
                    self.put_fragment(body, time.monotonic() + _CALL)
            except ReshardError as error:  # the next supervisor is told again
                _log.warning("fragments.not_said", why=str(error))

        threading.Thread(target=say, name="elastic_reshard fragments", daemon=True).start()

    def layout(self, key: str, deadline: float) -> tuple[ModelLayout, tuple[Correspondence, ...] | None]:
        """A group's layout, and its correspondences. Asks the first time only."""
        side = self._sides.get(key)
        if side is None:  # two threads may ask at once: neither waits for the other's deadline
            with self._client(deadline) as client:
                side = self._sides.setdefault(key, Side.of_body(canonical(client.layout(key))))
        return side.model, side.correspondences
