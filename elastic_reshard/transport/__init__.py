"""Transports: a plan's rounds over networks and mapped memory. The one seam that NCCL and M2N will join."""

from elastic_reshard.transport.endpoint import Endpoint, Identity
from elastic_reshard.transport.network import GlooNetwork, Network, Pending
from elastic_reshard.transport.program import Program, StagingPlan, bind
from elastic_reshard.transport.run import Tally, run
from elastic_reshard.transport.views import PeerViews, Views

__all__ = [
    "Endpoint",
    "GlooNetwork",
    "Identity",
    "Network",
    "PeerViews",
    "Pending",
    "Program",
    "StagingPlan",
    "Tally",
    "Views",
    "bind",
    "run",
]
