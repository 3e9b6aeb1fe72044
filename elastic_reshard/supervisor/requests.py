"""Acting calls that were named by who made them: done once, answered alike, over restarts too.

A call is named by the header `Idempotency-Key` (or `request_id` in its query). What it did and its name are on disk by one
write; its answer follows. Of a call that had acted before its answer was kept, the answer is made anew, and nothing is done
again. The last 2,048 are remembered.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import xxhash

from elastic_reshard.errors import ProtocolError

__all__ = ["MOST", "Kept", "Request", "Requests", "Reused", "digest_of"]

MOST: Final = 2048
# Longer answers are made anew from what there is.
_LONGEST_ANSWER: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class Kept:
    """As journaled. status 0: it has acted, its answer is not known."""

    key: str
    digest: str
    status: int = 0
    answer: bytes = b""


@dataclass(slots=True)
class Request:
    """One named call. taken: None before it has acted, then done when that is on disk."""

    key: str
    digest: str
    taken: asyncio.Future[None] | None = None
    status: int = 0
    answer: bytes = b""

    @property
    def kept(self) -> Kept:
        """To be journaled."""
        return Kept(self.key, self.digest, self.status, self.answer)


class Reused(ProtocolError):
    """The name of a call was used for another one."""


def digest_of(method: str, path: str, query: str, body: bytes) -> str:
    """What a call asks for, whatever the order and the blanks of its JSON."""
    try:
        plain = json.dumps(json.loads(body), sort_keys=True).encode() if body else b""
    except (ValueError, RecursionError):
        plain = body
    return xxhash.xxh3_128(b"\0".join((method.encode(), path.encode(), query.encode(), plain))).hexdigest()


class Requests:
    """The named calls of one supervisor. For its event loop's thread."""

    def __init__(self, kept: Iterable[Kept] = ()) -> None:
        self._known: OrderedDict[str, Request] = OrderedDict()
        for one in kept:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done.set_result(None)
            self._known[one.key] = Request(one.key, one.digest, done, one.status, one.answer)

    def named(self, key: str, digest: str) -> Request:
        """The call of this name, known or new. Raises Reused if it was another one."""
        found = self._known.get(key)
        if found is None:
            return Request(key, digest)
        if found.digest != digest:
            raise Reused(f"{key!r} was the name of another call; nothing was done. Give each call a name of its own")
        return found

    def act(self, request: Request, taken: asyncio.Future[None]) -> asyncio.Future[None] | None:
        """It is about to act: remember it. If it did before, nothing is to be done but to wait for what this returns."""
        known = self._known.get(request.key)
        before = known.taken if known is not None else None
        if before is not None and not (before.done() and (before.cancelled() or before.exception() is not None)):
            return before
        request.taken = taken
        self._known[request.key] = request
        if len(self._known) > MOST:
            self._known.popitem(last=False)
        return None

    def answered(self, request: Request, status: int, answer: bytes) -> bool:
        """Keep how it was answered; False if that is not to be journaled."""
        if request.taken is None or len(answer) > _LONGEST_ANSWER:
            return False
        request.status, request.answer = status, answer
        return True
