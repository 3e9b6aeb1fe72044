"""The view: what the supervisor tells everybody, as documents by name, and a replica that follows it.

Changes are told as whole documents (`Told`), serialised once for all; a snapshot has base 0. Whoever finds a gap asks for
a snapshot by connecting anew; so a replica is always some state that the supervisor was in.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeVar

from pydantic import Field, TypeAdapter

from elastic_reshard.protocol.base import Count, Message, Text
from elastic_reshard.protocol.docs import GroupDoc, MemberDoc, PublicationDoc, TransferDoc

__all__ = ["Down", "Farewell", "Heard", "Told", "View", "deflated", "read_down"]

T = TypeVar("T")


class Told(Message):
    """What changed from view `base` (0: everything) to view `revision`; None removes a document.

    `instance` is the supervisor's start: of two with one term, only the first that was heard is obeyed."""

    kind: Literal["told"] = "told"
    term: Count
    instance: str
    base: Count
    revision: Count
    membership_epoch: Count
    committed: str = ""  # id of the last committed publication
    members: dict[str, MemberDoc | None] = {}
    groups: dict[str, GroupDoc | None] = {}
    publications: dict[str, PublicationDoc | None] = {}
    transfers: dict[str, TransferDoc | None] = {}


class Heard(Message):
    """To one host only: up to which number each member's statements were taken in, with view `revision` showing it."""

    kind: Literal["heard"] = "heard"
    term: Count
    instance: str
    revision: Count
    numbers: dict[str, Count]


class Farewell(Message):
    """The connection ends on purpose. over: the job has ended, nothing is to be kept; else `reason` says what is wrong."""

    kind: Literal["farewell"] = "farewell"
    term: Count
    instance: str
    over: bool = False
    reason: Text = ""


Down = Annotated[Told | Heard | Farewell, Field(discriminator="kind")]
_down: TypeAdapter[Told | Heard | Farewell] = TypeAdapter(Down)


_LONG: Final = 1 << 14  # bytes from which a message is deflated: once, for all hosts
_LARGEST: Final = 64 << 20  # bytes of a message, inflated
_DEFLATED: Final = b"\x78"  # how zlib's data begins, and no JSON


def deflated(text: str) -> str | bytes:
    """A message of the supervisor as it travels. With thousands of members the values by which movers meet are megabytes, told
    to a thousand hosts."""
    return text if len(text) < _LONG else zlib.compress(text.encode(), 1)


def read_down(raw: str | bytes) -> Told | Heard | Farewell:
    """One message of the supervisor, deflated or not; pydantic's ValidationError for anything else."""
    return _down.validate_json(_inflated(raw) if isinstance(raw, bytes) and raw[:1] == _DEFLATED else raw)


def _inflated(raw: bytes) -> bytes:
    """Never grows beyond the largest message; what can't be inflated is no message."""
    inflate = zlib.decompressobj()
    try:
        found = inflate.decompress(raw, _LARGEST)
    except zlib.error:
        return b""
    return found if inflate.eof else b""


class View:
    """A replica of the supervisor's documents. Not for several threads at once."""

    def __init__(self) -> None:
        self.term, self.instance, self.revision, self.membership_epoch = 0, "", 0, 0
        self.committed = ""
        self.members: dict[str, MemberDoc] = {}
        self.groups: dict[str, GroupDoc] = {}
        self.publications: dict[str, PublicationDoc] = {}
        self.transfers: dict[str, TransferDoc] = {}

    def obeys(self, term: int, instance: str) -> bool:
        """Whether a message of that supervisor counts: never one of an older term, nor a second one of the same."""
        return term > self.term or ((term == self.term and instance in (self.instance, "")) or self.term == 0)

    def apply(self, told: Told) -> bool:
        """Take in what was told; False if it is not to be obeyed, or a gap says that a snapshot is needed."""
        if not self.obeys(told.term, told.instance):
            return False
        fresh = (told.term, told.instance) != (self.term, self.instance)
        if told.base == 0:
            self.members, self.groups, self.publications, self.transfers = {}, {}, {}, {}
        elif fresh or told.base != self.revision:
            return told.revision <= self.revision and not fresh
        self.term, self.instance, self.revision = told.term, told.instance, told.revision
        self.membership_epoch, self.committed = told.membership_epoch, told.committed
        _merge(self.members, told.members)
        _merge(self.groups, told.groups)
        _merge(self.publications, told.publications)
        _merge(self.transfers, told.transfers)
        return True

    def snapshot(self) -> Told:
        """Everything, as one message."""
        return Told(
            term=self.term,
            instance=self.instance,
            base=0,
            revision=self.revision,
            membership_epoch=self.membership_epoch,
            committed=self.committed,
            members=dict(self.members),
            groups=dict(self.groups),
            publications=dict(self.publications),
            transfers=dict(self.transfers),
        )


def _merge(into: dict[str, T], changes: Mapping[str, T | None]) -> None:
    for key, doc in changes.items():
        if doc is None:
            into.pop(key, None)
        else:
            into[key] = doc
