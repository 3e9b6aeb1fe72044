"""A member's desk with a stand-in for its neighbours: a link that keeps what it was given, a remote that knows layouts.

Arenas are real ones, handed out by descriptor as the link does; what the supervisor says is told by the test.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from elastic_reshard.errors import RefitTimeout, ReshardError
from elastic_reshard.layout import Correspondence, ModelLayout
from elastic_reshard.member.core import MemberCore
from elastic_reshard.member.desk import Desk
from elastic_reshard.protocol.docs import GroupDoc, GroupState, MemberDoc, MemberState
from elastic_reshard.protocol.messages import GroupSpec, Statement
from elastic_reshard.protocol.view import Told
from elastic_reshard.watchdog.shelf import HeldArena

__all__ = ["Job", "Link", "Remote"]

ME = f"e@{0:016x}"


class Link:
    """What a member's link would do, in memory."""

    connected = True
    failure: ReshardError | None = None

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.arenas: dict[str, tuple[int, bytes]] = {}
        self.landings: list[str] = []
        self.withdrawn: list[str] = []

    def state(self, statement: Statement) -> None:
        self.statements.append(statement)

    def offer_landing(self, arena: str, fd: int, table: bytes) -> None:
        self.landings.append(arena)
        self.arenas[arena] = (os.dup(fd), table)

    def withdraw(self, arena: str) -> None:
        self.withdrawn.append(arena)
        os.close(self.arenas.pop(arena)[0])

    def arena(self, arena: str, deadline: float) -> HeldArena:
        if arena not in self.arenas:
            raise RefitTimeout(f"arena {arena} is not here")
        fd, table = self.arenas[arena]
        return HeldArena(arena, table, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))

    def close(self, graceful: bool = True) -> None:
        while self.arenas:
            os.close(self.arenas.popitem()[1][0])


class Remote:
    """Layouts by id; an error in a layout's place is raised."""

    def __init__(self) -> None:
        self.layouts: dict[str, ModelLayout | ReshardError] = {}
        self.ways: tuple[Correspondence, ...] | None = None
        self.asked: list[str] = []

    def put_fragment(self, body: Mapping[str, Any], deadline: float) -> None:
        pass

    def layout(self, key: str, deadline: float) -> tuple[ModelLayout, tuple[Correspondence, ...] | None]:
        self.asked.append(key)
        found = self.layouts[key]
        if isinstance(found, ReshardError):
            raise found
        return found, self.ways


class Job:
    """One destination member of a group of one, on host "h", admitted."""

    def __init__(self) -> None:
        core = MemberCore(ME, GroupSpec(name="g", size=1, rank=0), frozenset({"destination"}), "h", os.getpid())
        self.link, self.remote, self.desk = Link(), Remote(), Desk(core)
        self.desk.link = cast(Any, self.link)
        self.core, self._revision = core, 0
        self.group = GroupDoc(name="g", size=1, roles=core.roles, members=(ME,), whole=True, state=GroupState.STALE,
                              destination_layout="L1")  # fmt: skip

    def tell(self, **documents: Any) -> None:
        """A change of the view, heard as the link's thread would bring it."""
        committed = documents.pop("committed", self.core.view.committed)
        group = documents.pop("group", {})
        self.group = self.group.model_copy(update=group)
        self.desk.hear(Told(
            term=1, instance="i", base=self._revision, revision=self._revision + 1, membership_epoch=1,
            committed=committed, groups={"g": self.group}, **documents,
        ))  # fmt: skip
        self._revision += 1

    def trainer(self, host: str, state: MemberState = MemberState.LIVE) -> None:
        """A trainer is on that host."""
        doc = MemberDoc(id="t", group="t", rank=0, roles=frozenset({"source"}), host=host, state=state)
        self.tell(members={"t": doc})
