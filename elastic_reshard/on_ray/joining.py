"""Joining a job by its name, from inside the user's own actors."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import ray

from elastic_reshard.errors import ReshardError
from elastic_reshard.log import logger
from elastic_reshard.member import Group, Member
from elastic_reshard.member import join as join_at
from elastic_reshard.on_ray import cluster
from elastic_reshard.on_ray.evidence import Worker
from elastic_reshard.on_ray.keeper import address_key, find
from elastic_reshard.on_ray.lookout import keep_worker
from elastic_reshard.protocol import places

__all__ = ["Seat", "join", "seat", "vouch"]

_log = logger("on_ray")
_LOOK: Final = 1.0  # seconds between looks at where the supervisor is


def join(
    job: str = "job",
    *,
    name: str,
    group: Group,
    host: str | None = None,
    runtime: str | os.PathLike[str] | None = None,
    deadline: float = 120.0,
    **given: Any,
) -> Member:
    """As `er.join`, in an actor, task or driver of the Ray cluster in which the job's supervisor is: its address and token are
    found by the job's name, also when it comes back elsewhere, and what Ray knows of this actor and its node is evidence.

    host: None: a label of this Ray node (two nodes on one machine are two hosts). deadline: seconds for all of it, the
    waiting for the supervisor included. given: everything else that `er.join` takes.

    The member must be used in this process; the actor's end, by whatever, is the member's. The host's watchdog outlives it.
    Raises as `er.join`."""
    end = time.monotonic() + deadline
    found = find(job, deadline)
    place = cluster.here()
    _write(job, found.url, runtime)
    member = join_at(
        found.url, name=name, group=group, token=found.token, host=host or cluster.host_of(place.node), runtime=runtime,
        deadline=max(0.1, end - time.monotonic()), **given,
    )  # fmt: skip
    vouch(job, member.id)
    there = weakref.ref(member)
    _start_following(job, runtime, lambda: (member := there()) is not None and member._desk.link is not None)
    return member


@dataclass(frozen=True, slots=True)
class Seat:
    """What a process without Ray joins by: `er.join(seat.url, token=seat.token, host=seat.host, ...)`. Can be pickled; the
    token is shown by no repr."""

    url: str
    host: str
    token: str = field(repr=False)


def seat(job: str = "job", *, runtime: str | os.PathLike[str] | None = None, timeout: float = 30.0) -> Seat:
    """In an actor whose child process is the member (an engine's loop, say): what that needs, to be handed to it. When it has
    joined, tell `vouch` its id. While this process lives it writes down where the supervisor is, as `join` does; runtime must
    be the child's. Blocks `timeout` seconds at most. Raises as `find`."""
    found = find(job, timeout)
    _write(job, found.url, runtime)
    _start_following(job, runtime, lambda: True)
    return Seat(found.url, cluster.host_of(cluster.here().node), found.token)


def vouch(job: str, member: str) -> None:
    """The end of this actor, or of its node, is also that of this member (its id), which is this process or a child of it."""
    place = cluster.here()
    keep_worker(job, member, Worker(place.node, place.actor, place.restarts))


def _start_following(job: str, runtime: str | os.PathLike[str] | None, there: Callable[[], bool]) -> None:
    name = f"elastic-reshard-follow-{job}"
    threading.Thread(target=_follow, args=(job, runtime, there), name=name, daemon=True).start()


def _write(job: str, url: str, runtime: str | os.PathLike[str] | None) -> None:
    """Where the host's watchdog and members look for a supervisor that has moved."""
    path = places.job_folder(job, Path(runtime) if runtime is not None else None) / "url"
    try:
        if path.read_text().strip() == url:
            return
    except FileNotFoundError:
        pass
    places.write_private(path, url)


def _follow(job: str, runtime: str | os.PathLike[str] | None, there: Callable[[], bool]) -> None:
    """While somebody takes part here: write down where the supervisor is, if it has come back elsewhere."""
    written = ""
    while there():
        time.sleep(_LOOK)
        try:
            url = str(cluster.told(address_key(job)).get("url", ""))
            if url and url != written:
                _write(job, url, runtime)
                written = url
        except (ReshardError, ray.exceptions.RayError, OSError) as error:  # looked again in a moment
            _log.info("follow.blind", job=job, why=f"{type(error).__name__}: {error}")
