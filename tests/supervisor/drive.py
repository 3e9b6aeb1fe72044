"""What is said to the cores and what they answer, as texts.  python -m tests.supervisor.drive --rewrite  writes the answers.

A line that begins with "> " says something; the lines below it are what came of it. Members are the real `MemberCore`;
everything arrives at once, except at members that are deaf.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from elastic_reshard.member.core import MemberCore
from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.protocol.docs import TicketDoc
from elastic_reshard.protocol.messages import Fill, GroupSpec, Hello, Landing, LedgerSaid, MoverSaid, Statement
from elastic_reshard.protocol.view import Heard
from elastic_reshard.supervisor import core
from elastic_reshard.supervisor.events import (
    Abandon,
    Beaten,
    Cut,
    Effects,
    Event,
    Greeted,
    Grow,
    Happened,
    Leave,
    Ledgered,
    MemberEnded,
    Moved,
    SetPolicies,
    Spoken,
    Tick,
)
from tests.supervisor.sim.shell import Disk, answer_examine, answer_match, covers, read_back

__all__ = ["TEXTS", "play"]

TEXTS = Path(__file__).parent / "interaction"
_QUIET = {"membership_epoch", "reason", "epoch", "network"}


class Stage:
    """One job, its members, and one host whose watchdog beats unless it is silent."""

    def __init__(self) -> None:
        self.now, self.term = 0.0, 1
        self.disk = Disk()
        self.disk.term = 1
        self.policies = Policies()
        self.job = core.begin("job", 1, "i1", 0.0, policies=self.policies)
        self.members: dict[str, MemberCore] = {}
        self.last: dict[str, Statement] = {}
        self.generations: dict[tuple[str, int], int] = {}
        self.seqs: dict[str, int] = {}
        self.deaf: set[str] = set()
        self.dead: dict[str, bool] = {}
        self.hosts: dict[str, str] = {}
        self.silent: set[str] = set()
        self.out: list[str] = []
        self.unwritten: list[Any] = []
        self.landings: dict[str, Landing] = {}
        self.movers: dict[str, MoverSaid] = {}

    # -- the supervisor

    def tell(self, *events: Event) -> None:
        """One step, and what follows from it."""
        queue: list[Event] = list(events)
        while queue:
            was_recovering = self.job.recover_from > 0
            self.job, effects = core.step(self.job, queue, self.now, covers)
            queue = [*map(answer_examine, effects.examine), *map(answer_match, effects.match)]
            self.out += [self.line(h) for h in effects.happened]
            if effects.told is not None:
                read_back(effects.told)
                self.unwritten.append(effects.told)
            if (effects.durable or was_recovering) and not self.job.recover_from:
                assert self.disk.write(self.job.term, self.unwritten, self.job.weight_version)
                self.unwritten = []
            for name, member in self.members.items():
                if name not in self.deaf:
                    self._hear(member, effects)
                if member.unsaid and name not in self.deaf:
                    said = member.statement()
                    self.last[name] = said.model_copy(update={"landing": self.landings.get(name)})
                    queue += [Spoken(member.host, self.last[name])] if member.host not in self.silent else []

    def _hear(self, member: MemberCore, effects: Effects) -> None:
        job = self.job
        gap = effects.told is not None and not member.hear(effects.told)
        if gap or member.host in effects.snapshots:
            member.hear(core.snapshot(job))
        if member.host in effects.heard:
            numbers = dict(effects.heard[member.host])
            member.hear(Heard(term=job.term, instance=job.instance, revision=job.revision, numbers=numbers))

    @staticmethod
    def line(happened: Happened) -> str:
        """One log event in words."""
        said = [
            f"{k}={v if not isinstance(v, list) else ','.join(v)}"
            for k, v in happened.fields.items()
            if k not in _QUIET
        ]
        reason = happened.fields.get("reason")
        return (
            " ".join([happened.event, *said, f"({reason})" if reason else ""]).replace("@0000000000000000", "").rstrip()
        )

    def state(self, name: str) -> None:
        """A member's statement."""
        self.last[name] = self.members[name].statement().model_copy(update={"landing": self.landings.get(name)})
        host = self.members[name].host
        if host not in self.silent:
            self.tell(Spoken(host, self.last[name]))

    # -- what can be said

    def do_policies(self, *words: str) -> None:
        kinds: dict[str, Callable[[str], Any]] = {f.name: float for f in fields(Policies)}
        kinds |= {"min_groups": int, "max_lag": int}
        changes = {k: kinds[k](v) for k, v in (w.split("=") for w in words)}
        self.policies = Policies(**changes)
        self.tell(SetPolicies(self.policies))
        self.out = [line for line in self.out if not line.startswith("policies")]

    def do_host(self, host: str, watchdog: str = "a") -> None:
        """A watchdog connects and says all it knows."""
        self.hosts[host] = watchdog
        self.silent.discard(host)
        mine = {n: m for n, m in self.members.items() if m.host == host and self.dead.get(n, True)}
        view = next((m.view for n, m in mine.items() if n not in self.deaf), None)
        known = {} if view is None else {
            "publications": tuple(view.publications.values()), "groups": tuple(view.groups.values()),
            "obeyed": (view.term, view.instance), "membership_epoch": view.membership_epoch,
        }  # fmt: skip
        said = tuple(self.last[n] for n in mine if n in self.last)
        ended = tuple(m.member for n, m in mine.items() if n in self.dead)
        movers = tuple(self.movers[n] for n in mine if n in self.movers)
        hello = Hello(
            job="job", host=host, machine="m", watchdog=watchdog, statements=said, ended=ended, movers=movers, **known,
        )  # fmt: skip
        self.tell(Greeted(hello))

    def do_silent(self, host: str) -> None:
        self.silent.add(host)
        self.tell(Cut(host))

    def do_forget(self, name: str) -> None:
        """A watchdog does not know a member any more."""
        self.last.pop(name)
        if name in self.dead:
            self.dead[name] = False

    def do_join(self, name: str, group: str, rank: str, roles: str, *rest: str) -> None:
        options = dict(w.split("=") for w in rest)
        incarnation = f"{int(options.get('again', 0)):016x}"
        r, _, size = rank.partition("/")
        spec = GroupSpec(name=group, size=int(size), rank=int(r))
        host = options.get("host", next(iter(self.hosts), "h"))
        member = MemberCore(f"{name}@{incarnation}", spec, frozenset(roles.split("+")), host, 1)  # type: ignore[arg-type]
        key = name if "again" not in options else f"{name}+{options['again']}"
        if "source" in roles:
            member.source = options.get("source", "a0")
            member.new_arena(f"{len(self.members) + 160:x}", 2)
        if "destination" in roles:
            member.destination = options.get("destination", "dd")
        self.members[key] = member
        self.state(key)

    def do_publish(self, name: str, label: str | None = None) -> None:
        """Claim a slot, fill it, offer it."""
        member = self.members[name]
        arena = member.slots[-1].arena
        seq = self.seqs[name] = member.next_publish(label)
        slot, say = member.claim(arena)
        if say:
            self.state(name)
            slot, _ = member.claim(arena)
        if slot is None:
            self.out.append(f"{name} is busy: {'; '.join(member.holders(arena))}")
            if member.unclaim():
                self.state(name)
            return
        generation = self.generations[arena, slot.slot] = self.generations.get((arena, slot.slot), 0) + 2
        self.out.append(f"{name} publishes {seq >> 32}.{seq & 0xFFFFFFFF} in slot {slot.slot}")
        fill = Fill(
            arena=arena, slot=slot.slot, generation=generation, seq=seq, label=label, fragment=member.source or ""
        )
        member.offer(slot, fill)
        self.state(name)

    def do_fail(self, name: str, label: str | None = None) -> None:
        """A publish that raises before it has anything to offer."""
        seq = self.members[name].next_publish(label)
        self.out.append(f"{name} fails to publish {seq >> 32}.{seq & 0xFFFFFFFF}")

    def do_withdraw(self, name: str) -> None:
        """A publish begins and finds no free slot."""
        _, say = self.members[name].claim(self.members[name].slots[-1].arena)
        self.out.append(f"{name} {'takes a publish back' if say else 'has nothing to take back'}")
        if say:
            self.state(name)

    def do_layout(self, name: str, source: str) -> None:
        member = self.members[name]
        member.source, member.source_from = source, member.next_publish()
        member.new_arena(f"{len(member.slots) + 200:x}", 2)
        self.state(name)

    def do_reason(self, name: str) -> None:
        """Why a member takes no part, as it hears it."""
        self.out.append(f"{name}: {self.members[name].out or 'takes part'}")

    def do_published(self, name: str) -> None:
        state, doc = self.members[name].published(self.seqs[name])
        self.out.append(f"{name}: {state}" + (f", version {doc.weight_version}" if doc is not None else ""))

    def do_ask(self, name: str, patience: str = "10") -> None:
        self.members[name].ask(float(patience))
        self.state(name)

    def _ticket(self, name: str) -> TicketDoc | None:
        ticket = self.members[name].grant()
        if ticket is None:
            self.out.append(f"{name} has no ticket")
        return ticket

    def do_take(self, name: str) -> None:
        ticket = self._ticket(name)
        if ticket is not None:
            self.members[name].take_up(ticket)
            self.state(name)

    def do_pulled(self, name: str, *fault: str) -> None:
        self.members[name].report(not fault, " ".join(fault), 1.0, 8)
        self.state(name)

    def do_pull(self, name: str) -> None:
        ticket = self._ticket(name)
        if ticket is not None:
            self.members[name].take_up(ticket)
            self.members[name].report(True, "", 1.0, 8)
            self.state(name)

    def do_end(self, name: str) -> None:
        """The install call ends, by whatever was told."""
        member = self.members[name]
        verdict = member.answer()
        member.end_call(verdict)
        held = f", holds version {member.holding.weight_version}" if member.holding else ", holds nothing"
        self.out.append(f"{name}: {verdict.verdict if verdict else 'timeout'}{held}")
        self.state(name)

    def do_die(self, name: str, *how: str) -> None:
        """how: "gone" if its memory is gone too."""
        self.dead[name] = not how
        member = self.members[name]
        self.deaf.add(name)
        if member.host not in self.silent:
            self.tell(MemberEnded(member.host, member.member, arenas_kept=not how, how="killed"))

    def do_leave(self, name: str) -> None:
        self.members[name].leaving = True
        self.state(name)

    def do_must_leave(self, what: str, within: str) -> None:
        named = (self.members[what].member,) if what in self.members else ()
        self.tell(Leave(members=named, group="" if named else what, within=float(within)))

    def do_abandon(self, publication: str) -> None:
        self.tell(Abandon(publication))

    def do_deaf(self, name: str) -> None:
        self.deaf.add(name)

    def do_hears(self, name: str) -> None:
        self.deaf.discard(name)
        self.members[name].hear(core.snapshot(self.job))

    def do_late(self, name: str, number: str) -> None:
        """An old statement arrives again."""
        old = self.last[name].model_copy(update={"number": int(number), "fills": (), "holding": None})
        self.tell(Spoken(self.members[name].host, old))

    def do_tick(self, seconds: str) -> None:
        until = self.now + float(seconds)
        while self.now < until - 1e-9:
            self.now += 0.5
            self.tell(*(Beaten(h) for h in self.hosts if h not in self.silent), Tick())

    def do_sleep(self, seconds: str) -> None:
        """The supervisor is stopped for a while."""
        self.now += float(seconds)
        self.tell(Tick())

    def do_restart(self, recover_from: str = "0") -> None:
        """SIGKILL, and a start from the journal; from none if members are named."""
        if int(recover_from):
            self.disk = Disk()
            self.disk.term = self.job.term
        self.disk.term += 1
        self.unwritten = []
        self.job = core.begin("job", self.disk.term, f"i{self.disk.term}", self.now, policies=self.policies,
                              recover_from=int(recover_from))  # fmt: skip
        if self.disk.written:
            self.job = core.restore(self.job, self.disk.read(), self.disk.weight_version, self.now)

    # -- between hosts

    def do_lands(self, *names: str) -> None:
        """Members have landing arenas."""
        for name in names:
            self.landings[name] = Landing(arena=f"{len(self.landings) + 3000:032x}", cells=8, cell=1 << 20)
            self.state(name)

    def do_mover(self, names: str, state: str, *more: str) -> None:
        """Where movers are with the transfer in hand: state, outcome, and fields as name=value."""
        active = next(iter(self.job.transfers), "")
        for name in names.split(","):
            member = self.members[name]
            said: dict[str, Any] = {"values": {"0": "00"}} if state == "ready" else {}
            for word in more:
                field, is_field, value = word.partition("=")
                said |= {field: value} if is_field else {"outcome": field}
            if "waits" in said:
                said["waits"] = (self.members[said["waits"]].member, 0)
            was = self.movers.get(name)
            transfer = said.pop("of", was.transfer if was is not None and not active else active)
            self.movers[name] = MoverSaid(member=member.member, mover="ab", transfer=transfer, state=state, **said)  # type: ignore[arg-type]
            if member.host not in self.silent:
                self.tell(Moved(member.host, self.movers[name]))

    def do_holds(self, name: str, publication: str, bits: str = "bits") -> None:
        """What a landing slot holds."""
        member = self.members[name]
        found = self.job.publications.get(publication)
        doc = next((p for p in found.doc.landings if p.member == member.member), None) if found is not None else None
        if doc is None:
            self.out.append(f"{name} lands nothing of {publication}")
            return
        said = LedgerSaid(
            member=member.member,
            arena=doc.arena,
            slot=doc.slot,
            publication=publication,
            bits="" if bits == "-" else bits,
        )
        self.tell(Ledgered(member.host, said))

    def do_transfer(self) -> None:
        """The transfer in hand."""
        for transfer in self.job.transfers.values():
            doc = transfer.doc
            short = [m.replace("@0000000000000000", "") for m in doc.present]
            slots = ",".join(f"{part.member.partition('@')[0]}:{part.slot}" for part in doc.landings)
            basis = ",".join(m.partition("@")[0] for m in doc.basis)
            until = f" until {doc.until}" if doc.until is not None else ""
            self.out.append(
                f"{doc.id} {doc.state}{until} epoch {doc.epoch}: {','.join(short)} of {len(doc.members)}, to "
                f"{','.join(p.group for p in doc.destinations)}, slots {slots}, basis {basis or 'nothing'}"
            )
        if not self.job.transfers:
            self.out.append("no transfer")

    def do_drain(self, host: str, within: str, *force: str) -> None:
        self.tell(Leave(host=host, within=float(within), force=bool(force)))

    def do_shrink(self, groups: str, within: str) -> None:
        self.tell(Leave(groups=tuple(groups.split(",")), within=float(within)))

    def do_grow(self, name: str, *what: str) -> None:
        given = {k: int(v) for k, v in (w.split("=") for w in what)}
        self.tell(Grow(name, **given))  # type: ignore[arg-type]

    def do_view(self) -> None:
        job = self.job
        self.out.append(f"term {job.term} epoch {job.membership_epoch} committed {job.committed or 'nothing'}")
        for member in sorted(job.members):
            self.out.append(f"  {member.replace('@0000000000000000', '')}: {job.members[member].doc.state}")
        for name in sorted(job.groups):
            doc = job.groups[name].doc
            self.out.append(
                f"  {name}: {doc.state}{'' if doc.whole else ', not whole'}, serves {doc.serving or 'nothing'}"
            )
        self.out += [f"  {p.doc.id}: {p.doc.state}" for p in job.publications.values()]

    def say(self, line: str) -> list[str]:
        """One line; commands are parted by semicolons."""
        self.out = []
        for command in line.split(";"):
            verb, *words = command.split()
            getattr(self, f"do_{verb.replace('-', '_')}")(*words)
        return self.out


def play(text: str) -> str:
    """The text with the answers as they are now."""
    stage = Stage()
    found: list[str] = []
    answering = False
    for line in text.splitlines():
        if line.startswith("> "):
            found += [line, *stage.say(line[2:])]
            answering = True
        elif not line.strip() or line.startswith("#"):
            found.append(line)
            answering = False
        elif not answering:
            raise ValueError(f"neither said nor answered: {line!r}")
    return "\n".join(found) + "\n"


if __name__ == "__main__":
    for path in sorted(TEXTS.glob("*.txt")):
        now = play(path.read_text())
        if now != path.read_text():
            print(path.name, "rewritten" if "--rewrite" in sys.argv else "differs")
            if "--rewrite" in sys.argv:
                path.write_text(now)
