"""Installing: the caller's thread asks, is given its group's ticket, pulls, reports, and hears the group's one verdict."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from elastic_reshard.arena.device import DeviceMemory, Registered
from elastic_reshard.arena.host import MappedArena
from elastic_reshard.arena.landing import LandingReader
from elastic_reshard.arena.shared import map_memory
from elastic_reshard.arena.slots import SlotReader
from elastic_reshard.errors import GroupBroken, NothingInstallable, RefitTimeout, ReshardError, ShardLost
from elastic_reshard.log import logger
from elastic_reshard.member.desk import Desk
from elastic_reshard.member.landed import Landed
from elastic_reshard.member.lander import Lander, Telling
from elastic_reshard.member.puller import Origin, Prepared, Puller, Request
from elastic_reshard.member.remote import Remote
from elastic_reshard.member.stage import Stage
from elastic_reshard.member.tensors import Look
from elastic_reshard.protocol.docs import GroupDoc, PublicationDoc, PublicationState, TicketDoc, VerdictDoc
from elastic_reshard.protocol.hooks import hook

__all__ = ["Installer"]

_log = logger("member")
# The group's ticket ends a little before the call does, so that a survivor hears who was late instead of only being late.
_MARGIN = 1.0
# Seconds for which a look at the live tensors is good: where no rank is missing, the ticket comes within some milliseconds;
# during a longer wait another thread may move them.
_FRESH = 0.1
_AT_ONCE = 4  # arenas that are unmapped before somebody is listened to again
_SERVED = (PublicationState.MOVING, PublicationState.COMMITTED)


class _Ahead:
    """A look at the live tensors, and at them no longer than it is good: they may be ones that the user is about to replace."""

    def __init__(self, look: Look | None) -> None:
        self._look, self._until = look, time.monotonic() + _FRESH

    def age(self) -> None:
        """Let go of it once it is old. Called now and then."""
        if time.monotonic() >= self._until:
            self._look = None

    def take(self) -> Look | None:
        """The look, if it is good; it is the caller's alone from now on."""
        self.age()
        look, self._look = self._look, None
        return look


class Installer:
    """The destination side of one member. One install at a time, in the caller's thread."""

    def __init__(self, desk: Desk, puller: Puller, remote: Remote, cell: int, deadline: float, stage: Stage) -> None:
        """Describe the tensors and tell the layout. Blocks until `deadline` at most. cell: bytes, of landing arenas."""
        self._desk, self._puller, self._remote = desk, puller, remote
        self._busy = threading.Lock()
        self._readers: dict[str, SlotReader] = {}
        self._landing: dict[str, LandingReader] = {}
        self._request: Request | None = None
        self._tidy_at: tuple[object, ...] = ()  # when nothing was found to be tidied
        self._registered: dict[str, Registered] = {}
        self.last: dict[str, Any] = {}
        body, fragment = puller.describe()
        stage.take(puller.device)
        desk.chores = self
        self.lander = Lander(desk, remote, cell, stage.of(puller.device))
        self._telling, self.watching, self.receiving = (Telling(self.lander) for _ in range(3))
        remote.put_fragment(body, deadline)
        desk.core.destination = fragment

    def install(self, timeout: float) -> dict[str, Any]:
        """See `Member.install`."""
        deadline = time.monotonic() + timeout
        if not self._busy.acquire(timeout=timeout):
            raise RefitTimeout(f"another install of {self._desk.core.member} was under way for {timeout} s")
        try:
            return self._install(deadline, timeout)
        finally:
            self._busy.release()

    def _install(self, deadline: float, timeout: float) -> dict[str, Any]:
        core = self._desk.core
        pause = 0.0
        with self._desk.changed:
            self._desk.check()
            idle = core.installable() is None
            self._telling.check(idle=idle)
            core.ask(timeout - min(_MARGIN, timeout / 4))
            self._desk.say()
        try:
            ahead = _Ahead(None if idle else self._look())  # while the request is on its way, and not in the pause
            ticket, answer = self._granted(deadline, timeout, ahead)
            if ticket is not None:
                pause = self._pull(ticket, deadline, ahead.take())
            if answer is None or ticket is not None:
                answer = self._verdict(deadline, timeout)
        except BaseException:
            with self._desk.changed:
                core.end_call(None)
                if self._desk.link is not None:
                    self._desk.say()
            raise
        with self._desk.changed:
            core.end_call(answer)
            self._desk.say()
        self.last = self._result(answer, pause)
        return self.last

    def _look(self) -> Look | None:
        """The live tensors, ahead of the ticket. What fails here fails again where the group hears of it."""
        try:
            return self._puller.look()
        except Exception:  # noqa: BLE001 - whatever the user's function raises, it raises again where it is reported
            return None

    def _granted(self, deadline: float, timeout: float, ahead: _Ahead) -> tuple[TicketDoc | None, VerdictDoc | None]:
        core = self._desk.core

        def told() -> tuple[TicketDoc | None, VerdictDoc | None] | None:
            ahead.age()
            ticket, verdict = core.grant(), core.answer()
            return (ticket, verdict) if ticket is not None or verdict is not None else None

        def late() -> str:
            group, others = core.my_group, "the other ranks"
            if group is not None:
                others = (
                    ", ".join(m or f"rank {r}" for r, m in enumerate(group.members) if m != core.member) or "nobody"
                )
            absent = f" Not there: {', '.join(core.missing())}." if core.missing() else ""
            return (
                f"group {core.group.name} did not come to install within {timeout} s: every rank must call install(); "
                f"{core.member} waited for {others}.{absent}{self._desk.silence()}"
            )

        with self._desk.changed:
            ticket, verdict = self._desk.wait(told, deadline, late)
            if ticket is not None:
                core.take_up(ticket)
                self._desk.say()
        hook("member.install.granted")
        return ticket, verdict

    def _pull(self, ticket: TicketDoc, deadline: float, look: Look | None) -> float:
        """Copy, compare the generations of all slots that were read, report. Never raises for what others did wrong: the
        report is how the group learns of it. Seconds in which the live tensors were touched."""
        core = self._desk.core
        reason, nbytes, begun = "", 0, time.monotonic()
        try:
            prepared = self._prepare(ticket, deadline, look)
            reason = self._changed(prepared)
            if not reason:
                hook("member.install.pulling")
                nbytes = prepared.run()
                reason = self._changed(prepared)
            hook("member.install.pulled")
        except ShardLost as error:  # nothing was read; one verdict for all ranks
            reason = f"{core.member} cannot get all that it needs in domain {core.domain}: {error}"
        except BaseException as error:
            self._report(f"{type(error).__name__}: {error}", time.monotonic() - begun, nbytes)
            raise
        seconds = time.monotonic() - begun
        self._report(reason, seconds, nbytes)
        _log.info("install.pulled", member=core.member, ticket=ticket.id, version=ticket.weight_version, reason=reason,
                  seconds=round(seconds, 4), nbytes=nbytes)  # fmt: skip
        return seconds

    def _report(self, reason: str, seconds: float, nbytes: int) -> None:
        with self._desk.changed:
            self._desk.core.report(not reason, reason, seconds, nbytes)
            if self._desk.link is not None:
                self._desk.say()
        hook("member.install.reported")

    @staticmethod
    def _changed(prepared: Prepared) -> str:
        ranks, landed = prepared.changed(), prepared.lapsed()
        if landed:
            return f"landing slots of {', '.join(landed)} were reset while they were read"
        return f"slots of source ranks {ranks} were written again while they were read" if ranks else ""

    def _prepare(self, ticket: TicketDoc, deadline: float, look: Look | None) -> Prepared:
        with self._desk.changed:
            publication = self._desk.core.view.publications.get(ticket.publication)
            group = self._desk.core.my_group
            gone = self._desk.core.gone()
        if publication is None or group is None or group.destination_layout is None:
            raise ReshardError(f"ticket {ticket.id} is for a publication that the view does not have; install again")
        source, _ = self._remote.layout(publication.layout, deadline)
        destination, correspondences = self._remote.layout(group.destination_layout, deadline)
        here = [s for s in publication.sources if s.where == self._desk.core.domain and s.member not in gone]
        origins = {s.rank: Origin(self._reader(s.arena, deadline), s.slot, s.generation) for s in here}
        landed: tuple[Landed, ...] = ()
        if len(here) < len(publication.sources):
            landed = self._landed(publication, group.destination_layout, gone, deadline)
        self._request = Request(source, destination, origins, correspondences, landed)
        prepared = self._puller.check(self._request, look)
        self._forget(publication)
        return prepared

    def _landed(
        self, publication: PublicationDoc, layout: str, gone: Collection[str], deadline: float
    ) -> tuple[Landed, ...]:
        """What has come from other domains: landing slots of this one in the group's layout, whichever group's they are."""
        core, found = self._desk.core, []
        for at in publication.landings:
            if at.where != core.domain or at.layout != layout or at.member in gone:
                continue
            if at.arena not in self._landing:
                self._landing[at.arena] = LandingReader(*self._held(at.arena, deadline))
            looked = Landed.look(self._landing[at.arena], at.slot, at.rank, at.member, publication.id)
            if looked is not None:
                found.append(looked)
            else:
                _log.warning("install.landing_reset", member=core.member, publication=publication.id, of=at.member,
                             arena=at.arena, slot=at.slot)  # fmt: skip
        return tuple(found)

    def _reader(self, arena: str, deadline: float) -> SlotReader:
        """The arena, mapped once and kept: a fresh mapping's first read costs twice."""
        if arena not in self._readers:
            self._readers[arena] = SlotReader(*self._held(arena, deadline))
        return self._readers[arena]

    def _held(self, arena: str, deadline: float) -> tuple[MappedArena, bytes, str, DeviceMemory | None]:
        link = self._desk.link
        if link is None:
            raise ReshardError(f"{self._desk.core.member} has left")
        held, device = link.arena(arena, deadline), self._puller.device
        try:
            memory = map_memory(held.table, held.memory, device, arena_id=arena)
        except BaseException:
            os.close(held.fd)
            raise
        reached = device is not None and memory is None
        mapped = MappedArena(held.fd, for_device=reached)
        if device is not None and memory is None:
            self._registered[arena] = device.host(mapped.bytes)
        return mapped, held.table, arena, memory

    def _forget(self, publication: PublicationDoc) -> None:
        """Unmap arenas that neither this publication nor one that may still be installed lies in: a mapping keeps a dead
        trainer's memory."""
        with self._desk.changed:
            dropped = self._dropped(publication)
        for arena in dropped:
            self._let_go(arena)

    def _dropped(self, *more: PublicationDoc) -> list[str]:
        """Mapped arenas in which nothing lies that may still be installed. The caller holds the desk's lock."""
        docs = [*more, *(p for p in self._desk.core.view.publications.values() if p.state in _SERVED)]
        known = {at.arena for doc in docs for at in doc.sources} | {at.arena for doc in docs for at in doc.landings}
        return [arena for arena in (*list(self._readers), *list(self._landing)) if arena not in known]

    @property
    def untidy(self) -> bool:
        """Whether `tidy` has something to do. The caller holds the desk's lock; never waits."""
        if self._busy.locked() or not (self._readers or self._landing):
            return False
        looked = (self._desk.core.view.instance, self._desk.core.view.revision, len(self._readers), len(self._landing))
        if self._tidy_at != looked and not self._dropped():
            self._tidy_at = looked
        return self._tidy_at != looked

    def tidy(self) -> None:
        """Unmap some of the arenas that no version needs any more, in the caller's thread: a few at a time, as a GPU's may wait
        for what runs there. Does nothing while an install is under way, which does it too."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            with self._desk.changed:
                dropped = self._dropped()[:_AT_ONCE]
            for arena in dropped:
                self._let_go(arena)
            if dropped:
                _log.info("install.unmapped", member=self._desk.core.member, arenas=dropped)
        finally:
            self._busy.release()

    def _let_go(self, arena: str) -> None:
        for held in (self._readers, self._landing):
            reader = held.pop(arena, None)
            if reader is not None:
                self._drop(reader)

    def _drop(self, reader: SlotReader) -> None:
        request = self._request
        if request is not None:
            needed = (*(o.reader for o in request.origins.values()), *(s.reader for s in request.landed))
            self._request = None if reader in needed else request  # then it can't be rehearsed any more
        self._puller.forget(reader)
        registered = self._registered.pop(reader.arena_id, None)
        if registered is not None:
            registered.close()
        reader.close()

    def _verdict(self, deadline: float, timeout: float) -> VerdictDoc:
        core = self._desk.core

        def late() -> str:
            return (
                f"{core.member} installed, but heard no verdict of its group within {timeout} s{self._desk.silence()}. Do "
                "not serve; call install() again: it returns the verdict, or repeats the install"
            )

        with self._desk.changed:
            return self._desk.wait(core.answer, deadline, late)

    def _result(self, verdict: VerdictDoc, pause: float) -> dict[str, Any]:
        core = self._desk.core
        if verdict.verdict == "partial":
            raise GroupBroken(
                f"group {core.group.name} is PARTIAL: installing version {verdict.weight_version} broke off "
                f"({verdict.reason}). Its tensors may be of two versions: do not serve, install again",
                verdict.members,
            )
        if verdict.verdict == "nothing" and not verdict.publication:
            raise NothingInstallable(f"nothing was committed yet, so group {core.group.name} has nothing to install")
        with self._desk.changed:
            publication = core.view.publications.get(verdict.publication)
            epoch, group = core.view.membership_epoch, core.my_group
        return _told(verdict, publication, pause, epoch, group, core.install.nbytes)

    def rehearse(self) -> Callable[[], int]:
        """The copy of the last install, bare, to be measured: it reads the slots again and overwrites the live tensors."""
        if self._request is None:
            raise NothingInstallable(f"{self._desk.core.member} has installed nothing yet")
        return self._puller.check(self._request).run

    def close(self) -> None:
        """Unmap everything."""
        self.lander.close()
        self._request = None
        for reader in (*self._readers.values(), *self._landing.values()):
            self._drop(reader)
        self._readers.clear()
        self._landing.clear()
        self._puller.close()


def _told(
    verdict: VerdictDoc, doc: PublicationDoc | None, pause: float, epoch: int, group: GroupDoc | None, nbytes: int
) -> dict[str, Any]:
    changed = verdict.verdict == "current"
    return {
        "weight_version": verdict.weight_version,
        "publication": verdict.publication,
        "label": doc.label if doc is not None else None,
        "extras": dict(doc.extras) if doc is not None else {},
        "changed": changed,
        "group": group.name if group is not None else "",
        "install_pause": pause,
        "nbytes": nbytes if changed else 0,
        "membership_epoch": epoch,
    }
