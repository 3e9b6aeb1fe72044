"""What carries a transfer: a network that uses the members' devices where all that take part have the same, else gloo. Pure.

Nothing is tried out: members state what their movers can move over, with everything that must be alike as one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from elastic_reshard.protocol.deadlines import Policies
from elastic_reshard.protocol.docs import TransferDoc
from elastic_reshard.protocol.messages import Statement
from elastic_reshard.supervisor.state import Draft

__all__ = ["GLOO", "choose", "patience", "paused"]

GLOO: Final = "gloo"
_AUTO: Final = ("nccl", "pretend")  # by preference
# Bytes per second of a network that works, at a member whose rounds carry much: a tenth of a NIC of 10 Gbit/s shared by four.
_SLOWEST: Final = 30e6
# A cell counts when its round has landed, and two are under way before the first has; a round is an eighth of the staging.
_ROUNDS: Final = 2 / 8
_TRIED: Final = 2  # epochs in a row without a new cell; then it is tried over gloo


def choose(draft: Draft, publication: str, present: Sequence[str]) -> tuple[str, str]:
    """(the network of a transfer between these members, why it is gloo although some have a device network or one was asked
    for; "" if that is not so)."""
    wanted = _AUTO if draft.policies.network == "auto" else (draft.policies.network,)
    stated = {m: draft.members[m].said for m in present}
    why = []
    for network in wanted:
        if network == GLOO:
            return GLOO, ""
        fault = _fault(network, stated)
        if not fault and (draft.tried[0] != publication or draft.tried[2] < _TRIED):
            return network, ""
        fault = fault or f"{draft.tried[2]} epochs over it moved no cell"
        if draft.policies.network != "auto" or any(s is not None and network in s.networks for s in stated.values()):
            why.append(f"{network}: {fault}")
    return GLOO, "; ".join(why)[:2000]


def _fault(network: str, stated: dict[str, Statement | None]) -> str:
    """Why these members can't move over it together; "" if they can."""
    configs = {m: said.networks[network] for m, said in stated.items() if said is not None and network in said.networks}
    lacking = sorted(set(stated) - set(configs))
    if lacking:
        return f"{', '.join(lacking)} cannot"
    if len(set(configs.values())) > 1:
        return f"unlike configs: {', '.join(f'{m} {config}' for m, config in configs.items())}"
    return ""


def patience(doc: TransferDoc, stall: float, policies: Policies) -> float:
    """Seconds without a new cell after which nothing moves any more."""
    return stall + max(doc.cell / policies.min_rate, _ROUNDS * doc.staging / _SLOWEST)


def paused(draft: Draft, members: Sequence[str], present: Sequence[str], network: str) -> tuple[int, ...]:
    """Positions of the members whose movers wait for their windows in a transfer over this network."""
    found = []
    there = frozenset(present)
    for position, name in enumerate(members):
        member = draft.members.get(name)
        said = member.said if member is not None else None
        if member is None or said is None or name not in there or member.gone:
            continue  # of one that has ended nobody can be disturbed
        if said.window == "paused" or (said.window == "network" and network != GLOO):
            found.append(position)
    return tuple(found)
