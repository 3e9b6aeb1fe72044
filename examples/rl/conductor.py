"""Drives one engine group from outside: when a version is there, pause, install, resume, on all its ranks alike."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import ray

import elastic_reshard as er
from elastic_reshard.on_ray import Run
from rl.calls import get
from rl.settings import RunFailed

__all__ = ["Conductor", "Ranks"]

_LOOK = 0.3  # seconds between looks for a group that is not there
_NEWS = 2.0  # seconds of one question for news
_PAUSE, _INSTALL, _RESUME = 20.0, 20.0, 20.0
_TRIES = 5  # installs of one version, after which the group is ended and starts anew
_HANGS = 90.0  # seconds of failed calls, after which a group that had begun is ended: it lives, but does not do as it is told
_REPLY = 10.0  # seconds more than a call's own, for Ray


class Ranks(Protocol):
    """Who knows the actors of a group's present attempt: `on_ray.Groups`, or the baseline's."""

    def workers(self, group: str) -> list[Any]:
        """By rank; empty while there are none."""
        ...

    def status(self) -> dict[str, Run]:
        """How the groups are."""
        ...


class Conductor:
    """Of one group name, over all its attempts. A thread of its own, ended by `close`. step: whose weights it serves."""

    def __init__(self, group: str, ranks: Ranks, hub: Any) -> None:
        self.group, self._ranks, self._hub = group, ranks, hub
        self._stop = threading.Event()
        self._serving = self.step = 0
        self._owner = ""
        self._thread = threading.Thread(target=self._main, name=f"conduct-{group}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the call in hand: seconds."""
        self._stop.set()
        self._thread.join(_INSTALL + _REPLY)

    def _main(self) -> None:
        good = time.monotonic()
        while not self._stop.is_set():
            try:
                workers = self._ranks.workers(self.group)
            except er.ReshardError:  # whoever watches the groups says why
                return
            if not workers:
                self._lost()
                self._stop.wait(_LOOK)
                continue
            try:
                self._serve(workers)
                good = time.monotonic()
            except (ray.exceptions.RayError, er.ReshardError) as error:
                self._note("conduct.broken", why=f"{type(error).__name__}: {error}".splitlines()[0][:300])
                if time.monotonic() - good > _HANGS and self._owner:
                    _kill(workers)
                self._stop.wait(_LOOK)

    def _serve(self, workers: list[Any]) -> None:
        """One question for news, and what follows from it."""
        owner = ray.get(workers[0].who.remote(), timeout=_REPLY)
        if owner != self._owner:
            self._lost()
            self._owner = owner
        ready = ray.get(workers[0].news.remote(self._serving, _NEWS), timeout=_NEWS + _REPLY)
        if ready > self._serving:
            self._refit(workers)

    def _refit(self, workers: list[Any]) -> None:
        begun = time.monotonic()
        self._all(workers, "pause", _PAUSE)
        for _ in range(_TRIES):
            installing = time.monotonic()
            answers = self._all(workers, "install", _INSTALL)
            if all(what == "installed" for what, _ in answers):
                result = answers[0][1]
                self._all(workers, "resume", _RESUME)
                if result["weight_version"] > self._serving:
                    self._serving, self.step = result["weight_version"], int(result["extras"]["step"])
                    self._note(
                        "install", version=self._serving, label=result["label"], step=result["extras"]["step"],
                        line=result["extras"]["line"], paused=time.monotonic() - begun, waited=installing - begun,
                        pull=result["install_pause"],
                    )  # fmt: skip
                return
            refused = [why for what, why in answers if what != "installed"]
            self._note("install.refused", why=str(refused[0])[:300])
            if self._stop.wait(_LOOK) or self._ranks.workers(self.group) != workers:
                return
        _kill(workers)
        raise RunFailed(f"group {self.group} did not install in {_TRIES} tries: it is ended, to be started again")

    def _all(self, workers: list[Any], method: str, within: float) -> list[tuple[str, Any]]:
        calls = [getattr(worker, method).remote(within) for worker in workers]
        answers: list[tuple[str, Any]] = ray.get(calls, timeout=within + _REPLY)
        return answers

    def _lost(self) -> None:
        """What the last incarnation had to do is for others."""
        if self._owner:
            get(self._hub.forget.remote(self._owner))
            self._note("engine.gone", owner=self._owner)
        self._owner, self._serving, self.step = "", 0, 0

    def _note(self, event: str, **fields: Any) -> None:
        self._hub.note.remote(event, time.monotonic(), group=self.group, **fields)


def _kill(workers: list[Any]) -> None:
    for worker in workers:
        ray.kill(worker)
