"""The nursery's own process: loads what movers need, listens, forks. It has no threads. What is said to it: `nursery.py`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import secrets
import select
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

from elastic_reshard.arena.channel import close_all
from elastic_reshard.log import logger
from elastic_reshard.mover.nursery import ANSWER, Birth, hear, nonce_of
from elastic_reshard.protocol.processes import Lock, started
from elastic_reshard.protocol.wire import credentials, proof, proves

__all__ = ["serve"]

_log = logger("nursery")
_STRANGERS: Final = 64
_TURN: Final = 0.25  # seconds between looks at whether it is still needed


def serve(settings: dict[str, Any], lock: Lock) -> None:
    """Load, listen, fork until nobody needs it. Blocks; the caller is a process of its own. lock: signed; it is given back as
    soon as this nursery listens."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    began = time.monotonic()
    for module in (*settings["preload"], "elastic_reshard.mover.process", settings["work"].partition(":")[0]):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the forks
    server = _Server(settings, lock)
    threads = len(os.listdir("/proc/self/task"))
    _log.info("nursery.listening", pid=os.getpid(), threads=threads, seconds=round(time.monotonic() - began, 3))
    server.run()


class _Server:
    def __init__(self, settings: dict[str, Any], lock: Lock) -> None:
        self._settings = settings
        self._sock_path = Path(settings["sock"])
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        fresh = self._sock_path.with_name(self._sock_path.name + ".new")
        fresh.unlink(missing_ok=True)
        self._listener.bind(str(fresh))
        os.chmod(fresh, 0o600)
        self._listener.listen(64)
        fresh.replace(self._sock_path)
        self._inode = os.stat(self._sock_path).st_ino
        lock.clear()
        lock.release()
        self._clients: dict[int, _Client] = {}
        self._children: dict[int, int] = {}  # pidfd -> pid
        self._alone_since = time.monotonic()

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        going = False
        while not going or not self._leave():
            for fd, _ in poll.poll(_TURN * 1000):
                if fd == self._listener.fileno():
                    self._accept(poll)
                elif fd in self._clients:
                    going |= self._hear(self._clients[fd], poll)
                else:
                    self._reap(fd, poll)
            now = time.monotonic()
            if any(client.proved for client in self._clients.values()):
                self._alone_since, going = now, False
            else:
                going |= now - self._alone_since >= self._settings["linger"] or self._superseded()

    def _superseded(self) -> bool:
        try:
            return os.stat(self._sock_path).st_ino != self._inode
        except FileNotFoundError:
            return True

    def _leave(self) -> bool:
        """Remove our files; False if somebody is about to look for us: then later."""
        if self._superseded():
            return True
        lock = Lock(Path(self._settings["lock_path"]))
        if not lock.take():
            return not self._sock_path.parent.exists()
        self._listener.close()
        for path in (self._sock_path, Path(self._settings["log"])):
            path.unlink(missing_ok=True)
        lock.remove()
        lock.release()
        with contextlib.suppress(OSError):  # watchdogs of the job
            self._sock_path.parent.rmdir()
        _log.info("nursery.exits", pid=os.getpid())
        return True

    def _accept(self, poll: select.poll) -> None:
        try:
            sock, _ = self._listener.accept()
        except ConnectionError:
            return
        client = _Client(sock)
        try:
            if credentials(sock).uid != os.getuid() or len(self._clients) >= _STRANGERS:
                raise ConnectionError("not wanted")
            sock.settimeout(ANSWER)
            client.say({"nonce": client.nonce})
        except OSError:  # it has gone again
            sock.close()
            return
        self._clients[sock.fileno()] = client
        poll.register(sock, select.POLLIN)

    def _hear(self, client: _Client, poll: select.poll) -> bool:
        """One packet of a client; whether it said goodbye and was the last."""
        fd = client.sock.fileno()
        try:
            said, fds = hear(client.sock)
            close_all(fds)
            kept = not fds and self._obey(client, said, poll)
            bye = bool(said.get("bye")) and client.proved
        except OSError:
            kept = bye = False
        if not kept or bye:
            poll.unregister(fd)
            del self._clients[fd]
            client.sock.close()
        return bye and not any(other.proved for other in self._clients.values())

    def _obey(self, client: _Client, said: dict[str, Any], poll: select.poll) -> bool:
        """Do what a client says; whether it makes sense. OSError if it does not read."""
        if not client.proved:
            token, mine = self._settings["token"], nonce_of(said)
            if not proves(said.get("proof"), token, "watchdog", client.nonce, mine):
                client.say({"refused": "the token is another"})
                return False
            client.proved = True
            client.say({"proof": proof(token, "nursery", mine, client.nonce)})
            return True
        if "fork" in said:
            try:
                self._fork(client, Birth(**said["fork"]), poll)
            except TypeError:
                return False
            except OSError as error:  # no memory, or at the limit on processes
                client.say({"error": str(error)})
            return True
        return "bye" in said

    def _fork(self, client: _Client, birth: Birth, poll: select.poll) -> None:
        pid = os.fork()
        if pid == 0:
            self._child(birth)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid
        poll.register(pidfd, select.POLLIN)
        _log.info("mover.forked", member=birth.member, mover=birth.mover, pid=pid)
        socket.send_fds(client.sock, [json.dumps({"pid": pid, "start": started(pid)}).encode()], [pidfd])

    def _child(self, birth: Birth) -> None:
        """Become a mover; never returns."""
        code = 1
        try:
            # What is open here is the watchdogs': they would not see our parent's end.
            self._listener.close()
            for client in self._clients.values():
                client.sock.close()
            for pidfd in self._children:
                os.close(pidfd)
            process = importlib.import_module("elastic_reshard.mover.process")
            code = process.main(birth, self._settings["token"], self._settings["work"])
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            logging.shutdown()
            os._exit(code)

    def _reap(self, pidfd: int, poll: select.poll) -> None:
        pid = self._children.pop(pidfd)
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        poll.unregister(pidfd)
        os.close(pidfd)
        _log.info("mover.reaped", pid=pid, status=ended.si_status if ended is not None else None)


class _Client:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.nonce = secrets.token_hex(16)
        self.proved = False

    def say(self, what: dict[str, Any]) -> None:
        self.sock.send(json.dumps(what).encode())
