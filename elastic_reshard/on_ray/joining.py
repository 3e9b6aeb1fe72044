"""Joining a job by its name, from inside the user's own actors."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import tenacity

from elastic_reshard.errors import SupervisorUnreachable
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
T = TypeVar("T")
_LOOK: Final = 1.0  # seconds between looks at where the supervisor is
_following: dict[Path, list[Callable[[], bool]]] = {}  # by the file that is written: whether somebody takes part here
_lock = threading.Lock()  # of the above


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
    place = _place(name, end)
    path = _file(job, runtime)
    _write(path, found.url)
    member = join_at(
        found.url, name=name, group=group, token=found.token, host=host or cluster.host_of(place.node), runtime=runtime,
        deadline=max(0.1, end - time.monotonic()), **given,
    )  # fmt: skip
    try:
        _vouch(job, member.id, end)
    except BaseException:
        member._abandon()  # nobody has it: it would take part for as long as this process lives, and keep its seat
        raise
    there = weakref.ref(member)
    _start_following(job, path, lambda: (member := there()) is not None and member._desk.link is not None)
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
    be the child's. May be called again, for each child. Blocks `timeout` seconds at most. Raises as `find`."""
    end = time.monotonic() + timeout
    found = find(job, timeout)
    place = _place("a child of this actor", end)
    path = _file(job, runtime)
    _write(path, found.url)
    _start_following(job, path, _always)
    return Seat(found.url, cluster.host_of(place.node), found.token)


def vouch(job: str, member: str, timeout: float = 30.0) -> None:
    """The end of this actor, or of its node, is also that of this member (its id), which is this process or a child of it.
    Blocks `timeout` seconds at most, or for one call to Ray's control service. Raises SupervisorUnreachable if that could not
    be told; the member takes part all the same."""
    _vouch(job, member, time.monotonic() + timeout)


def _vouch(job: str, member: str, end: float) -> None:
    def once() -> None:
        place = cluster.here()
        keep_worker(job, member, Worker(place.node, place.actor, place.restarts))

    _told(once, member, end)


def _place(who: str, end: float) -> cluster.Place:
    return _told(cluster.here, who, end)


def _told(once: Callable[[], T], who: str, end: float) -> T:
    """Ask Ray until it answers: its control service may be away a moment."""
    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(cluster.SIGHTLESS),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=1.0),
        stop=tenacity.stop_after_delay(max(0.0, end - time.monotonic())),
        reraise=True,
    )
    try:
        return again(once)
    except cluster.SIGHTLESS as error:
        raise SupervisorUnreachable(
            f"{who}: Ray could not be told in time where it runs, its control service does not answer "
            f"({cluster.words_of(error)}). Try again when Ray's head is well"
        ) from error


def _always() -> bool:
    return True


def _start_following(job: str, path: Path, there: Callable[[], bool]) -> None:
    """One thread for all who take part by this file."""
    with _lock:
        if path not in _following:
            name = f"elastic-reshard-follow-{job}"
            threading.Thread(target=_follow, args=(job, path), name=name, daemon=True).start()
        known = _following.setdefault(path, [])
        if there not in known:
            known.append(there)


def _file(job: str, runtime: str | os.PathLike[str] | None) -> Path:
    """Where the host's watchdog and members look for a supervisor that has moved."""
    return places.job_folder(job, Path(runtime) if runtime is not None else None) / "url"


def _write(path: Path, url: str) -> None:
    try:
        if path.read_text().strip() == url:
            return
    except FileNotFoundError:
        pass
    places.write_private(path, url)


def _followed(path: Path) -> bool:
    """Whether somebody still takes part; nobody: whoever comes later starts a thread anew."""
    with _lock:
        left = [there for there in _following[path] if there()]
        if left:
            _following[path] = left
        else:
            del _following[path]
        return bool(left)


def _follow(job: str, path: Path) -> None:
    """While somebody takes part here: write down where the supervisor is, if it has come back elsewhere."""
    while True:
        time.sleep(_LOOK)
        if not _followed(path):  # looked at before Ray is asked: it may be shut down as soon as the last has left
            return
        try:
            url = str(cluster.told(address_key(job)).get("url", ""))
            if url:
                _write(path, url)
        except Exception as error:  # noqa: BLE001 - Ray that was shut down raises anything, and may be there again soon
            _log.info("follow.blind", job=job, why=f"{type(error).__name__}: {error}")
