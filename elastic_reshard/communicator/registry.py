"""Every communicator of a process: formed, changed and ended under deadlines, whatever a backend's calls do.

Success of an abort is not that it returned, but that every call on the communicator has (`Report.out`). What does not come
back is named: its process is then to be ended by whoever holds its pidfd, for nothing else frees it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_reshard.communicator.base import Backend, Communicator, Name
from elastic_reshard.communicator.guard import Guarded
from elastic_reshard.communicator.store import ControlStore
from elastic_reshard.errors import ProtocolError, ReshardError, TransferError, TransferTimeout
from elastic_reshard.log import logger
from elastic_reshard.transport.network import Evidence

__all__ = ["Registry", "Report"]

_log = logger("communicator")

# How often something is looked at that nobody signals.
_LOOK_S = 0.002


def _earlier(deadline: float) -> float:
    """What a backend is given: a little less, so that its own error, which knows more, comes before ours."""
    now = time.monotonic()
    return now + 0.9 * (deadline - now)


@dataclass(frozen=True, slots=True)
class Report:
    """How an abort or close went. Each name that was asked is in exactly one of returned, raised, busy and stuck.

    returned: released, with no call inside. raised: the release did, with its text. busy: the release returned but calls have
    not; with their number. stuck: the release, or a formation that was cancelled, did not return in time.
    """

    asked: tuple[Name, ...]
    returned: tuple[Name, ...] = ()
    raised: tuple[tuple[Name, str], ...] = ()
    busy: tuple[tuple[Name, int], ...] = ()
    stuck: tuple[Name, ...] = ()

    @property
    def out(self) -> bool:
        """Every operation has returned. If not, the process is to be condemned."""
        return len(self.returned) == len(self.asked)

    @property
    def why(self) -> str:
        """Why the process is to be condemned; "" if it is not."""
        said = [f"the release of communicator {name} did not return" for name in self.stuck]
        said += [f"the release of communicator {name} raised {text}" for name, text in self.raised]
        said += [f"{count} call(s) on communicator {name} did not return" for name, count in self.busy]
        return "; ".join(said)


@dataclass(slots=True)
class _Held:
    """releases: of each kind ("close", "abort") the one call that was made; an abort may follow a close that hangs."""

    communicator: Communicator
    releases: dict[str, Guarded[None]] = field(default_factory=dict)

    def release(self, kind: str) -> None:
        """Begin to let go, if this kind was not begun before."""
        if kind not in self.releases:
            call = self.communicator.abort if kind == "abort" else self.communicator.close
            self.releases[kind] = Guarded(f"{kind} of communicator {self.communicator.name}", call)

    @property
    def error(self) -> BaseException | None:
        """Of the last release."""
        return list(self.releases.values())[-1].error if self.releases else None

    @property
    def returned(self) -> bool:
        """Every release that was begun is over."""
        return bool(self.releases) and all(call.returned for call in self.releases.values())

    @property
    def gone(self) -> bool:
        """Released, without an error, and nobody inside."""
        return self.returned and self.error is None and self.communicator.busy == 0


class Registry:
    """What this process has formed, by name, and the guarded calls that have not returned. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Name, _Held] = {}
        self._forming: dict[Name, tuple[Guarded[Communicator], ControlStore | None]] = {}

    @property
    def pending(self) -> tuple[str, ...]:
        """What keeps this process from being out of all operations: formations that have not returned, and communicators that
        are open or did not let go. Empty: out. Never blocks."""
        with self._lock:
            self._forget()
            return (*(call.what for call, _ in self._forming.values()), *(f"communicator {n}" for n in self._held))

    def out(self, name: Name) -> bool:
        """Whether nothing of this name keeps the process: neither its formation nor the communicator. Never blocks."""
        with self._lock:
            held = self._held.get(name)
            return name not in self._forming and (held is None or held.gone)

    def form(
        self, backend: Backend, store: ControlStore, rank: int, size: int, deadline: float, evidence: Evidence
    ) -> Communicator:
        """`backend.form`, guarded: ends by `deadline` (time.monotonic) and the moment the store is cancelled, whatever the
        backend does. If that has not returned, `pending` names it until it does, and what it still forms is aborted.

        Raises what the backend raises, the store's error, TransferTimeout, and ProtocolError for a name that was used.
        """
        inner = _earlier(deadline)
        return self._formed(
            store,
            lambda: backend.form(store, rank, size, inner, evidence),
            deadline,
            f"forming {store.name}",
            rank,
            size,
        )

    def join(
        self,
        backend: Backend,
        store: ControlStore,
        rank: int,
        size: int,
        fresh: Sequence[int],
        deadline: float,
        evidence: Evidence,
    ) -> Communicator:
        """`backend.join`, guarded as `form`."""
        inner = _earlier(deadline)
        return self._formed(
            store,
            lambda: backend.join(store, rank, size, fresh, inner, evidence),
            deadline,
            f"joining {store.name}",
            rank,
            size,
        )

    def shrink(
        self, parent: Communicator, name: Name, excluded: Sequence[int], deadline: float, release: float
    ) -> Communicator:
        """`parent.shrink`, guarded, once. However it goes, the parent is aborted then, within `release` seconds.

        TransferError if it failed or was late, or if the parent did not let go: then form anew, under a new name (in a new
        process if `pending` is not empty).
        """
        return self._child(
            parent,
            name,
            None,
            lambda: parent.shrink(name, excluded, deadline),
            deadline,
            release,
            f"shrinking to {name}",
        )

    def grow(
        self, parent: Communicator, store: ControlStore, size: int, deadline: float, release: float
    ) -> Communicator:
        """`parent.grow`, guarded, once; as `shrink`."""
        return self._child(
            parent, store.name, store, lambda: parent.grow(store, size, _earlier(deadline)), deadline, release,
            f"growing to {store.name}",
        )  # fmt: skip

    def adopt(self, communicator: Communicator) -> None:
        """Take in one that was formed without this registry. ProtocolError if its name is in use here."""
        self._hold(communicator)

    def abort_all(self, deadline: float, reason: str, names: Collection[Name] | None = None) -> Report:
        """Abort all communicators and formations, or those named; children too. First each one is marked, then all are
        released, each in a thread of its own: the outcome does not depend on an order. Blocks until no call is inside, at
        most until `deadline` (time.monotonic)."""
        with self._lock:
            chosen = [held.communicator for name, held in self._held.items() if names is None or name in names]
            forming = {n: store for n, (_, store) in self._forming.items() if names is None or n in names}
        chosen = self._with_children(chosen)
        error = TransferError(f"the communicator was aborted: {reason}; form a new one under a new name")
        for communicator in chosen:
            communicator.mark(reason)
        for store in forming.values():
            if store is not None:
                store.cancel(error)
        report = self._release(chosen, "abort", deadline, tuple(forming))
        _log.info("communicator.aborted", reason=reason, out=report.out, asked=len(report.asked), why=report.why)
        return report

    def close(self, communicator: Communicator, deadline: float, gone: Collection[int] = ()) -> Report:
        """End one and its children: politely, but by abort if a rank is gone (`gone`, or by evidence) or a call is inside, for
        a farewell waits for everybody. Blocks until `deadline` (time.monotonic) at most."""
        self._hold(communicator)
        lost = sorted({*gone, *communicator.ended})
        if lost or communicator.busy:
            reason = f"closed without rank(s) {', '.join(map(str, lost))}" if lost else "closed with a call inside"
            return self.abort_all(deadline, reason, [communicator.name])
        return self._release(self._with_children([communicator]), "close", deadline)

    def _formed(
        self,
        store: ControlStore,
        call: Callable[[], Communicator],
        deadline: float,
        what: str,
        rank: int,
        size: int,
    ) -> Communicator:
        guarded = self._begin(store.name, store, call, what)
        while not guarded.wait(min(deadline, time.monotonic() + _LOOK_S)):
            if (store.error is not None or time.monotonic() >= deadline) and guarded.give_up():
                raise store.error or TransferTimeout(
                    f"{what} did not end by its deadline; if it does not end soon, this process is to be ended; form anew "
                    "under a new name",
                    [other for other in range(size) if other != rank],
                )
        communicator = self._end(store.name, guarded)
        if store.error is not None:  # cancelled while the last of it was done
            communicator.mark("cancelled while it formed")
            self._release([communicator], "abort", deadline)
            raise store.error
        return communicator

    def _child(
        self,
        parent: Communicator,
        name: Name,
        store: ControlStore | None,
        call: Callable[[], Communicator],
        deadline: float,
        release: float,
        what: str,
    ) -> Communicator:
        self._hold(parent)
        guarded = self._begin(name, store, call, what)
        child: Communicator | None = None
        failed: ReshardError = TransferTimeout(f"{what} did not end by its deadline; form anew under a new name")
        if guarded.wait(deadline) or not guarded.give_up():
            try:
                child = self._end(name, guarded)
            except ReshardError as error:
                failed = error
        parent.mark(f"left by {what}")
        report = self._release([parent], "abort", time.monotonic() + release)
        if child is None:
            raise failed
        if not report.out:
            self.abort_all(time.monotonic() + release, "its parent did not let go", [name])
            raise TransferError(f"{what}: its parent did not let go ({report.why}); this process is to be ended")
        return child

    def _begin(
        self, name: Name, store: ControlStore | None, call: Callable[[], Communicator], what: str
    ) -> Guarded[Communicator]:
        with self._lock:
            self._refuse(name)
            guarded = Guarded(what, call, lambda communicator: self._late(name, communicator))
            self._forming[name] = guarded, store
            return guarded

    def _end(self, name: Name, guarded: Guarded[Communicator]) -> Communicator:
        with self._lock:
            del self._forming[name]
            communicator = guarded.value
            self._held[name] = _Held(communicator)
            return communicator

    def _late(self, name: Name, communicator: Communicator | None) -> None:
        """A formation ended when nobody waited for it any more: let go of what it made."""
        with self._lock:
            del self._forming[name]
            if communicator is not None:
                communicator.mark("formed too late")
                held = self._held[name] = _Held(communicator)
                held.release("abort")

    def _hold(self, communicator: Communicator) -> _Held:
        with self._lock:
            held = self._held.get(communicator.name)
            if held is None or held.communicator is not communicator:
                self._refuse(communicator.name)
                held = self._held[communicator.name] = _Held(communicator)
            return held

    def _forget(self) -> None:
        """Those that are gone: a registry lives as long as its process, and each communicator keeps a device's memory."""
        self._held = {name: held for name, held in self._held.items() if not held.gone}

    def _refuse(self, name: Name) -> None:
        self._forget()
        if name in self._forming or name in self._held:
            raise ProtocolError(
                f"communicator {name} exists in this process already; a name is used once: take a new epoch or transfer"
            )

    def _with_children(self, communicators: Sequence[Communicator]) -> list[Communicator]:
        """Parents first, each once. A backend's children do not inherit an abort."""
        found: dict[int, Communicator] = {}
        left = list(communicators)
        while left:
            one = left.pop(0)
            if id(one) not in found:
                found[id(one)] = one
                left.extend(one.children)
        return list(found.values())

    def _release(
        self, chosen: Sequence[Communicator], kind: str, deadline: float, forming: Sequence[Name] = ()
    ) -> Report:
        held = {c.name: self._hold(c) for c in chosen}
        for one in held.values():
            one.release(kind)
        while time.monotonic() < deadline:
            if all(one.gone or one.error is not None for one in held.values()) and not self._still(forming):
                break
            time.sleep(_LOOK_S)
        report = self._report(held, forming)
        with self._lock:
            self._forget()
        return report

    def _still(self, forming: Collection[Name]) -> list[Name]:
        """Those that still form, or have formed just now and are not released yet."""
        with self._lock:
            return [n for n in forming if n in self._forming or (n in self._held and not self._held[n].gone)]

    def _report(self, held: Mapping[Name, _Held], forming: Sequence[Name]) -> Report:
        stuck = self._still(forming)
        returned = [name for name in forming if name not in stuck]
        raised: list[tuple[Name, str]] = []
        busy: list[tuple[Name, int]] = []
        for name, one in held.items():
            inside = one.communicator.busy
            if not one.returned:
                stuck.append(name)
            elif one.error is not None:
                raised.append((name, f"{type(one.error).__name__}: {one.error}"))
            elif inside:
                busy.append((name, inside))
            else:
                returned.append(name)
        return Report((*forming, *held), tuple(returned), tuple(raised), tuple(busy), tuple(stuck))
