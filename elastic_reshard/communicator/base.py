"""What a communicator is, whatever carries its bytes: the words and Protocols of this room.

A communicator is the disposable data plane of one transfer in one epoch. It is formed once, over a local store that the
control plane feeds; it may be asked once to shrink or grow where the backend can; whatever fails is aborted and formed
anew under the next name, never called a second time. Its abort may hang: `guard.Registry` forms and aborts with a deadline.
NCCL shapes this: one config on all ranks; children of shrink and grow do not inherit the parent's abort, so each is aborted;
a parent that was left by shrink is aborted by all, never destroyed politely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_reshard.communicator.names import Name
from elastic_reshard.communicator.store import ControlStore
from elastic_reshard.errors import ProtocolError
from elastic_reshard.transport.network import Evidence, GroupedNetwork, Network

__all__ = ["Backend", "Capabilities", "Communicator", "Name", "check_configs"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend has natively.

    can_shrink: survivors make a child without some, in unchanged order. can_grow: fresh processes are appended.
    can_revoke: operations in flight can be ended while the communicator lives. abort_frees_peers: one member's abort ends
    the operations of the others, so that it is worth its deadline before members are condemned.
    """

    can_shrink: bool = False
    can_grow: bool = False
    can_revoke: bool = False
    abort_frees_peers: bool = False


class Communicator(Protocol):
    """One member's end, formed: every connection is made and every member has said its name over it.

    network: what carries the bytes; one thread uses it at a time. children: what shrink and grow made of it; each is aborted
    by itself.
    """

    @property
    def name(self) -> Name:
        """Epoch and transfer."""

    @property
    def rank(self) -> int:
        """This member's."""

    @property
    def size(self) -> int:
        """Of all members."""

    @property
    def network(self) -> Network | GroupedNetwork:
        """Calls on it raise TransferError once the communicator is marked."""

    @property
    def children(self) -> tuple[Communicator, ...]:
        """Made by shrink and grow."""

    @property
    def busy(self) -> int:
        """Calls on the network that have been entered and have not returned. Any thread."""

    @property
    def ended(self) -> tuple[int, ...]:
        """Ranks that are known to have ended, from evidence."""

    def mark(self, reason: str) -> None:
        """First phase of an abort: from now on every new call raises. Never blocks; any thread; idempotent."""

    def abort(self) -> None:
        """Second phase: release everything, so that nobody waits for this member. May hang, raise, or return while calls
        are still blocked: guard it, and count only `busy == 0` as out. Any thread; after `mark`."""

    def close(self) -> None:
        """End politely. Only when every member is alive and done; may wait for them. Idempotent; after `abort` a no-op."""

    def shrink(self, name: Name, excluded: Sequence[int], deadline: float) -> Communicator:
        """A child without ranks `excluded`; collective over the others, once. Blocks until `deadline` (time.monotonic) at most,
        if the backend keeps to it. This one is then to be aborted by all. TransferError if it fails or cannot."""

    def grow(self, store: ControlStore, size: int, deadline: float) -> Communicator:
        """A child of `size` members: these, in order, then fresh ones, which call `Backend.join` with a store of the same name
        (`store.name`: the child's). Collective, once; blocks as `shrink` does. TransferError if it fails or cannot."""


class Backend(Protocol):
    """A way to carry bytes between members.

    config: everything that all members must have alike, as text; unlike ones are refused by `check_configs` before anything
    forms.
    """

    @property
    def name(self) -> str:
        """Short: "gloo"."""

    @property
    def capabilities(self) -> Capabilities:
        """What it has natively."""

    @property
    def config(self) -> str:
        """Alike on all members."""

    def form(self, store: ControlStore, rank: int, size: int, deadline: float, evidence: Evidence) -> Communicator:
        """Form the communicator `store.name`: collective, each member with its own rank and a local store that is fed with what
        the others' stores told. Blocks until `deadline` (time.monotonic) at most, if the backend keeps to it; ends at once
        while it waits for values when the store is cancelled. Connections to all are made when it returns. evidence: which
        ranks are known to have ended.

        Raises PeerLost or TransferTimeout, which name ranks; the store's error when it was cancelled; ProtocolError for
        settings that cannot work. One attempt: then a new name and a new store. Call it through `guard.Registry.form`.
        """

    def join(
        self, store: ControlStore, rank: int, size: int, fresh: Sequence[int], deadline: float, evidence: Evidence
    ) -> Communicator:
        """The part of a fresh process in the others' `Communicator.grow`; ranks `fresh` are the last ones. As `form`;
        TransferError where the backend cannot grow."""


def check_configs(configs: Mapping[str, str]) -> None:
    """Refuse unlike configs before anything forms: with NCCL they form and then fail or hang (measured).

    configs: by member. Raises ProtocolError that names every member whose config is not that of most.
    """
    held: dict[str, list[str]] = {}
    for member, config in configs.items():
        held.setdefault(config, []).append(member)
    if len(held) <= 1:
        return
    # Most members; of equally many, the one that the first member has.
    usual = max(held, key=lambda config: len(held[config]))
    unlike = "; ".join(f"member {member} has {config!r}" for member, config in configs.items() if config != usual)
    raise ProtocolError(
        f"members would form a communicator with unlike configs, which can hang: {unlike}; the others "
        f"({', '.join(held[usual])}) have {usual!r}. Start all members with the same settings and versions"
    )
