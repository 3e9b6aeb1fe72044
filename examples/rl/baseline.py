"""The baseline's way through faults: when anything dies everything is ended, and started again from the last checkpoint.

It stands where `on_ray.Groups` stands in the elastic run: same actors, same nodes, same schedule, same buffer. It waits
until there is room for everybody again, as jobs of a fixed size do; of a notice it makes nothing.
"""

from __future__ import annotations

import secrets
import threading
import time
from datetime import timedelta
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import elastic_reshard as er
from elastic_reshard import on_ray
from elastic_reshard.on_ray import cluster
from rl.calls import get
from rl.engine import EngineRank
from rl.settings import Settings, World
from rl.trainer import TrainerRank

__all__ = ["Together"]

_TURN = 0.2
_FRUITLESS = 4  # starts in a row without a step, after which it is given up
_ENDING = 15.0
ALL = "everything"


class Together:
    """Keeps everything running, or nothing. A thread of its own; a context manager."""

    def __init__(self, settings: Settings, hub: Any) -> None:
        self._settings, self._hub = settings, hub
        self._lock = threading.Lock()
        self._crew: dict[str, list[Any]] = {}
        self._run = on_ray.Run(ALL, ALL, settings.ranks * (1 + settings.engines))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="together", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_ENDING)

    def workers(self, group: str) -> list[Any]:
        """As `on_ray.Groups.workers`."""
        with self._lock:
            return list(self._crew.get(group, []))

    def status(self) -> dict[str, on_ray.Run]:
        """As `on_ray.Groups.status`: one group, which is everything."""
        with self._lock:
            return {ALL: self._run}

    def _tell(self, phase: on_ray.Phase, reason: str = "", attempt: int | None = None) -> None:
        with self._lock:
            old = self._run
            number = old.attempt if attempt is None else attempt
            self._run = on_ray.Run(ALL, ALL, old.ranks, phase, number, time.monotonic(), reason=reason)

    def _main(self) -> None:
        try:
            self._keep_on()
        except (ray.exceptions.RayError, er.ReshardError) as error:
            self._tell(on_ray.Phase.GIVEN_UP, f"whoever starts it has failed: {cluster.words_of(error)}")

    def _keep_on(self) -> None:
        number, fruitless, reason = 0, 0, ""
        while not self._stop.is_set():
            number += 1
            self._tell(on_ray.Phase.WAITING, reason, number)
            # The store's end is this thread's: it outlives whoever dies.
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
            world = World(f"all-{number}-{secrets.token_hex(3)}", ("127.0.0.1", store.port))
            before = get(self._hub.state.remote())["reached"]
            rooms = self._rooms()
            try:
                if not self._room(rooms):
                    return
                self._tell(on_ray.Phase.STARTING, reason)
                runs = self._place(rooms, world)
                reason = self._until_an_end(runs)
            finally:
                self._end(rooms)
            if not reason:
                self._tell(on_ray.Phase.DONE)
                return
            fruitless = 0 if get(self._hub.state.remote())["reached"] > before else fruitless + 1
            if fruitless >= _FRUITLESS:
                self._tell(on_ray.Phase.GIVEN_UP, f"{fruitless} starts in a row without a step; the last: {reason}")
                return

    def _rooms(self) -> dict[str, PlacementGroup]:
        """A placement group for each group of ranks."""
        names = {"trainer": "gang", **{f"engine-{n}": "spot" for n in range(self._settings.engines)}}
        bundle = {name: [{"CPU": 0.5, kind: 1.0}] * self._settings.ranks for name, kind in names.items()}
        return {name: placement_group(bundle[name], strategy="STRICT_PACK") for name in names}

    def _room(self, rooms: dict[str, PlacementGroup]) -> bool:
        """Wait until there is room for all; False: it is over."""
        while not all(room.wait(0) for room in rooms.values()):
            if self._stop.wait(_TURN):
                return False
        return True

    def _place(self, rooms: dict[str, PlacementGroup], world: World) -> list[Any]:
        crew: dict[str, list[Any]] = {}
        runs = []
        for name, room in rooms.items():
            kind: Any = ray.remote(TrainerRank if name == "trainer" else EngineRank)
            size = self._settings.ranks
            crew[name] = []
            for rank in range(size):
                there = PlacementGroupSchedulingStrategy(room, rank)
                resource = {"gang" if name == "trainer" else "spot": 1}
                made = kind.options(
                    num_cpus=0.5, resources=resource, max_restarts=0, max_concurrency=8, scheduling_strategy=there
                )
                crew[name].append(made.remote(er.Group(name, size, rank), self._settings, self._hub, world))
                runs.append(crew[name][-1].run.remote())
        with self._lock:
            self._crew = crew
        self._tell(on_ray.Phase.RUNNING)
        return runs

    def _until_an_end(self, runs: list[Any]) -> str:
        """Why somebody ended; "" if all trainers have returned, or it is over."""
        waiting = list(runs)
        while not self._stop.is_set():
            ended, waiting = ray.wait(waiting, num_returns=1, timeout=_TURN)
            for ref in ended:
                try:
                    ray.get(ref)
                except ray.exceptions.ActorUnavailableError:  # cannot be reached now: the same here, it is restarted
                    return "an actor cannot be reached"
                except ray.exceptions.RayError as error:
                    return cluster.words_of(error)
            if not set(runs[: self._settings.ranks]) & set(waiting):
                return ""
        return ""

    def _end(self, rooms: dict[str, PlacementGroup]) -> None:
        with self._lock:
            crew, self._crew = self._crew, {}
        for worker in (worker for ranks in crew.values() for worker in ranks):
            ray.kill(worker)
        for room in rooms.values():
            remove_placement_group(room)
