"""Publishing: the caller's thread copies its tensors into a free slot and offers it; everything else happens elsewhere."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

from elastic_reshard.arena.device import Registered
from elastic_reshard.arena.slots import SlotArena, device_nbytes_for, nbytes_for
from elastic_reshard.errors import LayoutError, ProtocolError, PublicationAbandoned, RefitTimeout, SlotsBusy
from elastic_reshard.log import logger
from elastic_reshard.member.core import SlotState
from elastic_reshard.member.desk import Desk
from elastic_reshard.member.filler import Filler
from elastic_reshard.member.memory import MemoryReport, check_fits
from elastic_reshard.member.remote import Remote
from elastic_reshard.member.stage import Stage
from elastic_reshard.member.tensors import Described
from elastic_reshard.protocol.docs import PublicationDoc
from elastic_reshard.protocol.hooks import hook
from elastic_reshard.protocol.messages import Fill

__all__ = ["Publication", "Publisher"]

_log = logger("member")
_SLOTS = 2
_MOST_EXTRAS = 64 << 10  # it is told to every host, several times
_ORDER = ("offered", "moving", "committed", "released")


class Publication:
    """One publish of this member, on its way. Any thread may ask."""

    def __init__(self, desk: Desk, seq: int, label: str | None, stall: float, nbytes: int) -> None:
        self._desk, self._seq = desk, seq
        self.label, self.stall, self.nbytes = label, stall, nbytes

    def _now(self) -> tuple[str, PublicationDoc | None]:
        return self._desk.core.published(self._seq)

    @property
    def state(self) -> str:
        """ "offered" (the other ranks or the supervisor are not ready), "moving", "committed", "released" (a newer one took
        its place and its slots are free), "abandoned", or "void": a newer publish took its place before it began."""
        with self._desk.changed:
            return self._now()[0]

    @property
    def weight_version(self) -> int | None:
        """Given when it begins to move; None before."""
        with self._desk.changed:
            doc = self._now()[1]
        return doc.weight_version if doc is not None else None

    def metrics(self) -> dict[str, float]:
        """What is known by now, flat: publish_stall, transfer, install_pause/GROUP, lag/GROUP, installed_after/GROUP (all in
        seconds, lag in versions), bytes_domain, bytes_network, membership_epoch."""
        with self._desk.changed:
            doc = self._now()[1]
        return dict(doc.metrics) if doc is not None else {"publish_stall": self.stall}

    def _closed(self) -> str:
        """For messages: that windows may be what is waited for."""
        doc, view = self._now()[1], self._desk.core.view
        held = [t.members[p] for t in view.transfers.values() if doc and t.publication == doc.id for p in t.paused]
        return (
            f" It moves only while these have their windows open: {', '.join(held)} (`with m.idle():`)." if held else ""
        )

    def wait(self, until: Literal["committed", "released"] = "committed", timeout: float = 60.0) -> int:
        """Block until it is committed, or its slots are free; at most `timeout` seconds. Returns the weight_version. This
        member's window, if it has one, is open meanwhile: let nothing compute on its device.

        Raises PublicationAbandoned (it will never get there, and why), RefitTimeout, NotAMember."""

        def there() -> int | None:
            state, doc = self._now()
            if state in ("abandoned", "void"):
                group = self._desk.core.my_group
                why = doc.reason if doc is not None else (group.reason if group is not None else "")
                why = why or "a newer publish, or a replaced rank, took its place before it began"
                raise PublicationAbandoned(f"publish {self.label!r} of {self._desk.core.member} is {state}: {why}")
            if doc is not None and _ORDER.index(state) >= _ORDER.index(until):
                return doc.weight_version
            return None

        def late() -> str:
            state, _ = self._now()
            return (
                f"publish {self.label!r} of {self._desk.core.member} was not {until} within {timeout} s: it is {state}"
                f"{self._desk.silence()}.{self._closed()} Missing ranks: {', '.join(self._desk.core.missing()) or 'none'}; "
                f"engines: {', '.join(f'{g.name} {g.state}' for g in self._desk.core.view.groups.values()) or 'none'}"
            )

        deadline = time.monotonic() + timeout
        with self._desk.turns.open(deadline), self._desk.changed:
            return self._desk.wait(there, deadline, late)


def _check_extras(extras: Mapping[str, Any] | None) -> None:
    try:
        size = len(json.dumps(dict(extras or {})))
    except (TypeError, ValueError) as error:
        raise ProtocolError(
            f"extras must be ready for JSON: {error}; put numbers, texts, lists and dicts in it"
        ) from None
    if size > _MOST_EXTRAS:
        raise ProtocolError(
            f"extras of {size} bytes; at most {_MOST_EXTRAS} travel with a version: publish tensors instead"
        )


class Publisher:
    """The source side of one member. One publish at a time."""

    def __init__(self, desk: Desk, filler: Filler, remote: Remote, deadline: float, stage: Stage) -> None:
        """Describe the tensors, check that the arena's memory is there, tell the layout. Blocks until `deadline` at most."""
        self._desk, self._filler, self._remote, self._stage = desk, filler, remote, stage
        self._registered: Registered | None = None
        self._busy = threading.Lock()
        self._arena: SlotArena | None = None
        described = filler.describe()
        filler.release()
        self._described = described
        stage.take(described.device)
        remote.put_fragment(described.body, deadline)
        desk.core.source = described.fragment
        self.memory: MemoryReport = self._make_arena(described)

    def _make_arena(self, described: Described) -> MemoryReport:
        """Two slots of the member's own bytes in wire dtypes. ArenaError, naming figures, if they do not fit."""
        core, device = self._desk.core, self._stage.of(described.device)
        there = device is not None
        report = check_fits(
            nbytes_for(described.specs, _SLOTS, device=there), f"the arena of {core.member} ({_SLOTS} slots)",
            device=device, on_device=device_nbytes_for(described.specs, _SLOTS) if there else 0,
        )  # fmt: skip
        self._arena = SlotArena(described.specs, _SLOTS, label=core.member, device=device)
        if described.device is not None and not there:
            self._registered = described.device.host(self._arena._arena.bytes)
        core.new_arena(self._arena.arena_id, _SLOTS)
        return report

    def offer_arena(self) -> None:
        """Hand the arena's descriptor to the host's watchdog."""
        if self._desk.link is not None and self._arena is not None:
            fd, *memory = self._arena.fds
            self._desk.link.offer(self._arena.arena_id, fd, self._arena.table(), *memory)

    def close(self) -> None:
        """Let go of the arena: what was offered stays with the watchdog. May be called again."""
        self._arena = self._registered = None

    def publish(self, label: str | None, extras: Mapping[str, Any] | None, timeout: float) -> Publication:
        """See `Member.publish`."""
        deadline = time.monotonic() + timeout
        if not self._busy.acquire(timeout=timeout):
            with self._desk.changed:
                self._desk.core.next_publish(label)
            raise RefitTimeout(f"another publish of {self._desk.core.member} was under way for {timeout} s")
        try:
            with self._desk.changed:
                self._desk.check()
                if label is None and self._desk.core.must_label:
                    raise ProtocolError(
                        f"a rank of group {self._desk.core.group.name} was replaced while others went on, or a publish "
                        "failed on some ranks only: give each publish a label of its step, so that two steps are never taken "
                        "for one (or start the whole gang again)"
                    )
                seq = self._desk.core.next_publish(label)
            _check_extras(extras)
            described = self._filler.describe()
            if described is not self._described:
                self._accept(described, seq, deadline)
            return self._publish(label, dict(extras or {}), seq, deadline, timeout)
        except BaseException:  # an interrupt may come anywhere
            with self._desk.changed:
                if self._desk.core.unclaim() and self._desk.link is not None:
                    self._desk.say()
            raise
        finally:
            self._filler.release()
            self._busy.release()

    def _publish(
        self, label: str | None, extras: dict[str, Any], seq: int, deadline: float, timeout: float
    ) -> Publication:
        arena, core = self._arena, self._desk.core
        if arena is None:
            raise LayoutError(f"{core.member} has no arena")
        slot = self._claim(arena, deadline, timeout)
        hook("member.publish.claimed")
        filled = self._filler.fill(arena, slot.slot)
        hook("member.publish.copied")
        fill = Fill(
            arena=arena.arena_id, slot=slot.slot, generation=filled.generation, seq=seq, label=label, extras=extras,
            fragment=self._described.fragment, stall=filled.seconds, nbytes=filled.nbytes,
        )  # fmt: skip
        with self._desk.changed:
            core.offer(slot, fill)
            self._desk.say()
            for old in core.unused_arenas(arena.arena_id):
                if self._desk.link is not None:
                    self._desk.link.withdraw(old)
        hook("member.publish.offered")
        _log.info("publish.offered", member=core.member, label=label, seq=seq & 0xFFFFFFFF, seconds=round(filled.seconds, 4),
                  nbytes=filled.nbytes)  # fmt: skip
        return Publication(self._desk, seq, label, filled.seconds, filled.nbytes)

    def _claim(self, arena: SlotArena, deadline: float, timeout: float) -> SlotState:
        core = self._desk.core

        def free() -> SlotState | None:
            slot, say = core.claim(arena.arena_id)
            if say:
                self._desk.say()
            return slot

        def late() -> str:
            return (
                f"every slot of {core.member} was held for {timeout} s: {'; '.join(core.holders(arena.arena_id))}"
                f"{self._desk.silence()}. This call counts as its step: go on with the next one (or repeat it under its "
                "step's label), and look at the groups that hold them"
            )

        # The window is opened only where a mover has to free a slot: whoever opens it may have to wait for that mover.
        with self._desk.changed:
            self._desk.check()
            slot = free()
        if slot is not None:
            return slot
        with self._desk.turns.open(deadline), self._desk.changed:
            try:
                return self._desk.wait(free, deadline, late)
            except RefitTimeout as error:
                raise SlotsBusy(str(error), core.holders(arena.arena_id)) from None

    def _accept(self, described: Described, seq: int, deadline: float) -> None:
        """The tensors changed. A changed layout is examined before anything is copied; new memory alone is no matter."""
        if described.device is not self._described.device:
            raise LayoutError(
                f"the tensors of {self._desk.core.member} are on another device than when it joined; join again"
            )
        if described.fragment == self._described.fragment:
            self._described = described
            return
        core, before = self._desk.core, self._described
        self._remote.put_fragment(described.body, deadline)
        _log.info("layout.changed", member=core.member, was=before.fragment, now=described.fragment)

        def accepted() -> bool | None:
            group = core.my_group
            if group is not None and group.refused and core.heard >= said:
                raise LayoutError(f"the changed layout of group {group.name} cannot be served: {group.refused}")
            return True if core.accepted == described.fragment else None

        def late() -> str:
            return (
                f"the changed layout of {core.member} was not accepted in time; every rank of its group must publish it"
            )

        with self._desk.changed:
            core.source, core.source_from = described.fragment, seq
            self._desk.say()
            said = core.number
            try:
                self._desk.wait(accepted, deadline, late)
            except BaseException:
                core.source, core.source_from = before.fragment, 0
                self._desk.say()
                raise
        self._described = described
        if described.specs != before.specs:
            self._make_arena(described)
            self.offer_arena()
