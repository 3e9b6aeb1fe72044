"""The plan that follows from a task, and whether it is the told one.

Everything that moves is a function of the transfer's document and the layouts that it names; so every mover works out the
same plan, and whose document, layouts or planner differ finds it out by the plan's id, before the first byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from elastic_reshard.errors import LayoutError, PlanError, PlanMismatch, ProtocolError
from elastic_reshard.layout.correspondence import Correspondence
from elastic_reshard.layout.model import ModelLayout
from elastic_reshard.layout.side import Side
from elastic_reshard.mover.core import Given, Task
from elastic_reshard.plan import CellGrid, Destination, Ledger, Plan, PlanOptions, Source, Topology, transfer_digest
from elastic_reshard.protocol import bits
from elastic_reshard.protocol.docs import PublicationDoc, TransferDoc

__all__ = ["Given", "Layouts", "Task", "check", "check_plan", "options_of", "plan_of", "sides_of"]

# Layouts by the ids of the view, with the correspondences that came with them.
Layouts = Mapping[str, tuple[ModelLayout, tuple[Correspondence, ...] | None]]


def check(doc: TransferDoc, publication: PublicationDoc) -> None:
    """ProtocolError where a transfer contradicts itself, or is told with another publication."""
    size, faults = len(doc.members), []
    if doc.publication != publication.id:
        faults.append(f"it is of publication {doc.publication}, told with {publication.id}")
    if len(set(doc.members)) != size or len(doc.hosts) != size:
        faults.append(f"{size} members ({len(set(doc.members))} distinct) on {len(doc.hosts)} hosts")
    parties = (doc.source, *doc.destinations)
    if any(at >= size for at in (*doc.absent, *(m for party in parties for m in party.members))):
        faults.append(f"positions outside of its {size} members")
    landing = [d.member for d in doc.landings]
    if len(set(landing)) != len(landing) or not {*landing, *doc.basis} <= {*doc.members}:
        faults.append("landings or a basis of members that it does not know, or two for one")
    if faults:
        raise ProtocolError(f"transfer {doc.id} contradicts itself: {'; '.join(faults)}; nothing was moved")


def sides_of(layouts: Mapping[str, str]) -> dict[str, Side]:
    """Layouts from their bodies. LayoutError if one is none, or its content id is not the told one."""
    found = {}
    for key, body in layouts.items():
        side = Side.of_body(body.encode())
        if side.id != key:
            raise LayoutError(f"the body told as layout {key} is that of {side.id}; nothing was moved. All of a job must "
                              "run the same version")  # fmt: skip
        found[key] = side
    return found


def options_of(doc: TransferDoc) -> PlanOptions:
    """How the plan cuts. PlanError for sizes that cannot work."""
    return PlanOptions(message=doc.message, staging=doc.staging, cell=doc.cell, landing=True)


def check_plan(doc: TransferDoc, publication: PublicationDoc) -> None:
    """PlanMismatch if the told plan is not the one that follows from these documents here."""
    mine = transfer_digest(
        options_of(doc),
        (publication.layout, doc.source.members),
        [(party.layout, party.members) for party in doc.destinations],
        doc.hosts,
        doc.absent,
        doc.basis,
    )
    if mine != doc.plan:
        raise PlanMismatch(
            f"transfer {doc.id} is told as plan {doc.plan}, but it is {mine} here; nothing was moved. All of a job must run "
            "the same version"
        )


def plan_of(doc: TransferDoc, publication: PublicationDoc, layouts: Layouts) -> Plan:
    """The plan of a transfer: members are positions in `doc.members`. Pure; some ms a hundred tensors, more with a basis.

    Raises PlanError (ShardLost: bytes that nobody present holds), LayoutMismatch, ProtocolError for a basis that fits no
    layout."""
    model, _ = _layout(layouts, publication.layout)
    parties = [(party, *_layout(layouts, party.layout)) for party in doc.destinations]
    ways = {correspondences for _, _, correspondences in parties}
    if len(ways) != 1:
        raise PlanError(f"transfer {doc.id} has destinations with {len(ways)} kinds of correspondences; each kind must have "
                        "a transfer of its own")  # fmt: skip
    return Plan(
        (Source(model, doc.source.members, ways.pop()),),
        tuple(Destination(layout, party.members) for party, layout, _ in parties),
        Topology.of(doc.hosts),
        options_of(doc),
        absent=frozenset(doc.absent),
        ledger=_ledger(doc, [(party.members, layout) for party, layout, _ in parties]),
    )


def _layout(layouts: Layouts, key: str) -> tuple[ModelLayout, tuple[Correspondence, ...] | None]:
    if key not in layouts:
        raise PlanError(f"the transfer names layout {key}, which did not come with it; nothing was moved")
    return layouts[key]


def _ledger(doc: TransferDoc, parties: Sequence[tuple[Sequence[int], ModelLayout]]) -> Ledger | None:
    """The basis as the planner counts: over all cells of a layout; it comes over those of each holder's own regions."""
    if not any(doc.basis.values()):
        return None
    targets = {layout.content_id: layout for _, layout in parties}
    grids = [CellGrid.of(layout, doc.cell) for layout in targets.values()]
    number = {key: at for at, key in enumerate(targets)}
    held = {}
    for members, layout in parties:
        target = number[layout.content_id]
        for rank, position in enumerate(members):
            text = doc.basis.get(doc.members[position], "")
            if text:
                own = grids[target].cells_of_rank(rank)
                raw = np.frombuffer(bits.unpack(text, len(own)), dtype=np.uint8)
                found = np.zeros(grids[target].count, dtype=np.bool_)
                found[own] = np.unpackbits(raw, count=len(own)).astype(np.bool_)
                held[target, position] = found
    return Ledger(tuple(grid.count for grid in grids), held)
