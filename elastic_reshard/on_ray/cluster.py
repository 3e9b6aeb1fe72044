"""What Ray knows and keeps: nodes, drain notices, actors, and a few words of ours. Ray's unofficial parts are used here only.

Every function blocks for one or two calls to Ray's control service (milliseconds; while that is away, until it is back) and
wants `ray.init` to have been called. Raises one of SIGHTLESS if Ray could not tell.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray._private import state as _state
from ray._raylet import PlacementGroupID
from ray.actor import ActorHandle
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, placement_group_table

__all__ = [
    "NAMESPACE",
    "READY",
    "REMOVED",
    "SIGHTLESS",
    "Place",
    "actor_of",
    "draining",
    "drop",
    "here",
    "host_of",
    "keep",
    "kept",
    "lane_of",
    "life_of",
    "lives_of",
    "node_of",
    "nodes",
    "room_nodes",
    "room_of",
    "room_state",
    "rooms",
    "told",
    "words_of",
]

_ray: Any = ray  # some of its functions have no types
# Of our named actors, so that they are found from every namespace; and of what is kept in Ray's key-value store.
NAMESPACE: Final = "elastic_reshard"
# What Ray's functions raise when its control service, or the way to it, is away: nothing is known then.
SIGHTLESS: Final = (ray.exceptions.RayError, OSError)
# Ray's words for what has become of a room.
READY: Final = "CREATED"
REMOVED: Final = "REMOVED"
_MOST: Final = 20  # letters of a node's id in a host's label
_SINGLY: Final = 16  # actors that are asked for one by one


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs, in Ray's words: its node, the node's address, its actor ("" outside one), and how often Ray has
    restarted that."""

    node: str
    address: str
    actor: str = ""
    restarts: int = 0


def host_of(node: str) -> str:
    """The host label of members on a Ray node."""
    return f"ray-{node[:_MOST]}"


def here() -> Place:
    """The place of this process."""
    context = ray.get_runtime_context()
    actor = context.get_actor_id() or ""
    life = life_of(actor) if actor else None
    return Place(context.get_node_id(), _ray.util.get_node_ip_address(), actor, life[1] if life is not None else 0)


def nodes() -> dict[str, bool]:
    """Whether each node lives, by id. Nodes that died long ago may be missing."""
    return {str(node["NodeID"]): bool(node["Alive"]) for node in _ray.nodes()}


def draining() -> dict[str, float | None]:
    """Seconds that are left to nodes which Ray has been told to drain, by id; None: as long as it takes."""
    # Ray gives a moment of the wall clock; only what is left of it leaves this function.
    found: Mapping[str, int] = _state.state.get_draining_nodes() or {}
    return {node: max(0.0, at / 1000 - time.time()) if at else None for node, at in found.items()}


def life_of(actor: str) -> tuple[str, int] | None:
    """(state, number of restarts) of an actor in Ray's own table; None if that does not know it."""
    found: Mapping[str, Any] = _state.actors(actor) or {}
    return (str(found["State"]), int(found["NumRestarts"])) if "State" in found else None


def lives_of(actors: Collection[str]) -> dict[str, tuple[str, int]]:
    """`life_of` of those of them that Ray knows; in one call if they are many."""
    if len(actors) <= _SINGLY:
        found = {actor: life_of(actor) for actor in actors}
        return {actor: life for actor, life in found.items() if life is not None}
    table: Mapping[str, Any] = _state.actors() or {}
    return {actor: (str(at["State"]), int(at["NumRestarts"])) for actor in actors if (at := table.get(actor))}


def node_of(actor: str) -> str:
    """The node on which an actor runs or ran last; "" if it never did."""
    found: Mapping[str, Any] = _state.actors(actor) or {}
    return str(found.get("Address", {}).get("NodeID", ""))


def lane_of(method: Any) -> str:
    """The concurrency group that `ray.method` gave a method of an actor; "" if none."""
    return str(getattr(method, "__ray_concurrency_group__", None) or "")


def actor_of(name: str) -> ActorHandle[Any] | None:
    """The actor of this name in our namespace; None if there is none that lives."""
    try:
        found: ActorHandle[Any] = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
    return found


def rooms(prefix: str) -> dict[str, PlacementGroup]:
    """Placement groups whose names begin so, in whatever namespace (Ray's own search looks into one), by name."""
    return {
        table["name"]: PlacementGroup(PlacementGroupID(bytes.fromhex(key)))
        for key, table in placement_group_table().items()
        if table["name"].startswith(prefix) and table["state"] != REMOVED
    }


def room_of(name: str) -> PlacementGroup | None:
    """The placement group of this name; None if there is none."""
    return rooms(name).get(name)


def room_state(room: PlacementGroup) -> str:
    """READY: there is room (its own `wait(0)` says no at times although there is); REMOVED: it was given back."""
    return str(placement_group_table(room).get("state", ""))


def room_nodes(room: PlacementGroup) -> frozenset[str]:
    """Where that room is."""
    found: Mapping[int, str] = placement_group_table(room).get("bundles_to_node_id") or {}
    return frozenset(found.values()) - {""}


def keep(key: str, value: Mapping[str, Any]) -> None:
    """Keep a few words under a key for as long as the cluster lives."""
    internal_kv._internal_kv_put(key.encode(), json.dumps(value).encode(), overwrite=True, namespace=NAMESPACE.encode())


def told(key: str) -> dict[str, Any]:
    """What is kept under a key; empty if nothing is."""
    raw = internal_kv._internal_kv_get(key.encode(), namespace=NAMESPACE.encode())
    return dict(json.loads(raw)) if raw else {}


def kept(prefix: str) -> list[str]:
    """Keys that begin so."""
    found = internal_kv._internal_kv_list(prefix.encode(), namespace=NAMESPACE.encode())
    return [key.decode() for key in found]


def drop(key: str) -> None:
    """Keep it no longer."""
    internal_kv._internal_kv_del(key.encode(), namespace=NAMESPACE.encode())


def words_of(error: BaseException) -> str:
    """An error of Ray in one line: what the worker raised, if it did."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}"[:500]
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    # What a worker raised when it was made ends the traceback; else the first line says it.
    chosen = lines[-1 if "creation task" in lines[0] else 0] if lines else ""
    return f"{type(error).__name__}: {chosen.strip()}"[:500]
