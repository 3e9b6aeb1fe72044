"""Keeps RL post-training alive on machines that come and go: the M2N Reshard data path and what guards it.

    import elastic_reshard as er

    params = er.empty_like(local_shapes)                 # tensors that peers of this host can map
    er.reshard(source=model.state_dict(), ...)           # on trainer ranks
    er.reshard(destination=params, destination_layout=layout, ...)   # on inference ranks

Names are loaded when first used, so that commands and services that need no torch never import it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.5.0"

if TYPE_CHECKING:
    from elastic_reshard.arena import HostArena, empty, empty_like
    from elastic_reshard.collective import Handle, Report, close_all, reshard
    from elastic_reshard.errors import ReshardError
    from elastic_reshard.layout import (
        Box,
        Correspondence,
        Declared,
        Mesh,
        ModelLayout,
        Replicate,
        Shard,
        StridedShard,
        TensorLayout,
    )
    from elastic_reshard.layout.dtensor import layout_of
    from elastic_reshard.member import Event, Group, Member, Publication, join
    from elastic_reshard.plan import Plan, PlanOptions, Topology
    from elastic_reshard.protocol.deadlines import Deadlines, Policies
    from elastic_reshard.supervisor.client import SupervisorClient
    from elastic_reshard.supervisor.client_async import AsyncSupervisorClient
    from elastic_reshard.supervisor.server import Supervisor
    from elastic_reshard.transport import Endpoint

_HOME = {
    "AsyncSupervisorClient": "supervisor.client_async",
    "Box": "layout",
    "Correspondence": "layout",
    "Deadlines": "protocol.deadlines",
    "Declared": "layout",
    "Endpoint": "transport",
    "Event": "member",
    "Group": "member",
    "Handle": "collective",
    "HostArena": "arena",
    "Member": "member",
    "Mesh": "layout",
    "ModelLayout": "layout",
    "Plan": "plan",
    "PlanOptions": "plan",
    "Policies": "protocol.deadlines",
    "Publication": "member",
    "Replicate": "layout",
    "Report": "collective",
    "ReshardError": "errors",
    "Shard": "layout",
    "StridedShard": "layout",
    "Supervisor": "supervisor.server",
    "SupervisorClient": "supervisor.client",
    "TensorLayout": "layout",
    "Topology": "plan",
    "close_all": "collective",
    "empty": "arena",
    "empty_like": "arena",
    "join": "member",
    "layout_of": "layout.dtensor",
    "reshard": "collective",
}

__all__ = [
    "AsyncSupervisorClient",
    "Box",
    "Correspondence",
    "Deadlines",
    "Declared",
    "Endpoint",
    "Event",
    "Group",
    "Handle",
    "HostArena",
    "Member",
    "Mesh",
    "ModelLayout",
    "Plan",
    "PlanOptions",
    "Policies",
    "Publication",
    "Replicate",
    "Report",
    "ReshardError",
    "Shard",
    "StridedShard",
    "Supervisor",
    "SupervisorClient",
    "TensorLayout",
    "Topology",
    "__version__",
    "close_all",
    "empty",
    "empty_like",
    "join",
    "layout_of",
    "reshard",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'elastic_reshard' has no attribute {name!r}")
    return getattr(import_module(f"elastic_reshard.{_HOME[name]}"), name)
