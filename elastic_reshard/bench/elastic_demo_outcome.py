"""What came of the elastic demo, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_reshard.bench.elastic_demo_cast import DemoSetup
from elastic_reshard.bench.elastic_demo_watch import Line

__all__ = ["Change", "Fault", "Outcome", "Proof", "Refit"]


@dataclass(frozen=True)
class Refit:
    """One version. network: bytes over the network; needed: the distinct bytes that engines' hosts need; seconds: from the
    first trainer's call of publish to the last engine's install; copy: of publish."""

    version: int
    label: str
    epoch: int
    engines: tuple[str, ...]
    network: int
    needed: int
    transfers: int
    copy: float
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Fault:
    """Something that was inflicted. landed: share of the version's bytes that had landed then; seconds from then: noticed
    (the transfer broken off), replaced (the next one runs), committed, recovered (installed everywhere). resent: bytes
    that were under way when it was broken off and were moved again. why: what the supervisor said."""

    what: str
    whom: str
    version: int
    landed: float | None
    noticed: float | None
    replaced: float | None
    committed: float
    recovered: float
    resent: int
    why: str = ""


@dataclass(frozen=True)
class Change:
    """Members that came or went. network: bytes that were moved for it; others: whether nobody else had to do anything."""

    what: str
    whom: str
    seconds: float
    network: int
    others: bool


@dataclass(frozen=True)
class Proof:
    """What an engine served at the end. nbytes: compared with what the version's number gives; wrong: tensors that differ."""

    engine: str
    host: str
    version: int
    label: str
    state: str
    nbytes: int
    wrong: tuple[str, ...]


@dataclass
class Outcome:
    """All of it. compared: bytes in all comparisons; wrong: whatever was not as promised, empty if all is well."""

    setup: DemoSetup
    nbytes: int = 0
    seconds: float = 0.0
    compared: int = 0
    refits: list[Refit] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def to_data(self) -> dict[str, Any]:
        """JSON-ready."""
        found = asdict(self) | {"ok": not self.wrong, "lines": [line.to_data() for line in self.lines]}
        return {"ok": found.pop("ok"), **found}
