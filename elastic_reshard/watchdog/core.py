"""What a watchdog decides: what it keeps, what it tells the supervisor, when it goes. Pure: no I/O, time is passed in.

`service.py` drives it. Everything is level: what is to be said is derived from what is, so a lost connection loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from elastic_reshard.protocol.deadlines import Deadlines
from elastic_reshard.protocol.docs import MemberState, PublicationDoc, PublicationState
from elastic_reshard.protocol.messages import Drain, Ended, Hello, LedgerSaid, MoverSaid, Statement
from elastic_reshard.protocol.view import Farewell, Heard, Told, View

__all__ = ["Guest", "House", "Relay"]

_SERVED: Final = (PublicationState.MOVING, PublicationState.COMMITTED)
# Of an ended owner: the supervisor still counts on its arenas. LEAVING: it has not heard of the end yet.
_COUNTED_ON: Final = (MemberState.LIVE, MemberState.JOINING, MemberState.ORPHANED, MemberState.LEAVING)


class Relay(Enum):
    """What to do with a message of the supervisor."""

    PASS_ON = "pass on"
    IGNORE = "ignore"  # of one that is not obeyed
    RECONNECT = "reconnect"  # something was missed: only a snapshot helps


@dataclass
class Guest:
    """A member of this host. away_since: since when it is not attached, None while it is. ended: how, None while it lives."""

    statement: Statement | None = None
    raw: bytes = b""  # the statement as it came
    away_since: float | None = None
    ended: str | None = None
    ended_at: float = 0.0
    settled: bool = False  # all that it holds was offered
    own: set[str] = field(default_factory=set)  # arenas that it offered itself, to this watchdog


class House:
    """All that a watchdog knows. `expected`: members that a predecessor served and that live: they will attach."""

    def __init__(self, job: str, host: str, machine: str, instance: str, deadlines: Deadlines, now: float) -> None:
        self.job, self.host, self.machine, self.instance = job, host, machine, instance
        self.deadlines = deadlines
        self.born = now
        self.view = View()
        self.members: dict[str, Guest] = {}
        self.arenas: dict[str, str] = {}  # arena -> owner
        self.expected: set[str] = set()
        self.connected = False
        self.over = False
        self._visited = False  # a member has come, be it to be turned away from a host that is drained
        self._orderly = False  # the last to go went on purpose
        self._empty_since = now
        self._current = False  # a snapshot was heard on this connection
        self._heard: dict[str, int] = {}  # on this connection
        self._unsaid: dict[str, None] = {}  # members whose statement is to be passed on
        self._notices: list[Ended] = []
        self._words: list[MoverSaid | LedgerSaid] = []  # of movers, in order
        self._told_kept: dict[str, bool] = {}  # of ended members: what the supervisor was told of their arenas
        self._beat_due = False
        self.drain_until: float | None = None  # the host is to be emptied by then
        self._drain_said = False  # on this connection

    # -- members

    def inherit(self, members: Mapping[str, tuple[str | None, Statement | None]], now: float) -> None:
        """What a predecessor left: member -> (how it ended or None, its last statement if that is known)."""
        for name, (ended, statement) in members.items():
            if ended is None:
                self.expected.add(name)
                continue
            raw = statement.model_dump_json().encode() if statement is not None else b""
            self.members[name] = Guest(statement, raw, away_since=now, ended=ended, ended_at=now, settled=True)

    def attach(self, statement: Statement, raw: bytes, now: float) -> str:
        """A member is there (again). Why it is refused, or ""."""
        name = statement.member
        known = self.members.get(name)
        if self.drain_until is not None and known is None and name not in self.expected:
            self._visited = True
            return f"host {self.host} is being drained; join on another host"
        if statement.host != self.host:
            return f"it states host {statement.host}, but this is the watchdog of {self.host}"
        if known is not None and known.ended is not None:
            return f"member {name} has ended ({known.ended}); join again as a new incarnation"
        if known is None:
            known = self.members[name] = Guest()
        known.away_since, known.settled, known.own = None, False, set()
        self.expected.discard(name)
        self._visited = True
        self.state(name, statement, raw)
        return ""

    def state(self, name: str, statement: Statement, raw: bytes) -> bool:
        """A statement has come; whether it is newer than what was known. What a member says of others is not heard."""
        known = self.members[name]
        if statement.member != name or (known.statement is not None and statement.number < known.statement.number):
            return False
        known.statement, known.raw = statement, raw
        self._unsaid[name] = None
        return True

    def detach(self, name: str, now: float) -> None:
        """A connection is gone. That alone means nothing: the process may live."""
        known = self.members[name]
        if known.away_since is None:
            known.away_since, known.settled = now, False
            self._gone(orderly=False, now=now)

    def end(self, name: str, how: str, now: float) -> bool:
        """A member's process has ended, or it has left; False if that is known already."""
        known = self.members.setdefault(name, Guest(away_since=now))
        self.expected.discard(name)
        if known.ended is not None:
            return False
        known.ended, known.ended_at, known.settled = how, now, True
        if known.away_since is None:
            known.away_since = now
        self._gone(orderly=how == "left", now=now)
        self._notice(name)
        return True

    def _gone(self, orderly: bool, now: float) -> None:
        self._orderly = orderly
        self._empty_since = now

    @property
    def attached(self) -> list[str]:
        """Members with a connection."""
        return [name for name, m in self.members.items() if m.away_since is None]

    # -- arenas

    def offer(self, by: str, arena: str, owner: str) -> bool:
        """An arena is offered by its owner, or by another who holds it; whether it is to be kept (and told to all)."""
        if arena in self.arenas and self.arenas[arena] != owner:
            return False
        known = self.members.get(owner)
        if by == owner:
            self.members[by].own.add(arena)
        elif known is not None and known.settled and known.ended is None and arena not in known.own:
            return False  # its owner is there and has withdrawn it
        self.arenas[arena] = owner
        return True

    def withdraw(self, by: str, arena: str) -> bool:
        """The owner gives an arena up; whether it was kept."""
        if self.arenas.get(arena) != by:
            return False
        self.members[by].own.discard(arena)
        del self.arenas[arena]
        return True

    def settled(self, name: str) -> list[str]:
        """A member has offered all it holds; arenas that it has withdrawn behind our back, now dropped."""
        known = self.members[name]
        known.settled = True
        stale = [arena for arena, owner in self.arenas.items() if owner == name and arena not in known.own]
        for arena in stale:
            del self.arenas[arena]
        return stale

    def sweep(self, now: float) -> list[str]:
        """Arenas that nobody needs any more, now dropped."""
        needed = self._needed()
        dropped = [a for a, owner in self.arenas.items() if a not in needed and self._over_for(owner, now)]
        for arena in dropped:
            del self.arenas[arena]
        for name, known in list(self.members.items()):
            if known.ended is None:
                continue
            self._notice(name)
            doc = self.view.members.get(name)
            counted = doc is not None and doc.state in _COUNTED_ON
            if self._over_for(name, now) and not counted and not self._keeps(name) and name not in self._unsaid:
                del self.members[name]
                self._told_kept.pop(name, None)
        return dropped

    def _needed(self) -> set[str]:
        tickets = {g.ticket.publication for g in self.view.groups.values() if g.ticket is not None}
        moved = {transfer.publication for transfer in self.view.transfers.values()}
        served = [p for p in self.view.publications.values() if p.state in _SERVED or p.id in tickets or p.id in moved]
        held = [(source.host, source.arena) for p in served for source in p.sources]
        landings = [landing for p in served for landing in p.landings]
        landings += [landing for transfer in self.view.transfers.values() for landing in transfer.landings]
        held += [(landing.host, landing.arena) for landing in landings]
        return {arena for host, arena in held if host == self.host}

    def _over_for(self, owner: str, now: float) -> bool:
        """The owner has ended, and the supervisor has taken in all it said, and counts on nothing of it."""
        if not (self.connected and self._current):
            return False
        known = self.members.get(owner)
        hold = self.deadlines.orphan_hold
        if known is None:
            return owner not in self.expected and now - self.born >= hold
        if known.ended is None:
            return False
        doc = self.view.members.get(owner)
        if doc is not None and doc.state in _COUNTED_ON:
            return False
        said = known.statement.number if known.statement is not None else 0
        return self._heard.get(owner, -1) >= said or now - known.ended_at >= hold

    def _keeps(self, name: str) -> bool:
        return name in self.arenas.values()

    def _notice(self, name: str) -> None:
        """Say that a member has ended, once, and once more when its arenas are gone."""
        known, kept = self.members[name], self._keeps(name)
        if known.ended is not None and self.connected and self._told_kept.get(name) != kept:
            self._told_kept[name] = kept
            self._notices.append(Ended(member=name, arenas_kept=kept, how=known.ended))

    # -- the supervisor

    def ready(self, now: float) -> bool:
        """Whether to introduce itself: somebody has settled or left something, and those expected too, or they had their
        time."""
        # What dead members have left to be served is worth a connection too.
        here = (m.settled and (m.ended is None or self._keeps(name)) for name, m in self.members.items())
        if not any(here):
            return False
        waiting = self.expected or any(m.away_since is None and not m.settled for m in self.members.values())
        return not waiting or now - self.born >= self.deadlines.watchdog_silent / 2

    def hello(self, movers: Sequence[MoverSaid] = (), ledgers: Sequence[LedgerSaid] = ()) -> bytes:
        """The first message of a connection; what it says needs not be said again. movers, ledgers: all words of movers, and
        what all landing slots hold."""
        self._unsaid.clear()
        self._notices.clear()
        self._words.clear()
        self._heard.clear()
        self._current, self.connected = False, True
        self._drain_said = False
        ended = [name for name, m in self.members.items() if m.ended is not None]
        self._told_kept = dict.fromkeys(ended, True)  # as `ended` is understood; what differs is said next
        hello = Hello(
            job=self.job,
            host=self.host,
            machine=self.machine,
            watchdog=self.instance,
            obeyed=(self.view.term, self.view.instance),
            statements=tuple(m.statement for m in self.members.values() if m.statement is not None),
            ended=tuple(ended),
            publications=tuple(_brief(doc) for doc in self.view.publications.values()),
            groups=tuple(self.view.groups.values()),
            membership_epoch=self.view.membership_epoch,
            movers=tuple(movers),
            ledgers=tuple(ledgers),
        )
        for name in ended:
            self._notice(name)
        return hello.model_dump_json().encode()

    def say(self, words: Sequence[MoverSaid | LedgerSaid]) -> None:
        """Something of movers, to be said in this order; unless nobody hears us: then the next Hello says it all."""
        if self.connected:
            self._words += words

    def beat(self) -> None:
        """Time to say that we are there."""
        self._beat_due = True

    def drain(self, within: float, now: float) -> None:
        """The host is to be emptied within so many seconds; told again, the shorter time counts."""
        until = now + max(0.0, within)
        if self.drain_until is None or until < self.drain_until:
            self.drain_until, self._drain_said = until, False

    def outgoing(self, now: float = 0.0) -> list[bytes]:
        """What is to be said to the supervisor now, once."""
        said = [b'{"kind":"stated","statement":' + self.members[name].raw + b"}" for name in self._unsaid]
        said += [word.model_dump_json().encode() for word in (*self._notices, *self._words)]
        if self.drain_until is not None and not self._drain_said:
            said.append(Drain(within=max(0.0, self.drain_until - now)).model_dump_json().encode())
            self._drain_said = True
        if self._beat_due:
            said.append(b'{"kind":"beat","revision":%d}' % self.view.revision)
        self._unsaid.clear()
        self._notices.clear()
        self._words.clear()
        self._beat_due = False
        return said

    @property
    def unsaid(self) -> bool:
        """Whether `outgoing` has something."""
        drain = self.drain_until is not None and not self._drain_said
        return bool(self._unsaid or self._notices or self._words or self._beat_due or drain)

    def hear(self, said: Told | Heard | Farewell) -> Relay:
        """A message of the supervisor."""
        if not self.view.obeys(said.term, said.instance):
            return Relay.IGNORE
        if isinstance(said, Told):
            if not self.view.apply(said):
                return Relay.RECONNECT
            self._current = True
        elif isinstance(said, Heard):
            self._heard.update(said.numbers)
        else:
            self.over |= said.over
        return Relay.PASS_ON

    @property
    def obeyed(self) -> bool:
        """Whether a supervisor that we obey has answered on this connection."""
        return self.connected and self._current

    def cut(self) -> None:
        """The connection to the supervisor is gone."""
        self.connected = self._current = False
        self._words.clear()
        self._told_kept.clear()

    # -- its own end

    def departure(self, now: float) -> str:
        """Why the watchdog is to go now; "" while it is needed."""
        if self.drain_until is not None and (why := self._drained(self.drain_until, now)):
            return why
        if any(m.away_since is None for m in self.members.values()):
            return ""
        empty = now - self._empty_since
        if self.over:
            return "the job is over"
        if self._awaits(now):
            return ""
        if not self._visited:
            return "no member has come"
        if self._at_work():
            return ""
        if self._orderly and not self._away():
            return "its last member has left"
        return "its members are gone" if empty >= self.deadlines.orphan_hold else ""

    def _drained(self, until: float, now: float) -> str:
        # A beat later than the supervisor leaves them out, so that it is who decides.
        if now >= until + self.deadlines.beat:
            return "it was told to drain the host, and the time for it is over"
        # Who started it is told that the host is drained; if it were gone by then, another one would be started.
        there = any(m.ended is None for m in self.members.values()) or self.expected or self._awaits(now)
        return "" if there or self._at_work() else "it was told to drain the host, and nobody is left"

    def _awaits(self, now: float) -> bool:
        """Whether whoever started it is still to come."""
        return not self._visited and now - self._empty_since < 2 * self.deadlines.connect

    def _at_work(self) -> bool:
        """Whether a transfer needs what those who are gone have here: as long as the supervisor says so, and it is heard."""
        moving = {p.id for p in self.view.publications.values() if p.state is PublicationState.MOVING}
        parts = [s.host for p in self.view.publications.values() if p.id in moving for s in p.sources]
        parts += [host for t in self.view.transfers.values() for host in t.seats]
        return self.obeyed and self.host in parts

    def _away(self) -> Iterable[str]:
        """Living members without a connection: they may come back; also those that a predecessor served."""
        return [*self.expected, *(name for name, m in self.members.items() if m.ended is None)]


def _brief(doc: PublicationDoc) -> PublicationDoc:
    """What a Hello says of a publication. Where one that is over had landed concerns nobody, and with thousands of members that
    is most of what there is to say. Its sources stay: by them members see how what they published has ended."""
    return doc if doc.state in _SERVED else doc.model_copy(update={"landings": (), "landed": ()})
