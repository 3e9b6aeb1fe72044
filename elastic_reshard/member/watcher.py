"""What a member is told about versions: made by comparing the view with what was told last, so that no event is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic_reshard.member.core import MemberCore
from elastic_reshard.protocol.docs import GroupState, PublicationDoc, PublicationState

__all__ = ["Event", "Watcher"]


@dataclass(frozen=True, slots=True)
class Event:
    """pending: a version is on its way. installable: it is committed, and whole in this group's domain. partial: this
    group serves nothing (`reason`): install again. abandoned: a pending version will never come. leave: this member was
    asked to leave (call `leave`)."""

    kind: Literal["pending", "installable", "partial", "abandoned", "leave"]
    weight_version: int = 0
    label: str | None = None
    publication: str = ""
    reason: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)


_BEGUN = (PublicationState.MOVING, PublicationState.COMMITTED)


class Watcher:
    """Remembers what one listener was told. Not for several threads at once."""

    def __init__(self, core: MemberCore) -> None:
        self._core = core
        self._pending = self._installable = ""
        self._begun = 0  # the newest version that was told as pending
        self._broken = self._leave = self._whole = False

    def news(self) -> Iterator[Event]:
        """Differences between the view and what was told before."""
        core, view = self._core, self._core.view
        group, me = core.my_group, core.me
        gone = view.publications.get(self._pending)
        if gone is not None and gone.state is PublicationState.ABANDONED:
            self._pending = ""
            yield _event("abandoned", gone, gone.reason)
        begun = [p for p in view.publications.values() if p.state in _BEGUN and p.weight_version > self._begun]
        for doc in sorted(begun, key=lambda p: p.weight_version):
            self._begun, self._pending = doc.weight_version, doc.id
            if group is None or doc.id != group.serving_publication:  # what is served already is no news
                yield _event("pending", doc)
        # Also for a listener that came when the group served already: what it serves is over when a rank is lost.
        self._whole |= core.admitted and "destination" in core.roles
        broken = group is not None and (group.state is GroupState.PARTIAL or (self._whole and not group.whole))
        if broken and not self._broken and group is not None:
            self._installable = ""
            yield Event("partial", reason=group.reason or (group.verdict.reason if group.verdict else ""))
        self._broken = broken
        ready = core.installable()
        if ready is not None and ready.id != self._installable:
            self._installable = ready.id
            yield _event("installable", ready)
        asked = me is not None and me.leave_within is not None
        if asked and not self._leave and me is not None:
            yield Event("leave", reason=f"asked to leave within {me.leave_within} s")
        self._leave = asked


def _event(kind: Literal["pending", "installable", "abandoned"], doc: PublicationDoc, reason: str = "") -> Event:
    return Event(kind, doc.weight_version, doc.label, doc.id, reason, doc.extras)
