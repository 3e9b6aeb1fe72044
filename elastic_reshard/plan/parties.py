"""Who takes part in a plan: members, their domains, and the groups that hold or want a model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from elastic_reshard.errors import PlanError
from elastic_reshard.layout.correspondence import Correspondence
from elastic_reshard.layout.model import ModelLayout
from elastic_reshard.layout.table import Int

__all__ = ["Destination", "Source", "Topology"]


@dataclass(frozen=True)
class Topology:
    """domains[m] is the domain of member m, numbered from 0 by first appearance. Members of one domain can map each
    other's arenas; bytes enter a domain over the network once."""

    domains: tuple[int, ...]

    @classmethod
    def of(cls, labels: Sequence[Hashable]) -> Topology:
        """From any labels, one per member: host names, rack ids, numbers."""
        seen: dict[Hashable, int] = {}
        return cls(tuple(seen.setdefault(label, len(seen)) for label in labels))

    @classmethod
    def isolated(cls, members: int) -> Topology:
        """Every member its own domain: everything goes over the network."""
        return cls(tuple(range(members)))

    @classmethod
    def single(cls, members: int) -> Topology:
        """One domain: nothing goes over the network."""
        return cls((0,) * members)

    @classmethod
    def blocks(cls, members: int, size: int) -> Topology:
        """Consecutive members in domains of `size`; the last may be smaller."""
        return cls(tuple(m // size for m in range(members)))

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.domains)

    @cached_property
    def array(self) -> Int:
        """The domains as int64 [members]."""
        return np.asarray(self.domains, dtype=np.int64)


def _members_of(layout: ModelLayout, members: tuple[int, ...] | None, topology: Topology, side: str) -> Int:
    """Member of each rank, int64; checks that every rank of the layout has a member inside the topology."""
    top = max((int(t.table.members[-1]) for t in layout.values() if len(t.table.members)), default=-1)
    ranks = np.arange(top + 1) if members is None else np.asarray(members, dtype=np.int64)
    if len(ranks) <= top:
        raise PlanError(f"{side} layout has rank {top}, but only {len(ranks)} members are named for it")
    if len(ranks) and (ranks.min() < 0 or ranks.max() >= topology.size):
        raise PlanError(f"{side} member {int(ranks.max())} is outside of a topology of {topology.size} members")
    if len(np.unique(ranks)) != len(ranks):
        raise PlanError(f"{side} members repeat: one member stands for one rank of a group")
    return ranks


@dataclass(frozen=True)
class Source:
    """A group that holds a model. members[r] is the member of group rank r (None: rank r is member r).

    correspondences: how its tensors become the destination's (None: same names, same boxes)."""

    layout: ModelLayout
    members: tuple[int, ...] | None = None
    correspondences: tuple[Correspondence, ...] | None = None

    def member_of(self, topology: Topology) -> Int:
        """Member of each rank; PlanError if they do not fit the topology."""
        return _members_of(self.layout, self.members, topology, "source")


@dataclass(frozen=True)
class Destination:
    """A group that wants a model in one layout."""

    layout: ModelLayout
    members: tuple[int, ...] | None = None

    def member_of(self, topology: Topology) -> Int:
        """Member of each rank; PlanError if they do not fit the topology."""
        return _members_of(self.layout, self.members, topology, "destination")
