"""The plan of a transfer's document: by ranks, positions, absence and basis; and what contradicts itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elastic_reshard.errors import LayoutError, PlanError, PlanMismatch, ProtocolError
from elastic_reshard.layout import Correspondence
from elastic_reshard.layout.side import Side
from elastic_reshard.mover.part import part_of
from elastic_reshard.mover.task import check, check_plan, plan_of, sides_of
from elastic_reshard.protocol import bits
from tests.mover.world import World, model


@pytest.fixture
def world() -> Any:
    engine = model(2, dim=-1)
    made = World(model(4), ("t", "t", "u", "u"), {"a": (engine, ("e", "e")), "b": (engine, ("f", "f"))})
    yield made
    made.close()


def test_the_plan_is_of_positions_and_every_member_makes_the_same(world: World) -> None:
    doc, publication = world.documents()
    check(doc, publication)
    check_plan(doc, publication)
    plans = [world.plan(doc, publication) for _ in range(2)]
    assert plans[0].digest == plans[1].digest
    assert plans[0].topology.domains == (0, 0, 1, 1, 2, 2, 3, 3)
    assert [d.members for d in plans[0].destinations] == [(4, 5), (6, 7)]
    assert len(plans[0].targets) == 1
    assert plans[0].options.landing


def test_a_basis_over_own_cells_becomes_one_over_all(world: World) -> None:
    member, rank = world.members[5], 1
    own = world._grid(member)[2]
    told = np.zeros(len(own), dtype=bool)
    told[[0, 3, len(own) - 1]] = True
    doc, publication = world.documents(2, {member: bits.pack(np.packbits(told).tobytes()), world.members[4]: ""})
    plan = world.plan(doc, publication)
    assert plan.ledger is not None
    assert set(plan.ledger.held) == {(0, 5)}
    assert np.flatnonzero(plan.ledger.held[0, 5]).tolist() == sorted(own[told].tolist())
    part = part_of(doc, plan, member)
    assert (part.basis == told).all()
    assert part.destination is not None
    assert part.destination[1] == rank
    # Nothing of it lands there again.
    assert not set(np.concatenate(part.landing).tolist()) & set(np.flatnonzero(told).tolist())


def test_ranks_of_the_communicator_are_the_present_ones(world: World) -> None:
    world.absent = (world.members[1], world.members[4])
    doc, publication = world.documents()
    assert [world.members.index(m) for m in doc.present] == [0, 2, 3, 5, 6, 7]
    # Rank 0 of engine a is absent, and so is what only trainer 1 has: its plan cannot be; that of a replica can.
    whole = model(1, copies=4)
    world.source = whole
    doc = doc.model_copy(update={"source": doc.source.model_copy(update={"layout": Side(whole).id})})
    publication = publication.model_copy(update={"layout": Side(whole).id})
    plan = world.plan(doc, publication)
    part = part_of(doc, plan, world.members[5])
    assert (part.position, part.rank, part.present) == (5, 3, (0, 2, 3, 5, 6, 7))
    assert 1 not in part.slice.legs.peer
    with pytest.raises(PlanError, match="not among those who take part"):
        part_of(doc, plan, world.members[4])


def test_what_is_told_wrongly_is_found_out(world: World) -> None:
    doc, publication = world.documents()
    for change in ({"basis": {world.members[4]: "x"}}, {"absent": (3,)}, {"cell": 4096}, {"hosts": ("t",) * 8}):
        with pytest.raises(PlanMismatch, match="same version"):
            check_plan(doc.model_copy(update=change), publication)
    with pytest.raises(PlanMismatch):
        check_plan(doc, publication.model_copy(update={"layout": "other"}))
    faults: dict[str, dict[str, Any]] = {
        "distinct": {"members": (*doc.members[:-1], doc.members[0])},
        "hosts": {"hosts": doc.hosts[:-1]},
        "outside": {"absent": (8,)},
        "publication": {"publication": "p7.1"},
        "two for one": {"landings": (*doc.landings, doc.landings[0])},
    }
    for reason, change in faults.items():
        with pytest.raises(ProtocolError, match=reason):
            check(doc.model_copy(update=change), publication)
    with pytest.raises(ProtocolError):
        world.plan(doc.model_copy(update={"basis": {world.members[4]: "!"}}), publication)


def test_layouts_are_what_their_ids_say(world: World) -> None:
    bodies = {key: side.body.decode() for key, side in world.layouts().items()}
    assert {key: side.id for key, side in sides_of(bodies).items()} == {key: key for key in bodies}
    (a, _), (b, body) = list(bodies.items())[:2]
    for wrong in (body, "{}", "no layout", "[]"):
        with pytest.raises(LayoutError):
            sides_of({a: wrong})
    assert b in bodies


def test_destinations_of_one_transfer_have_one_kind_of_correspondences(world: World) -> None:
    doc, publication = world.documents()
    layouts: dict[str, Any] = {key: (side.model, side.correspondences) for key, side in world.layouts().items()}
    party = doc.destinations[1].model_copy(update={"layout": "renamed"})
    doc = doc.model_copy(update={"destinations": (doc.destinations[0], party)})
    engine = layouts[doc.destinations[0].layout][0]
    ways = tuple(Correspondence(name, name) for name in engine)
    with pytest.raises(PlanError, match="2 kinds of correspondences"):
        plan_of(doc, publication, {**layouts, "renamed": (engine, ways)})
    with pytest.raises(PlanError, match="layout renamed"):
        plan_of(doc, publication, layouts)
