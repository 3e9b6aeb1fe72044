"""From one set of members to the next: one way, chosen by a pure function, tried once.

wanted is compared with current, not with some first set, so that one loss causes one rebuild. A loss is never answered by a
native shrink: with M2N in flight it hangs as the abort does (measured).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastic_reshard.communicator.base import Backend, Capabilities, Communicator
from elastic_reshard.communicator.registry import Registry
from elastic_reshard.communicator.store import ControlStore
from elastic_reshard.errors import ProtocolError, TransferError
from elastic_reshard.transport.network import Evidence

__all__ = ["Choice", "Way", "change", "choose"]


class Way(StrEnum):
    """How a communicator becomes the next one."""

    KEEP = "keep"  # the same members
    SHRINK = "shrink"  # finish the round; the ones that stay make a child
    GROW = "grow"  # finish the round; all make a child with fresh ones behind them
    ANEW = "anew"  # let go of the old one, and form


@dataclass(frozen=True, slots=True)
class Choice:
    """excluded: ranks of the old communicator; fresh: ranks of the new one. aborting: the old one ends by abort, whose deadline
    is worth waiting for only if it frees peers. why: for logs and errors."""

    way: Way
    excluded: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    aborting: bool = False
    why: str = ""


def choose(current: Sequence[str], wanted: Sequence[str], lost: Collection[str], capabilities: Capabilities) -> Choice:
    """The one way from `current` to `wanted` members (both in rank order). lost: members of `current` that are known to be
    gone or are being given up. Pure: all members choose alike. ProtocolError if a member is wanted that is lost or twice."""
    if len(set(wanted)) != len(wanted) or not wanted:
        raise ProtocolError(f"the wanted members {list(wanted)} are none, or have one twice; name each once")
    again = sorted(set(wanted) & set(lost))
    if again:
        raise ProtocolError(f"member(s) {again} are wanted and lost; a member that comes back has a new incarnation")
    gone = sorted(set(current) & set(lost))
    if gone:
        return Choice(Way.ANEW, aborting=capabilities.abort_frees_peers, why=f"member(s) {', '.join(gone)} are lost")
    if tuple(current) == tuple(wanted):
        return Choice(Way.KEEP, why="the same members")
    staying = [member for member in current if member in set(wanted)]
    excluded = tuple(rank for rank, member in enumerate(current) if member not in set(wanted))
    fresh = tuple(rank for rank, member in enumerate(wanted) if member not in set(current))
    if not staying:
        return Choice(Way.ANEW, why="no member stays")
    if not fresh and staying == list(wanted):
        if capabilities.can_shrink:
            return Choice(Way.SHRINK, excluded=excluded, why="some leave, the others keep their order")
        return Choice(Way.ANEW, why="the backend cannot shrink")
    if not excluded and list(current) == list(wanted)[: len(current)]:
        if capabilities.can_grow:
            return Choice(Way.GROW, fresh=fresh, why="fresh ones come behind all others")
        return Choice(Way.ANEW, why="the backend cannot grow")
    return Choice(Way.ANEW, why="the order of ranks changes, or some leave and others come")


def change(
    registry: Registry,
    backend: Backend,
    old: Communicator | None,
    choice: Choice,
    me: str,
    wanted: Sequence[str],
    store: ControlStore,
    deadline: float,
    release: float,
    evidence: Evidence,
) -> Communicator | None:
    """Carry out `choice` as member `me`: collective over current and wanted members, each with its own store of the new name.
    No call is inside `old` (None: this process is fresh). Returns the new communicator, None for a member that leaves.

    Blocks until `deadline` (time.monotonic), and `release` seconds for the old one, at most. TransferError if it failed or if
    the old one did not let go; then `registry.pending` says whether this process is to be ended, and the next one is formed
    anew under a new name, never by a second call.
    """
    rank = wanted.index(me) if me in wanted else None
    if choice.way is Way.KEEP:
        return old
    if old is None:
        if rank is None:
            raise ProtocolError(f"member {me} is neither in the old communicator nor wanted in {store.name}")
        if choice.way is Way.GROW:
            return registry.join(backend, store, rank, len(wanted), choice.fresh, deadline, evidence)
        return registry.form(backend, store, rank, len(wanted), deadline, evidence)
    if rank is not None and choice.way is Way.SHRINK:
        return registry.shrink(old, store.name, choice.excluded, deadline, release)
    if rank is not None and choice.way is Way.GROW:
        return registry.grow(old, store, len(wanted), deadline, release)
    # All release the old one alike: by abort, which waits for nobody.
    report = registry.abort_all(
        min(deadline, time.monotonic() + release), f"left for {store.name}: {choice.why}", [old.name]
    )
    if not report.out:
        raise TransferError(f"{old.name} did not let go ({report.why}); end this process and form {store.name} anew")
    if rank is None:
        return None
    return registry.form(backend, store, rank, len(wanted), deadline, evidence)
