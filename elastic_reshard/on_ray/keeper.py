"""The supervisor as a named, detached actor of Ray, which Ray starts again when it or its node dies.

The actor hosts the usual server (`supervisor.server`): the same HTTP interface, the same token. Beside that it tells where the
server listens, to whoever may call actors of this cluster, and has a lookout that tells the server what Ray knows.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeVar

import ray
import tenacity
from ray.actor import ActorHandle

from elastic_reshard.errors import Fenced, ProtocolError, ReshardError, SupervisorUnreachable
from elastic_reshard.log import logger
from elastic_reshard.on_ray import cluster
from elastic_reshard.on_ray.evidence import lives
from elastic_reshard.on_ray.lookout import Lookout, Workers, worker_key
from elastic_reshard.protocol import places
from elastic_reshard.protocol.deadlines import Deadlines, Policies
from elastic_reshard.supervisor.client import SupervisorClient
from elastic_reshard.supervisor.server import Options, Supervisor

__all__ = ["Found", "address_key", "client", "close", "find", "start"]

_log = logger("on_ray")
T = TypeVar("T")

NODE: Final = "node"
_PORT_PATIENCE: Final = 5.0  # seconds in which a predecessor's port may become free
_BEGIN: Final = 15.0  # seconds for a start whose journal another one still holds
_ASK: Final = 5.0  # seconds of one call to the actor
_RECOVER: Final = 3  # times `reregister`, after which a recovery goes on with who has come
_AGAIN: Final = 5.0  # seconds before a start that failed is tried again


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Where a job's supervisor is now. The token is shown by no repr."""

    job: str
    url: str
    token: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """How the supervisor is to be started, at every start of the actor. listen: an address, or "node"."""

    options: Options = dataclasses.field(repr=False)
    listen: str


def _key(job: str) -> str:
    return f"supervisor/{job}"


def start(
    job: str = "job",
    *,
    journal: str | Path | None = None,
    listen: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    policies: Policies | None = None,
    deadlines: Deadlines | None = None,
    runtime: str | Path | None = None,
    cell: int = 1 << 20,
    verify: Literal["sampled", "full"] = "sampled",
    actor: dict[str, Any] | None = None,
    timeout: float = 60.0,
) -> Found:
    """Start the supervisor of a job as a detached actor, unless it is there already, and return when it serves: where it is.
    Blocks `timeout` seconds at most. Whoever started it, and the driver too, may end; `close` ends it.

    journal: a path that every node on which it may be started again can reach. None: it is recovered from the members, each
        time; what people asked for (policies, drains) is then lost.
    listen: the address it listens on; "node": the one by which Ray knows its node, for members on other machines. port: 0
        for a free one; a restart takes the same again if it can. token: None: $ELASTIC_RESHARD_TOKEN, else
        one is made, for all starts.
    actor: options of the Ray actor beside the usual (`num_cpus`, `resources`, `scheduling_strategy`, ...).

    Raises ProtocolError if it cannot be started, SupervisorUnreachable if it does not serve in time."""
    token = token or os.environ.get(places.TOKEN_VARIABLE) or secrets.token_urlsafe(32)
    options = Options(
        job=job, host=listen, port=port, journal=journal, token=token,
        policies=policies or Policies(), deadlines=deadlines or Deadlines(), runtime=runtime, cell=cell, verify=verify,
    )  # fmt: skip
    usual = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 8}
    fixed = {"name": _key(job), "namespace": cluster.NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    handle: Any = ray.remote(Keeper).options(**{**usual, **(actor or {}), **fixed}).remote(_Wanted(options, listen))
    return _ask(handle, job, timeout)


def find(job: str = "job", timeout: float = 30.0) -> Found:
    """Where the supervisor of a job is now, waiting up to `timeout` seconds for it to be there. Raises SupervisorUnreachable;
    Fenced or ProtocolError: why it has ended."""
    return _ask(None, job, timeout)


def client(job: str = "job", timeout: float = 30.0, patience: float = 5.0) -> SupervisorClient:
    """A client of the job's supervisor, as it is now; for one thread, to be closed. timeout: for finding it; patience: as of
    `er.SupervisorClient`. Raises as `find`."""
    found = find(job, timeout)
    return SupervisorClient(found.url, found.token, patience=patience)


def close(job: str = "job", timeout: float = 30.0) -> None:
    """End the job: its members are told that it is over, the actor ends and is not started again. Nothing if there is none.
    Blocks `timeout` seconds at most. Raises SupervisorUnreachable if it did not answer; it is ended all the same."""
    try:
        handle: Any = _named(job)
    except _NotThere:
        return
    try:
        _patiently(lambda: ray.get(handle.close.remote(), timeout=timeout), job, timeout)
    finally:
        ray.kill(handle, no_restart=True)
        for key in [address_key(job), *cluster.kept(worker_key(job, ""))]:
            cluster.drop(key)


def address_key(job: str) -> str:
    """Under which the supervisor's last address is kept."""
    return f"{job}/supervisor"


class _NotThere(SupervisorUnreachable):
    """No actor of that name; never leaves this file."""


def _ask(handle: Any, job: str, timeout: float) -> Found:
    def once() -> Found:
        keeper: Any = handle if handle is not None else _named(job)
        found: Found = ray.get(keeper.place.remote(), timeout=min(_ASK, timeout))
        return found

    return _patiently(once, job, timeout)


def _named(job: str) -> ActorHandle[Any]:
    try:
        found: ActorHandle[Any] = ray.get_actor(_key(job), namespace=cluster.NAMESPACE)
    except ValueError as error:
        raise _NotThere(f"this Ray cluster has no supervisor of job {job}") from error
    return found


def _patiently(once: Callable[[], T], job: str, timeout: float) -> T:
    """Call it until it is answered: an actor that Ray starts again does not answer meanwhile, which means nothing."""
    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_passing),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=1.0),
        stop=tenacity.stop_after_delay(timeout),
        reraise=True,
    )
    try:
        return again(once)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ReshardError):
            raise error.cause from None
        raise
    except (ray.exceptions.RayError, _NotThere) as error:
        if _stillborn(error):
            raise ProtocolError(
                f"the supervisor of job {job} could not be started: {cluster.words_of(error)}"
            ) from error
        why = _fault(job)
        remedy = (
            f"Its last start failed, and is tried again: {why}"
            if why
            else "Start it with on_ray.start, or see where Ray has room for it"
        )
        raise SupervisorUnreachable(
            f"the supervisor of job {job} did not answer in Ray within {timeout:g} s: {cluster.words_of(error)}. {remedy}"
        ) from error


def _fault(job: str) -> str:
    """Why its last start failed; "" if it did not, as far as can be told."""
    try:
        return str(cluster.told(address_key(job)).get("fault", ""))
    except cluster.SIGHTLESS as error:
        return f"perhaps, Ray cannot tell ({cluster.words_of(error)})"


def _passing(error: BaseException) -> bool:
    """Whether it may be otherwise in a moment. What the actor itself raised is an answer."""
    if isinstance(error, ray.exceptions.RayTaskError) or _stillborn(error):
        return False
    return isinstance(error, ray.exceptions.RayActorError | ray.exceptions.GetTimeoutError | _NotThere)


def _stillborn(error: BaseException) -> bool:
    """Whether the actor raised when it was made: then Ray does not start it again."""
    return isinstance(error, ray.exceptions.ActorDiedError) and "creation task" in str(error)


class Keeper:
    """What runs in the actor. Made by `start`."""

    def __init__(self, wanted: _Wanted) -> None:
        self._wanted, self._job = wanted, wanted.options.job
        self._lock, self._closing = threading.Lock(), False
        again = _reconstructed()
        try:
            self._open(again)
        except BaseException as error:
            if not again or isinstance(error, Fenced):
                raise
            # Ray starts an actor again whose process exits, and never one that raised when it was made.
            self._note(error)
            time.sleep(_AGAIN)
            self._exit("supervisor.not_started", error)

    def _open(self, again: bool) -> None:
        place = cluster.here()
        self._address = place.address if self._wanted.listen == NODE else self._wanted.listen
        recover = self._missing() if again and self._wanted.options.journal is None else 0
        self._supervisor = self._begin(int(cluster.told(address_key(self._job)).get("port", 0)), recover)
        _log.info("supervisor.on_ray", job=self._job, node=place.node, term=self._supervisor.term, again=again,
                  url=self._supervisor.url, recover_from=recover)  # fmt: skip
        self._lookout = Lookout(self._job, self.place, self._wanted.options.deadlines.beat)
        threading.Thread(target=self._guard, name="elastic-reshard-guard", daemon=True).start()
        if recover:
            threading.Thread(target=self._hurry, args=(recover,), name="elastic-reshard-recovery", daemon=True).start()

    def _note(self, error: BaseException) -> None:
        """For who looks for it meanwhile."""
        try:
            told = cluster.told(address_key(self._job))
            cluster.keep(address_key(self._job), {**told, "fault": f"{type(error).__name__}: {error}"[:500]})
        except cluster.SIGHTLESS as blind:
            _log.warning("supervisor.not_noted", job=self._job, why=cluster.words_of(blind))

    def _exit(self, event: str, error: BaseException | str) -> NoReturn:
        """This actor is of no use: Ray starts it again."""
        _log.error(event, job=self._job, why=error if isinstance(error, str) else f"{type(error).__name__}: {error}")
        os._exit(1)

    def _missing(self) -> int:
        """How many members must say what they have before anything is decided: those that may still live."""
        workers = Workers(self._job)
        known, seen = workers.look(), workers.seen()
        return sum(lives(worker, seen) for worker in known.values())

    def _begin(self, before: int, recover: int) -> Supervisor:
        """The server, on the port that it had before if nobody else has that."""
        options = dataclasses.replace(self._wanted.options, host=self._address, recover_from=recover)
        if options.port == 0 and before:
            try:
                return self._kept(self._patient(dataclasses.replace(options, port=before), _PORT_PATIENCE))
            except Fenced:
                raise
            except ProtocolError as error:
                _log.warning("supervisor.other_port", job=self._job, port=before, why=str(error))
        return self._kept(self._patient(options, _BEGIN))

    @staticmethod
    def _patient(options: Options, within: float) -> Supervisor:
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(ProtocolError) & tenacity.retry_if_not_exception_type(Fenced),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=1.0),
            stop=tenacity.stop_after_delay(within),
            reraise=True,
        )
        made: Supervisor = again(Supervisor, options)
        return made

    def _kept(self, made: Supervisor) -> Supervisor:
        cluster.keep(address_key(self._job), {"url": made.url, "port": int(made.url.rpartition(":")[2])})
        return made

    def place(self) -> Found:
        """Where the server is. Raises what it ended by."""
        with self._lock:
            self._supervisor.wait(0)
            return Found(self._job, self._supervisor.url, self._supervisor.token)

    def close(self) -> None:
        """The job is over."""
        self._closing = True
        self._lookout.close()
        with self._lock:
            self._supervisor.close(over=True)

    def _guard(self) -> None:
        """A server that ended by itself (its disk is full, say) is started again by Ray. One that was fenced is not."""
        while True:
            watched = self._supervisor
            try:
                watched.wait()
            except Fenced as error:
                _log.error("supervisor.fenced", job=self._job, why=str(error))
                return
            except BaseException as error:  # noqa: BLE001 - whatever ended it: this actor is of no use without it
                self._exit("supervisor.ended", error)
            with self._lock:
                if self._closing:
                    return
                if self._supervisor is watched:
                    self._exit("supervisor.ended", "it was closed, and no other one has begun")

    def _hurry(self, awaited: int) -> None:
        """Members that died while nobody watched will never come: go on with those that have. awaited: how many are awaited;
        who came may die before the next server has heard them, so it is looked at until the recovery is over."""
        beat, patience = self._wanted.options.deadlines.beat, _RECOVER * self._wanted.options.deadlines.reregister
        until = time.monotonic() + patience
        try:
            while not self._closing and (came := self._came()) != 0:
                if came is None or came >= awaited or time.monotonic() < until:
                    time.sleep(beat)
                    continue
                _log.warning("supervisor.recovers_without", job=self._job, came=came, waited=patience)
                self._anew(came)
                awaited, until = came, time.monotonic() + patience
        except Fenced:
            return  # the guard tells
        except BaseException as error:  # noqa: BLE001 - whatever it was: it would recover for ever
            self._exit("supervisor.ended", error)

    def _anew(self, awaited: int) -> None:
        """Another server in this one's place."""
        with self._lock:
            if self._closing:
                return
            port = int(self._supervisor.url.rpartition(":")[2])
            self._supervisor.close(over=False)
            self._supervisor = self._begin(port, awaited)

    def _came(self) -> int | None:
        """How many members have come (at least 1); 0 if the recovery is over, None if that cannot be told now."""
        try:
            found = self.place()
            with SupervisorClient(found.url, found.token) as asking:
                if asking.health()["status"] != "recovering":
                    return 0
                return max(1, len(asking.members()))
        except SupervisorUnreachable:  # slow is not over
            return None


def _reconstructed() -> bool:
    """Whether Ray has started this actor before. If Ray cannot tell, yes: then whatever goes wrong is tried again."""
    try:
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
    except cluster.SIGHTLESS as error:
        _log.warning("supervisor.blind", why=cluster.words_of(error))
        return True
