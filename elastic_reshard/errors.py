"""Every exception of the package, one tree.

    ReshardError
    +-- LayoutError                    input that cannot be served; nothing has moved
    |   +-- LayoutMismatch             source and destination do not fit; lists every violation
    |   +-- UnsupportedPlacement       a placement this project does not move (Partial, unknown kinds)
    +-- PlanError                      a plan that cannot be made, or plans that differ between members
    |   +-- PlanMismatch               the members of one call hold different plans; nothing has moved
    |   +-- ShardLost                  bytes that no reachable member holds
    +-- ArenaError                     memory that cannot be made, sealed, mapped or addressed
    +-- TransferError                  a transfer that broke; the destination's tensors are not to be used
    |   +-- PeerLost                   a member ended, closed its connection or is named dead by evidence
    |   +-- PeerRefused                a member turned the call down before the first byte
    |   +-- TransferTimeout            the deadline passed; names whom this member was waiting for
    |   +-- DigestMismatch             bytes arrived that are not the bytes that were sent
    +-- CatalogError                   unknown model, or a parallelism the model does not allow
    +-- ProtocolError                  settings or messages that cannot be obeyed
    |   +-- Unauthorized               the job's token is missing or wrong
    |   +-- Fenced                     of an older term than one that was heard or journaled
    +-- MembershipError                a member that takes no part, or no longer
    |   +-- JoinRefused                the supervisor turned this member down; nothing was changed
    |   +-- NotAMember                 this member has left, was given up, or its job is over
    +-- RefitError                     a publish or install that did not come to its end; what was served stays served
        +-- SupervisorUnreachable      nobody answered within the deadline
        +-- SlotsBusy                  every slot of the arena is held; names by whom
        +-- PublicationAbandoned       it will never be committed; says why
        +-- GroupBroken                an install broke off: the group is PARTIAL; names members
        +-- NothingInstallable         no committed publication is newer, or there is none
        +-- RefitTimeout               the deadline of a call passed; names whom it waited for

Each message says what happened, to whom (member, tensor, range) and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "ArenaError",
    "CatalogError",
    "DigestMismatch",
    "Fenced",
    "GroupBroken",
    "JoinRefused",
    "LayoutError",
    "LayoutMismatch",
    "MembershipError",
    "NotAMember",
    "NothingInstallable",
    "PeerLost",
    "PeerRefused",
    "PlanError",
    "PlanMismatch",
    "ProtocolError",
    "PublicationAbandoned",
    "RefitError",
    "RefitTimeout",
    "ReshardError",
    "ShardLost",
    "SlotsBusy",
    "SupervisorUnreachable",
    "TransferError",
    "TransferTimeout",
    "Unauthorized",
    "UnsupportedPlacement",
    "Violation",
]


class ReshardError(Exception):
    """Root of the tree."""


class LayoutError(ReshardError, ValueError):
    """Input that cannot be served. Raised before anything moves."""


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """One thing that is wrong with a pair of layouts."""

    tensor: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.tensor}: {self.kind}: {self.detail}"


class LayoutMismatch(LayoutError):
    """Source and destination do not fit. `violations` lists everything that is wrong, not only the first."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations: tuple[Violation, ...] = tuple(sorted(violations))
        lines = "\n".join(f"  - {v}" for v in self.violations)
        super().__init__(
            f"{len(self.violations)} violation(s) between source and destination; nothing was moved. "
            f"Mend the layouts, or name correspondences and wire_dtype explicitly:\n{lines}"
        )


class UnsupportedPlacement(LayoutError):
    """A placement that is not moved: Partial (reduce it first) or a kind this project does not know."""


class PlanError(ReshardError):
    """A plan that cannot be made."""


class PlanMismatch(PlanError):
    """Members of one call hold different plans, topologies or options. Nothing was moved."""


class ShardLost(PlanError):
    """Bytes that no reachable member holds. `lost` names tensors and boxes."""

    def __init__(self, lost: Sequence[tuple[str, str]]) -> None:
        self.lost = tuple(lost)
        shown = "; ".join(f"{name} {where}" for name, where in self.lost[:8])
        more = f" and {len(self.lost) - 8} more" if len(self.lost) > 8 else ""
        super().__init__(
            f"no reachable member holds {shown}{more}. Bring a holder back or publish these tensors again."
        )


class ArenaError(ReshardError):
    """Memory that cannot be made, sealed, mapped or addressed."""


class TransferError(ReshardError):
    """A transfer that broke. Destination tensors may be half written: do not use them."""


class PeerLost(TransferError):
    """A peer ended or closed its connection. `members` are those for whom there is evidence, else the suspects."""

    def __init__(self, message: str, members: Sequence[int] = ()) -> None:
        self.members = tuple(members)
        super().__init__(message)


class PeerRefused(TransferError):
    """A member turned the call down before the first byte. `member` is its rank."""

    def __init__(self, member: int, reason: str) -> None:
        self.member = member
        self.reason = reason
        super().__init__(f"member {member} refused the call before anything moved: {reason}")


class TransferTimeout(TransferError, TimeoutError):
    """The deadline passed. `members` are those this member was waiting for."""

    def __init__(self, message: str, members: Sequence[int] = ()) -> None:
        self.members = tuple(members)
        super().__init__(message)


class DigestMismatch(TransferError):
    """Bytes arrived that are not the bytes that were sent. `ranges` names (tensor, box, sender)."""

    def __init__(self, ranges: Sequence[tuple[str, str, int]]) -> None:
        self.ranges = tuple(ranges)
        shown = "; ".join(f"{name} {box} from member {sender}" for name, box, sender in self.ranges[:8])
        super().__init__(
            f"{len(self.ranges)} range(s) differ from what was sent: {shown}. "
            "Do not use the destination tensors; run the refit again with verify='full'."
        )


class CatalogError(ReshardError, ValueError):
    """Unknown model, or a parallelism the model's dimensions do not allow."""


class ProtocolError(ReshardError, ValueError):
    """Settings or messages that cannot be obeyed. `members`: ranks whose settings they are, where that is known."""

    members: tuple[int, ...] = ()


class Unauthorized(ProtocolError):
    """The job's token is missing or wrong."""


class Fenced(ProtocolError):
    """Somebody of a newer term has taken over; whoever raises this must stop."""


class MembershipError(ReshardError):
    """A member that takes no part, or no longer."""


class JoinRefused(MembershipError):
    """The supervisor turned this member down. Nothing was changed."""


class NotAMember(MembershipError):
    """This member has left, was given up, or its job is over. Join again with a fresh `er.join`."""


class RefitError(ReshardError):
    """A publish or install that did not come to its end. What a group served before, it still serves, unless GroupBroken."""


class SupervisorUnreachable(RefitError, TimeoutError):
    """Nobody answered within the deadline. Groups go on serving what they have."""


class SlotsBusy(RefitError, TimeoutError):
    """Every slot of the arena is held. `holders` names publications and the groups that need them."""

    def __init__(self, message: str, holders: Sequence[str] = ()) -> None:
        self.holders = tuple(holders)
        super().__init__(message)


class PublicationAbandoned(RefitError):
    """It will never be committed. The message says why."""


class GroupBroken(RefitError):
    """An install broke off. The group is PARTIAL: its tensors may be of two versions; repeat the install, do not serve.

    `members`: those for whom there is evidence."""

    def __init__(self, message: str, members: Sequence[str] = ()) -> None:
        self.members = tuple(members)
        super().__init__(message)


class NothingInstallable(RefitError):
    """No committed publication is newer than what the group serves, or there is none at all."""


class RefitTimeout(RefitError, TimeoutError):
    """The deadline of a call passed. `members`: those it was waiting for."""

    def __init__(self, message: str, members: Sequence[str] = ()) -> None:
        self.members = tuple(members)
        super().__init__(message)
