"""Domains: who can map whose arenas, by what members state of their devices. Pure.

Within one host whose devices all reach each other there is one domain, the host's own; arenas in host memory are always in
that one. Where the driver says that some devices can't map each other's memory (no P2P), each set of devices that can, both
ways, is a domain of its own, and weights go between them by movers, as between hosts. A label that the user gave wins.

A domain never spans hosts, whatever the NVLink fabric can do: arenas are exported as POSIX descriptors, which stay on their
machine, and not as fabric handles. A clique of the fabric across hosts is therefore only shown (`cliques`; the `fabric` of
members, `elastic-reshard doctor`).

A member's domain is found once, when it first speaks, and stays: what has landed is recorded by it. It follows from the
machine and not from who came first, as long as reaching is mutual and transitive; where the driver says otherwise, whoever
doesn't fit is alone with its device.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from elastic_reshard.protocol.docs import MemberDoc
from elastic_reshard.protocol.messages import Reach, Statement
from elastic_reshard.supervisor.state import Draft

__all__ = ["cliques", "domain_for", "domain_of", "host_of", "mutual"]

_BETWEEN: Final = ".."  # no host's label has it, unless somebody means to confuse
_MOST: Final = 128  # characters of a name
_ALONE: Final = "-alone"


def mutual(one: Reach, other: Reach) -> bool:
    """Whether each can map the other's memory, as far as is known."""
    return one.device == other.device or not (other.device in one.apart or one.device in other.apart)


def domain_of(host: str, reach: Reach | None, others: Mapping[str, Sequence[Reach]]) -> str:
    """The domain of a member whose arenas are on a device, or in host memory (None). others: of each domain that the host
    has, what those say who are in it."""
    if reach is None:
        return host
    wanted = _named(host, min((reach.device, *reach.peers))) if reach.apart else host
    if all(mutual(reach, other) for other in others.get(wanted, ())):
        return wanted
    return _named(host, reach.device + _ALONE)


def domain_for(draft: Draft, host: str, said: Statement) -> str:
    """The domain of a member that speaks for the first time, as its document tells it: "" where that is its host's own."""
    if said.domain:
        found = said.domain if said.domain == host else _named(host, said.domain)
        return "" if found == host else found
    others: dict[str, list[Reach]] = {}
    for member in draft.members_at(host) if said.reach is not None else ():
        # Whoever was labelled is where its user wants it, and nobody is put beside it unasked.
        if member.kept and member.said is not None and member.said.reach is not None and not member.said.domain:
            others.setdefault(member.doc.where, []).append(member.said.reach)
    found = domain_of(host, said.reach, others)
    return "" if found == host else found


def host_of(domain: str) -> str:
    """The host of a domain, by its name; the beginning of it where that was too long."""
    return domain.partition(_BETWEEN)[0]


def cliques(members: Iterable[MemberDoc]) -> dict[str, tuple[str, ...]]:
    """Of each clique of an NVLink fabric ("cluster/clique"), the hosts that have members in it."""
    found: dict[str, set[str]] = {}
    for member in members:
        if member.fabric:
            found.setdefault(member.fabric, set()).add(member.host)
    return {fabric: tuple(sorted(hosts)) for fabric, hosts in sorted(found.items())}


def _named(host: str, what: str) -> str:
    name = f"{host}{_BETWEEN}{re.sub(r'[^A-Za-z0-9._-]', '-', what)}"
    if len(name) <= _MOST:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{host[: _MOST // 2]}{_BETWEEN}{digest}"
