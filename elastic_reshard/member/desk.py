"""One member's decisions (`core`) behind a lock, and the link that carries them: what its publish and install share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from elastic_reshard.errors import NotAMember, RefitTimeout
from elastic_reshard.log import logger
from elastic_reshard.member.core import MemberCore
from elastic_reshard.member.stage import Turns
from elastic_reshard.protocol.view import Farewell, Heard, Told
from elastic_reshard.watchdog.link import HostLink

__all__ = ["Chores", "Desk"]

T = TypeVar("T")
_log = logger("member")
# A wait looks again this often even if nobody called: nothing may depend on having seen an event.
_LOOK = 1.0


class Chores(Protocol):
    """What is done in a thread of the user's that waits anyway, and not in ours: what touches a GPU."""

    @property
    def untidy(self) -> bool:
        """Whether there is something to do. Called under the desk's lock; never waits."""

    def tidy(self) -> None:
        """Do some of it; soon back."""


class Desk:
    """The lock is held for decisions and for handing a statement to the link, never while bytes are copied."""

    def __init__(self, core: MemberCore) -> None:
        self.core = core
        self.changed = threading.Condition()
        self.turns = Turns(core.member, None)  # the member's window, once it has one
        self.link: HostLink | None = None
        self.chores: Chores | None = None
        self.on_supervisor: Callable[[], None] | None = None  # another instance is heard; called under the lock
        self.on_view: Callable[[], None] | None = None  # something was heard; called under the lock

    def hear(self, said: Told | Heard | Farewell) -> None:
        """The link's thread delivers. What is of an older term is dropped; a gap is closed by the watchdog's next snapshot."""
        with self.changed:
            before = self.core.view.instance
            if not self.core.hear(said):
                _log.warning("view.not_obeyed", member=self.core.member, term=said.term, at=self.core.view.term)
            if before and self.core.view.instance != before and self.on_supervisor is not None:
                self.on_supervisor()
            if self.core.unsaid and self.link is not None:
                self.say()
            if self.on_view is not None:
                self.on_view()
            self.changed.notify_all()

    def wake(self) -> None:
        """Something about the link changed."""
        with self.changed:
            self.changed.notify_all()

    def say(self) -> None:
        """State everything anew. The caller holds the lock, so that statements leave in the order of their numbers."""
        if self.link is None:
            raise NotAMember(f"{self.core.member} has left; join again")
        self.link.state(self.core.statement())

    def check(self) -> None:
        """Raise NotAMember if this member takes no part any more. The caller holds the lock."""
        why = self.core.out
        if why or self.link is None:
            raise NotAMember(f"{self.core.member} is no member any more: {why or 'it has left'}; join again")
        if (failure := self.link.failure) is not None:
            raise NotAMember(f"{self.core.member} is no member any more: {failure}; join again") from failure

    @property
    def parted(self) -> bool:
        """Whether this member has gone, or goes as it should: then that it takes no part any more is no news."""
        with self.changed:
            return self.link is None or self.core.parting

    def wait(self, ready: Callable[[], T | None], deadline: float, late: Callable[[], str]) -> T:
        """Block until `ready` returns something, at most until `deadline` (time.monotonic()). The caller holds the lock.

        Raises NotAMember, or RefitTimeout with what `late` says."""
        while True:
            found = ready()
            if found is not None:
                return found
            self.check()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise RefitTimeout(late(), self.core.missing())
            self.changed.wait(min(remaining, _LOOK))

    def await_tidily(self, ready: Callable[[], T | None], deadline: float, late: Callable[[], str]) -> T:
        """As `wait`, but the caller holds no lock, and does chores in its thread whenever there are some meanwhile."""
        while True:
            with self.changed:
                found = self.wait(lambda: self._found(ready()), deadline, late)
            if found:
                return found[0]
            if self.chores is not None:
                self.chores.tidy()

    def _found(self, what: T | None) -> list[T] | None:
        """What was waited for; nothing, if there are chores; None: wait on."""
        if what is not None:
            return [what]
        return [] if self.chores is not None and self.chores.untidy else None

    def silence(self) -> str:
        """For messages: whether the supervisor can be heard at all."""
        connected = self.link is not None and self.link.connected
        return "" if connected else "; the supervisor cannot be reached now (groups go on serving what they have)"
