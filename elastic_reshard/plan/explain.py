"""A plan in words for a person, and as plain data for a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from elastic_reshard.layout.table import Int
from elastic_reshard.plan.cost import Cost, cost
from elastic_reshard.plan.legs import Kind
from elastic_reshard.plan.plan import PLANNER_VERSION, Plan
from elastic_reshard.plan.slices import Slice

__all__ = ["explain", "in_bytes", "to_json"]

_MOST = 5  # how many members, tensors or peers are shown before "and n more"
_CLASSES = {
    Kind.SELF: ("self", "stays in the member that has it"),
    Kind.LOCAL: ("local", "pulled inside a domain from a source"),
    Kind.NET: ("net", "enters a domain over the network"),
    Kind.LANDED: ("landed", "spread inside a domain by the member that received it"),
}


def in_bytes(n: float) -> str:
    """Bytes for a person: 3 significant digits, binary units."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} PiB"


def explain(plan: Plan, member: int | None = None) -> str:
    """Plain text: what the whole plan does, or what one member does in it. Ends without a newline.

    Blocks as long as `cost` does: milliseconds for hundreds of members, seconds for ten thousand. PlanError for a member
    outside the topology.
    """
    return "\n".join(_whole(plan, cost(plan)) if member is None else _of_member(plan, plan.slice(member)))


def _whole(plan: Plan, c: Cost) -> Iterator[str]:
    o, topology = plan.options, plan.topology
    yield f"plan {plan.digest} (planner {PLANNER_VERSION}, {'landing' if o.landing else 'streaming'})"
    yield (
        f"{len(c.holders)} members hold, {len(c.seekers)} want; {topology.size} members in {len(c.need)} domains"
        + (f"; absent: {_some(sorted(plan.absent))}" if plan.absent else "")
    )
    yield (
        f"{len(plan.tensors)} tensors, {in_bytes(sum(t.nbytes for t in plan.targets))}, of {len(plan.geometries)} "
        f"geometries (planned once each)"
    )
    yield (
        f"{plan.rounds.count} rounds for all; messages of at most {in_bytes(o.message)}, staging of at most "
        f"{in_bytes(o.staging)} a member"
    )
    yield ""
    yield "bytes by link class"
    for kind, (name, what) in _CLASSES.items():
        yield f"  {name:<7}{in_bytes(c.links[kind].total):>10}  {what}"
    yield f"  {c.pairs} pairs talk over the network, in at least {c.messages} messages"
    yield ""
    yield from _against_bounds(plan, c)
    yield ""
    yield "why a byte moves more than once"
    yield from (f"  {reason}" for reason in _reasons(plan, c))
    yield ""
    yield "busiest over the network"
    yield from _busiest("send", c.links[Kind.NET].sent)
    yield from _busiest("receive", c.links[Kind.NET].received)
    yield ""
    yield "largest tensors"
    yield from _largest(plan)


def _against_bounds(plan: Plan, c: Cost) -> Iterator[str]:
    yield "against the least possible"
    yield f"  must enter domains  {in_bytes(c.lower_bound):>10}  (distinct bytes per destination layout, less what is there)"
    yield f"  enters them         {in_bytes(c.net):>10}  {c.ratio:.3f}x"
    wanted = int((c.need > 0).sum())
    if wanted:
        most = int(np.argmax(c.need))
        yield f"  {wanted} of {len(c.need)} domains need anything; domain {most} most, {in_bytes(int(c.need[most]))}"
    yield f"  sources balanced to max/mean {c.source_balance:.3f}, receivers to {c.receiver_balance:.3f}"
    if plan.options.landing and c.source_balance > 1.5:
        yield "  (cells land whole: with few cells per member the balance is coarse)"


def _reasons(plan: Plan, c: Cost) -> Iterator[str]:
    """Each way in which more bytes move than destinations distinctly need."""
    wanted = sum(t.nbytes for t in plan.targets)
    reaching = int((c.ingress > 0).sum())
    if c.net > wanted:
        yield f"{reaching} domains want what they lack, and each gets its own copy over the network."
    if len(plan.targets) > 1:
        yield f"{len(plan.targets)} destination layouts are carried one by one, also where their boxes overlap."
    if c.links[Kind.LANDED].total:
        what = "lands in one member and is read from there by all that install it" if plan.options.landing else (
            "enters a domain once, spread over its members, and is copied to the others that want it"
        )  # fmt: skip
        yield f"{in_bytes(c.links[Kind.LANDED].total)} {what}."
    if c.links[Kind.LOCAL].total:
        yield f"{in_bytes(c.links[Kind.LOCAL].total)} is read from sources of the same domain, once by each reader."
    if c.net > c.lower_bound:
        yield f"{in_bytes(c.net - c.lower_bound)} of cells whose source is lost comes whole, though parts are near."
    if c.net <= wanted and not c.links[Kind.LANDED].total and not c.links[Kind.LOCAL].total:
        yield "none does."


def _busiest(verb: str, load: Int) -> Iterator[str]:
    order = np.argsort(-load, kind="stable")
    busy = [int(m) for m in order[: int((load > 0).sum())]]
    if not busy:
        yield f"  {verb}: nobody"
        return
    shown = ", ".join(f"member {m} {in_bytes(int(load[m]))}" for m in busy[:_MOST])
    yield f"  {verb}: {shown}" + (f", and {len(busy) - _MOST} more" if len(busy) > _MOST else "")


def _largest(plan: Plan) -> Iterator[str]:
    sizes = [plan.targets[ref.target][ref.name].nbytes for ref in plan.tensors]
    order = sorted(range(len(sizes)), key=lambda t: (-sizes[t], t))
    for t in order[:_MOST]:
        ref = plan.tensors[t]
        first, parts = int(plan.rounds.first[t]), int(plan.rounds.parts[t])
        rounds = f"round {first}" if parts == 1 else f"rounds {first}-{first + parts - 1}"
        yield f"  {ref.name}  {in_bytes(sizes[t])}, {rounds}"
        for party, c in ref.ways[:_MOST]:
            yield f"    from {plan.sources[party].layout[c.source]}"
        if len(ref.ways) > _MOST:
            yield f"    and {len(ref.ways) - _MOST} more parts"
        yield f"    to   {plan.targets[ref.target][ref.name]}"
    if len(order) > _MOST:
        yield f"  and {len(order) - _MOST} more"


def _of_member(plan: Plan, s: Slice) -> Iterator[str]:
    domain = plan.topology.domains[s.member]
    mates = plan.topology.domains.count(domain)
    yield f"member {s.member} of plan {s.plan}: domain {domain} of {mates} members"
    if s.member in plan.absent:
        yield "  absent: neither sends nor receives"
        return
    if not len(s.legs):
        yield "  holds nothing that is wanted and wants nothing"
        return
    for kind in Kind:
        for out in (True, False):
            yield from _column(s, kind, out)
    net = s.legs.kind == Kind.NET
    messages = len(np.unique(s.message[net]))
    busy = np.unique(s.legs.round[~s.legs.install])
    yield f"  {messages} messages, in {len(busy)} of {s.rounds} rounds" + (
        f" ({int(busy[0])} to {int(busy[-1])})" if len(busy) else ""
    )
    size = np.zeros(len(s.tensors), dtype=np.int64)
    np.add.at(size, s.legs.tensor, s.nbytes)
    order = np.argsort(-size, kind="stable")[:_MOST]
    yield "  most bytes: " + ", ".join(f"{s.tensors[t].name} {in_bytes(int(size[t]))}" for t in order if size[t])


def _column(s: Slice, kind: Kind, out: bool) -> Iterator[str]:
    """One kind and direction: how much, with whom."""
    chosen = (s.legs.kind == kind) & (s.legs.out == out)
    if not chosen.any():
        return
    verbs = {
        Kind.SELF: ("copies", "copies"),
        Kind.LOCAL: ("shows", "pulls from sources"),
        Kind.NET: ("sends", "receives"),
        Kind.LANDED: ("hands on", "pulls from receivers"),
    }
    peers, at = np.unique(s.legs.peer[chosen], return_inverse=True)
    load = np.zeros(len(peers), dtype=np.int64)
    np.add.at(load, at, s.nbytes[chosen])
    order = np.argsort(-load, kind="stable")[:_MOST]
    shown = ", ".join(f"{int(peers[i])} ({in_bytes(int(load[i]))})" for i in order)
    more = f" and {len(peers) - _MOST} more" if len(peers) > _MOST else ""
    whom = "" if kind == Kind.SELF else f" {'to' if out else 'from'} {shown}{more}"
    yield f"  {verbs[kind][0 if out else 1]:<21}{in_bytes(int(load.sum())):>10}{whom}"


def _some(values: list[int]) -> str:
    more = f" and {len(values) - _MOST} more" if len(values) > _MOST else ""
    return ", ".join(map(str, values[:_MOST])) + more


def to_json(plan: Plan) -> dict[str, Any]:
    """What `explain` says, as plain data (`json.dumps` takes it): bytes as integers, members by position in lists."""
    c = cost(plan)
    return {
        "digest": plan.digest,
        "planner": PLANNER_VERSION,
        "options": asdict(plan.options),
        "members": plan.topology.size,
        "domains": list(plan.topology.domains),
        "absent": sorted(plan.absent),
        "rounds": plan.rounds.count,
        "pairs": c.pairs,
        "messages_at_least": c.messages,
        "net_bytes": c.net,
        "lower_bound_bytes": c.lower_bound,
        "ratio": c.ratio if c.lower_bound or not c.net else None,
        "source_balance": c.source_balance,
        "receiver_balance": c.receiver_balance,
        "bytes": {
            _CLASSES[kind][0]: {"total": t.total, "sent": t.sent.tolist(), "received": t.received.tolist()}
            for kind, t in c.links.items()
        },
        "domain_ingress": c.ingress.tolist(),
        "domain_need": c.need.tolist(),
        "geometries": [_geometry(plan, number) for number in range(len(plan.geometries))],
        "tensors": [_tensor(plan, t) for t in range(len(plan.tensors))],
    }


def _geometry(plan: Plan, number: int) -> Mapping[str, Any]:
    g = plan.geometries[number]
    return {
        "tensors": plan.geometry_of.count(number),
        "dims": g.dims,
        "itemsize": g.itemsize,
        "held_boxes": len(g.holders.lo),
        "wanted_boxes": len(g.seekers.lo),
        "holders": len(np.unique(g.holders.member)),
        "seekers": len(np.unique(g.seekers.member)),
    }


def _tensor(plan: Plan, t: int) -> Mapping[str, Any]:
    ref = plan.tensors[t]
    layout = plan.targets[ref.target][ref.name]
    return {
        "name": ref.name,
        "target": ref.target,
        "shape": list(layout.shape),
        "dtype": ref.dtype,
        "nbytes": layout.nbytes,
        "geometry": plan.geometry_of[t],
        "first_round": int(plan.rounds.first[t]),
        "rounds": int(plan.rounds.parts[t]),
        "from": [
            {
                "source": party,
                "tensor": c.source,
                "source_box": str(c.source_box),
                "destination_box": str(c.destination_box),
                "permute": list(c.permute or ()),
            }
            for party, c in ref.ways
        ],
    }
