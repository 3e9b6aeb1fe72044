"""The store by which the ends of one communicator meet: local, fed by the control plane, cancellable. No sockets.

What a backend sets is handed up by `on_set`; what the others' stores were told comes down by `feed`. So no server can die
or freeze under a formation, and a formation that waits for somebody who will never come ends the moment it is cancelled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from elastic_reshard.communicator.names import Name
from elastic_reshard.errors import ProtocolError, ReshardError, TransferTimeout

__all__ = ["ControlStore"]

# A wait without a timeout of its own, in seconds; formations pass theirs.
_LIMIT_S = 30.0


class ControlStore(Store):
    """A `torch.distributed.Store` for one communicator, `name`. Any thread may call anything at any time.

    on_set(key, value): called in the setting thread for each value of this member's. on_blocked(): called once, in the waiting
    thread, when this member first waits for a value of another, be it there already or not: what it sets without hearing
    others, it has set by then, and it is to be told to them.
    Not for PrefixStore, which needs a C++ store: a store serves one communicator, so its keys need no prefix.
    """

    def __init__(
        self,
        name: Name,
        on_set: Callable[[str, bytes], None] | None = None,
        on_blocked: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self._on_set, self._on_blocked = on_set, on_blocked
        self._values: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._limit = _LIMIT_S
        self._error: ReshardError | None = None
        self._until: float | None = None
        self._stop: Callable[[], None] | None = None
        self._vet: tuple[tuple[str, ...], Callable[[Mapping[str, bytes]], None]] | None = None

    # For the control plane.

    def feed(self, values: Mapping[str, bytes]) -> None:
        """Put in what others told; the same again does no harm. ProtocolError if a key has another value already."""
        with self._changed:
            unlike = sorted(key for key, value in values.items() if self._values.get(key, value) != value)
            if unlike:
                raise ProtocolError(
                    f"communicator {self.name}: the values of {unlike} were told twice and differ; two members have one rank, "
                    "or values of another epoch came in: form it anew under a new name"
                )
            self._values.update(values)
            self._changed.notify_all()

    def cancel(self, error: ReshardError) -> None:
        """End every wait now, and every later one, with `error`. The first error stays. Never blocks."""
        with self._changed:
            if self._error is None:
                self._error = error
            stop, self._stop = self._stop, None
            self._changed.notify_all()
        if stop is not None:  # what it ends may hang, so it has a thread of its own
            threading.Thread(target=stop, name=f"stop {self.name}", daemon=True).start()

    @property
    def error(self) -> ReshardError | None:
        """Why it was cancelled, or what `vet` refused; None while it serves."""
        with self._changed:
            return self._error

    @property
    def own(self) -> dict[str, bytes]:
        """What this member has set: it must reach the others' stores."""
        with self._changed:
            return dict(self._own)

    # For backends.

    def hold_until(self, deadline: float) -> None:
        """Waits for values end then (time.monotonic), whatever timeouts the backend's library gives."""
        with self._changed:
            self._until = deadline

    def when_cancelled(self, stop: Callable[[], None] | None) -> None:
        """Call `stop` in a thread of its own when the store is cancelled; at once if it was already; None: no more."""
        with self._changed:
            self._stop = stop
            error = self._error
        if error is not None and stop is not None:
            self.cancel(error)

    def vet(self, keys: Iterable[str], look: Callable[[Mapping[str, bytes]], None]) -> None:
        """Have the first wait for another's value wait for `keys` too, and then, in its thread, `look` judge the values:
        what it raises cancels the store."""
        with self._changed:
            self._vet = tuple(keys), look

    def missing(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Those of `keys` that are not there. Never blocks."""
        with self._changed:
            return tuple(key for key in keys if key not in self._values)

    # What torch calls. Names and signatures are dist.Store's.

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value of this member's, and hand it up. Raises the store's error when it was cancelled."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._refuse()
            self._values[key] = self._own[key] = data
            self._changed.notify_all()
        if self._on_set is not None:
            self._on_set(key, data)

    def get(self, key: str) -> bytes:
        """The value; blocks until it is there, at most the store's own timeout."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As `get`, for several."""
        self.wait(list(keys))
        with self._changed:
            return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """As `set`, for several."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are there. TransferTimeout after `timeout` (or the store's own, or `hold_until`); the store's
        error at once when it is cancelled."""
        deadline = time.monotonic() + (self._limit if timeout is None else timeout.total_seconds())
        with self._changed:
            deadline = deadline if self._until is None else self._until
            vet = self._vet if any(key not in self._own for key in keys) else None
            if vet is not None:
                keys, self._vet = [*keys, *vet[0]], None
        self._say_blocked(keys)
        with self._changed:
            while True:
                self._refuse()
                absent = [key for key in keys if key not in self._values]
                if not absent:
                    break
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TransferTimeout(
                        f"communicator {self.name}: the deadline passed while waiting for the values of {absent}; those who "
                        "set them never came: form it anew without them"
                    )
                self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
            values = dict(self._values)
        if vet is not None:
            self._judge(vet[1], values)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there. Never blocks."""
        with self._changed:
            self._refuse()
            return all(key in self._values for key in keys)

    def add(self, key: str, value: int) -> int:
        """Count up, in this process only: no backend of ours counts over members, and names come from the coordinator."""
        with self._changed:
            self._refuse()
            total = int(self._values.get(key, b"0")) + value
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value of this member's."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            data = self._values.get(key, b"") + data
        self.set(key, data)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set if the value is `expected`, or is not there and `expected` is empty; the value after it."""
        old = expected.encode() if isinstance(expected, str) else bytes(expected)
        with self._changed:
            self._refuse()
            found = self._values.get(key, b"")
        if found != old:
            return found
        self.set(key, desired)
        return desired.encode() if isinstance(desired, str) else bytes(desired)

    def delete_key(self, key: str) -> bool:
        """Forget a value here; others keep it."""
        with self._changed:
            self._own.pop(key, None)
            return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many values are here."""
        with self._changed:
            return len(self._values)

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set are there."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """For waits that give none."""
        with self._changed:
            self._limit = timeout.total_seconds()

    def _refuse(self) -> None:
        if self._error is not None:
            raise self._error

    def _say_blocked(self, keys: Sequence[str]) -> None:
        with self._changed:
            blocked = self._on_blocked if self._error is None and any(k not in self._own for k in keys) else None
            if blocked is not None:
                self._on_blocked = None
        if blocked is not None:
            blocked()

    def _judge(self, look: Callable[[Mapping[str, bytes]], None], values: Mapping[str, bytes]) -> None:
        try:
            look(values)
        except ReshardError as error:
            self.cancel(error)
            raise
