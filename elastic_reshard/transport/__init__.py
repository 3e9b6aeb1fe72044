"""Transports: a plan's rounds over networks and mapped memory, in messages (gloo) or groups on a stream (NCCL)."""

from elastic_reshard.transport.endpoint import Endpoint, Identity
from elastic_reshard.transport.network import GlooNetwork, GroupedNetwork, Network, Pending
from elastic_reshard.transport.program import Program, StagingPlan, Wire, bind
from elastic_reshard.transport.rounds import Carriage, Tally
from elastic_reshard.transport.running import run
from elastic_reshard.transport.streamed import StreamedRounds
from elastic_reshard.transport.views import PeerViews, SlotViews, Views
from elastic_reshard.transport.watched import Watch

__all__ = [
    "Carriage",
    "Endpoint",
    "GlooNetwork",
    "GroupedNetwork",
    "Identity",
    "Network",
    "PeerViews",
    "Pending",
    "Program",
    "SlotViews",
    "StagingPlan",
    "StreamedRounds",
    "Tally",
    "Views",
    "Watch",
    "Wire",
    "bind",
    "run",
]
