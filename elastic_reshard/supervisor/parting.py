"""Members that are to leave: asked once each, and how far they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from elastic_reshard.protocol.docs import MemberDoc, MemberState
from elastic_reshard.supervisor.answers import Departure
from elastic_reshard.supervisor.app import Shell
from elastic_reshard.supervisor.events import DrainHost, Leave
from elastic_reshard.supervisor.requests import Request
from elastic_reshard.supervisor.shown import members_of
from elastic_reshard.supervisor.state import Member

__all__ = ["Parting", "gone"]

_IN: Final = (MemberState.JOINING, MemberState.LIVE, MemberState.LEAVING)


def gone(doc: MemberDoc) -> MemberDoc:
    """A member that has left the view."""
    return doc.model_copy(update={"state": MemberState.LOST})


class Parting:
    """Members that are to leave, by one change, and those that join meanwhile too."""

    def __init__(self, shell: Shell, chosen: Callable[[MemberDoc], bool], wanted: Leave | DrainHost) -> None:
        self._shell, self._chosen, self._wanted = shell, chosen, wanted
        self._asked: set[str] = set()
        self._again = False
        self._about: dict[str, MemberDoc] = {}

    async def wait(self, seconds: float, request: Request | None) -> Departure:
        """Ask, and return when all are out, or after so many seconds. request: the named call that wants it."""
        until = time.monotonic() + seconds
        self._again = request is not None and request.taken is not None
        self._departure()
        await self._ask(request)
        while True:
            departure = self._departure()
            left = until - time.monotonic()
            if departure.done or left <= 0 or self._shell.ended:
                return departure
            await self._shell.changed(lambda: bool(self._unasked()) or self._departure().done, left)
            if self._unasked():
                await self._ask(None)

    async def _ask(self, request: Request | None) -> None:
        unasked = self._unasked()
        # A drain holds for those that come later, too.
        if isinstance(self._wanted, DrainHost) or len(unasked) == len(self._present()):
            await self._shell.settle(self._wanted, request)
        elif unasked or request is not None:
            await self._shell.settle(Leave(members=tuple(unasked), within=self._wanted.within), request)
        if request is None or not self._again:
            self._asked.update(unasked)

    def _present(self) -> list[Member]:
        return [m for m in self._shell.job.members.values() if m.doc.state in _IN and self._chosen(m.doc)]

    def _unasked(self) -> list[str]:
        """Who was given just as long before keeps that deadline: a repeated call does not put it off. One that is known by
        its name asks only those that came since."""
        within = self._wanted.within
        return [
            m.doc.id
            for m in self._present()
            if m.doc.id not in self._asked
            and (m.leave_by is None or (m.doc.leave_within != within and not self._again))
        ]

    def _departure(self) -> Departure:
        now = {k: doc for k, doc in members_of(self._shell).items() if self._chosen(doc)}
        concerned = {k: doc for k, doc in now.items() if doc.state in (*_IN, MemberState.ORPHANED)}
        self._about |= concerned
        self._about = {k: now.get(k) or gone(doc) for k, doc in self._about.items()}
        missing = tuple(k for k, doc in self._about.items() if doc.state in _IN)
        holding = tuple(k for k, doc in self._about.items() if doc.state is MemberState.ORPHANED)
        return Departure(done=not missing, members=self._about, missing=missing, holding=holding)
