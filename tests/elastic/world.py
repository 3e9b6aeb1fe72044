"""A job of real processes that a test talks to: a supervisor, trainer gangs, engines, and the watchdog they start.

    w.start_supervisor()
    trainer, engine = w.trainer().join(), w.engine(0).join()
    trainer.publish("s1")
    assert engine.install() == 1
    engine[0].kill()

Every wait has a limit that only catches hangs; `Late` is then raised with the stacks of who is late.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from elastic_reshard.protocol import hooks
from elastic_reshard.protocol.deadlines import Deadlines, Policies
from elastic_reshard.protocol.view import Told
from elastic_reshard.supervisor.client import SupervisorClient
from elastic_reshard.supervisor.server import Options
from elastic_reshard.watchdog import runtime as watchdogs
from tests.elastic import rank as on
from tests.elastic.actors import LIMIT, Actor, Call, Died, Failed, Late, until

__all__ = ["Actor", "Call", "Died", "Failed", "Gang", "Hold", "Late", "Site", "World", "results", "same", "until"]

T = TypeVar("T")


class Gang(Sequence[Actor]):
    """A group's processes, by rank."""

    def __init__(
        self, world: World, name: str, size: int, roles: tuple[str, ...], hosts: Sequence[str] = ("a",)
    ) -> None:
        self.world, self.name, self.size, self.roles = world, name, size, roles
        self.hosts = tuple(hosts[rank * len(hosts) // size] for rank in range(size))
        world.hosts |= set(self.hosts)
        self.actors: list[Actor] = [world.actor(f"{name}-{rank}") for rank in range(size)]
        self._starts = 0

    def __getitem__(self, rank: Any) -> Any:
        return self.actors[rank]

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Actor]:
        return iter(self.actors)

    def seat(self, rank: int, **changes: Any) -> on.Seat:
        """Where a rank takes part."""
        w = self.world
        environ = {hooks.VARIABLE: f"@{w.faults}"} if w.settings.hooks is not None else {}
        host = self.hosts[rank]
        site = w.sites.get(host, Site())
        seat = on.Seat(
            w.url, str(w.runtime / site.room), w.token, self.name, self.size, rank, self.roles, host,
            environ | dict(site.environ), site.network,
        )  # fmt: skip
        return replace(seat, **changes)

    def begin(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Call]:
        """Call a function in all."""
        return [actor.begin(fn, *args, **kwargs) for actor in self]

    def do(self, fn: Callable[..., T], *args: Any, limit: float = LIMIT, **kwargs: Any) -> list[T]:
        """Call a function in all and wait; raises what the first that failed raised, when all have ended."""
        return results(self.begin(fn, *args, **kwargs), limit)

    def join(self, **kwargs: Any) -> Self:
        """All join."""
        calls = [actor.begin(on.join, self.seat(rank), **kwargs) for rank, actor in enumerate(self)]
        for actor, joined in zip(self, results(calls), strict=True):
            actor.id = joined["id"]
        return self

    def replace(self, *ranks: int, **kwargs: Any) -> Self:
        """New processes of the same names in the places of some (all, if none are given); they join, and all hear of it."""
        chosen = ranks or tuple(range(self.size))
        for rank in chosen:
            old = self.actors[rank]
            self.actors[rank] = self.world.actor(old.name)
        calls = [self.actors[rank].begin(on.join, self.seat(rank), **kwargs) for rank in chosen]
        for rank, joined in zip(chosen, results(calls), strict=True):
            self.actors[rank].id = joined["id"]
        self.do(on.heard_of, self.doc().members)
        return self

    def begin_replacement(self, rank: int) -> Call:
        """A new process in the place of one; it is joining."""
        self.actors[rank] = self.world.actor(self.actors[rank].name)
        return self.actors[rank].begin(on.join, self.seat(rank))

    def kill(self) -> None:
        """SIGKILL to all at once, and their ends."""
        for actor in self:
            os.kill(actor.pid, signal.SIGKILL)
        for actor in self:
            actor.ended()

    # -- what a script says

    def publish(self, label: str, **kwargs: Any) -> None:
        """All publish; returns when all calls have returned."""
        self.do(on.publish, label, **kwargs)

    def committed(self, label: str, timeout: float = 20.0) -> int:
        """Wait until it is committed; the version, which all were told alike."""
        return same(self.do(on.committed, label, timeout))

    def install(self, timeout: float = 20.0) -> dict[str, Any]:
        """All install at once; what rank 0 was told. Checks that verdict, version and label are one, and every byte."""
        return self.check(self.do(on.install, timeout))

    def receive(self, label: str, timeout: float = 20.0) -> int:
        """All wait for a newer version, install it, and hold the label's values."""
        found = same(self.do(on.receive, timeout))
        self.holds(label)
        return found

    def check(self, results_: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """That all were told one thing, and hold it bit for bit."""
        wrong = {a.name: r["wrong"] for a, r in zip(self, results_, strict=True) if r["wrong"]}
        assert not wrong, f"CURRENT for {results_[0]['label']!r}, but wrong bytes in {wrong}"
        same([(r["weight_version"], r["label"], r["publication"], r["changed"]) for r in results_])
        assert {r["held"] for r in results_} == {results_[0]["weight_version"]}
        return results_[0]

    def holds(self, label: str) -> None:
        """All hold the label's values, bit for bit."""
        wrong = {a.name: w for a, w in zip(self, self.do(on.holds, label), strict=True) if w}
        assert not wrong, f"not the values of {label!r}: {wrong}"

    def version(self) -> int:
        """What all say they serve."""
        return same(self.do(on.version))

    def doc(self) -> Any:
        """The supervisor's document of the group."""
        return self.world.view().groups[self.name]


def results(calls: Sequence[Call], limit: float = LIMIT) -> list[Any]:
    """Of all; raises what the first that failed raised, when all have ended."""
    deadline = time.monotonic() + limit
    found = [call.outcome(max(0.0, deadline - time.monotonic())) for call in calls]
    for one in found:
        if isinstance(one, AssertionError):
            raise one
    return found


def same(found: Sequence[T]) -> T:
    """The one thing that all were told."""
    assert all(one == found[0] for one in found), f"not the same on every rank: {found}"
    return found[0]


@dataclass(frozen=True)
class Settings:
    """How a world is set up. The hold is short, so that a world without a supervisor ends soon. hooks: faults in watchdogs,
    nurseries and movers from their start, and others later by `World.arm`; None: never any."""

    deadlines: Deadlines = field(default_factory=lambda: Deadlines(orphan_hold=2.0))
    policies: Policies = field(default_factory=Policies)
    token: str | None = None
    cell: int = 1 << 12
    hooks: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Site:
    """What a labelled host has of its own. environ: of its members; network: the file of its network namespace, "" for the
    test's; room: its own folder in the runtime folder, and so a nursery of its own."""

    environ: Mapping[str, str] = field(default_factory=dict)
    network: str = ""
    room: str = ""


class Hold:
    """Processes that wait at a point, until they are let go."""

    def __init__(self, world: World, gate: Path) -> None:
        self._world, self.gate = world, gate

    def has(self, *members: str) -> dict[str, int]:
        """Wait until the movers of these members are there; their processes, by member."""

        def there() -> dict[str, int] | None:
            pids = self._world.movers()
            found = {m: pids[m] for m in members if m in pids and Path(f"{self.gate}.{pids[m]}").exists()}
            return found if len(found) == len(members) else None

        return until(there, f"the movers of {', '.join(members)} are held")

    def release(self) -> None:
        """All go on."""
        self.gate.touch()


class World:
    """One job. Use it as a context manager: at the end nothing of it may be left, or it raises."""

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        self.folder, self.settings = folder, settings or Settings()
        self.runtime = folder / "run"
        self.runtime.mkdir(mode=0o700)
        self.journal, self.faults = folder / "journal.sqlite", folder / "faults.json"
        self._holds = 0
        self.arm(self.settings.hooks or {})
        self.job = "job"
        self.hosts: set[str] = set()
        self.sites: dict[str, Site] = {}
        self.address, self.network = "127.0.0.1", ""  # the supervisor's
        self.url, self.token, self.term, self._port = "", self.settings.token, 0, 0
        self._actors: list[Actor] = []
        self.supervisor: Actor | None = None
        self._starts = 0
        self.abandoned = False  # something in it was broken on purpose: its end is not looked at

    # -- processes

    def actor(self, name: str) -> Actor:
        """A new process, which ends with the world."""
        made = Actor(name, self.folder)
        self._actors.append(made)
        return made

    def forget(self, actor: Actor) -> None:
        """It was closed already."""
        self._actors.remove(actor)

    def trainer(self, size: int = 2, name: str = "trainer", hosts: Sequence[str] = ("a",)) -> Gang:
        """A trainer gang's processes, spread over the hosts in order; they have not joined."""
        return Gang(self, name, size, ("source",), hosts)

    def engine(self, number: int = 0, size: int = 2, hosts: Sequence[str] = ("a",)) -> Gang:
        """An engine's processes, spread over the hosts in order; they have not joined."""
        return Gang(self, f"engine{number}", size, ("destination",), hosts)

    def join(self, *gangs: Gang, **kwargs: Any) -> None:
        """All of several gangs join at the same time."""
        seats = [(actor, gang.seat(rank)) for gang in gangs for rank, actor in enumerate(gang)]
        joined = results([actor.begin(on.join, seat, **kwargs) for actor, seat in seats])
        for (actor, _), told in zip(seats, joined, strict=True):
            actor.id = told["id"]

    def both(self) -> tuple[Gang, Gang]:
        """A trainer gang and an engine; they join at the same time."""
        gangs = (self.trainer(), self.engine())
        calls = [actor.begin(on.join, gang.seat(rank)) for gang in gangs for rank, actor in enumerate(gang)]
        joined = results(calls)
        for actor, told in zip([*gangs[0], *gangs[1]], joined, strict=True):
            actor.id = told["id"]
        return gangs

    def start_supervisor(self, patch: Callable[[on.State], None] | None = None, port: int | None = None) -> str:
        """Start a supervisor on the journal, at the same address as before; its address."""
        self._starts += 1
        actor = self.actor(f"supervisor-{self._starts}")
        if self.network:
            actor.do(on.enter, self.network)
        if patch is not None:
            actor.do(patch)
        told = actor.do(on.serve, Options(
            job=self.job, port=self._port if port is None else port, journal=self.journal, token=self.settings.token,
            policies=self.settings.policies, deadlines=self.settings.deadlines, runtime=self.runtime,
            cell=self.settings.cell, host=self.address,
        ))  # fmt: skip
        assert told["term"] == self.term + 1, "each start takes the next term"
        self.supervisor, self.term, self.token = actor, told["term"], told["token"]
        self.url = self.url or told["url"]
        self._port = self._port or int(told["url"].rpartition(":")[2])
        return str(told["url"])

    def kill_supervisor(self) -> None:
        """SIGKILL, and its end."""
        assert self.supervisor is not None
        self.supervisor.kill()
        self.supervisor.close()
        self.forget(self.supervisor)
        self.supervisor = None

    def watchdog(self, host: str = "a") -> Any:
        """The host's watchdog that runs now, or None."""
        return watchdogs.running(self.job, host, self.runtime / self.sites.get(host, Site()).room)

    def movers(self, host: str | None = None) -> dict[str, int]:
        """Process of each mover, by member, on a host or on all."""
        found = {}
        for name in [host] if host is not None else sorted(self.hosts):
            record = self.watchdog(name)
            hands = record.movers.values() if record is not None else ()
            found |= {hand.member: hand.pid for hand in hands if watchdogs.started(hand.pid) == hand.start}
        return found

    def mover(self, member: str) -> int:
        """Process of a member's mover, once there is one."""
        found: int = until(lambda: self.movers().get(member), f"{member} has a mover")
        return found

    def transfer(self, state: str = "running", limit: float = LIMIT) -> Any:
        """The transfer in hand, once it is in a state."""
        view = self.until(lambda v: any(t and t.state == state for t in v.transfers.values()), f"one is {state}", limit)
        return next(t for t in view.transfers.values() if t is not None and t.state == state)

    # -- faults in watchdogs, nurseries and movers

    def arm(self, plan: Mapping[str, Any]) -> None:
        """Place faults in all of them from now on, in place of those before; passings count from now."""
        fresh = self.faults.with_suffix(".new")
        fresh.write_text(json.dumps(plan))
        fresh.replace(self.faults)

    def hold(self, point: str, nth: int = 1, **more: Any) -> Hold:
        """All that come to a point, for the nth time from now, wait there. more: other faults, as for `arm`."""
        self._holds += 1
        held = Hold(self, self.folder / f"hold{self._holds}")
        self.arm({point: {"do": {"wait": str(held.gate)}, "nth": nth}, **more})
        return held

    # -- what the supervisor says

    def client(self) -> SupervisorClient:
        """A client of it; close it."""
        assert self.token is not None
        return SupervisorClient(self.url, self.token, patience=5.0)

    def view(self) -> Told:
        """The whole view now."""
        with self.client() as client:
            return client.view()

    def until(self, ready: Callable[[Told], Any], what: str, limit: float = LIMIT) -> Told:
        """Wait for a view in which something holds."""
        deadline = time.monotonic() + limit
        with self.client() as client:
            view = client.view()
            while not ready(view):
                left = deadline - time.monotonic()
                assert left > 0, f"waited {limit} s for: {what}; the view is {view.model_dump_json(indent=1)}"
                view = client.view(view.revision, min(left, 1.0))
        return view

    def evicted(self) -> list[str]:
        """Members that the view gives up although nothing of theirs has ended."""
        return [f"{name}: {doc.reason}" for name, doc in self.view().members.items()
                if doc is not None and doc.state in ("forfeit", "lost", "refused")]  # fmt: skip

    def events(self, kind: str) -> list[Any]:
        """The supervisor's events of a kind, since its start."""
        with self.client() as client:
            return [e for e in client.events(limit=1000).events if e.event.startswith(kind)]

    def journaled(self) -> dict[str, Any]:
        """The journal's row of figures."""
        with sqlite3.connect(f"file:{self.journal}?mode=ro", uri=True) as db:
            db.row_factory = sqlite3.Row
            return dict(db.execute("SELECT * FROM meta").fetchone())

    def _nothing_left(self, spared: Callable[[str], bool]) -> None:
        """AssertionError, naming it, if anything else is left in the runtime folder."""
        deadline = time.monotonic() + 10.0
        while left := [f for f in self._files() if not spared(f)]:
            assert time.monotonic() < deadline, f"left in the runtime folder: {left}"
            time.sleep(0.02)

    def _files(self) -> list[str]:
        # os.walk passes over folders that go meanwhile.
        found = (os.path.join(folder, name) for folder, _, names in os.walk(self.runtime) for name in names)
        return [os.path.relpath(path, self.runtime) for path in found]

    # -- the end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(quiet=error is not None or self.abandoned)

    def close(self, quiet: bool = False) -> None:
        """Kill what is left of the members, end the job, and see the watchdog go by itself."""
        last = any(self.watchdog(host) is not None for host in self.hosts)
        supervisor = self.supervisor
        try:
            for actor in self._actors:
                if actor is not supervisor:
                    actor.close()
            if supervisor is not None and supervisor.process.exitcode is None:
                supervisor.cont()
                supervisor.do(on.stop_serving, True)
            if not quiet and last:
                hold = self.settings.deadlines.orphan_hold if supervisor is None else 0.0
                until(
                    lambda: not any(map(self.watchdog, self.hosts)) or None,
                    "watchdogs have gone by themselves",
                    hold + 15.0,
                )
                # Without a supervisor nobody says that the job is over: its place stays written down.
                kept = {f"{self.job}/url", f"{self.job}/token"} if supervisor is None else set()
                self._nothing_left(lambda f: f in kept or "~nursery" in f)
                until(lambda: not set(self._files()) - kept, "the nursery, which lingers for 10 s, has gone", 30.0)
        finally:
            if supervisor is not None:
                supervisor.close()
            for host in self.hosts:
                found = self.watchdog(host)
                if found is not None:
                    watchdogs.end_process(found.pid, found.start, 5.0)
            del self._actors[:]
