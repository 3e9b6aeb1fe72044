"""A member's window: words in shared memory by which the member and its mover take turns on a device. No torch.

The member opens it while it computes nothing; its mover begins a round only while it is open. Each writes its own words and
reads the other's, with a full fence between, so that one of the two always sees the other (Dekker's handshake). Neither can
hold the other by dying: the member of a window that has ended, or is stopped, computes nothing, and a mover that has ended is
not inside.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Final

from elastic_reshard.arena.ledgers import fence
from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.processes import started

__all__ = ["Turn", "Window", "check_window"]

_NBYTES: Final = 4096
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FIELDS: Final = ("open", "member", "member_start", "inside", "mover", "mover_start", "memory")
_AT: Final = {name: at for at, name in enumerate(_FIELDS)}
_LOOK: Final = 0.001  # seconds between looks at a mover that is still inside
_PROOF: Final = 0.05  # seconds between looks at the other's process


def _computes(pid: int, start: int) -> bool:
    """Whether a process is there and not stopped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in "TtZX" and int(fields[19]) == start


class _Page:
    """The words, mapped. Each is 8 bytes, aligned, written whole."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _NBYTES)
        self._words = memoryview(self._map).cast("Q")

    def get(self, name: str) -> int:
        return int(self._words[_AT[name]])

    def set(self, name: str, value: int) -> None:
        self._words[_AT[name]] = value

    def close(self) -> None:
        self._words.release()
        self._map.close()


class Window:
    """The member's side: closed at first. fd: to be handed to the watchdog; stays the window's. Any thread."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("member window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, _NBYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._page: _Page | None = _Page(self.fd)
        self._page.set("member", os.getpid())
        self._page.set("member_start", started(os.getpid()))
        self._lock = threading.Lock()
        self._opened = 0  # times that it is open, of several threads

    def open(self) -> None:
        """Let the mover in from now on. As often opened, as often to be closed."""
        with self._lock:
            self._opened += 1
            if self._page is not None:
                self._page.set("open", 1)

    def close(self, deadline: float) -> bool:
        """Let the mover begin nothing more, and wait until it is outside; at most until `deadline` (time.monotonic). Whether
        it is. Nothing is waited for while somebody else has it open."""
        with self._lock:
            self._opened -= 1
            if not self._opened and self._page is not None:
                self._page.set("open", 0)
                fence()
        proof = 0.0
        while True:
            with self._lock:
                if self._opened or self._page is None or not self._page.get("inside"):
                    return True
                mover = self._page.get("mover"), self._page.get("mover_start")
            now = time.monotonic()
            if now >= proof:
                if started(mover[0]) != mover[1]:
                    return True  # it has ended, with all that it had launched
                proof = now + _PROOF
            if now >= deadline:
                return False
            time.sleep(_LOOK)

    @property
    def inside(self) -> bool:
        """Whether the mover is at work now, as far as its word goes."""
        with self._lock:
            return self._page is not None and bool(self._page.get("inside"))

    @property
    def memory(self) -> int:
        """Bytes of the device that the mover takes for itself, as it has measured; 0 before it used the device."""
        with self._lock:
            return self._page.get("memory") if self._page is not None else 0

    def give_up(self) -> None:
        """Leave it open for good, and let go of it. May be called again."""
        with self._lock:
            if self._page is None:
                return
            page, self._page = self._page, None
            page.set("open", 1)
            page.close()
            os.close(self.fd)


def check_window(fd: int) -> None:
    """ProtocolError if that is no descriptor of a window."""
    try:
        # Without the seals its maker could cut it short under us: SIGBUS.
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        right = sealed and os.fstat(fd).st_size == _NBYTES
    except OSError:  # no memory at all
        right = False
    if not right:
        raise ProtocolError("a member's window that is not sealed, or of another size")


class Turn:
    """The mover's side. Takes the descriptor over, and closes it. ProtocolError if it is no window. One thread."""

    def __init__(self, fd: int) -> None:
        try:
            check_window(fd)
            self._page = _Page(fd)
        except OSError as error:
            raise ProtocolError(f"a member's window that cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        self._page.set("inside", 0)  # of a former mover, which has ended
        self._page.set("mover", os.getpid())
        self._page.set("mover_start", started(os.getpid()))
        self._proof, self._idle = 0.0, False

    def enter(self) -> bool:
        """Begin, if the member lets it: then it waits for `leave`. Never waits."""
        page = self._page
        page.set("inside", 1)
        fence()
        if page.get("open") or not self._member_computes():
            return True
        page.set("inside", 0)
        return False

    @property
    def wanted(self) -> bool:
        """Whether the member has closed it, and computes: leave soon."""
        return not self._page.get("open") and self._member_computes()

    def leave(self) -> None:
        """Nothing of this mover is under way on the device. May be called again."""
        fence()
        self._page.set("inside", 0)

    def uses(self, nbytes: int) -> None:
        """Tell the member what this process takes of the device."""
        self._page.set("memory", nbytes)

    def _member_computes(self) -> bool:
        now = time.monotonic()
        if now >= self._proof:
            self._proof = now + _PROOF
            self._idle = not _computes(self._page.get("member"), self._page.get("member_start"))
        return not self._idle

    def close(self) -> None:
        """Be outside, and unmap; once only."""
        self.leave()
        self._page.close()
