"""A thread beside the supervisor that tells it, through its ordinary interface, what Ray knows of nodes and actors."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Final, Protocol

import ray

from elastic_reshard.errors import ProtocolError, ReshardError, SupervisorUnreachable
from elastic_reshard.log import logger
from elastic_reshard.on_ray import cluster
from elastic_reshard.on_ray.evidence import Drain, Lift, Notice, Seen, Worker, judge
from elastic_reshard.supervisor.client import SupervisorClient

__all__ = ["Lookout", "Workers", "keep_worker", "worker_key"]

_log = logger("on_ray")
# Seconds that a drained node keeps for its own end.
_MARGIN: Final = 2.0


class Found(Protocol):
    """Where a supervisor is."""

    @property
    def url(self) -> str: ...
    @property
    def token(self) -> str: ...


def worker_key(job: str, member: str) -> str:
    """Under which it is kept where a member runs."""
    return f"{job}/member/{member}"


def keep_worker(job: str, member: str, worker: Worker) -> None:
    """Keep where a member runs, for the lookout and for a supervisor without a journal that starts again."""
    cluster.keep(worker_key(job, member), dataclasses.asdict(worker))


class Workers:
    """Where the members of a job run, by member id. What is kept of one never changes, so it is asked for once."""

    def __init__(self, job: str) -> None:
        self._prefix = worker_key(job, "")
        self._known: dict[str, Worker] = {}

    def look(self) -> dict[str, Worker]:
        """As of now."""
        members = [key.removeprefix(self._prefix) for key in cluster.kept(self._prefix)]
        for member in members:
            if member not in self._known and (words := cluster.told(self._prefix + member)):
                self._known[member] = Worker(**words)
        self._known = {member: self._known[member] for member in members if member in self._known}
        return self._known

    def seen(self) -> Seen:
        """What Ray says of them and of all nodes."""
        actors = {worker.actor for worker in self._known.values() if worker.actor}
        return Seen(cluster.nodes(), cluster.draining(), cluster.lives_of(actors))


class Lookout:
    """Looks every `every` seconds, from now on, in a thread of its own; `close` ends it. where: asked for the supervisor."""

    def __init__(self, job: str, where: Callable[[], Found], every: float) -> None:
        self._job, self._where, self._every = job, where, every
        self._workers = Workers(job)
        self._stop = threading.Event()
        self._old: frozenset[str] = frozenset()
        self._thread = threading.Thread(target=self._run, name=f"elastic-reshard-lookout-{job}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; waits for the look in hand (seconds while the supervisor or Ray is slow)."""
        self._stop.set()
        self._thread.join(10 * self._every)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._look()
            except (ReshardError, ray.exceptions.RayError, OSError) as error:  # looked again in a moment
                _log.warning("lookout.blind", job=self._job, why=f"{type(error).__name__}: {error}")

    def _look(self) -> None:
        workers = self._workers.look()
        seen = self._workers.seen()
        place = self._where()
        with SupervisorClient(place.url, place.token) as client:
            if client.health().get("status") == "recovering":
                return
            members = client.members()
            drained = {host: doc.drained for host, doc in client.hosts().items()}
            labels = {node: cluster.host_of(node) for node in seen.nodes}
            for notice in judge(seen, workers, members, drained, _MARGIN, labels):
                self._tell(client, notice)
        self._forget({member for member in workers if member not in members})

    def _tell(self, client: SupervisorClient, notice: Notice) -> None:
        try:
            if isinstance(notice, Drain):
                client.drain(notice.host, within=notice.within, wait=False)
                _log.warning("ray.node_drains", job=self._job, host=notice.host, within=round(notice.within, 1))
            elif isinstance(notice, Lift):
                client.undrain(notice.host)
                _log.info("ray.node_gone", job=self._job, host=notice.host)
            else:
                client.leave_member(notice.member, force=True)
                _log.warning("ray.member_gone", job=self._job, member=notice.member, why=notice.why)
        except SupervisorUnreachable:
            raise
        except ProtocolError as error:  # it is gone already
            _log.info("ray.notice_refused", job=self._job, notice=str(notice), why=str(error))

    def _forget(self, unknown: set[str]) -> None:
        """Drop who was unknown at two looks: one that is just being kept is known at the second."""
        for member in unknown & self._old:
            cluster.drop(worker_key(self._job, member))
        self._old = frozenset(unknown)
