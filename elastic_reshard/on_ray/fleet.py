"""What a user says of a set of like groups of workers, and the workers of one attempt as Ray runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_reshard.errors import SupervisorUnreachable
from elastic_reshard.member import Group
from elastic_reshard.on_ray import cluster
from elastic_reshard.on_ray.plan import Size

__all__ = ["Crew", "Fleet", "Gone"]

_NODE_LABEL: Final = "ray.io/node-id"


@dataclass(frozen=True)
class Fleet:
    """Like groups: a trainer gang, or engines.

    name: of the fleet, and of its group if it has one and does not grow; else groups are called name-0, name-1, ...
    worker: a class, plain or `ray.remote`. Each rank is `worker(er.Group(...), **arguments)` in an actor of its own, in which
        `run()` is called: it joins by `on_ray.join` with that group, works, calls `leave` when `watch` says so, and returns. A
        rank that returns unasked has done its work.
    size: ranks of a group; groups: how many there are at the beginning; grows: whether `grow` of the API makes more of them.
    each: resources of one rank, as Ray names them; strategy: of the group's placement group; options: more options of the
        actors (`runtime_env`, ...).
    """

    name: str
    worker: Any
    size: int = 1
    groups: int = 1
    grows: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    each: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    strategy: str = "PACK"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> Size:
        """For the plan."""
        return Size(self.size, self.groups, self.grows)


@dataclass(frozen=True, slots=True)
class Gone:
    """How a rank ended. fault: "" if it returned. alone: it was that no supervisor answered it."""

    rank: int
    fault: str = ""
    alone: bool = False


class Crew:
    """The workers of one attempt of one group. One thread uses it."""

    def __init__(self, fleet: Fleet, group: str, attempt: int, shun: Sequence[str]) -> None:
        """Asks for room, outside the nodes `shun`. Returns at once."""
        self.group, self.attempt = group, attempt
        self._fleet = fleet
        self._handles: list[ActorHandle[Any]] = []
        self._runs: dict[ray.ObjectRef[Any], int] = {}
        self._unsure: set[int] = set()
        selector = [{_NODE_LABEL: f"!in({','.join(sorted(shun))})"}] * fleet.size if shun else None
        bundles = [dict(fleet.each) for _ in range(fleet.size)]
        self._room: PlacementGroup = placement_group(bundles, strategy=fleet.strategy, bundle_label_selector=selector)

    @property
    def placed(self) -> bool:
        """Whether its workers have been made."""
        return bool(self._handles)

    @property
    def handles(self) -> list[ActorHandle[Any]]:
        """Their handles, by rank."""
        return list(self._handles)

    @property
    def actors(self) -> list[str]:
        """Their ids in Ray, by rank."""
        return [handle._actor_id.hex() for handle in self._handles]

    def place(self) -> bool:
        """Make the workers if there is room by now; whether they were made. Returns at once."""
        if self.placed or not self._room.wait(0):
            return False
        fleet = self._fleet
        kind = fleet.worker if hasattr(fleet.worker, "options") else ray.remote(fleet.worker)
        usual = {"num_cpus": 0, "max_restarts": 0, **_wants(fleet.each), **fleet.options}
        for rank in range(fleet.size):
            there = PlacementGroupSchedulingStrategy(self._room, rank)
            seat = Group(self.group, fleet.size, rank)
            made = kind.options(**{**usual, "scheduling_strategy": there}).remote(seat, **fleet.arguments)
            self._handles.append(made)
            self._runs[made.run.remote()] = rank
        return True

    def ended(self) -> list[Gone]:
        """Who has ended since the last call. Returns at once."""
        ready, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0) if self._runs else ([], [])
        found = [gone for ref in ready if (gone := self._look(ref)) is not None]
        lives = cluster.lives_of([self.actors[rank] for rank in self._unsure])
        for rank in sorted(self._unsure):
            if lives.get(self.actors[rank], ("ALIVE", 0))[0] == "DEAD":
                self._unsure.discard(rank)
                found.append(Gone(rank, "its actor is dead"))
        return found

    def _look(self, ref: ray.ObjectRef[Any]) -> Gone | None:
        rank = self._runs.pop(ref)
        try:
            ray.get(ref)
        except ray.exceptions.ActorUnavailableError:
            self._unsure.add(rank)  # it cannot be reached now: that is not death
            return None
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            return Gone(rank, cluster.words_of(error), isinstance(cause, SupervisorUnreachable))
        return Gone(rank)

    def end(self) -> None:
        """Kill who is left, and give the room back. Returns at once. May be called again."""
        for handle in self._handles:
            ray.kill(handle, no_restart=True)
        self._runs.clear()
        self._unsure.clear()
        remove_placement_group(self._room)


def _wants(each: Mapping[str, float]) -> dict[str, Any]:
    """Resources as options of an actor."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    own = {named[name]: amount for name, amount in each.items() if name in named}
    rest = {name: amount for name, amount in each.items() if name not in named}
    return {**own, "resources": rest} if rest else own
