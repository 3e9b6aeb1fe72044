"""What a watchdog decides about movers: whom to fork, what to tell, whom to condemn. Pure: no I/O, time is passed in.

`movers.py` drives it. Levels: `decide` compares the transfers of the view with the movers that are there, each time anew.
A mover is condemned when its beats stop, when it is not out of a broken epoch in time, when its own work failed, and
when nobody needs it any more; it is replaced, for another transfer, only after the proof of its death.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from elastic_reshard.mover.status import Glance
from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.docs import MemberState, PublicationDoc, TransferDoc, TransferState
from elastic_reshard.protocol.messages import MoverSaid
from elastic_reshard.protocol.view import View
from elastic_reshard.watchdog.patience import Patience

__all__ = ["Action", "Assign", "Condemn", "Crew", "Fetch", "Fork", "Hand", "Order", "Scene", "arenas_of", "foreseen"]

NOBODY: Final = "0" * 32  # the mover of a member that has none
_OF_PEERS: Final = ("PeerLost", "PeerRefused", "TransferTimeout")
_AGAIN: Final = 0.5  # seconds before a fork that failed is tried again


@dataclass(frozen=True)
class Scene:
    """What the watchdog knows besides movers. arenas: arena -> owner. members: those it serves, dead ones too while their
    arenas are kept. current: the view is what the supervisor says now. layouts: ids whose bodies are here. windowless: living
    members whose windows are not here (yet)."""

    view: View
    host: str
    current: bool
    arenas: Mapping[str, str]
    members: Collection[str]
    layouts: Collection[str]
    windowless: Collection[str] = ()


@dataclass(frozen=True)
class Fork:
    """Have a mover made for this member; then call `forked` or `not_forked`."""

    mover: str
    member: str


@dataclass(frozen=True)
class Assign:
    """Send a TASK."""

    mover: str
    transfer: TransferDoc
    publication: PublicationDoc


@dataclass(frozen=True)
class Order:
    """Send an ORDER; None: the transfer has left the view."""

    mover: str
    transfer: TransferDoc | None


@dataclass(frozen=True)
class Fetch:
    """Get the body of a layout."""

    layout: str


@dataclass(frozen=True)
class Condemn:
    """SIGKILL, after a look at its stacks if `dump`; then call `ended` at the proof of its death."""

    mover: str
    why: str
    dump: bool


Action = Fork | Assign | Order | Fetch | Condemn


@dataclass
class Hand:
    """A mover as it is known. pid: 0 while it is being forked. transfer: the last it was given. told: what it was told of
    that last, None once it has heard that it is over; stale: that is not known, or of another connection. broken: judges
    how long it takes to get out."""

    mover: str
    member: str
    forked_for: str
    patience: Patience
    pid: int = 0
    start: int = 0
    here: bool = False  # it has attached to this watchdog: its page is known
    attached: bool = False  # it has a connection now
    transfer: str = ""
    told: TransferDoc | None = None
    stale: bool = False
    said: MoverSaid | None = None
    beats: int = -1
    broken: Patience | None = None
    over: str | None = None  # what the broken transfer went over, if that is known
    condemned: str = ""
    expected: str = ""  # the transfer in which a predecessor left it; "" once something is said of that
    proof: Patience | None = None  # judges how long its end is not seen
    unproved: bool = False  # that was too long, and said

    @property
    def busy(self) -> bool:
        """Whether something of a transfer may be under way in it."""
        if not self.transfer:
            return False
        return self.said is None or self.said.transfer != self.transfer or self.said.state != "out"


@dataclass
class Crew:
    """The movers of one host. mint: a fresh id."""

    deadlines: Deadlines
    mint: Callable[[], str]
    born: float
    hands: dict[str, Hand] = field(default_factory=dict)
    words: dict[str, MoverSaid] = field(default_factory=dict)  # by member: the latest of its mover, dead ones' too
    unsaid: dict[str, None] = field(default_factory=dict)  # members whose word has changed
    _spent: dict[str, str] = field(default_factory=dict)  # member -> the transfer in which its mover ended
    _again: dict[str, float] = field(default_factory=dict)

    # -- what happens

    def expect(self, mover: str, member: str, pid: int, start: int, transfer: str, now: float) -> None:
        """A predecessor had this mover, and its process lives: it will attach."""
        self.hands[mover] = Hand(mover, member, transfer, self._patience(self.deadlines.mover_silent, now), pid, start,
                                 transfer=transfer, expected=transfer)  # fmt: skip

    def forked(self, mover: str, pid: int, start: int, now: float) -> bool:
        """It was made; False if another process has come as this mover: this one is to be killed."""
        hand = self.hands.get(mover)
        if hand is None or (hand.pid and (hand.pid, hand.start) != (pid, start)):
            return False
        hand.pid, hand.start = pid, start
        if not hand.here:
            hand.patience = self._patience(self.deadlines.connect, now)
        return True

    def not_forked(self, mover: str, now: float) -> None:
        """It could not be made; that is tried again soon. One that has come all the same (the answer was lost) stays."""
        hand = self.hands.get(mover)
        if hand is None or hand.pid:
            return
        del self.hands[mover]
        self._again[hand.member] = now + _AGAIN

    def attach(self, mover: str, member: str, transfer: str, pid: int, start: int, now: float) -> str:
        """A mover is there (again). Why it is not wanted, or ""."""
        hand = self.hands.get(mover)
        if hand is None:
            # Of a predecessor that was gone before it wrote it down, or forked by a nursery whose answer was lost.
            if any(other.member == member for other in self.hands.values()):
                return f"member {member} has another mover"
            hand = self.hands[mover] = Hand(mover, member, transfer, self._patience(0.0, now), pid, start)
        if hand.member != member or (hand.pid and (hand.pid, hand.start) != (pid, start)):
            return f"mover {mover} is process {hand.pid} of member {hand.member}"
        if hand.condemned:
            return f"it is condemned: {hand.condemned}"
        hand.pid, hand.start, hand.transfer = pid, start, transfer
        hand.here = hand.attached = True
        hand.stale = True
        hand.patience = self._patience(self.deadlines.mover_silent, now)
        return ""

    def detach(self, mover: str) -> None:
        """Its connection is gone. That alone means nothing."""
        if mover in self.hands:
            self.hands[mover].attached = False

    def reported(self, mover: str, said: MoverSaid) -> bool:
        """What it says of itself; False if it is another's to say."""
        hand = self.hands.get(mover)
        if hand is None or said.mover != mover or said.member != hand.member or said.state == "ended":
            return False
        if said.transfer == hand.transfer:
            hand.said = said.model_copy(update={"condemned": hand.condemned}) if hand.unproved else said
            hand.expected = ""
            self._word(hand.said)
        return True

    def glanced(self, mover: str, glance: Glance, now: float) -> None:
        """A look at its page."""
        hand = self.hands[mover]
        if glance.beats != hand.beats:
            hand.beats = glance.beats
            hand.patience.heard(now)
        if hand.said is None or hand.said.state != "running":
            return
        waits = None
        if hand.told is not None and 0 < glance.peer <= len(hand.told.members) and glance.cell:
            waits = (hand.told.members[glance.peer - 1], glance.cell - 1)
        fresh: dict[str, Any] = {
            name: getattr(glance, name) for name in ("cells", "began", "sent", "received", "resent")
        }
        fresh["began"] = max(glance.began, hand.said.began)
        window = waits is not None and bool(glance.window)
        hand.said = hand.said.model_copy(update={**fresh, "waits": waits, "window": window})

    def ended(self, mover: str) -> None:
        """Its process has ended, by proof."""
        hand = self.hands.pop(mover)
        base = self._last_of(hand)
        self._spent[hand.member] = base.transfer
        if not base.transfer and not hand.unproved:
            return
        outcome = base.outcome if base.state == "out" else "failed"
        why = base.reason or (f"it was ended: {hand.condemned}" if hand.condemned else "its process has ended")
        self._word(base.model_copy(update={"state": "ended", "outcome": outcome, "condemned": hand.condemned,
                                           "reason": why, "waits": None, "window": False}))  # fmt: skip

    def _last_of(self, hand: Hand) -> MoverSaid:
        """The last that is known of it."""
        known = self.words.get(hand.member)
        mine = known if known is not None and known.mover == hand.mover else None
        transfer = mine.transfer if mine is not None else hand.transfer or hand.forked_for
        said = hand.said if hand.said is not None and hand.said.transfer == transfer else mine
        return said or MoverSaid(member=hand.member, mover=hand.mover, transfer=transfer, state="starting")

    def refresh(self) -> None:
        """Time for a beat: what the pages of running movers say is said anew, if it has changed."""
        for hand in self.hands.values():
            said = hand.said
            if said is not None and said.state == "running" and self.words.get(hand.member) != said:
                self._word(said)

    def outgoing(self) -> list[MoverSaid]:
        """What is to be said to the supervisor now, once."""
        said = [self.words[member] for member in self.unsaid if member in self.words]
        self.unsaid.clear()
        return said

    def known(self) -> tuple[MoverSaid, ...]:
        """For a Hello: all words, and that movers are there who have not said anything yet."""
        mute = [h for h in self.hands.values() if h.pid and h.transfer and h.member not in self.words]
        return (
            *self.words.values(),
            *(
                MoverSaid(member=h.member, mover=h.mover, transfer=h.transfer, state="starting", unheard=True)
                for h in mute
            ),
        )

    def ready(self, now: float) -> bool:
        """Whether those that a predecessor had are here, or had their time."""
        return all(h.here or not h.pid for h in self.hands.values()) or now - self.born >= (
            self.deadlines.watchdog_silent / 2
        )

    def condemn(self, mover: str, why: str, dump: bool = False) -> Condemn:
        """It is to end, for this reason."""
        self.hands[mover].condemned = why
        return Condemn(mover, why, dump)

    def _word(self, said: MoverSaid) -> None:
        self.words[said.member] = said
        self.unsaid[said.member] = None

    def _patience(self, limit: float, now: float) -> Patience:
        made = Patience(limit, self.deadlines.mover_beat, now)
        made.due(now, self.deadlines.mover_beat)
        return made

    # -- what is to be done

    def tick(self, now: float, period: float) -> list[Action]:
        """A regular look, `period` seconds before the next, after `glanced`: who is silent, who does not get out."""
        actions: list[Action] = []
        for hand in self.hands.values():
            silent = hand.patience.silent(now)
            hand.patience.due(now, period)
            stuck = hand.broken is not None and hand.broken.silent(now)
            if hand.broken is not None:
                hand.broken.due(now, period)
            if hand.condemned:
                self._await_proof(hand, now, period)
            elif not hand.pid:
                continue
            elif silent:
                what = f"for {self.deadlines.mover_silent} s" if hand.here else "since it was to attach"
                actions.append(self.condemn(hand.mover, f"no sign of life {what}", dump=True))
            elif stuck:
                within = self.deadlines.abort_over(hand.over)
                why = f"not out of all operations of transfer {hand.transfer} in {within} s"
                actions.append(self.condemn(hand.mover, why, dump=True))
        return actions

    def _await_proof(self, hand: Hand, now: float, period: float) -> None:
        """Who does not end by SIGKILL in time hangs in the kernel: say so, where others may wait for it."""
        if hand.proof is None:  # its stacks are looked at until about now
            hand.proof = self._patience(self.deadlines.proof_of_death, now)
        elif hand.proof.silent(now) and not hand.unproved:
            hand.unproved = True
            news = {"condemned": hand.condemned, "waits": None, "window": False}
            hand.said = self._last_of(hand).model_copy(update=news)
            self._word(hand.said)
        hand.proof.due(now, period)

    def decide(self, scene: Scene, now: float) -> list[Action]:
        """What is to be done now; each action is given once."""
        actions: list[Action] = []
        for hand in list(self.hands.values()):
            actions += self._lead(hand, scene, now)
        if scene.current:
            for transfer in scene.view.transfers.values():
                for member in _crewed(transfer, scene.host):
                    actions += self._man(member, transfer, scene, now)
            self._forget(scene)
        return actions

    def _lead(self, hand: Hand, scene: Scene, now: float) -> Iterator[Action]:
        """Tell a mover what has changed, and judge it by it."""
        if hand.condemned or not hand.pid:
            return
        if hand.said is not None and hand.said.state == "out" and _unsound(hand.said):
            yield self.condemn(hand.mover, f"its work failed: {hand.said.error} {hand.said.reason}"[:1000])
            return
        if not scene.current and hand.transfer and hand.transfer not in scene.view.transfers:
            return  # what a watchdog without a view knows of transfers is nothing
        untold = hand.here and hand.expected not in ("", hand.transfer)
        if scene.current and untold and hand.expected not in scene.view.transfers:
            self._never(hand.member, hand.mover, hand.expected)
            hand.expected = ""
        doc = scene.view.transfers.get(hand.transfer)
        lost = hand.busy and (doc is None or doc.state == TransferState.BREAKING)
        if not lost:
            hand.broken = None
        elif hand.broken is None:
            # A plan that is being made can't be broken off, and hinders nobody.
            planning = (
                hand.told is not None and not hand.told.values and (hand.said is None or hand.said.state == "starting")
            )
            known = doc or hand.told
            hand.over = known.network if known is not None else None
            hand.broken = self._patience(self.deadlines.form if planning else self.deadlines.abort_over(hand.over), now)
        if hand.attached and hand.transfer and (hand.stale or doc != hand.told):
            hand.told, hand.stale = doc, False
            yield Order(hand.mover, doc)
        idle = scene.current and not hand.busy and doc is None
        if idle and hand.member not in scene.members and not _wanted(hand.member, scene):
            yield self.condemn(hand.mover, "its member is gone, and what it held")

    def _man(self, member: str, transfer: TransferDoc, scene: Scene, now: float) -> Iterator[Action]:
        """See to the mover of a member in a transfer."""
        hand = next((h for h in self.hands.values() if h.member == member), None)
        if hand is not None and hand.transfer == transfer.id:
            return
        if transfer.state != TransferState.FORMING:
            self._absent(member, hand, transfer, now)
        elif self._spent.get(member) == transfer.id:
            return  # no second mover in one transfer
        elif hand is None:
            if now < self._again.get(member, 0.0):
                return
            mover = self.mint()
            # Loading a nursery takes a while; a mover that was forked has `connect` to attach.
            self.hands[mover] = Hand(mover, member, transfer.id, self._patience(self.deadlines.connect, now))
            yield Fork(mover, member)
        elif hand.attached and not hand.condemned and not hand.busy and hand.transfer not in scene.view.transfers:
            yield from self._assign(hand, transfer, scene)

    def _assign(self, hand: Hand, transfer: TransferDoc, scene: Scene) -> Iterator[Action]:
        publication = scene.view.publications.get(transfer.publication)
        if publication is None:
            return
        layouts = {publication.layout, transfer.source.layout, *(d.layout for d in transfer.destinations)}
        missing = sorted(layouts - set(scene.layouts))
        yield from map(Fetch, missing)
        needed, _ = arenas_of(transfer, publication, scene.host)
        if missing or not needed <= set(scene.arenas):
            return
        if hand.member in scene.windowless and transfer.members.index(hand.member) in transfer.paused:
            return
        hand.transfer, hand.told, hand.stale, hand.said = transfer.id, transfer, False, None
        yield Assign(hand.mover, transfer, publication)

    def _absent(self, member: str, hand: Hand | None, transfer: TransferDoc, now: float) -> None:
        """A transfer goes on, or breaks, in which this member's mover never was: say so for it, once."""
        known = self.words.get(member)
        if known is not None and known.transfer == transfer.id:
            return
        if hand is not None and (hand.busy or not (hand.attached or hand.forked_for == transfer.id)):
            return
        if hand is None and now - self.born < self.deadlines.mover_silent:
            return
        self._never(member, hand.mover if hand is not None else NOBODY, transfer.id)

    def _never(self, member: str, mover: str, transfer: str) -> None:
        why = "it never was given this transfer"
        said = MoverSaid(member=member, mover=mover, transfer=transfer, state="ended", outcome="failed", reason=why)
        self._word(said if mover == NOBODY else said.model_copy(update={"state": "out", "outcome": "stopped"}))

    def _forget(self, scene: Scene) -> None:
        living = {hand.member for hand in self.hands.values()}
        for member, said in list(self.words.items()):
            if said.transfer not in scene.view.transfers and member not in self.unsaid and member not in living:
                del self.words[member]
        for member, transfer in list(self._spent.items()):
            if transfer not in scene.view.transfers and member not in living:
                del self._spent[member]


def _unsound(said: MoverSaid) -> bool:
    """Whether its own work failed. One that is out because of its peers is as good as before, and its maps are warm."""
    return said.outcome == "failed" and said.error not in _OF_PEERS


def _crewed(transfer: TransferDoc, host: str) -> Iterator[str]:
    """Present members of a transfer on this host."""
    for position, (member, where) in enumerate(zip(transfer.members, transfer.seats, strict=True)):
        if where == host and position not in transfer.absent:
            yield member


def _wanted(member: str, scene: Scene) -> bool:
    return any(member in _crewed(transfer, scene.host) for transfer in scene.view.transfers.values())


def foreseen(view: View, host: str) -> bool:
    """Whether a transfer is likely in which this host takes part: a source here and a destination in another domain, or the
    reverse."""
    taking_part = [m for m in view.members.values() if m.state in (MemberState.LIVE, MemberState.JOINING)]
    for domain in {m.where for m in taking_part if m.host == host}:
        here = {role for m in taking_part if m.where == domain for role in m.roles}
        there = {role for m in taking_part if m.where != domain for role in m.roles}
        if ("source" in here and "destination" in there) or ("destination" in here and "source" in there):
            return True
    return False


def arenas_of(transfer: TransferDoc, publication: PublicationDoc, host: str) -> tuple[set[str], set[str]]:
    """(Arenas of this host that a mover needs for a transfer, those it may use besides): of present members and of others."""
    present = set(transfer.present)
    held = [(s.member, s.arena) for s in publication.sources if s.host == host]
    held += [(landing.member, landing.arena) for landing in transfer.landings if landing.host == host]
    needed = {arena for member, arena in held if member in present}
    return needed, {arena for _, arena in held} - needed
