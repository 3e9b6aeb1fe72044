"""The bare call: a collective that moves a model from one layout to another, in place, inside the callers' processes.

No elasticity here: an error ends the call on every member, and the group is formed anew for the next one. What makes it
survive is built above it, with the same plans and transports.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from elastic_reshard.arena import raw
from elastic_reshard.collective.agree import Header, all_told, bodies
from elastic_reshard.collective.fragments import Fragment, describe, fingerprint, joined, local_tensors
from elastic_reshard.collective.groups import Member, resolve
from elastic_reshard.collective.handle import Handle, Report
from elastic_reshard.collective.verify import Verification
from elastic_reshard.errors import (
    ArenaError,
    LayoutError,
    PeerRefused,
    PlanError,
    PlanMismatch,
    ReshardError,
    TransferError,
)
from elastic_reshard.layout import Correspondence, ModelLayout, WireDtype
from elastic_reshard.layout.dtensor import dtype_name
from elastic_reshard.log import logger
from elastic_reshard.plan import Plan, PlanOptions, Slice, Topology
from elastic_reshard.transport import Endpoint, PeerViews, Program, StagingPlan, Views, bind, run

__all__ = ["Handle", "Report", "Verify", "reshard"]

_log = logger("collective")
Verify = Literal["none", "sampled", "full"]
_DECLARED = 16  # tag on the domain channel
_PLANS = 8


def reshard(
    source: Mapping[str, torch.Tensor] | None = None,
    destination: Mapping[str, torch.Tensor] | None = None,
    *,
    group: dist.ProcessGroup | Endpoint | None = None,
    source_layout: ModelLayout | None = None,
    destination_layout: ModelLayout | None = None,
    correspondences: Sequence[Correspondence] | None = None,
    wire_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    topology: Topology | Sequence[Hashable] | None = None,
    verify: Verify = "sampled",
    staging: int = 64 << 20,
    message: int = 1 << 20,
    interface: str | None = None,
    deadline: float = 300.0,
    async_op: bool = False,
) -> Report | Handle:
    """Move the source's values into the destination's tensors, in place. Collective over the group.

    source, destination: this member's tensors by name, None for a side it has no part in; DTensors, or plain local tensors
        with `source_layout` / `destination_layout` in group ranks. A plain tensor without a layout is taken as whole, and
        equal on all members that give it. Destination tensors must not share memory with source tensors.
    correspondences: for fused, renamed or transposed parameters; must be equal on all members. None: equal names.
    wire_dtype: the floating-point dtype to cast to at the source, for all or by destination name; None: no cast.
    topology: domain of each member; None: members of one host are one domain. Only read when a group is formed.
    verify: "sampled" compares digests of up to 64 KiB of every 64th leg, others each time, "full" of all, "none" of nothing.
    staging: most bytes of staging memory of this member; message: most bytes of one message (the larger, the more
        often gloo loses sight of a peer's death in one). Both must be equal on all members.
    deadline: seconds for the whole call. async_op: return a Handle at once.

    Blocks until this member's tensors are complete and nobody reads its memory. Raises, before anything moves:
    LayoutMismatch (every violation), PlanMismatch, PeerRefused; later PeerLost, TransferTimeout, DigestMismatch, all on
    every member within the deadline. After these the destination's tensors are not to be used.
    """
    end = time.monotonic() + deadline
    member = resolve(group, topology, deadline, interface)
    asked = _Asked(
        source, destination, source_layout, destination_layout,
        tuple(correspondences) if correspondences is not None else None, wire_dtype, verify, staging, message,
    )  # fmt: skip
    handle = Handle(_Call(member, asked, end))
    try:
        handle.start()
        return handle if async_op else handle.wait()
    except KeyboardInterrupt as error:
        handle.abandon(error)
        raise


@dataclass(frozen=True)
class _Asked:
    """The arguments of one call, as given: what is wrong with them is refused inside the call, where others hear it."""

    source: Mapping[str, torch.Tensor] | None
    destination: Mapping[str, torch.Tensor] | None
    source_layout: ModelLayout | None
    destination_layout: ModelLayout | None
    correspondences: tuple[Correspondence, ...] | None
    wire_dtype: torch.dtype | Mapping[str, torch.dtype] | None
    verify: Verify
    staging: int
    message: int

    @cached_property
    def wire(self) -> WireDtype:
        """Dtypes by name; LayoutError for one that cannot be moved."""
        if isinstance(self.wire_dtype, Mapping):
            return {name: dtype_name(d) for name, d in self.wire_dtype.items()}
        return dtype_name(self.wire_dtype) if self.wire_dtype is not None else None

    @cached_property
    def options(self) -> PlanOptions:
        """PlanError for sizes that do not fit each other."""
        return PlanOptions(message=self.message, staging=self.staging)

    def digest(self, topology: Topology) -> bytes:
        """Of everything that must be equal on all members."""
        if self.verify not in get_args(Verify):
            raise PlanError(f"verify is {self.verify!r}; it must be one of {', '.join(get_args(Verify))}")
        wire = sorted(self.wire.items()) if isinstance(self.wire, Mapping) else self.wire
        said = repr((self.options, wire, self.correspondences, self.verify, topology.domains))
        return xxhash.xxh3_128(said.encode()).digest()


@dataclass(frozen=True)
class _Described:
    """What a member says of its tensors, as long as `state` does not change."""

    state: tuple[object, ...]
    source: Fragment
    destination: Fragment
    views: Views


@dataclass
class _Bound:
    """A program, and what it was bound to."""

    plan: str
    views: Views
    program: Program
    slice: Slice
    peers: dict[int, PeerViews]
    verifications: dict[str, Verification] = field(default_factory=dict)


@dataclass
class _State:
    """What an endpoint keeps between calls."""

    busy: threading.Lock = field(default_factory=threading.Lock)
    calls: int = 0
    keys: dict[tuple[bytes, bytes, bytes], bytes] = field(
        default_factory=dict
    )  # fragments and options -> key of the plan
    described: _Described | None = None
    bound: _Bound | None = None


# Plans by the content of the call they were made for; the same for all groups of this process.
_plans: OrderedDict[bytes, Plan] = OrderedDict()
_plans_lock = threading.Lock()


def _kept(key: bytes) -> Plan | None:
    with _plans_lock:
        plan = _plans.get(key)
        if plan is not None:
            _plans.move_to_end(key)
        return plan


def _keep(key: bytes, plan: Plan) -> None:
    with _plans_lock:
        _plans[key] = plan
        while len(_plans) > _PLANS:
            _plans.popitem(last=False)


class _Call:
    """One call of one member."""

    def __init__(self, member: Member, asked: _Asked, deadline: float) -> None:
        self.endpoint, self.renumber = member.endpoint, member.renumber
        self.asked, self.deadline = asked, deadline
        self.state: _State = self.endpoint.memo.setdefault("reshard", _State())
        self.planned = False
        self.refused = False

    def run(self) -> Report:
        """The whole call; an error in it closes the endpoint unless all members saw it alike before the first byte."""
        begun = time.monotonic()
        if not self.state.busy.acquire(blocking=False):
            raise TransferError("another call of this group is under way in this process; wait for its handle first")
        try:
            return self._run(begun)
        except BaseException as error:
            # Refusals are seen by all members at the same place: the group can go on with another call.
            if self.refused or isinstance(error, LayoutError | PlanError | PeerRefused):
                _log.warning("reshard.refused", member=self.endpoint.rank, error=str(error))
            else:
                _log.error("reshard.failed", member=self.endpoint.rank, error=str(error))
                self.endpoint.fail(error)
            raise
        finally:
            self.state.busy.release()

    def _run(self, begun: float) -> Report:
        plan, headers, views = self._enter()
        bound, fresh = self._bind(plan, headers, views)
        tally = run(bound.program, self.endpoint, self.deadline)
        verified = self._verify(bound)
        report = Report(
            plan.digest, plan.rounds.count, self.planned, fresh, tally.sent, tally.received, tally.pulled, tally.copied,
            tally.staged, bound.program.staging_bytes, tally.seconds, time.monotonic() - begun, verified,
        )  # fmt: skip
        _log.info("reshard.done", member=self.endpoint.rank, plan=plan.digest, sent=tally.sent, received=tally.received,
                  pulled=tally.pulled, seconds=report.seconds)  # fmt: skip
        return report

    def _enter(self) -> tuple[Plan, list[Header], Views]:
        """Say what this member has, hear the others, and hold the plan that all hold."""
        number = self.state.calls
        self.state.calls += 1
        try:
            described = self._described()
            options = self.asked.digest(self.endpoint.topology)
        except ReshardError as error:
            self._refuse(number, error)
            raise
        source, destination, views = described.source, described.destination, described.views
        guess = self.state.keys.get((source.content_id, destination.content_id, options), bytes(16))
        plan = _kept(guess)
        bound = self.state.bound
        kept = plan is not None and bound is not None and bound.plan == plan.digest and bound.views is views
        mine = Header(number, source.content_id, destination.content_id, options, rebind=not kept)
        if plan is not None:
            mine = replace(mine, key=guess, plan=bytes.fromhex(plan.digest))
        headers = all_told(self.endpoint, mine, self.deadline)
        unlike = [m for m, h in enumerate(headers) if h.options != options]
        if unlike:
            raise PlanMismatch(
                f"members {unlike} call with other options than member {self.endpoint.rank} (correspondences, wire_dtype, "
                "verify, staging, message or domains); pass the same on every member"
            )
        key = xxhash.xxh3_128(options + b"".join(h.source + h.destination for h in headers)).digest()
        if plan is None or any(h.key != key for h in headers):
            plan = self._agree(number, source, destination, key)
            self.state.keys[source.content_id, destination.content_id, options] = key
            # Everybody binds anew with a new plan.
            headers = [Header(h.call, rebind=True) for h in headers]
        elif any(h.plan != mine.plan for h in headers):
            raise PlanMismatch("members hold different plans for the same call; install the same version everywhere")
        return plan, headers, views

    def _refuse(self, number: int, error: ReshardError) -> None:
        """Tell the others why this member cannot take part: then nobody waits, and the group stays usable."""
        with contextlib.suppress(PeerRefused):  # this member's own reason is the one to raise
            all_told(self.endpoint, Header(number, refused=str(error)), self.deadline)
        self.refused = True

    def _described(self) -> _Described:
        """What this member says of its tensors; kept from the call before if it is still true."""
        asked, rank = self.asked, self.endpoint.rank
        given = tuple(
            layout.content_id if layout is not None else None
            for layout in (asked.source_layout, asked.destination_layout)
        )
        state = (given, fingerprint(asked.source), fingerprint(asked.destination))
        known = self.state.described
        if known is not None and known.state == state:
            return known
        source = describe(asked.source, asked.source_layout, rank, self.renumber)
        destination = describe(asked.destination, asked.destination_layout, rank, self.renumber)
        views = Views(
            {(0, name): t for name, t in local_tensors(asked.source).items()},
            {(0, name): t for name, t in local_tensors(asked.destination).items()},
        )
        _refuse_shared(views)
        found = _Described(state, source, destination, views)
        self.state.described = found
        return found

    def _body(self, source: Fragment, destination: Fragment) -> bytes:
        return json.dumps({"s": source.to_data(), "d": destination.to_data()}).encode()

    def _agree(self, number: int, source: Fragment, destination: Fragment, key: bytes) -> Plan:
        """Tell the fragments, plan, and compare what came out. Errors in the layouts are the same on every member."""
        body = self._body(source, destination)
        lengths = all_told(self.endpoint, Header(number, body=len(body)), self.deadline)
        said = [json.loads(raw) for raw in bodies(self.endpoint, lengths, body, self.deadline)]
        plan = _kept(key)
        if plan is None:
            self.planned = True
            plan = Plan.between(
                joined("source", [s["s"] for s in said]),
                joined("destination", [s["d"] for s in said]),
                self.endpoint.topology,
                self.asked.options,
                self.asked.correspondences,
                self.asked.wire,
            )
            _log.info("reshard.planned", member=self.endpoint.rank, plan=plan.digest, tensors=len(plan.tensors),
                      rounds=plan.rounds.count)  # fmt: skip
        digests = all_told(self.endpoint, Header(number, plan=bytes.fromhex(plan.digest)), self.deadline)
        unlike = [m for m, h in enumerate(digests) if h.plan.hex() != plan.digest]
        if unlike:
            raise PlanMismatch(
                f"members {unlike} made another plan than member {self.endpoint.rank} from the same layouts; install the "
                "same version everywhere. Nothing was moved"
            )
        _keep(key, plan)
        return plan

    def _bind(self, plan: Plan, headers: Sequence[Header], views: Views) -> tuple[_Bound, bool]:
        """The program over these tensors: kept, or made together with all members of the domain."""
        near = (self.endpoint.rank, *self.endpoint.domain_peers)
        bound = self.state.bound
        if bound is not None and not any(headers[m].rebind for m in near):
            if any(h.rebind for h in headers):  # members of other domains bind: hear whether they can
                all_told(self.endpoint, Header(headers[0].call), self.deadline)
            return bound, False
        if bound is not None:
            self.state.bound = None
            for peer in bound.peers.values():
                peer.close()
        part = plan.slice(self.endpoint.rank)
        try:
            staged = StagingPlan(part, views, self.asked.options.staging)
        except ReshardError as error:
            self._refuse(headers[0].call, error)
            raise
        all_told(self.endpoint, Header(headers[0].call), self.deadline)
        arena = self.endpoint.staging(staged.nbytes) if staged.nbytes else None
        payload, fds = views.declaration(arena, staged.offsets)
        peers: dict[int, PeerViews] = {}
        try:
            for member in self.endpoint.domain_peers:
                self.endpoint.channel.send(member, _DECLARED, payload, fds, deadline=self.deadline)
            for member in self.endpoint.domain_peers:
                told = self.endpoint.channel.take(member, _DECLARED, deadline=self.deadline)
                peers[member] = PeerViews(member, told.payload, list(told.fds))
        finally:
            _close(fds)
        fresh = _Bound(plan.digest, views, bind(staged, arena, peers, part.rounds), part, peers)
        self.state.bound = fresh
        return fresh, True

    def _verify(self, bound: _Bound) -> int:
        if self.asked.verify == "none":
            return 0
        if self.asked.verify not in bound.verifications:
            bound.verifications[self.asked.verify] = Verification(
                bound.slice, bound.views, full=self.asked.verify == "full", cast=self.asked.wire is not None
            )
        return bound.verifications[self.asked.verify].run(self.endpoint, self.state.calls, self.deadline)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _refuse_shared(views: Views) -> None:
    """ArenaError when a destination tensor has memory in common with a source tensor (it would be overwritten while
    read), with another destination tensor, or with itself. Views that lie between each other's elements are fine."""
    for (_, name), t in views.destination.items():
        if t.numel() and any(n > 1 and step == 0 for n, step in zip(t.shape, t.stride(), strict=True)):
            raise ArenaError(f"{name} has one memory for several elements (expanded); clone it before it is written")

    def spans(tensors: Mapping[tuple[int, str], torch.Tensor], side: int) -> list[tuple[int, int, int, str]]:
        found = []
        for (_, name), t in tensors.items():
            if t.numel():
                begin = t.data_ptr()
                last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
                found.append((begin, begin + (last + 1) * t.element_size(), side, name))
        return found

    tables = (views.source, views.destination)
    reaching: list[tuple[int, int, str]] = []
    for begin, end, side, name in sorted(spans(views.source, 0) + spans(views.destination, 1)):
        reaching = [other for other in reaching if other[0] > begin]
        for _, of, other in reaching:
            if (side or of) and _overlap(tables[side][0, name], tables[of][0, other]):
                raise ArenaError(
                    f"{other} and {name} share memory, and {'both are' if side == of else 'one is'} written "
                    "by this call; give destination tensors memory of their own (er.empty_like)"
                )
        reaching.append((end, side, name))


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have an element's memory in common; True when that is too hard to tell."""
    try:
        return bool(np.shares_memory(raw(a), raw(b), max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
