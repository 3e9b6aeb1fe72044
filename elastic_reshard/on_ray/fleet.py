"""What a user says of a set of like groups of workers, and the workers of one attempt as Ray runs them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ray
import tenacity
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_reshard.errors import RefitTimeout, SupervisorUnreachable
from elastic_reshard.log import logger
from elastic_reshard.member import Group
from elastic_reshard.on_ray import cluster
from elastic_reshard.on_ray.events import Size

__all__ = ["Crew", "Fleet", "Gone"]

_log = logger("on_ray")
_NODE_LABEL: Final = "ray.io/node-id"
_PROBE: Final = 1.0  # seconds between looks at those whose `run` cannot be asked
_SAY: Final = 120.0  # seconds in which Ray may take a word about an end


@dataclass(frozen=True)
class Fleet:
    """Like groups: a trainer gang, or engines.

    name: of the fleet, and of its group if it has one and does not grow; else groups are called name-0, name-1, ...
    worker: a class, plain or `ray.remote`. Each rank is `worker(er.Group(...), **arguments)` in an actor of its own, in which
        `run()` is called: it joins by `on_ray.join` with that group, works, calls `leave` when `watch` says so, and returns. A
        rank that returns unasked has done its work; in one that was put out, `watch` raises and does not just end. How `run`
        ends is heard also of an actor that Ray could not reach for a while; if it is async only by the actor's end, or by
        the supervisor's word that its group is not whole.
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

    def fits(self) -> str:
        """Why its workers cannot outlive the driver; "" if they can."""
        return "" if self.tells else f"fleet {self.name}: run must not be async, if workers are to be adopted"

    @property
    def tells(self) -> bool:
        """Whether its workers leave word of how `run` ended."""
        return not inspect.iscoroutinefunction(self._run)

    @property
    def lane(self) -> str:
        """The concurrency group of `run`, "" for the default one."""
        return cluster.lane_of(self._run)

    @property
    def _run(self) -> Any:
        kind = getattr(getattr(self.worker, "__ray_metadata__", None), "modified_class", self.worker)
        return getattr(kind, "run", None)

    @property
    def sizes(self) -> Size:
        """For the plan."""
        return Size(self.size, self.groups, self.grows)


@dataclass(frozen=True, slots=True)
class Gone:
    """How a rank ended. fault: "" if it returned. alone: it was that no supervisor answered it; late: that something did not
    come in time."""

    rank: int
    fault: str = ""
    alone: bool = False
    late: bool = False

    @classmethod
    def by(cls, rank: int, error: BaseException | None, words: str) -> Gone:
        """Of a rank that raised this."""
        return cls(rank, words, isinstance(error, SupervisorUnreachable), isinstance(error, RefitTimeout))


class Crew:
    """The workers of one attempt of one group. One thread uses it."""

    def __init__(self, fleet: Fleet, group: str, attempt: int, keeper: str, outlives: bool = False) -> None:
        """Asks Ray for nothing yet. keeper: makes the name of its room, in Ray, one that nobody else gives. outlives: room and
        workers outlive this process, and can be found again."""
        self.group, self.attempt, self.name = group, attempt, f"{keeper}/{group}/{attempt}"
        self._fleet, self._outlives = fleet, outlives
        self._probe_at = 0.0
        self._asked = False
        self._room: PlacementGroup | None = None
        self._shunned: frozenset[str] = frozenset()  # when room was asked for
        self._given_back: Any = None  # the room that was, by its id
        self._making = False
        self._handles: list[ActorHandle[Any]] = []
        self._runs: dict[ray.ObjectRef[Any], int] = {}
        self._unsure: set[int] = set()
        self._gone: dict[int, Gone] = {}

    @property
    def placed(self) -> bool:
        """Whether its workers have been made."""
        return len(self._handles) == self._fleet.size

    @property
    def handles(self) -> list[ActorHandle[Any]]:
        """Their handles, by rank."""
        return list(self._handles)

    @property
    def actors(self) -> list[str]:
        """Their ids in Ray, by rank."""
        return [handle._actor_id.hex() for handle in self._handles]

    @property
    def unheard(self) -> bool:
        """Whether the end of a `run` would not be heard of."""
        return bool(self._unsure) and not self._fleet.tells

    def place(self, shun: Callable[[], Sequence[str]]) -> bool:
        """Ask for room, outside the nodes `shun`; make the workers if there is room by now: whether they were made now. Returns
        at once, and may be called again: with other nodes, as long as nothing is made, it asks anew. When it raised it goes
        on from there."""
        if self.placed:
            return False
        room = self._room if self._making else self._find_room(frozenset(shun()))
        if room is None:
            return False
        self._making = True
        fleet = self._fleet
        kind = fleet.worker if hasattr(fleet.worker, "options") else ray.remote(fleet.worker)
        usual = {"num_cpus": 0, "max_restarts": 0, **_wants(fleet.each), **fleet.options}
        for rank in range(len(self._handles), fleet.size):
            fixed: dict[str, Any] = {"scheduling_strategy": PlacementGroupSchedulingStrategy(room, rank)}
            made = cluster.actor_of(self._named(rank)) if self._outlives else None  # made before, without an answer
            if self._outlives:
                fixed |= {"name": self._named(rank), "namespace": cluster.NAMESPACE, "lifetime": "detached"}
            seat = Group(self.group, fleet.size, rank)
            made = made or kind.options(**{**usual, **fixed}).remote(seat, **fleet.arguments)
            self._runs[self._begin(made, rank)] = rank
            self._handles.append(made)
        return True

    def _begin(self, made: Any, rank: int) -> ray.ObjectRef[Any]:
        if not self._fleet.tells:
            return made.run.remote()  # type: ignore[no-any-return]
        lane = self._fleet.lane
        call = made.__ray_call__.options(concurrency_group=lane) if lane else made.__ray_call__
        return call.remote(_work, self._named(rank))  # type: ignore[no-any-return]

    def find(self) -> bool:
        """Take over the workers of this attempt that another process made, if all of them are there."""
        room = cluster.room_of(self.name)
        if room is None or cluster.room_state(room) != cluster.READY:
            return False
        found = [cluster.actor_of(self._named(rank)) for rank in range(self._fleet.size)]
        self._handles = [handle for handle in found if handle is not None]
        if not self.placed:
            return False
        self._room, self._asked = room, True
        self._unsure = set(range(self._fleet.size))
        return True

    def _named(self, rank: int) -> str:
        """The key of a word about a worker's end, and the name of one that outlives this process."""
        return f"{self.name}/{rank}"

    def _find_room(self, shun: frozenset[str]) -> PlacementGroup | None:
        """Room, if there is some now. What was asked for when other nodes were to be shunned is given back: Ray never takes
        one that may be used again, or has given what became free on one that is being emptied."""
        self._room = self._room or self._ask(shun)
        if self._room is None:
            return None
        state = cluster.room_state(self._room)
        if state == cluster.REMOVED:  # Ray took it back without an answer
            self._room = None
            return None
        ready = state == cluster.READY
        if (cluster.room_nodes(self._room) & shun) if ready else shun != self._shunned:
            _log.info("group.asks_anew", group=self.group, attempt=self.attempt, shunned=sorted(shun))
            remove_placement_group(self._room)
            self._given_back, self._room = self._room.id, None
            return None
        return self._room if ready else None

    def _ask(self, shun: frozenset[str]) -> PlacementGroup | None:
        """None: what was given back is not gone yet."""
        # Asked before without an answer: Ray may have made it all the same.
        if self._asked and (found := cluster.room_of(self.name)) is not None:
            return None if found.id == self._given_back else found
        fleet, nodes = self._fleet, shun
        self._asked, self._shunned = True, shun
        selector = [{_NODE_LABEL: f"!in({','.join(sorted(nodes))})"}] * fleet.size if nodes else None
        bundles = [dict(fleet.each) for _ in range(fleet.size)]
        made: PlacementGroup = placement_group(
            bundles,
            strategy=fleet.strategy,
            bundle_label_selector=selector,
            name=self.name,
            lifetime="detached" if self._outlives else None,
        )
        return made

    def ended(self) -> list[Gone]:
        """Who has ended and is not `settled` yet. Returns at once."""
        ready, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0) if self._runs else ([], [])
        for ref in ready:
            self._look(ref)
        if self._unsure and time.monotonic() >= self._probe_at:
            self._probe()
            self._probe_at = time.monotonic() + _PROBE
        return list(self._gone.values())

    def _probe(self) -> None:
        """Those whose `run` cannot be asked how it ended: what they left word of, and Ray's table."""
        lives = cluster.lives_of([self.actors[rank] for rank in self._unsure])
        for rank in sorted(self._unsure):
            said = cluster.told(self._named(rank)) if self._fleet.tells else {}
            if said:
                self._gone[rank] = Gone(rank, str(said["fault"]), bool(said["alone"]), bool(said.get("late")))
            elif lives.get(self.actors[rank], ("ALIVE", 0))[0] == "DEAD":
                self._gone[rank] = Gone(rank, "its actor is dead")
            else:
                continue
            self._unsure.discard(rank)

    def settled(self, gone: Gone) -> None:
        """What is to be made of its end is decided."""
        self._gone.pop(gone.rank, None)

    def _look(self, ref: ray.ObjectRef[Any]) -> None:
        rank = self._runs[ref]
        try:
            ray.get(ref)
            self._gone[rank] = Gone(rank)
        except ray.exceptions.RayTaskError as error:  # what `run` raised, which may itself be one of the following
            self._gone[rank] = Gone.by(rank, error.cause, cluster.words_of(error))
        except ray.exceptions.RpcError:
            raise  # Ray could not tell
        except ray.exceptions.ActorUnavailableError:
            self._unsure.add(rank)  # it cannot be reached now: that is not death
        except ray.exceptions.RayError as error:
            self._gone[rank] = Gone.by(rank, getattr(error, "cause", None), cluster.words_of(error))
        del self._runs[ref]

    def end(self) -> None:
        """Kill who is left, and give the room back. Returns at once. May be called again, and must be when it raised."""
        for handle in self._handles:
            ray.kill(handle, no_restart=True)
        room = self._room or (cluster.room_of(self.name) if self._asked else None)
        if room is not None:
            remove_placement_group(room)
        for rank in range(self._fleet.size if self._fleet.tells else 0):
            cluster.drop(self._named(rank))
        self._runs.clear()
        self._unsure.clear()
        self._gone.clear()


def _work(worker: Any, key: str) -> None:
    """Inside an actor: its `run`, and a word of how that ended, for a driver that cannot reach it just then or comes later."""
    try:
        worker.run()
    except BaseException as error:
        _say(key, Gone.by(0, error, f"{type(error).__name__}: {error}"[:500]))
        raise
    _say(key, Gone(0))


def _say(key: str, gone: Gone) -> None:
    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(cluster.SIGHTLESS),
        wait=tenacity.wait_exponential(multiplier=0.2, max=5.0),
        stop=tenacity.stop_after_delay(_SAY),
        reraise=True,
    )
    try:
        again(cluster.keep, key, {"fault": gone.fault, "alone": gone.alone, "late": gone.late})
    except cluster.SIGHTLESS as error:  # who can reach this actor hears it from that
        _log.warning("worker.no_word", worker=key, why=cluster.words_of(error))


def _wants(each: Mapping[str, float]) -> dict[str, Any]:
    """Resources as options of an actor."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    own = {named[name]: amount for name, amount in each.items() if name in named}
    rest = {name: amount for name, amount in each.items() if name not in named}
    return {**own, "resources": rest} if rest else own
