"""The supervisor's state: plain immutable data, and a draft in which one step writes the next state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from elastic_reshard.protocol.deadlines import Deadlines, Policies
from elastic_reshard.protocol.docs import (
    GroupDoc,
    MemberDoc,
    MemberState,
    PublicationDoc,
    PublicationState,
    TransferDoc,
)
from elastic_reshard.protocol.messages import Fill, LedgerSaid, MoverSaid, Statement
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor.events import Effects, Examine, Examined, Happened, Match

__all__ = [
    "Covers",
    "Draft",
    "Fragments",
    "Group",
    "Growing",
    "Host",
    "Job",
    "Member",
    "Owed",
    "Publication",
    "Suspended",
    "Transfer",
]

Covers = Callable[[str, frozenset[int]], bool]
Fragments = tuple[tuple[str | None, str | None], ...]

_PRESENT = (MemberState.JOINING, MemberState.LIVE, MemberState.LEAVING)
_READABLE = (*_PRESENT, MemberState.ORPHANED)


@dataclass(frozen=True, slots=True)
class Host:
    """A host's watchdog as last heard; greeted: when it said its last Hello."""

    name: str
    heard: float
    greeted: float = 0.0
    watchdog: str = ""
    connected: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """One incarnation. said: None if it was not heard in this term. vouched_by: when its host's watchdog must have named it
    at the latest; None once it did. gone: its process has ended; kept: its arenas have not. by_drain: it was asked to leave
    because its host is drained. since: when its state last changed, as far as this term knows."""

    doc: MemberDoc
    said: Statement | None = None
    vouched_by: float | None = None
    gone: bool = False
    kept: bool = True
    leave_by: float | None = None
    by_drain: bool = False
    since: float = 0.0

    @property
    def present(self) -> bool:
        """Its process is there, as far as anybody knows, and it belongs to the job."""
        return not self.gone and self.doc.state in _PRESENT

    @property
    def taking_part(self) -> bool:
        """Present, heard in this term and admitted."""
        return not self.gone and self.said is not None and self.doc.state in (MemberState.LIVE, MemberState.LEAVING)

    @property
    def offers(self) -> tuple[Fill, ...]:
        """Slots that can still be minted, of a dead member too."""
        if self.said is None or not self.said.fills:
            return ()
        return self.said.fills if self.kept and self.doc.state in _READABLE else ()


@dataclass(frozen=True, slots=True)
class Group:
    """A group. restored: from the journal, and since then none of its members has gone and no ticket was judged. asked,
    examined: the fragments whose joined layouts were asked for, and the last answer. first_ready: (seq, time) of the first
    rank that offered it. behind_since: since when it does not serve what was committed last. Moments as in Publication."""

    doc: GroupDoc
    restored: bool = False
    adopting: tuple[str, ...] = ()
    asked: Fragments | None = None
    examined: Examined | None = None
    first_ready: tuple[int, float] = (0, 0.0)
    ticket_until: float = 0.0
    behind_since: float | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication, and when it began by this supervisor's clock, moved on by the time in which it listened to nobody."""

    doc: PublicationDoc
    begun: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """An epoch's attempt; moments as in Publication. cells: how many had landed when that last rose, at `moved`. since:
    when its state last changed. awaited: of each member, how often another's mover was seen waiting for it. begun_with:
    cells that had landed before it."""

    doc: TransferDoc
    begun: float
    since: float
    moved: float
    cells: int = 0
    begun_with: int = 0
    awaited: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Suspended:
    """A transfer that could not go on with who was present: tried again when others can be, given up at `until`."""

    publication: str
    present: frozenset[str]
    reason: str
    until: float


@dataclass(frozen=True, slots=True)
class Owed:
    """A mover owes a word of a transfer (`unproved`): waited for until then; in_vain: not any more, until that word comes."""

    mover: str
    transfer: str
    until: float
    in_vain: bool = False


@dataclass(frozen=True, slots=True)
class Growing:
    """A Grow under way, or one that is done. within: seconds that it was given; ready: groups that wait for the others."""

    name: str
    groups: int
    members: int
    until: float
    within: float = 60.0
    ready: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    came: int = 0  # members of the admitted
    done: bool = False
    cancelled: bool = False


@dataclass(frozen=True)
class Job:
    """Everything that the supervisor knows. Only `core.step` makes the next one.

    tickets: how many were issued in this term; part of their ids, so that none comes twice.
    fits: what Match answered, by (source layout, destination layout). waiting: members without a seat, in order.
    judge_from: before this nobody is given up. forgiven: time up to there was forgiven already. recover_from: members that
    must come before anything is decided. movers: the latest of each member's. owed: those who owe a word (`unproved`).
    ledgers: what landed, by (publication, member). slow: (publication, group) that others wait for no more. tried:
    (publication, stalls, epochs in a row without a new cell). given_up: (publication, group) that can't have it from those
    reachable then, and until when that is not tried again. alone: a publication whose groups are served one by one.
    lateness: how often a group was left behind since it last had what was committed.
    grown: grows that are over, oldest first. drained: hosts that are to be empty, and the seconds that members there are given.
    started_with: the policies before anybody changed them.
    """

    name: str
    term: int
    instance: str
    deadlines: Deadlines = field(default_factory=Deadlines)
    policies: Policies = field(default_factory=Policies)
    membership_epoch: int = 0
    revision: int = 0
    weight_version: int = 0
    tickets: int = 0
    committed: str = ""
    members: Mapping[str, Member] = field(default_factory=dict)
    groups: Mapping[str, Group] = field(default_factory=dict)
    publications: Mapping[str, Publication] = field(default_factory=dict)
    transfers: Mapping[str, Transfer] = field(default_factory=dict)
    hosts: Mapping[str, Host] = field(default_factory=dict)
    movers: Mapping[str, MoverSaid] = field(default_factory=dict)
    owed: Mapping[str, Owed] = field(default_factory=dict)
    ledgers: Mapping[tuple[str, str], LedgerSaid] = field(default_factory=dict)
    slow: frozenset[tuple[str, str]] = frozenset()
    given_up: Mapping[tuple[str, str], tuple[frozenset[str], float]] = field(default_factory=dict)
    alone: str = ""
    lateness: Mapping[str, int] = field(default_factory=dict)
    suspended: Suspended | None = None
    tried: tuple[str, int, int] = ("", 0, 0)
    serial: int = 0
    growing: Growing | None = None
    grown: tuple[Growing, ...] = ()
    drained: Mapping[str, float] = field(default_factory=dict)
    started_with: Policies = field(default_factory=Policies)
    cell: int = 1 << 20
    verify: Literal["sampled", "full"] = "sampled"
    fits: Mapping[tuple[str, str], str] = field(default_factory=dict)
    matching: frozenset[tuple[str, str]] = frozenset()
    waiting: tuple[str, ...] = ()
    stepped: float = 0.0
    settled: float | None = None  # when everything was looked at last; None: something is pending
    judge_from: float = 0.0
    forgiven: float = 0.0
    recover_from: int = 0


class Draft:
    """The next state while one step writes it, and what the step will answer. Every change of a document goes through
    `put_*`, so that what is told is what changed."""

    def __init__(self, job: Job, now: float, covers: Covers) -> None:
        self.job, self.now, self.covers = job, now, covers
        self.policies, self.deadlines = job.policies, job.deadlines
        self.membership_epoch, self.weight_version, self.committed = (
            job.membership_epoch,
            job.weight_version,
            job.committed,
        )
        self.tickets = job.tickets
        self.members, self.groups = dict(job.members), dict(job.groups)
        self.publications, self.hosts = dict(job.publications), dict(job.hosts)
        self.transfers, self.movers, self.ledgers = dict(job.transfers), dict(job.movers), dict(job.ledgers)
        self.owed = dict(job.owed)
        self.slow, self.given_up, self.alone = set(job.slow), dict(job.given_up), job.alone
        self.lateness = dict(job.lateness)
        self.suspended, self.tried, self.serial, self.growing = job.suspended, job.tried, job.serial, job.growing
        self.grown, self.drained = job.grown, dict(job.drained)
        self.fits, self.matching, self.waiting = dict(job.fits), set(job.matching), list(job.waiting)
        self.judge_from, self.recover_from, self.forgiven = job.judge_from, job.recover_from, job.forgiven
        self.durable = self.epoch_ended = False
        self.settled = job.settled
        self.heard: dict[str, dict[str, int]] = {}
        self.snapshots: list[str] = []
        self.silent: list[str] = []
        self.examine: list[Examine] = []
        self.match: list[Match] = []
        self.happened: list[Happened] = []
        self._touched: tuple[set[str], ...] = (set(), set(), set(), set())
        self._at: dict[str, dict[str, None]] | None = None  # host -> ids of its members
        self.memo: dict[int, tuple[Any, Any]] = {}  # id of something immutable -> (it, what was made of it)

    # -- reading

    def group_members(self, group: Group) -> Iterator[tuple[int, Member]]:
        """(rank, member) of every seat that somebody was ever given."""
        for rank, member in enumerate(group.doc.members):
            if member in self.members:
                yield rank, self.members[member]

    @property
    def touched(self) -> bool:
        """Whether this step has written anything that others must look at, but for signs of life."""
        return any(self._touched) or bool(self.silent or self.snapshots or self.examine or self.match)

    def members_at(self, host: str) -> list[Member]:
        """Members of a host. Sorted by host once a step."""
        if self._at is None:
            self._at = {}
            for name, member in self.members.items():
                self._at.setdefault(member.doc.host, {})[name] = None
        return [self.members[name] for name in self._at.get(host, ()) if name in self.members]

    def moving(self) -> Publication | None:
        """The publication that moves, if one does."""
        return next((p for p in self.publications.values() if p.doc.state is PublicationState.MOVING), None)

    @property
    def epoch(self) -> int:
        """The membership's epoch as it will be told."""
        return self.membership_epoch + self.epoch_ended

    def active(self) -> Transfer | None:
        """The transfer in hand."""
        return next(iter(self.transfers.values()), None)

    def fit(self, source_layout: str, destination_layout: str) -> str | None:
        """What Match answered; None while it is being asked."""
        key = (source_layout, destination_layout)
        if key not in self.fits and key not in self.matching:
            self.matching.add(key)
            self.match.append(Match(*key))
        return self.fits.get(key)

    def in_use(self, member: str) -> bool:
        """Whether a publication that moves or may be installed lies in the member's arenas, or its mover is at work."""
        served = [
            p.doc
            for p in self.publications.values()
            if p.doc.state in (PublicationState.MOVING, PublicationState.COMMITTED)
        ]
        return (
            any(member in t.doc.members for t in self.transfers.values())
            or any(source.member == member for doc in served for source in doc.sources)
            or any(part.member == member for doc in served for part in doc.landings)
        )

    # -- writing

    def put_member(self, member: Member) -> None:
        """Add or replace."""
        if self._at is not None and member.doc.id not in self.members:
            self._at.setdefault(member.doc.host, {})[member.doc.id] = None
        self.members[member.doc.id] = member
        self._touched[0].add(member.doc.id)

    def drop_member(self, member: str) -> None:
        """Remove, document and all."""
        del self.members[member]
        self._touched[0].add(member)
        if member in self.waiting:
            self.waiting.remove(member)

    def put_group(self, group: Group) -> None:
        """Add or replace."""
        self.groups[group.doc.name] = group
        self._touched[1].add(group.doc.name)

    def change_group(self, name: str, **changes: Any) -> None:
        """Change fields of a group's document."""
        group = self.groups[name]
        if any(getattr(group.doc, key) != value for key, value in changes.items()):
            self.put_group(replace(group, doc=group.doc.model_copy(update=changes)))

    def drop_group(self, name: str) -> None:
        """Remove, document and all."""
        del self.groups[name]
        self._touched[1].add(name)

    def put_publication(self, publication: Publication) -> None:
        """Add or replace."""
        self.publications[publication.doc.id] = publication
        self._touched[2].add(publication.doc.id)

    def drop_publication(self, publication: str) -> None:
        """Remove, document and all."""
        del self.publications[publication]
        self._touched[2].add(publication)

    def put_transfer(self, transfer: Transfer) -> None:
        """Add or replace."""
        self.transfers[transfer.doc.id] = transfer
        self._touched[3].add(transfer.doc.id)

    def drop_transfer(self, transfer: str) -> None:
        """Remove, document and all."""
        del self.transfers[transfer]
        self._touched[3].add(transfer)

    def log(self, event: str, **fields: Any) -> None:
        """One log event."""
        self.happened.append(Happened(event, fields))

    def changes(self) -> dict[str, Any]:
        """Documents that differ from those before the step; None for those that are gone."""
        found: dict[str, Any] = {}
        old: tuple[Mapping[str, Any], ...] = (
            self.job.members,
            self.job.groups,
            self.job.publications,
            self.job.transfers,
        )
        new: tuple[Mapping[str, Any], ...] = (self.members, self.groups, self.publications, self.transfers)
        for kind, touched, before, after in zip(
            ("members", "groups", "publications", "transfers"), self._touched, old, new, strict=True
        ):
            found[kind] = {}
            for key in sorted(touched):
                was, now = (side[key].doc if key in side else None for side in (before, after))
                if was != now:
                    found[kind][key] = now
        return found

    def done(self) -> tuple[Job, Effects]:
        """The next state and the answer."""
        changes = self.changes()
        if self.epoch_ended:
            self.membership_epoch += 1
        same = (self.membership_epoch, self.committed) == (self.job.membership_epoch, self.job.committed)
        told = None
        revision = self.job.revision
        if not same or any(changes.values()):
            revision += 1
            told = Told(
                term=self.job.term, instance=self.job.instance, base=self.job.revision, revision=revision,
                membership_epoch=self.membership_epoch, committed=self.committed, **changes,
            )  # fmt: skip
        job = replace(
            self.job, policies=self.policies, membership_epoch=self.membership_epoch, revision=revision,
            weight_version=self.weight_version, tickets=self.tickets, committed=self.committed, members=self.members,
            groups=self.groups, publications=self.publications, hosts=self.hosts, fits=self.fits,
            matching=frozenset(self.matching), waiting=tuple(self.waiting), stepped=self.now,
            settled=self.settled, judge_from=self.judge_from, forgiven=self.forgiven,
            recover_from=self.recover_from, transfers=self.transfers, movers=self.movers, owed=self.owed, ledgers=self.ledgers,
            slow=frozenset(self.slow), given_up=self.given_up, alone=self.alone,
            lateness=self.lateness, suspended=self.suspended, tried=self.tried,
            serial=self.serial, growing=self.growing, grown=self.grown, drained=self.drained,
        )  # fmt: skip
        effects = Effects(
            told, self.durable and told is not None, self.heard, tuple(self.snapshots), tuple(self.silent),
            tuple(self.examine), tuple(self.match), tuple(self.happened), self._asked_anew(),
        )  # fmt: skip
        return job, effects

    def _asked_anew(self) -> bool:
        """Whether what people have asked for is another thing than before the step."""
        job = self.job
        before = (job.policies, job.growing, job.grown, job.drained)
        return before != (self.policies, self.growing, self.grown, self.drained)
