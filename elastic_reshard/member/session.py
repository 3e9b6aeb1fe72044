"""Joining a job: what a trainer rank or an inference rank writes.

    m = er.join("127.0.0.1:29700", name="trainer-0", role="source", group=er.Group("trainer", size=2, rank=0),
                tensors=model.state_dict, wire_dtype=torch.bfloat16)
    pub = m.publish(label="step-7")

    m = er.join("127.0.0.1:29700", name="engine-0", role="destination", group=er.Group("engine", size=2, rank=0),
                tensors=params)
    result = m.install(timeout=60)

Live tensors are touched by the thread that calls publish or install, and by nobody else.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from elastic_reshard.errors import JoinRefused, LayoutError, NotAMember, RefitTimeout
from elastic_reshard.layout import Correspondence, ModelLayout
from elastic_reshard.log import logger
from elastic_reshard.member.arguments import Group, check_arguments
from elastic_reshard.member.core import MemberCore
from elastic_reshard.member.desk import Desk
from elastic_reshard.member.filler import Filler
from elastic_reshard.member.installer import Installer
from elastic_reshard.member.memory import MemoryReport, with_mover
from elastic_reshard.member.publisher import Publication, Publisher
from elastic_reshard.member.puller import Install, Puller
from elastic_reshard.member.remote import Remote
from elastic_reshard.member.stage import (
    Stage,
    StageName,
    Turns,
    WindowName,
    callers_device,
    stated,
)
from elastic_reshard.member.tensors import Tensors, Wire
from elastic_reshard.member.watcher import Event, Watcher
from elastic_reshard.mover.networks import networks_of
from elastic_reshard.protocol import ids
from elastic_reshard.protocol.base import Role
from elastic_reshard.protocol.docs import MemberState, PublicationDoc
from elastic_reshard.protocol.messages import GroupSpec
from elastic_reshard.protocol.window import Window
from elastic_reshard.watchdog.link import HostLink
from elastic_reshard.watchdog.start import HostConfig

__all__ = ["Group", "Member", "join"]

_log = logger("member")


@dataclass(frozen=True)
class _Side:
    """What `join` was given for one role."""

    tensors: Tensors | None
    layout: ModelLayout | None


def join(
    url: str,
    *,
    name: str,
    group: Group,
    role: Role | None = None,
    roles: Sequence[Role] | frozenset[Role] | set[Role] = (),
    tensors: Tensors | None = None,
    layout: ModelLayout | None = None,
    wire_dtype: Wire = None,
    install: Install | None = None,
    install_buffer: int | None = None,
    correspondences: Sequence[Correspondence] | None = None,
    destination_tensors: Tensors | None = None,
    destination_layout: ModelLayout | None = None,
    host: str | None = None,
    domain: str | None = None,
    token: str | None = None,
    runtime: str | os.PathLike[str] | None = None,
    renumber: Mapping[int, int] | None = None,
    stage: StageName = "auto",
    window: WindowName | None = None,
    deadline: float = 120.0,
) -> Member:
    """Become a member of the job at `url` ("HOST:PORT" or a URL). Every rank of the group calls it; returns when all are
    there and their layouts fit all others of the job. Blocks `deadline` seconds at most.

    name: of this process, unique in the group; a restarted process may use it again. role: "source" or "destination"; or
        `roles` with both: then `tensors` and `layout` are the source's, `destination_tensors` and `destination_layout` the
        other side's.
    tensors: this rank's tensors by name, or a callable that returns them, asked again at every publish and install (when
        that is called, and again if the other ranks are not there within 0.1 s): DTensors, plain local tensors with `layout`
        (in group ranks), or plain ones that are whole.
    wire_dtype: sources: the floating-point dtype to cast to, for all, or by name. correspondences: destinations: fused,
        renamed or transposed parameters. renumber: group rank of each global rank that DTensors' meshes name.
    install: destinations: called with an iterator of (name, tensor), assembled one at a time in a buffer of at most
        `install_buffer` bytes, instead of filling `tensors` in place; needs `layout`.
    host: label of this machine; members with one label share memory. domain: a label within it, instead of what the driver
        says of GPUs: members with one label map each other's memory, with unlike ones weights go by movers. token: the job's,
        else $ELASTIC_RESHARD_TOKEN, else what the supervisor left in the runtime folder. runtime: that folder, where the
        host's watchdog has its socket.
    stage: where arenas lie. "auto": where the tensors are; "device": the same, refused for CPU tensors; "host": in host memory,
        registered with the GPU of the tensors, for engines without room there.
    window: when this member's mover may work. "paused": only inside `install`, `receive`, `Publication.wait`, a
        `publish` that waits for a slot, and `with m.idle():`; "anytime". None: as "paused" where arenas and the network both
        use the device, else at any time.

    Raises JoinRefused (naming every layout violation, or CUDA MPS), Unauthorized, ArenaError (memory that does not fit, on
    the host or the GPU, with figures), LayoutError, SupervisorUnreachable, RefitTimeout (naming the ranks that are not
    there). After any of these nothing is left behind.
    """
    end = time.monotonic() + deadline
    wanted = frozenset(roles) | ({role} if role is not None else frozenset())
    check_arguments(wanted, group, install, tensors, layout, destination_tensors, stage, window)
    remote = Remote(url, token, Path(runtime) if runtime is not None else None)
    about = remote.about(end)
    label = host or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:128]
    try:
        spec = GroupSpec(name=group.name, size=group.size, rank=group.rank)
        core = MemberCore(ids.member_id(name, ids.incarnation()), spec, wanted, label, os.getpid())
        core.label = domain or ""
        core.statement()
    except ValidationError as error:
        raise LayoutError(f"names are 1 to 128 letters, digits, dots, dashes or underscores: {error}") from None
    sides = (_Side(tensors, layout), _Side(destination_tensors, destination_layout))
    if wanted == {"destination"}:
        sides = (sides[1], sides[0])
    member = Member(Desk(core), remote)
    try:
        where = Stage(core.member, stage)
        member._prepare(sides, wire_dtype, install, install_buffer, correspondences, renumber, about.cell, end, where)
        member._take_turns(where, window)
        config = HostConfig(
            job=about.job, host=label, url=remote.url, token=remote.token, runtime=remote.runtime,
            deadlines=about.deadlines,
        )  # fmt: skip
        member._attach(config, end)
        member._await_admission(end, deadline)
    except BaseException:
        member._abandon()
        raise
    return member


class Member:
    """This process, as a member of the job. Made by `join`. publish and install block only as long as they say; different
    threads may publish, install, watch and ask at the same time."""

    def __init__(self, desk: Desk, remote: Remote) -> None:
        self._desk, self._remote = desk, remote
        desk.on_supervisor = remote.say_again
        self._publisher: Publisher | None = None
        self._installer: Installer | None = None
        self._closing = threading.Lock()

    # -- joining

    def _prepare(
        self,
        sides: tuple[_Side, _Side],
        wire: Wire,
        install: Install | None,
        limit: int | None,
        correspondences: Sequence[Correspondence] | None,
        renumber: Mapping[int, int] | None,
        cell: int,
        deadline: float,
        stage: Stage,
    ) -> None:
        core = self._desk.core
        source, destination = sides
        if "source" in core.roles and source.tensors is not None:
            filler = Filler(source.tensors, source.layout, wire, core.group.rank, renumber)
            self._publisher = Publisher(self._desk, filler, self._remote, deadline, stage)
        if "destination" in core.roles:
            puller = Puller(
                core.group.rank, tensors=destination.tensors if install is None else None, given=destination.layout,
                install=install, correspondences=tuple(correspondences) if correspondences is not None else None,
                limit=limit, renumber=renumber, device=callers_device(stage.wanted) if install is not None else None,
            )  # fmt: skip
            self._installer = Installer(self._desk, puller, self._remote, cell, deadline, stage)
            self._desk.on_view = self._installer.lander.attend

    def _take_turns(self, stage: Stage, window: WindowName | None) -> None:
        """Know what to state of the device, and make the window if there is to be one."""
        core = self._desk.core
        core.window, core.device = stated(window, stage), stage.device.id if stage.device is not None else ""
        core.networks, core.reach = networks_of(stage.device, arenas=stage.on_device), stage.reach()
        if stage.device is not None or core.window != "anytime":
            self._desk.turns = Turns(core.member, Window())
        _log.info("member.stage", member=core.member, device=core.device, window=core.window, networks=core.networks,
                  memory=self.memory)  # fmt: skip

    def _attach(self, config: HostConfig, deadline: float) -> None:
        desk = self._desk
        with desk.changed:
            first = desk.core.statement()
        link = HostLink(config, first, hear=desk.hear, changed=desk.wake)
        try:
            link.open(deadline)
            with desk.changed:
                desk.link = link
        except BaseException:
            link.close(deadline=deadline)
            raise
        with desk.changed:
            if desk.core.unsaid:
                desk.say()
            if desk.on_view is not None:
                desk.on_view()
        if self._desk.turns.window is not None:
            link.offer_window(self._desk.turns.window.fd)
        if self._publisher is not None:
            self._publisher.offer_arena()

    def _await_admission(self, deadline: float, seconds: float) -> None:
        core = self._desk.core

        def admitted() -> bool | None:
            doc = core.me
            if doc is not None and doc.state is MemberState.REFUSED:
                raise JoinRefused(f"{core.member} was refused: {doc.reason}")
            return True if core.admitted else None

        def late() -> str:
            doc = core.me
            held = f" {doc.reason}." if doc is not None and doc.reason else ""
            return (
                f"group {core.group.name} was not complete within {seconds} s; missing: "
                f"{', '.join(core.missing()) or 'nobody (its layouts are still being compared)'}.{held}{self._desk.silence()}"
            )

        with self._desk.changed:
            try:
                self._desk.wait(admitted, deadline, late)
            except NotAMember:
                if self._desk.link is not None and self._desk.link.failure is not None:
                    raise self._desk.link.failure from None
                raise
        _log.info("member.joined", member=core.member, epoch=core.view.membership_epoch, term=core.view.term)

    # -- what a user calls

    @property
    def id(self) -> str:
        """Name and incarnation."""
        return self._desk.core.member

    @property
    def weight_version(self) -> int:
        """The version that this member's tensors hold by its group's verdict; 0: none, do not serve."""
        with self._desk.changed:
            held = self._desk.core.holding
        return held.weight_version if held is not None else 0

    @property
    def membership_epoch(self) -> int:
        """Rises with every change of the set of members."""
        with self._desk.changed:
            return self._desk.core.view.membership_epoch

    @property
    def memory(self) -> MemoryReport | None:
        """Bytes of a source's arena, and what was free before it was made; under "landing" the same of the landing arena, of a
        destination whose weights come from other hosts. A destination alone has only the latter, None before it is wanted.
        Where `needed` is more than is free it was not made, and `install` and `watch` raise ArenaError. Under "device" the same
        of an arena on a GPU, and what the mover takes there."""
        own = self._publisher.memory if self._publisher is not None else None
        landing = self._installer.lander.memory if self._installer is not None else None
        if self._desk.turns.window is not None and self._desk.turns.window.memory:
            own, landing = (with_mover(report, self._desk.turns.window.memory) for report in (own, landing))
        if own is None or landing is None:
            return own or landing
        return {**own, "landing": landing}

    def publish(
        self, label: str | None = None, *, extras: Mapping[str, Any] | None = None, timeout: float = 60.0
    ) -> Publication:
        """Copy this rank's tensors into a free slot and offer them. Every rank of the gang calls it for the same steps, with
        the same label. Returns after the local copy; the version lives on from then even if this process dies.

        label: opaque; names the step. It may go back and come again later, but steps in a row have labels of their own: a
            call with the label of the one that failed before it is that one again. Without one the ranks' calls are paired by
            their number, those that raised included, and one that is repeated is another; needed once a rank was replaced
            while others went on, or a call failed on some ranks only. extras: a small JSON-ready dict that travels along
            (rank 0's counts).
        Blocks for the copy, and at most `timeout` seconds for a free slot. Raises SlotsBusy (naming who holds them),
        LayoutError (a changed layout that cannot be served; nothing was copied), ProtocolError (extras; no label where one is
        needed), NotAMember.
        """
        if self._publisher is None:
            raise NotAMember(f"{self.id} is no source; join with role='source'")
        return self._publisher.publish(label, extras, timeout)

    def install(self, timeout: float = 120.0) -> dict[str, Any]:
        """Install the newest committed version, in this thread. Every rank of the group calls it, its engine paused; one
        verdict for all. Blocks until the verdict, at most `timeout` seconds.

        Returns a plain dict: weight_version, label, extras, publication, changed (False: nothing newer than what the group
        serves), install_pause (seconds), nbytes, group, membership_epoch.
        Raises GroupBroken (the group is PARTIAL: do not serve, install again), NothingInstallable (nothing was committed
        yet), RefitTimeout, NotAMember, ArenaError (no memory to land in what comes from other hosts: told once, and whenever
        nothing can be installed; it is tried again by itself).
        """
        if self._installer is None:
            raise NotAMember(f"{self.id} is no destination; join with role='destination'")
        deadline = time.monotonic() + timeout
        with self._desk.turns.open(deadline):
            return self._installer.install(timeout)

    def idle(self, timeout: float = 60.0) -> AbstractContextManager[None]:
        """`with m.idle():` around what this process computes nothing in: its mover may use the device meanwhile. The end
        blocks until the mover is outside again, at most `timeout` seconds; that it is not then is a log event. Any thread,
        also several. Does nothing for a member without a window."""
        return self._desk.turns.idle(timeout)

    @property
    def last_install(self) -> Mapping[str, Any]:
        """What the last successful `install` (or `receive`) returned; empty before."""
        return dict(self._installer.last) if self._installer is not None else {}

    def rehearse_install(self) -> Callable[[], int]:
        """For measuring: the last install's bare copy, to be called as often as wanted; returns bytes. Only while nobody
        publishes or serves. Raises NothingInstallable before the first install."""
        if self._installer is None:
            raise NotAMember(f"{self.id} is no destination; join with role='destination'")
        return self._installer.rehearse()

    def receive(self, timeout: float = 300.0) -> int:
        """Wait for a version newer than what the group serves, and install it. Returns its weight_version. Raises as
        `install`."""
        deadline = time.monotonic() + timeout
        core = self._desk.core

        def late() -> str:
            serving = core.my_group.serving if core.my_group is not None else 0
            return f"no version newer than {serving} within {timeout} s{self._desk.silence()}"

        telling = self._installer.receiving if self._installer is not None else None

        def ready() -> PublicationDoc | None:
            found = core.installable()
            if found is None and telling is not None:
                telling.check()
            return found

        while True:
            with self._desk.turns.open(deadline):
                self._desk.await_tidily(ready, deadline, late)
                result = self.install(max(0.1, deadline - time.monotonic()))
            if result["changed"]:
                return int(result["weight_version"])
            # A supervisor that has just started again did not know yet what the group serves.

    def watch(self, timeout: float | None = None) -> Iterator[Event]:
        """Events as they come: pending, installable, partial, abandoned, leave. Blocks between them; ends when this member
        has left or was asked to and is out, when its job is over, or after `timeout` seconds without one. Each watch is a
        listener of its own and begins with what is true.

        Raises NotAMember if this member was put out unasked (by force, or taken for dead); ArenaError, once, if there is no
        memory to land in what comes from other hosts."""
        watcher = Watcher(self._desk.core)
        telling = self._installer.watching if self._installer is not None else None
        while True:
            deadline = time.monotonic() + (timeout if timeout is not None else 3600.0)

            def news() -> list[Event] | None:
                if telling is not None:
                    telling.check()
                return list(watcher.news()) or None

            try:
                found = self._desk.await_tidily(news, deadline, lambda: "no event")
            except NotAMember:
                if self._desk.parted:
                    return
                raise
            except RefitTimeout:
                if timeout is None:
                    continue
                return
            yield from found

    def leave(self, deadline: float = 30.0) -> None:
        """Leave the job: the group stops being whole, what this member published stays to be installed. Blocks until the
        supervisor has taken note, at most `deadline` seconds, and 1 s more to take leave of the host's watchdog; then this
        process is detached, whatever they said.

        Raises RefitTimeout if the supervisor could not be told (it will find out by itself); nothing, if it is no member any
        more. May be called again."""
        if self._desk.link is None:
            return
        core = self._desk.core
        end = time.monotonic() + deadline

        def noted() -> bool | None:
            doc = core.me
            gone = doc is None or doc.state not in (MemberState.LIVE, MemberState.LEAVING)
            return True if gone or core.over else None

        try:
            with self._desk.changed:
                if not core.out:
                    core.leaving = True
                    self._desk.say()
                    self._desk.wait(
                        noted,
                        end,
                        lambda: f"{core.member} left, but the supervisor did not take note{self._desk.silence()}",
                    )
        except NotAMember:
            pass
        finally:
            self._detach(graceful=True, deadline=end)

    def _abandon(self) -> None:
        """Joining failed: say so, so that nobody waits for this process."""
        with self._desk.changed:
            if self._desk.link is not None:
                self._desk.core.leaving = True
                self._desk.say()
        self._detach(graceful=True)

    def _detach(self, graceful: bool, deadline: float | None = None) -> None:
        with self._closing:
            with self._desk.changed:
                link, self._desk.link = self._desk.link, None
                self._desk.on_view = None
                self._desk.changed.notify_all()
            if link is not None:
                link.close(graceful=graceful, deadline=deadline)
            self._desk.turns.close()
            if self._installer is not None:
                self._installer.close()
            if self._publisher is not None:
                self._publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
