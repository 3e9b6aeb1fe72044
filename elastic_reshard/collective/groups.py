"""From a torch process group to an endpoint of ours.

The user's group is used once, to agree on a name; everything else runs over a group of our own, so that an error here
never breaks theirs.
"""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from elastic_reshard.errors import TransferError
from elastic_reshard.plan import Topology
from elastic_reshard.transport import Endpoint

__all__ = ["Member", "close_all", "resolve"]


@dataclass(frozen=True)
class Member:
    """This process in a group: its endpoint, and the group rank of each global rank where they differ."""

    endpoint: Endpoint
    renumber: Mapping[int, int] | None


_formed: dict[tuple[object, ...], tuple[Store, Endpoint]] = {}


def resolve(
    group: dist.ProcessGroup | Endpoint | None,
    topology: Topology | Sequence[Hashable] | None,
    timeout: float,
    interface: str | None = None,
) -> Member:
    """The endpoint for a group: given, kept from before, or formed now (collective over the group).

    group: an Endpoint, a torch process group, or None for the default group. topology: domains of its members, in group
    rank order; None: members of one host are one domain.
    """
    if isinstance(group, Endpoint):
        return Member(group, None)
    if not dist.is_initialized():
        raise TransferError(
            "no process group: call torch.distributed.init_process_group (torchrun does not do it for you), or pass "
            "an Endpoint formed with er.Endpoint.form"
        )
    pg = group if group is not None else dist.group.WORLD
    ranks = dist.get_process_group_ranks(pg)
    labels = topology.domains if isinstance(topology, Topology) else topology
    domains = tuple(map(repr, labels)) if labels is not None else None
    store = dist.distributed_c10d._get_default_store()
    key = (tuple(ranks), domains, interface)
    known = _formed.get(key)
    if known is None or known[0] is not store or known[1].closed:
        if known is not None:
            known[1].close()
        name = _common_name(pg, ranks)
        endpoint = Endpoint.form(
            PrefixStore(f"elastic_reshard/{name}", store),
            ranks.index(dist.get_rank()),
            len(ranks),
            domains=domains,
            interface=interface,
            timeout=timeout,
        )
        _formed[key] = (store, endpoint)
    endpoint = _formed[key][1]
    same = ranks == list(range(len(ranks)))
    return Member(endpoint, None if same else {r: i for i, r in enumerate(ranks)})


def _common_name(pg: dist.ProcessGroup | None, ranks: Sequence[int]) -> str:
    """A name that nobody used before, minted by the group's first rank: never a local count, which could drift."""
    device = dist.distributed_c10d._get_pg_default_device(pg)
    name = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8, device=device)
    dist.broadcast(name, src=ranks[0], group=pg)
    return bytes(name.tolist()).hex()


def close_all() -> None:
    """Close the endpoints that were formed for torch process groups. Not collective; peers that still use them see
    this member leave."""
    for _, endpoint in _formed.values():
        endpoint.close()
    _formed.clear()
