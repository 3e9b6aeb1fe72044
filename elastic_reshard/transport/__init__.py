"""Transports: a plan's rounds over networks and mapped memory. The one seam that NCCL and M2N will join."""

from elastic_reshard.transport.endpoint import Endpoint, Identity
from elastic_reshard.transport.network import GlooNetwork, Network, Pending
from elastic_reshard.transport.program import Program, StagingPlan, bind
from elastic_reshard.transport.rounds import Carriage, Tally
from elastic_reshard.transport.run import run
from elastic_reshard.transport.views import PeerViews, SlotViews, Views
from elastic_reshard.transport.watched import Watch

__all__ = [
    "Carriage",
    "Endpoint",
    "GlooNetwork",
    "Identity",
    "Network",
    "PeerViews",
    "Pending",
    "Program",
    "SlotViews",
    "StagingPlan",
    "Tally",
    "Views",
    "Watch",
    "bind",
    "run",
]
