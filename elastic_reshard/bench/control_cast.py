"""Who takes part in a simulated job, and what they would say: a trainer gang on hosts of its own, and engines of one host each.

Plain data and protocol messages, no sockets: said to a supervisor's process by `control_hosts`, to the bare state machine by
`control_core`. Movers and members do what real ones do in a refit without faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from elastic_reshard.layout.fragments import fragment_id
from elastic_reshard.protocol.bits import pack
from elastic_reshard.protocol.docs import GroupDoc, MemberState, TransferDoc
from elastic_reshard.protocol.messages import (
    Fill,
    GroupSpec,
    Hello,
    Holding,
    Install,
    Landing,
    LedgerSaid,
    MoverSaid,
    Statement,
)
from elastic_reshard.protocol.view import View

__all__ = ["BODY", "JOB", "TRAINER", "Cast", "Player"]

JOB: Final = "control"
TRAINER: Final = "trainer"
_CELLS: Final = 64  # of each landing arena
# One fragment for all: what layouts cost is `bench plan`'s to measure.
BODY: Final[dict[str, Any]] = {"whole": False, "tensors": {"w": {"plain": [[64, 1024], "bfloat16"]}}}
_FRAGMENT: Final = fragment_id(BODY)
_VALUE: Final = "ab" * 64  # what a mover puts into the rendezvous: one key, as gloo's addresses are


@dataclass
class Player:
    """A member. said: its latest statement."""

    said: Statement
    host: int

    @property
    def id(self) -> str:
        """The member's id."""
        return self.said.member

    def state(self, **changes: Any) -> Statement:
        """It says something new."""
        self.said = self.said.model_copy(update={"number": self.said.number + 1, **changes})
        return self.said


@dataclass
class Cast:
    """members: of both sides; per_host: on each host, an engine has as many. cell: the job's, bytes."""

    members: int
    per_host: int = 8
    cell: int = 1 << 20
    trainers: list[Player] = field(init=False)
    engines: dict[str, list[Player]] = field(init=False)

    def __post_init__(self) -> None:
        self.hosts = -(-self.members // self.per_host)
        gang = max(1, self.hosts // 2) * self.per_host
        gang = min(gang, self.members)
        self.trainers = [self._player(TRAINER, gang, rank, rank // self.per_host, "source") for rank in range(gang)]
        self.engines = {}
        for host in range(gang // self.per_host, self.hosts):
            size = min(self.per_host, self.members - host * self.per_host)
            name = f"engine-{host}"
            self.engines[name] = [self._player(name, size, rank, host, "destination") for rank in range(size)]
        everybody = [*self.trainers, *(p for engine in self.engines.values() for p in engine)]
        self.players = {p.id: p for p in everybody}
        self.by_host: list[list[Player]] = [[] for _ in range(self.hosts)]
        for player in everybody:
            self.by_host[player.host].append(player)

    def _player(self, group: str, size: int, rank: int, host: int, role: str) -> Player:
        number = host * self.per_host + rank % self.per_host + 1
        source = role == "source"
        said = Statement(
            member=f"{group}-{rank}@{number:016x}", group=GroupSpec(name=group, size=size, rank=rank),
            roles=frozenset({role}), host=self.label(host), pid=number, number=1,  # type: ignore[arg-type]
            source=_FRAGMENT if source else None, destination=None if source else _FRAGMENT,
            landing=None if source else Landing(arena=f"{number:032x}", cells=_CELLS, cell=self.cell),
        )  # fmt: skip
        return Player(said, host)

    @staticmethod
    def label(host: int) -> str:
        """A host's name."""
        return f"node-{host:05d}"

    def hello(self, host: int) -> Hello:
        """A watchdog's first message."""
        said = tuple(p.said for p in self.by_host[host])
        name = self.label(host)
        return Hello(job=JOB, host=name, machine=name, watchdog=f"{host + 1:016x}", statements=said)

    # -- what has come to be, by a view

    def live(self, view: View) -> bool:
        """Whether everybody takes part, and all groups are whole."""
        states = [doc.state for doc in view.members.values()]
        groups = [group.whole for group in view.groups.values()]
        whole = len(groups) == 1 + len(self.engines) and all(groups)
        return len(states) == self.members and whole and all(s is MemberState.LIVE for s in states)

    # -- what they say

    def count(self, group: GroupDoc) -> Iterator[Player]:
        """Trainers count as their group does."""
        for player in self.trainers:
            if player.said.count_from < group.count_from:
                player.state(count_from=group.count_from)
                yield player

    def publish(self, number: int) -> Iterator[Player]:
        """Every trainer offers its publish `number` (from 1 on)."""
        for player in self.trainers:
            fill = Fill(
                arena=f"{player.said.pid:032x}", slot=number % 2, generation=2 * number, fragment=_FRAGMENT,
                seq=player.said.count_from + number, label=f"step-{number}", stall=0.05, nbytes=1 << 30,
            )  # fmt: skip
            player.state(fills=(fill,))
            yield player

    def movers(self, transfer: TransferDoc, state: str, **more: Any) -> Iterator[tuple[Player, MoverSaid]]:
        """The movers of a transfer's members are there."""
        for member in transfer.present:
            player = self.players[member]
            yield (
                player,
                MoverSaid(
                    member=member, mover=f"{player.said.pid:016x}", transfer=transfer.id, state=state,  # type: ignore[arg-type]
                    config="gloo", **more,
                ),
            )  # fmt: skip

    def ready(self, transfer: TransferDoc) -> Iterator[tuple[Player, MoverSaid]]:
        """Their plans are made; how to meet them."""
        for player, said in self.movers(transfer, "ready"):
            yield player, said.model_copy(update={"values": {f"rank/{player.said.pid}": _VALUE}})

    def ledgers(self, transfer: TransferDoc) -> Iterator[tuple[Player, LedgerSaid]]:
        """All has landed."""
        bits = pack(b"\xff" * (_CELLS // 8))
        for part in transfer.landings:
            yield (
                self.players[part.member],
                LedgerSaid(
                    member=part.member, arena=part.arena, slot=part.slot, publication=transfer.publication, bits=bits
                ),
            )

    def out(self, transfer: TransferDoc) -> Iterator[tuple[Player, MoverSaid]]:
        """All are out, with everything done."""
        return self.movers(transfer, "out", outcome="done", cells=_CELLS, received=_CELLS * self.cell, seconds=0.1)

    def ask(self, number: int) -> Iterator[Player]:
        """Every engine's ranks call `install` for the `number`th time."""
        for player in self._served():
            player.state(install=Install(ask=number, asking=True, patience=60.0))
            yield player

    def pulled(self, groups: dict[str, GroupDoc]) -> Iterator[Player]:
        """They have pulled what their tickets say."""
        for player in self._served():
            ticket = groups[player.said.group.name].ticket
            if ticket is not None:
                install = player.said.install.model_copy(update={"ticket": ticket.id, "outcome": "pulled"})
                player.state(install=install)
                yield player

    def installed(self, groups: dict[str, GroupDoc]) -> Iterator[Player]:
        """They have heard that they are CURRENT."""
        for player in self._served():
            verdict = groups[player.said.group.name].verdict
            if verdict is not None and verdict.verdict == "current":
                held = Holding(
                    weight_version=verdict.weight_version, publication=verdict.publication, ticket=verdict.ticket
                )
                player.state(holding=held, install=replace_asking(player.said.install))
                yield player

    def _served(self) -> Iterable[Player]:
        return (player for engine in self.engines.values() for player in engine)


def replace_asking(install: Install) -> Install:
    """The call has returned."""
    return install.model_copy(update={"asking": False})
