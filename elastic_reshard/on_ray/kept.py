"""What a driver leaves in Ray's own store for the driver after it: which groups there are, and who keeps them."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from typing import Any

from ray.util.placement_group import remove_placement_group

from elastic_reshard.errors import Fenced
from elastic_reshard.log import logger
from elastic_reshard.on_ray import cluster

__all__ = ["Kept"]

_log = logger("on_ray")


class Kept:
    """The groups of a job whose workers outlive the driver. One thread uses it; every call asks Ray."""

    def __init__(self, job: str) -> None:
        """Asks Ray for nothing yet."""
        self._job, self._me = job, uuid.uuid4().hex
        self._line = self._me
        self._written: Mapping[str, Any] = {}

    @property
    def keeper(self) -> str:
        """With what the names of these groups' rooms begin."""
        return f"{self._rooms}{self._line}"

    @property
    def _rooms(self) -> str:
        return f"{cluster.NAMESPACE}/{self._job}/kept/"

    def take(self) -> dict[str, Any]:
        """From now on this one keeps them, and whoever did is fenced; the words of that one, empty if there was none."""
        cluster.keep(f"{self._job}/groups/keeper", {"keeper": self._me})
        found = cluster.told(f"{self._job}/groups")
        self._line = str(found.get("line", self._me))
        return found

    def end_others(self, fleets: Collection[str]) -> None:
        """End what a driver left that kept groups of fleets of these names, so that nothing runs twice."""
        found = cluster.told(f"{self._job}/groups")
        if any(run["fleet"] in fleets for run in found.get("runs", ())):
            self.take()
            self.drop()

    def check(self) -> None:
        """Raises Fenced if another one has taken them."""
        if cluster.told(f"{self._job}/groups/keeper").get("keeper") != self._me:
            raise Fenced(
                f"another Groups of job {self._job} was started and keeps its workers now; this one does no more. End one of "
                "the two programs"
            )

    def write(self, words: Mapping[str, Any]) -> None:
        """Before anything is done that follows from them. Raises as `check`."""
        if words != self._written:
            self.check()
            cluster.keep(f"{self._job}/groups", {**words, "line": self._line})
            self._written = words

    def sweep(self, mine: Collection[str]) -> None:
        """End what is left of any earlier driver and attempt. mine: names of rooms that stay."""
        for name, room in cluster.rooms(self._rooms).items():
            if name not in mine:
                remove_placement_group(room)  # with all who are in it
                _log.warning("groups.leftover_ended", job=self._job, room=name)

    def drop(self) -> None:
        """Nothing is kept any more."""
        self.sweep(())
        for key in (*cluster.kept(f"{self._rooms}"), f"{self._job}/groups", f"{self._job}/groups/keeper"):
            cluster.drop(key)
