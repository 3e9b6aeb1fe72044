"""A network that a test can turn round: what connects to one address is passed on to whichever supervisor it names."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self

__all__ = ["Switch"]


class Switch:
    """Passes connections on to `port` of this machine. `to` another port cuts all that there are."""

    def __init__(self, port: int) -> None:
        self._port, self._lock = port, threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def to(self, port: int | None) -> None:
        """From now on to that port; None: to nobody."""
        with self._lock:
            self._port = port or 0
            for sock in self._open:
                _shut(sock)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                port = self._port
            try:
                far = socket.create_connection(("127.0.0.1", port), 5.0)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
            for a, b in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._pass_on, args=(a, b)))
                self._threads[-1].start()

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        try:
            while data := here.recv(1 << 16):
                there.sendall(data)
        except OSError:
            pass
        _shut(here)
        _shut(there)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _shut(self._listener)
        self._listener.close()
        self._threads[0].join()
        self.to(None)
        for thread in self._threads:
            thread.join()
        for sock in self._open:
            sock.close()


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
