"""What a soak does inside the processes of its job: holds steps of the protocol open, and plants bugs that it must catch.

Standard library only: `inject/sitecustomize.py` loads this at the start of watchdogs and nurseries, which load next to
nothing before they have left their starter. Settings come by the environment (`VARIABLE`, JSON of `Injected`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

__all__ = ["PLANTS", "SEEN", "VARIABLE", "Held", "Injected", "environment", "install", "plant"]

VARIABLE = "ELASTIC_RESHARD_SOAK"
PLANTS = {
    "term": "the journal takes what a supervisor of an older term writes",
    "zombie": "a condemned mover that is frozen is woken instead of killed, its mapping still writable",
    "leak": "a mover is forgotten, not kept or ended, when its transfer is over",
}
# What the observer says of each: then the soak has seen it, and ends.
SEEN = {
    "term": "a supervisor of an older term lives on",
    "zombie": "wrong bytes were served",
    "leak": "movers are leaked",
}
_LONGEST = 1.5  # seconds that a step is held at most: less than any silence that is judged


@dataclass(frozen=True)
class Injected:
    """soak: of which run this process is. folder: where the file "hold" holds movers while it is there. plant: "" for none."""

    soak: str
    folder: str
    plant: str = ""


def environment(injected: Injected) -> dict[str, str]:
    """Variables by which what a process starts by exec is reached."""
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here / "inject"), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {VARIABLE: json.dumps(asdict(injected)), "PYTHONPATH": path}


class Held(dict[str, Any]):
    """In place of a process's armed hooks: at some points, now and then, it takes its time; it never does anything else."""

    def __init__(self, points: Sequence[str], chance: float, longest: float, hold: Path | None = None) -> None:
        super().__init__({"": None})  # an empty one is not asked
        self._points, self._chance, self._longest, self._hold = frozenset(points), chance, longest, hold
        self._random = random.Random()

    def get(self, point: str, default: Any = None) -> Any:
        """Nothing is armed there; but it may take a while to say so."""
        if point in self._points:
            if self._random.random() < self._chance:
                time.sleep(self._random.random() * self._longest)
            until = time.monotonic() + _LONGEST
            while self._hold is not None and self._hold.exists() and time.monotonic() < until:
                time.sleep(0.005)
        return default


def install() -> None:
    """Reach this process's modules as they are loaded. Does nothing in a process of no soak."""
    text = os.environ.get(VARIABLE)
    if text:
        injected = Injected(**json.loads(text))
        sys.meta_path.insert(0, _After(_changes(injected)))


def plant(injected: Injected) -> None:
    """The same in a process that has loaded them already."""
    for name, change in _changes(injected).items():
        if name in sys.modules:
            change(sys.modules[name])


def _changes(injected: Injected) -> dict[str, Callable[[ModuleType], None]]:
    def slow(hooks: ModuleType) -> None:
        points = ["mover.started", "mover.planned", "mover.formed", "mover.round"]
        hooks._armed = Held(points, 0.05, 0.05, Path(injected.folder) / "hold")  # type: ignore[attr-defined]

    found: dict[str, Callable[[ModuleType], None]] = {"elastic_reshard.protocol.hooks": slow}
    found |= _PLANTED.get(injected.plant, {})
    return found


class _After(importlib.abc.MetaPathFinder):
    """Finds as usual; some modules are changed as soon as they are loaded."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader, change = spec.loader, self._changes[name]
        load = loader.exec_module

        def changed(module: ModuleType) -> None:
            load(module)
            change(module)

        loader.exec_module = changed  # type: ignore[method-assign]
        return spec


# -- planted bugs


def _unfenced(journal: ModuleType) -> None:
    write = journal.Journal.write

    def unchecked(self: Any, *told: Any, **more: Any) -> None:
        with self._reading() as sql:
            now = sql.execute("SELECT term FROM meta").fetchone()[0]
        mine, self.term = self.term, now
        try:
            write(self, *told, **more)
        finally:
            self.term = mine

    journal.Journal.write = unchecked


def _woken(movers: ModuleType) -> None:
    condemn = movers.Movers._condemn

    def wake(self: Any, action: Any) -> None:
        pid = self.crew.hands[action.mover].pid
        pidfd = self._pidfds.get(action.mover)
        if pidfd is None or movers._runs(pid):
            condemn(self, action)
            return
        kept = os.dup(pidfd)
        self._service.loop.call_soon(self._ended, action.mover)
        self._service.loop.call_later(1.0, signal.pidfd_send_signal, kept, signal.SIGCONT)

    movers.Movers._condemn = wake


def _writing(carry: ModuleType) -> None:
    """What a mover that slept does when it is woken: it ends what it was about to write."""
    landed = carry._Watch.landed
    kept: dict[str, Any] = {}

    def remember(self: Any, number: int) -> None:
        landed(self, number)
        if self._landing is not None:
            layout, rank = self._part.destination
            names = [name for name, t in layout.items() if t.local_shape(rank) is not None]
            kept["slot"] = [(t := self._landing.tensor(name), t.clone()) for name in names]

    def wakes(_: int, __: FrameType | None) -> None:
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            for tensor, old in kept.get("slot", ()):
                tensor.copy_(old)

    carry._Watch.landed = remember
    kept["wakes"] = wakes
    carry._soak_wakes = wakes  # type: ignore[attr-defined]


def _listens(process: ModuleType) -> None:
    """A mover's control thread hears SIGCONT; only a frozen one is ever sent it."""
    run = process._Mover.run

    def hearing(self: Any) -> int:
        carry = sys.modules["elastic_reshard.mover.carry"]
        signal.signal(signal.SIGCONT, carry._soak_wakes)  # type: ignore[attr-defined]
        return int(run(self))

    process._Mover.run = hearing


def _forgetful(movers: ModuleType) -> None:
    act = movers.Movers.act

    def forget(self: Any) -> None:
        act(self)
        scene = self._scene()
        for mover, hand in list(self.crew.hands.items()):
            over = hand.transfer and not hand.busy and hand.transfer not in scene.view.transfers
            if scene.current and over and hand.told is None and not hand.condemned and mover in self._pages:
                del self.crew.hands[mover]
                self._pages.pop(mover).close()
                pidfd = self._pidfds.pop(mover)
                self._service.loop.remove_reader(pidfd)
                os.close(pidfd)
                connection = self._connections.pop(mover, None)
                if connection is not None:
                    connection.mover = ""
                    connection.close("it was forgotten")

    movers.Movers.act = forget


def _clinging(process: ModuleType) -> None:
    """Whom nobody knows goes by itself: one that is leaked does not."""
    from dataclasses import replace

    made = process._Mover.__init__

    def stays(self: Any, *args: Any) -> None:
        made(self, *args)
        self._deadlines = replace(self._deadlines, orphan_hold=1e9)

    opened = process._Line.open

    def once(self: Any) -> None:
        # A watchdog would take a mover that comes back as its own again.
        if not getattr(self, "_was_open", False):
            opened(self)
            self._was_open = self._wire is not None

    process._Mover.__init__ = stays
    process._Line.open = once
    process._Line.refused = property(lambda _: "", lambda _, __: None)


_PLANTED: dict[str, dict[str, Callable[[ModuleType], None]]] = {
    "term": {"elastic_reshard.supervisor.journal": _unfenced},
    "zombie": {
        "elastic_reshard.watchdog.movers": _woken,
        "elastic_reshard.mover.carry": _writing,
        "elastic_reshard.mover.process": _listens,
    },
    "leak": {"elastic_reshard.watchdog.movers": _forgetful, "elastic_reshard.mover.process": _clinging},
}
