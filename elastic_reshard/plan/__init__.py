"""Planning: pure functions from layouts, domains and ledgers to transfers. numpy only, no torch, no I/O."""

from elastic_reshard.plan.cells import CellGrid
from elastic_reshard.plan.identity import transfer_digest
from elastic_reshard.plan.ledger import Ledger
from elastic_reshard.plan.legs import Kind, Legs
from elastic_reshard.plan.parties import Destination, Source, Topology
from elastic_reshard.plan.plan import PLANNER_VERSION, Plan, PlanOptions
from elastic_reshard.plan.ranges import boxes_of_range
from elastic_reshard.plan.slices import Slice, TensorRef

__all__ = [
    "PLANNER_VERSION",
    "CellGrid",
    "Destination",
    "Kind",
    "Ledger",
    "Legs",
    "Plan",
    "PlanOptions",
    "Slice",
    "Source",
    "TensorRef",
    "Topology",
    "boxes_of_range",
    "transfer_digest",
]
